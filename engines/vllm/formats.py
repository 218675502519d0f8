"""Which record, pool and alignment a vLLM cache spec means.

    state_content_bytes 584                  v4                  cache dtype fp8_ds_mla, but so are
    state_content_bytes 656, 528             dsa, v41            these two
    dtype uint8, no cache dtype, 132 wide    indexer_fp8
    dtype float32                            state_fp32_*

The record never follows from a dtype name alone. Sources: vLLM 0.32.0 and 0.33.0 v1/kv_cache_interface.py,
models/deepseek_v41/common/ops/cache_utils.py (rows split until 0.32, then interleaved).
"""

from __future__ import annotations

from typing import Any

from kvbridge.engines.vllm.layers import ALIGNMENTS
from kvbridge.engines.vllm.options import nearest_version
from kvbridge.engines.vllm.specs import round_up
from kvbridge.errors import RecordMissingError
from kvbridge.records import get_record

MLA_SPECS = ("MLAAttentionSpec", "SlidingWindowMLASpec", "CircularBufferSpec")
"""vLLM's spec classes that hold MLA rows, indexer keys or a compressor's sums."""


def _by_width(*names: str) -> dict[int, str]:
    return {get_record(name).row_bytes: name for name in names}


_PACKED_RECORDS = _by_width("v4", "dsa", "nvfp4_352", "v41", "v41_fp4")
_INDEXER_RECORDS = _by_width("indexer_fp8", "indexer_fp4")
_PLAIN_RECORDS = {1: _by_width("uniform_fp8", "mla_fp8"), 2: _by_width("v4_bf16", "mla_bf16")}  # by bytes of an element


def record_of(spec: Any, *, version: str) -> str:
    """Name of the record that a layer's rows hold.

    Args:
        spec: vLLM's cache spec of one layer.
        version: vLLM's version: V4.1 records are split until 0.32, interleaved since.

    Raises:
        RecordMissingError: The spec describes no record known here.
    """
    kind = type(spec).__name__
    if kind not in MLA_SPECS:
        raise RecordMissingError(
            "spec", got=kind, expected=f"one of {list(MLA_SPECS)}", detail="only MLA caches and what goes with them"
        )
    element_bytes = spec.dtype.itemsize
    row_bytes = spec.state_content_size_bytes
    name = None
    if str(spec.dtype) == "torch.float32":
        name = f"state_fp32_{row_bytes // element_bytes}"
    elif spec.state_content_bytes is not None:
        name = _PACKED_RECORDS.get(row_bytes)
    elif getattr(spec, "cache_dtype_str", None) is None and element_bytes == 1:
        name = _INDEXER_RECORDS.get(row_bytes)
    else:
        name = _PLAIN_RECORDS.get(element_bytes, {}).get(row_bytes)
    if name in ("v41", "v41_fp4") and nearest_version(version)[0] != "0.32.0":
        name += "_interleaved"
    if name is None:
        raise RecordMissingError(
            "spec",
            got=f"{kind}: rows of {row_bytes} bytes of {spec.dtype}",
            expected="a spec whose record is known",
            detail=f"cache dtype {getattr(spec, 'cache_dtype_str', None)}",
        )
    return name


def pool_of(spec: Any, record: str, *, sparse: bool) -> str:
    """Name of the pool that a layer's cache belongs to.

    Args:
        spec: vLLM's cache spec of one layer.
        record: Its record.
        sparse: Whether the model has an indexer; tells DSA from classic MLA.
    """
    if record.startswith("state_"):
        return "compressor_state"
    if record.startswith("indexer_"):
        return "indexer"
    if hasattr(spec, "sliding_window") and type(spec).__name__ == "SlidingWindowMLASpec":
        return "swa"
    if spec.model_version == "deepseek_v4":
        return f"c{int(spec.tokens_per_state)}"
    return "dsa" if sparse else "mla"


def alignment_of(spec: Any) -> int | None:
    """Bytes that a layer's page is rounded up to; None for no rounding.

    Where all layers are alike vLLM merges their specs and drops the alignment, but keeps the padded page; of the two
    alignments it uses, the one that gives this page is meant.
    """
    alignment: int | None = getattr(spec, "alignment", None)
    padded = getattr(spec, "page_size_padded", None)
    if alignment is not None or padded is None:
        return alignment
    payload = spec.unpadded_page_size_bytes
    known = [candidate for candidate in ALIGNMENTS if round_up(payload, candidate) == padded]
    return known[0] if known else int(padded)


def is_state(spec: Any) -> bool:
    """Whether a layer's cache holds a window or partial sums, which kernels address by the manager's own blocks."""
    return type(spec).__name__ in ("SlidingWindowMLASpec", "CircularBufferSpec")


def is_indexer(spec: Any) -> bool:
    """Whether a layer's cache holds indexer keys."""
    return (
        type(spec).__name__ == "MLAAttentionSpec"
        and spec.state_content_bytes is None
        and spec.cache_dtype_str is None
        and spec.dtype.itemsize == 1
        and spec.state_content_size_bytes in _INDEXER_RECORDS
    )
