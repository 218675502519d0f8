"""The probe's fragment kernels in the emulator: against what the PTX documentation says, and against a GPU's answers.

A GPU's answers are the `fragments` that benchmarks/gpu_probe.py writes; they are to be committed as
tests/data/gpu_fragments_<arch>.json. Until then the emulator stands on the documentation alone, and so does this test.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_probe
from kvbridge.kernels import cuda_build
from kvbridge.kernels.private_cache import private_folder

if shutil.which("g++") is None:
    pytest.skip("no g++: the emulator cannot be built", allow_module_level=True)

from tests.simt import emulator as simt

HERE = Path(__file__).parent
GOLDEN = sorted((HERE.parent / "data").glob("gpu_fragments_*.json"))


class Emulated:
    """Fragment kernels under g++."""

    def __init__(self) -> None:
        texts = cuda_build.sources() | {gpu_probe.SOURCE.name: gpu_probe.SOURCE.read_text()}
        texts |= {file.name: file.read_text() for file in sorted(simt.HERE.glob("*.h"))}
        texts |= {"main.cpp": (HERE / "probe_fragments.cpp").read_text()}
        command = ["g++", *simt.FLAGS, "-O1", "-shared", "main.cpp", "-o"]
        folder = private_folder("simt") / f"probe-{hashlib.sha256(repr((command, texts)).encode()).hexdigest()[:24]}"
        if not (folder / "made").exists():
            folder.mkdir(exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text)
            subprocess.run([*command, "partial"], check=True, cwd=folder)
            (folder / "partial").replace(folder / "made")
        self._run = ctypes.CDLL(str(folder / "made")).run_fragment
        self._run.restype = ctypes.c_char_p

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def launch(self, name: str, *, blocks: int, threads: int, shared_bytes: int = 0, **values: Any) -> None:
        addresses = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        error = self._run(
            name.encode(), ctypes.byref(gpu_probe.ProbeArguments(**addresses)), blocks, threads, shared_bytes
        )
        assert error is None, error


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[int]]]:
    return gpu_probe.fragments(Emulated())


def as_float(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def as_bf16(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.bfloat16)


def test_ldmatrix_hands_out_elements_as_documented(found: dict[str, dict[str, list[int]]]) -> None:
    """PTX ISA, ldmatrix: lane l holds elements 2 * (l % 4) and the next of row l / 4; transposed, of column l / 4."""
    out = found["ldmatrix"]["out"]
    for lane in range(32):
        row, pair = lane // 4, lane % 4 * 2
        for matrix in range(4):
            base = 64 * matrix
            plain = base + row * 8 + pair
            assert out[lane * 4 + matrix] == plain | (plain + 1) << 16
            crossed = base + pair * 8 + row
            assert out[128 + lane * 4 + matrix] == crossed | (crossed + 8) << 16
        for matrix in range(2):
            plain = 64 * matrix + row * 8 + pair
            assert out[256 + lane * 2 + matrix] == plain | (plain + 1) << 16


def test_mma_multiplies_as_documented(found: dict[str, dict[str, list[int]]]) -> None:
    """PTX ISA, m16n8k16: a0 a1 row l / 4, a2 a3 row + 8, registers 2 and 3 columns + 8; b and d alike."""
    mma = found["mma"]
    a, b = as_bf16(mma["a"]).view(8, 32, 4, 2).double(), as_bf16(mma["b"]).view(8, 32, 2, 2).double()
    c, out = as_float(mma["c"]).view(8, 32, 4), as_float(mma["out"]).view(8, 32, 4)
    for case in range(8):
        left, right = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
        for lane in range(32):
            row, pair = lane // 4, lane % 4 * 2
            for register in range(4):
                for half in range(2):
                    left[row + register % 2 * 8, pair + half + register // 2 * 8] = a[case, lane, register, half]
            for register in range(2):
                for half in range(2):
                    right[pair + half + register * 8, row] = b[case, lane, register, half]
        product, size = left @ right, left.abs() @ right.abs()
        for lane in range(32):
            for element in range(4):
                row, column = lane // 4 + element // 2 * 8, lane % 4 * 2 + element % 2
                expected = product[row, column] + c[case, lane, element].double()
                got = out[case, lane, element].double()
                if expected.isnan() or expected.isinf() or expected.abs() > 3.4e38:
                    assert not got.isfinite()
                else:
                    assert (got - expected).abs() <= 1e-5 * size[row, column] + 1e-6 * c[
                        case, lane, element
                    ].abs() + 1e-38


def test_dead_copies_write_zeros_and_live_ones_the_source(found: dict[str, dict[str, list[int]]]) -> None:
    source, out = found["copy_async"]["source"], found["copy_async"]["out"]
    for lane in range(32):
        for size, start in ((16, lane * 16), (8, 512 + lane * 8)):
            expected = source[lane * size : lane * size + size] if lane % 2 == 0 else [0] * size
            assert out[start : start + size] == expected


def test_bf16_products_round_once_and_keep_subnormals(found: dict[str, dict[str, list[int]]]) -> None:
    pairs = found["bf16x2"]
    a, b, out = (as_bf16(pairs[name]) for name in ("a", "b", "out"))
    expected = (a.double() * b.double()).to(torch.bfloat16)
    assert torch.equal(out.isnan(), expected.isnan())
    same = ~expected.isnan()
    assert torch.equal(out[same].view(torch.int16), expected[same].view(torch.int16))
    assert ((expected != 0) & (expected.abs().double() < 2.0**-126)).any(), "subnormal products are among them"


def test_exponentials_and_logarithms_are_close(found: dict[str, dict[str, list[int]]]) -> None:
    scalar = found["scalar"]
    x, (power, log, rounded) = as_float(scalar["x"]), as_float(scalar["out"]).view(3, -1)
    normal = (x > -126) & (x < 127)
    assert torch.allclose(power[normal], torch.exp2(x[normal].double()).float(), rtol=4e-7)
    positive = (x >= 2.0**-126) & x.isfinite()
    assert torch.allclose(log[positive], x[positive].log2(), rtol=1e-6, atol=1e-6)
    low_half = rounded.contiguous().view(torch.bfloat16)[::2][~x.isnan()]
    assert torch.equal(low_half.view(torch.int16), x[~x.isnan()].to(torch.bfloat16).view(torch.int16))


def test_a_gpus_answers_are_the_emulators(found: dict[str, dict[str, list[int]]]) -> None:
    """Bit for bit for what moves or rounds; mma sums may differ in their last bits, ex2 and log2 in two units."""
    for file in GOLDEN:
        golden = json.loads(file.read_text())
        for name in ("ldmatrix", "copy_async", "bf16x2"):
            assert golden[name] == found[name], f"{file.name}: {name}"
        assert {k: v for k, v in golden["mma"].items() if k != "out"} == {
            k: v for k, v in found["mma"].items() if k != "out"
        }
        one, other = as_float(golden["mma"]["out"]), as_float(found["mma"]["out"])
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-30, equal_nan=True), file.name
    assert set(found) == {"ldmatrix", "mma", "copy_async", "bf16x2", "scalar"}
