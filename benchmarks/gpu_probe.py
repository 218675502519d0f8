"""Asks a GPU what the emulator assumes and the cost model estimates, and writes the answers as JSON.

    python benchmarks/gpu_probe.py --out probe.json

    fragments       which element every lane gets from ldmatrix, mma with chosen inputs, zero fill of cp.async, products
                    of subnormal bf16, ex2, log2 and rounding: inputs and outputs, to become a test of the emulator
    dequantisation  cycles per token of the exponent-shift path and of the conversion instructions
    gather          bandwidth of random 576-byte rows, and of dense ones

Needs this checkout, torch and the wheels it brings. `--dry-run` makes every launch with tensors on the CPU, for the
mock driver of the tests; its answers are zeros and mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvbridge.kernels import cuda_build, cuda_driver, nvrtc  # noqa: E402
from kvbridge.kernels.cuda_arguments import _fields  # noqa: E402
from kvbridge.kernels.cuda_driver import Device, ParameterBuffer, checked  # noqa: E402
from kvbridge.kernels.cuda_tiles import FORMATS, THREADS, Variant  # noqa: E402
from kvbridge.kernels.errors import KernelError  # noqa: E402

SOURCE = Path(__file__).with_name("gpu_probe.cuh")
DECODES = ("v4", "v41", "v41_fp4", "dsa", "v4_bf16")
GATHERS = ((576, 16), (576, 32), (576, 64), (1152, 32))
FRAGMENT_BYTES = 1024  # shared memory of the fragment kernels
_STRIDE_BYTES, _ROWS = 1152, 1024  # between gathered rows; of one block
KERNELS = (
    "ldmatrix_probe",
    "mma_probe",
    "copy_probe",
    "bf16x2_probe",
    "scalar_probe",
    *(f"decode_cycles<{FORMATS[record]}, false>" for record in DECODES),
    f"decode_cycles<{FORMATS['v41']}, true>",
    *(f"gather_probe<{size}, {rows}>" for size, rows in GATHERS),
)


class ProbeArguments(ctypes.Structure):
    """ProbeArguments of gpu_probe.cuh."""

    _fields_ = _fields("p:first p:second p:third p:out l:count l:stride i:repeats i:rows")


def compile_probe(arch: str) -> nvrtc.Program:
    """Compiles every probe kernel for one architecture; no GPU is needed.

    Raises:
        CudaBuildError: The compiler's log is in the message.
    """
    options = (f"-arch={arch}", *cuda_build.OPTIONS)
    headers = {**cuda_build.sources(), SOURCE.name: SOURCE.read_text()}
    root = f'#include "{SOURCE.name}"\n'
    return nvrtc.compile_program(root, headers=headers, names=KERNELS, options=options, what=f"the probe for {arch}")


class Probe:
    """The probe's kernels on one device.

    Attributes:
        device: The GPU.
        dry: Tensors are on the CPU and nothing is timed.
    """

    def __init__(self, ordinal: int, *, dry: bool) -> None:
        self._driver = driver = cuda_driver.load_driver()
        self.dry = dry
        self.device: Device = cuda_driver.describe_device(driver, ordinal)
        self._place = torch.device("cpu") if dry else torch.device("cuda", ordinal)
        program = compile_probe(self.device.arch)
        handle = checked(driver, driver.cuDeviceGet(ordinal), "cuDeviceGet")
        context = checked(driver, driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
        checked(driver, driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        module = checked(driver, driver.cuModuleLoadData(program.content), f"loading the probe for {self.device.arch}")
        self._functions = {
            name: checked(driver, driver.cuModuleGetFunction(module, symbol.encode()), f"finding {name}")
            for name, symbol in zip(KERNELS, program.symbols, strict=True)
        }

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device."""
        return tensor.to(self._place)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the device."""
        return torch.zeros(*shape, dtype=dtype, device=self._place)

    def launch(self, name: str, *, blocks: int, threads: int, shared_bytes: int = 0, **values: Any) -> None:
        """Launches a kernel; tensors among `values` are given by address."""
        driver, function = self._driver, self._functions[name]
        if shared_bytes > 48 * 1024:
            key = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver, driver.cuFuncSetAttribute(function, key, shared_bytes), f"shared memory of {name}")
        addresses = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        buffer = ParameterBuffer(ProbeArguments(**addresses))
        stream = 0 if self.dry else torch.cuda.current_stream().cuda_stream
        returned = driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, 0, buffer.address)
        checked(driver, returned, f"launching {name}")

    def seconds(self, work: Callable[[], None], *, repeats: int = 20) -> float | None:
        """Median time on the device; None in a dry run."""
        work()
        if self.dry:
            return None
        taken: list[float] = []
        for _ in range(repeats):
            events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
            work()
            events[1].record()
            torch.cuda.synchronize()
            taken.append(events[0].elapsed_time(events[1]) / 1000)
        return sorted(taken)[len(taken) // 2]


def words(tensor: torch.Tensor) -> list[int]:
    """Bits as unsigned numbers: JSON has no NaN."""
    if tensor.element_size() == 4:
        return [value & 0xFFFFFFFF for value in tensor.contiguous().view(torch.int32).flatten().tolist()]
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def _bits(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def mma_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cases of A [case, 32, 4], B [case, 32, 2] as int32 pairs of bf16, and C [case, 32, 4] fp32.

    Ones that name their place, random values, wide exponents that show how sums are cut, subnormals, and NaN and inf.
    """
    generator = torch.Generator().manual_seed(0)
    a, b, c = [], [], []
    for case in range(8):
        scale = 2.0 ** torch.randint(-40, 40, (1,), generator=generator).item() if case in {3, 4} else 1.0
        left = torch.randn(32, 8, generator=generator) * scale
        right = torch.randn(32, 4, generator=generator)
        if case in {3, 4}:
            left *= 2.0 ** torch.randint(-12, 13, left.shape, generator=generator)
        if case == 0:
            left, right = torch.arange(256.0).view(32, 8), torch.ones(32, 4)
        if case == 1:
            left, right = torch.ones(32, 8), torch.arange(128.0).view(32, 4)
        if case == 5:
            left *= 2.0**-130
        if case == 6:
            left[3, 1], right[7, 2] = float("nan"), float("inf")
        if case == 7:
            left, right = left.abs() * 2.0**60, right.abs() * 2.0**66
        a.append(left.to(torch.bfloat16).view(torch.int32))
        b.append(right.to(torch.bfloat16).view(torch.int32))
        c.append(torch.randn(32, 4, generator=generator) if case in {2, 4} else torch.zeros(32, 4))
    return torch.stack(a), torch.stack(b), torch.stack(c)


