"""Runs the CUDA source on the CPU as one more backend: same API, same parameter structure, other launch.

    kernels/src/cuda/*.cuh + simt.h  --g++-->  library of one variant  --ctypes-->  decode_kernel, thread by thread

`patches` builds a variant with a fault put into the source text, to show that a check would see it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbridge.kernels import cuda_arguments, cuda_build, cuda_tiles, mla
from kvbridge.kernels.arguments import Call
from kvbridge.kernels.backends import Choice
from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.conformance.targets import Target, Traits
from kvbridge.kernels.cuda_arguments import DecodeArguments, Flag, Launch, Switches
from kvbridge.kernels.cuda_tiles import Variant
from kvbridge.kernels.plan import Plan
from kvbridge.kernels.private_cache import private_folder

HERE = Path(__file__).resolve().parent
FLAGS = (
    "-std=c++20",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-march=x86-64-v3",
    "-Wall",
    "-Wextra",
    "-Werror",
)
WIDE_FORMATS = cuda_tiles.formats_of(("v4", "v41", "v41_fp4", "v4_bf16"))
ALL_ON = Switches()
LONG_FORMATS = cuda_tiles.formats_of(("dsa", "mla_bf16"))


class EmulationError(Exception):
    """The kernel did what a GPU would not survive: the text says what, and in which block and thread."""


class Options(ctypes.Structure):
    """simt::Options."""

    _fields_ = [
        ("seed", ctypes.c_uint32),
        ("blocks_alive", ctypes.c_int),
        ("copies_at_issue", ctypes.c_int),
        ("truncate", ctypes.c_int),
        ("count", ctypes.c_int),
    ]


class Counters(ctypes.Structure):
    """simt::Counters."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("copies", "copied_bytes", "sectors", "matrix_loads", "bank_conflicts", "multiplies", "switches")
    ]


@dataclass(frozen=True)
class Patch:
    """A fault: `old` in `file` becomes `new`."""

    file: str
    old: str
    new: str


def defines(variant: Variant) -> list[str]:
    """The macros that name a variant."""
    names = ("formats", "heads", "tokens", "stages")
    return [f"-DKVB_{name.upper()}={getattr(variant, name)}" for name in names]


def build(variant: Variant, *, patches: tuple[Patch, ...] = (), flags: tuple[str, ...] = ("-O2", "-shared")) -> Path:
    """Builds a library (or, with other flags and sources, what the sanitizer tests need) once and keeps it."""
    sources = cuda_build.sources()
    for patch in patches:
        assert sources[patch.file].count(patch.old) >= 1, f"{patch.file} no longer holds {patch.old!r}"
        sources[patch.file] = sources[patch.file].replace(patch.old, patch.new, 1)
    own = {file.name: file.read_text() for file in sorted(HERE.iterdir()) if file.suffix in (".h", ".cpp")}
    command = [shutil.which("g++") or "c++", *FLAGS, *flags, *defines(variant)]
    key = hashlib.sha256(repr((command, sorted(sources.items()), sorted(own.items()))).encode()).hexdigest()[:32]
    target = private_folder("simt") / key
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            for name, text in {**sources, **own}.items():
                (Path(scratch) / name).write_text(text)
            main = "run.cpp" if "-shared" in flags else "sanitized.cpp"
            made = Path(scratch) / "made"
            subprocess.run([*command, str(Path(scratch) / main), "-o", str(made)], check=True, cwd=scratch)
            made.replace(target)
    return target


@functools.cache
def load(variant: Variant, patches: tuple[Patch, ...] = ()) -> ctypes.CDLL:
    """Builds and loads a library; its idea of the structures must be Python's."""
    library = ctypes.CDLL(str(build(variant, patches=patches)))
    for entry in ("kvb_decode", "kvb_merge"):
        getattr(library, entry).restype = ctypes.c_char_p
    assert library.kvb_arguments_bytes() == ctypes.sizeof(DecodeArguments)
    assert library.kvb_shared_bytes() == variant.shared_bytes
    return library


