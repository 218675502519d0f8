"""Tables of slots as kernels want them: dead lanes set to -1, lengths clamped, slots remapped to storage rows.

    slots [[3, 7, 9000, 9000]], lengths [2]  --normalise_slots-->   [[3, 7, -1, -1]]
    sequence lengths [7, 0], 2 verify queries --verify_lengths-->   [6, 7, 0, 0]      a padded row never gives -1
    slots [0, 3, 4, 7, 8], 4 rows a page, 16 storage rows from page to page --remap_slots--> [0, 3, 16, 19, 32]

Pure tensor expressions: no read-back, on the tensors' own device, new tensors; safe inside a captured graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbridge.errors import SlotError
from kvbridge.fit_strides import storage_row_span
from kvbridge.layout import PageLayout

if TYPE_CHECKING:
    import torch


def live_lanes(slots: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """bool `[queries, width]`: lanes before the query's length; all of them without lengths."""
    import torch

    table = as_table(slots)
    if lengths is None:
        return torch.ones_like(table, dtype=torch.bool)
    return torch.arange(table.shape[1], device=table.device) < lengths.to(torch.int64).unsqueeze(1)


def normalise_slots(
    slots: torch.Tensor, lengths: torch.Tensor | None = None, *, capacity_rows: int | None = None
) -> torch.Tensor:
    """A new table with -1 in every dead lane: negative, at or beyond the length, at or beyond the capacity.

    Args:
        slots: int32 / int64 `[queries, width]`; left as it is.
        lengths: `[queries]` or None.
        capacity_rows: Slots of the pool; None leaves large slots alone.
    """
    table = as_table(slots)
    dead = ~live_lanes(table, lengths) | (table < 0)
    if capacity_rows is not None:
        dead |= at_least(table, capacity_rows)
    return table.masked_fill(dead, -1)


def effective_counts(
    slots: torch.Tensor, lengths: torch.Tensor | None = None, *, capacity_rows: int | None = None
) -> torch.Tensor:
    """int64 `[queries]`: live slots of each query, holes not counted."""
    return (normalise_slots(slots, lengths, capacity_rows=capacity_rows) >= 0).sum(dim=1)


def clamp_lengths(lengths: torch.Tensor, *, width: int | None = None) -> torch.Tensor:
    """Lengths without negative values, and not above the width of a row of slots."""
    return lengths.clamp(min=0, max=width)


def verify_lengths(sequence_lengths: torch.Tensor, *, queries: int) -> torch.Tensor:
    """Lengths of the verify queries of each sequence: the last one sees all tokens, each before it one less.

    Args:
        sequence_lengths: `[sequences]`; 0 for padded rows.
        queries: Verify queries of a sequence: 1 + speculative tokens.

    Returns:
        `[sequences * queries]`, never negative: a padded row of length 0 gives zeros, not -1 (which a kernel that reads
        it as unsigned takes for 4,294,967,295).
    """
    import torch

    steps = torch.arange(1 - queries, 1, device=sequence_lengths.device, dtype=sequence_lengths.dtype)
    return (sequence_lengths.unsqueeze(1) + steps).clamp(min=0).flatten()


def remap_slots(slots: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Slots as storage rows, for consumers that address rows: page * span + row. Negative slots stay.

    Args:
        slots: int32 / int64, any shape.
        layout: A layout whose stride is a whole number of rows.

    Raises:
        IndexUnitError: It is not, or the rows of a page are not dense.
        SlotError: A remapped slot does not fit the slots' dtype (only where the layout has a page count).
    """
    import torch

    span, rows = storage_row_span(layout), layout.page_rows
    if layout.num_pages and layout.num_pages * span - 1 > torch.iinfo(slots.dtype).max:
        raise SlotError(
            "slots.dtype",
            got=str(slots.dtype).removeprefix("torch."),
            expected="int64",
            detail=f"the last storage row is {layout.num_pages * span - 1}",
        )
    pages = slots.div(rows, rounding_mode="floor")
    return torch.where(slots < 0, slots, pages * span + slots.remainder(rows))


def as_table(slots: torch.Tensor) -> torch.Tensor:
    """`[queries, width]` of a table that may have an axis of size 1 in the middle."""
    return slots.squeeze(1) if slots.ndim == 3 and slots.shape[1] == 1 else slots


def at_least(table: torch.Tensor, bound: int) -> torch.Tensor:
    """bool: table >= bound, for bounds that the table's dtype cannot hold too."""
    import torch

    limits = torch.iinfo(table.dtype)
    if bound > limits.max:
        return torch.zeros_like(table, dtype=torch.bool)
    return table >= max(bound, limits.min)
