"""vLLM's grouping and placement: which layers share a block table, and at which byte of a block each layer's page lies.

    block-outermost (packed): every block holds one page of each layer of a group; groups alias from byte 0
      group 0  [ indexer x 21 | C4 x 21 | C128 x 20          ]    <- widest group sets the block stride
      group 1  [ SWA x 22              |         unowned     ]
    layer-outermost: every layer has a region of its own
      [ layer 0: block 0, block 1, ... ][ layer 1: block 0, block 1, ... ]

The rules are vLLM 0.32.0 `v1/core/kv_cache_utils.py` and 0.33.0 `v1/core/kv_cache_planning.py` (get_kv_cache_groups,
_get_packed_kv_cache_groups, get_kv_cache_config_from_groups), which agree for MLA caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from kvbridge.engine import EngineError
from kvbridge.engines.vllm.specs import CacheSpec, SpecKind, round_up

_LONGEST_CHUNK_SEARCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table, in vLLM's order."""

    specs: Mapping[str, CacheSpec]

    @property
    def page_bytes(self) -> int:
        """Bytes that the group's layers need of a block."""
        return sum(spec.page_bytes for spec in self.specs.values())


@dataclass(frozen=True, slots=True)
class Placement:
    """Layers of one spec inside one group: layer i's block b starts at offset + i * layer stride + b * block stride."""

    group: int
    spec: CacheSpec
    layers: tuple[str, ...]
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int


def make_groups(specs: Mapping[str, CacheSpec], *, packed: bool) -> tuple[Group, ...]:
    """Splits layers into groups.

    Args:
        specs: Every layer's cache, in the order the layers are built.
        packed: Whether blocks are outermost.

    Raises:
        EngineError: vLLM refuses these caches.
    """
    if len(set(specs.values())) <= 1 or len({spec.bucket for spec in specs.values()}) == 1:
        return (Group(dict(specs)),) if specs else ()
    if packed and len({spec.page_bytes for spec in specs.values()}) > 1:
        return tuple(_packed_groups(specs))
    return tuple(_equal_page_groups(_unify_pages(specs)))


