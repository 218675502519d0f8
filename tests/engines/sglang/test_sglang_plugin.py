"""The plugin as SGLang loads it: manifests, audits, a stop before serving, and no harm of its own.

Each scenario ran in a process of its own (programs/plugin_cases.py): SGLang's plugin loader, SGLang's pool, and for two
of them SGLang's attention fixture with the real DeepseekV4AttnBackend.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvbridge.documents import parse_manifests

if TYPE_CHECKING:
    from tests.engines.sglang.sglang_session import Session

pytestmark = pytest.mark.timeout(1500)  # the first test waits for every program in SGLang's interpreter

NAME = "sglang-target-pp0-tp0"
FAULT = "pool c4: layers.3.c4.tensor.stride(0): got 38016, expected 37440; every page after the first is read from"


@pytest.fixture(scope="module")
def scenarios(sglang_session: Session) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(sglang_session.output("plugin_cases").read_text())
    return results


def manifest_of(scenario: dict[str, Any], name: str = NAME) -> dict[str, Any]:
    document = scenario["files"][f"{name}.json"]
    parse_manifests(json.dumps(document))  # on schema
    (manifest,) = document["manifests"]
    return dict(manifest)


def test_a_right_pool_is_audited_and_written(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["error-good"]
    assert scenario["error"] == ""
    assert f"kvbridge: {NAME}: audit (error) ran: 8 pools, 17 layer caches, 0 errors, 0 warnings" in scenario["log"]
    manifest = manifest_of(scenario)
    assert (manifest["origin"], manifest["engine"]) == ("captured", {"name": "sglang", "version": "0.5.23"})
    assert manifest["options"] == {"worker": "target", "pool-class": "DeepSeekV4TokenToKVPool"}
    swa = next(pool for pool in manifest["pools"] if pool["pool"] == "swa")
    assert (swa["payload_bytes"], swa["page_stride_bytes"], swa["num_pages"]) == (149_504, 149_760, 4)


def test_error_stops_the_engine_and_names_layer_field_got_and_expected(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["error-altered"]
    assert scenario["error"].startswith(f"StartupAuditError: kvbridge: {NAME}: 2 errors in the KV-cache layout")
    assert FAULT in scenario["error"]
    assert FAULT in scenario["log"]
    strides = [pool["page_stride_bytes"] for pool in manifest_of(scenario)["pools"] if pool["pool"] == "c4"]
    assert strides == [37_440, 38_016]  # the manifest shows the live tensors, the wrong one included


@pytest.mark.parametrize("name", ["warn-altered", "folder-alone", "misspelt"])
def test_warn_reports_and_goes_on(name: str, scenarios: dict[str, Any]) -> None:
    assert scenarios[name]["error"] == ""
    assert FAULT in scenarios[name]["log"]
    assert "audit (warn) ran" in scenarios[name]["log"]


def test_a_misspelt_mode_is_reported(scenarios: dict[str, Any]) -> None:
    assert "KVBRIDGE_AUDIT: got 'eror', expected off, warn or error; taken as warn" in scenarios["misspelt"]["log"]


def test_off_writes_the_manifest_and_audits_nothing(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["off"]
    assert scenario["error"] == ""
    assert "9 pools, 17 layer caches, audit off" in scenario["log"]
    assert "38016" not in scenario["log"]
    assert len(manifest_of(scenario)["pools"]) == 9


def test_not_asked_means_no_hook(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["not-asked"]
    assert (scenario["error"], scenario["files"]) == ("", {})
    assert "Executed general plugin: kvbridge" in scenario["log"]
    assert "kvbridge.sglang" not in scenario["log"]


def test_a_fault_of_the_plugin_itself_stops_nothing(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["own-fault"]
    assert scenario["error"] == ""
    assert "the plugin failed by its own fault; the engine goes on unaudited" in scenario["log"]
    assert "NotADirectoryError" in scenario["log"]


def test_rank_is_in_the_file_and_in_its_name(scenarios: dict[str, Any]) -> None:
    rank = manifest_of(scenarios["other-rank"], "sglang-target-pp0-tp1")["rank"]
    assert (rank["tensor_parallel_rank"], rank["tensor_parallel_size"]) == (1, 2)


def test_draft_workers_have_manifests_of_their_own(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["two-drafts"]
    assert scenario["error"] == ""
    names = ["sglang-draft-pp0-tp0", "sglang-draft2-pp0-tp0", NAME]
    assert sorted(scenario["files"]) == [f"{name}.json" for name in names]
    draft = manifest_of(scenario, names[1])
    assert [pool["pool"] for pool in draft["pools"]] == ["swa", "full"]
    assert draft["options"]["worker"] == "draft2"


def test_every_pool_family_is_seen_after_allocation(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["classic"]
    assert scenario["error"] == ""
    manifest = manifest_of(scenario)
    assert manifest["model"] == "v3"
    assert manifest["options"]["pool-class"] == "MLATokenToKVPool"
    assert [(pool["pool"], pool["record"], len(pool["layers"])) for pool in manifest["pools"]] == [
        ("mla", "mla_bf16", 3)
    ]


def test_the_real_backend_decodes_from_an_audited_pool(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["backend-decodes"]
    assert scenario["error"] == ""  # SGLang's own assert_close passed
    assert "audit (error) ran" in scenario["log"]


def test_a_wrong_pool_stops_before_there_is_a_backend(scenarios: dict[str, Any]) -> None:
    scenario = scenarios["backend-altered"]
    assert "StartupAuditError" in scenario["error"]
    assert "layers.0.swa.tensor.stride(0): got 150336, expected 149760" in scenario["error"]
    assert "backends built: 0" in scenario["log"]
