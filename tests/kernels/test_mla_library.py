"""The torch operator: same bits as the call, visible to torch.compile and FakeTensor, and a handle that can die."""

from __future__ import annotations

import gc

import pytest
import torch

from kvbridge.kernels import mla
from kvbridge.kernels.conformance import Case, build
from kvbridge.kernels.errors import NotPreparedError, ShapeError
from kvbridge.kernels.library import register

CASE = Case(queries=3, heads=8, caches=2, width=65, stride="slab", lse="natural", lengths="full")


def call(handle: int, scenario: object, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    torch.ops.kvbridge.mla_decode(
        handle,
        scenario.q,  # type: ignore[attr-defined]
        out,
        pages=[cache.view.pages for cache in scenario.caches],  # type: ignore[attr-defined]
        page_rows=[cache.view.page_rows for cache in scenario.caches],  # type: ignore[attr-defined]
        slots=[cache.slots for cache in scenario.caches],  # type: ignore[attr-defined]
        lengths=[cache.lengths for cache in scenario.caches],  # type: ignore[attr-defined]
        scale=scenario.scale,  # type: ignore[attr-defined]
        sink=scenario.sink,  # type: ignore[attr-defined]
        lse=lse,
    )


def test_operator_gives_the_bits_of_the_call() -> None:
    scenario = build(CASE)
    prepared = mla.prepare(scenario.plan)
    mla.run(
        prepared,
        q=scenario.q,
        caches=scenario.caches,
        out=scenario.out,
        scale=scenario.scale,
        sink=scenario.sink,
        lse=scenario.lse,
    )
    assert scenario.lse is not None
    out, lse = torch.empty_like(scenario.out), torch.empty_like(scenario.lse)
    handle = register(prepared)
    assert register(prepared) == handle
    call(handle, scenario, out, lse)
    assert torch.equal(out, scenario.out)
    assert torch.equal(lse, scenario.lse)


def test_torch_compile_keeps_the_mutation_in_order() -> None:
    scenario = build(CASE)
    prepared = mla.prepare(scenario.plan)
    handle = register(prepared)

    def step(q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(3, 8, 512, dtype=torch.bfloat16)
        torch.ops.kvbridge.mla_decode(
            handle,
            q * 2,
            out,
            pages=[scenario.caches[0].view.pages],
            page_rows=[scenario.caches[0].view.page_rows],
            slots=[scenario.caches[0].slots],
            lengths=[scenario.caches[0].lengths],
            scale=0.1,
        )
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(scenario.q), compiled(scenario.q))


def test_operator_passes_opcheck() -> None:
    scenario = build(CASE)
    prepared = mla.prepare(scenario.plan)
    cache = scenario.caches[0]
    options = {
        "pages": [cache.view.pages],
        "page_rows": [cache.view.page_rows],
        "slots": [cache.slots],
        "lengths": [None],
        "scale": 0.1,
        "lse": torch.empty(3, 8),
    }
    out = torch.empty(3, 8, 512, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.kvbridge.mla_decode.default, (register(prepared), scenario.q, out), options)


def test_external_scale_and_lse_options_are_passed_on() -> None:
    scenario = build(Case(record="uniform_fp8", lse="two", lengths="none"))
    cache = scenario.caches[0]
    prepared = mla.prepare(scenario.plan)
    expected = torch.empty(3, 16)
    out = torch.empty_like(scenario.out)
    form = mla.LseFormat(base="2")
    mla.run(prepared, q=scenario.q, caches=[cache], out=out, scale=0.1, lse=expected, lse_format=form)
    lse = torch.empty(3, 16)
    torch.ops.kvbridge.mla_decode(
        register(prepared),
        scenario.q,
        out,
        pages=[cache.view.pages],
        page_rows=[cache.view.page_rows],
        slots=[cache.slots],
        lengths=[None],
        scale=0.1,
        lse=lse,
        external_scales=[cache.external_scale],
        lse_base="2",
    )
    assert torch.equal(lse, expected)


def test_dead_handles_and_wrong_counts_are_refused_by_call_and_fake() -> None:
    scenario = build(CASE)
    prepared = mla.prepare(scenario.plan)
    handle = register(prepared)
    scenario.caches.append(scenario.caches[0])
    with pytest.raises(ShapeError, match="pages: got 3, expected 1 to 2"):
        call(handle, scenario, scenario.out, None)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ShapeError, match="pages: got 3"):
        call(handle, scenario, scenario.out, None)
    del prepared
    gc.collect()
    with pytest.raises(NotPreparedError, match=f"handle {handle}, expected one that register"):
        call(handle, scenario, scenario.out, None)