class Fragments(Protocol):
    """What runs the fragment kernels: a GPU here, the emulator in the tests."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the kernels run."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros where the kernels run."""

    def launch(self, name: str, *, blocks: int, threads: int, shared_bytes: int = 0, **values: Any) -> None:
        """Runs one kernel."""


def fragments(probe: Fragments) -> dict[str, dict[str, list[int]]]:
    """Inputs and outputs of every instruction the emulator imitates."""
    found: dict[str, dict[str, list[int]]] = {}
    out = probe.zeros(320, dtype=torch.int32)
    probe.launch("ldmatrix_probe", blocks=1, threads=32, shared_bytes=FRAGMENT_BYTES, out=out)
    found["ldmatrix"] = {"out": words(out)}

    a, b, c = map(probe.place, mma_inputs())
    out = probe.zeros(*c.shape, dtype=torch.float32)
    probe.launch("mma_probe", blocks=len(a), threads=32, first=a, second=b, third=c, out=out)
    found["mma"] = {"a": words(a), "b": words(b), "c": words(c), "out": words(out)}

    source = probe.place(torch.arange(1, 513, dtype=torch.int32).to(torch.uint8) | 1)
    out = probe.zeros(32 * 24, dtype=torch.uint8)
    probe.launch("copy_probe", blocks=1, threads=32, shared_bytes=FRAGMENT_BYTES, first=source, out=out)
    found["copy_async"] = {"source": words(source), "out": words(out)}

    special = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x00FF, 0x0100, 0x3F80, 0xBF80, 0x7B80, 0x7E80, 0x7F7F]
    special += [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x0040, 0x0010, 0x01F0, 0x0380, 0x4000, 0x1234, 0x9ABC]
    pairs = [(x, y) for x in special for y in special]
    first = probe.place(_bits([x | x << 16 for x, _ in pairs]))
    second = probe.place(_bits([y | y << 16 for _, y in pairs]))
    out = probe.zeros(len(pairs), dtype=torch.int32)
    blocks = -(-len(pairs) // THREADS)
    probe.launch("bf16x2_probe", blocks=blocks, threads=THREADS, first=first, second=second, out=out, count=len(pairs))
    found["bf16x2"] = {"a": words(first), "b": words(second), "out": words(out)}

    exact = [0.0, -0.0, 1.0, -1.0, 0.5, -126.0, -127.0, -149.0, -150.0, 127.0, 128.0, 1e-40, -1e-40, 3.4e38]
    exact += [float("inf"), float("-inf"), float("nan")]
    generator = torch.Generator().manual_seed(1)
    values = torch.cat([torch.tensor(exact), torch.linspace(-140, 20, 400), torch.randn(100, generator=generator)])
    inputs = probe.place(values.float())
    out = probe.zeros(3 * len(inputs), dtype=torch.int32)
    blocks = -(-len(inputs) // THREADS)
    probe.launch("scalar_probe", blocks=blocks, threads=THREADS, first=inputs, out=out, count=len(inputs))
    found["scalar"] = {"x": words(inputs), "out": words(out)}
    return found


def dequantisation(probe: Probe) -> list[dict[str, object]]:
    """Cycles per token of one block of 256 threads that is alone on its SM, and of two."""
    repeats, rows = 200, probe.place(torch.randint(0, 120, (32 * 1152,), dtype=torch.uint8))
    found: list[dict[str, object]] = []
    for name in (name for name in KERNELS if name.startswith("decode_cycles")):
        number, converted = name.split("<")[1].rstrip(">").split(", ")
        if converted == "true" and probe.device.capability < 89:
            continue
        record = next(record for record in DECODES if FORMATS[record] == int(number))
        shared = Variant(1 << int(number), 8, stages=1).shared_bytes
        for blocks in (1, 2 * probe.device.multiprocessors):
            out = probe.zeros(blocks, dtype=torch.int64)
            probe.launch(
                name, blocks=blocks, threads=THREADS, shared_bytes=shared, first=rows, out=out, repeats=repeats
            )
            cycles = None if probe.dry else out.float().median().item() / repeats / 32
            path = "conversion instructions" if converted == "true" else "exponent shift"
            found.append({"record": record, "path": path, "blocks": blocks, "cycles_per_token": cycles})
    return found


def gather(probe: Probe, *, pool_bytes: int) -> list[dict[str, object]]:
    """Bandwidth of rows at random places of a pool that no cache holds, and at neighbouring places."""
    found: list[dict[str, object]] = []
    generator = torch.Generator().manual_seed(2)
    for size, in_flight in GATHERS:
        pool = probe.zeros(pool_bytes, dtype=torch.uint8)
        places = pool_bytes // _STRIDE_BYTES - 1
        for blocks_each in (1, 2, 4):
            blocks = blocks_each * probe.device.multiprocessors
            for order in ("random", "dense"):
                slots = torch.randint(0, places, (blocks * _ROWS,), generator=generator, dtype=torch.int32)
                if order == "dense":
                    slots = torch.arange(blocks * _ROWS, dtype=torch.int32) % places
                placed, out = probe.place(slots), probe.zeros(blocks, dtype=torch.int32)
                name, shared = f"gather_probe<{size}, {in_flight}>", max(2 * in_flight * size, 1024)

                def work(
                    name: str = name, blocks: int = blocks, shared: int = shared, given: Any = (pool, placed, out)
                ) -> None:
                    first, second, target = given
                    probe.launch(
                        name,
                        blocks=blocks,
                        threads=THREADS,
                        shared_bytes=shared,
                        first=first,
                        second=second,
                        out=target,
                        stride=_STRIDE_BYTES,
                        rows=_ROWS,
                    )

                seconds = probe.seconds(work)
                rate = None if seconds is None else blocks * _ROWS * size / seconds / 1e9
                found.append(
                    {"row_bytes": size, "in_flight": in_flight, "blocks": blocks, "order": order, "gb_per_second": rate}
                )
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="gpu_probe.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--pool-mb", type=int, default=1024, help="pool that rows are gathered from")
    parser.add_argument("--dry-run", action="store_true", help="CPU tensors, for a mock driver; the answers are zeros")
    chosen = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        probe = Probe(chosen.device, dry=chosen.dry_run)
        device = probe.device
        name = "dry run" if chosen.dry_run else torch.cuda.get_device_name(chosen.device)
        report = {
            "schema_version": 1,
            "dry_run": chosen.dry_run,
            "gpu": {"name": name, "arch": device.arch, "multiprocessors": device.multiprocessors},
            "nvrtc": nvrtc.compiler_version(),
            "torch": torch.__version__,
            "fragments": fragments(probe),
            "dequantisation": dequantisation(probe),
            "gather": gather(probe, pool_bytes=chosen.pool_mb << 20),
        }
    except KernelError as error:
        parser.exit(1, f"{type(error).__name__}: {error}\n")
    chosen.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(f"{chosen.out}: {name}, {device.arch}, {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
