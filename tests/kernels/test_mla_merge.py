"""merge_states: bases said, the sink once, and partial results that join to the whole (cases 37 and 38)."""

from __future__ import annotations

import math

import pytest
import torch

from kvbridge.kernels import cpu, mla
from kvbridge.kernels.conformance import Case, build, judge
from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.errors import MergeError

LIBRARY = cpu.load(emulate_amx=True)


def parts(*, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two ranks with sums of weights 2 and 8 and outputs 0 and 10."""
    outs = [torch.full((1, 1, 4), value, dtype=dtype) for value in (0.0, 10.0)]
    return outs, [torch.full((1, 1), math.log(weight)) for weight in (2.0, 8.0)]


def test_case_37_natural_base_gives_8() -> None:
    outs, lses = parts()
    out, lse = mla.merge_states(outs, lses, bases=["natural", "natural"])
    assert out.flatten().tolist() == pytest.approx([8.0] * 4, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(10), abs=1e-6)


def test_case_37_natural_values_taken_as_base_2_would_give_7_233() -> None:
    outs, lses = parts()
    out, _ = mla.merge_states(outs, lses, bases=["2", "2"])
    assert out[0, 0, 0].item() == pytest.approx(7.2330317, abs=1e-6)


def test_case_37_mixed_bases_are_converted() -> None:
    outs, lses = parts()
    out, lse = mla.merge_states(outs, [lses[0], lses[1] / math.log(2)], bases=["natural", "2"])
    assert out[0, 0, 0].item() == pytest.approx(8.0, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(10), abs=1e-6)


@pytest.mark.parametrize("bases", [None, [], ["natural"], "natural", ["natural", None], ["natural", "e"]])
def test_case_37_a_missing_base_is_refused(bases: object) -> None:
    outs, lses = parts()
    with pytest.raises(MergeError, match="bases"):
        mla.merge_states(outs, lses, bases=bases)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        mla.merge_states(outs, lses)  # type: ignore[call-arg]


def test_case_38_the_sink_enters_once() -> None:
    outs, lses = parts()
    out, lse = mla.merge_states(outs, lses, bases=["natural"] * 2, sink=torch.zeros(1))
    assert out[0, 0, 0].item() == pytest.approx(80 / 11, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(10), abs=1e-6)


def test_case_38_one_rank_may_hold_the_sink_in_output_and_lse() -> None:
    outs = [torch.zeros(1, 1, 4), torch.full((1, 1, 4), 80 / 9)]
    lses = [torch.full((1, 1), math.log(2)), torch.full((1, 1), math.log(9))]
    out, _ = mla.merge_states(outs, lses, bases=["natural"] * 2, sink_in_partials=[False, True])
    assert out[0, 0, 0].item() == pytest.approx(80 / 11, abs=1e-6)


def test_case_38_two_sinks_are_refused() -> None:
    outs, lses = parts()
    with pytest.raises(MergeError, match=r"sink_in_partials: got sinks in partials \[0, 1\], expected at most one"):
        mla.merge_states(outs, lses, bases=["natural"] * 2, sink_in_partials=[True, True])
    with pytest.raises(MergeError, match="sink: got a sink, and one in partial 1, expected one of them"):
        mla.merge_states(outs, lses, bases=["natural"] * 2, sink=torch.zeros(1), sink_in_partials=[False, True])


def test_case_38_sink_length_is_the_real_heads() -> None:
    outs = [torch.ones(1, 16, 4)] * 2
    lses = [torch.zeros(1, 16)] * 2
    padded = torch.zeros(64)
    padded[16:] = math.inf
    out, _ = mla.merge_states(outs, lses, bases=["natural"] * 2, sink=padded)
    assert out.flatten().tolist() == pytest.approx([2 / 3] * 64)
    with pytest.raises(MergeError, match=r"sink.shape: got \[8\], expected \[16\]"):
        mla.merge_states(outs, lses, bases=["natural"] * 2, sink=torch.zeros(8))


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_a_rank_without_slots_adds_nothing_even_with_nan(empty: float) -> None:
    outs, lses = parts()
    fill = math.nan if empty < 0 else 0.0
    out, lse = mla.merge_states(
        [*outs, torch.full((1, 1, 4), fill)], [*lses, torch.full((1, 1), empty)], bases=["natural"] * 3
    )
    assert out[0, 0, 0].item() == pytest.approx(8.0, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(10), abs=1e-6)


@pytest.mark.parametrize("sink", [None, torch.zeros(1), torch.full((1,), -math.inf)])
@pytest.mark.parametrize("flag", [-math.inf, math.inf])
def test_a_query_that_is_empty_everywhere_is_zero(sink: torch.Tensor | None, flag: float) -> None:
    empty = [torch.full((1, 1), -math.inf), torch.full((1, 1), math.inf)]
    out, lse = mla.merge_states([torch.zeros(1, 1, 4)] * 2, empty, bases=["natural", "2"], sink=sink, empty=flag)
    assert not out.any()
    assert lse.item() == flag


@pytest.mark.parametrize(("sink", "expected"), [(math.inf, 0.0), (1e30, 0.0), (-1e30, 8.0), (-math.inf, 8.0)])
def test_extreme_sinks(sink: float, expected: float) -> None:
    outs, lses = parts()
    out, _ = mla.merge_states(outs, lses, bases=["natural"] * 2, sink=torch.full((1,), sink))
    assert out[0, 0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_shapes_and_counts_are_checked() -> None:
    outs, lses = parts()
    with pytest.raises(MergeError, match="lses: got 1, expected 2"):
        mla.merge_states(outs, lses[:1], bases=["natural"] * 2)
    with pytest.raises(MergeError, match="outs: got 0, expected at least 1"):
        mla.merge_states([], [], bases=[])
    with pytest.raises(MergeError, match=r"outs\[1\]"):
        mla.merge_states([outs[0], outs[1].bfloat16()], lses, bases=["natural"] * 2)
    with pytest.raises(MergeError, match=r"lses\[1\].shape: got \[2, 1\], expected \[1, 1\]"):
        mla.merge_states(outs, [lses[0], torch.zeros(2, 1)], bases=["natural"] * 2)


def decode(scenario: Scenario, backend: str, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE without the sink."""
    prepared = mla.prepare(scenario.plan, backend=backend)
    out, lse = (
        torch.empty(scenario.case.queries, scenario.heads, 512),
        torch.empty(scenario.case.queries, scenario.heads),
    )
    form = mla.LseFormat(base=base)
    mla.run(prepared, q=scenario.q, caches=scenario.caches, out=out, lse=lse, scale=scenario.scale, lse_format=form)
    return out, lse


@pytest.mark.parametrize("backend", ["torch", "cpu", *(f"cpu:{path.name.lower()}" for path in LIBRARY.usable)])
def test_ranks_of_interleaved_slots_join_to_the_whole(backend: str) -> None:
    """Each rank holds every third slot, and rank 2 lost its share of query 2: the whole is the call without it."""
    case = Case(queries=5, heads=11, caches=2, width=192, lengths="full", slots="holes", out="fp32", lse="natural")
    outs, lses = [], []
    for rank in range(3):
        split = build(case)
        for cache in split.caches:
            position = torch.arange(cache.slots.shape[1])
            cache.slots[:, position % 3 != rank] = -1
            if rank == 2:
                cache.slots[2] = -1
        out, lse = decode(split, backend, "2" if rank == 1 else "natural")
        outs.append(out)
        lses.append(lse)
    whole = build(case)
    for cache in whole.caches:
        cache.slots[2, torch.arange(cache.slots.shape[1]) % 3 == 2] = -1
    out, lse = mla.merge_states(outs, lses, bases=["natural", "2", "natural"], sink=whole.sink)
    assert whole.lse is not None
    whole.out[:, : whole.heads] = out
    whole.lse[:, : whole.heads] = lse
    assert judge(whole).failures == []
