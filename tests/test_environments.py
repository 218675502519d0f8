"""The logic of tests/environments.py on a toy engine (tests/toy_engine.py): made, reused, relinked, made anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import engines_support, environments
from tests.engines_support import ENGINES, ROOT, Engine, Progress
from tests.environments import EngineUnavailable, EnvironmentFailed
from tests.toy_engine import TOY, fake_environment, fill_wheels, toy_engine


@pytest.fixture(name="toy")
def toy_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    yield from toy_engine(monkeypatch, tmp_path)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What create() would run; nothing is run."""
    seen: list[str] = []
    monkeypatch.setattr(Progress, "step", lambda self, text, command: seen.append(text))
    monkeypatch.setattr(environments, "write_record", lambda engine, folder, *, location: None)
    return seen


def test_a_missing_environment_is_made_recorded_and_reused(
    toy: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_wheels(tmp_path / "wheels")
    monkeypatch.setattr(environments, "linked", lambda folder: True)  # kvbridge's own dependencies are not among them
    assert not environments.reusable("toy")
    python = environments.create("toy")
    facts = engines_support.ask(python, "toy")
    assert facts and facts["versions"] == {"kvbridge": None, "toy-engine": "1.0", "toy": None, "torch": "0.1"}
    packages = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "toy-engine" in packages and "wheel" not in packages
    record = json.loads((environments.environment_path("toy") / environments.RECORD_NAME).read_text())
    assert record["engine"] == {"name": "toy", "distribution": "toy-engine", "version": "1.0"}
    assert record["torch"] == "0.1" and record["removed"] == ["wheel"] and record["python"].startswith("3.")
    assert record["requirements"][:2] == ["toy-engine==1.0", "torch==0.1"] and record["created"].endswith("+00:00")
    said = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1].split()[0] for line in said if "]   " not in line] == ["make", "install", "remove"]
    assert all(" s] " in line for line in said)
    assert environments.reusable("toy")
    environments.create("toy")
    assert capsys.readouterr().err == ""


def test_a_failed_step_names_the_step_the_log_and_the_end_of_the_output(toy: Engine, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(EnvironmentFailed) as caught:
        environments.create("toy")
    log = environments.environment_path("toy").with_suffix(".log")
    assert "install toy-engine==1.0 torch==0.1" in str(caught.value) and str(log) in str(caught.value)
    assert "No matching distribution found for toy-engine==1.0" in str(caught.value)
    assert "No matching distribution" in log.read_text()
    assert not environments.reusable("toy")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"requirements_hash": "0" * 64}, False),
        ({"version": "1.1"}, False),
    ],
)
def test_reuse_needs_the_same_requirements_and_the_same_engine(
    toy: Engine, changes: dict[str, str], expected: bool
) -> None:
    fake_environment(**changes)
    assert environments.reusable("toy") is expected


@pytest.mark.parametrize("damage", ["record", "interpreter", "half a record"])
def test_a_damaged_environment_is_not_reused(toy: Engine, damage: str) -> None:
    folder = fake_environment()
    if damage == "record":
        (folder / environments.RECORD_NAME).unlink()
    elif damage == "half a record":
        (folder / environments.RECORD_NAME).write_text('{"requirements_hash": "')
    else:
        (folder / "bin" / "python").unlink()
    assert not environments.reusable("toy")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"kvbridge_location": "/another/checkout"}, ["install kvbridge (editable)"]),
        ({"project_hash": "0" * 64}, ["install kvbridge (editable)"]),
        (
            {"requirements_hash": "0" * 64},
            ["make the virtual environment", "install", "remove wheel", "install kvbridge (editable)"],
        ),
    ],
)
def test_create_runs_only_the_steps_that_are_needed(
    toy: Engine, steps: list[str], changes: dict[str, str], expected: list[str]
) -> None:
    fake_environment(**changes)
    environments.create("toy")
    assert [step if not step.startswith("install toy") else "install" for step in steps] == expected


def test_recreate_makes_even_a_good_environment_anew(toy: Engine, steps: list[str]) -> None:
    folder = fake_environment()
    environments.create("toy", recreate=True)
    assert steps[0] == "make the virtual environment" and not (folder / "bin").exists()


