"""Planned equals captured: SGLang's own configurator and pool classes on one side, our arithmetic on the other.

The captured side ran in SGLang's interpreter (programs/capture_cases.py); the planned side runs here, where neither
SGLang nor its torch is. Every field of every pool and storage is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbridge.documents import parse_manifests
from kvbridge.engine import PlanRequest, resolve_options
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.options import resolve_settings
from kvbridge.engines.sglang.sizes import fit_classic, fit_v4
from kvbridge.models import load_model
from tests.engines.sglang.sglang_models import UNLIMITED, all_cases

pytestmark = pytest.mark.timeout(1500)  # the first test waits for every program in SGLang's interpreter

SIZED = {name: case for name, case in all_cases().items() if case["sized"]}
CASES = {name: case for name, case in all_cases().items() if not case["sized"]}
EXAMPLE = Path(__file__).resolve().parents[2] / "fixtures" / "sglang_deepseek_v4_tiny.json"
SAME_FIELDS = ("engine", "model", "rank", "options", "storages", "pools")


def planned(models: Path, case: dict[str, Any]) -> dict[str, Any]:
    budget = None if case["budget"] == UNLIMITED else case["budget"]
    request = PlanRequest(load_model(models / case["model"]), "0.5.23", case["options"], budget)
    return ENGINE.plan(request).document()


@pytest.mark.parametrize("name", CASES)
def test_planned_equals_captured(name: str, models: Path, captured: dict[str, Any]) -> None:
    result = captured[name]
    assert "error" not in result, result["error"]
    plan, manifest = planned(models, CASES[name]), result["manifest"]
    assert manifest["origin"] == "captured"
    for field in SAME_FIELDS:
        assert plan[field] == manifest[field], field
    assert result["findings"] == []
    owners = [pool for pool in manifest["pools"] if pool["kind"] != "index_only"]
    assert result["views"] == sum(len(pool["layers"]) for pool in owners)  # every tensor was viewed, none was copied


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["budget"] != UNLIMITED])
def test_planned_memory_is_the_allocated_memory(name: str, models: Path, captured: dict[str, Any]) -> None:
    plan = planned(models, CASES[name])
    allocated = sum(storage["storage_bytes"] for storage in captured[name]["manifest"]["storages"])
    assert plan["memory"]["used_bytes"] == allocated
    assert plan["memory"]["budget_bytes"] == CASES[name]["budget"]
    assert f"{plan['memory']['tokens']:,} tokens" in plan["memory"]["reason"]


@pytest.mark.parametrize("name", SIZED)
def test_capacity_on_a_gpu_is_sglangs(name: str, models: Path, captured: dict[str, Any]) -> None:
    result, case = captured[name], SIZED[name]
    assert "error" not in result, result["error"]
    sizes = result["sizes"]
    model = load_model(models / case["model"])
    settings = resolve_settings(model, resolve_options(ENGINE, case["options"]))
    fit = (fit_v4 if settings.kv_layout else fit_classic)(model, settings, case["budget"]).sizes
    assert fit.full_tokens == sizes["max_total_num_tokens"]
    if settings.kv_layout:
        assert fit.swa_tokens == sizes["swa_max_total_num_tokens"]
        assert fit.c4_rows == sizes["c4_max_total_num_tokens"]
        assert fit.c128_rows == sizes["c128_max_total_num_tokens"]
        assert fit.c4_state_rows == sizes["c4_state_pool_size"]
        assert fit.request_slots == sizes["max_running_requests"] + 1


def test_the_example_manifest_is_what_sglang_allocates(captured: dict[str, Any]) -> None:
    (example,) = parse_manifests(EXAMPLE.read_bytes())
    manifest = captured["v4-page-256"]["manifest"]
    assert example.to_manifest().document() == manifest


def test_every_record_of_a_paged_pool_was_met(captured: dict[str, Any]) -> None:
    manifests = [captured[name]["manifest"] for name in CASES]
    records = {pool["record"] for manifest in manifests for pool in manifest["pools"]}
    assert records >= {
        "v4",
        "v41",
        "v41_interleaved",
        "v41_fp4",
        "v41_fp4_interleaved",
        "uniform_fp8",
        "indexer_fp8",
        "indexer_fp4",
        "state_fp32_512",
        "state_fp32_1024",
        "state_fp32_2048",
        "mla_bf16",
        "mla_fp8",
        "mla_fp4",
        "dsa",
    }
