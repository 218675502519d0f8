"""Everything a CUDA machine is for, in one command: probe, correctness grid, compute-sanitizer, benchmark.

    python benchmarks/gpu_run.py --out run.json            also run.txt, the table
    python benchmarks/gpu_run.py --out run.json --steps grid bench --queries 1 512

    probe      benchmarks/gpu_probe.py
    grid       the conformance kit on the GPU: fused and separate merge, and the plain path
    sanitizer  a few cases under compute-sanitizer's memcheck, racecheck and synccheck, where it is installed
    bench      benchmarks/gpu_bench.py: FlashMLA and torch beside ours, under CUDA graphs

Each step is a process of its own with a time limit: one that fails is reported, and the next one runs. Needs this
checkout, torch and the wheels it brings; FlashMLA from sgl-flash-mla or vLLM is used where one of them loads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("probe", "grid", "sanitizer", "bench")
TARGETS = ("TARGET", "SEPARATE", "PLAIN")
TOOLS = ("memcheck", "racecheck", "synccheck")
PREDICTED = ROOT / "benchmarks" / "predicted_h200.json"
_TAIL = 6000
_KERNELS = ("kvbridge", "kvbridge_separate", "flashmla", "flashmla_scheduled", "torch")


def run_step(command: Sequence[str], *, timeout_s: int) -> dict[str, Any]:
    """Runs one process; gives its status, time and the end of what it printed."""
    started = time.monotonic()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = 124, error.stdout or b""
    except OSError as error:
        status, output = 127, str(error).encode()
    text = output.decode(errors="replace")[-_TAIL:]
    return {"command": list(command), "status": status, "seconds": round(time.monotonic() - started, 1), "tail": text}


def sanitizer() -> str | None:
    """compute-sanitizer on PATH or in the toolkit that CUDA_HOME names."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("compute-sanitizer") or (
        shutil.which("compute-sanitizer", path=f"{home}/bin") if home else None
    )


