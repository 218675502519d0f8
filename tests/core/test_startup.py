"""The start-up audit that both engines' plugins share: switches, manifests, findings, its own faults."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvbridge.documents import DeclaredManifest, parse_manifests
from kvbridge.engine import EngineError, PlanRequest
from kvbridge.engines.sglang import ENGINE
from kvbridge.errors import PageStrideError
from kvbridge.manifest import Rank
from kvbridge.models import load_model
from kvbridge.rules import Finding, finding
from kvbridge.startup import AuditMode, Startup, StartupAuditError, describe, dump_declared, worker_name

LOG = logging.getLogger("test.startup")


def declared(**changes: Any) -> DeclaredManifest:
    """A consistent manifest, with fields of its C4 pool changed."""
    plan = ENGINE.plan(PlanRequest(load_model("deepseek-v4-flash"), "0.5.23")).document()
    for pool in plan["pools"]:
        if pool["pool"] == "c4":
            pool.update(changes)
    return DeclaredManifest.model_validate(plan)


def capture(manifest: DeclaredManifest, *findings: Finding) -> Any:
    return lambda: (manifest, findings)


@pytest.mark.parametrize(
    ("variables", "mode", "active"),
    [
        ({}, AuditMode.WARN, False),
        ({"KVBRIDGE_AUDIT": "off"}, AuditMode.OFF, False),
        ({"KVBRIDGE_AUDIT": "warn"}, AuditMode.WARN, True),
        ({"KVBRIDGE_AUDIT": " ERROR "}, AuditMode.ERROR, True),
        ({"KVBRIDGE_MANIFEST_DIR": "somewhere"}, AuditMode.WARN, True),
        ({"KVBRIDGE_MANIFEST_DIR": "somewhere", "KVBRIDGE_AUDIT": "off"}, AuditMode.OFF, True),
        ({"KVBRIDGE_MANIFEST_DIR": "  ", "KVBRIDGE_AUDIT": ""}, AuditMode.WARN, False),
    ],
)
def test_environment(variables: dict[str, str], mode: AuditMode, active: bool) -> None:
    startup = Startup.from_environment(LOG, variables)
    assert (startup.mode, startup.active) == (mode, active)


def test_a_misspelt_mode_is_an_error_in_the_log_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    startup = Startup.from_environment(LOG, {"KVBRIDGE_AUDIT": "strict"})
    assert (startup.mode, startup.active) == (AuditMode.WARN, True)
    assert "KVBRIDGE_AUDIT: got 'strict', expected off, warn or error; taken as warn" in caplog.text


def test_a_right_manifest_is_written_and_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    startup = Startup(AuditMode.ERROR, tmp_path / "new", True)
    startup.check(capture(declared()), worker="sglang-pp0-tp0", log=LOG)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "sglang-pp0-tp0.json"
    (manifest,) = parse_manifests(path.read_bytes())
    assert manifest == declared()
    assert "audit (error) ran: 8 pools" in caplog.text
    assert "0 errors, 0 warnings, 0 notes" in caplog.text


def test_error_raises_with_every_finding(tmp_path: Path) -> None:
    startup = Startup(AuditMode.ERROR, tmp_path, True)
    own = finding("page-stride", "layers.3.c4.tensor.stride(0)", got=38016, expected=37440, pool="c4")
    with pytest.raises(StartupAuditError) as caught:
        startup.check(capture(declared(page_stride_bytes=38_016), own), worker="w", log=LOG)
    text = str(caught.value)
    assert text.splitlines()[0] == "kvbridge: w: 2 errors in the KV-cache layout"
    assert "pool c4: layers.3.c4.tensor.stride(0): got 38016, expected 37440" in text
    assert "page_stride_bytes: got 38016, expected 37440" in text
    assert len(caught.value.findings) == 2
    (manifest,) = parse_manifests((tmp_path / "w.json").read_bytes())  # written all the same, as it is
    assert [pool.page_stride_bytes for pool in manifest.pools if pool.pool == "c4"] == [38_016]


@pytest.mark.parametrize("mode", [AuditMode.WARN, AuditMode.OFF])
def test_other_modes_go_on(mode: AuditMode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    startup = Startup(mode, None, True)
    startup.check(capture(declared(page_stride_bytes=38_016)), worker="w", log=LOG)
    assert ("got 38016" in caplog.text) == (mode is AuditMode.WARN)
    assert ("audit off" in caplog.text) == (mode is AuditMode.OFF)


@pytest.mark.parametrize("mode", list(AuditMode))
def test_a_fault_of_the_plugin_is_logged_and_nothing_else(mode: AuditMode, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("of the plugin")

    Startup(mode, None, True).check(broken, worker="w", log=LOG)
    assert "w: the plugin failed by its own fault; the engine goes on unaudited" in caplog.text
    assert "ZeroDivisionError: of the plugin" in caplog.text


@pytest.mark.parametrize("mode", list(AuditMode))
def test_pools_that_nobody_described_are_named_and_stop_nothing(
    mode: AuditMode, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown() -> Any:
        raise EngineError("pool: got OtherPool, expected one of ['ThisPool']")

    Startup(mode, None, True).check(unknown, worker="w", log=LOG)
    assert "kvbridge: w: not audited: pool: got OtherPool, expected one of ['ThisPool']" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_contradiction_before_there_is_a_manifest_is_a_finding(tmp_path: Path) -> None:
    def contradiction() -> Any:
        raise PageStrideError("bytes_per_page_padded", got=37_376, expected=37_440)

    Startup(AuditMode.WARN, tmp_path, True).check(contradiction, worker="w", log=LOG)
    with pytest.raises(StartupAuditError, match="bytes_per_page_padded: got 37376, expected 37440"):
        Startup(AuditMode.ERROR, tmp_path, True).check(contradiction, worker="w", log=LOG)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    startup = Startup(AuditMode.ERROR, tmp_path / "file" / "below", True)
    startup.check(capture(declared(page_stride_bytes=38_016)), worker="w", log=LOG)
    assert "failed by its own fault" in caplog.text


def test_names_tell_workers_apart() -> None:
    rank = Rank(tensor_parallel_rank=3, tensor_parallel_size=8, pipeline_parallel_rank=1, pipeline_parallel_size=2)
    assert worker_name("vllm", rank) == "vllm-pp1-tp3"
    assert worker_name("sglang", rank, role="draft", replica=2) == "sglang-draft-dp2-pp1-tp3"
    sharded = rank.model_copy(update={"decode_context_parallel_rank": 1, "decode_context_parallel_size": 4})
    assert worker_name("vllm", sharded) == "vllm-pp1-dcp1-tp3"


def test_lines_and_documents() -> None:
    entry = finding("page-stride", "page_stride_bytes", got=1, expected=2, pool="c4")
    assert describe(entry).startswith("error page-stride: pool c4: page_stride_bytes: got 1, expected 2")
    document = json.loads(dump_declared(declared()))
    assert document["schema_version"] == 1
    assert list(document["manifests"][0]) == sorted(document["manifests"][0])
