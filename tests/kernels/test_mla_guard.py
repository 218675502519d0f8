"""No backend touches a byte beyond the payload: memory right after the last one is forbidden.

|offset|page 0 ... page n-1: payload|PROT_NONE         tight, padded and packed; run as a child, which would die
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbridge.kernels import mla
from kvbridge.kernels.conformance import Case, Scenario, backend_target, build, judge
from kvbridge.view import PageView

ROOT = Path(__file__).resolve().parents[2]
PAGE = mmap.PAGESIZE
RECORDS = ["v4", "v41", "v41_interleaved", "v41_fp4", "v41_fp4_interleaved", "dsa", "v4_bf16", "mla_fp8"]


def guarded(cache: mla.Cache, *, overrun: int = 0) -> mla.Cache:
    """The cache with its pages copied so that the last payload, less `overrun` bytes, ends at forbidden memory."""
    view = cache.view
    span = view.layout.span_bytes(view.num_pages)
    room = -(-span // PAGE) * PAGE
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.mmap(None, room + PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    first = start + room - span
    memory = torch.frombuffer((ctypes.c_uint8 * span).from_address(first), dtype=torch.uint8)
    pages = memory.as_strided(view.pages.shape, (view.page_stride_bytes, 1))
    pages.copy_(view.pages)
    if overrun:
        place = first + overrun - overrun % 8
        memory = torch.frombuffer((ctypes.c_uint8 * span).from_address(place), dtype=torch.uint8)
        pages = memory.as_strided(view.pages.shape, (view.page_stride_bytes, 1))
    assert libc.mprotect(start + room, PAGE, 0) == 0
    return mla.Cache(
        view=PageView.from_tensor(pages, view.layout),
        slots=cache.slots,
        lengths=cache.lengths,
        external_scale=cache.external_scale,
    )


def scenarios() -> list[Scenario]:
    made = []
    for index, record in enumerate(RECORDS):
        stride = ("tight", "padded", "slab", "plus8")[index % 4]
        case = Case(
            record=record, stride=stride, page_rows=(61, 2, 64)[index % 3], slots="last_page", heads=11, width=65
        )
        made.append(build(case))
    return made


def child(backend: str, overrun: int) -> None:
    for scenario in scenarios():
        scenario.caches = [guarded(cache, overrun=overrun) for cache in scenario.caches]
        backend_target(backend).decode(scenario)
        assert not judge(scenario).failures, scenario.case
    print("survived")


@pytest.mark.parametrize("backend", ["torch", "cpu", "reference"])
def test_nothing_beyond_the_last_payload_byte_is_touched(backend: str) -> None:
    command = [sys.executable, "-m", "tests.kernels.test_mla_guard", backend, "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.strip() == "survived", result.stderr[-2000:]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_guard_kills_a_read_beyond(backend: str) -> None:
    command = [sys.executable, "-m", "tests.kernels.test_mla_guard", backend, "1024"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode < 0


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