def commands(chosen: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """What each step runs, by name."""
    python = sys.executable
    kit = [python, "-m", "kvbridge.kernels.conformance", "--target"]
    found: dict[str, list[str]] = {}
    if "probe" in chosen.steps:
        found["probe"] = [python, "benchmarks/gpu_probe.py", "--out", str(folder / "probe.json")]
    if "grid" in chosen.steps:
        for target in TARGETS:
            found[f"grid {target}"] = [*kit, f"benchmarks.gpu_target:{target}"]
    tool = sanitizer()
    if "sanitizer" in chosen.steps and tool:
        for name in TOOLS:
            check = [tool, "--tool", name, "--error-exitcode", "9"]
            cases = [part for case in sanitized_cases() for part in ("--only", case)]
            found[f"sanitizer {name}"] = [*check, *kit, "benchmarks.gpu_target:TARGET", *cases]
    if "bench" in chosen.steps:
        options = [str(part) for name in ("heads", "slots", "queries") for part in _option(name, getattr(chosen, name))]
        found["bench"] = [python, "benchmarks/gpu_bench.py", "--out", str(folder / "bench.json"), *options]
    return found


def sanitized_cases() -> list[str]:
    """A few cases of the grid that reach splits, dead slots, odd pages and every stage of the copies."""
    from kvbridge.kernels.conformance import Case

    first = Case(queries=2, heads=16, caches=2, width=133, page_rows=53, stride="plus8", slots="out_of_range")
    second = Case(record="dsa", queries=3, heads=66, caches=1, width=576, lengths="beyond", slots="holes")
    third = Case(record="v41_fp4_interleaved", queries=1, heads=8, caches=3, width=192, stride="slab")
    return [str(case) for case in (first, second, third)]


def _option(name: str, values: list[int] | None) -> list[object]:
    return [f"--{name}", *values] if values else []


def predictions() -> dict[tuple[int, int, int], float]:
    """Predicted microseconds by heads, slots and queries."""
    rows = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else []
    return {(row["heads"], row["slots"], row["queries"]): row["predicted_us"] for row in rows}


def table(bench: dict[str, Any]) -> str:
    """Text: times, ratio to the better FlashMLA and to torch, share of an H200's roofline, prediction."""
    known = predictions()
    head = f"{'heads':>6}{'slots':>6}{'queries':>8}" + "".join(f"{name:>20}" for name in _KERNELS)
    lines = [f"{bench['device']}, torch {bench['torch']}, FlashMLA: {bench['flashmla']}"]
    lines.append(head + f"{'FlashMLA / ours':>17}{'torch / ours':>14}{'roofline':>10}{'share':>8}{'predicted':>11}")
    for row in bench["rows"]:
        line = f"{row['heads']:>6}{row['slots']:>6}{row['queries']:>8}"
        line += "".join(f"{_time(row.get(name)):>20}" for name in _KERNELS)
        own = _best(row, "kvbridge", "kvbridge_separate")
        flash, torch_us = _best(row, "flashmla", "flashmla_scheduled"), _best(row, "torch")
        ratios = [f"{other / own:.2f}" if own and other else "-" for other in (flash, torch_us)]
        share = f"{100 * row['roofline_us'] / own:.0f} %" if own else "-"
        predicted = known.get((row["heads"], row["slots"], row["queries"]))
        line += f"{ratios[0]:>17}{ratios[1]:>14}{row['roofline_us']:>10.2f}{share:>8}"
        lines.append(line + (f"{predicted:>11.1f}" if predicted is not None else f"{'-':>11}"))
    wrong = [
        f"heads {row['heads']}, slots {row['slots']}, queries {row['queries']}: {name}: {_fault(row[name])}"
        for row in bench["rows"]
        for name in ("kvbridge", "kvbridge_separate")
        if name in row and not row[name].get("correct")
    ]
    lines += [f"us; a ? marks an answer off by more than a relative RMS of 2.5e-3. Ours wrong in {len(wrong)} cells."]
    return "\n".join([*lines, *wrong]) + "\n"


def _fault(result: dict[str, Any]) -> str:
    return str(result.get("error") or f"relative RMS {result['rms']:.1e}")


def _time(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    return "failed" if "error" in result else f"{result['us']:.2f}{'' if result['correct'] else ' ?'}"


def _best(row: dict[str, Any], *names: str) -> float | None:
    times = [row[name]["us"] for name in names if "us" in row.get(name, {})]
    return min(times) if times else None


def main(arguments: list[str] | None = None) -> int:
    """The command; exit status 0 if every step that ran succeeded and every answer of ours was right."""
    parser = argparse.ArgumentParser(prog="gpu_run.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; the table goes beside it as .txt")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--timeout", type=int, default=3600, help="seconds of one step")
    for name in ("heads", "slots", "queries"):
        parser.add_argument(f"--{name}", type=int, nargs="+", help="of the benchmark")
    chosen = parser.parse_args(arguments)
    folder = chosen.out.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"schema_version": 1, "steps": {}, "sanitizer": sanitizer() or "not installed"}
    for name, command in commands(chosen, folder).items():
        print(f"{name} ...", flush=True)
        report["steps"][name] = step = run_step(command, timeout_s=chosen.timeout)
        print(f"{name}: exit {step['status']} after {step['seconds']} s", flush=True)
        for part in ("probe", "bench"):
            file = folder / f"{part}.json"
            if name == part and not step["status"] and file.exists():
                report[part] = json.loads(file.read_text())
        chosen.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")  # what is known survives a crash
    text = "".join(f"{name}: exit {step['status']}, {step['seconds']} s\n" for name, step in report["steps"].items())
    ok = all(not step["status"] for step in report["steps"].values())
    if "bench" in report:
        text += table(report["bench"])
        ok = ok and "Ours wrong in 0 cells" in text
    chosen.out.with_suffix(".txt").write_text(text)
    print(text, end="")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
