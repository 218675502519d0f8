"""vLLM's CUDA attention layers with kvbridge's decode, as far as a machine without a GPU shows it.

Real layers, real metadata, real choice of class; CPU tensors, and the arguments of FlashMLA in place of its call. What
only a GPU can show: FlashMLA itself, CUDA graphs, streams. The wheel tested is 0.32.0; the file of these layers
(models/deepseek_v4/nvidia/flashmla.py) is the same in 0.33.0, whose model.py differs around the choice, not in it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.environments import run_in_engine

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("cuda-seam") / "facts.json"
    run_in_engine("vllm", ["-m", "tests.parity.vllm_programs.cuda_seam", out], environment={"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_override_has_the_engines_signature_and_overrides_nothing_else(facts: dict[str, Any]) -> None:
    theirs, ours = facts["signature"]
    assert theirs == ours
    assert facts["overridden"] == ["__init__", "_forward_decode"]


def test_the_choice_is_wrapped_when_vllm_imports_its_module_and_given_back(facts: dict[str, Any]) -> None:
    assert facts["hooked before import"]
    assert facts["given back"] == "vllm.models.deepseek_v4.nvidia.model"
    assert facts["own function"]


def test_the_chosen_class_is_a_subclass_of_vllms(facts: dict[str, Any]) -> None:
    assert facts["chosen"] == ["KvbridgeFlashMLAAttention", "DeepseekV4FlashMLAAttention"]


def test_without_the_cuda_backend_vllms_class_stays_with_one_line_for_all_layers(facts: dict[str, Any]) -> None:
    assert facts["chosen without a GPU"] == facts["chosen for every layer"] == "DeepseekV4FlashMLAAttention"
    lines = [line for line in facts["log"] if "backend: got cpu (by preference), expected cuda" in line]
    assert len(lines) == 1


def test_other_attention_classes_stay_vllms_or_are_refused_when_forced(facts: dict[str, Any]) -> None:
    seen = facts["refusals"]
    assert seen["other class"]
    assert seen["compare"]
    reason = "attention class: got DeepseekV4FlashInferMLAAttention, expected DeepseekV4FlashMLAAttention"
    assert f"kvbridge: kernel on: vLLM's own kernel serves: {reason}" in facts["log"]
    assert seen["forced"].endswith(f"vLLM does not start: {reason}")


@pytest.mark.parametrize("ratio", ["1", "4", "128"])
def test_decode_reads_what_flashmla_would_have_read(facts: dict[str, Any], ratio: str) -> None:
    layer = facts["layers"][ratio]
    assert layer["difference"]["relative_rms"] <= 2.5e-3
    assert layer["difference"]["worst_row_rms"] <= 4.5e-3
    assert layer["difference"]["largest"] > 1
    assert layer["same bits again"]
    assert layer["bound once"]
    window = {"1": [64, 93_888, 0], "4": [64, 93_888, 0], "128": [64, 93_888, 37_440]}[ratio]
    extra = {"1": [], "4": [[64, 93_888, 17_280]], "128": [[2, 93_888, 92_160]]}[ratio]
    assert layer["pages"] == [window, *extra]


@pytest.mark.parametrize("ratio", ["1", "4", "128"])
def test_vllm_hands_flashmla_nothing_that_the_override_does_not_use(facts: dict[str, Any], ratio: str) -> None:
    used = {"q", "out", "k_cache", "indices", "topk_length", "attn_sink", "softmax_scale"}
    extra = {"extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"} if ratio != "1" else set()
    without_meaning_here = {"head_dim_v", "is_fp8_kvcache", "tile_scheduler_metadata"}  # 512, true, FlashMLA's schedule
    assert set(facts["layers"][ratio]["flashmla arguments"]) == used | extra | without_meaning_here
