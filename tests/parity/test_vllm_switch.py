"""Switching the kernel on, off, and into a combination it cannot serve, in vLLM itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines_support import ROOT
from tests.environments import run_in_engine

pytestmark = pytest.mark.timeout(1200)
MODEL = ROOT / "tests" / "engines" / "vllm" / "tiny_dsv4"
OPERATOR = "torch.ops._C.flash_mla_with_kvcache_cpu"
REASON = "backend 'cuda': runs on cuda tensors, not on cpu"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("switches") / "facts.json"
    one_thread = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    run_in_engine("vllm", ["-m", "tests.parity.vllm_programs.switches", out], environment=one_thread)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def own(owners: dict[str, str]) -> bool:
    return not any("kvbridge" in module for module in owners.values())


@pytest.mark.parametrize("case", ["off", "off again"])
def test_off_leaves_every_name_the_engines_own(facts: dict[str, Any], case: str) -> None:
    seen = facts[case]
    assert {OPERATOR, "vllm.v1.worker.utils.allocate_kv_cache"} <= set(seen["owners"])
    assert own(seen["owners"]), seen["owners"]
    assert (seen["log"], seen["calls"], seen["error"]) == ([], 0, "")


def test_a_cpu_is_one_with_amx_and_without(facts: dict[str, Any]) -> None:
    assert facts["devices"] == {"cpu": True, "cpu-amx": True}


def test_on_replaces_the_operator_and_says_so_once(facts: dict[str, Any]) -> None:
    seen = facts["on"]
    assert seen["owners"][OPERATOR] == "kvbridge.engines.vllm.decode"
    line = seen["log"][0]
    assert line.startswith("kvbridge: kernel on: 4 attention layers (1 c128, 2 c4, 1 swa), backend cpu")
    assert "page strides [93888]" in line
    assert seen["calls"] == 12 + 1  # 4 layers, one prefill and two decode steps, and a probe
    assert sum("kernel on" in line for line in seen["log"]) == 1


def test_a_call_that_does_not_fit_is_vllms_own_and_said_once(facts: dict[str, Any]) -> None:
    probes = facts["on"]["probes"]
    assert probes["served"] == {"served": 1, "same bits as vLLM's": False, "close": True}
    left = {name: entry for name, entry in probes.items() if name != "served"}
    assert set(left) == {"unknown sink", "pages elsewhere", "more queries than planned"}
    assert all(entry == {"served": 0, "same bits as vLLM's": True, "close": True} for entry in left.values()), left
    lines = [line.partition("a call is left to vLLM's own: ")[2] for line in facts["on"]["log"][1:]]
    most = 512 if facts["amx"] else 2048  # tokens of a step: with AMX vLLM prefills in chunks
    assert lines == [
        "the sink belongs to no layer that was bound",
        "model.layers.1.attn: the pages are elsewhere than when they were bound",
        f"model.layers.1.attn: q.shape[0]: got {most + 1}, expected at most {most} (caps.queries)",
    ]
    assert list(facts["on"]["fallbacks"].values()) == [1, 1, 1]


def test_switched_off_again_everything_is_given_back(facts: dict[str, Any]) -> None:
    for case in set(facts) - {"devices", "amx"}:
        assert own(facts[case]["owners after"]), facts[case]["owners after"]


def test_compare_keeps_vllms_output_and_writes_a_line_for_each_call(facts: dict[str, Any]) -> None:
    seen = facts["compare"]
    assert seen["tokens"] == facts["off"]["tokens"]
    assert seen["written"] == {"vllm-pp0-tp0-calls.jsonl": 12}
    assert "kernel compare: 10 calls, 0 beyond their bounds, largest relative RMS" in seen["log"][-1]


def test_what_the_kernel_cannot_serve_stays_with_vllm_with_one_line(facts: dict[str, Any]) -> None:
    seen = facts["unsupported"]
    assert seen["log"] == [f"kvbridge: kernel on: vLLM's own kernel serves: {REASON}"]
    assert seen["tokens"] == facts["off"]["tokens"]
    assert "kvbridge" not in seen["owners"][OPERATOR]
    assert seen["calls"] == 0


def test_forced_it_stops_the_start_and_says_why(facts: dict[str, Any]) -> None:
    seen = facts["forced"]
    assert seen["tokens"] is None
    assert f"kvbridge: kernel force: the kernel cannot serve, so vLLM does not start: {REASON}" in seen["error"]


def test_a_connectors_own_config_switches_it_on(facts: dict[str, Any]) -> None:
    seen = facts["connector"]
    assert seen["error"] == ""
    assert seen["owners"][OPERATOR] == "kvbridge.engines.vllm.decode"
    assert seen["owners"]["vllm.v1.worker.utils.allocate_kv_cache"] == "vllm.v1.worker.utils"
    assert "kvbridge: kernel force: 4 attention layers (1 c128, 2 c4, 1 swa), backend cpu" in "\n".join(seen["log"])
    assert seen["calls"] == 12 + 1


def test_worker_processes_load_the_plugin_themselves() -> None:
    done = run_in_engine(
        "vllm",
        ["-m", "tests.parity.vllm_programs.serve", MODEL],
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "KVBRIDGE_DECODE": "force", "OMP_NUM_THREADS": "1"},
    )
    output = done.stdout + done.stderr
    assert output.count("kvbridge: kernel force: 4 attention layers (1 c128, 2 c4, 1 swa), backend cpu") == 1
    assert "a call is left to vLLM's own" not in output
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    assert [len(tokens) for tokens in json.loads(line.removeprefix("TOKENS "))] == [2, 2]


def test_an_unknown_value_is_reported_and_taken_as_off(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    import logging

    from kvbridge.engines.vllm.decode_mode import KernelMode, KernelSwitch

    log = logging.getLogger("kvbridge.test")
    switch = KernelSwitch.read(log, {"KVBRIDGE_DECODE": "always", "KVBRIDGE_COMPARE_DIR": str(tmp_path)})
    assert (switch.mode, switch.directory) == (KernelMode.OFF, tmp_path)
    assert "KVBRIDGE_DECODE: got 'always', expected one of off, compare, on, force; taken as off" in caplog.text