@dataclass(frozen=True)
class Emulator:
    """A backend that emulates one variant, or the one that fits a capability.

    Attributes:
        capability: Which GPU the variant is chosen for.
        multiprocessors: Of that GPU; few, so that small calls are split into few blocks.
        switches: Optimisations.
        options: How the emulator schedules.
        heads: Head tile to force.
        stages: Stages to force.
        patches: Faults.
    """

    capability: int = 90
    multiprocessors: int = 8
    switches: Switches = ALL_ON
    options: tuple[tuple[str, int], ...] = ()
    heads: int = 0
    stages: int = 0
    patches: tuple[Patch, ...] = ()
    name: str = "emulated"

    def missing(self, device_type: str) -> str | None:
        return None if device_type == "cpu" else "runs on CPU tensors"

    def unsupported(self, plan: Plan) -> str | None:
        foreign = [record for record in plan.caps.records if record not in cuda_tiles.FORMATS]
        return f"record {foreign[0]}" if foreign else None

    def variant(self, plan: Plan) -> Variant:
        """All formats of one d_qk share a library: fewer builds, and formats mix in one call."""
        chosen = cuda_tiles.choose_variant(plan, self.capability)
        formats = LONG_FORMATS if chosen.formats & LONG_FORMATS else WIDE_FORMATS
        return Variant(formats, self.heads or chosen.heads, stages=self.stages or chosen.stages)

    def launch_of(self, plan: Plan) -> Launch:
        return Launch(plan, self.variant(plan), self.multiprocessors, self.switches)

    def workspace_bytes(self, plan: Plan, device: torch.device) -> int:
        return self.launch_of(plan).workspace_bytes

    def prepare(self, plan: Plan, device: torch.device) -> Launch:
        launch = self.launch_of(plan)
        load(launch.variant, self.patches)
        return launch

    def bind(self, prepared: Launch, call: Call, workspace: torch.Tensor | None) -> EmulatedRunner:
        return EmulatedRunner(self, prepared, call, workspace)

    def prepared(self, plan: Plan) -> mla.Prepared:
        """What `mla.prepare` would return, with counters at zero and everything else poisoned."""
        launch = self.prepare(plan, torch.device("cpu"))
        workspace = None
        if launch.workspace_bytes:
            workspace = torch.full((launch.workspace_bytes,), 0xFF, dtype=torch.uint8)
            workspace[: cuda_tiles.counters_bytes(self.multiprocessors)] = 0
        choice = Choice(self.name, "argument", ())
        device = torch.device("cpu")
        return mla.Prepared(plan=plan, device=device, choice=choice, backend=self, state=launch, workspace=workspace)


class EmulatedRunner:
    """One bound call."""

    def __init__(self, emulator: Emulator, launch: Launch, call: Call, workspace: torch.Tensor | None) -> None:
        self._launch = launch
        self._library = load(launch.variant, emulator.patches)
        self._options = Options(blocks_alive=1)
        for name, value in emulator.options:
            setattr(self._options, name, value)
        self.arguments = DecodeArguments()
        self.counters = Counters()
        self._workspace = workspace
        cuda_arguments.fill(self.arguments, call, launch, workspace)

    def update(self, call: Call) -> None:
        cuda_arguments.fill_tensors(self.arguments, call, self._launch)

    def launch(self) -> None:
        if not self.arguments.queries:
            return
        call, options, tiles = ctypes.byref(self.arguments), ctypes.byref(self._options), self._launch.head_tiles
        error = self._library.kvb_decode(call, tiles, options, ctypes.byref(self.counters))
        if error is None and self.arguments.splits > 1 and not self.arguments.flags & Flag.FUSED_MERGE:
            error = self._library.kvb_merge(call, tiles, options)
        if error is not None:
            raise EmulationError(error.decode())
        if self._workspace is not None:
            counters = self._workspace[: cuda_tiles.counters_bytes(self._launch.multiprocessors)]
            assert not counters.any(), "counters did not return to zero"


def bind(prepared: mla.Prepared, scenario: Scenario) -> mla.Bound:
    """Binds a scenario of the conformance kit."""
    return mla.bind(
        prepared,
        q=scenario.q,
        caches=scenario.caches,
        out=scenario.out,
        scale=scenario.scale,
        sink=scenario.sink,
        lse=scenario.lse,
        lse_format=scenario.lse_format,
        sequence_of_query=scenario.sequence_of_query,
    )


def run(prepared: mla.Prepared, scenario: Scenario) -> None:
    """Runs a scenario of the conformance kit."""
    bind(prepared, scenario).run()


def target(emulator: Emulator, *, name: str = "") -> Target:
    """The emulator as a target of the conformance kit."""

    def decode(scenario: Scenario) -> None:
        run(emulator.prepared(scenario.plan), scenario)

    traits = Traits(records=tuple(cuda_tiles.FORMATS), batch_invariant=True, nan_codes="480")
    return Target(name=name or f"{emulator}", decode=decode, traits=traits)


def with_options(emulator: Emulator, **options: int) -> Emulator:
    """The same emulator under another schedule."""
    from dataclasses import replace

    return replace(emulator, options=tuple(sorted(options.items())))


TARGET = target(Emulator(), name="emulated sm_90, 8 multiprocessors")
"""For `python -m kvbridge.kernels.conformance --target tests.simt.emulator:TARGET`."""
