"""Explains two layouts field by field: both values, what breaks, and what could be copied.

    a: v4, 64 rows, stride 37376        b: v4, 64 rows, stride 37440
      page_stride_bytes  37376 | 37440  every page after the first lies elsewhere
      slot 64, nope      37376 | 37440  first row whose address differs
      relation copy, unit: page of 37376 bytes

Relations: same; copy (page payloads, at another stride); repack (rows go into other pages); incompatible. Layouts are
compared pairwise, never by a hash of part of them: peers that agree on a hash and fail at the first request are a
public case. Everything called compatible states its copy unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import gcd
from typing import Any

from kvbridge.errors import KindError, LayoutError
from kvbridge.layout import PageLayout, PoolKind
from kvbridge.records import Arrangement, Encoding
from kvbridge.repack import require_same_values

MOST_SEGMENTS = 4096
"""Runs of one encoding that are compared before two different records are called alike."""


class Relation(StrEnum):
    """How the bytes of one layout can become those of another, best first."""

    SAME = "same"
    COPY = "copy"
    REPACK = "repack"
    INCOMPATIBLE = "incompatible"

    @property
    def rank(self) -> int:
        """0 for the best."""
        return tuple(Relation).index(self)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field with two values.

    Attributes:
        field: Name, dotted where nested.
        a: Value on the one side; None where it is missing.
        b: Value on the other.
        consequence: What breaks, or that nothing does.
        breaks: Whether this alone makes the two incompatible.
    """

    field: str
    a: int | str | bool | None
    b: int | str | bool | None
    consequence: str
    breaks: bool = False

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {"field": self.field, "a": self.a, "b": self.b, "consequence": self.consequence, "breaks": self.breaks}


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """The least that is copied at once.

    Attributes:
        rows: Rows of the unit.
        runs: (block, bytes) of each contiguous run: the whole payload of a page, or data and scales apart.
    """

    rows: int
    runs: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the unit."""
        return sum(size for _, size in self.runs)

    def document(self) -> dict[str, Any]:
        """JSON form."""
        runs = [{"block": block, "bytes": size} for block, size in self.runs]
        return {"rows": self.rows, "bytes": self.total_bytes, "runs": runs}

    def __str__(self) -> str:
        runs = " + ".join(f"{size} ({block})" for block, size in self.runs)
        return f"{self.rows} rows, {runs} bytes"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first row, or page byte, that the two sides do not find at the same place.

    Attributes:
        slot: page * page_rows + row; None where two records differ and bytes of a page are compared.
        a: Offset from the first page's start on the one side; or what the byte is there.
        b: The same on the other side.
        field: Field of the row; or the byte's offset in the page.
    """

    slot: int | None
    field: str
    a: int | str
    b: int | str

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {"slot": self.slot, "field": self.field, "a": self.a, "b": self.b}


@dataclass(frozen=True, slots=True)
class LayoutDiff:
    """What two layouts differ in.

    Attributes:
        relation: How one becomes the other.
        differences: Every differing field.
        copy_unit: The least that is copied; None where nothing can be.
        first: First place that differs; None where every row lies at the same place.
        reason: Why they are incompatible; empty otherwise.
    """

    relation: Relation
    differences: tuple[FieldDifference, ...]
    copy_unit: CopyUnit | None
    first: FirstDifference | None
    reason: str = ""

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "relation": self.relation.value,
            "differences": [difference.document() for difference in self.differences],
            "copy_unit": self.copy_unit.document() if self.copy_unit else None,
            "first_difference": self.first.document() if self.first else None,
            "reason": self.reason or None,
        }


_CONSEQUENCES = {
    "record": "the same bytes mean other values",
    "plane": "values are taken for scales, or one part of a row for another",
    "kind": "one side has bytes, or pages, where the other has none",
    "page_rows": "slots divide into other pages and rows; rows must be repacked",
    "tokens_per_row": "token positions map to other rows",
    "payload_bytes": "a page copy of the one size is too short or too long for the other",
    "page_bytes": "tail pads differ; copy the payload, not the page",
    "page_stride_bytes": "every page after the first lies elsewhere",
    "padding.policy": "what lies between payloads belongs to somebody else, or to nobody",
    "padding.alignment": "page sizes computed from the alignment differ",
    "num_pages": "slots that exist on the one side are out of bounds on the other",
    "reserved_pages": "a live page of the one side is a null page of the other",
    "dtype": "tensors must be viewed as bytes before they are compared or copied",
    "pool": "the pools hold different things by name",
}


def diff_layouts(a: PageLayout, b: PageLayout) -> LayoutDiff:
    """Compares two consistent layouts.

    Args:
        a: One side.
        b: The other.

    Returns:
        Every differing field, the relation, the copy unit where there is one, and the first place that differs.
    """
    try:
        require_comparable(a, b)
    except LayoutError as error:
        reason = f"{error.field}: {error.got} against {error.expected}" + (f" ({error.detail})" if error.detail else "")
        differences = tuple(_differences(a, b, breaking=error.field))
        return LayoutDiff(Relation.INCOMPATIBLE, differences, None, _first_byte(a, b), reason)
    differences = tuple(_differences(a, b))
    first = first_row(a, b)
    unit = copy_unit(a, b)
    if (a.page_rows != b.page_rows or a.record != b.record) and first is not None:
        return LayoutDiff(Relation.REPACK, differences, unit, first)
    return LayoutDiff(Relation.COPY if differences else Relation.SAME, differences, unit, first)


