"""DecodeArguments of src/cuda/arguments.cuh, filled from a checked call.

    Call (tensors, checked)  ->  DecodeArguments (addresses, strides, counts)  ->  parameter buffer of the launch

The structure is the same whether a GPU runs it or the emulator of the tests does: both get it from here. What changes
from run to run is written by a few packed stores: a ctypes field costs as much as a whole run of them.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import torch

from kvbridge.kernels import cuda_tiles
from kvbridge.kernels.cuda_tiles import FORMATS, Variant
from kvbridge.kernels.errors import KernelError
from kvbridge.kernels.plan import MOST_SPLITS, Mode
from kvbridge.records import Arrangement, get_record

if TYPE_CHECKING:
    from kvbridge.kernels.arguments import Call, CallCache
    from kvbridge.kernels.plan import Plan

MAX_CACHES = 3
_FUSED_STATES = 96
"""Heads of a tile times splits up to which one block merges: 2 KB each, so that it reads for about as long as a second
launch takes (predicted by cost_model.py, not measured)."""
_LOG2_E = math.log2(math.e)


class Flag(IntFlag):
    """DecodeFlags."""

    OUT_FP32 = 1
    LSE_BASE2 = 2
    LSE_WITH_SINK = 4
    LSE_EMPTY_POSITIVE = 8
    FUSED_MERGE = 16
    PLAIN_PIPELINE = 32
    QUERY_VECTORS = 64


def _fields(text: str) -> list[tuple[str, Any]]:
    types = {"i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}
    return [(name, types[kind]) for kind, name in (entry.split(":") for entry in text.split())]


class CacheArguments(ctypes.Structure):
    """One KV source."""

    _fields_ = _fields(
        "p:base l:page_stride_bytes l:capacity l:scales_offset_bytes p:slots p:lengths l:slots_stride l:lengths_stride"
        " i:page_rows i:row_stride_bytes i:data_bytes i:scales_bytes i:scales_stride_bytes i:format i:width"
        " i:piece_bytes i:slots_are_64_bit i:lengths_are_64_bit i:slots_per_sequence i:lengths_per_sequence i:sequences"
    )


class DecodeArguments(ctypes.Structure):
    """One call."""

    _fields_ = [
        ("cache", CacheArguments * MAX_CACHES),
        *_fields("p:q p:out p:lse p:sink p:sequence_of_query p:partial_out p:partial_state p:counters"),
        *_fields("l:q_query_stride l:q_head_stride l:out_query_stride l:out_head_stride"),
        *_fields("l:lse_query_stride l:lse_head_stride f:scale_log2 i:queries i:heads i:caches i:splits"),
        *_fields("i:sequences_are_64_bit i:flags i:merge_blocks"),
    ]


@dataclass(frozen=True, slots=True)
class Switches:
    """Optimisations, each with a plain path behind it.

    Attributes:
        fused_merge: The last block of a (query, head tile) merges its splits; else a second launch does, bit for bit.
        wide_merge: The second launch has a block for each head, and takes over where one block would read too much.
        pipelined: Rows of the next tiles are on their way while one is used; else copy, wait, compute.
    """

    fused_merge: bool = True
    pipelined: bool = True
    wide_merge: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """What a variant needs to know of its device.

    Attributes:
        plan: The plan.
        variant: Compiled template arguments.
        multiprocessors: Of the device.
        switches: Optimisations that are on.
        head_tiles: Blocks that share one query.
        merge_blocks: Blocks of the separate merge that share a head tile.
        most_units: Blocks that split calls may have; 0 where no call is split.
        offsets: Where counters, partial states and partial outputs start in the workspace, in bytes.
    """

    plan: Plan
    variant: Variant
    multiprocessors: int
    switches: Switches = Switches()
    head_tiles: int = field(init=False)
    merge_blocks: int = field(init=False)
    most_units: int = field(init=False)
    offsets: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        split = self.plan.caps.mode != Mode.BATCH_INVARIANT
        object.__setattr__(self, "head_tiles", -(-self.plan.caps.heads // self.variant.heads))
        object.__setattr__(self, "merge_blocks", self.variant.heads if self.switches.wide_merge else 1)
        object.__setattr__(self, "most_units", 2 * self.multiprocessors if split else 0)
        counters = cuda_tiles.counters_bytes(self.multiprocessors)
        blocks = cuda_tiles.most_blocks(self.plan, self.variant, self.multiprocessors)
        states = 4 * cuda_tiles.STATE_FLOATS * self.variant.heads * blocks
        object.__setattr__(self, "offsets", (0, counters, counters + states))

    @property
    def workspace_bytes(self) -> int:
        """Enough for every call at or below the caps."""
        return cuda_tiles.workspace_bytes(self.plan, self.variant, multiprocessors=self.multiprocessors)

    def splits(self, queries: int, width: int) -> int:
        """`cuda_tiles.splits` with everything but the call worked out before."""
        if not queries:
            return 1
        most = min(self.most_units // (queries * self.head_tiles), MOST_SPLITS)
        return max(1, min(most, -(-width // self.variant.tokens)))

    def fuses(self, splits: int) -> bool:
        """Whether the last block merges: as the switches say, or while that takes less than a second launch."""
        switches = self.switches
        small = not switches.wide_merge or splits * self.variant.heads <= _FUSED_STATES
        return switches.fused_merge and small


_CACHE_BYTES = ctypes.sizeof(CacheArguments)
_SLOTS_AT = tuple(index * _CACHE_BYTES + CacheArguments.slots.offset for index in range(MAX_CACHES))
_WIDTH_AT = tuple(index * _CACHE_BYTES + CacheArguments.width.offset for index in range(MAX_CACHES))
_BITS_AT = tuple(index * _CACHE_BYTES + CacheArguments.slots_are_64_bit.offset for index in range(MAX_CACHES))
_Q_AT, _SEQUENCES_AT = DecodeArguments.q.offset, DecodeArguments.sequence_of_query.offset
_TAIL_AT = DecodeArguments.q_query_stride.offset
_SLOTS, _WIDTH, _BITS = struct.Struct("=4q"), struct.Struct("=i"), struct.Struct("=5i")
_TENSORS, _ADDRESS, _TAIL = struct.Struct("=3q"), struct.Struct("=q"), struct.Struct("=6qf7i")


def _check_offsets() -> None:
    """The packed stores rely on runs of fields that the structure keeps together."""
    cache, call = CacheArguments, DecodeArguments
    runs = (
        ("slots .. lengths_stride", cache.slots.offset + _SLOTS.size, cache.lengths_stride.offset + 8),
        ("slots_are_64_bit .. sequences", cache.slots_are_64_bit.offset + _BITS.size, cache.sequences.offset + 4),
        ("q .. lse", call.q.offset + _TENSORS.size, call.sink.offset),
        ("q_query_stride .. merge_blocks", call.q_query_stride.offset + _TAIL.size, call.merge_blocks.offset + 4),
    )
    for name, got, expected in runs:
        if got != expected:
            raise KernelError(f"DecodeArguments, fields {name}: got {got} as their end, expected {expected}")


_check_offsets()


def fill(arguments: DecodeArguments, call: Call, launch: Launch, workspace: torch.Tensor | None) -> int:
    """Writes everything a call needs.

    Args:
        arguments: Target.
        call: Checked call.
        launch: Variant and device.
        workspace: uint8 of at least `launch.workspace_bytes`, counters zeroed; None where that is 0.

    Returns:
        Splits of the call.
    """
    sink = call.sink
    if sink is not None:
        arguments.sink = sink.data_ptr()
    for index, cache in enumerate(call.caches):
        _fill_pages(arguments.cache[index], cache)
    if workspace is not None:
        start = workspace.data_ptr()
        arguments.counters, arguments.partial_state, arguments.partial_out = (start + at for at in launch.offsets)
    return fill_tensors(arguments, call, launch)


def fill_tensors(arguments: DecodeArguments, call: Call, launch: Launch) -> int:
    """Writes what may change from run to run: tensors, their strides and the query count.

    Returns:
        Splits of the call.
    """
    q, out, lse, queries = call.q, call.out, call.lse, call.queries
    q_address, (q_query, q_head, _), (out_query, out_head, _) = q.data_ptr(), q.stride(), out.stride()
    lse_address, lse_query, lse_head = (0, 0, 0) if lse is None else (lse.data_ptr(), *lse.stride())
    flags = _flags(call, launch.switches)
    if not (q_address | 2 * q_query | 2 * q_head) % 16:
        flags |= _QUERY_VECTORS
    if out.dtype is torch.float32:
        flags |= _OUT_FP32
    sequences, wide_sequences = call.sequence_of_query, False
    if sequences is not None:
        _ADDRESS.pack_into(arguments, _SEQUENCES_AT, sequences.data_ptr())
        wide_sequences = sequences.dtype is torch.int64
    width = 0
    for index, cache in enumerate(call.caches):
        width += _fill_slots(arguments, index, cache)
    splits = launch.splits(queries, width)
    if launch.fuses(splits):
        flags |= _FUSED_MERGE
    _TENSORS.pack_into(arguments, _Q_AT, q_address, out.data_ptr(), lse_address)
    _TAIL.pack_into(
        arguments,
        _TAIL_AT,
        q_query,
        q_head,
        out_query,
        out_head,
        lse_query,
        lse_head,
        call.scale * _LOG2_E,
        queries,
        call.heads,
        len(call.caches),
        splits,
        wide_sequences,
        flags,
        launch.merge_blocks,
    )
    return splits


def _fill_pages(target: CacheArguments, cache: CallCache) -> None:
    view = cache.view
    target.base = base = view.base_address
    target.page_stride_bytes = stride = view.page_stride_bytes
    target.page_rows = page_rows = view.page_rows
    target.capacity = view.capacity_rows
    target.format = FORMATS[cache.record]
    data, scales = _row_bytes(cache.record)
    target.data_bytes = target.row_stride_bytes = data
    target.scales_bytes = target.scales_stride_bytes = scales
    target.scales_offset_bytes = page_rows * data if scales else 0
    target.piece_bytes = 8 if (base | stride | data) % 16 else 16


@functools.cache
def _row_bytes(record: str) -> tuple[int, int]:
    """Bytes of a row's data and of its scales."""
    form = get_record(record)
    if form.arrangement is Arrangement.INTERLEAVED:
        return form.row_bytes, 0
    return form.block_bytes("data"), form.block_bytes("scales")


