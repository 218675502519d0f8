"""Repack against memcpy: GB/s of page copies between two pools, beside plain copies of as many bytes and threads.

    python benchmarks/repack_bandwidth.py [--gib 1] [--threads 2] [--rounds 7]

    pages     payload   pattern           repack   memcpy   ratio
    37,376 B of 37,440, exact -> aligned  range    ..       ..

memcpy copies one flat buffer of the same size with libc's function, split over the same number of threads. Both working
sets are far beyond the last-level cache. Rates count a byte once: reads plus writes are twice that. Rounds of both
alternate, and the best of each counts, so that other load on the machine hits both.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from kvbridge import PageLayout, PageView
from kvbridge.repack import copy_pages

LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LIBC.memcpy.restype = ctypes.c_void_p


def pool(layout: PageLayout, num_pages: int) -> PageView:
    """A pool of `num_pages` pages whose memory is touched, so that no page fault is timed."""
    storage = torch.full((num_pages * layout.page_stride_bytes,), 7, dtype=torch.uint8)
    return PageView.from_tensor(
        storage.as_strided((num_pages, layout.payload_bytes), (layout.page_stride_bytes, 1)), layout
    )


class FlatCopy:
    """libc's memcpy of a flat buffer, split over threads that wait for each round (the GIL is released meanwhile)."""

    def __init__(self, num_bytes: int, parts: int) -> None:
        self._source, self._target = (torch.full((num_bytes,), value, dtype=torch.uint8) for value in (1, 2))
        self._step = num_bytes // parts
        self._gate = threading.Barrier(parts + 1)
        for part in range(parts):
            threading.Thread(target=self._work, args=(part * self._step,), daemon=True).start()

    def _work(self, first: int) -> None:
        while True:
            self._gate.wait()
            LIBC.memcpy(self._target.data_ptr() + first, self._source.data_ptr() + first, self._step)
            self._gate.wait()

    def __call__(self) -> None:
        """One copy of the whole buffer."""
        self._gate.wait()
        self._gate.wait()


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call, after torch's threads have stopped waiting actively for the next."""
    time.sleep(0.02)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cases(num_bytes: int) -> list[tuple[str, PageLayout, PageLayout, str]]:
    """(title, source layout, target layout, pattern): pages of 32 KB and more, then what costs more."""
    rows = PageLayout.for_rows
    exact, aligned = rows("v4", page_rows=64), rows("v4", page_rows=64, policy="aligned", alignment=576)
    packed = rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=3 * 37440)
    large = rows("v4", page_rows=256, policy="aligned", alignment=576)
    split, interleaved = rows("v41", page_rows=64), rows("v41_interleaved", page_rows=64)
    state = rows("state_fp32_1024", page_rows=8)
    return [
        ("37,376 B exact -> 37,440 aligned", exact, aligned, "range"),
        ("37,376 B exact -> 37,440 aligned", exact, aligned, "gather"),
        ("37,376 B exact -> 37,440 aligned", exact, aligned, "scatter"),
        ("37,376 B exact -> 37,440 aligned", exact, aligned, "random"),
        ("37,376 B packed -> exact", packed, exact, "range"),
        ("32,768 B exact -> exact (state)", state, state, "random"),
        ("149,504 B aligned -> aligned", large, large, "random"),
        ("33,792 B V4.1 interleaved", interleaved, interleaved, "random"),
        ("256 rows -> 4 pages of 64", large, aligned, "range"),
        ("V4.1 split -> interleaved", split, interleaved, "range"),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="bytes copied in each case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * (1 << 30))
    torch.set_num_threads(arguments.threads)
    flat_copy = FlatCopy(num_bytes, arguments.threads)
    print(f"{arguments.threads} threads, {num_bytes / 1e9:.2f} GB a case, best of {arguments.rounds} rounds; GB/s")
    print(f"{'pages':36}{'pattern':10}{'repack':>8}{'memcpy':>8}{'ratio':>8}")
    for title, source_layout, target_layout, pattern in cases(num_bytes):
        source_pages = num_bytes // source_layout.payload_bytes
        target_pages = source_pages * source_layout.page_rows // target_layout.page_rows
        source, target = pool(source_layout, source_pages), pool(target_layout, target_pages)
        order, goal = random.Random(1), random.Random(2)
        here = list(range(source_pages)) if pattern != "range" else range(source_pages)
        there = list(range(target_pages)) if pattern != "range" else range(target_pages)
        if isinstance(here, list) and pattern in ("gather", "random"):
            order.shuffle(here)
        if isinstance(there, list) and pattern in ("scatter", "random"):
            goal.shuffle(there)
        moved = source_pages * source_layout.payload_bytes
        ours, plain = [], []
        repack = partial(copy_pages, source, target, source_pages=here, target_pages=there)
        for _ in range(arguments.rounds):
            ours.append(seconds(repack))
            plain.append(seconds(flat_copy))
        rate, floor = moved / min(ours) / 1e9, num_bytes / min(plain) / 1e9
        print(f"{title:36}{pattern:10}{rate:8.1f}{floor:8.1f}{rate / floor:8.2f}", flush=True)


if __name__ == "__main__":
    main()
