"""The CUDA launch path against a mock driver, for every architecture; and what its errors say.

Nothing here needs or proves a GPU: the mock refuses what a driver refuses and records what it was given. The cases lie
in cuda_launch_cases.py and run in a child process, so that this one never loads a false libcuda.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvbridge.kernels.cuda_tiles import Variant
from tests.kernels import mock_driver

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings and nvidia-cuda-nvrtc are not installed")
CASES = Path(__file__).with_name("cuda_launch_cases.py")

PREPARE = """
import torch
from kvbridge.kernels import mla
from kvbridge.kernels.errors import KernelError
from tests.kernels import mock_driver
plan = mla.plan(mla.Caps(queries=1, heads=8, widths=(32,), records=("v4",)))
backend = mock_driver.backend()
try:
    print("missing:", backend.missing("cuda"))
    backend.prepare(plan, torch.device("cuda", 0))
except KernelError as error:
    print(f"{type(error).__name__}: {error}")
"""


def child(*command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, *command)
    return subprocess.run(command, env=env, cwd=mock_driver.ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arch", sorted(mock_driver.MULTIPROCESSORS))
def test_launch_path(arch: int) -> None:
    env = mock_driver.environment(arch=arch, devices=2)
    done = child("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES), env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        ("cuInit:100", "missing: cuInit: got CUDA_ERROR_NO_DEVICE"),
        (
            "cuDeviceGetAttribute:3",
            "CudaDriverError: attribute COMPUTE_CAPABILITY_MAJOR of device 0: got CUDA_ERROR_NOT",
        ),
        ("cuDevicePrimaryCtxRetain:2", "CudaDriverError: primary context of device 0: got CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuModuleLoadData:209", "CudaDriverError: loading decode_kernel<1, 8, 32, 2> on device 0 (sm_90a): got CUDA_"),
        (
            "cuModuleGetFunction:500",
            "CudaDriverError: finding decode_kernel<1, 8, 32, 2> on device 0 (sm_90a): got CUDA",
        ),
        (
            "cuFuncSetAttribute:1",
            f"CudaDriverError: opting into {Variant(1, 8).shared_bytes} bytes of shared memory for decode_kernel<1, 8",
        ),
    ],
)
def test_driver_errors_name_the_call_the_device_and_the_code(fail: str, text: str) -> None:
    done = child("-c", PREPARE, env=mock_driver.environment(fail=fail))
    assert text in done.stdout, done.stdout + done.stderr
    assert "mock driver: injected" in done.stdout


def test_old_device_is_refused_with_its_capability() -> None:
    env = mock_driver.environment() | {"KVB_MOCK_ARCH": "75"}
    done = child("-c", PREPARE, env=env)
    assert "compute capability of device 0: got 7.5, expected at least 8.0" in done.stdout, done.stdout + done.stderr


def test_without_a_driver_the_reason_is_told() -> None:
    env = mock_driver.environment()
    env["LD_LIBRARY_PATH"] = ""
    done = child("-c", "from kvbridge.kernels.cuda_backend import BACKEND; print(BACKEND.missing('cuda'))", env=env)
    if done.stdout.strip() == "None":
        pytest.skip("this machine has a CUDA driver")
    assert done.stdout.startswith(("CUDA driver: got", "cuInit: got")), done.stdout + done.stderr


def test_host_time_of_a_call() -> None:
    """The script prints what binding saves; how far a machine is from the limits of the design is not asserted."""
    done = child("benchmarks/cuda_overhead.py", "--rounds", "60", env=mock_driver.environment())
    found = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert 0 < found["bound"] < found["patched"] < found["unbound"], done.stdout + done.stderr
    assert done.returncode == (1 if " over" in done.stdout else 0)
