"""Where the layers of a manifest lie: inside their storage, inside their slab, and not on each other.

    slab of block b   [L1 page][L3 page][L5 page]......slack......   policy packed: one stride, many offsets
    group A over it   [C4 C4 C4 | C128 C128 | indexer]               layers of one group share block ids: disjoint
    group B over it   [SWA SWA SWA SWA SWA]                          another group may cover the same bytes

Layers are strided runs of pages (see `overlap.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbridge.documents import DeclaredManifest, DeclaredPool
from kvbridge.errors import AlignmentError, LayoutError
from kvbridge.layout import PaddingPolicy, PoolKind
from kvbridge.manifest import LayerPlacement, Manifest, Pool
from kvbridge.overlap import OPEN_PAGES, PageRun, first_overlap, overlapping_pairs
from kvbridge.records import get_record
from kvbridge.rules import Finding, finding, finding_of

AnyManifest = DeclaredManifest | Manifest
AnyPool = DeclaredPool | Pool


def pools_of(manifest: AnyManifest) -> tuple[AnyPool, ...]:
    """Pools of either kind of manifest."""
    return (*manifest.pools,)


def pool_labels(manifest: AnyManifest) -> tuple[str, ...]:
    """A name for each pool that is unique in its manifest: `c4`, or `swa@g0`, `mla/scales` and so on where needed."""
    pools = pools_of(manifest)
    labels = [pool.pool + (f"/{pool.plane}" if pool.plane else "") for pool in pools]
    counts = Counter(labels)
    labels = [
        f"{label}@{pool.group}" if counts[label] > 1 and pool.group else label
        for label, pool in zip(labels, pools, strict=True)
    ]
    counts = Counter(labels)
    labels = [
        f"{label}/{pool.record}" if counts[label] > 1 and pool.record else label
        for label, pool in zip(labels, pools, strict=True)
    ]
    counts = Counter(labels)
    return tuple(f"{label}#{place}" if counts[label] > 1 else label for place, label in enumerate(labels))


def layer_findings(manifest: AnyManifest, pool: AnyPool, label: str) -> Iterator[Finding]:
    """Findings on the layers of one pool, each by itself and against `layer_stride_bytes`."""
    if pool.kind is PoolKind.INDEX_ONLY:
        return
    sizes = {storage.id: storage.storage_bytes for storage in manifest.storages}
    for place, layer in enumerate(pool.layers):
        yield from _layer_findings(pool, label, place, layer, sizes)
    yield from _layer_stride_findings(pool, label)


def _layer_findings(
    pool: AnyPool, label: str, place: int, layer: LayerPlacement, sizes: dict[str, int | None]
) -> Iterator[Finding]:
    field = f"layers[{place}]"
    storage = layer.storage or pool.storage
    if storage is None:
        yield finding("storage-missing", f"{field}.storage", got=None, expected="a storage id", pool=label)
    elif storage not in sizes:
        expected = f"one of {sorted(sizes)}"
        yield finding("storage-unknown", f"{field}.storage", got=storage, expected=expected, pool=label)
    offset, stride, payload = layer.offset_bytes, pool.page_stride_bytes, pool.payload_bytes
    if offset < 0:
        yield finding("layer-offset", f"{field}.offset_bytes", got=offset, expected="at least 0", pool=label)
        return
    needed = _element_bytes(pool)
    if offset % needed:
        error = AlignmentError(
            "offset_bytes", got=offset, expected=f"a multiple of {needed}", detail=f"widest element of {pool.record}"
        )
        yield finding_of(error, pool=label, place=field)
    if pool.padding.policy is PaddingPolicy.PACKED and 0 < payload <= stride:
        yield from _slab_findings(pool, label, field, offset)
    size = sizes.get(storage or "")
    pages = pool.num_pages
    if size is not None and pages is not None and pages > 0 and stride > 0 and payload > 0:
        end = offset + (pages - 1) * stride + payload
        if end > size:
            yield finding(
                "layer-storage-overrun",
                f"{field}.offset_bytes",
                got=offset,
                expected=f"at most {size - (end - offset)}",
                detail=f"layer {layer.name}: {offset} + {pages - 1} * {stride} + {payload} = {end}, storage {storage} "
                f"has {size}, excess {end - size}",
                pool=label,
            )


def _slab_findings(pool: AnyPool, label: str, field: str, offset: int) -> Iterator[Finding]:
    stride = pool.page_stride_bytes
    for code, name, extent in (
        ("layer-outside-slab", "payload", pool.payload_bytes),
        ("tail-overlap", "page", pool.page_bytes or pool.payload_bytes),
    ):
        if offset + extent > stride:
            yield finding(
                code,
                f"{field}.offset_bytes",
                got=offset,
                expected=f"at most {stride - extent}",
                detail=f"{offset} + {name} {extent} = {offset + extent}, slab {stride}",
                pool=label,
            )
            return


def _layer_stride_findings(pool: AnyPool, label: str) -> Iterator[Finding]:
    if pool.layer_stride_bytes is None:
        return
    for place in range(1, len(pool.layers)):
        before, layer = pool.layers[place - 1], pool.layers[place]
        if (before.storage or pool.storage) == (layer.storage or pool.storage):
            expected = before.offset_bytes + pool.layer_stride_bytes
            if layer.offset_bytes != expected:
                yield finding(
                    "layer-stride",
                    f"layers[{place}].offset_bytes",
                    got=layer.offset_bytes,
                    expected=expected,
                    detail=f"layer_stride_bytes {pool.layer_stride_bytes}",
                    pool=label,
                )
                return


@dataclass(frozen=True, slots=True)
class _Placed:
    """One layer's pages in a storage."""

    group: str | None
    label: str
    field: str
    name: str
    payload: PageRun
    page: PageRun


