"""Copies pages between two layouts of the same values, byte for byte: nothing is decoded, nothing re-quantised.

    exact, 64 rows    [data 64][scales 64][data 64][scales 64]...        one payload is one copy,
    packed, 64 rows   [data 64][scales 64]...foreign...[data 64]...      the same bytes at another stride
    256 rows          [data 256                ][scales 256    ]         4 pages of 64: 4 data and 4 scale copies
    interleaved       [data|scales][data|scales]...                      one copy a field, row by row

Only payload bytes are written: tail pads, foreign bytes and pages that were not named keep what they hold. Planning
reads numbers only, so a plan is its own dry run; `copy_pages` plans and runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

from kvbridge.copies import CopyBuilder, CopyPlan
from kvbridge.errors import PageCountError, PlaneError, RecordMismatchError, SlotError, TokensPerRowError
from kvbridge.integers import Numbers, packed, repeated
from kvbridge.layout import PageLayout
from kvbridge.moving import run_plan
from kvbridge.spans import Placement

if TYPE_CHECKING:
    from kvbridge.view import PageView


def require_same_values(source: PageLayout, target: PageLayout) -> None:
    """Refuses two layouts between which bytes cannot be copied.

    Split and interleaved forms of one record hold the same bytes (v41 and v41_interleaved); two records of one width
    need not.

    Raises:
        RecordMismatchError: The fields or the scales of the two records differ.
        PlaneError: The layouts describe different planes.
        TokensPerRowError: A row stands for different numbers of tokens.
    """
    here, there = source.record_format, target.record_format
    same = here.fields == there.fields and (here.scale_rule, here.scale_group) == (there.scale_rule, there.scale_group)
    if not same:
        raise RecordMismatchError(
            "record",
            got=target.record,
            expected=f"the fields and scales of {source.record}",
            detail=f"rows of {target.row_bytes} and {source.row_bytes} bytes",
        )
    if source.plane != target.plane:
        raise PlaneError("plane", got=target.plane, expected=source.plane)
    if source.tokens_per_row != target.tokens_per_row:
        raise TokensPerRowError("tokens_per_row", got=target.tokens_per_row, expected=source.tokens_per_row)


def plan_pages(
    source: Placement,
    target: Placement,
    *,
    source_pages: Iterable[int] | None = None,
    target_pages: Iterable[int] | None = None,
) -> CopyPlan:
    """Plans a copy of whole pages; reads and writes nothing.

    The rows of the source pages, in the order of their ids, become the rows of the target pages in theirs. With equal
    page rows that is page to page; four pages of 64 rows fill one of 256.

    Args:
        source: Where the values are, as offsets or addresses.
        target: Where they go.
        source_pages: Page ids, all by default: a range (constant time), a list, or an integer tensor.
        target_pages: Page ids, as many rows as the source's; by default the same ids, or the first pages where all are
            copied.

    Raises:
        RecordMismatchError: The two records do not hold the same bytes.
        PlaneError: The two layouts describe different planes.
        TokensPerRowError: A row stands for different numbers of tokens.
        PageCountError: The two lists hold different numbers of rows.
        SlotError: A page id is outside its pool, or is a target twice.
    """
    require_same_values(source.layout, target.layout)
    here = packed("source_pages", range(source.num_pages) if source_pages is None else source_pages)
    source_rows, target_rows = source.layout.page_rows, target.layout.page_rows
    if target_pages is None:
        there = range(len(here) * source_rows // target_rows) if source_pages is None else here
    else:
        there = packed("target_pages", target_pages)
    source.require_inside("source_pages", here, source.num_pages)
    target.require_inside("target_pages", there, target.num_pages)
    if len(here) * source_rows != len(there) * target_rows:
        raise PageCountError(
            "target_pages",
            got=f"{len(there)} pages of {target_rows} rows",
            expected=f"{len(here) * source_rows} rows",
            detail=f"the source's {len(here)} pages of {source_rows}",
        )
    _require_once("target_pages", there)
    # Every `period` rows both sides begin a page again; within one period each segment stays inside a page of either.
    period = source_rows * target_rows // gcd(source_rows, target_rows)
    source_step, target_step = period // source_rows, period // target_rows
    builder = CopyBuilder(source, target)
    cuts = sorted({*range(0, period, source_rows), *range(0, period, target_rows), period})
    for first, end in pairwise(cuts):
        builder.add(
            here[first // source_rows :: source_step],
            there[first // target_rows :: target_step],
            first % source_rows,
            first % target_rows,
            end - first,
        )
    return builder.finish()


def plan_rows(
    source: Placement, target: Placement, *, source_slots: Iterable[int], target_slots: Iterable[int]
) -> CopyPlan:
    """Plans a copy of single rows, slot to slot; reads and writes nothing.

    Args:
        source: Where the values are.
        target: Where they go.
        source_slots: page * page_rows + row in the source.
        target_slots: As many slots of the target.

    Raises:
        RecordMismatchError: The two records do not hold the same bytes.
        PlaneError: The two layouts describe different planes.
        TokensPerRowError: A row stands for different numbers of tokens.
        PageCountError: The two lists differ in length.
        SlotError: A slot is outside its pool, or is a target twice.
    """
    require_same_values(source.layout, target.layout)
    here, there = packed("source_slots", source_slots), packed("target_slots", target_slots)
    source_rows, target_rows = source.layout.page_rows, target.layout.page_rows
    source.require_inside("source_slots", here, source.num_pages * source_rows)
    target.require_inside("target_slots", there, target.num_pages * target_rows)
    if len(here) != len(there):
        raise PageCountError("target_slots", got=len(there), expected=len(here), detail="source_slots")
    _require_once("target_slots", there)
    builder = CopyBuilder(source, target)
    place = 0
    while place < len(here):
        source_page, source_row = divmod(here[place], source_rows)
        target_page, target_row = divmod(there[place], target_rows)
        most = min(source_rows - source_row, target_rows - target_row, len(here) - place)
        rows = 1
        while rows < most and here[place + rows] == here[place] + rows and there[place + rows] == there[place] + rows:
            rows += 1
        builder.add(array("q", [source_page]), array("q", [target_page]), source_row, target_row, rows)
        place += rows
    return builder.finish()


def copy_pages(
    source: PageView,
    target: PageView,
    *,
    source_pages: Iterable[int] | None = None,
    target_pages: Iterable[int] | None = None,
) -> CopyPlan:
    """Copies pages from one view to another and gives the plan it followed, as offsets in the two storages.

    Args:
        source: Pages to read.
        target: Pages to write; may lie in the same storage as long as no byte is both read and written.
        source_pages: See `plan_pages`.
        target_pages: See `plan_pages`.

    Raises:
        StaleViewError: The memory of either view is gone.
        SpanError: The copy would overwrite what it has yet to read.
        LayoutError: See `plan_pages`.
    """
    here, there = Placement.from_view(source, addresses=False), Placement.from_view(target, addresses=False)
    plan = plan_pages(here, there, source_pages=source_pages, target_pages=target_pages)
    run_plan(plan, source, target)
    return plan


def copy_rows(
    source: PageView, target: PageView, *, source_slots: Iterable[int], target_slots: Iterable[int]
) -> CopyPlan:
    """Copies single rows; arguments as `plan_rows`, result and errors as `copy_pages`."""
    here, there = Placement.from_view(source, addresses=False), Placement.from_view(target, addresses=False)
    plan = plan_rows(here, there, source_slots=source_slots, target_slots=target_slots)
    run_plan(plan, source, target)
    return plan


def _require_once(field: str, numbers: Numbers) -> None:
    twice = repeated(numbers)
    if twice is not None:
        raise SlotError(field, got=f"{twice} twice", expected="each target once")
