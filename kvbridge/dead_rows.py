"""Rows that nobody may read: how many there are, and whether reading them by mistake would hurt.

    4 rows a page, 4 pages, 13 live tokens      | . . . . | . . . . | . . . . | . x x x |     3 dead rows
    a dead row full of 0x7F decodes to NaN; a kernel that multiplies it by a probability of 0 gets NaN, not 0

Whether an engine clears pages is its own policy: SGLang allocates V4 pools zeroed and never clears a page again, vLLM
hands blocks on as the last request left them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvbridge.contract import Consumer
from kvbridge.layout import PageLayout
from kvbridge.records import Encoding, Region
from kvbridge.rules import Finding, finding

if TYPE_CHECKING:
    import torch

    from kvbridge.view import PageView

_CHUNK_BYTES = 1 << 24
"""Bytes of pages that are looked at together."""


class FillPolicy(StrEnum):
    """What an engine does with a page's bytes before it is used."""

    ZEROED_ONCE = "zeroed_once"  # at allocation; recycled pages keep what the last request wrote
    RECYCLED = "recycled"  # never promised


FILL_POLICIES = {"sglang": FillPolicy.ZEROED_ONCE, "vllm": FillPolicy.RECYCLED}
"""By engine (SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py: torch.zeros; vLLM 0.33.0 v1/worker/utils.py)."""


@dataclass(frozen=True, slots=True)
class DeadRows:
    """Dead rows of a pool.

    Attributes:
        rows: Rows of the pool.
        dead_rows: Rows that are not live, in pages that hold at least one live row.
        nan_in_dead: Whether one of those decodes to NaN or infinity.
        first_nan_slot: The first such slot; None where there is none.
        nan_in_slot_zero: Whether slot 0 does: masked lanes often gather it.
    """

    rows: int
    dead_rows: int
    nan_in_dead: bool
    first_nan_slot: int | None
    nan_in_slot_zero: bool


def find_dead_rows(view: PageView, live: torch.Tensor) -> DeadRows:
    """Counts the dead rows of pages in use and looks for NaN patterns in them.

    Args:
        view: The pool.
        live: bool `[capacity_rows]`, or int32 / int64 slots of the live rows.

    Returns:
        Counts; padding and pages without any live row are left out.
    """
    import torch

    pages, rows = view.num_pages, view.page_rows
    alive = live
    if live.dtype is not torch.bool:
        alive = torch.zeros(view.capacity_rows, dtype=torch.bool, device=live.device)
        alive[live.reshape(-1).to(torch.int64)] = True
    table = alive.reshape(pages, rows)
    dead = ~table & table.any(dim=1, keepdim=True)
    not_finite = _not_finite_rows(view)
    hits = (dead & not_finite.to(dead.device)).reshape(-1).nonzero()
    first = int(hits[0]) if hits.numel() else None
    slot_zero = bool(not_finite[0, 0]) if pages else False
    return DeadRows(pages * rows, int(dead.sum()), first is not None, first, slot_zero)


def dead_row_findings(
    dead: DeadRows, consumer: Consumer, *, masked_lanes: bool = False, pool: str = ""
) -> list[Finding]:
    """What dead rows mean for a consumer.

    Args:
        dead: What was found.
        consumer: Whose rules.
        masked_lanes: Whether the slots hold a -1, or lanes beyond a length.
        pool: Pool label.

    Returns:
        `dead-nan` where the consumer may multiply such a row by 0.
    """
    if not consumer.needs_zero_fill:
        return []
    found = []
    if dead.nan_in_dead:
        found.append(
            finding(
                "dead-nan",
                f"slot {dead.first_nan_slot}",
                got="NaN or infinity in a dead row",
                expected="zeros",
                detail=f"{dead.dead_rows} dead rows",
                pool=pool,
                consumer=consumer.name,
            )
        )
    if masked_lanes and dead.nan_in_slot_zero:
        found.append(
            finding(
                "dead-nan",
                "slot 0",
                got="NaN or infinity in the row that masked lanes gather",
                expected="zeros",
                pool=pool,
                consumer=consumer.name,
            )
        )
    return found


def _not_finite_rows(view: PageView) -> torch.Tensor:
    """bool `[pages, rows]`: rows with a pattern that decodes to NaN or infinity."""
    import torch

    found = torch.zeros(view.num_pages, view.page_rows, dtype=torch.bool, device=view.pages.device)
    for region in _decoded_regions(view.layout):
        step = max(1, _CHUNK_BYTES // (region.row_bytes * view.page_rows))
        codes = view.region(region.name)
        for first in range(0, view.num_pages, step):
            found[first : first + step] |= _not_finite(codes[first : first + step], region.dtype).any(dim=-1)
    return found


def _decoded_regions(layout: PageLayout) -> Iterator[Region]:
    quiet = (Encoding.E2M1, Encoding.UNUSED, Encoding.UNKNOWN)
    return (region for region in layout.regions if region.dtype not in quiet)


def _not_finite(codes: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """bool: bytes `[..., n]` whose elements are NaN or infinity, an element's bytes joined."""
    match encoding:
        case Encoding.UE8M0:
            return codes == 0xFF
        case Encoding.E4M3:
            return (codes & 0x7F) == 0x7F
        case _:  # bf16 and fp32: all eight exponent bits set, in the two most significant bytes
            size = encoding.element_bytes
            high, low = codes[..., size - 1 :: size], codes[..., size - 2 :: size]
            return ((high & 0x7F) == 0x7F) & (low >= 0x80)
