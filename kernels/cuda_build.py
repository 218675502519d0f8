"""Compiles the CUDA kernel with NVRTC, on the user's machine or ahead of time, and keeps the cubins.

    src/cuda/*.cuh  --NVRTC, in memory, no headers, no nvcc-->  cubin for one architecture and one variant
                                                                 <cache>/cuda/<arch>/<key>.cubin, verified by digest

The key covers sources, options, compiler version, architecture and variant. No GPU is needed to compile:

    python -m kvbridge.kernels.cuda_build --out cubins          every architecture, the records of both engines
    KVBRIDGE_CUBIN_DIR=cubins ...                               looked in first; its cubins are verified as well
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kvbridge.kernels import private_cache
from kvbridge.kernels.cuda_tiles import ARCHITECTURES, FORMATS, Variant, choose_variant
from kvbridge.kernels.errors import KernelError
from kvbridge.kernels.plan import Caps, plan

SOURCES = Path(__file__).resolve().parent / "src" / "cuda"
OPTIONS = (
    "-std=c++20",
    "--ptxas-options=--warn-on-spills",
    "--ptxas-options=--warn-on-local-memory-usage",
    "-default-device",
)
CUBIN_FOLDER_VARIABLE = "KVBRIDGE_CUBIN_DIR"
_ROOT_HEADER = "decode.cuh"


class CudaBuildError(KernelError):
    """NVRTC is missing, or refused the sources: what failed, for which architecture, and the compiler's log."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled variant.

    Attributes:
        content: ELF image.
        decode_symbol: Mangled name of the decode kernel.
        merge_symbol: Mangled name of the merge kernel.
        log: What the compiler printed; empty when all is well.
        seconds: Time the compilation took; 0 from a cache.
    """

    content: bytes
    decode_symbol: str
    merge_symbol: str
    log: str
    seconds: float


def sources() -> dict[str, str]:
    """The kernel's sources by file name; they include nothing else."""
    return {file.name: file.read_text() for file in sorted(SOURCES.glob("*.cuh"))}


def load_nvrtc() -> Any:
    """Imports NVRTC's binding.

    Raises:
        CudaBuildError: `cuda-bindings` or the library is missing; both come with torch's CUDA builds.
    """
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CudaBuildError(
            f"NVRTC: got {error}, expected cuda-bindings 13 and nvidia-cuda-nvrtc 13 (torch's CUDA builds bring both)"
        ) from error
    return nvrtc


def compiler_version() -> str:
    """NVRTC's version, `13.0`."""
    nvrtc = load_nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def cubin_key(variant: Variant, arch: str, version: str) -> str:
    """Digest of everything that decides the bytes of a cubin."""
    parts = [arch, version, repr(OPTIONS), repr(variant), *(f"{name}\0{text}" for name, text in sources().items())]
    return private_cache.digest("\1".join(parts).encode())[:32]


def get_cubin(variant: Variant, arch: str) -> Cubin:
    """Finds a cubin in the ahead-of-time folder or the private cache, or compiles it.

    Args:
        variant: Template arguments.
        arch: `sm_80`, `sm_90a` ...

    Raises:
        CudaBuildError: It is nowhere, and cannot be compiled.
    """
    ahead = os.environ.get(CUBIN_FOLDER_VARIABLE)
    if ahead:
        # An ahead-of-time folder serves machines without a compiler: whatever version built it, the sources must match.
        for file in sorted((Path(ahead) / arch).glob("*.json")):
            found = private_cache.find(file.parent, file.stem, ".cubin")
            if found and found.note.get("variant") == repr(variant):
                version = str(found.note.get("compiler"))
                if file.stem == cubin_key(variant, arch, version):
                    return _cubin(found)
    try:
        version = compiler_version()
    except CudaBuildError as error:
        if not ahead:
            raise
        what = f"{variant.decode_name} for {arch} from the installed sources"
        raise CudaBuildError(f"{CUBIN_FOLDER_VARIABLE}={ahead}: got no intact cubin of {what}, and {error}") from error
    key = cubin_key(variant, arch, version)
    folder = private_cache.private_folder("cuda") / arch
    folder.mkdir(mode=0o700, exist_ok=True)
    with private_cache.locked(folder, key):
        found = private_cache.find(folder, key, ".cubin")
        return _cubin(found) if found else build_into(folder, variant, arch)


def build_into(folder: Path, variant: Variant, arch: str) -> Cubin:
    """Compiles a variant and publishes it in a folder."""
    cubin = compile_variant(variant, arch)
    version = compiler_version()
    note = {
        "variant": repr(variant),
        "arch": arch,
        "compiler": version,
        "decode": cubin.decode_symbol,
        "merge": cubin.merge_symbol,
    }
    private_cache.publish(folder, cubin_key(variant, arch, version), ".cubin", cubin.content, note)
    return cubin


