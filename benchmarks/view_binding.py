"""Cost of binding a tensor to a layout, beside plain checks plus as_strided written out by hand.

    python benchmarks/view_binding.py [--rounds 100]

    seen    the same tensor object under the same layout object        limit 0.3 of plain
    fresh   a new tensor object over a storage seen before             limit plain + 2 us
    first   a tensor of a shape never seen                             limit 30 us

Plain is what a careful caller would write for one known rank: dtype, width, inner strides, page stride, storage size,
then `as_strided`. Each figure is the best of many short rounds: other load on the machine
only adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from kvbridge import PageLayout, PageView, view

PAGES, STRIDE, ROWS, ROW_BYTES, OFFSET = 16, 149760, 64, 584, 37440
PAYLOAD = ROWS * ROW_BYTES


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The checks of a rank-3 uint8 pool, then the pages."""
    if tensor.dtype is not torch.uint8 or tensor.dim() != 3:
        raise TypeError(f"got {tensor.dtype} of rank {tensor.dim()}, expected uint8 of rank 3")
    pages, rows, row = tensor.shape
    stride, row_stride, inner = tensor.stride()
    if rows != ROWS or row != ROW_BYTES or row_stride != ROW_BYTES or inner != 1 or stride < PAYLOAD:
        raise ValueError(f"got {tuple(tensor.shape)} and {tensor.stride()}")
    offset = tensor.storage_offset()
    if offset + (pages - 1) * stride + PAYLOAD > tensor.untyped_storage().nbytes():
        raise ValueError("pages beyond the storage")
    return tensor.as_strided((pages, PAYLOAD), (stride, 1), offset)


def microseconds(calls: int, work: Callable[[], object], rounds: int) -> float:
    """Best time of one call."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def first_microseconds(storage: torch.Tensor, rounds: int) -> float:
    """Best mean time of a first binding: layouts and shapes that nobody has bound before."""
    best = float("inf")
    for _ in range(rounds):
        layouts = [_layout() for _ in range(50)]
        for layout in layouts:
            _ = layout.regions, layout.row_bytes  # a layout is made once for all layers of a pool
        tensors = [_tensor(storage) for _ in layouts]
        view._geometries.clear()
        start = time.perf_counter()
        views = [PageView.from_tensor(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True)]
        best = min(best, (time.perf_counter() - start) / len(views))
    return best * 1e6


def _layout() -> PageLayout:
    return PageLayout.for_rows("v4", page_rows=ROWS, policy="packed", alignment=576, page_stride_bytes=STRIDE)


def _tensor(storage: torch.Tensor) -> torch.Tensor:
    return storage.as_strided((PAGES, ROWS, ROW_BYTES), (STRIDE, ROW_BYTES, 1), OFFSET)


def main() -> None:
    """Prints the three figures with their limits."""
    parser = argparse.ArgumentParser(description="Cost of PageView.from_tensor")
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    storage = torch.zeros(PAGES * STRIDE, dtype=torch.uint8)
    layout, tensor = _layout(), _tensor(storage)
    bound = PageView.from_tensor(tensor, layout)
    base = microseconds(500, lambda: plain(tensor), rounds)
    seen = microseconds(2000, lambda: PageView.from_tensor(tensor, layout), rounds)
    made = microseconds(500, lambda: _tensor(storage), rounds)
    fresh = microseconds(300, lambda: PageView.from_tensor(_tensor(storage), layout), rounds) - made
    first = first_microseconds(storage, rounds)
    assert PageView.from_tensor(tensor, layout) is bound
    print(f"plain checks and as_strided  {base:6.2f} us")
    for name, figure, limit in (("seen", seen, 0.3 * base), ("fresh", fresh, base + 2), ("first", first, 30.0)):
        print(f"{name:28} {figure:6.2f} us   limit {limit:6.2f}   {'ok' if figure <= limit else 'over'}")


if __name__ == "__main__":
    main()
