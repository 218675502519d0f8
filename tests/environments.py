"""One virtual environment per engine, made once and reused: `python -m tests.environments [vllm] [sglang]`.

The two engines pin different torch releases, so each lives in its own interpreter and the tests start programs in it:

    <environments>/vllm-3f2a90c1d4e7/              12 hex digits of the requirements' hash
                   |- bin/python                   what engine_python("vllm") returns
                   '- kvbridge-environment.json    written last: no file, no environment
    <environments>/vllm-3f2a90c1d4e7.lock          held while the environment is made or relinked
    <environments>/vllm-3f2a90c1d4e7.log           everything pip said

<environments> is $KVBRIDGE_ENVIRONMENTS, or kvbridge/environments in the user's cache folder. KVBRIDGE_VLLM_PYTHON and
KVBRIDGE_SGLANG_PYTHON name an interpreter to use instead. Work-arounds: tests/engine_shims/<engine>/workarounds.toml.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines_support import (
    ENGINES,
    ROOT,
    SHIMS,
    EngineRunError,
    Progress,
    ask,
    engine_named,
    removed_distributions,
    requirements_hash,
    run_group,
)
from tests.engines_support import workarounds as known_workarounds

RECORD_NAME = "kvbridge-environment.json"


class EngineUnavailable(RuntimeError):
    """The engine is not there and nobody asked to install it. The text is the tests' reason to skip."""


class EnvironmentFailed(RuntimeError):
    """An environment could not be made, or the interpreter named by an override variable is of no use."""


def environments_root() -> Path:
    """The folder that holds the environments; see the module's text."""
    if chosen := os.environ.get("KVBRIDGE_ENVIRONMENTS"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvbridge" / "environments"


def environment_path(engine: str) -> Path:
    """Where this engine's environment lies, made or not."""
    return environments_root() / f"{engine}-{requirements_hash(engine)[:12]}"


def creation_wanted() -> bool:
    """Whether a missing environment is to be made: KVBRIDGE_REQUIRE_ENGINES=1, or CI, where none may be missing."""
    on = {"1", "true", "yes"}
    return any(os.environ.get(name, "").lower() in on for name in ("KVBRIDGE_REQUIRE_ENGINES", "CI"))


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of an environment, or None when it is missing or not readable: an interrupted creation leaves none."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD_NAME).read_text())
    except (OSError, ValueError):
        return None
    return record


def reusable(engine: str) -> bool:
    """Whether the environment was made for these requirements and its interpreter still finds that engine."""
    folder = environment_path(engine)
    record = read_record(folder)
    if record is None or record.get("requirements_hash") != requirements_hash(engine):
        return False
    facts = ask(folder / "bin" / "python", engine)
    return facts is not None and facts["versions"][engine_named(engine).distribution] == engine_named(engine).release


def project_hash() -> str:
    """Hash of pyproject.toml, whose change (a dependency, an entry point) asks for a new editable install."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def linked(folder: Path) -> bool:
    """Whether the environment's editable kvbridge is this checkout, as its pyproject.toml is now."""
    record = read_record(folder) or {}
    return (record.get("kvbridge_location"), record.get("project_hash")) == (str(ROOT), project_hash())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the environment's lock file, waiting for another process that is making the same environment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {folder.name}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def create(engine: str, *, recreate: bool = False) -> Path:
    """Makes the environment, or brings an existing one up to date, and returns its interpreter.

    Args:
        engine: "vllm" or "sglang".
        recreate: make it anew even where it could be reused.

    Raises:
        EnvironmentFailed: a step failed; the text has the step, the end of pip's output and the log's path.
    """
    folder, wanted = environment_path(engine), engine_named(engine)
    python = folder / "bin" / "python"
    with locked(folder):
        progress = Progress(title=folder.name, log=folder.with_name(folder.name + ".log"), failure=EnvironmentFailed)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        # --no-compile: byte-compiling all of an engine takes minutes, an import compiles the few files it needs.
        install = [*pip, "install", "--no-compile", "--progress-bar", "off"]
        if recreate or not reusable(engine):
            shutil.rmtree(folder, ignore_errors=True)
            progress.step("make the virtual environment", [sys.executable, "-m", "venv", str(folder)])
            progress.step(f"install {' '.join(wanted.requirements)}", [*install, *wanted.requirements])
            if removed := removed_distributions(engine):
                progress.step(f"remove {' '.join(removed)}", [*pip, "uninstall", "--yes", *removed])
            write_record(engine, folder, location=None)
        if not linked(folder):
            # Without build isolation: the environment has setuptools, so nothing is downloaded for the build.
            command = [*install, "--no-build-isolation", "--editable", str(ROOT)]
            progress.step("install kvbridge (editable)", command)
            write_record(engine, folder, location=ROOT)
    return python


def write_record(engine: str, folder: Path, *, location: Path | None) -> None:
    """Writes kvbridge-environment.json in one rename, from what the interpreter itself reports."""
    facts, wanted = ask(folder / "bin" / "python", engine), engine_named(engine)
    found = facts["versions"][wanted.distribution] if facts else None
    if facts is None or found != wanted.release:
        raise EnvironmentFailed(f"{folder}: {wanted.distribution}: got {found}, expected {wanted.release}")
    record = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "engine": {"name": engine, "distribution": wanted.distribution, "version": wanted.release},
        "torch": facts["versions"]["torch"],
        "python": facts["python"],
        "requirements": list(wanted.requirements),
        "removed": list(removed_distributions(engine)),
        "requirements_hash": requirements_hash(engine),
        "kvbridge": facts["versions"]["kvbridge"],
        "kvbridge_location": str(location) if location else None,
        "project_hash": project_hash() if location else None,
    }
    partial = folder / (RECORD_NAME + ".part")
    partial.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    partial.replace(folder / RECORD_NAME)