def compile_variant(variant: Variant, arch: str) -> Cubin:
    """Compiles with NVRTC; nothing is read from or written to disk but the sources.

    Raises:
        CudaBuildError: The compiler's log is in the message.
    """
    nvrtc = load_nvrtc()
    started = time.perf_counter()
    headers = sources()
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            f'#include "{_ROOT_HEADER}"\n'.encode(),
            b"kvbridge.cu",
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        ),
        f"nvrtcCreateProgram for {arch}",
    )
    try:
        names = [variant.decode_name.encode(), variant.merge_name.encode()]
        for name in names:
            _checked(nvrtc, nvrtc.nvrtcAddNameExpression(program, name), f"nvrtcAddNameExpression {name.decode()}")
        options = [f"-arch={arch}".encode(), *(option.encode() for option in OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc, program, "ProgramLog")
        if int(status):
            raise CudaBuildError(f"compiling {variant.decode_name} for {arch}: {status.name}\n{log}")
        content = _text(nvrtc, program, "CUBIN", binary=True)
        symbols = [
            _checked(nvrtc, nvrtc.nvrtcGetLoweredName(program, name), f"nvrtcGetLoweredName for {arch}").decode()
            for name in names
        ]
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(content, symbols[0], symbols[1], log.strip("\0 \n"), time.perf_counter() - started)


def _text(nvrtc: Any, program: Any, kind: str, *, binary: bool = False) -> Any:
    size = _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program), f"nvrtcGet{kind}Size")
    # One byte more than is written: Python shares one object for each bytes of length 1, and an empty log is that long.
    buffer = b" " * (size + 1)
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer), f"nvrtcGet{kind}")
    return buffer[:size] if binary else buffer[:size].decode(errors="replace")


def _checked(nvrtc: Any, returned: tuple[Any, ...], action: str) -> Any:
    status, *values = returned
    if int(status):
        _, text = nvrtc.nvrtcGetErrorString(status)
        raise CudaBuildError(f"{action}: {status.name} ({text.decode() if isinstance(text, bytes) else text})")
    return values[0] if values else None


def _cubin(found: private_cache.Artefact) -> Cubin:
    return Cubin(found.content, str(found.note["decode"]), str(found.note["merge"]), "", 0.0)


_COMMON_RECORDS: tuple[tuple[str, ...], ...] = (
    ("v4",),
    ("v41",),
    ("v41", "v41_fp4"),
    ("dsa",),
    ("v4_bf16",),
    ("mla_bf16",),
)


_COMMON_HEADS = (8, 16, 32, 64, 128)


def common_variants(
    arch: str, heads: tuple[int, ...] = _COMMON_HEADS, records: tuple[tuple[str, ...], ...] = _COMMON_RECORDS
) -> tuple[Variant, ...]:
    """Variants that serve some models on one architecture, each once.

    Args:
        arch: `sm_80`, `sm_90a` ...
        heads: Query heads of the models, after tensor parallelism.
        records: Records of the caches of one call, for each kind of call.

    Raises:
        CudaBuildError: A record the kernel does not read.
    """
    capability = capability_of(arch)
    for name in sum(records, ()):
        if name not in FORMATS:
            raise CudaBuildError(f"record: got {name!r}, expected one of {sorted(FORMATS)}")
    found = {
        choose_variant(plan(Caps(queries=1, heads=count, widths=(128,) * len(kind), records=kind)), capability)
        for kind in records
        for count in heads
    }
    return tuple(sorted(found))


def capability_of(arch: str) -> int:
    """`sm_90a` -> 90.

    Raises:
        CudaBuildError: No such form.
    """
    digits = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not digits.isdigit():
        raise CudaBuildError(f"arch: got {arch!r}, expected a name such as sm_80 or sm_90a")
    return int(digits)


def build_ahead(
    out: Path,
    architectures: tuple[str, ...],
    *,
    heads: tuple[int, ...] = _COMMON_HEADS,
    records: tuple[tuple[str, ...], ...] = _COMMON_RECORDS,
) -> Iterator[tuple[str, Variant, Cubin]]:
    """Fills a folder with cubins, one subfolder for each architecture; needs no GPU.

    Args:
        out: The folder.
        architectures: `sm_80`, `sm_90a` ...
        heads: As in `common_variants`.
        records: As in `common_variants`.

    Yields:
        Architecture, variant and cubin, as each is done.
    """
    for arch in architectures:
        folder = out / arch
        folder.mkdir(parents=True, exist_ok=True)
        for variant in common_variants(arch, heads, records):
            yield arch, variant, build_into(folder, variant, arch)


def main(arguments: list[str] | None = None) -> int:
    """The ahead-of-time command."""
    parser = argparse.ArgumentParser(prog="python -m kvbridge.kernels.cuda_build", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to fill; point KVBRIDGE_CUBIN_DIR at it")
    parser.add_argument("--arch", action="append", help=f"repeatable; default: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--heads", action="append", type=int, help=f"repeatable; default: {_COMMON_HEADS}")
    parser.add_argument(
        "--records", action="append", help="of one call's caches, joined by '+': v41+v41_fp4; repeatable"
    )
    chosen = parser.parse_args(arguments)
    records = tuple(tuple(text.split("+")) for text in chosen.records or ()) or _COMMON_RECORDS
    heads = tuple(chosen.heads or _COMMON_HEADS)
    count = 0
    try:
        for arch, variant, cubin in build_ahead(
            chosen.out, tuple(chosen.arch or ARCHITECTURES), heads=heads, records=records
        ):
            count += 1
            remark = f"  {cubin.log}" if cubin.log else ""
            print(f"{arch:8} {variant.decode_name:32} {len(cubin.content):7} bytes  {cubin.seconds:.2f} s{remark}")
    except CudaBuildError as error:
        parser.exit(1, f"{error}\n")
    print(f"{count} cubins under {chosen.out}, NVRTC {compiler_version()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
