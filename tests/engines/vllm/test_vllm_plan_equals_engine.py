"""Planned equals captured, field for field: the planner against vLLM's own specs, groups, strides and tensors.

One process of vLLM's interpreter allocates every case (see vllm_allocator.py); each case is then planned here. Set
KVBRIDGE_VLLM_SOURCES to a folder that holds another release's `vllm` package to prove the planner on that one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvbridge.engine import EngineError, PlanRequest, load_engine
from kvbridge.models import ModelConfig
from tests.engines.vllm.vllm_cases import CASES, MEMORY_BYTES, NUM_BLOCKS, Case, random_cases
from tests.environments import run_in_engine

RANDOM = random_cases(40)


@pytest.fixture(scope="module")
def engine_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("vllm") / "captured.json"
    sources = os.environ.get("KVBRIDGE_VLLM_SOURCES")
    run_in_engine(
        "vllm",
        ["-m", "tests.engines.vllm.vllm_allocator", out, str(len(RANDOM))],
        # GPUs run the V2 model runner, which keeps one step more in flight; only its number is asked for here.
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"} | ({"PYTHONPATH": sources} if sources else {}),
    )
    results: dict[str, Any] = json.loads(Path(out).read_text())
    return results


@pytest.mark.parametrize("case", [*CASES, *RANDOM], ids=lambda case: case.name)
def test_plan_equals_vllms_allocation(case: Case, engine_results: dict[str, Any]) -> None:
    engine = load_engine("vllm")
    model = ModelConfig.from_config(case.config, name=case.name)
    version, captured = engine_results["version"], engine_results["cases"][case.name]
    if "error" in captured:
        assert case in RANDOM, captured["error"]
        with pytest.raises(EngineError, match="vLLM refuses"):
            engine.plan(PlanRequest(model, version, case.options | {"num-gpu-blocks-override": NUM_BLOCKS}))
        return
    planned = engine.plan(
        PlanRequest(model, version, case.options | {"num-gpu-blocks-override": NUM_BLOCKS})
    ).document()
    for side in (planned, captured["manifest"]):
        # A capture states no budget, and remarks are for people.
        side["origin"], side["memory"], side["notes"] = "", None, []
    assert planned == captured["manifest"]
    assert captured["findings"] == []
    assert captured["shared_storage"]
    if case.slab_bytes:
        assert {pool["page_stride_bytes"] for pool in planned["pools"]} == {case.slab_bytes}


@pytest.mark.parametrize("case", [*CASES, *RANDOM], ids=lambda case: case.name)
def test_memory_budget_equals_vllms_capacity(case: Case, engine_results: dict[str, Any]) -> None:
    captured = engine_results["cases"][case.name]
    model = ModelConfig.from_config(case.config, name=case.name)
    request = PlanRequest(model, engine_results["version"], case.options, memory_bytes=MEMORY_BYTES)
    if "error" in captured:
        with pytest.raises(EngineError, match="vLLM refuses"):
            load_engine("vllm").plan(request)
        return
    memory = load_engine("vllm").plan(request).memory
    assert memory is not None
    assert (memory.num_blocks, memory.tokens) == (captured["num_blocks"], captured["tokens"])


def test_the_random_cases_hold_packed_and_refused_models(engine_results: dict[str, Any]) -> None:
    results = [engine_results["cases"][case.name] for case in RANDOM]
    packed = [entry for entry in results if "manifest" in entry and len(entry["manifest"]["pools"]) > 3]
    refused = [entry for entry in results if "error" in entry]
    assert len(packed) >= 20
    assert refused, "no schedule was refused: the refusals of the planner are untested"


def test_layers_are_built_in_the_order_that_is_planned(engine_results: dict[str, Any]) -> None:
    assert engine_results["order"] == {
        "v4": ["indexer", "swa", "attn", "state"],
        "v4-indexer": ["indexer", "state"],
        "v41": ["attn", "indexer", "swa", "state"],
        "v32": ["indexer", "attn"],
    }
