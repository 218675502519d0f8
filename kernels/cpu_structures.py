"""The CPU backend's C structures in ctypes, and how a record is described to it.

    kvb_call  = counts, strides, scale, pointers of q, out, lse, sink, workspace
      kvb_cache x 1..3  = base, num_pages, page_rows, page_stride_bytes, slots, lengths, row_of_query
        kvb_record      = where codes, scales and bf16 tail of a row lie

Mirrors src/cpu/kvbridge_cpu.h; `Library` compares the sizes when it loads.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum, IntFlag
from typing import Any

from kvbridge.records import Encoding, ScaleRule, get_record

ABI = 2
MAX_CACHES = 3


class Path(IntEnum):
    """Instruction sets; `AMX_EMULATED` exists only in a build made for tests."""

    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_BF16 = 4
    AMX = 5
    AMX_EMULATED = 6


class Flag(IntFlag):
    """Options of a call; see kvbridge_cpu.h."""

    LSE_BASE2 = 1
    LSE_WITH_SINK = 2
    LSE_EMPTY_POSITIVE = 4
    BATCH_INVARIANT = 8
    OWN_THREADS = 16


_CODES = {Encoding.E4M3: 1, Encoding.E2M1: 2}
_SCALES = {ScaleRule.NONE: 0, ScaleRule.EXTERNAL: 0, ScaleRule.UE8M0: 1, ScaleRule.E4M3: 2, ScaleRule.FP32: 3}


def _fields(text: str) -> list[tuple[str, Any]]:
    types = {"i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}
    return [(name, types[kind]) for kind, name in (entry.split(":") for entry in text.split())]


class RecordStructure(ctypes.Structure):
    """kvb_record."""

    _fields_ = _fields(
        "i:code i:scale i:values i:group i:tail_values i:tail_offset_bytes l:row_stride_bytes l:scales_offset_bytes"
        " l:scales_stride_bytes f:external_scale i:reserved"
    )


class CacheStructure(ctypes.Structure):
    """kvb_cache."""

    _fields_ = [
        *_fields("p:base l:num_pages l:page_rows l:page_stride_bytes"),
        ("record", RecordStructure),
        *_fields(
            "p:slots l:slots_stride p:lengths p:row_of_query l:rows l:width"
            " i:slots_bits i:lengths_bits i:row_of_query_bits i:mapped"
        ),
    ]


class CallStructure(ctypes.Structure):
    """kvb_call."""

    _fields_ = [
        *_fields("i:abi i:bytes i:path i:threads i:flags i:heads i:d_qk i:d_v i:caches i:out_type"),
        *_fields("f:scale i:reserved l:queries"),
        *_fields("p:q l:q_query_stride l:q_head_stride p:out l:out_query_stride l:out_head_stride"),
        *_fields("p:lse l:lse_query_stride l:lse_head_stride p:sink p:workspace l:workspace_bytes p:parallel"),
        ("cache", CacheStructure * MAX_CACHES),
    ]


class InfoStructure(ctypes.Structure):
    """kvb_info."""

    _fields_ = _fields("i:abi i:call_bytes i:cache_bytes i:record_bytes i:compiled i:usable i:best i:reserved")


class CpuCallError(RuntimeError):
    """The library refused a call; the text says which field and why."""


@functools.cache
def record_structure(record: str, page_rows: int, external_scale: float = 1.0) -> RecordStructure:
    """Describes a record to the library: where its codes, scales and bf16 values lie in a page of `page_rows` rows.

    Raises:
        CpuCallError: No path decodes this record.
    """
    found = get_record(record)
    regions = found.regions(page_rows) if found.decodable and len(found.planes) == 1 else ()
    codes = [region for region in regions if region.dtype in _CODES and region.block == "data"]
    tail = [region for region in regions if region.dtype is Encoding.BF16]
    scales = [region for region in regions if region.block == "scales" and region.dtype is not Encoding.UNUSED]
    values = sum(8 * region.row_bytes // region.dtype.value_bits for region in codes)
    tail_values = sum(region.row_bytes // 2 for region in tail)
    if not regions or found.d_v == 0 or values + tail_values != found.d_qk or found.scale_rule not in _SCALES:
        raise CpuCallError(f"record: got {record!r}, expected a record whose encoding the CPU backend decodes")
    first = min(region.offset for region in (*codes, *tail))
    return RecordStructure(
        code=_CODES[codes[0].dtype] if codes else 0,
        scale=_SCALES[found.scale_rule],
        values=values,
        group=found.scale_group,
        tail_values=tail_values,
        tail_offset_bytes=tail[0].offset - first if tail else 0,
        row_stride_bytes=(codes or tail)[0].row_stride,
        scales_offset_bytes=scales[0].offset if scales else 0,
        scales_stride_bytes=scales[0].row_stride if scales else 0,
        external_scale=external_scale,
    )
