"""Threads of the CPU backend: OpenMP of torch or own ones, concurrent callers, fork, errors of a call."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kvbridge.kernels import cpu
from tests.kernels.cpu_support import decode, make_cache

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = cpu.load(emulate_amx=True)
CACHE = make_cache("v4", page_rows=64, num_pages=8)


def example(seed: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 32, 512, generator=generator).bfloat16(), torch.randint(
        0, CACHE.capacity, (count, 200), generator=generator
    )


def test_openmp_of_torch_is_found() -> None:
    assert cpu.openmp_parallel() != 0, "torch is imported, so its OpenMP runtime must be found"


@pytest.mark.parametrize("flags", [cpu.Flag(0), cpu.Flag.OWN_THREADS])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_thread_kinds_agree(flags: cpu.Flag, threads: int) -> None:
    q, slots = example(0)
    want, want_lse = decode(LIBRARY, cpu.Path.AUTO, q, [(CACHE, slots, None)])
    for _ in range(20):
        out, lse = decode(LIBRARY, cpu.Path.AUTO, q, [(CACHE, slots, None)], threads=threads, flags=flags)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("flags", [cpu.Flag(0), cpu.Flag.OWN_THREADS])
def test_concurrent_callers(flags: cpu.Flag) -> None:
    inputs = [example(seed) for seed in range(4)]
    wanted = [decode(LIBRARY, cpu.Path.AUTO, q, [(CACHE, slots, None)]) for q, slots in inputs]
    wrong: list[int] = []

    def caller(index: int) -> None:
        q, slots = inputs[index]
        for _ in range(30):
            out, lse = decode(LIBRARY, cpu.Path.AUTO, q, [(CACHE, slots, None)], threads=3, flags=flags)
            if not (torch.equal(out, wanted[index][0]) and torch.equal(lse, wanted[index][1])):
                wrong.append(index)

    callers = [threading.Thread(target=caller, args=(index,)) for index in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in callers) and not wrong


FORK = """
import os, torch
from kvbridge.kernels import cpu
from tests.kernels.test_cpu_threads import CACHE, LIBRARY, example
q, slots = example(3)
for flags in (cpu.Flag(0), cpu.Flag.OWN_THREADS):
    out = torch.zeros_like(q)
    raw = out.view(torch.int16).numpy()
    bound = cpu.bind(library=LIBRARY, q=q, caches=[CACHE.arguments(slots)], out=out, scale=0.04, threads=2, flags=flags)
    bound.run()
    want = raw.tobytes()
    for _ in range(3):
        raw[:] = 0
        child = os.fork()
        if child == 0:  # no torch operation here: torch's own would hang, its OpenMP threads are gone
            bound.run()
            os._exit(0 if raw.tobytes() == want else 1)
        assert os.waitpid(child, 0)[1] == 0
    bound.run()
    assert raw.tobytes() == want
print("forked")
"""


def test_fork_after_both_kinds_of_threads_have_run() -> None:
    """A child has lost all threads but one: it must neither hang nor compute anything else."""
    result = subprocess.run(
        [sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0 and "forked" in result.stdout, result.stderr[-2000:]


def test_no_more_threads_than_asked() -> None:
    code = (
        "import os, torch\nfrom tests.kernels.test_cpu_threads import *\n"
        "q, slots = example(0)\nbefore = len(os.listdir('/proc/self/task'))\n"
        "for _ in range(5):\n"
        "    decode(LIBRARY, cpu.Path.AUTO, q, [(CACHE, slots, None)], threads=3, flags=cpu.Flag.OWN_THREADS)\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(result.stdout) == 2


def test_refused_calls_say_why() -> None:
    q, slots = example(0)
    bound = cpu.bind(
        library=LIBRARY, q=q, caches=[CACHE.arguments(slots)], out=torch.empty_like(q), scale=1.0, threads=1
    )
    for field, value, text in (
        ("abi", 99, "does not match"),
        ("path", 77, "not compiled in"),
        ("heads", 129, "1..128"),
        ("heads", 0, "1..128"),
        ("queries", -1, "queries"),
        ("threads", 0, "threads"),
        ("d_v", 256, "d_v"),
        ("d_qk", 576, "combination"),
        ("caches", 4, "one to three"),
        ("q", None, "pointer"),
    ):
        kept = getattr(bound.structure, field)
        setattr(bound.structure, field, value)
        with pytest.raises(cpu.CpuCallError, match=text):
            bound.run()
        setattr(bound.structure, field, kept)
    for field, value, text in (
        ("page_rows", 0, "page_rows"),
        ("num_pages", 2**62, "64 bits"),
        ("slots_bits", 16, "int32 or int64"),
        ("base", None, "pointer"),
    ):
        kept = getattr(bound.structure.cache[0], field)
        setattr(bound.structure.cache[0], field, value)
        with pytest.raises(cpu.CpuCallError, match=text):
            bound.run()
        setattr(bound.structure.cache[0], field, kept)
    bound.run()


def test_unknown_records_are_refused() -> None:
    for record in ("nvfp4_432", "indexer_fp8", "unified_fp8", "state_fp32_512"):
        with pytest.raises(cpu.CpuCallError, match=f"record: got '{record}'"):
            cpu.record_structure(record, 64)


def test_no_queries_is_nothing_to_do() -> None:
    q, slots = example(0, count=1)
    out, _ = decode(LIBRARY, cpu.Path.AUTO, q[:0], [(CACHE, slots[:0], None)])
    assert out.shape == (0, 32, 512)
