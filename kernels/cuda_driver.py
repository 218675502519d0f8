"""The CUDA driver through cuda.bindings: load a cubin, opt into shared memory, launch. Errors say what failed where.

    cubin --load_kernel(context of torch's device)--> function handles --launch(parameter buffer, stream)-->

The parameter buffer is handed over with its size, so that the driver (and the mock driver of the tests) can compare it
with what the kernel declares. Nothing here allocates device memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvbridge.kernels.cuda_tiles import MERGE_BYTES, THREADS, Variant
from kvbridge.kernels.errors import KernelError

# CUDA driver API, cuda.h: the values of CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE.
_END, _BUFFER_POINTER, _BUFFER_SIZE = 0, 1, 2
_NO_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class CudaDriverError(KernelError):
    """A driver call failed: which one, for what, and the driver's own name and text of the error."""


def load_driver() -> Any:
    """Imports the driver's binding and initialises it.

    Raises:
        CudaDriverError: The binding, the library or a device is missing.
    """
    try:
        driver = import_module("cuda.bindings.driver")
        checked(driver, driver.cuInit(0), "cuInit")
    except (ImportError, RuntimeError, OSError) as error:
        raise CudaDriverError(f"CUDA driver: got {error}, expected cuda-bindings 13 and libcuda") from error
    return driver


def checked(driver: Any, returned: tuple[Any, ...], action: str) -> Any:
    """Unpacks what a driver call returned.

    Raises:
        CudaDriverError: It failed.
    """
    status, *values = returned
    if int(status):
        name, text = getattr(status, "name", str(status)), ""
        try:
            _, raw = driver.cuGetErrorString(status)
            text = raw.decode() if isinstance(raw, bytes) else str(raw)
        except (AttributeError, TypeError, RuntimeError):
            text = "no text"
        raise CudaDriverError(f"{action}: got {name} ({text}), expected CUDA_SUCCESS")
    return values[0] if values else None


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan needs to know of a GPU.

    Attributes:
        ordinal: Number of the device, as torch counts.
        capability: Compute capability times ten.
        multiprocessors: Streaming multiprocessors.
        shared_limit: Shared memory a block may opt into.
    """

    ordinal: int
    capability: int
    multiprocessors: int
    shared_limit: int

    @property
    def arch(self) -> str:
        """Architecture to compile for; `a` where the generation has instructions of its own."""
        return f"sm_{self.capability}{'a' if self.capability >= 90 else ''}"


def describe_device(driver: Any, ordinal: int) -> Device:
    """Reads a device's attributes."""
    device = checked(driver, driver.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")
    attribute = driver.CUdevice_attribute

    def read(name: str) -> int:
        key = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(driver, driver.cuDeviceGetAttribute(key, device), f"attribute {name} of device {ordinal}"))

    capability = 10 * read("COMPUTE_CAPABILITY_MAJOR") + read("COMPUTE_CAPABILITY_MINOR")
    return Device(ordinal, capability, read("MULTIPROCESSOR_COUNT"), read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"))


class Kernel:
    """A loaded variant on one device.

    Attributes:
        variant: Template arguments.
        device: Where it is loaded.
    """

    __slots__ = (
        "_context",
        "_decode",
        "_driver",
        "_launch_kernel",
        "_merge",
        "_module",
        "_shared_bytes",
        "device",
        "variant",
    )

    def __init__(self, driver: Any, device: Device, variant: Variant, cubin: Any) -> None:
        self._driver = driver
        self.device = device
        self.variant = variant
        self._launch_kernel = driver.cuLaunchKernel
        self._shared_bytes = variant.shared_bytes
        what = f"{variant.decode_name} on device {device.ordinal} ({device.arch})"
        if variant.shared_bytes > device.shared_limit:
            raise CudaDriverError(
                f"shared memory of {what}: got {variant.shared_bytes} bytes, expected at most {device.shared_limit}"
            )
        handle = checked(driver, driver.cuDeviceGet(device.ordinal), f"cuDeviceGet({device.ordinal})")
        # Torch lives in the primary context; it must be current for loading, whatever the caller has current.
        self._context = checked(
            driver, driver.cuDevicePrimaryCtxRetain(handle), f"primary context of device {device.ordinal}"
        )
        checked(driver, driver.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
        try:
            self._module = checked(driver, driver.cuModuleLoadData(cubin.content), f"loading {what}")
            self._decode = checked(
                driver, driver.cuModuleGetFunction(self._module, cubin.decode_symbol.encode()), f"finding {what}"
            )
            self._merge = checked(
                driver, driver.cuModuleGetFunction(self._module, cubin.merge_symbol.encode()), variant.merge_name
            )
            key = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            action = f"opting into {variant.shared_bytes} bytes of shared memory for {what}"
            checked(driver, driver.cuFuncSetAttribute(self._decode, key, variant.shared_bytes), action)
        finally:
            driver.cuCtxPopCurrent()

    def launch(self, grid: tuple[int, int, int], stream: int, buffer: ParameterBuffer, *, merge: bool = False) -> None:
        """Launches the decode kernel, or the merge kernel, on a stream.

        Raises:
            CudaDriverError: The driver refused; nothing ran.
        """
        function, shared = (self._merge, MERGE_BYTES) if merge else (self._decode, self._shared_bytes)
        x, y, z = grid
        returned = self._launch_kernel(function, x, y, z, THREADS, 1, 1, shared, stream, 0, buffer.address)
        if returned[0]:
            if int(returned[0]) in _NO_CONTEXT:
                # A fresh thread has no context, and one that works on two devices has the last one's: rare enough that
                # looking beforehand would cost more than trying again.
                checked(self._driver, self._driver.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
                try:
                    returned = self._launch_kernel(function, x, y, z, THREADS, 1, 1, shared, stream, 0, buffer.address)
                finally:
                    self._driver.cuCtxPopCurrent()
            name = self.variant.merge_name if merge else self.variant.decode_name
            where = f"device {self.device.ordinal} ({self.device.arch})"
            action = f"launching {name} on {where} with grid {grid} and {shared} bytes of shared memory"
            checked(self._driver, returned, action)


def require_not_capturing(driver: Any, stream: int) -> None:
    """Refuses to prepare while a stream is being captured.

    Raises:
        CudaDriverError: It is.
    """
    returned = driver.cuStreamIsCapturing(stream)
    if not int(returned[0]) and int(returned[1]) == _CAPTURING:
        raise CudaDriverError(
            "prepare: got a stream that is being captured, expected to be called before capture: it loads a module"
        )


class ParameterBuffer:
    """A structure as the `extra` argument of a launch: pointer and size; the structure may be patched between launches.

    Attributes:
        structure: The structure; it must live as long as this.
        address: What the driver is given.
    """

    __slots__ = ("_extra", "_size", "address", "structure")

    def __init__(self, structure: ctypes.Structure) -> None:
        self.structure = structure
        self._size = ctypes.c_size_t(ctypes.sizeof(structure))
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(structure), _BUFFER_SIZE, ctypes.addressof(self._size), _END
        )
        self.address = ctypes.addressof(self._extra)
