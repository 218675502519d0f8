"""All programs of SGLang's interpreter, run together once a test session: SGLang is imported once, then forked.

run_all(folder) -> Session      session.output("capture_cases")      the file that program wrote, or why it failed
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.sglang import sglang_models
from tests.environments import run_in_engine
from tests.parity.byte_parity import make_inputs

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
PARITY_WRITER = HERE.parent.parent / "parity" / "programs" / "sglang_writer.py"

INSPECT = HERE.parent.parent.parent / "kvbridge" / "inspect" / "__main__.py"


@dataclass(frozen=True, slots=True)
class Session:
    """Outputs of the programs.

    Attributes:
        folder: Where they and their logs lie; `models` in it holds the model folders.
    """

    folder: Path

    def output(self, name: str) -> Path:
        """The file that a program wrote; fails the test with the program's last lines where it failed."""
        status = self.folder / f"{name}.status"
        if not status.exists() or status.read_text() != "0":
            log = self.folder / f"{name}.log"
            lines = log.read_text().splitlines()[-40:] if log.exists() else ["it wrote no log"]
            pytest.fail("\n".join([f"{name} failed in SGLang's interpreter:", *lines]))
        return self.folder / f"{name}.out"


def run_all() -> Session:
    """Runs every program, once a session; skips the calling test where SGLang is neither there nor required."""
    session, problem = _outcome()
    if problem is not None:
        raise problem
    assert session is not None
    return session


@functools.cache
def _outcome() -> tuple[Session | None, BaseException | None]:
    """What the one run gave: a failure is kept too, so that it is not repeated for every test."""
    try:
        return _run(), None
    except (Exception, pytest.skip.Exception) as problem:
        return None, problem


def _run() -> Session:
    folder = Path(tempfile.mkdtemp(prefix="kvbridge-sglang-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    models, cases, rows = folder / "models", folder / "cases.json", folder / "rows.safetensors"
    sglang_models.write_models(models)
    cases.write_text(json.dumps(sglang_models.all_cases()))
    make_inputs(rows)
    programs = {
        "capture_cases": (PROGRAMS / "capture_cases.py", models, cases),
        "adapter_checks": (PROGRAMS / "adapter_checks.py", models),
        "host_checks": (PROGRAMS / "host_checks.py",),
        "plugin_cases": (PROGRAMS / "plugin_cases.py", models, folder / "scenarios"),
        "decode_checks": (PROGRAMS / "decode_checks.py", models),
        "decode_cases": (PROGRAMS / "decode_cases.py",),
        "sglang_writer": (PARITY_WRITER, rows),
        "inspect_capture": (INSPECT, "capture", "--engine", "sglang", "--model", models / "v4", "-o"),
    }
    spec = folder / "spec.json"
    entries = [
        {"name": name, "program": str(program), "arguments": [*map(str, given), str(folder / f"{name}.out")]}
        for name, (program, *given) in programs.items()
    ]
    spec.write_text(json.dumps(entries))
    workarounds = ("triton-interpreter", "torch-sparse-decode")
    run_in_engine("sglang", [PROGRAMS / "driver.py", spec], workarounds=workarounds, timeout_seconds=900)
    return Session(folder)
