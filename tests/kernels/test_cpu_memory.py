"""No path of the CPU backend touches a byte outside live rows, whatever the slots and lengths say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.kernels import cpu, cpu_build
from tests.kernels.cpu_support import decode, make_cache

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = cpu.load(emulate_amx=True)
ANY_INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.integers(-3, 200), st.sampled_from([2**32 + 5, 2**31, -(2**31), 2**63 - 1])
)


def child(mode: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.kernels.cpu_memory_child", mode]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.parametrize("mode", ["guard_pages", "wild_slots"])
def test_guard_pages(mode: str) -> None:
    result = child(mode)
    assert result.returncode == 0 and f"survived {mode}" in result.stdout, result.stderr[-2000:]


def test_guard_pages_notice_a_wrong_page_count() -> None:
    result = child("crash")
    assert result.returncode < 0, "the guard page did not stop a read past the last page"


def test_address_sanitizer() -> None:
    """Pads, dead rows and surroundings poisoned; q, out and scratch under the allocator's red zones."""
    compiler = cpu_build.find_compiler()
    runtime = subprocess.run(
        [*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{compiler[0]} has no libasan.so to preload")
    options = "detect_leaks=0:handle_segv=0:use_sigaltstack=0:verify_asan_link_order=0"
    result = child("poisoned_crash", LD_PRELOAD=str(Path(runtime).resolve()), ASAN_OPTIONS=options)
    assert result.returncode != 0 and "use-after-poison" in result.stderr, (
        "the sanitizer did not see a read of poisoned bytes"
    )
    result = child("poisoned", LD_PRELOAD=str(Path(runtime).resolve()), ASAN_OPTIONS=options)
    assert result.returncode == 0 and "survived poisoned" in result.stdout, result.stderr[-3000:]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_slots_and_lengths(data: st.DataObject) -> None:
    """Arbitrary 64-bit slots and lengths give what the list of live slots gives."""
    cache = make_cache("v4", page_rows=13, num_pages=9)
    width = data.draw(st.integers(1, 24))
    slots = torch.tensor([data.draw(st.lists(ANY_INT64, min_size=width, max_size=width))])
    length = torch.tensor([data.draw(ANY_INT64)])
    path = data.draw(st.sampled_from(LIBRARY.usable))
    q = torch.randn(1, 5, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, lse = decode(LIBRARY, path, q, [(cache, slots, length)])
    prefix = slots[0][: max(0, min(width, int(length)))]
    live = prefix[(prefix >= 0) & (prefix < cache.capacity)][None]
    want, want_lse = decode(LIBRARY, path, q, [(cache, live, None)])
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