def sharing_findings(manifest: AnyManifest) -> Iterator[Finding]:
    """Layers over the same bytes: an error or, for tail pads, a warning in a group; between groups a note."""
    storages: dict[str, list[_Placed]] = defaultdict(list)
    for pool, label in zip(pools_of(manifest), pool_labels(manifest), strict=True):
        for place, layer in enumerate(pool.layers):
            storage = layer.storage or pool.storage
            placed = _placed(pool, label, place, layer)
            if storage is not None and placed is not None:
                storages[storage].append(placed)
    for storage, layers in storages.items():
        yield from _storage_sharing(storage, layers)


def _placed(pool: AnyPool, label: str, place: int, layer: LayerPlacement) -> _Placed | None:
    stride, payload = pool.page_stride_bytes, pool.payload_bytes
    if pool.kind is PoolKind.INDEX_ONLY or stride <= 0 or payload <= 0 or layer.offset_bytes < 0:
        return None
    pages = pool.num_pages
    if pages is None:  # an open count repeats a slab without end; elsewhere the offsets depend on it
        pages = OPEN_PAGES if pool.padding.policy is PaddingPolicy.PACKED else 1
    runs = [
        PageRun(layer.offset_bytes, stride, max(pages, 0), extent)
        for extent in (payload, max(pool.page_bytes or payload, payload))
    ]
    return _Placed(pool.group, label, f"layers[{place}].offset_bytes", layer.name, *runs)


def _storage_sharing(storage: str, layers: Sequence[_Placed]) -> Iterator[Finding]:
    told: set[tuple[str, str]] = set()
    aliases: dict[str, None] = {}
    example = ""
    for one, other, page, other_page in overlapping_pairs([layer.page for layer in layers]):
        first, second = layers[one], layers[other]
        if first.group != second.group:
            aliases |= dict.fromkeys((str(first.group), str(second.group)))
            example = example or f"{first.name} page {page}, {second.name} page {other_page}"
            continue
        if (second.label, second.field) in told:  # one finding a layer
            continue
        told.add((second.label, second.field))
        yield _shared_in_group(storage, first, second, (page, other_page))
    if aliases:
        yield finding(
            "group-alias",
            "group",
            got=f"groups {', '.join(sorted(aliases))} over the same bytes",
            expected="ownership by block id",
            detail=f"storage {storage}: {example}",
        )


def _shared_in_group(storage: str, first: _Placed, second: _Placed, tail_hit: tuple[int, int]) -> Finding:
    hit = first_overlap(first.payload, second.payload)
    run = first.payload if hit else first.page
    page, other_page = hit or tail_hit
    start = first.payload.offset + page * run.stride
    other_start = second.payload.offset + other_page * second.payload.stride
    return finding(
        "group-overlap" if hit else "tail-overlap",
        second.field,
        got=second.payload.offset,
        expected=f"no byte of layer {first.name}",
        detail=f"storage {storage}: page {page} of {first.name} is {start} .. {start + run.extent}, page {other_page} "
        f"of {second.name} starts at {other_start}",
        pool=second.label,
    )


def _element_bytes(pool: AnyPool) -> int:
    try:
        return get_record(pool.record).element_bytes(pool.plane)
    except LayoutError:
        return 1
