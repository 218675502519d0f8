"""What the command imports, and how long it takes to start."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

_PROBE = """
import json, sys
from kvbridge.inspect.__main__ import main
code = main(sys.argv[1:])
sys.stdout.flush()
print("\\n@@@" + json.dumps([code, sorted(sys.modules)]))
"""

_HEAVY = ("torch", "vllm", "sglang", "numpy", "triton", "transformers", "safetensors")


def _modules(*arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", _PROBE, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    )
    code, modules = json.loads(result.stdout.rpartition("@@@")[2])
    assert code in (0, 1), result.stderr
    assert isinstance(modules, list)
    return modules


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "--format", "json"),
        ("show",),
        ("show", "deepseek-v3.2", "--engine", "vllm", "--memory", "80GiB"),
        ("check", "--consumer", "all"),
        ("map", "--engine", "vllm", "--pool", "c4"),
        ("diff", "vllm:deepseek-v4-flash", "sglang:deepseek-v4-flash"),
        ("rules",),
        ("consumers",),
        ("engines",),
        ("schema",),
    ],
    ids=" ".join,
)
def test_no_torch_and_no_engine(arguments: tuple[str, ...]) -> None:
    loaded = {name.partition(".")[0] for name in _modules(*arguments)}
    assert loaded.isdisjoint(_HEAVY)


def test_show_loads_no_picture_no_consumer_and_no_terminal_library() -> None:
    modules = set(_modules("show", "--format", "json"))
    assert "kvbridge.inspect.show" in modules
    for name in ("kvbridge.consumers", "kvbridge.audit", "kvbridge.inspect.picture", "rich", "typer", "packaging"):
        assert name not in modules


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inspect_startup", ROOT / "benchmarks" / "inspect_startup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_starts_within_its_limit() -> None:
    """The absolute limit, in processor time; the benchmark also compares with a process that imports libraries."""
    benchmark = _benchmark()
    times = benchmark.measure(5).processor
    assert times["json"] <= benchmark.SECONDS
    assert times["table"] <= benchmark.SECONDS * benchmark.TABLE_FACTOR