def overridden(engine: str) -> Path | None:
    """The interpreter named by KVBRIDGE_<ENGINE>_PYTHON, checked; None when the variable is not set.

    Raises:
        EnvironmentFailed: it does not run, or has no such engine, or no kvbridge. A named interpreter is never skipped.
    """
    wanted = engine_named(engine)
    chosen = os.environ.get(wanted.override_variable)
    if not chosen:
        return None
    python = Path(chosen).expanduser().absolute()
    facts = ask(python, engine)
    if facts is None:
        raise EnvironmentFailed(f"{wanted.override_variable}: got {python}, expected an interpreter that runs")
    found = facts["versions"][wanted.distribution] or facts["versions"][wanted.name]
    if found != wanted.release:
        problem = f"got {wanted.distribution} {found}, expected {wanted.distribution} {wanted.release}"
        raise EnvironmentFailed(f"{wanted.override_variable}: {python}: {problem}")
    if facts["versions"]["kvbridge"] is None:
        advice = f"expected it installed: {python} -m pip install --editable {ROOT}"
        raise EnvironmentFailed(f"{wanted.override_variable}: {python}: got no kvbridge, {advice}")
    return python


@functools.cache
def engine_python(engine: str) -> Path:
    """The interpreter that has this engine and kvbridge; made first when creation_wanted().

    Raises:
        EngineUnavailable: it is not there and creation was not asked for; the text says how to get it.
        EnvironmentFailed: it was asked for and could not be made.
    """
    wanted = engine_named(engine)
    if python := overridden(engine):
        return python
    if not creation_wanted() and not reusable(engine):
        raise EngineUnavailable(
            f"no {engine} {wanted.release} in {environment_path(engine)}: run `python -m tests.environments {engine}` "
            f"(minutes), or set KVBRIDGE_REQUIRE_ENGINES=1 or {wanted.override_variable}"
        )
    return create(engine)


def require_engine(engine: str) -> Path:
    """engine_python for tests: skips the calling test, with the reason, where the engine is absent and not required."""
    import pytest

    try:
        return engine_python(engine)
    except EngineUnavailable as reason:
        pytest.skip(str(reason))


def engine_environment(engine: str, *, requested: Sequence[str] = ()) -> dict[str, str]:
    """The variables of a process in this engine's environment: the caller's, cleaned, plus the work-arounds'.

    Args:
        engine: "vllm" or "sglang".
        requested: ids of work-arounds that are marked on_request.
    """
    entries = known_workarounds(engine)
    optional = {entry["id"] for entry in entries if entry.get("on_request")}
    if unknown := set(requested) - optional:
        raise ValueError(f"workarounds: got {sorted(unknown)}, expected some of {sorted(optional)}")
    foreign = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
    variables = {key: value for key, value in os.environ.items() if key not in foreign}
    for entry in entries:
        if not entry.get("on_request") or entry["id"] in requested:
            variables.update(entry.get("variables", {}))
    # ROOT: the code of this checkout, whichever checkout the environment's editable install points at.
    variables["PYTHONPATH"] = os.pathsep.join((str(SHIMS / engine), str(ROOT)))
    return variables


def run_in_engine(
    engine: str,
    arguments: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    workarounds: Sequence[str] = (),
    timeout_seconds: float = 600,
    folder: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs this engine's interpreter with `arguments`, under the engine's work-arounds; skips as require_engine does.

    Args:
        engine: "vllm" or "sglang".
        arguments: what follows `python`: a script's path and its arguments, or -m or -c and the rest.
        environment: variables to set on top; a PYTHONPATH is put in front of the work-arounds' folder.
        workarounds: ids of on_request work-arounds to apply.
        timeout_seconds: after it the process and all its children are ended and EngineRunError is raised.
        folder: working directory, the checkout by default.
        check: raise EngineRunError on a non-zero exit; its text ends with the program's last lines.
    """
    python = require_engine(engine)
    variables = engine_environment(engine, requested=workarounds)
    variables["PATH"] = os.pathsep.join((str(python.parent), variables.get("PATH", os.defpath)))
    extra = dict(environment or {})
    if front := extra.pop("PYTHONPATH", None):
        variables["PYTHONPATH"] = os.pathsep.join((front, variables["PYTHONPATH"]))
    command = [str(python), *map(str, arguments)]
    done = run_group(command, environment=variables | extra, folder=folder or ROOT, timeout_seconds=timeout_seconds)
    if check and done.returncode:
        raise EngineRunError(f"exit status: got {done.returncode}, expected 0", done)
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: makes the named environments (all by default) and prints each one's interpreter and versions."""
    parser = argparse.ArgumentParser(prog="python -m tests.environments", description="Makes the engines' environments")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{' or '.join(ENGINES)}; all of them by default")
    parser.add_argument("--recreate", action="store_true", help="make them anew even where they could be reused")
    parser.add_argument("--check", action="store_true", help="make nothing; exit 1 when one is missing")
    options = parser.parse_args(arguments)
    try:
        for engine in options.engines or list(ENGINES):
            python = overridden(engine)
            if python is None and options.check:
                if not reusable(engine):
                    print(f"{engine}: not there: {environment_path(engine)}", file=sys.stderr)
                    return 1
                python = environment_path(engine) / "bin" / "python"
            python = python or create(engine, recreate=options.recreate)
            facts = ask(python, engine) or {"versions": {}}
            versions = (f"{name}={version}" for name, version in facts["versions"].items() if version)
            print(engine, python, *versions)
    except (EnvironmentFailed, ValueError) as fault:
        print(fault, file=sys.stderr)
        return 2 if isinstance(fault, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
