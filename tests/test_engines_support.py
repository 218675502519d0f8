"""Programs in an engine's interpreter, and the work-arounds that they run under."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import engines_support, environments
from tests.engines_support import ENGINES, ROOT, SHIMS, Engine, EngineRunError, run_group
from tests.toy_engine import fake_environment, toy_engine


@pytest.fixture(name="toy")
def toy_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    yield from toy_engine(monkeypatch, tmp_path)


def test_a_program_runs_under_the_work_arounds(toy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBRIDGE_TOY_PYTHON", str(fake_environment() / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", "/foreign")
    monkeypatch.setenv("PYTHONHOME", "/foreign")
    program = "import json, os; print(json.dumps(dict(os.environ)))"

    def variables(**options: Any) -> dict[str, str]:
        loaded: dict[str, str] = json.loads(environments.run_in_engine("toy", ["-c", program], **options).stdout)
        return loaded

    plain = variables()
    assert plain["TOY_ALWAYS"] == "1" and "TOY_SOMETIMES" not in plain and "PYTHONHOME" not in plain
    assert plain["PYTHONPATH"] == os.pathsep.join((str(engines_support.SHIMS / "toy"), str(ROOT)))
    asked = variables(workarounds=["sometimes"], environment={"TOY_ALWAYS": "2", "PYTHONPATH": "/mine"})
    assert asked["TOY_SOMETIMES"] == "1" and asked["TOY_ALWAYS"] == "2"
    assert asked["PYTHONPATH"] == "/mine" + os.pathsep + plain["PYTHONPATH"]
    with pytest.raises(ValueError, match=r"workarounds: got \['always'\], expected some of \['sometimes'\]"):
        variables(workarounds=["always"])


def test_a_failing_program_is_shown(toy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBRIDGE_TOY_PYTHON", str(fake_environment() / "bin" / "python"))
    program = "import sys; print('out'); sys.exit('the reason')"
    with pytest.raises(EngineRunError, match=r"exit status: got 1, expected 0\nout\nthe reason$"):
        environments.run_in_engine("toy", ["-c", program])
    assert environments.run_in_engine("toy", ["-c", program], check=False).returncode == 1


def test_a_program_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    start = f"p = subprocess.Popen([sys.executable, '-c', {child!r}])"
    program = f"import subprocess, sys; {start}; print(p.pid, flush=True); p.wait()"
    started = time.monotonic()
    with pytest.raises(EngineRunError, match=r"time: got more than 1 s, expected an end before that") as caught:
        run_group([sys.executable, "-c", program], environment=os.environ, folder=tmp_path, timeout_seconds=1)
    assert time.monotonic() - started < 30
    status = Path(f"/proc/{int(caught.value.done.stdout)}/status")
    for _ in range(100):
        if not status.exists() or "State:\tZ" in status.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child still runs")


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_work_around_belongs_to_the_pinned_release(engine: str) -> None:
    entries = engines_support.workarounds(engine)
    assert len({entry["id"] for entry in entries}) == len(entries)
    for entry in entries:
        assert entry["release"] == ENGINES[engine].release, f"{entry['id']}: look at it again for this release"
        assert entry["how"] in ("pip_remove", "environment", "sitecustomize") and entry["trap"]
        assert all(isinstance(value, str) for value in entry.get("variables", {}).values())


def test_every_patch_is_a_listed_work_around() -> None:
    """One place holds the patches; the list of the tests' environment says what each is for."""
    from kvbridge.engines.vllm.workarounds import RELEASE, WORKAROUNDS

    listed = {entry["id"] for entry in engines_support.workarounds("vllm") if entry["how"] == "sitecustomize"}
    assert {entry.name for entry in WORKAROUNDS if entry.patch is not None} == listed
    assert ENGINES["vllm"].release == RELEASE
    assert not any(entry["how"] == "sitecustomize" for entry in engines_support.workarounds("sglang"))


def test_the_patch_is_applied_right_after_its_module_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "triton" / "backends"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("backends = {'nvidia': object(), 'amd': object()}")
    program = "import triton.backends as b; print(list(b.backends), b.backends['cpu'].driver.is_active())"
    paths = os.pathsep.join((str(SHIMS / "vllm"), str(tmp_path)))
    done = run_group(
        [sys.executable, "-c", program],
        environment=os.environ | {"PYTHONPATH": paths},
        folder=tmp_path,
        timeout_seconds=60,
    )
    assert done.stdout == "['cpu'] True\n", done.stderr
