"""The scripts for the first day with a GPU, as far as they go without one: compiled, launched on the mock, parsed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings and nvidia-cuda-nvrtc are not installed")

from benchmarks import gpu_bench, gpu_probe, gpu_run, gpu_target
from kvbridge.kernels.conformance import Case, run
from kvbridge.kernels.cuda_tiles import ARCHITECTURES
from tests.kernels import mock_driver

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_probe_compiles_without_a_word_from_the_compiler(arch: str) -> None:
    program = gpu_probe.compile_probe(arch)
    assert program.log == ""
    assert len(set(program.symbols)) == len(gpu_probe.KERNELS)


@pytest.mark.parametrize("arch", [80, 90])
def test_probe_makes_every_launch_on_the_mock_driver(arch: int, tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    command = [sys.executable, "benchmarks/gpu_probe.py", "--out", str(out), "--dry-run", "--pool-mb", "8"]
    done = subprocess.run(
        command, env=mock_driver.environment(arch=arch), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["dry_run"] is True
    assert report["gpu"]["multiprocessors"] == mock_driver.MULTIPROCESSORS[arch]
    found = report["fragments"]
    assert set(found) == {"ldmatrix", "mma", "copy_async", "bf16x2", "scalar"}
    assert len(found["ldmatrix"]["out"]) == 320
    assert len(found["mma"]["a"]) == 8 * 32 * 4 and len(found["mma"]["b"]) == 8 * 32 * 2
    assert len(found["mma"]["out"]) == len(found["mma"]["c"]) == 8 * 32 * 4
    assert len(found["copy_async"]["source"]) == 512 and len(found["copy_async"]["out"]) == 32 * 24
    paths = {(row["record"], row["path"]) for row in report["dequantisation"]}
    assert {record for record, _ in paths} == set(gpu_probe.DECODES)
    assert (("v41", "conversion instructions") in paths) == (arch >= 89)
    assert {row["row_bytes"] for row in report["gather"]} == {576, 1152}
    assert all(row["gb_per_second"] is None for row in report["gather"]), "a dry run has no figures"


def test_probe_without_a_driver_says_what_is_missing(tmp_path: Path) -> None:
    env = mock_driver.environment(fail="cuInit:100")
    command = [sys.executable, "benchmarks/gpu_probe.py", "--out", str(tmp_path / "probe.json"), "--dry-run"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("CudaDriverError: cuInit: got CUDA_ERROR_NO_DEVICE")


def test_mma_inputs_hold_subnormals_nan_and_wide_exponents() -> None:
    a, b, c = gpu_probe.mma_inputs()
    left, right = a.view(torch.bfloat16).float(), b.view(torch.bfloat16).float()
    assert a.shape == (8, 32, 4) and b.shape == (8, 32, 2) and c.shape == (8, 32, 4)
    assert left.isnan().any() and right.isinf().any()
    assert ((left != 0) & (left.abs() < 2.0**-126)).any()
    spread = left[3][left[3] != 0].abs()
    assert (spread.max() / spread.min()).item() > 2.0**20
    assert torch.equal(left[0].flatten(), torch.arange(256.0)), "each element names its place"


CASES = [
    Case(queries=2, heads=11, caches=2, width=65, page_rows=53, stride="slab", out="bf16_padded", q_stride="padded"),
    Case(
        record="dsa", queries=3, heads=8, width=64, lengths="per_sequence", out="fp32", lse="with_sink", index_bits=64
    ),
    Case(queries=2, heads=16, width=64, index_stride="wide", out="bf16_head_major", q_stride="head_major", lse="none"),
]


def test_device_target_moves_whole_storages_and_brings_the_answer_back() -> None:
    """With the CPU standing in for the device: the same moves, another kernel."""
    report = run(gpu_target.device_target("torch", device="cpu"), grid=CASES, properties=False)
    assert report.ok, report.table()
    assert sum(row.passed for row in report.rows.values()) == len(CASES)


def test_moved_tensors_keep_strides_offset_and_poison() -> None:
    storage = torch.full((100,), 7, dtype=torch.int32)
    view = storage.as_strided((2, 3), (40, 2), 5)
    copy = gpu_target.moved(view, "cpu")
    assert copy.stride() == view.stride() and copy.storage_offset() == 5
    assert copy.data_ptr() != view.data_ptr()
    assert torch.equal(gpu_target.whole(copy), storage)


def test_benchmark_runs_on_a_cpu_and_checks_every_answer(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = [
        "--device",
        "cpu",
        "--pages",
        "4",
        "--sets",
        "2",
        "--heads",
        "8",
        "--slots",
        "192",
        "--queries",
        "1",
        "3",
    ]
    assert gpu_bench.main(["--out", str(out), *options]) == 0
    report = json.loads(out.read_text())
    assert [(row["heads"], row["slots"], row["queries"]) for row in report["rows"]] == [(8, 192, 1), (8, 192, 3)]
    for row in report["rows"]:
        assert row["kvbridge"]["correct"] and row["kvbridge"]["us"] > 0
        assert row["torch"]["rms"] < 2e-2  # bf16 scores
    assert report["device"] == "CPU" and report["flashmla"] == "not on a CPU"


def test_benchmark_refuses_fewer_slots_than_the_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        gpu_bench.main(["--out", str(tmp_path / "b.json"), "--device", "cpu", "--slots", "128"])
    assert raised.value.code == 2
    assert "--slots: got 128, expected more than the window of 128" in capsys.readouterr().err


def test_a_kernel_that_fails_leaves_its_reason_and_not_a_figure() -> None:
    def broken() -> list[Any]:
        raise RuntimeError("no such kernel")

    views = [gpu_bench.random_pages(4, torch.device("cpu"), torch.Generator().manual_seed(0)) for _ in range(2)]
    shape = gpu_bench.Shape(8, 192, 1)
    data = gpu_bench.make(shape, views, 1, torch.Generator().manual_seed(0))
    row = gpu_bench.cell(shape, data, {"flashmla": broken}, 1)
    assert row["flashmla"] == {"error": "RuntimeError: no such kernel"}


def test_flashmla_is_given_the_same_bytes_and_padded_heads() -> None:
    """FlashMLA's interface, with a stand-in that decodes what it is handed: shapes, strides and padding are right."""
    views = [gpu_bench.random_pages(4, torch.device("cpu"), torch.Generator().manual_seed(0)) for _ in range(2)]
    shape = gpu_bench.Shape(8, 192, 3)
    data = gpu_bench.make(shape, views, 1, torch.Generator().manual_seed(1))
    seen: dict[str, Any] = {}

    class Interface:
        @staticmethod
        def get_mla_metadata() -> tuple[object, None]:
            return object(), None

        @staticmethod
        def flash_mla_with_kvcache(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            seen.update(given)
            return torch.ones(3, 1, 64, 512, dtype=torch.bfloat16), torch.zeros(3, 64, 1)

    (call,) = gpu_bench.flashmla(data, Interface, {"use_legacy": True}, keep_schedule=True)
    call()
    assert seen["q"].shape == (3, 1, 64, 512) and not seen["q"][:, :, 8:].any()
    for name, view in (("k_cache", views[0]), ("extra_k_cache", views[1])):
        assert seen[name].shape == (4, 64, 1, 584) and seen[name].stride(0) == 37_440
        assert seen[name].data_ptr() == view.base_address
    assert seen["indices"].shape == (3, 1, 128) and seen["extra_indices_in_kvcache"].shape == (3, 1, 64)
    assert torch.equal(seen["attn_sink"][:8], data.sink) and bool((seen["attn_sink"][8:] == float("-inf")).all())
    assert bool((data.out == 1).all())


def test_run_reports_steps_that_fail_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_run,
        "commands",
        lambda chosen, folder: {
            "grid TARGET": [sys.executable, "-c", "print('3 failed'); raise SystemExit(1)"],
            "bench": [sys.executable, "-c", _bench_script(folder / "bench.json")],
        },
    )
    out = tmp_path / "run.json"
    assert gpu_run.main(["--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["steps"]["grid TARGET"]["status"] == 1
    assert report["steps"]["grid TARGET"]["tail"] == "3 failed\n"
    assert report["bench"]["rows"][0]["kvbridge"]["us"] == 40.0
    text = out.with_suffix(".txt").read_text()
    assert "grid TARGET: exit 1" in text
    (line,) = [line for line in text.splitlines() if line.split()[:3] == ["64", "640", "256"]]
    assert line.split()[3:] == [
        "40.00",
        "50.00",
        "80.00",
        "-",
        "400.00",
        "?",
        "2.00",
        "10.00",
        "30.00",
        "75",
        "%",
        PREDICTED,
    ]
    assert "Ours wrong in 0 cells" in text


PREDICTED = f"{gpu_run.predictions()[64, 640, 256]:.1f}"


def _bench_script(out: Path) -> str:
    good, bad = {"rms": 1e-3, "correct": True}, {"rms": 4e-3, "correct": False}
    row = {
        "heads": 64,
        "slots": 640,
        "queries": 256,
        "roofline_us": 30.0,
        "kvbridge": {"us": 40.0, **good},
        "kvbridge_separate": {"us": 50.0, **good},
        "flashmla": {"us": 80.0, **good},
        "torch": {"us": 400.0, **bad},
    }
    report = {"schema_version": 1, "device": "a GPU", "torch": "2", "flashmla": "flash_mla", "rows": [row]}
    return f"import pathlib; pathlib.Path({str(out)!r}).write_text({json.dumps(report)!r})"


def test_wrong_answers_are_listed_and_fail_the_run() -> None:
    row = {
        "heads": 8,
        "slots": 640,
        "queries": 1,
        "roofline_us": 0.1,
        "kvbridge": {"us": 5.0, "rms": 0.1, "correct": False},
    }
    text = gpu_run.table({"device": "a GPU", "torch": "2", "flashmla": "none", "rows": [row]})
    assert "Ours wrong in 1 cells" in text and "heads 8, slots 640, queries 1: kvbridge: " in text
    assert "5.00 ?" in text


def test_steps_and_limits_are_checked_and_a_slow_step_is_ended(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gpu_run.main(["--out", str(tmp_path / "r.json"), "--steps", "tune"])
    step = gpu_run.run_step([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=1)
    assert step["status"] == 124 and step["seconds"] < 30
    assert gpu_run.run_step(["no-such-program"], timeout_s=1)["status"] == 127


def test_commands_name_scripts_and_cases_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    parser_input = ["--out", str(tmp_path / "r.json"), "--queries", "1", "512"]
    seen: dict[str, list[str]] = {}
    monkeypatch.setattr(gpu_run, "run_step", lambda command, timeout_s: {"status": 0, "seconds": 0, "tail": ""})
    original = gpu_run.commands
    monkeypatch.setattr(gpu_run, "commands", lambda chosen, folder: seen.update(original(chosen, folder)) or seen)
    assert gpu_run.main(parser_input) == 0
    assert set(seen) == {
        "probe",
        "bench",
        *(f"grid {t}" for t in gpu_run.TARGETS),
        *(f"sanitizer {t}" for t in gpu_run.TOOLS),
    }
    for command in seen.values():
        for part in command:
            if part.startswith("benchmarks/"):
                assert (ROOT / part).exists()
            if part.startswith("benchmarks.gpu_target:"):
                assert hasattr(gpu_target, part.split(":")[1])
    assert seen["bench"][-3:] == ["--queries", "1", "512"]
    for text in gpu_run.sanitized_cases():
        assert str(Case.parse(text)) == text
    assert shutil.which("compute-sanitizer") == str(fake)
