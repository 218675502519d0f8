"""Binding of the CPU backend: a preset structure, one C call.

    kvb_call  = counts, strides, scale, pointers of q, out, lse, sink, workspace
      kvb_cache x 1..3  = base, num_pages, page_rows, page_stride_bytes, slots, lengths, row_of_query
        kvb_record      = where codes, scales and bf16 tail of a row lie

Contract (the full one stands in src/cpu/kvbridge_cpu.h):

* `load()` builds or finds the library and returns it. `CompilerMissingError` and `CpuBuildError` mean: take torch.
* `bind(...)` fills the structure from tensors; it checks the types the C code relies on, not whether the slots make
  sense: dead slots (negative, beyond num_pages * page_rows, past the length) are skipped and never dereferenced.
* `BoundCall.run()` is one ctypes call. Between runs any field of `BoundCall.structure` may be patched (pointers,
  queries, scale); the tensors behind the pointers must live until the run returns.
* q bf16 [queries, heads, d_qk], out bf16 or fp32 [queries, heads, 512], last axis dense, any other strides; lse fp32
  [queries, heads]; sink fp32 [heads]; slots int32 or int64 [rows, width]; lengths [rows]; row_of_query [queries].
* Threads: `threads` is a number, by default torch's. The work runs in torch's own OpenMP threads where they are found
  (warm, bound to their cores, counted once), otherwise in threads of the library: after a fork, with
  `Flag.OWN_THREADS`, and for a while when OpenMP's barriers stall. Calls from several threads are safe.
* Bits depend on inputs, heads, queries, widths, threads and workspace; with `batch_invariant` a query's bits depend on
  its own inputs alone, whatever its batch and the thread count.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from kvbridge.kernels import cpu_build
from kvbridge.kernels.cpu_structures import (
    ABI,
    MAX_CACHES,
    CacheStructure,
    CallStructure,
    CpuCallError,
    Flag,
    InfoStructure,
    Path,
    RecordStructure,
    record_structure,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "ABI",
    "MAX_CACHES",
    "BoundCall",
    "CacheArguments",
    "CacheStructure",
    "CallStructure",
    "CpuCallError",
    "Flag",
    "Library",
    "Path",
    "bind",
    "load",
    "openmp_parallel",
    "record_structure",
]

NO_FLAGS = Flag(0)


@dataclass(frozen=True, slots=True)
class CacheArguments:
    """One KV source of a call.

    Attributes:
        base: Address of page 0's first byte.
        num_pages: Pages.
        page_rows: Rows a page.
        page_stride_bytes: Distance of two pages.
        record: Name in `kvbridge.records.RECORDS`.
        slots: int32 or int64 [rows, width], last axis dense.
        lengths: int32 or int64 [rows], or None.
        row_of_query: int32 or int64 [queries], or None when row = query.
        external_scale: Multiplier of records whose scale lies outside the page.
    """

    base: int
    num_pages: int
    page_rows: int
    page_stride_bytes: int
    record: str
    slots: torch.Tensor
    lengths: torch.Tensor | None = None
    row_of_query: torch.Tensor | None = None
    external_scale: float = 1.0


class Library:
    """The loaded library.

    Attributes:
        build: Where it came from.
        usable: Paths that this machine can run, best last.
        best: What `Path.AUTO` takes.
    """

    def __init__(self, build: cpu_build.Build) -> None:
        self.build = build
        self._handle = ctypes.CDLL(str(build.library))
        self.run = self._handle.kvb_cpu_run
        self.run.argtypes, self.run.restype = [ctypes.c_void_p], ctypes.c_int
        self._handle.kvb_cpu_error.argtypes, self._handle.kvb_cpu_error.restype = [ctypes.c_int32], ctypes.c_char_p
        self._handle.kvb_cpu_workspace_bytes.argtypes = [ctypes.c_int32] * 3
        self._handle.kvb_cpu_workspace_bytes.restype = ctypes.c_int64
        info = InfoStructure()
        self._handle.kvb_cpu_info(ctypes.byref(info))
        got = (info.abi, info.call_bytes, info.cache_bytes, info.record_bytes)
        expected = (ABI, *(ctypes.sizeof(kind) for kind in (CallStructure, CacheStructure, RecordStructure)))
        if got != expected:
            raise CpuCallError(f"library {build.library.name}: got abi and structure sizes {got}, expected {expected}")
        self.compiled = tuple(path for path in Path if info.compiled >> path & 1)
        self.usable = tuple(path for path in Path if info.usable >> path & 1)
        self.best = Path(info.best)

    def error(self, code: int) -> str:
        """Text of an error code of `run`."""
        text: bytes = self._handle.kvb_cpu_error(code)
        return text.decode()

    def workspace_bytes(self, *, heads: int, threads: int, batch_invariant: bool = False) -> int:
        """Workspace that suffices for every call with these heads and threads, whatever its queries and widths."""
        flags = Flag.BATCH_INVARIANT if batch_invariant else Flag(0)
        return int(self._handle.kvb_cpu_workspace_bytes(heads, threads, int(flags)))

    def cut(self, structure: CallStructure) -> tuple[int, int]:
        """How a call is cut: (head groups, slot splits) of each query."""
        groups, splits = ctypes.c_int32(), ctypes.c_int32()
        self._handle.kvb_cpu_cut(ctypes.byref(structure), ctypes.byref(groups), ctypes.byref(splits))
        return groups.value, splits.value


@functools.cache
def load(*, sanitize: bool = False, emulate_amx: bool = False) -> Library:
    """Builds or finds the library and loads it, once per process and options.

    Raises:
        cpu_build.CompilerMissingError: No compiler; use the torch backend.
        cpu_build.CpuBuildError: The build failed or the cache is not private.
    """
    return Library(cpu_build.build(sanitize=sanitize, emulate_amx=emulate_amx))


@functools.cache
def openmp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP runtime torch uses, or 0: then the library uses its own threads."""
    if "torch" not in sys.modules:
        return 0
    names = ["", *_loaded_openmp()]
    for name in names:
        try:
            function = ctypes.CDLL(name or None).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _loaded_openmp() -> list[str]:
    try:
        maps = FilePath("/proc/self/maps").read_text()
    except OSError:
        return []
    files = [line.split(maxsplit=5)[-1].strip() for line in maps.splitlines() if "/" in line]
    return sorted({file for file in files if any(name in file for name in ("libgomp", "libiomp5", "libomp"))})