def _packed_groups(specs: Mapping[str, CacheSpec]) -> Iterable[Group]:
    buckets: dict[tuple[SpecKind, int, int], dict[str, CacheSpec]] = {}
    for name, spec in specs.items():
        buckets.setdefault(spec.bucket, {})[name] = spec
    shapes = [_Bucket.of(bucket) for bucket in buckets.values()]
    mixed = [bucket.repeats for bucket in shapes if bucket.balanced and len(bucket.by_page) > 1]
    repeats_per_group = (
        _least_padding([bucket.repeats for bucket in shapes if bucket.balanced], lower_bound=max(mixed))
        if mixed
        else None
    )
    counts = [
        _ceil_div(bucket.repeats, repeats_per_group) if bucket.balanced and repeats_per_group else 1
        for bucket in shapes
    ]
    # A block must hold the widest group however the state caches end up split; those can go down to one state a group.
    states = [bucket.is_state(split=repeats_per_group is not None) for bucket in shapes]
    anchor_bytes = max(
        bucket.widest_group_bytes(len(bucket.specs) if state else count)
        for bucket, count, state in zip(shapes, counts, states, strict=True)
    )
    for bucket, count, state in zip(shapes, counts, states, strict=True):
        groups = count
        if anchor_bytes and state:
            states_per_block = max(anchor_bytes // bucket.first.page_bytes, 1)
            groups = max(count, _ceil_div(len(bucket.specs), states_per_block))
        if groups == 1:
            yield Group(bucket.specs)
            continue
        repeats = list(zip(*bucket.by_page.values(), strict=False))
        for index in range(groups):
            yield Group({name: bucket.specs[name] for repeat in repeats[index::groups] for name in repeat})


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers that may share a block table, sorted by page size."""

    specs: dict[str, CacheSpec]
    by_page: dict[int, list[str]]

    @classmethod
    def of(cls, specs: dict[str, CacheSpec]) -> _Bucket:
        by_page: dict[int, list[str]] = {}
        for name, spec in specs.items():
            by_page.setdefault(spec.page_bytes, []).append(name)
        return cls(specs, by_page)

    @property
    def first(self) -> CacheSpec:
        return next(iter(self.specs.values()))

    @property
    def balanced(self) -> bool:
        """Whether every page size has equally many layers, so that the bucket is a repeated pattern."""
        return len({len(names) for names in self.by_page.values()}) == 1

    @property
    def repeats(self) -> int:
        """Layers of the most frequent page size."""
        return Counter(spec.page_bytes for spec in self.specs.values()).most_common(1)[0][1]

    def is_state(self, *, split: bool) -> bool:
        """Whether the bucket may be split to fit a block that other buckets already need."""
        return self.first.kind is SpecKind.RING or (not split and self.first.kind is SpecKind.SLIDING)

    def widest_group_bytes(self, groups: int) -> int:
        return sum(_ceil_div(len(names), groups) * page for page, names in self.by_page.items())


def _least_padding(values: Sequence[int], *, lower_bound: int) -> int:
    """The chunk size to which all values round up with the least padding; the largest of equals."""
    candidates = range(max(1, lower_bound), min(max(values), _LONGEST_CHUNK_SEARCH) + 1)
    if not candidates:
        return max(1, lower_bound)
    return min(candidates, key=lambda chunk: (sum(-value % chunk for value in values), -chunk))


def _unify_pages(specs: Mapping[str, CacheSpec]) -> dict[str, CacheSpec]:
    """Gives all layers one page size by enlarging blocks."""
    largest = max(spec.page_bytes for spec in specs.values())
    unified = {}
    for name, spec in specs.items():
        if largest % spec.page_bytes:
            sizes = sorted({spec.page_bytes for spec in specs.values()})
            raise EngineError(
                f"layer {name}: got pages of {spec.page_bytes} bytes beside {sizes} in a layer-outermost layout, "
                "expected sizes that divide the largest; vLLM refuses such a model"
            )
        wider = spec.with_block(spec.block_tokens * (largest // spec.page_bytes))
        if wider.page_bytes != largest:
            raise EngineError(
                f"layer {name}: got {wider.page_bytes} bytes in a block of {wider.block_tokens} tokens, "
                f"expected {largest}; vLLM refuses such a model"
            )
        unified[name] = wider
    return unified


def _equal_page_groups(specs: Mapping[str, CacheSpec]) -> Iterable[Group]:
    """Groups of equally many layers, for caches of several kinds but one page size."""
    kinds: dict[CacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    sizes = [len(names) for names in kinds.values()]
    group_size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
    for names in kinds.values():
        groups = _ceil_div(len(names), group_size)
        for index in range(groups):
            yield Group({name: specs[name] for name in names[index::groups]})


def block_bytes(groups: Sequence[Group], *, packed: bool) -> int:
    """Bytes that one block takes of the memory budget: the widest group's.

    Args:
        groups: All groups.
        packed: Whether blocks are outermost.
    """
    if not packed:
        return max(sum(_padded_page(spec) for spec in group.specs.values()) for group in groups)
    alignments = {spec.block_stride_alignment for group in groups for spec in group.specs.values()}
    return round_up(max(group.page_bytes for group in groups), lcm(*alignments))


def place(groups: Sequence[Group], *, packed: bool, num_blocks: int) -> tuple[Placement, ...]:
    """Places every layer in the one allocation.

    Args:
        groups: All groups.
        packed: Whether blocks are outermost.
        num_blocks: Blocks of the allocation; offsets depend on it only where layers are outermost.

    Raises:
        EngineError: vLLM refuses to lay these groups out.
    """
    sizes = {spec.page_bytes for group in groups for spec in group.specs.values()}
    if not packed and len(sizes) > 1 and len(groups) > 1:
        raise EngineError(
            f"page sizes: got {sorted(sizes)} in {len(groups)} groups, expected one size in a layer-outermost layout; "
            "vLLM refuses such a model"
        )
    slab_bytes = block_bytes(groups, packed=True) if packed else 0
    placements = []
    for index, group in enumerate(groups):
        by_spec: dict[CacheSpec, list[str]] = {}
        for name, spec in group.specs.items():
            by_spec.setdefault(spec, []).append(name)
        offset = 0
        for spec, names in by_spec.items():
            stride = slab_bytes if packed else _padded_page(spec)
            layer_stride = spec.page_bytes if packed else stride * num_blocks
            placements.append(Placement(index, spec, tuple(names), offset, layer_stride, stride))
            offset += len(names) * layer_stride
    return tuple(placements)


def _padded_page(spec: CacheSpec) -> int:
    return round_up(spec.page_bytes, spec.block_stride_alignment)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