def require_comparable(a: PageLayout, b: PageLayout) -> None:
    """Refuses two layouts between which no bytes can be copied.

    Raises:
        LayoutError: Records, planes or tokens a row differ, or one side has no bytes.
    """
    if PoolKind.INDEX_ONLY in (a.kind, b.kind):
        if a.kind is not b.kind:
            raise KindError("kind", got=b.kind.value, expected=a.kind.value)
        return
    require_same_values(a, b)


def copy_unit(a: PageLayout, b: PageLayout) -> CopyUnit | None:
    """The least that is copied between two layouts of the same values.

    Returns:
        A whole payload where both pages are alike; else as many rows as lie together on both sides, data and scales
        apart in a split page; None for pools without bytes.
    """
    if not a.payload_bytes:
        return None
    if a.record == b.record and a.page_rows == b.page_rows:
        return CopyUnit(a.page_rows, (("payload", a.payload_bytes),))
    record = a.record_format
    rows = gcd(a.page_rows, b.page_rows) if a.record == b.record else 1
    blocks = [(block, record.block_bytes(block, a.plane)) for block in ("data", "scales")]
    split = Arrangement.SPLIT in (record.arrangement, b.record_format.arrangement)
    if split and all(size for _, size in blocks):
        return CopyUnit(rows, tuple((block, rows * size) for block, size in blocks))
    return CopyUnit(rows, (("rows", rows * a.row_bytes),))


def first_row(a: PageLayout, b: PageLayout) -> FirstDifference | None:
    """The first row of two layouts of the same values that lies elsewhere, counted from the first page's start.

    Rows inside a page, and pages, are evenly spaced: if the rows 0, 1 and the first rows of the second pages agree, all
    do.
    """
    for slot in sorted({0, 1, a.page_rows, b.page_rows}):
        there = {name: (offset, size) for name, offset, size in _row_fields(b, slot)}
        for name, offset, size in _row_fields(a, slot):
            if name in there and there[name] != (offset, size):
                return FirstDifference(slot, name, offset, there[name][0])
    return None


def _row_fields(layout: PageLayout, slot: int) -> Iterator[tuple[str, int, int]]:
    page, row = divmod(slot, layout.page_rows)
    for region in layout.regions:
        yield region.name, page * layout.page_stride_bytes + region.offset + row * region.row_stride, region.row_bytes


def _first_byte(a: PageLayout, b: PageLayout) -> FirstDifference | None:
    """The first byte of a page that two records encode differently."""
    if not a.payload_bytes or not b.payload_bytes:
        return None
    here, there = _encodings(a), _encodings(b)
    byte = 0
    run_a, run_b = next(here, None), next(there, None)
    for _ in range(MOST_SEGMENTS):
        if run_a is None or run_b is None:
            break
        if run_a[1] is not run_b[1]:
            return FirstDifference(None, f"byte {byte} of a page", _meaning(run_a), _meaning(run_b))
        byte = min(run_a[0], run_b[0])
        run_a = next(here, None) if run_a[0] == byte else run_a
        run_b = next(there, None) if run_b[0] == byte else run_b
    if (run_a is None) != (run_b is None):
        field = f"byte {byte} of a page"
        return FirstDifference(None, field, _meaning(run_a) if run_a else "end", _meaning(run_b) if run_b else "end")
    return None


def _encodings(layout: PageLayout) -> Iterator[tuple[int, Encoding, str]]:
    """(end, encoding, field) of every run of a page, in byte order."""
    regions = sorted(layout.regions, key=lambda region: region.offset)
    blocks: dict[int, list[Any]] = {}
    for region in regions:  # regions of one block interleave row by row
        start = next((key for key, found in blocks.items() if region.offset < key + found[0].row_stride), region.offset)
        blocks.setdefault(start, []).append(region)
    for found in blocks.values():
        for row in range(layout.page_rows):
            for region in found:
                yield region.offset + row * region.row_stride + region.row_bytes, region.dtype, region.name


def _meaning(run: tuple[int, Encoding, str]) -> str:
    return f"{run[1].value} ({run[2]})"


def _differences(a: PageLayout, b: PageLayout, *, breaking: str = "") -> Iterator[FieldDifference]:
    for field, consequence in _CONSEQUENCES.items():
        one, other = _value(a, field), _value(b, field)
        if one != other:
            yield FieldDifference(field, one, other, consequence, breaks=field == breaking)


def _value(layout: PageLayout, field: str) -> Any:
    value: Any = layout
    for name in field.split("."):
        value = getattr(value, name)
    return value.value if isinstance(value, StrEnum) else value
