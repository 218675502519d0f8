"""Child process of test_cpu_memory.py: decodes from memory in which every byte outside the live rows is forbidden.

    guard:  ...payload of the last page|PROT_NONE page        stride a multiple of 4096: every page ends at such a page
    asan:   pads, dead rows, bytes before and after the cache are poisoned; q and out have the allocator's red zones

A forbidden access kills the process; the parent looks at the exit status. Arguments: mode, path ids.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import sys

import torch

from kvbridge.kernels import cpu
from kvbridge.records import get_record
from tests.kernels.cpu_support import Cache, make_cache

RECORDS = [
    "v4",
    "v41",
    "v41_interleaved",
    "v41_fp4",
    "v41_fp4_interleaved",
    "dsa",
    "v4_bf16",
    "mla_bf16",
    "uniform_fp8",
    "mla_fp8",
]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
PAGE = mmap.PAGESIZE
PROT_NONE = 0


def reserve(size: int) -> int:
    """Address of `size` readable bytes, kept for the life of the process."""
    address = LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert address and address != ctypes.c_void_p(-1).value
    return int(address)


def forbid(address: int, size: int) -> None:
    assert LIBC.mprotect(address, size, PROT_NONE) == 0


def guarded(cache: Cache) -> int:
    """Copies the payloads so that the last one (with page-sized strides: every one) ends at a forbidden page."""
    payload = cache.page_rows * get_record(cache.record).row_bytes
    span = (cache.num_pages - 1) * cache.page_stride_bytes + payload
    room = (span + 2 * PAGE - 1) // PAGE * PAGE
    start = reserve(room + 2 * PAGE)
    base = start + PAGE + room - span
    source = cache.storage.data_ptr() + cache.offset_bytes
    for page in range(cache.num_pages):
        LIBC.memmove(base + page * cache.page_stride_bytes, source + page * cache.page_stride_bytes, payload)
    forbid(start, PAGE)
    forbid(start + PAGE + room, PAGE)
    if cache.page_stride_bytes % PAGE == 0:
        for page in range(cache.num_pages - 1):
            end = base + page * cache.page_stride_bytes + payload
            forbid(end, cache.page_stride_bytes - (payload + PAGE - 1) // PAGE * PAGE)
    return base


def run(
    library: cpu.Library, path: cpu.Path, cache: Cache, base: int, *, slots: torch.Tensor, lengths: torch.Tensor | None
) -> torch.Tensor:
    described = cpu.record_structure(cache.record, cache.page_rows)
    q = torch.randn(slots.shape[0], 11, described.values + described.tail_values).bfloat16()
    out = torch.empty(slots.shape[0], 11, 512).bfloat16()
    arguments = dataclasses.replace(cache.arguments(slots, lengths), base=base)
    cpu.bind(library=library, q=q, caches=[arguments], out=out, scale=0.04, threads=1, path=path).run()
    return out


def guard_pages(library: cpu.Library, paths: list[cpu.Path]) -> None:
    for record in RECORDS:
        row_bytes = get_record(record).row_bytes
        for page_rows in (1, 2, 53, 64):
            tight = row_bytes * page_rows
            own_guard = (tight + PAGE - 1) // PAGE * PAGE + PAGE
            for pad in (0, 8, 64, own_guard - tight):
                cache = make_cache(record, page_rows=page_rows, num_pages=3, pad_bytes=pad)
                base = guarded(cache)
                everything = torch.arange(cache.capacity)[None]
                for path in paths:
                    assert run(library, path, cache, base, slots=everything, lengths=None).isfinite().all()


def poisoned(library: cpu.Library, paths: list[cpu.Path]) -> None:
    poison = ctypes.CDLL(None).__asan_poison_memory_region
    poison.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    unpoison = ctypes.CDLL(None).__asan_unpoison_memory_region
    unpoison.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for record in RECORDS:
        for page_rows, pad in ((53, 8), (64, 64), (2, 192)):
            cache = make_cache(record, page_rows=page_rows, num_pages=4, pad_bytes=pad, offset_bytes=64)
            start = cache.storage.data_ptr()
            poison(start, cache.storage.numel())
            live = [slot for slot in range(cache.capacity) if slot % 3 == 0]
            for slot in live:
                page, row = divmod(slot, page_rows)
                for region in get_record(record).regions(page_rows):
                    at = (
                        start
                        + cache.offset_bytes
                        + page * cache.page_stride_bytes
                        + region.offset
                        + row * region.row_stride
                    )
                    unpoison(at, region.row_bytes)
            slots = torch.full((2, len(live) + 6), -1, dtype=torch.int64)
            slots[:, : len(live)] = torch.tensor(live)
            slots[:, -6:] = torch.tensor(
                [-1, cache.capacity, 2**32 + 3, -(2**63), 2**63 - 1, 1]
            )  # the last: live, past the length
            lengths = torch.full((2,), slots.shape[1] - 1)
            for path in paths:
                assert (
                    run(library, path, cache, start + cache.offset_bytes, slots=slots, lengths=lengths).isfinite().all()
                )
            unpoison(start, cache.storage.numel())


def wild_slots(library: cpu.Library, paths: list[cpu.Path]) -> None:
    generator = torch.Generator().manual_seed(5)
    cache = make_cache("v4", page_rows=53, num_pages=3)
    base = guarded(cache)
    for round_ in range(60):
        slots = torch.randint(-(2**63), 2**63 - 1, (3, 40), generator=generator) >> torch.randint(
            0, 63, (3, 40), generator=generator
        )
        lengths = torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator) >> (round_ % 60)
        for path in paths:
            assert run(library, path, cache, base, slots=slots, lengths=lengths).isfinite().all()


def crash(library: cpu.Library, paths: list[cpu.Path]) -> None:
    """The control: a page count that is one too large must be noticed by the guard or the sanitizer."""
    cache = make_cache("v4", page_rows=64, num_pages=3)
    base = guarded(cache)
    cache.num_pages += 1
    run(library, paths[0], cache, base, slots=torch.arange(192, 256)[None], lengths=None)


def poisoned_crash(library: cpu.Library, paths: list[cpu.Path]) -> None:
    """The control: a poisoned row among the live ones must be noticed."""
    cache = make_cache("v4", page_rows=64, num_pages=2)
    poison = ctypes.CDLL(None).__asan_poison_memory_region
    poison.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    poison(cache.storage.data_ptr() + 5 * 576, 576)
    run(library, paths[0], cache, cache.storage.data_ptr(), slots=torch.arange(10)[None], lengths=None)


MODES = {mode.__name__: mode for mode in (guard_pages, poisoned, wild_slots, crash, poisoned_crash)}


def main() -> None:
    mode, *ids = sys.argv[1:]
    library = cpu.load(sanitize=mode.startswith("poisoned"), emulate_amx=True)
    paths = [path for path in library.usable if not ids or str(int(path)) in ids]
    MODES[mode](library, paths)
    print("survived", mode, [path.name for path in paths])


if __name__ == "__main__":
    main()
