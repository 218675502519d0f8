"""Adapters over vLLM's real allocations: zero copy, refusals, staleness, and a plugin that never harms its engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbridge.documents import parse_manifests
from tests.environments import run_in_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-views")


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    out = folder / "facts.out"
    run_in_engine("vllm", ["-m", "tests.engines.vllm.vllm_views", out])
    read: dict[str, Any] = json.loads(out.read_text())
    return read


@pytest.mark.parametrize(("model", "layers"), [("tiny", 14), ("v41", 9), ("v41_several_pages", 13), ("classic", 6)])
def test_views_share_storage_and_touch_no_neighbour(model: str, layers: int, facts: dict[str, Any]) -> None:
    assert facts[model] == {
        "layers": layers,
        "same_storage": True,
        "same_address": True,
        "same_objects": True,
        "neighbours_untouched": True,
    }


def test_bound_layers_are_read_in_place(facts: dict[str, Any]) -> None:
    assert facts["bound"] == {
        "tiny": {"layers": 11, "same_address": True},
        "v32": {"layers": 3, "same_address": True},
    }


def test_a_bound_view_that_crosses_layers_is_refused_and_found(facts: dict[str, Any]) -> None:
    seen = facts["kernel_views"]
    assert (seen["allocated_shape"], seen["bound_shape"]) == ([3, 1, 128, 288], [750, 1, 64, 288])
    assert seen["refusal"].startswith("BoundViewError: bound-view: tensor rows in a page: got 64, expected 128")
    assert seen["pages"] == ["model.layers.0.attn#0", "model.layers.0.attn#1"]
    assert [finding["field"] for finding in seen["findings"]] == [
        f"{page}.tensor rows in a page" for page in seen["pages"]
    ]
    for finding in seen["findings"]:
        assert (finding["code"], finding["pool"], finding["got"], finding["expected"]) == ("bound-view", "c2", 64, 128)
        assert "other layers" in finding["consequence"]


def test_a_block_of_several_kernel_pages_is_divided_as_the_kernel_divides_it(facts: dict[str, Any]) -> None:
    assert facts["kernel_views"]["page_starts_agree"]


def test_an_altered_stride_is_a_finding_and_stays_in_the_manifest(facts: dict[str, Any]) -> None:
    seen = facts["altered"]
    assert seen["findings"] == [
        "error page-stride: pool c4: model.layers.1.attn.tensor.stride(0): got 93312, expected 93888; "
        "every page after the first is read from the wrong byte"
    ]
    assert seen["strides"] == [93_312, 93_888]


def test_other_attention_is_left_alone_with_a_note(facts: dict[str, Any]) -> None:
    seen = facts["other_attention"]
    assert seen["pools"] == 0
    (note,) = seen["findings"]
    assert note.startswith("note record-missing: model.layers.0.self_attn.attn.spec: got FullAttentionSpec, expected")


def test_memory_that_is_gone_is_told_apart(facts: dict[str, Any]) -> None:
    seen = facts["states"]
    message = seen.pop("message")
    assert seen == {
        "bound": ["live", True],
        "asleep": ["asleep", False],
        "weights_only": ["asleep", False],
        "awake": ["live", False],
        "replaced": ["replaced", False],
        "newer": ["live", True],
        "freed": ["freed", True],
    }
    assert "cache of model.layers.1.attn: got asleep, expected live" in message


def test_the_plugin_off_touches_nothing(facts: dict[str, Any]) -> None:
    assert facts["plugin"]["off_touches_nothing"]
    assert facts["plugin"]["on_wraps"]


def test_the_plugins_own_fault_leaves_the_engine_alone(facts: dict[str, Any]) -> None:
    assert facts["plugin"]["layers_in_spite_of_fault"] == 14
    assert "the plugin failed by its own fault; the engine goes on unaudited" in facts["plugin"]["log"][0]


def test_under_error_a_wrong_layout_stops_the_engine_with_the_numbers(facts: dict[str, Any], folder: Path) -> None:
    stopped = facts["plugin"]["stopped"]
    assert "model.layers.1.attn.tensor.stride(0): got 93312, expected 93888" in stopped
    assert facts["plugin"]["written"] == ["vllm-pp0-tp0.json"]
    (manifest,) = parse_manifests((folder / "vllm-pp0-tp0.json").read_text())
    assert {pool.page_stride_bytes for pool in manifest.pools} == {93_312, 93_888}
