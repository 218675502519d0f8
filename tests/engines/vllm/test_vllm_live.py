"""The live engine under the contract: captured equals planned, and the start-up audit in every kind of process.

Each test starts vLLM on the tiny DeepSeek-V4 (about half a minute); what they share runs once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbridge.documents import DeclaredManifest, parse_manifests
from kvbridge.engine import PlanRequest, load_engine
from kvbridge.inspect.__main__ import main as inspect
from kvbridge.models import load_model
from tests.engines_support import EngineRunError
from tests.environments import engine_environment, require_engine, run_in_engine

HERE = Path(__file__).parent
MODEL = HERE / "tiny_dsv4"
CLASSIC = HERE / "tiny_v3"
FIXTURE = MODEL / "captured.json"


def tokens_of(stdout: str) -> list[list[int]]:
    line = next(line for line in stdout.splitlines() if line.startswith("TOKENS "))
    tokens: list[list[int]] = json.loads(line.removeprefix("TOKENS "))
    return tokens


def manifest_in(path: Path) -> DeclaredManifest:
    (manifest,) = parse_manifests(path.read_text())
    return manifest


def comparable(manifest: DeclaredManifest) -> DeclaredManifest:
    """What planned and captured must share: all but where it came from and what a budget would hold."""
    return manifest.model_copy(update={"origin": "planned", "memory": None, "notes": ()})


def planned_like(captured: DeclaredManifest, model: Path = MODEL) -> DeclaredManifest:
    request = PlanRequest(load_model(model), captured.engine.version, captured.options)
    return DeclaredManifest.model_validate(load_engine("vllm").plan(request).document())


def capture(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> DeclaredManifest:
    python = require_engine("vllm")
    for name, value in engine_environment("vllm").items():
        monkeypatch.setenv(name, value)
    arguments = ["capture", "--engine", "vllm", "--model", str(model), "--python", str(python), "-o", str(out)]
    assert inspect([*arguments, "--max-num-batched-tokens", "1024", *options]) == 0
    return manifest_in(out)


def test_capture_writes_the_manifest_that_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--max-model-len", "1024", "--num-gpu-blocks-override", "600")
    captured = capture(MODEL, tmp_path / "captured.json", monkeypatch, *sizes)
    assert comparable(captured) == comparable(planned_like(captured))
    assert (captured.origin, captured.options["num-gpu-blocks-override"]) == ("captured", 600)
    assert {pool.page_stride_bytes for pool in captured.pools} == {93_888}
    committed = manifest_in(FIXTURE)
    assert captured.options["arch"] in ("cpu", "cpu-amx")
    # With AMX vLLM prefills in chunks; the example is of a machine without.
    of_the_machine = {name: committed.options[name] for name in ("arch", "max-num-batched-tokens")}
    captured = captured.model_copy(update={"options": {**captured.options, **of_the_machine}})
    assert captured == committed, "the committed example differs from what vLLM allocates now"


def test_capture_of_classic_mla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(CLASSIC, tmp_path / "captured.json", monkeypatch, "--max-model-len", "512")
    assert comparable(captured) == comparable(planned_like(captured, CLASSIC))
    (pool,) = captured.pools
    assert (pool.pool, pool.record, pool.padding.policy) == ("mla", "mla_bf16", "exact")
    blocks = captured.options["num-gpu-blocks-override"]
    assert [layer.offset_bytes for layer in pool.layers] == [
        layer * blocks * pool.page_stride_bytes for layer in range(3)
    ]


def test_in_process_with_plugin_and_connector(tmp_path: Path) -> None:
    done = run_in_engine(
        "vllm",
        ["-m", "tests.engines.vllm.vllm_generate", MODEL, tmp_path / "connector"],
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "KVBRIDGE_AUDIT": "error",
            "KVBRIDGE_MANIFEST_DIR": str(tmp_path / "plugin"),
        },
    )
    assert [len(tokens) for tokens in tokens_of(done.stdout)] == [3, 3]
    output = done.stdout + done.stderr
    assert output.count("kvbridge: vllm-pp0-tp0: audit (error) ran: 8 pools, 14 layer caches, 0 errors") == 2
    by_plugin = manifest_in(tmp_path / "plugin" / "vllm-pp0-tp0.json")
    by_connector = manifest_in(tmp_path / "connector" / "vllm-pp0-tp0.json")
    assert by_plugin == by_connector
    assert comparable(by_plugin) == comparable(planned_like(by_plugin))


def test_worker_processes_with_the_plugin(tmp_path: Path) -> None:
    done = run_in_engine(
        "vllm",
        ["-m", "tests.engines.vllm.vllm_generate", MODEL],
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "KVBRIDGE_AUDIT": "error",
            "KVBRIDGE_MANIFEST_DIR": str(tmp_path),
        },
    )
    assert [len(tokens) for tokens in tokens_of(done.stdout)] == [3, 3]
    assert "audit (error) ran: 8 pools, 14 layer caches, 0 errors" in done.stdout + done.stderr
    manifest = manifest_in(tmp_path / "vllm-pp0-tp0.json")
    assert comparable(manifest) == comparable(planned_like(manifest))


@pytest.mark.parametrize("processes", ["0", "1"])
def test_an_altered_layer_stops_the_engine_before_it_serves(processes: str, tmp_path: Path) -> None:
    with pytest.raises(EngineRunError) as stopped:
        run_in_engine(
            "vllm",
            ["-m", "tests.engines.vllm.vllm_generate", MODEL],
            environment={
                "PYTHONPATH": str(HERE / "altering_plugin"),
                "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
                "KVBRIDGE_TEST_CLOSER_BYTES": "576",
                "KVBRIDGE_AUDIT": "error",
                "KVBRIDGE_MANIFEST_DIR": str(tmp_path),
            },
        )
    output = stopped.value.done.stdout + stopped.value.done.stderr
    assert "TOKENS" not in output
    assert "pool c4: model.layers.1.attn.tensor.stride(0): got 93312, expected 93888" in output
    assert "errors in the KV-cache layout" in output