def _fill_slots(arguments: DecodeArguments, index: int, cache: CallCache) -> int:
    slots, lengths, per_sequence = cache.slots, cache.lengths, cache.lengths_per_sequence
    rows, width = slots.shape
    lengths_address, lengths_stride, wide_lengths = 0, 0, False
    if lengths is not None:
        lengths_address, lengths_stride = lengths.data_ptr(), lengths.stride()[0]
        wide_lengths = lengths.dtype is torch.int64
        if per_sequence:
            rows = min(rows, lengths.shape[0]) if cache.slots_per_sequence else lengths.shape[0]
    _SLOTS.pack_into(arguments, _SLOTS_AT[index], slots.data_ptr(), lengths_address, slots.stride()[0], lengths_stride)
    _WIDTH.pack_into(arguments, _WIDTH_AT[index], width)
    wide_slots = slots.dtype is torch.int64
    _BITS.pack_into(arguments, _BITS_AT[index], wide_slots, wide_lengths, cache.slots_per_sequence, per_sequence, rows)
    return width


# As plain integers: combining flags of an enumeration costs more than everything else here.
_OUT_FP32, _QUERY_VECTORS = int(Flag.OUT_FP32), int(Flag.QUERY_VECTORS)
_FUSED_MERGE, _PLAIN_PIPELINE = int(Flag.FUSED_MERGE), int(Flag.PLAIN_PIPELINE)
_LSE_BASE2, _LSE_WITH_SINK, _LSE_EMPTY = (
    int(Flag.LSE_BASE2),
    int(Flag.LSE_WITH_SINK),
    int(Flag.LSE_EMPTY_POSITIVE),
)


def _flags(call: Call, switches: Switches) -> int:
    form = call.lse_format
    flags = _LSE_BASE2 if form.base == "2" else 0
    if form.includes_sink:
        flags |= _LSE_WITH_SINK
    if form.empty > 0:
        flags |= _LSE_EMPTY
    if not switches.pipelined:
        flags |= _PLAIN_PIPELINE
    return flags