class BoundCall:
    """A structure ready to run. Keeps the tensors it was bound to."""

    __slots__ = ("_address", "_keep", "_run", "library", "structure")

    def __init__(self, library: Library, structure: CallStructure, keep: Sequence[object]) -> None:
        self.library = library
        self.structure = structure
        self._address = ctypes.addressof(structure)
        self._run = library.run
        self._keep = keep

    def run(self) -> None:
        """Computes out and lse from what the structure points to.

        Raises:
            CpuCallError: The library refused the call.
        """
        code = self._run(self._address)
        if code:
            raise CpuCallError(f"kvb_cpu_run returned {code}: {self.library.error(code)}")


def bind(
    *,
    library: Library,
    q: torch.Tensor,
    caches: Sequence[CacheArguments],
    out: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    threads: int | None = None,
    path: Path = Path.AUTO,
    flags: Flag = NO_FLAGS,
    workspace: torch.Tensor | None = None,
) -> BoundCall:
    """Fills the structure of one call.

    Args:
        library: What `load` returned.
        q: bf16 [queries, heads, 512 or 576], last axis dense.
        caches: One to three KV sources.
        out: bf16 or fp32 [queries, heads, 512], last axis dense.
        scale: Multiplies q . k.
        sink: fp32 [heads], dense, natural logarithm.
        lse: fp32 [queries, heads].
        threads: At most this many; None: torch's number.
        path: Instruction set.
        flags: Options.
        workspace: uint8, `Library.workspace_bytes` long; None: slots are never split over threads.

    Raises:
        CpuCallError: A tensor has a type, shape or stride that the library cannot take.
    """
    import torch

    def need(name: str, good: bool, got: object, expected: str) -> None:
        if not good:
            raise CpuCallError(f"{name}: got {got}, expected {expected}")

    integers = {torch.int32: 32, torch.int64: 64}
    need(
        "q",
        q.dtype is torch.bfloat16 and q.dim() == 3 and q.stride(2) == 1,
        (q.dtype, q.stride()),
        "bf16, 3-D, last axis dense",
    )
    wide = out.dtype is torch.float32
    good_out = (
        (wide or out.dtype is torch.bfloat16) and out.dim() == 3 and out.shape[:2] == q.shape[:2] and out.stride(2) == 1
    )
    need("out", good_out, (out.dtype, tuple(out.shape)), f"bf16 or fp32 {(*q.shape[:2], 512)}, last axis dense")
    need("caches", 1 <= len(caches) <= MAX_CACHES, len(caches), f"1 to {MAX_CACHES}")
    if lse is not None:
        need(
            "lse",
            lse.dtype is torch.float32 and lse.shape == q.shape[:2],
            (lse.dtype, tuple(lse.shape)),
            f"fp32 {tuple(q.shape[:2])}",
        )
    if sink is not None:
        good_sink = sink.dtype is torch.float32 and sink.shape == q.shape[1:2] and sink.is_contiguous()
        need("sink", good_sink, (sink.dtype, tuple(sink.shape)), f"dense fp32 {tuple(q.shape[1:2])}")
    structure = CallStructure(
        abi=ABI,
        bytes=ctypes.sizeof(CallStructure),
        path=path,
        threads=torch.get_num_threads() if threads is None else threads,
        flags=flags,
        heads=q.shape[1],
        d_qk=q.shape[2],
        d_v=out.shape[2],
        caches=len(caches),
        out_type=int(wide),
        scale=scale,
        queries=q.shape[0],
        q=q.data_ptr(),
        q_query_stride=q.stride(0),
        q_head_stride=q.stride(1),
        out=out.data_ptr(),
        out_query_stride=out.stride(0),
        out_head_stride=out.stride(1),
        lse=lse.data_ptr() if lse is not None else None,
        lse_query_stride=lse.stride(0) if lse is not None else 0,
        lse_head_stride=lse.stride(1) if lse is not None else 0,
        sink=sink.data_ptr() if sink is not None else None,
        workspace=workspace.data_ptr() if workspace is not None else None,
        workspace_bytes=workspace.numel() if workspace is not None else 0,
        parallel=openmp_parallel(),
    )
    for index, cache in enumerate(caches):
        name, slots, lengths, rows = f"caches[{index}]", cache.slots, cache.lengths, cache.row_of_query
        dense = slots.dim() == 2 and (slots.stride(1) == 1 or slots.shape[1] <= 1)
        need(
            f"{name}.slots",
            slots.dtype in integers and dense,
            (slots.dtype, slots.stride()),
            "int32 or int64, 2-D, last axis dense",
        )
        for label, tensor, count in (("lengths", lengths, slots.shape[0]), ("row_of_query", rows, q.shape[0])):
            if tensor is not None:
                good = tensor.dtype in integers and tensor.shape == (count,) and tensor.is_contiguous()
                need(f"{name}.{label}", good, (tensor.dtype, tuple(tensor.shape)), f"dense int32 or int64 ({count},)")
        need(
            f"{name}.slots",
            rows is not None or slots.shape[0] == q.shape[0],
            tuple(slots.shape),
            f"{q.shape[0]} rows, one per query",
        )
        structure.cache[index] = CacheStructure(
            base=cache.base,
            num_pages=cache.num_pages,
            page_rows=cache.page_rows,
            page_stride_bytes=cache.page_stride_bytes,
            record=record_structure(cache.record, cache.page_rows, cache.external_scale),
            slots=slots.data_ptr(),
            slots_stride=slots.stride(0),
            lengths=lengths.data_ptr() if lengths is not None else None,
            row_of_query=rows.data_ptr() if rows is not None else None,
            rows=slots.shape[0],
            width=slots.shape[1],
            slots_bits=integers[slots.dtype],
            lengths_bits=integers[lengths.dtype] if lengths is not None else 0,
            row_of_query_bits=integers[rows.dtype] if rows is not None else 0,
        )
    return BoundCall(library, structure, (q, caches, out, sink, lse, workspace))
