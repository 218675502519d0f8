"""Building the CPU backend: cache key, privacy, digest, concurrent builders, missing and limited compilers."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvbridge.kernels import cpu, cpu_build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cpu"


def stand_in(tmp_path: Path, script: str) -> str:
    file = tmp_path / "compiler"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_second_build_comes_from_the_cache(cache: Path) -> None:
    first, second = cpu_build.build(), cpu_build.build()
    assert first.seconds > 0 and second.seconds == 0 and first.library == second.library
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [file.suffix for file in sorted(cache.iterdir())] == [".json", ".lock", ".so"], "something was left behind"
    assert cpu.Library(second).usable


def test_build_costs_less_than_40_seconds_of_processor_time() -> None:
    """Processor time, not wall time: the machine may be busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_build.build()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 40


def test_changed_bytes_are_built_again_not_loaded(cache: Path) -> None:
    built = cpu_build.build()
    genuine = built.library.read_bytes()
    built.library.write_bytes(genuine[:-1] + b"!")
    again = cpu_build.build()
    assert again.seconds > 0 and cpu.Library(again).usable
    Path(again.library).with_suffix(".json").write_text("{")
    assert cpu_build.build().seconds > 0


def test_foreign_folder_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(
        cpu_build.CpuBuildError, match=r"cache folder .*: got owner \d+ .* expected a folder of user \d+"
    ):
        cpu_build.build()


def test_link_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    cache.parent.mkdir(parents=True)
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(cpu_build.CpuBuildError, match="cache folder"):
        cpu_build.build()


def test_open_folder_is_closed(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    cpu_build.build()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        cpu_build.CompilerMissingError,
        match=r"looked for \$CXX, c\+\+, g\+\+ and clang\+\+ .*install one.*torch backend",
    ):
        cpu_build.build()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(cpu_build.CompilerMissingError, match="CXX: got 'no-such-compiler'"):
        cpu_build.build()


def test_unknown_flags_leave_a_path_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An old compiler: no AMX, no bf16; the other paths are built and work."""
    real = cpu_build.find_compiler()[0]
    refuse = 'case "$*" in *-mavx512bf16*) echo "error: unrecognized option -mavx512bf16" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", stand_in(tmp_path, f'{refuse}\nexec {real} "$@"'))
    built = cpu_build.build()
    assert set(built.left_out) == {"avx512_bf16", "amx"} and "unrecognized option" in built.left_out["amx"]
    library = cpu.Library(built)
    assert cpu.Path.PORTABLE in library.usable and cpu.Path.AVX512_BF16 not in library.compiled


def test_only_unknown_flags_leave_a_path_out(tmp_path: Path) -> None:
    """A fault in a path's sources would leave it out too, and its tests would pass over it."""
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    left_out = cpu_build.build(emulate_amx=True).left_out
    for unit in cpu_build._units(emulate_amx=True):
        command = [*cpu_build.find_compiler(), *unit.flags, "-c", str(empty), "-o", str(tmp_path / "empty.o")]
        knows = subprocess.run(command, capture_output=True, check=False).returncode == 0
        assert (unit.name not in left_out) == knows, unit.name


def test_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    monkeypatch.setenv(
        "CXX",
        stand_in(tmp_path, 'case "$1" in --version) echo broken 1.0;; *) echo "error: disk full" >&2; exit 3;; esac'),
    )
    with pytest.raises(cpu_build.CpuBuildError, match="returned 3: error: disk full"):
        cpu_build.build()
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_another_compiler_is_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = cpu_build.build()
    real = cpu_build.find_compiler()[0]
    monkeypatch.setenv(
        "CXX", stand_in(tmp_path, f'case "$1" in --version) echo other 2.0;; *) exec {real} "$@";; esac')
    )
    second = cpu_build.build()
    assert second.library != first.library and second.compiler == "other 2.0"


def test_two_processes_share_one_build() -> None:
    code = "from kvbridge.kernels import cpu_build; b = cpu_build.build(); print(b.seconds > 0, b.library)"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [run.communicate(timeout=120)[0].split() for run in runs]
    assert sorted(output[0] for output in outputs) == ["False", "False", "True"]
    assert len({output[1] for output in outputs}) == 1


def test_recorded_digest_is_of_the_library() -> None:
    built = cpu_build.build()
    note = json.loads(built.library.with_suffix(".json").read_text())
    assert (
        note["sha256"] == hashlib.sha256(built.library.read_bytes()).hexdigest() and note["compiler"] == built.compiler
    )
