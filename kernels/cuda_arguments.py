"""DecodeArguments of src/cuda/arguments.cuh, filled from a checked call.

    Call (tensors, checked)  ->  DecodeArguments (addresses, strides, counts)  ->  parameter buffer of the launch

The structure is the same whether a GPU runs it or the emulator of the tests does: both get it from here.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import torch

from kvbridge.kernels import cuda_tiles
from kvbridge.kernels.cuda_tiles import FORMATS, Variant
from kvbridge.records import Arrangement, get_record

if TYPE_CHECKING:
    from kvbridge.kernels.arguments import Call, CallCache
    from kvbridge.kernels.plan import Plan

MAX_CACHES = 3
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
        *_fields("i:sequences_are_64_bit i:flags"),
    ]


@dataclass(frozen=True, slots=True)
class Switches:
    """Optimisations, each with a plain path behind it.

    Attributes:
        fused_merge: The last block of a (query, head tile) merges its splits; else a second launch does, bit for bit.
        pipelined: Rows of the next tiles are on their way while one is used; else copy, wait, compute.
    """

    fused_merge: bool = True
    pipelined: bool = True


@dataclass(frozen=True, slots=True)
class Launch:
    """What a variant needs to know of its device.

    Attributes:
        plan: The plan.
        variant: Compiled template arguments.
        multiprocessors: Of the device.
        switches: Optimisations that are on.
    """

    plan: Plan
    variant: Variant
    multiprocessors: int
    switches: Switches = Switches()

    @property
    def head_tiles(self) -> int:
        """Blocks that share one query."""
        return -(-self.plan.caps.heads // self.variant.heads)

    @property
    def workspace_bytes(self) -> int:
        """Enough for every call at or below the caps."""
        return cuda_tiles.workspace_bytes(self.plan, self.variant, multiprocessors=self.multiprocessors)


def fill(arguments: DecodeArguments, call: Call, launch: Launch, workspace: torch.Tensor | None) -> None:
    """Writes everything a call needs.

    Args:
        arguments: Target.
        call: Checked call.
        launch: Variant and device.
        workspace: uint8 of at least `launch.workspace_bytes`, counters zeroed; None where that is 0.
    """
    arguments.heads = call.heads
    arguments.caches = len(call.caches)
    arguments.scale_log2 = call.scale * _LOG2_E
    arguments.sink = None if call.sink is None else call.sink.data_ptr()
    for index, cache in enumerate(call.caches):
        _fill_pages(arguments.cache[index], cache)
    if workspace is not None:
        counters = cuda_tiles.counters_bytes(launch.multiprocessors)
        blocks = cuda_tiles.most_blocks(launch.plan, launch.variant, launch.multiprocessors)
        states = 4 * cuda_tiles.STATE_FLOATS * launch.variant.heads * blocks
        arguments.counters = workspace.data_ptr()
        arguments.partial_state = workspace.data_ptr() + counters
        arguments.partial_out = workspace.data_ptr() + counters + states
    fill_tensors(arguments, call, launch)


def fill_tensors(arguments: DecodeArguments, call: Call, launch: Launch) -> None:
    """Writes what may change from run to run: tensors, their strides and the query count."""
    q, out, lse = call.q, call.out, call.lse
    flags = _flags(call, launch)
    q_query, q_head, _ = q.stride()
    arguments.q, arguments.q_query_stride, arguments.q_head_stride = q.data_ptr(), q_query, q_head
    if not (q.data_ptr() | 2 * q_query | 2 * q_head) % 16:
        flags |= Flag.QUERY_VECTORS
    arguments.out = out.data_ptr()
    arguments.out_query_stride, arguments.out_head_stride, _ = out.stride()
    if out.dtype is torch.float32:
        flags |= Flag.OUT_FP32
    arguments.lse = None if lse is None else lse.data_ptr()
    if lse is not None:
        arguments.lse_query_stride, arguments.lse_head_stride = lse.stride()
    arguments.queries = call.queries
    sequences = call.sequence_of_query
    if sequences is not None:
        arguments.sequence_of_query = sequences.data_ptr()
        arguments.sequences_are_64_bit = sequences.dtype is torch.int64
    width = 0
    for index, cache in enumerate(call.caches):
        width += _fill_slots(arguments.cache[index], cache)
    arguments.splits = cuda_tiles.splits(
        launch.plan, launch.variant, multiprocessors=launch.multiprocessors, queries=call.queries, width=width
    )
    arguments.flags = flags


def _fill_pages(target: CacheArguments, cache: CallCache) -> None:
    view, record = cache.view, get_record(cache.record)
    target.base = view.base_address
    target.page_stride_bytes = view.page_stride_bytes
    target.page_rows = view.page_rows
    target.capacity = view.capacity_rows
    target.format = FORMATS[cache.record]
    data, scales = record.block_bytes("data"), record.block_bytes("scales")
    if record.arrangement is Arrangement.INTERLEAVED:
        data, scales = record.row_bytes, 0
    target.data_bytes = target.row_stride_bytes = data
    target.scales_bytes = target.scales_stride_bytes = scales
    target.scales_offset_bytes = view.page_rows * data if scales else 0
    misaligned = (view.base_address | view.page_stride_bytes | data) % 16
    target.piece_bytes = 8 if misaligned else 16


def _fill_slots(target: CacheArguments, cache: CallCache) -> int:
    slots, lengths = cache.slots, cache.lengths
    target.slots = slots.data_ptr()
    target.slots_stride = slots.stride(0)
    target.slots_are_64_bit = slots.dtype is torch.int64
    target.slots_per_sequence = cache.slots_per_sequence
    rows, width = slots.shape
    target.width = width
    target.lengths = None if lengths is None else lengths.data_ptr()
    target.lengths_per_sequence = cache.lengths_per_sequence
    if lengths is not None:
        target.lengths_stride = lengths.stride(0)
        target.lengths_are_64_bit = lengths.dtype is torch.int64
        if cache.lengths_per_sequence:
            rows = min(rows, lengths.shape[0]) if cache.slots_per_sequence else lengths.shape[0]
    target.sequences = rows
    return int(width)


def _flags(call: Call, launch: Launch) -> Flag:
    form = call.lse_format
    flags = Flag(0)
    if form.base == "2":
        flags |= Flag.LSE_BASE2
    if form.includes_sink:
        flags |= Flag.LSE_WITH_SINK
    if form.empty > 0:
        flags |= Flag.LSE_EMPTY_POSITIVE
    if launch.switches.fused_merge:
        flags |= Flag.FUSED_MERGE
    if not launch.switches.pipelined:
        flags |= Flag.PLAIN_PIPELINE
    return flags
