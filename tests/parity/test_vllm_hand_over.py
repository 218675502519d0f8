"""A sequence prefilled in vLLM goes through SGLang's pool and back into vLLM's live cache, and is answered alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines_support import ROOT
from tests.environments import engine_environment, require_engine, run_in_engine

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("hand-over")
    python = require_engine("sglang")
    command = [str(python), "-m", "tests.parity.programs.sglang_places"]
    environment = engine_environment("sglang") | {"TRITON_INTERPRET": "1"}
    (folder / "sglang.json").write_text(json.dumps({"command": command, "environment": environment}))
    arguments = ["-m", "tests.parity.vllm_programs.hand_over", folder, folder / "sglang.json"]
    run_in_engine("vllm", arguments, environment={"OMP_NUM_THREADS": "1"}, folder=ROOT)
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return found


def test_every_cache_of_every_layer_was_handed_over(facts: dict[str, Any]) -> None:
    assert facts["rows"] == {
        **{f"{layer}.swa": 421 for layer in range(4)},  # vLLM frees what left the window at the next step
        **{f"{layer}.c4": 105 for layer in (1, 3)},
        **{f"{layer}.c4_indexer": 105 for layer in (1, 3)},
        "2.c128": 3,
    }
    assert facts["rows restored"]


def test_rows_travel_in_few_copies(facts: dict[str, Any]) -> None:
    assert max(facts["copies"].values()) <= 32, facts["copies"]


def test_vllm_goes_on_as_if_it_had_written_the_pages_itself(facts: dict[str, Any]) -> None:
    assert len(facts["undisturbed"]["tokens"]) == 24
    assert facts["handed over"] == facts["undisturbed"]  # to the last bit of the log-probabilities


def test_without_the_pages_the_answer_is_another(facts: dict[str, Any]) -> None:
    first = facts["undisturbed"]
    assert facts["wiped"]["tokens"][0] == first["tokens"][0]  # it came from the prefill, before the rows were wiped
    assert facts["wiped"]["tokens"] != first["tokens"]


def test_both_kernels_read_the_handed_over_pages(facts: dict[str, Any]) -> None:
    assert facts["calls compared"] == 4 * 24
    assert facts["calls beyond bounds"] == 0
