"""Runs a copy plan: from storage to storage, without an intermediate buffer on the host.

    equal steps on both sides      one strided torch copy, with all of torch's threads
    many pages to a run of pages   one gather (index_select into the target), likewise
    scattered pages to anywhere    slices of memoryviews, read in ascending order; one thread

A torch call costs as much as moving tens of kilobytes, so single pages on the host never take one.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbridge.copies import CopyPlan, RowCopy
from kvbridge.errors import SpanError
from kvbridge.integers import Numbers, as_tensor
from kvbridge.spans import Operation, Placement

if TYPE_CHECKING:
    import torch

    from kvbridge.view import PageView

_TORCH_FROM_BYTES = 1 << 20
"""Bytes from which on a strided copy goes to torch; a smaller one costs less as memoryview slices."""

_GATHER_FROM = 16
"""Neighbouring target pages from which on they are gathered in one call."""

_SORT_FROM = 1024
"""Scattered pieces from which on sorting them costs less than it saves."""


def run_plan(plan: CopyPlan, source: PageView, target: PageView) -> None:
    """Moves the bytes of a plan made of offsets in the two views' storages.

    Args:
        plan: See `CopyPlan`.
        source: View whose storage is read.
        target: View whose storage is written.

    Raises:
        StaleViewError: The memory of either view is gone.
        SpanError: A byte would be both read and written.
    """
    source.require_live()
    target.require_live()
    _require_apart(plan, source, target)
    mover = _Mover(source, target)
    import torch

    # Engines allocate their caches in inference mode; such tensors are written in that mode only, others in any.
    with torch.inference_mode():
        for copy in plan.copies:
            if not copy.is_strided:
                mover.move_scattered(copy)
            elif copy.rows > 1 or not mover.on_host or copy.total_bytes >= _TORCH_FROM_BYTES:
                mover.move_strided(copy)
            else:
                mover.move_slices(copy.sources, copy.targets, copy.row_bytes)


class _Mover:
    """The two storages, as tensors and, on the host, as memory."""

    def __init__(self, source: PageView, target: PageView) -> None:
        self._source, self._target = source, target
        here, there = source.pages.device, target.pages.device
        self.on_host = here.type == there.type == "cpu" and bool(source.base_address and target.base_address)
        self._same_device = here == there
        self._memory: tuple[memoryview, memoryview] | None = None

    def move_strided(self, copy: RowCopy) -> None:
        """One torch copy of [copies, rows, row_bytes]."""
        _strided(self._target, copy, copy.targets, copy.target_row_stride).copy_(
            _strided(self._source, copy, copy.sources, copy.source_row_stride)
        )

    def move_slices(self, sources: Iterable[int], targets: Iterable[int], length: int) -> None:
        """Piece by piece through memoryviews of the two storages."""
        read, write = self._memory = self._memory or (_memory(self._source), _memory(self._target))
        for start, goal in zip(sources, targets, strict=True):
            write[goal : goal + length] = read[start : start + length]

    def move_scattered(self, copy: RowCopy) -> None:
        """Pieces whose steps differ: gathered where their targets are neighbours, one by one elsewhere."""
        if self._same_device and len(copy.sources) >= _GATHER_FROM:
            copy = self._gather_runs(copy)
        if self.on_host and copy.rows == 1:
            self.move_slices(*_in_source_order(copy), copy.row_bytes)
            return
        for start, goal in zip(copy.sources, copy.targets, strict=True):
            self.move_strided(
                RowCopy(
                    range(start, start + 1),
                    range(goal, goal + 1),
                    copy.row_bytes,
                    copy.rows,
                    copy.source_row_stride,
                    copy.target_row_stride,
                )
            )

    def _gather_runs(self, copy: RowCopy) -> RowCopy:
        """Gathers what goes to neighbouring pages; gives what is left."""
        import torch

        targets, order = as_tensor(copy.targets).sort()
        sources = as_tensor(copy.sources)[order]
        first, stride = int(sources.min()), self._source.page_stride_bytes
        distances = sources - first
        places = distances.div(stride, rounding_mode="floor")
        step = self._target.page_stride_bytes
        ends = (targets.diff() != step).nonzero().flatten() + 1
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), ends, torch.tensor([len(targets)])))
        lengths = bounds.diff()
        if int(lengths.max()) < _GATHER_FROM or not torch.equal(places * stride, distances):
            return copy
        pages = _strided(
            self._source, copy, range(first, first + int(places.max()) * stride + 1, stride), copy.source_row_stride
        )
        device = pages.device
        long = lengths >= _GATHER_FROM
        for begin, count in zip(bounds[:-1][long].tolist(), lengths[long].tolist(), strict=True):
            start = int(targets[begin])
            goal = _strided(
                self._target, copy, range(start, start + (count - 1) * step + 1, step), copy.target_row_stride
            )
            here, there = _widest(pages, goal)
            torch.index_select(here, 0, places[begin : begin + count].to(device), out=there)
        left = ~long.repeat_interleave(lengths)
        shape = (copy.row_bytes, copy.rows, copy.source_row_stride, copy.target_row_stride)
        return RowCopy(array("q", sources[left].tolist()), array("q", targets[left].tolist()), *shape)


def _strided(view: PageView, copy: RowCopy, starts: Numbers, row_stride: int) -> torch.Tensor:
    """The bytes of equal steps as uint8 [copies, rows, row_bytes] on a view's storage."""
    step = starts.step if isinstance(starts, range) and len(starts) > 1 else 0
    return view.pages.as_strided((len(starts), copy.rows, copy.row_bytes), (step, row_stride, 1), starts[0])


def _widest(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same bytes as 8-byte elements where every size, stride and address allows: a gather of those is faster."""
    import torch

    odd = any(
        number % 8
        for part in parts
        for number in (part.shape[-1], part.data_ptr(), part.storage_offset(), *part.stride()[:-1])
    )
    return parts if odd else tuple(part.view(torch.int64) for part in parts)


def _memory(view: PageView) -> memoryview:
    """The whole storage as bytes; valid while the view is live."""
    address = view.base_address - view.offset_bytes
    return memoryview((ctypes.c_ubyte * view.storage_bytes).from_address(address)).cast("B")


def _in_source_order(copy: RowCopy) -> tuple[Iterable[int], Iterable[int]]:
    """Numbers in the order of the sources: memory is read faster in sequence, and written as fast in any order."""
    sources, targets = copy.sources, copy.targets
    if len(sources) < _SORT_FROM or isinstance(sources, range):
        return sources, targets
    ascending, order = as_tensor(sources).sort()
    return ascending.tolist(), as_tensor(targets)[order].tolist()


def _require_apart(plan: CopyPlan, source: PageView, target: PageView) -> None:
    """Refuses a copy that reads what it writes; by addresses, so that two storages on one memory count as one."""
    if not (source.base_address and target.base_address):
        return
    here, there = (Placement.from_view(view).run(Operation.READ) for view in (source, target))
    if not here.overlaps(there):
        return
    read = plan.source_spans.shifted(source.base_address - source.offset_bytes)
    written = plan.target_spans.shifted(target.base_address - target.offset_bytes)
    for first, second in pairwise(sorted([*read, *written])):
        if second.start < first.start + first.length:
            end = min(first.start + first.length, second.start + second.length)
            raise SpanError(
                "target_pages",
                got=f"{end - second.start} bytes at {second.start:#x} that are read too",
                expected="pages that share no byte with the source's",
            )
