"""Builds the CPU backend once, with the machine's own C++ compiler, and keeps it in a private cache.

    src/cpu/*.cpp, *.h  --one compiler process per translation unit-->  objects  -->  <cache>/cpu/<key>.so
    key = hash of sources, flags, compiler version, machine, options           (private_cache.py: lock, digest, rename)

Each path is its own translation unit with its own flags; one that this compiler cannot build is left out and named in
the result. No torch header is used, so one build serves every torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvbridge.kernels import private_cache

SOURCES = Path(__file__).resolve().parent / "src" / "cpu"
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-pthread",
]
SANITIZE_FLAGS = ["-fsanitize=address", "-fno-omit-frame-pointer", "-g1", "-O1"]


class CompilerMissingError(RuntimeError):
    """No C++ compiler on this machine: use the torch backend, or install one."""


class CpuBuildError(RuntimeError):
    """The compiler refused the sources, or the cache cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit.

    Attributes:
        name: Name of the path, as `kvb_cpu_path_name` gives it, or of a common part.
        source: File in the source folder.
        flags: What this unit needs beyond the common flags.
        path: True for an optional path: left out where the compiler does not know its flags.
    """

    name: str
    source: str
    flags: tuple[str, ...] = ()
    path: bool = False


_AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512vbmi", "-mavx512bf16")
_COMMON_UNITS = (Unit("api", "api.cpp"), Unit("threads", "threads.cpp"), Unit("portable", "portable.cpp"))
_X86_UNITS = (
    Unit("avx2", "avx2.cpp", ("-mavx2", "-mfma"), path=True),
    Unit("avx512", "avx512.cpp", _AVX512, path=True),
    Unit("avx512_bf16", "avx512_bf16.cpp", _AVX512_BF16, path=True),
    Unit("amx", "amx.cpp", (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"), path=True),
)
_EMULATED_UNIT = Unit("amx_emulated", "amx.cpp", (*_AVX512_BF16, "-DKVB_AMX_EMULATE"), path=True)
_MACHINE_UNIT = Unit("machine", "machine.cpp")


@dataclass(frozen=True, slots=True)
class Build:
    """A library ready to load.

    Attributes:
        library: The shared object.
        compiler: First line of the compiler's version.
        left_out: Paths that this compiler could not build, with its first complaint.
        seconds: Time the build took; 0 when it came from the cache.
    """

    library: Path
    compiler: str
    left_out: dict[str, str]
    seconds: float


def find_compiler() -> list[str]:
    """Returns the compiler command: `$CXX` (it may carry arguments), else c++, g++ or clang++.

    Raises:
        CompilerMissingError: None of them exists.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        if shutil.which(wanted[0]):
            return wanted
        raise CompilerMissingError(f"CXX: got {wanted[0]!r}, expected a C++ compiler on PATH; unset CXX or correct it")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CompilerMissingError(
        "no C++ compiler: looked for $CXX, c++, g++ and clang++ on PATH; "
        "install one (Debian and Ubuntu: g++, Fedora: gcc-c++), or use the torch backend"
    )


def build(*, sanitize: bool = False, emulate_amx: bool = False) -> Build:
    """Builds the library, or finds it in the cache.

    Args:
        sanitize: Build with AddressSanitizer; the process must have its runtime loaded first.
        emulate_amx: Add the path `amx_emulated`, which computes what the AMX tile instructions would (for tests).

    Raises:
        CompilerMissingError: There is no compiler.
        CpuBuildError: The compiler fails on a part that every machine needs, or the cache folder is not private.
    """
    compiler = find_compiler()
    version = _run([*compiler, "--version"]).splitlines()[0].strip()
    units = _units(emulate_amx=emulate_amx)
    flags = [*COMMON_FLAGS, *(SANITIZE_FLAGS if sanitize else [])]
    key = _key([version, platform.machine(), json.dumps(flags), repr(units)])
    try:
        folder = private_cache.private_folder("cpu")
    except private_cache.CacheFolderError as error:
        raise CpuBuildError(str(error)) from error
    with private_cache.locked(folder, key):
        cached = private_cache.find(folder, key, ".so")
        if cached is not None:
            return Build(cached.file, version, dict(cached.note["left_out"]), 0.0)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{key}.build.") as scratch:
            made, left_out = _compile(compiler, flags, units, Path(scratch))
            note = {"compiler": version, "left_out": left_out}
            built = private_cache.publish(folder, key, ".so", made.read_bytes(), note)
        return Build(built.file, version, left_out, time.perf_counter() - started)


def _units(*, emulate_amx: bool) -> tuple[Unit, ...]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return _COMMON_UNITS + (_X86_UNITS if x86 else ()) + ((_EMULATED_UNIT,) if x86 and emulate_amx else ())


def _key(parts: list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _compile(
    compiler: list[str], flags: list[str], units: tuple[Unit, ...], scratch: Path
) -> tuple[Path, dict[str, str]]:
    def one(unit: Unit, extra: tuple[str, ...] = ()) -> str | None:
        target = scratch / f"{unit.name}.o"
        command = [*compiler, *flags, *unit.flags, *extra, "-c", str(SOURCES / unit.source), "-o", str(target)]
        try:
            _run(command)
        except CpuBuildError as error:
            if not unit.path:
                raise
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        complaints = list(pool.map(one, units))
    left_out = {unit.name: text for unit, text in zip(units, complaints, strict=True) if text is not None}
    made = [unit for unit in units if unit.name not in left_out]
    one(_MACHINE_UNIT, tuple(f"-DKVB_HAVE_{unit.name.upper()}" for unit in made if unit.path))
    library = scratch / "library.so"
    objects = [str(scratch / f"{unit.name}.o") for unit in (*made, _MACHINE_UNIT)]
    _run([*compiler, *flags, "-shared", *objects, "-o", str(library), "-lm"])
    return library, left_out


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        complaint = next(
            (line for line in result.stderr.splitlines() if "error" in line.lower() or "undefined" in line),
            result.stderr.strip()[:400],
        )
        raise CpuBuildError(f"{shlex.join(command[:1])} returned {result.returncode}: {complaint}")
    return result.stdout
