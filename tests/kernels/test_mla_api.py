"""The decode API: what is refused and how, what a bound call takes over, which backend is chosen and why."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbridge.errors import StaleViewError
from kvbridge.kernels import backends, cpu_backend, cpu_build, mla
from kvbridge.kernels.conformance import Case, build, judge
from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.errors import (
    ArgumentDtypeError,
    ArgumentError,
    BackendError,
    BackendFallbackWarning,
    CapacityError,
    DeviceError,
    NotPreparedError,
    ShapeError,
    StrideError,
    ValueRangeError,
    WorkspaceError,
)

BACKENDS = ["reference", "torch", "cpu"]
PLAIN = Case(queries=4, heads=8, caches=2, width=65, lengths="boundary", page_rows=61, stride="slab")


def arguments(scenario: Scenario) -> dict[str, Any]:
    return {
        "q": scenario.q,
        "caches": scenario.caches,
        "out": scenario.out,
        "scale": scenario.scale,
        "sink": scenario.sink,
        "lse": scenario.lse,
    }


def test_bind_of_a_plan_says_to_prepare() -> None:
    scenario = build(PLAIN)
    with pytest.raises(NotPreparedError, match=r"what prepare\(plan, device=...\) returned, got Plan"):
        mla.bind(scenario.plan, **arguments(scenario))  # type: ignore[arg-type]


def bad(scenario: Scenario, name: str) -> dict[str, Any]:
    """Arguments of which one is wrong."""
    given = arguments(scenario)
    first, second = scenario.caches
    queries, heads = scenario.case.queries, scenario.heads
    changes: dict[str, dict[str, Any]] = {
        "q rank": {"q": scenario.q.flatten(1)},
        "q dtype": {"q": scenario.q.float()},
        "q heads": {"q": scenario.q[:, :7]},
        "q width": {"q": scenario.q[..., :448]},
        "q stride": {"q": scenario.q.transpose(1, 2).contiguous().transpose(1, 2)},
        "q queries": {"q": torch.zeros(9, heads, 512, dtype=torch.bfloat16)},
        "q device": {"q": scenario.q.to("meta")},
        "out rank": {"out": scenario.out.flatten(1)},
        "out queries": {"out": scenario.out[:3]},
        "out heads": {"out": scenario.out[:, :4]},
        "out width": {"out": torch.empty(queries, heads, 576, dtype=torch.bfloat16)},
        "out dtype": {"out": scenario.out.half()},
        "out alias": {"out": scenario.out[:1].expand(queries, heads, 512)},
        "out overlap": {
            "out": torch.empty(9000, dtype=torch.bfloat16).as_strided((queries, heads, 512), (100, 512, 1))
        },
        "lse shape": {"lse": torch.empty(queries, 4)},
        "lse dtype": {"lse": torch.empty(queries, heads, dtype=torch.float64)},
        "lse alias": {"lse": torch.empty(1, heads).expand(queries, heads)},
        "sink short": {"sink": torch.zeros(4)},
        "sink dtype": {"sink": torch.zeros(heads, dtype=torch.bfloat16)},
        "sink stride": {"sink": torch.zeros(2 * heads)[::2]},
        "scale": {"scale": math.inf},
        "no cache": {"caches": []},
        "three caches": {"caches": [first, second, first]},
        "cache record": {"caches": build(replace(PLAIN, record="v41", caches=1)).caches},
        "slots rank": {"caches": [replace(first, slots=first.slots[0])]},
        "slots rows": {"caches": [replace(first, slots=first.slots[:2])]},
        "slots width": {"caches": [replace(first, slots=torch.zeros(queries, 66, dtype=torch.int32))]},
        "slots dtype": {"caches": [replace(first, slots=first.slots.short())]},
        "slots stride": {"caches": [replace(first, slots=torch.zeros(65, queries, dtype=torch.int32).T)]},
        "slots device": {"caches": [first, replace(second, slots=second.slots.to("meta"))]},
        "lengths shape": {"caches": [replace(first, lengths=torch.zeros(3, dtype=torch.int32))]},
        "lengths dtype": {"caches": [replace(first, lengths=torch.zeros(queries))]},
        "external scale": {"caches": [replace(first, external_scale=0.5)]},
        "no map": {"caches": [replace(first, lengths_per_sequence=True)]},
        "map shape": {"sequence_of_query": torch.zeros(3, dtype=torch.int32)},
        "map dtype": {"sequence_of_query": torch.zeros(queries)},
    }
    return {**given, **changes[name]}


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("q rank", ShapeError, "q.shape: got [4, 4096], expected [queries, heads, d_qk]"),
        ("q dtype", ArgumentDtypeError, "q.dtype: got torch.float32, expected torch.bfloat16"),
        ("q heads", ShapeError, "q.shape[1]: got 7, expected at least 8 (heads of the plan)"),
        ("q width", ShapeError, "q.shape[2]: got 448, expected 512 (record v4)"),
        ("q stride", StrideError, "q.stride(2): got 8, expected 1"),
        ("q queries", CapacityError, "q.shape[0]: got 9, expected at most 4 (caps.queries)"),
        ("q device", DeviceError, "q.device: got meta, expected cpu (device of prepare)"),
        ("out rank", ShapeError, "out.shape: got [4, 4096], expected [queries, heads, d_v]"),
        ("out queries", ShapeError, "out.shape[0]: got 3, expected 4 (queries of q)"),
        ("out heads", ShapeError, "out.shape[1]: got 4, expected at least 8 (heads)"),
        ("out width", ShapeError, "out.shape[2]: got 576, expected 512 (d_v of the record)"),
        ("out dtype", ArgumentDtypeError, "out.dtype: got torch.float16, expected torch.bfloat16 or torch.float32"),
        ("out alias", StrideError, "out.stride(): got (0, 512), expected rows of 512 that do not overlap"),
        ("out overlap", StrideError, "out.stride(): got (100, 512), expected rows of 512 that do not overlap"),
        ("lse shape", ShapeError, "lse.shape: got [4, 4], expected [4, at least 8]"),
        ("lse dtype", ArgumentDtypeError, "lse.dtype: got torch.float64, expected torch.float32"),
        ("lse alias", StrideError, "lse.stride(): got (0, 1), expected rows of 1 that do not overlap"),
        ("sink short", ShapeError, "sink.shape: got [4], expected [8] (one logit for each head)"),
        ("sink dtype", ArgumentDtypeError, "sink.dtype: got torch.bfloat16, expected torch.float32"),
        ("sink stride", StrideError, "sink.stride(0): got 2, expected 1"),
        ("scale", ValueRangeError, "scale: got inf, expected a finite number"),
        ("no cache", ValueRangeError, "caches: got 0, expected 1 to 3"),
        ("three caches", CapacityError, "caches: got more than 2, expected at most 2 (caps.records)"),
        ("cache record", ValueRangeError, "caches[0].view.layout.record: got v41, expected v4 (record of the plan)"),
        ("slots rank", ShapeError, "caches[0].slots.shape: got [65], expected [queries, width]"),
        ("slots rows", ShapeError, "caches[0].slots.shape[0]: got 2, expected 4 (queries of q)"),
        ("slots width", CapacityError, "caches[0].slots.shape[1]: got 66, expected at most 65 (caps.widths[0])"),
        ("slots dtype", ArgumentDtypeError, "caches[0].slots.dtype: got torch.int16, expected torch.int32 or"),
        ("slots stride", StrideError, "caches[0].slots.stride(1): got 4, expected 1"),
        ("slots device", DeviceError, "caches[1].slots.device: got meta, expected cpu"),
        ("lengths shape", ShapeError, "caches[0].lengths.shape: got [3], expected [4] (queries of q)"),
        ("lengths dtype", ArgumentDtypeError, "caches[0].lengths.dtype: got torch.float32, expected int32 or int64"),
        ("external scale", ValueRangeError, "caches[0].external_scale: got 0.5, expected none (record v4)"),
        ("no map", ValueRangeError, "sequence_of_query: got None, expected a map (caches[0] needs it)"),
        ("map shape", ShapeError, "sequence_of_query.shape: got [3], expected [4] (queries of q)"),
        ("map dtype", ArgumentDtypeError, "sequence_of_query.dtype: got torch.float32, expected int32 or int64"),
    ],
)
def test_every_argument_error_names_argument_got_and_expected(name: str, kind: type[ArgumentError], text: str) -> None:
    scenario = build(PLAIN)
    prepared = mla.prepare(scenario.plan, backend="torch")
    with pytest.raises(kind) as raised:
        mla.bind(prepared, **bad(scenario, name))
    assert text in str(raised.value)


def test_record_with_outside_scale_needs_one() -> None:
    scenario = build(Case(record="mla_fp8"))
    prepared = mla.prepare(scenario.plan, backend="torch")
    given = {**arguments(scenario), "caches": [replace(scenario.caches[0], external_scale=None)]}
    with pytest.raises(ValueRangeError, match=r"external_scale: got None, expected a positive finite number"):
        mla.bind(prepared, **given)


def test_lse_format_is_checked() -> None:
    with pytest.raises(ValueRangeError, match=r"lse.base: got e, expected one of \['natural', '2'\]"):
        mla.LseFormat(base="e")
    with pytest.raises(ValueRangeError, match=r"lse.empty: got 0.0, expected -inf or \+inf"):
        mla.LseFormat(empty=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bound_call_takes_over_fresh_tensors(backend: str) -> None:
    scenario = build(PLAIN)
    bound = mla.bind(mla.prepare(scenario.plan, backend=backend), **arguments(scenario))
    bound.run()
    assert not judge(scenario).failures
    other = build(replace(PLAIN, queries=2, index_bits=64, out="fp32", slots="holes"), seed=5)
    # The fresh tensors name rows of the first scenario's pages, as an engine's next step does.
    for mine, fresh in zip(scenario.caches, other.caches, strict=True):
        fresh.slots.copy_(mine.slots[:2])
    bound.run(
        q=other.q,
        out=other.out,
        lse=other.lse,
        slots=[cache.slots for cache in other.caches],
        lengths=[cache.lengths for cache in other.caches],
    )
    other.caches = [replace(fresh, view=mine.view) for mine, fresh in zip(scenario.caches, other.caches, strict=True)]
    other.sink = scenario.sink
    assert not judge(other).failures


@pytest.mark.parametrize("backend", BACKENDS)
def test_contents_may_change_between_runs(backend: str) -> None:
    scenario = build(PLAIN)
    bound = mla.bind(mla.prepare(scenario.plan, backend=backend), **arguments(scenario))
    bound.run()
    scenario.q.neg_()
    assert scenario.caches[0].lengths is not None
    scenario.caches[0].lengths[0] = 7
    scenario.caches[1].slots[1, :5] = -1
    scenario.clear()
    bound.run()
    assert not judge(scenario).failures


def test_a_refused_patch_changes_and_launches_nothing() -> None:
    scenario = build(PLAIN)
    bound = mla.bind(mla.prepare(scenario.plan, backend="cpu"), **arguments(scenario))
    slots = [cache.slots for cache in scenario.caches]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"q": scenario.q[:2]}, "out.shape[0]: got 4, expected 2"),
        ({"q": scenario.q[:2], "out": scenario.out[:2]}, "lse.shape: got [4, 8], expected [2"),
        ({"slots": slots[:1]}, "slots: got 1, expected 2 (one for each cache bound)"),
        ({"lengths": [None]}, "lengths: got 1, expected 2"),
        ({"slots": [slots[0], slots[1].float()]}, "caches[1].slots.dtype"),
        ({"lse": torch.empty(4, 8, dtype=torch.float16)}, "lse.dtype"),
        ({"sequence_of_query": torch.zeros(9, dtype=torch.int64)}, "sequence_of_query.shape"),
    ]
    for patch, text in refused:
        with pytest.raises(ArgumentError) as raised:
            bound.run(**patch)
        assert text in str(raised.value)
    assert scenario.out.isnan().all()
    bound.run()
    assert not judge(scenario).failures


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [0, 1])
def test_no_queries_and_no_slots(backend: str, queries: int) -> None:
    scenario = build(replace(PLAIN, caches=1))
    cache = scenario.caches[0]
    out = torch.full((queries, 8, 512), math.nan)
    lse = torch.full((queries, 8), math.nan)
    prepared = mla.prepare(scenario.plan, backend=backend)
    empty = mla.Cache(view=cache.view, slots=cache.slots[:queries, :0])
    mla.run(prepared, q=scenario.q[:queries], caches=[empty], out=out, scale=0.1, lse=lse)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots_per_sequence", [False, True])
@pytest.mark.parametrize("lengths_per_sequence", [False, True])
def test_per_sequence_slots_and_lengths_are_those_of_the_map(
    backend: str, slots_per_sequence: bool, lengths_per_sequence: bool
) -> None:
    scenario = build(replace(PLAIN, caches=1, lengths="full", queries=4))
    prepared = mla.prepare(scenario.plan, backend=backend)
    cache, sequences = scenario.caches[0], torch.tensor([1, 0, 1, 5])
    slots, lengths = cache.slots[:2], torch.tensor([65, 9])
    whole = sequences.clamp(max=1)
    expected, got = torch.empty(4, 8, 512), torch.empty(4, 8, 512)
    spread = mla.Cache(view=cache.view, slots=slots[whole], lengths=torch.where(sequences < 2, lengths[whole], 0))
    mla.run(prepared, q=scenario.q, caches=[spread], out=expected, scale=0.1)
    mapped = mla.Cache(
        view=cache.view,
        slots=slots if slots_per_sequence else slots[whole],
        lengths=lengths if lengths_per_sequence else torch.where(sequences < 2, lengths[whole], 0),
        slots_per_sequence=slots_per_sequence,
        lengths_per_sequence=lengths_per_sequence,
    )
    bound = mla.bind(prepared, q=scenario.q, caches=[mapped], out=got, scale=0.1, sequence_of_query=sequences)
    bound.run()
    assert torch.equal(expected, got)
    assert not got[3].any()
    lengths[1] = 0
    bound.run()
    assert got[1].any()
    assert bool(got[0].any()) is not lengths_per_sequence


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_sink_is_cut_and_padded_heads_stay_untouched(backend: str) -> None:
    scenario = build(replace(PLAIN, out="bf16_padded", q_stride="padded"))
    assert scenario.sink is not None
    given = {**arguments(scenario), "sink": torch.cat([scenario.sink, torch.full((56,), math.inf)])}
    mla.run(mla.prepare(scenario.plan, backend=backend), **given)
    assert not judge(scenario).failures


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_prefill_of_many_queries_and_verify_queries(backend: str) -> None:
    caps = mla.Caps.for_verify(sequences=400, speculative_tokens=2, heads=3, widths=(40,), records=("v4",))
    scenario = build(Case(queries=5, heads=3, width=40, lengths="none"))
    view = scenario.caches[0].view
    generator = torch.Generator().manual_seed(4)
    slots = torch.randint(-1, view.capacity_rows, (caps.queries, 40), generator=generator)
    q = torch.randn(caps.queries, 3, 512, generator=generator).bfloat16()
    clean = torch.where(slots < 0, -1, scenario.caches[0].slots.flatten()[slots % 200])
    out, few = torch.empty(caps.queries, 3, 512), torch.empty(20, 3, 512)
    whole = mla.Cache(view=view, slots=clean)
    mla.run(mla.prepare(mla.plan(caps), backend=backend), q=q, caches=[whole], out=out, scale=0.04)
    some = torch.arange(0, caps.queries, 60)
    part = mla.Cache(view=view, slots=clean[some])
    mla.run(mla.prepare(mla.plan(caps), backend="reference"), q=q[some], caches=[part], out=few, scale=0.04)
    assert ((out[some] - few).square().mean() / few.square().mean()).sqrt() <= 2.5e-3


def test_a_view_whose_memory_is_gone_is_refused() -> None:
    scenario = build(PLAIN)
    prepared = mla.prepare(scenario.plan, backend="cpu")
    scenario.storages[0].untyped_storage().resize_(0)
    with pytest.raises(StaleViewError, match="freed"):
        mla.bind(prepared, **arguments(scenario))


def test_workspace_can_be_given_and_is_checked() -> None:
    scenario = build(PLAIN)
    needed = mla.prepare(scenario.plan, backend="cpu").workspace_bytes
    given = torch.zeros(needed + 64, dtype=torch.uint8)
    prepared = mla.prepare(scenario.plan, backend="cpu", workspace=given)
    assert prepared.workspace is not None
    assert prepared.workspace.data_ptr() == given.data_ptr()
    if needed:
        with pytest.raises(WorkspaceError, match=f"got {needed - 1}, expected at least {needed}"):
            mla.prepare(scenario.plan, backend="cpu", workspace=given[: needed - 1])
    with pytest.raises(ShapeError, match="expected dense uint8"):
        mla.prepare(scenario.plan, backend="cpu", workspace=given.float())
    with pytest.raises(DeviceError, match="got meta"):
        mla.prepare(scenario.plan, backend="cpu", workspace=given.to("meta"))


def test_best_backend_is_chosen_and_the_choice_can_be_asked() -> None:
    plan = build(PLAIN).plan
    assert (mla.explain(plan).backend, mla.explain(plan).by) == ("cpu", "preference")
    assert str(mla.explain(plan, backend="torch")) == "torch (by argument)"
    assert mla.prepare(plan, backend="torch").choice.backend == "torch"


def test_environment_overrides_and_the_argument_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build(PLAIN).plan
    monkeypatch.setenv("KVBRIDGE_BACKEND", "reference")
    assert mla.explain(plan).by == "KVBRIDGE_BACKEND=reference"
    assert mla.prepare(plan).choice.backend == "reference"
    assert mla.prepare(plan, backend="torch").choice.backend == "torch"
    monkeypatch.setenv("KVBRIDGE_BACKEND", "fpga")
    with pytest.raises(BackendError, match="backend 'fpga': unknown, expected one of"):
        mla.prepare(plan)


def test_what_was_asked_for_is_refused_and_never_replaced() -> None:
    plan = build(PLAIN).plan
    with pytest.raises(BackendError, match="runs on cpu tensors, not on cuda"):
        mla.explain(plan, device="cuda", backend="cpu")
    with pytest.raises(BackendError, match="cpu has no variant 'x87'"):
        mla.explain(plan, backend="cpu:x87")
    assert mla.explain(plan, backend="cpu:portable").backend == "cpu:portable"


def test_without_a_compiler_torch_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build(PLAIN).plan

    def no_library() -> None:
        raise cpu_build.CompilerMissingError("no C++ compiler: looked for c++ and g++")

    monkeypatch.setattr(cpu_backend.cpu, "load", no_library)
    monkeypatch.setattr(backends, "_warned", set())
    with pytest.warns(BackendFallbackWarning, match="backend cpu: no C"):
        choice = mla.explain(plan)
    assert choice.backend == "torch"
    assert "cpu: no C++ compiler" in str(choice)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mla.explain(plan)  # said once


def test_run_and_bind_give_the_same_bits() -> None:
    scenario = build(PLAIN)
    prepared = mla.prepare(scenario.plan, backend="cpu")
    mla.run(prepared, **arguments(scenario))
    first = scenario.out.clone()
    scenario.clear()
    mla.bind(prepared, **arguments(scenario)).run()
    assert torch.equal(first, scenario.out)


def test_a_released_call_computes_nothing_until_it_is_given_everything_again() -> None:
    scenario = build(PLAIN)
    bound = mla.bind(mla.prepare(scenario.plan, backend="cpu"), **arguments(scenario))
    bound.run()
    bound.release()
    scenario.clear()
    bound.run()
    assert scenario.out.isnan().all()
    slots, lengths = [c.slots for c in scenario.caches], [c.lengths for c in scenario.caches]
    with pytest.raises(ShapeError, match=r"out.shape\[0\]: got 0, expected 4"):
        bound.run(q=scenario.q, slots=slots, lengths=lengths)
    with pytest.raises(ArgumentError):
        bound.run(slots=slots)
    bound.run(q=scenario.q, out=scenario.out, lse=scenario.lse, slots=slots, lengths=lengths)
    assert not judge(scenario).failures
