"""DeepSeek-V3.2's sparse backend through vLLM's public registry, as far as a machine without a GPU shows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.environments import run_in_engine

pytestmark = pytest.mark.timeout(900)
DECODES = ("exact", "strided, two queries each, gathered heads")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("v32-seam") / "facts.json"
    run_in_engine("vllm", ["-m", "tests.parity.vllm_programs.v32_seam", out], environment={"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_registry_gives_a_subclass_of_vllms_backend_and_its_own_back(facts: dict[str, Any]) -> None:
    assert facts["backend"] == ["KvbridgeFlashMLASparseBackend", True, True]
    assert facts["impl"] == ["KvbridgeFlashMLASparseImpl", True]
    assert facts["given back"]


def test_the_override_has_the_engines_signature(facts: dict[str, Any]) -> None:
    theirs, ours = facts["signature"]
    assert theirs == ours


def test_other_cache_formats_stay_vllms_or_are_refused_when_forced(facts: dict[str, Any]) -> None:
    assert [message.rpartition("not start: ")[2] for message in facts["refused"]] == [
        "kv_cache_dtype: got auto, expected fp8_ds_mla",
        "kv_cache_dtype: got nvfp4_ds_mla, expected fp8_ds_mla",
    ]


@pytest.mark.parametrize("name", DECODES)
def test_decode_reads_what_flashmla_would_have_read(facts: dict[str, Any], name: str) -> None:
    seen = facts["decodes"][name]
    assert seen["difference"]["relative_rms"] <= 2.5e-3
    assert seen["difference"]["worst_row_rms"] <= 4.5e-3
    assert seen["lse"] <= 1e-5
    assert seen["empty"] == [True, True]  # output 0, LSE +inf, as FlashMLA
    assert seen["pages are one"]
    batch, queries = {DECODES[0]: (3, 1), DECODES[1]: (2, 2)}[name]
    assert seen["shapes"] == [[batch, queries, 16, 512], [batch, 16, queries]]


@pytest.mark.parametrize("name", DECODES)
def test_vllm_hands_flashmla_nothing_that_the_override_does_not_use(facts: dict[str, Any], name: str) -> None:
    used = {"q", "k_cache", "indices", "softmax_scale"}
    without_meaning_here = {"head_dim_v", "is_fp8_kvcache", "tile_scheduler_metadata"}
    assert set(facts["decodes"][name]["arguments"]) == used | without_meaning_here
