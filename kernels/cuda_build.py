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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbridge.kernels import private_cache
from kvbridge.kernels.cuda_tiles import ARCHITECTURES, FORMATS, Variant, choose_variant
from kvbridge.kernels.nvrtc import CudaBuildError, compile_program, compiler_version
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
    names = (variant.decode_name, variant.merge_name)
    what = f"{variant.decode_name} for {arch}"
    root = f'#include "{_ROOT_HEADER}"\n'
    program = compile_program(root, headers=sources(), names=names, options=(f"-arch={arch}", *OPTIONS), what=what)
    decode, merge = program.symbols
    return Cubin(program.content, decode, merge, program.log, program.seconds)


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
