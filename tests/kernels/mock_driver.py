"""The mock libcuda: built once, found through LD_LIBRARY_PATH by a child process, read back through ctypes.

tests/mock_libcuda/libcuda.c --cc--> <cache>/mock/<digest>/libcuda.so.1 --dlopen--> cuda.bindings in the child
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvbridge.kernels import mla, private_cache
from kvbridge.kernels.backends import Choice
from kvbridge.kernels.cuda_arguments import DecodeArguments, Switches
from kvbridge.kernels.cuda_backend import CudaBackend

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "mock_libcuda" / "libcuda.c"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
STREAM = 0x5EED
MULTIPROCESSORS = {80: 108, 89: 82, 90: 132, 100: 148, 120: 188}
"""Of A100, L40-class, H100/H200, B200 and RTX PRO 6000 class parts; the mock adds the device's ordinal."""


def build() -> Path:
    """Compiles the mock once; gives the folder that holds libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    key = private_cache.digest(repr((compiler, FLAGS)).encode() + SOURCE.read_bytes())[:32]
    folder = private_cache.private_folder("mock") / key
    if not (folder / "libcuda.so.1").exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "libcuda.so.1"
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made), "-ldl"], check=True)
            made.replace(folder / "libcuda.so.1")
    return folder


def environment(*, arch: int = 90, devices: int = 1, fail: str = "", **more: str) -> dict[str, str]:
    """Environment of a child process that meets the mock instead of a driver."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVB_MOCK", "PYTEST_"))}
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(build()), env.get("LD_LIBRARY_PATH"))))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    env |= {"KVB_MOCK_ARCH": str(arch), "KVB_MOCK_SMS": str(MULTIPROCESSORS[arch]), "KVB_MOCK_DEVICES": str(devices)}
    return {**env, **({"KVB_MOCK_FAIL": fail} if fail else {}), **more}


class Recorded(ctypes.Structure):
    """Launch of libcuda.c."""

    _fields_ = [
        ("name", ctypes.c_char * 256),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("parameter_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("captured", ctypes.c_int32),
        ("parameters", ctypes.c_ubyte * 4096),
    ]

    @property
    def arguments(self) -> DecodeArguments:
        """The parameter buffer, decoded."""
        return DecodeArguments.from_buffer_copy(bytes(self.parameters)[: ctypes.sizeof(DecodeArguments)])

    @property
    def blocks(self) -> tuple[int, ...]:
        """The grid."""
        return tuple(self.grid)


class Mock:
    """The mock that this process has loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.mock_launches.restype = ctypes.c_long
        self._library.mock_loads.restype = ctypes.c_long
        self._library.mock_launch.restype = ctypes.POINTER(Recorded)
        self._library.mock_launch.argtypes = [ctypes.c_long]
        self._library.mock_launch_bytes.restype = ctypes.c_size_t
        self._library.mock_capture_begin.argtypes = [ctypes.c_uint64]
        self._library.mock_refusal.restype = ctypes.c_char_p
        assert self._library.mock_launch_bytes() == ctypes.sizeof(Recorded)

    @property
    def launches(self) -> int:
        return int(self._library.mock_launches())

    @property
    def loads(self) -> int:
        return int(self._library.mock_loads())

    @property
    def refusal(self) -> str:
        return str(self._library.mock_refusal().decode())

    @property
    def current_device(self) -> int:
        return int(self._library.mock_current_device())

    def since(self, first: int) -> list[Recorded]:
        """Launches from number `first` on."""
        return [
            Recorded.from_buffer_copy(self._library.mock_launch(index).contents)
            for index in range(first, self.launches)
        ]

    def keep(self, on: bool) -> None:
        """Whether launches are recorded, or only counted."""
        self._library.mock_keep(int(on))

    @contextlib.contextmanager
    def capturing(self, stream: int = STREAM) -> Iterator[None]:
        """As if the stream were being captured in a CUDA graph."""
        self._library.mock_capture_begin(stream)
        try:
            yield
        finally:
            self._library.mock_capture_end()


def backend(switches: Switches | None = None) -> CudaBackend:
    """The CUDA backend on a stream of the mock."""
    return CudaBackend(switches=switches or Switches(), stream_of=lambda ordinal: STREAM + ordinal)


def prepared(plan: mla.Plan, chosen: CudaBackend | None = None, *, ordinal: int = 0) -> mla.Prepared:
    """What `mla.prepare` returns, with CPU tensors standing in for the device's."""
    chosen = chosen or backend()
    device = torch.device("cuda", ordinal)
    state = chosen.prepare(plan, device)
    needed = chosen.workspace_bytes(plan, device)
    return mla.Prepared(
        plan=plan,
        device=torch.device("cpu"),
        choice=Choice("cuda", "argument", ()),
        backend=chosen,
        state=state,
        workspace=torch.zeros(needed, dtype=torch.uint8) if needed else None,
    )


@contextlib.contextmanager
def current(ordinal: int = 0) -> Iterator[Any]:
    """Makes a device's primary context current, as torch does with the first tensor of a thread."""
    from kvbridge.kernels import cuda_driver

    driver = cuda_driver.load_driver()
    device = cuda_driver.checked(driver, driver.cuDeviceGet(ordinal), "cuDeviceGet")
    context = cuda_driver.checked(driver, driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
    cuda_driver.checked(driver, driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield driver
    finally:
        cuda_driver.checked(driver, driver.cuCtxPopCurrent(), "cuCtxPopCurrent")
