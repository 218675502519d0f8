"""Host time of a call of the CUDA backend, against a mock driver that launches nothing.

    python benchmarks/cuda_overhead.py [--rounds 200] [--json FILE]

    bound     bound.run()                                    limit 8 us
    patched   bound.run(q=, out=, lse=, slots=, lengths=)    every tensor is new, checked and patched in
    unbound   mla.run(prepared, ...) with every argument     limit 25 us

Two caches, 64 heads, an LSE and a sink: what a DeepSeek-V4 layer with a compressed cache passes. The driver's own time
comes on top. Each figure is the best of many short rounds: other load on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvbridge.kernels import mla  # noqa: E402
from kvbridge.kernels.conformance import Case, build  # noqa: E402
from tests.kernels import mock_driver  # noqa: E402

CASE = Case(queries=64, heads=64, caches=2, width=128, lengths="full", lse="natural", sink="normal")
LIMITS_US = {"bound": 8.0, "unbound": 25.0}


def microseconds(calls: int, work: Callable[[], object], rounds: int) -> float:
    """Best mean time of a call."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def measure(rounds: int) -> dict[str, float]:
    """Times the three ways; the mock counts that every one of them launched."""
    scenario = build(CASE)
    prepared = mock_driver.prepared(scenario.plan)
    mock = mock_driver.Mock()
    mock.keep(False)
    caches, q, out, lse = scenario.caches, scenario.q, scenario.out, scenario.lse
    slots, lengths = [cache.slots for cache in caches], [cache.lengths for cache in caches]
    arguments: dict[str, Any] = {
        "q": q,
        "caches": caches,
        "out": out,
        "scale": scenario.scale,
        "sink": scenario.sink,
        "lse": lse,
    }
    bound = mla.bind(prepared, **arguments)
    ways: dict[str, Callable[[], object]] = {
        "bound": bound.run,
        "patched": lambda: bound.run(q=q, out=out, lse=lse, slots=slots, lengths=lengths),
        "unbound": lambda: mla.run(prepared, **arguments),
    }
    figures = {}
    with mock_driver.current():
        for name, work in ways.items():
            before = mock.launches
            figures[name] = microseconds(100, work, rounds)
            assert mock.launches == before + 100 * rounds, f"{name}: a call did not launch"
    return figures


def main() -> int:
    """Runs itself again under the mock, measures there, prints and compares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    chosen = parser.parse_args()
    if "KVB_MOCK_ARCH" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], mock_driver.environment())
    torch.set_num_threads(1)
    figures = measure(chosen.rounds)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, sort_keys=True) + "\n")
    over = 0
    for name, figure in figures.items():
        limit = LIMITS_US.get(name)
        verdict = "" if limit is None else f"   limit {limit:5.1f}   {'ok' if figure <= limit else 'over'}"
        over += limit is not None and figure > limit
        print(f"{name:8} {figure:6.2f} us{verdict}")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
