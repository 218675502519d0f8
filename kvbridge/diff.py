"""Explains two manifests: engine, model, rank, options, and every pool against its peer.

    a: vllm swa 64 rows, c4 ...            b: sglang swa 256 rows, c4 ...
      swa   repack, 64 rows: 36864 (data) + 512 (scales)
      c4    copy, 37376 (payload)
      options.speculative-tokens 0 | 1     incompatible: the named field

Pools meet by name, plane and record. What decides whether bytes of one engine mean the same in the other is compared:
layouts pairwise, model, model revision, speculative depth, decode context parallelism, number of layers. Options that
change no byte are listed without breaking anything, whether set on one side or on both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvbridge.layout import PageLayout, PoolKind
from kvbridge.layout_diff import (
    CopyUnit,
    FieldDifference,
    FirstDifference,
    LayoutDiff,
    Relation,
    copy_unit,
    diff_layouts,
    first_row,
)
from kvbridge.manifest import Manifest

__all__ = [
    "CopyUnit",
    "FieldDifference",
    "FirstDifference",
    "LayoutDiff",
    "ManifestDiff",
    "PoolDiff",
    "Relation",
    "copy_unit",
    "diff_layouts",
    "diff_manifests",
    "first_row",
]

_DEPTH_OPTIONS = ("speculative-tokens", "num-speculative-tokens", "speculative-num-draft-tokens")
_REVISION_OPTIONS = ("revision", "model-revision")
_DEPTH = "draft tokens decide how many rows a step writes, and which of them are kept"
_REVISION = "other weights wrote the values"


@dataclass(frozen=True, slots=True)
class PoolDiff:
    """One pool of both manifests, or of one.

    Attributes:
        pool: Name, with the plane where there is one.
        relation: How the one's pages become the other's.
        layout: What differs; None where only one side has the pool.
        differences: Fields outside the layout: number of layers, or the side that lacks the pool.
    """

    pool: str
    relation: Relation
    layout: LayoutDiff | None
    differences: tuple[FieldDifference, ...] = ()

    def document(self) -> dict[str, Any]:
        """JSON form."""
        layout = self.layout.document() if self.layout else {}
        own = [difference.document() for difference in self.differences]
        return {
            "pool": self.pool,
            "relation": self.relation.value,
            "differences": [*own, *layout.get("differences", [])],
            "copy_unit": layout.get("copy_unit"),
            "first_difference": layout.get("first_difference"),
            "reason": layout.get("reason"),
        }


@dataclass(frozen=True, slots=True)
class ManifestDiff:
    """What two manifests differ in.

    Attributes:
        relation: The worst of all pools and fields.
        differences: Fields outside the pools.
        pools: Every pool of either side.
    """

    relation: Relation
    differences: tuple[FieldDifference, ...]
    pools: tuple[PoolDiff, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs at all."""
        return self.relation is Relation.SAME and not self.differences and not any(p.differences for p in self.pools)

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "relation": self.relation.value,
            "differences": [difference.document() for difference in self.differences],
            "pools": [pool.document() for pool in self.pools],
        }


def diff_manifests(a: Manifest, b: Manifest) -> ManifestDiff:
    """Compares two manifests.

    Args:
        a: One side.
        b: The other.

    Returns:
        Every difference, with the worst relation; where it is copy or repack, every pool states its copy unit.
    """
    differences = tuple(_field_differences(a, b))
    pools = tuple(_pool_diffs(a, b))
    relations = [pool.relation for pool in pools]
    relations += [Relation.INCOMPATIBLE for difference in differences if difference.breaks]
    relation = max(relations, key=lambda known: known.rank, default=Relation.SAME)
    return ManifestDiff(relation, differences, pools)


def _field_differences(a: Manifest, b: Manifest) -> Iterator[FieldDifference]:
    same_engine = a.engine.name == b.engine.name
    fields: list[tuple[str, Any, Any, str, bool]] = [
        ("engine.name", a.engine.name, b.engine.name, "nothing by itself: pools are compared", False),
        ("engine.version", a.engine.version, b.engine.version, "nothing by itself: pools are compared", False),
        ("model", a.model, b.model, "other weights wrote the values", None not in (a.model, b.model)),
    ]
    for axis, consequence in (
        ("tensor_parallel", "nothing: MLA caches are whole on every rank"),
        ("pipeline_parallel", "each side holds other layers"),
        ("decode_context_parallel", "each rank holds other tokens"),
    ):
        for end in ("size", "rank"):
            name = f"{axis}_{end}"
            values = getattr(a.rank, name), getattr(b.rank, name)
            fields.append((f"rank.{name}", *values, consequence, axis == "decode_context_parallel"))
    for field, one, other, consequence, breaks in fields:
        if one != other and (field != "engine.version" or same_engine):
            yield FieldDifference(field, one, other, consequence, breaks)
    yield from _named_option(a, b, _DEPTH_OPTIONS, _DEPTH, breaks=same_engine)
    yield from _named_option(a, b, _REVISION_OPTIONS, _REVISION, breaks=True)
    if same_engine:
        yield from _other_options(a, b)


