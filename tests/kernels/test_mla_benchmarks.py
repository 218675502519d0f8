"""Host overhead within its limits, and the timing that refuses what a barrier stretched."""

from __future__ import annotations

import pytest
import torch

from benchmarks import plain_torch
from benchmarks.measure import interleaved, quantised
from benchmarks.mla_cpu import Inputs, agree, contender, gigaflops, pool, table
from benchmarks.mla_overhead import BOUND_MICROSECONDS, overheads


def test_a_bound_run_adds_next_to_nothing_and_binding_is_what_costs() -> None:
    """A bound run adds 0.2 us of its 6; the other limits depend on the machine, so the script alone reports them."""
    tries = [overheads() for _ in range(3)]
    least = {name: min(found[name] for found in tries) for name in tries[0]}
    assert least["bound run"] <= BOUND_MICROSECONDS
    assert least["bound run"] < least["bound run, fresh tensors"] < least["unbound run"]


@pytest.mark.parametrize(
    ("sample", "refused"),
    [(0.0010, False), (0.0090, True), (0.0092, True), (0.0050, False), (0.0171, True), (0.0130, False), (0.161, True)],
)
def test_samples_a_whole_number_of_barriers_above_the_fastest_are_refused(sample: float, refused: bool) -> None:
    assert quantised(sample, 0.0010) is refused


def test_contenders_take_turns() -> None:
    order: list[str] = []
    clock = iter(range(10**6))
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = interleaved(calls, seconds=0, least_rounds=4, clock=lambda: float(next(clock)))
    assert "".join(order[3:]) == "abcbcacababc"
    assert all(len(timing.samples) + timing.refused == 4 for timing in timings.values())


def test_the_benchmark_compares_equal_results_and_prints_the_ratio() -> None:
    cell = (2, 8, 64)
    inputs = Inputs(cell, pool(64 * 4, 1), pool(64 * 4, 2))
    made = {name: contender(name, inputs, cell) for name in ("cpu", "torch")}
    timings = interleaved({name: call for name, (call, _) in made.items()}, seconds=0, least_rounds=2)
    agree(made)
    plain = plain_torch.decode(inputs.q, inputs.caches, inputs.sink, inputs.scale)
    out = made["cpu"][1]
    assert out is not None
    assert ((plain.float() - out.float()).square().mean() / out.float().square().mean()).sqrt() < 1e-2
    from benchmarks.mla_cpu import Row

    lines = table([Row(cell, {"T1": timings})], ["cpu", "torch"], "cpu", "torch")
    assert lines[-1].startswith("T1: torch / cpu, ratio of minima: geometric mean ")
    assert gigaflops(cell, 1.0) == 4 * 2 * 8 * (128 + 64) * 512 / 1e9
    made["torch"][1].add_(1)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="torch differs from cpu by a relative RMS"):
        agree(made)
    assert torch.isfinite(out).all()
