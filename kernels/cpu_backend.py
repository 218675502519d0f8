"""The CPU backend behind the API: a preset structure, patched with a few packed stores, one C call.

    template of a plan  ->  copy at bind  ->  |constants|out type, scale|queries, q, out, lse|sink ..|cache|cache|cache|
                                                          ^ pack_into      ^ pack_into           slots, lengths ^ each

`cpu.py` describes the structure and loads the library; here tensors that `arguments.py` checked are written into it.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import torch

from kvbridge.kernels import cpu, cpu_build
from kvbridge.kernels.arguments import INDEX_BITS
from kvbridge.kernels.errors import KernelError
from kvbridge.kernels.plan import Mode

if TYPE_CHECKING:
    from kvbridge.kernels.arguments import Call, CallCache
    from kvbridge.kernels.caches import LseFormat
    from kvbridge.kernels.plan import Plan

_HEAD = struct.Struct("<10q")
_HEAD_AT = cpu.CallStructure.queries.offset
_SLOTS = struct.Struct("<6q4i")
_SLOTS_ONLY, _LENGTHS_ONLY = 1, 2
_CACHE_BYTES = ctypes.sizeof(cpu.CacheStructure)
_SLOTS_AT = tuple(
    cpu.CallStructure.cache.offset + index * _CACHE_BYTES + cpu.CacheStructure.slots.offset
    for index in range(cpu.MAX_CACHES)
)


def _check_offsets() -> None:
    """The packed stores rely on runs of fields that the structure keeps together."""
    if cpu.CallStructure.sink.offset != _HEAD_AT + _HEAD.size:
        raise KernelError("kvb_call: the fields from queries to lse_head_stride are no longer ten 8-byte words")
    if cpu.CacheStructure.mapped.offset + 4 != cpu.CacheStructure.slots.offset + _SLOTS.size:
        raise KernelError("kvb_cache: the fields from slots to mapped moved")


_check_offsets()


class CpuBackend:
    """Compiled C++ with run-time choice of the instruction set."""

    def __init__(self, path: cpu.Path = cpu.Path.AUTO) -> None:
        self.path = path
        self.name = "cpu" if path is cpu.Path.AUTO else f"cpu:{path.name.lower()}"

    def _load(self) -> cpu.Library:
        # The emulated matrix unit exists only in a library built for tests.
        return cpu.load(emulate_amx=True) if self.path is cpu.Path.AMX_EMULATED else cpu.load()

    def missing(self, device_type: str) -> str | None:
        """Why it cannot run here: another device, no compiler, or a failed build."""
        if device_type != "cpu":
            return f"runs on cpu tensors, not on {device_type}"
        try:
            usable = self._load().usable
        except (cpu_build.CompilerMissingError, cpu_build.CpuBuildError, cpu.CpuCallError, OSError) as error:
            return str(error)
        if self.path is not cpu.Path.AUTO and self.path not in usable:
            return f"this machine cannot run it, expected one of {[path.name.lower() for path in usable]}"
        return None

    def unsupported(self, plan: Plan) -> str | None:
        """Why it cannot serve the plan: a record that no path decodes."""
        try:
            for record in plan.caps.records:
                cpu.record_structure(record, 64)
        except cpu.CpuCallError as error:
            return str(error)
        return None

    def workspace_bytes(self, plan: Plan, device: torch.device) -> int:
        """Room for partial results of as many threads as torch has now; with more of them slots stay unsplit."""
        invariant = plan.caps.mode == Mode.BATCH_INVARIANT
        threads = torch.get_num_threads()
        return self._load().workspace_bytes(heads=plan.caps.heads, threads=threads, batch_invariant=invariant)

    def prepare(self, plan: Plan, device: torch.device) -> cpu.CallStructure:
        """Loads the library and fills what all calls of a plan share."""
        self._load()
        flags = cpu.Flag.BATCH_INVARIANT if plan.caps.mode == Mode.BATCH_INVARIANT else cpu.Flag(0)
        return cpu.CallStructure(
            abi=cpu.ABI,
            bytes=ctypes.sizeof(cpu.CallStructure),
            path=self.path,
            threads=torch.get_num_threads(),
            flags=flags,
            heads=plan.caps.heads,
            d_qk=plan.d_qk,
            d_v=plan.d_v,
            parallel=cpu.openmp_parallel(),
        )

    def bind(self, prepared: cpu.CallStructure, call: Call, workspace: torch.Tensor | None) -> CpuRunner:
        """Fills the structure of one call."""
        return CpuRunner(self._load(), prepared, call, workspace)


class CpuRunner:
    """One bound call."""

    __slots__ = ("_address", "_call", "_library", "_run", "_workspace", "structure")

    def __init__(
        self, library: cpu.Library, template: cpu.CallStructure, call: Call, workspace: torch.Tensor | None
    ) -> None:
        self._library = library
        self._run = library.run
        self._workspace = workspace
        self.structure = structure = cpu.CallStructure.from_buffer_copy(template)
        self._address = ctypes.addressof(structure)
        structure.caches = len(call.caches)
        structure.scale = call.scale
        structure.flags |= _lse_flags(call.lse_format)
        if call.sink is not None:
            structure.sink = call.sink.data_ptr()
        if workspace is not None:
            structure.workspace, structure.workspace_bytes = workspace.data_ptr(), workspace.numel()
        for index, cache in enumerate(call.caches):
            view, entry = cache.view, structure.cache[index]
            entry.base, entry.num_pages = view.base_address, view.num_pages
            entry.page_rows, entry.page_stride_bytes = view.page_rows, view.page_stride_bytes
            entry.record = cpu.record_structure(cache.record, view.page_rows, cache.external_scale)
        self.update(call)

    def update(self, call: Call) -> None:
        """Writes addresses, strides and counts of tensors that were checked."""
        self._call = call
        structure = self.structure
        q, out, lse = call.q, call.out, call.lse
        q_query, q_head, _ = q.stride()
        out_query, out_head, _ = out.stride()
        lse_address, lse_query, lse_head = (0, 0, 0) if lse is None else (lse.data_ptr(), *lse.stride())
        structure.out_type = out.dtype is torch.float32
        _HEAD.pack_into(
            structure,
            _HEAD_AT,
            call.queries,
            q.data_ptr(),
            q_query,
            q_head,
            out.data_ptr(),
            out_query,
            out_head,
            lse_address,
            lse_query,
            lse_head,
        )
        for cache, at in zip(call.caches, _SLOTS_AT, strict=False):
            _pack_slots(structure, at, cache, call.sequence_of_query)

    def launch(self) -> None:
        """Runs the library on the structure."""
        code = self._run(self._address)
        if code:
            raise KernelError(f"cpu backend: {self._library.error(code)}")


def _pack_slots(
    structure: cpu.CallStructure, at: int, cache: CallCache, sequence_of_query: torch.Tensor | None
) -> None:
    slots, lengths = cache.slots, cache.lengths
    rows, width = slots.shape
    mapped, row_of_query = 0, None
    if cache.slots_per_sequence:
        mapped, row_of_query = 0 if cache.lengths_per_sequence else _SLOTS_ONLY, sequence_of_query
    elif cache.lengths_per_sequence and lengths is not None:
        mapped, row_of_query, rows = _LENGTHS_ONLY, sequence_of_query, lengths.shape[0]
    _SLOTS.pack_into(
        structure,
        at,
        slots.data_ptr(),
        slots.stride()[0],
        0 if lengths is None else lengths.data_ptr(),
        0 if row_of_query is None else row_of_query.data_ptr(),
        rows,
        width,
        INDEX_BITS[slots.dtype],
        0 if lengths is None else INDEX_BITS[lengths.dtype],
        0 if row_of_query is None else INDEX_BITS[row_of_query.dtype],
        mapped,
    )


def _lse_flags(form: LseFormat) -> cpu.Flag:
    flags = cpu.Flag(0)
    if form.base == "2":
        flags |= cpu.Flag.LSE_BASE2
    if form.includes_sink:
        flags |= cpu.Flag.LSE_WITH_SINK
    if form.empty > 0:
        flags |= cpu.Flag.LSE_EMPTY_POSITIVE
    return flags


def variant(text: str) -> CpuBackend | None:
    """The backend with one path forced: `portable`, `avx2`, `avx512`, `avx512_bf16`, `amx`, `amx_emulated`."""
    path = cpu.Path.__members__.get(text.upper())
    return None if path is None else CpuBackend(path)


BACKEND = CpuBackend()