def _named_option(
    a: Manifest, b: Manifest, names: tuple[str, ...], consequence: str, *, breaks: bool
) -> Iterator[FieldDifference]:
    """An option that engines spell differently; 0 and not given are the same."""
    (field, one), (other_field, other) = _option(a, names), _option(b, names)
    if one != other and (one or other):
        # Engines count draft tokens differently, so across engines only "on" against "off" is certain.
        certain = breaks or not (one and other)
        named = " | ".join(dict.fromkeys(name for name in (field, other_field) if name))
        yield FieldDifference(f"options.{named}", one, other, consequence, certain)


def _option(manifest: Manifest, names: tuple[str, ...]) -> tuple[str, int | str | bool | None]:
    for name, value in manifest.options.items():
        if name.replace("_", "-") in names:
            return name, value or None
    return "", None


def _other_options(a: Manifest, b: Manifest) -> Iterator[FieldDifference]:
    special = {*_DEPTH_OPTIONS, *_REVISION_OPTIONS}
    for name in sorted(a.options.keys() | b.options.keys()):
        one, other = a.options.get(name), b.options.get(name)
        if one != other and name.replace("_", "-") not in special:
            yield FieldDifference(f"options.{name}", one, other, "nothing beyond what the pools show")


def _pool_diffs(a: Manifest, b: Manifest) -> Iterator[PoolDiff]:
    here, there = _gather(a), _gather(b)
    for name in dict.fromkeys((*here, *there)):
        yield from _paired(name, list(here.get(name, [])), list(there.get(name, [])))


@dataclass(frozen=True, slots=True)
class _Held:
    """A layout and the layers that have it: pools of several groups with one layout count as one."""

    layout: PageLayout
    layers: int


def _gather(manifest: Manifest) -> dict[str, list[_Held]]:
    found: dict[str, dict[PageLayout, int]] = defaultdict(dict)
    for pool in manifest.pools:
        layouts = found[pool.pool + (f"/{pool.plane}" if pool.plane else "")]
        layout = pool.layout
        layouts[layout] = layouts.get(layout, 0) + len(pool.layers)
    return {name: [_Held(layout, layers) for layout, layers in layouts.items()] for name, layouts in found.items()}


def _paired(name: str, here: list[_Held], there: list[_Held]) -> Iterator[PoolDiff]:
    """Pairs pools of one name: those of one record first, the others in order."""
    several = len(here) > 1 or len(there) > 1
    for one in list(here):
        other = next((held for held in there if held.layout.record == one.layout.record), None)
        if other is not None:
            here.remove(one)
            there.remove(other)
            yield _compared(f"{name}/{one.layout.record}" if several else name, one, other)
    for one, other in zip(here, there, strict=False):
        yield _compared(name, one, other)
    paired = min(len(here), len(there))
    for held, side in [(held, "a") for held in here[paired:]] + [(held, "b") for held in there[paired:]]:
        yield _alone(f"{name}/{held.layout.record}" if several else name, held, side)


def _compared(name: str, one: _Held, other: _Held) -> PoolDiff:
    layout = diff_layouts(one.layout, other.layout)
    own: tuple[FieldDifference, ...] = ()
    if one.layers != other.layers:
        own = (FieldDifference("layers", one.layers, other.layers, "some layers have no peer", True),)
    return PoolDiff(name, Relation.INCOMPATIBLE if own else layout.relation, layout, own)


def _alone(name: str, held: _Held, side: str) -> PoolDiff:
    empty = held.layout.kind is PoolKind.INDEX_ONLY
    size = held.layout.payload_bytes
    consequence = "nothing: the pool owns no bytes" if empty else "its values have no place on the other side"
    difference = FieldDifference(
        "pool",
        f"{size} bytes a page" if side == "a" else None,
        f"{size} bytes a page" if side == "b" else None,
        consequence,
        not empty,
    )
    return PoolDiff(name, Relation.SAME if empty else Relation.INCOMPATIBLE, None, (difference,))