def test_the_hash_covers_requirements_and_removals(toy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {engines_support.requirements_hash("toy")}
    for changed in (
        Engine(name="toy", distribution="toy-engine", release="1.1", torch="0.1"),
        Engine(name="toy", distribution="toy-engine", release="1.0", torch="0.2"),
        Engine(name="toy", distribution="toy", release="1.0", torch="0.1"),
    ):
        monkeypatch.setitem(ENGINES, "toy", changed)
        seen.add(engines_support.requirements_hash("toy"))
    monkeypatch.setitem(ENGINES, "toy", TOY)
    monkeypatch.setattr(engines_support, "removed_distributions", lambda engine: ())
    seen.add(engines_support.requirements_hash("toy"))
    assert len(seen) == 5
    assert environments.environment_path("toy").name == "toy-" + engines_support.requirements_hash("toy")[:12]


def test_the_folder_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVBRIDGE_ENVIRONMENTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environments.environments_root() == tmp_path / "kvbridge" / "environments"
    monkeypatch.setenv("KVBRIDGE_ENVIRONMENTS", str(tmp_path / "elsewhere"))
    assert environments.environments_root() == tmp_path / "elsewhere"


def test_only_one_process_makes_an_environment_and_the_other_says_that_it_waits(toy: Engine, tmp_path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from tests.environments import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "toy-0")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        with subprocess.Popen(command, stderr=subprocess.PIPE, **pipes) as second:
            assert second.stderr and second.stderr.readline() == "waiting for another process that makes toy-0\n"
            assert second.poll() is None
            assert first.stdin
            first.stdin.close()
            assert second.stdout and second.stdout.readline() == "held\n"
            assert second.stdin
            second.stdin.close()


def test_an_absent_engine_skips_with_the_ways_to_get_it(toy: Engine) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        environments.engine_python("toy")
    for part in ("toy 1.0", "python -m tests.environments toy", "KVBRIDGE_REQUIRE_ENGINES=1", "KVBRIDGE_TOY_PYTHON"):
        assert part in str(caught.value)
    with pytest.raises(pytest.skip.Exception, match=r"run `python -m tests\.environments toy`"):
        environments.run_in_engine("toy", ["-c", ""])


@pytest.mark.parametrize("variable", ["CI", "KVBRIDGE_REQUIRE_ENGINES"])
def test_where_engines_are_required_an_absent_one_is_made_or_fails(
    toy: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv(variable, "true")
    with pytest.raises(EnvironmentFailed, match="No matching distribution"):
        environments.require_engine("toy")


def test_the_override_variable_names_the_interpreter(toy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    python = fake_environment() / "bin" / "python"
    monkeypatch.setenv("KVBRIDGE_TOY_PYTHON", str(python))
    monkeypatch.setenv("KVBRIDGE_ENVIRONMENTS", "/nowhere")
    assert environments.engine_python("toy") == python


def without_kvbridge() -> Path:
    folder = fake_environment()
    next(folder.rglob("kvbridge-*.dist-info/METADATA")).unlink()
    next(folder.rglob("kvbridge-*.dist-info")).rmdir()
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("interpreter", "message"),
    [
        (lambda: Path("/nowhere/python"), r"got /nowhere/python, expected an interpreter that runs"),
        (lambda: fake_environment(version="1.1") / "bin" / "python", r"got toy-engine 1\.1, expected toy-engine 1\.0"),
        (without_kvbridge, r"got no kvbridge, expected it installed: .* -m pip install --editable"),
    ],
)
def test_an_override_of_no_use_fails_and_never_skips(
    toy: Engine, monkeypatch: pytest.MonkeyPatch, interpreter: Callable[[], Path], message: str
) -> None:
    monkeypatch.setenv("KVBRIDGE_TOY_PYTHON", str(interpreter()))
    with pytest.raises(EnvironmentFailed, match="KVBRIDGE_TOY_PYTHON: .*" + message):
        environments.require_engine("toy")


def test_the_command_says_what_is_missing_and_knows_its_engines(
    toy: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert environments.main(["--check", "toy"]) == 1
    assert f"toy: not there: {environments.environment_path('toy')}" in capsys.readouterr().err
    assert environments.main(["--check", "tgi"]) == 2
    assert "engine: got 'tgi', expected one of sglang, toy, vllm" in capsys.readouterr().err
    python = fake_environment() / "bin" / "python"
    assert environments.main(["--check", "toy"]) == 0
    assert capsys.readouterr().out == f"toy {python} kvbridge=0.1.0 toy-engine=1.0\n"
