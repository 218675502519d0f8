"""Slots and lengths: which lanes of a row of slots are live, and what is wrong with them.

    slots    [queries, width]   3  7  -1  9000 | 41 8000        a slot is page * page_rows + row
    lengths  [queries]          4 ^^^^^^^^^^^^ | ^^^^^^^ beyond the length: ignored, or to be set to -1
                                  live prefix
    -1 in the prefix is a hole; 9000 with a capacity of 256 would reach address arithmetic

Everything is vectorised, on the tensors' own device, with one read-back for all counts. The checks are optional and
for the outside of CUDA graphs: while the current stream is captured they do nothing and say so. A running kernel never
needs them: it ignores what is dead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvbridge.contract import Consumer, Sentinel
from kvbridge.layout import PageLayout
from kvbridge.rule import Severity
from kvbridge.rules import Finding, finding
from kvbridge.slot_tables import as_table, at_least, live_lanes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SlotReport:
    """Result of a check.

    Attributes:
        findings: What is wrong, worst rule first; each names the first offending lane and how many there are.
        skipped: True where nothing was looked at: a captured stream, or tensors without data.
    """

    findings: tuple[Finding, ...] = ()
    skipped: bool = False


def check_slots(
    slots: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    capacity_rows: int,
    page_rows: int = 1,
    reserved_pages: int = 0,
    sentinel: Sentinel = Sentinel.NEGATIVE,
    dense_prefix: bool = False,
    bounds_lanes: bool = True,
    pool: str = "",
    consumer: str = "",
) -> SlotReport:
    """Checks a table of slots and its lengths.

    Args:
        slots: int32 / int64 `[queries, width]` or `[queries, 1, width]`, any row stride.
        lengths: int32 / int64 `[queries]`; None where every lane counts.
        capacity_rows: Slots of the pool; 0 allows sentinels only.
        page_rows: Rows in a page; needed for `reserved_pages` only.
        reserved_pages: Pages at the start that hold no live rows.
        sentinel: Which slots mean none.
        dense_prefix: Whether a negative slot inside the live prefix is a fault.
        bounds_lanes: Whether the reader leaves lanes at or beyond the length alone.
        pool: Pool label.
        consumer: Consumer name.

    Returns:
        Findings `slot-dtype`, `slot-shape`, `length-negative`, `length-width`, `slot-bounds`, `slot-hole`,
        `slot-reserved`, `lanes-unbounded`; nothing, with `skipped`, under capture.
    """
    if _unreadable(slots):
        return SlotReport(skipped=True)
    tell = partial(finding, pool=pool, consumer=consumer)
    faults = _form_findings(slots, lengths, tell)
    if faults:
        return SlotReport(tuple(faults))
    table = as_table(slots)
    live = live_lanes(table, lengths)
    masks = {"slot-bounds": live & at_least(table, capacity_rows)}
    if sentinel is Sentinel.MINUS_ONE:
        masks["slot-bounds"] |= live & (table < -1)
    if dense_prefix:
        masks["slot-hole"] = live & (table < 0)
    if reserved_pages:
        masks["slot-reserved"] = live & (table >= 0) & ~at_least(table, reserved_pages * page_rows)
    if lengths is not None and not bounds_lanes:
        masks["lanes-unbounded"] = ~live & (table >= 0)
    expected = {
        "slot-bounds": _slot_range(capacity_rows, sentinel),
        "slot-hole": "a live slot: the prefix must be dense",
        "slot-reserved": f"at least {reserved_pages * page_rows} ({reserved_pages} reserved pages)",
        "lanes-unbounded": "-1 at and beyond the length",
    }
    found = _length_findings(lengths, table, tell)
    for code, hit in _first_hits(masks, table).items():
        row, lane = divmod(hit.index, table.shape[1])
        found.append(
            tell(
                code,
                f"slots[{row}][{lane}]",
                got=hit.value,
                expected=expected[code],
                detail=f"{hit.count} such lanes, first in row {row}" if hit.count > 1 else f"row {row}",
            )
        )
    return SlotReport(tuple(found))


def consumer_findings(
    slots: torch.Tensor,
    lengths: torch.Tensor | None,
    *,
    layout: PageLayout,
    consumer: Consumer,
    pages: int | None,
    dtype: str | None = None,
    pool: str = "",
) -> list[Finding]:
    """Checks slots and lengths under a consumer's own rules: dtype, table stride, sentinel, lanes.

    Args:
        slots: `[queries, width]`.
        lengths: `[queries]` or None.
        layout: The pool's layout.
        consumer: Whose rules.
        pages: Pages of the pool; None leaves the upper bound out.
        dtype: Dtype the program's slots have; None for the tensor's own, `any` for unknown.
        pool: Pool label.
    """
    tell = partial(finding, pool=pool, consumer=consumer.name)
    found: list[Finding] = []
    dtype = str(slots.dtype).removeprefix("torch.") if dtype is None else dtype
    if dtype not in (*consumer.slot_dtypes, "any"):
        found.append(tell("slot-dtype", "slots.dtype", got=dtype, expected=" or ".join(consumer.slot_dtypes)))
    if consumer.dense_tables:
        found += check_table_stride(slots, pool=pool, consumer=consumer.name)
    accepted = consumer.accepted(layout.record, layout.pool)
    takes_lengths = consumer.takes_lengths and (accepted is None or accepted.takes_lengths)
    report = check_slots(
        slots,
        lengths,
        capacity_rows=(1 << 63) - 1 if pages is None else pages * layout.page_rows,
        page_rows=layout.page_rows,
        reserved_pages=layout.reserved_pages,
        sentinel=consumer.sentinel,
        dense_prefix=consumer.dense_prefix,
        bounds_lanes=consumer.bounds_lanes and takes_lengths,
        pool=pool,
        consumer=consumer.name,
    )
    harmless = consumer.sentinel is Sentinel.NEGATIVE_OR_BEYOND
    for entry in report.findings:
        masked = harmless and entry.code == "slot-bounds"
        found.append(replace(entry, severity=Severity.WARNING) if masked else entry)
    return found


def check_table_stride(
    slots: torch.Tensor, *, row_stride: int | None = None, pool: str = "", consumer: str = ""
) -> list[Finding]:
    """Checks the row stride of a table of slots. vLLM's C128 table is a slice of a wider buffer and keeps its stride.

    Args:
        slots: `[queries, width]`.
        row_stride: Elements between rows that the reader assumes; the width by default.
        pool: Pool label.
        consumer: Consumer name.
    """
    table = as_table(slots)
    if table.ndim != 2:  # `check_slots` says so
        return []
    rows, width = table.shape
    expected = width if row_stride is None else row_stride
    found = []
    if width > 1 and table.stride(1) != 1:
        found.append(
            finding("table-stride", "slots.stride(1)", got=table.stride(1), expected=1, pool=pool, consumer=consumer)
        )
    if rows > 1 and table.stride(0) != expected:
        found.append(
            finding(
                "table-stride",
                "slots.stride(0)",
                got=table.stride(0),
                expected=expected,
                detail=f"{rows} rows of {width} slots",
                pool=pool,
                consumer=consumer,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Hit:
    count: int
    index: int
    value: int


def _first_hits(masks: dict[str, torch.Tensor], table: torch.Tensor) -> dict[str, _Hit]:
    """Count, first place and value of each mask, with one read-back."""
    import torch

    if not table.numel():
        return {}
    flat = table.reshape(-1)
    figures = []
    for mask in masks.values():
        lanes = mask.reshape(-1)
        first = lanes.to(torch.uint8).argmax()
        figures += [lanes.sum(), first, flat[first].to(torch.int64)]
    numbers = torch.stack(figures).tolist()
    triples = zip(masks, numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return {code: _Hit(count, index, value) for code, count, index, value in triples if count}


def _form_findings(slots: torch.Tensor, lengths: torch.Tensor | None, tell: Callable[..., Finding]) -> list[Finding]:
    import torch

    found = []
    for name, tensor in (("slots", slots), ("lengths", lengths)):
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append(tell("slot-dtype", f"{name}.dtype", got=dtype, expected="int32 or int64"))
    flat = slots.ndim == 2 or (slots.ndim == 3 and slots.shape[1] == 1)
    if not flat:
        expected = "[queries, width] or [queries, 1, width]"
        found.append(tell("slot-shape", "slots.shape", got=list(slots.shape), expected=expected))
    elif lengths is not None and tuple(lengths.shape) != (slots.shape[0],):
        expected = f"[{slots.shape[0]}]"
        found.append(tell("slot-shape", "lengths.shape", got=list(lengths.shape), expected=expected))
    return found


def _length_findings(lengths: torch.Tensor | None, table: torch.Tensor, tell: Callable[..., Finding]) -> list[Finding]:
    if lengths is None:
        return []
    column = lengths.unsqueeze(1)
    masks = {"length-negative": column < 0, "length-width": column > table.shape[1]}
    expected = {"length-negative": "at least 0", "length-width": f"at most {table.shape[1]} (width of a row of slots)"}
    return [
        tell(
            code,
            f"lengths[{hit.index}]",
            got=hit.value,
            expected=expected[code],
            detail=f"{hit.count} such rows, first {hit.index}" if hit.count > 1 else f"row {hit.index}",
        )
        for code, hit in _first_hits(masks, column).items()
    ]


def _slot_range(capacity_rows: int, sentinel: Sentinel) -> str:
    none = "-1" if sentinel is Sentinel.MINUS_ONE else "negative"
    return f"{none}, or below {capacity_rows}" if capacity_rows else f"{none}: the pool has no rows"


def _unreadable(slots: torch.Tensor) -> bool:
    import torch

    if slots.is_meta:
        return True
    return slots.is_cuda and torch.cuda.is_current_stream_capturing()
