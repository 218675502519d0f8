"""The CUDA backend: a variant of one kernel, compiled at `prepare`, launched on torch's current stream.

    prepare  choose a variant for the device, compile or find its cubin, load it, opt into shared memory
    bind     fill the parameter structure; nothing of it is read by the driver until launch
    launch   one cuLaunchKernel, two where the separate merge is chosen; no allocation, no synchronisation

Launches may be captured in a CUDA graph: pointers, counts and strides are frozen then, while slots, lengths and page
bytes may change between replays. No libtorch is linked; torch only lends tensors and the stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvbridge.kernels import cuda_arguments, cuda_build, cuda_driver, cuda_tiles, nvrtc
from kvbridge.kernels.cuda_arguments import DecodeArguments, Launch, Switches
from kvbridge.kernels.cuda_driver import CudaDriverError, Kernel, ParameterBuffer
from kvbridge.kernels.nvrtc import CudaBuildError

if TYPE_CHECKING:
    from kvbridge.kernels.arguments import Call
    from kvbridge.kernels.plan import Plan

_ALL_ON = Switches(wide_merge=True)
_LEAST_CAPABILITY = 80
_VECTOR_BYTES = 16
_PIECE_BYTES = 8  # bases and page strides must be multiples of this


def _torch_stream(ordinal: int) -> int:
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


# The raw handle without a Stream object around it, a microsecond cheaper; what torch's own compiled kernels ask for.
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _torch_stream)


class Loaded:
    """A plan made ready on one device.

    Attributes:
        kernel: Loaded variant.
        launch: What calls need to know of it.
    """

    __slots__ = ("kernel", "launch")

    def __init__(self, kernel: Kernel, launch: Launch) -> None:
        self.kernel = kernel
        self.launch = launch


class CudaBackend:
    """NVRTC-compiled CUDA C++."""

    def __init__(
        self,
        *,
        name: str = "cuda",
        switches: Switches = _ALL_ON,
        stream_of: Callable[[int], int] = _stream_of,
    ) -> None:
        self.name = name
        self.switches = switches
        self.stream_of = stream_of
        self._kernels: dict[tuple[int, cuda_tiles.Variant], Kernel] = {}
        self._devices: dict[int, cuda_driver.Device] = {}

    def missing(self, device_type: str) -> str | None:
        """Why it cannot run here: another device, no driver, no GPU, or no compiler and no cubins."""
        if device_type != "cuda":
            return f"runs on cuda tensors, not on {device_type}"
        try:
            cuda_driver.load_driver()
            if not os.environ.get(cuda_build.CUBIN_FOLDER_VARIABLE):
                nvrtc.load_nvrtc()
        except (CudaDriverError, CudaBuildError) as error:
            return str(error)
        return None

    def unsupported(self, plan: Plan) -> str | None:
        """Why it cannot serve the plan: a record the kernel does not read."""
        for record in plan.caps.records:
            if record not in cuda_tiles.FORMATS:
                return f"record {record}: expected one of {sorted(cuda_tiles.FORMATS)}"
        return None

    def device(self, ordinal: int) -> cuda_driver.Device:
        """Describes a device, once."""
        known = self._devices.get(ordinal)
        if known is None:
            known = self._devices[ordinal] = cuda_driver.describe_device(cuda_driver.load_driver(), ordinal)
        return known

    def launch_of(self, plan: Plan, ordinal: int) -> Launch:
        """The variant that serves a plan on a device, and what its calls need."""
        device = self.device(ordinal)
        if device.capability < _LEAST_CAPABILITY:
            raise CudaDriverError(
                f"compute capability of device {ordinal}: got {device.capability / 10}, expected at least 8.0"
            )
        variant = cuda_tiles.choose_variant(plan, device.capability)
        return Launch(plan, variant, device.multiprocessors, self.switches)

    def workspace_bytes(self, plan: Plan, device: torch.device) -> int:
        """Workspace for every call at or below the caps; devices differ in multiprocessors and in what tile fits."""
        return self.launch_of(plan, device.index or 0).workspace_bytes

    def prepare(self, plan: Plan, device: torch.device) -> Loaded:
        """Compiles and loads.

        Raises:
            CudaBuildError: The variant is in no cache and cannot be compiled.
            CudaDriverError: Loading failed, or the current stream is being captured.
        """
        driver = cuda_driver.load_driver()
        ordinal = device.index or 0
        cuda_driver.require_not_capturing(driver, self.stream_of(ordinal))
        launch = self.launch_of(plan, ordinal)
        key = (ordinal, launch.variant)
        kernel = self._kernels.get(key)
        if kernel is None:
            described = self.device(ordinal)
            cubin = cuda_build.get_cubin(launch.variant, described.arch)
            kernel = self._kernels[key] = Kernel(driver, described, launch.variant, cubin)
        return Loaded(kernel, launch)

    def bind(self, prepared: Loaded, call: Call, workspace: torch.Tensor | None) -> CudaRunner:
        """Fills the parameters of one call.

        Raises:
            CudaDriverError: Pages whose base or stride is no multiple of 8 bytes, or a workspace off 16.
        """
        if workspace is not None and workspace.data_ptr() % _VECTOR_BYTES:
            raise CudaDriverError(
                f"workspace.data_ptr(): got {workspace.data_ptr():#x}, expected a multiple of {_VECTOR_BYTES} bytes"
            )
        for index, cache in enumerate(call.caches):
            for what in ("base_address", "page_stride_bytes"):
                value = getattr(cache.view, what)
                if value % _PIECE_BYTES:
                    raise CudaDriverError(
                        f"caches[{index}].view.{what}: got {value}, expected a multiple of {_PIECE_BYTES} bytes"
                    )
        return CudaRunner(prepared, call, workspace, self.stream_of)


class CudaRunner:
    """One bound call."""

    __slots__ = (
        "_buffer",
        "_grid",
        "_kernel",
        "_launch",
        "_ordinal",
        "_separate_merge",
        "_stream_of",
        "_workspace",
        "launch",
    )

    launch: Callable[[], None]

    def __init__(
        self, prepared: Loaded, call: Call, workspace: torch.Tensor | None, stream_of: Callable[[int], int]
    ) -> None:
        self._kernel = prepared.kernel
        self._launch = prepared.launch
        self._workspace = workspace
        self._stream_of = stream_of
        self._ordinal = prepared.kernel.device.ordinal
        structure = DecodeArguments()
        self._buffer = ParameterBuffer(structure)
        splits = cuda_arguments.fill(structure, call, prepared.launch, workspace)
        self._after_fill(call.queries, splits)

    def update(self, call: Call) -> None:
        """Takes over tensors that changed."""
        structure: Any = self._buffer.structure
        self._after_fill(call.queries, cuda_arguments.fill_tensors(structure, call, self._launch))

    def _after_fill(self, queries: int, splits: int) -> None:
        self._grid = (queries, self._launch.head_tiles, splits)
        self._separate_merge = splits > 1 and not self._launch.fuses(splits)
        self.launch = self._launch_now if queries else _nothing

    def _launch_now(self) -> None:
        stream = self._stream_of(self._ordinal)
        self._kernel.launch(self._grid, stream, self._buffer)
        if self._separate_merge:
            queries, head_tiles, _ = self._grid
            self._kernel.launch((queries, head_tiles, self._launch.merge_blocks), stream, self._buffer, merge=True)


def _nothing() -> None:
    """A call without queries has nothing to launch; a grid of zero blocks is an error to the driver."""


def variant(text: str) -> CudaBackend | None:
    """The backend with one way of merging, or none of the optimisations: `fused-merge`, `separate-merge`, `plain`."""
    return {
        "plain": CudaBackend(name="cuda:plain", switches=Switches(fused_merge=False, pipelined=False)),
        "fused-merge": CudaBackend(name="cuda:fused-merge", switches=Switches()),
        "separate-merge": CudaBackend(
            name="cuda:separate-merge", switches=Switches(fused_merge=False, wide_merge=True)
        ),
    }.get(text)


BACKEND = CudaBackend()
