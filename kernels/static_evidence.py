"""What the compiled kernel shows without a GPU: registers, spills, shared memory, and the instructions it is made of.

    variant --NVRTC or nvcc--> cubin --cuobjdump--> registers, stack      --nvdisasm--> HMMA LDSM LDGSTS LDG ... counted
                                                             \\------------------------------/
                                                              violations: what would make it slow or wrong

    python -m kvbridge.kernels.static_evidence              table of every architecture on stdout; exit 1 on a violation
    python -m kvbridge.kernels.static_evidence --write      the same into docs/cuda_evidence.md

It is evidence of structure, not of speed: nothing here runs the kernel. The disassemblers come from the packages
nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump, from triton, or from a CUDA toolkit on PATH.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbridge.kernels import cuda_build, cuda_tiles, nvrtc
from kvbridge.kernels.cuda_tiles import ARCHITECTURES, Variant, choose_variant
from kvbridge.kernels.errors import KernelError
from kvbridge.kernels.plan import Caps, plan

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "cuda_evidence.md"
REGISTERS_LIMIT = 255
_COLUMNS = ("HMMA", "LDSM", "LDGSTS", "BAR", "LDG.STRONG", "LDG.CONSTANT", "LDL", "STL")
_SHAPES = (
    (("v4",), (8, 16, 32, 64)),
    (("v41",), (16, 64)),
    (("v41", "v41_fp4"), (16, 64)),
    (("dsa",), (16, 64)),
    (("v4_bf16",), (16,)),
    (("mla_bf16",), (16,)),
)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_SECTION = re.compile(r"^//-+ \.text\.(\S+)")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class EvidenceError(KernelError):
    """A disassembler is missing or failed, or its output has no such function."""


@dataclass(frozen=True, slots=True)
class Function:
    """One kernel of a cubin.

    Attributes:
        registers: Of a thread.
        stack_bytes: Of a thread.
        local_bytes: Of a thread; spills land there.
        instructions: Static count of each opcode with its modifiers, `LDG.E.STRONG.GPU`.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    instructions: Counter[str]

    def count(self, opcode: str, *modifiers: str) -> int:
        """Instructions with this opcode and all of these modifiers."""
        return sum(
            number
            for name, number in self.instructions.items()
            if name.split(".")[0] == opcode and all(modifier in name.split(".") for modifier in modifiers)
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """One variant on one architecture.

    Attributes:
        arch: `sm_90a` ...
        variant: Template arguments.
        compiler: `NVRTC 13.0` or `nvcc 13.0`.
        decode: The decode kernel.
        merge: The merge kernel.
        log: What the compiler printed.
    """

    arch: str
    variant: Variant
    compiler: str
    decode: Function
    merge: Function
    log: str

    @property
    def shared_limit(self) -> int:
        """Bytes a block may opt into on the architecture."""
        return cuda_tiles.shared_limit(cuda_build.capability_of(self.arch))

    def cells(self) -> tuple[str, ...]:
        """One row of the table."""
        counts = [str(_column(self.decode, name)) for name in _COLUMNS]
        records = "+".join(name for name in ("v4", "v41", "v41_fp4", "dsa", "v4_bf16", "mla_bf16") if self._reads(name))
        tile = f"{self.variant.heads}x{self.variant.tokens}x{self.variant.stages}"
        shared = f"{self.variant.shared_bytes:,} of {self.shared_limit:,}"
        registers = f"{self.decode.registers} / {self.merge.registers}"
        return (self.arch, records, tile, registers, str(self.decode.stack_bytes), shared, *counts)

    def _reads(self, record: str) -> bool:
        return bool(self.variant.formats >> cuda_tiles.FORMATS[record] & 1)


def violations(evidence: Evidence) -> list[str]:
    """What would make the kernel slow or wrong; empty when all is well."""
    found = [f"compiler said: {evidence.log}"] if evidence.log else []
    for name, function in (("decode", evidence.decode), ("merge", evidence.merge)):
        for what, got, limit in (
            ("registers", function.registers, REGISTERS_LIMIT),
            ("stack bytes", function.stack_bytes, 0),
            ("local bytes", function.local_bytes, 0),
            ("LDL", function.count("LDL"), 0),
            ("STL", function.count("STL"), 0),
            # The read-only path may hold what another block's partial result was before.
            ("LDG.CONSTANT", function.count("LDG", "CONSTANT"), 0),
        ):
            if got > limit:
                found.append(f"{name}: {what}: got {got}, expected at most {limit}")
        if not function.count("LDG", "STRONG"):
            found.append(f"{name}: got no LDG.STRONG, expected the merge to read partial results at L2")
    for opcode in ("HMMA", "LDSM", "LDGSTS"):
        if not evidence.decode.count(opcode):
            found.append(f"decode: got no {opcode}")
    if evidence.variant.shared_bytes > evidence.shared_limit:
        found.append(f"shared memory: got {evidence.variant.shared_bytes}, expected at most {evidence.shared_limit}")
    return found


def collect(variant: Variant, arch: str, *, compiler: str = "nvrtc") -> Evidence:
    """Compiles and disassembles.

    Args:
        variant: Template arguments.
        arch: Architecture.
        compiler: `nvrtc`, or `nvcc` where a toolkit is on PATH.

    Raises:
        CudaBuildError: It does not compile.
        EvidenceError: It cannot be disassembled.
    """
    cubin, name = _with_nvcc(variant, arch) if compiler == "nvcc" else _with_nvrtc(variant, arch)
    functions = disassemble(cubin.content)
    for symbol in (cubin.decode_symbol, cubin.merge_symbol):
        if symbol not in functions:
            raise EvidenceError(f"functions of the cubin: got {sorted(functions)}, expected {symbol}")
    return Evidence(arch, variant, name, functions[cubin.decode_symbol], functions[cubin.merge_symbol], cubin.log)


def disassemble(content: bytes) -> dict[str, Function]:
    """Functions of a cubin by mangled name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(content)
        usage = _run(find_tool("cuobjdump"), "-res-usage", str(file))
        assembly = _run(find_tool("nvdisasm"), "-c", str(file))
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in assembly.splitlines():
        if section := _SECTION.match(line):
            current = counts.setdefault(section[1], Counter())
        elif instruction := _INSTRUCTION.match(line):
            current[instruction[1]] += 1
    return {
        name: Function(int(registers), int(stack), int(local), counts.get(name, Counter()))
        for name, registers, stack, _, local in _USAGE.findall(usage)
    }


def find_tool(name: str) -> str:
    """Finds `nvdisasm` or `cuobjdump`.

    Raises:
        EvidenceError: It is in no package and not on PATH.
    """
    for package, folder in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            file = Path(location) / folder / name
            if file.exists():
                return str(file)
    found = shutil.which(name)
    if found is None:
        raise EvidenceError(
            f"{name}: got nothing in the packages nvidia and triton or on PATH, expected nvidia-cuda-{name}"
        )
    return found


def table_variants(arch: str) -> Iterator[Variant]:
    """The variants that the table shows for one architecture, each once."""
    capability = cuda_build.capability_of(arch)
    seen: set[Variant] = set()
    for records, head_counts in _SHAPES:
        for heads in head_counts:
            caps = Caps(queries=1, heads=heads, widths=(128,) * len(records), records=records)
            variant = choose_variant(plan(caps), capability)
            if variant not in seen:
                seen.add(variant)
                yield variant


def table(rows: list[Evidence]) -> str:
    """The document."""
    heading = ("arch", "records", "heads x tokens x stages", "registers decode / merge", "stack", "shared memory")
    lines = ["| " + " | ".join((*heading, *_COLUMNS)) + " |", "|" + "---|" * (len(heading) + len(_COLUMNS))]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    compilers = ", ".join(sorted({row.compiler for row in rows}))
    return _PREAMBLE.format(compilers=compilers) + "\n".join(lines) + "\n"


_PREAMBLE = """# Static evidence of the CUDA kernel

Written by `python -m kvbridge.kernels.static_evidence --write`; do not edit. Compiled with {compilers}.
**Nothing here ran on a GPU**: these are properties of the machine code. Static counts, of the decode kernel with its
fused merge; the sign of a problem is any LDL or STL (spills), any stack, any LDG.CONSTANT (the merge would read
partial results through a cache that other blocks' stores do not reach), or no HMMA, LDSM or LDGSTS at all. Shared
memory is what the launch opts into, beside what the architecture allows a block.

"""


def _column(function: Function, name: str) -> int:
    opcode, *modifiers = name.split(".")
    return function.count(opcode, *modifiers)


def _with_nvrtc(variant: Variant, arch: str) -> tuple[cuda_build.Cubin, str]:
    return cuda_build.compile_variant(variant, arch), f"NVRTC {nvrtc.compiler_version()}"


def _with_nvcc(variant: Variant, arch: str) -> tuple[cuda_build.Cubin, str]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise EvidenceError("nvcc: got nothing on PATH, expected a CUDA toolkit")
    signature = "(const DecodeArguments)"
    source = '#include "decode.cuh"\n' + "".join(
        f"template __global__ void {name}{signature};\n" for name in (variant.decode_name, variant.merge_name)
    )
    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        file.write_text(source)
        options = (
            "-std=c++20",
            "-O3",
            "-Werror",
            "all-warnings",
            "-Xptxas",
            "--warn-on-spills,--warn-on-local-memory-usage",
        )
        include = f"-I{cuda_build.SOURCES}"
        log = _run(nvcc, *options, f"-arch={arch}", include, "-cubin", "-o", str(cubin), str(file))
        content = cubin.read_bytes()
    names = sorted(disassemble(content))
    version = re.search(r"release (\d+\.\d+)", _run(nvcc, "--version"))
    decode = next(name for name in names if "decode_kernel" in name)
    merge = next(name for name in names if "merge_kernel" in name)
    return cuda_build.Cubin(content, decode, merge, log.strip(), 0.0), f"nvcc {version[1] if version else 'unknown'}"


def _run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise EvidenceError(f"{Path(command[0]).name}: got exit {done.returncode}, expected 0\n{done.stdout}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kvbridge.kernels.static_evidence", description="Static evidence")
    parser.add_argument("--arch", action="append", help=f"repeatable; default: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--write", action="store_true", help="write docs/cuda_evidence.md (all architectures)")
    chosen = parser.parse_args(arguments)
    rows, bad = [], 0
    for arch in ARCHITECTURES if chosen.write else tuple(chosen.arch or ARCHITECTURES):
        for variant in table_variants(arch):
            evidence = collect(variant, arch)
            rows.append(evidence)
            for violation in violations(evidence):
                bad += 1
                print(f"{arch} {variant.decode_name}: {violation}")
    if chosen.write:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(table(rows))
    else:
        print(table(rows), end="")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
