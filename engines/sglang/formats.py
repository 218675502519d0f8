"""SGLang's names for page formats, and the records and padding behind them.

    KVLayout.V41  ->  record v41, aligned to 512       SGLang pads the page to its reader's TMA row stride
    KVLayout.V41_NEW -> record v41_interleaved, exact  528 bytes a row, nothing to pad

An aligned page stays aligned where its tail happens to be empty: V41 pages of 64 rows have no tail, pages of 2 rows
have 480 bytes of it. Source: SGLang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py (KVLayout.page_align, page_bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.layout import PaddingPolicy


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How SGLang lays out the pages of one format.

    Attributes:
        record: Record name in `kvbridge.records`.
        policy: Padding policy.
        alignment: Bytes that a page is rounded up to; None where SGLang rounds nothing.
        dtype: Torch's name of the pool tensor's dtype.
    """

    record: str
    policy: PaddingPolicy = PaddingPolicy.EXACT
    alignment: int | None = None
    dtype: str = "uint8"


KV_LAYOUTS = {
    "v4": PageFormat("v4", PaddingPolicy.ALIGNED, 576),
    "v41": PageFormat("v41", PaddingPolicy.ALIGNED, 512),
    "v41_new": PageFormat("v41_interleaved", PaddingPolicy.EXACT, 528),
    "v41_fp4": PageFormat("v41_fp4", PaddingPolicy.ALIGNED, 256),
    "v41_fp4_new": PageFormat("v41_fp4_interleaved", PaddingPolicy.EXACT, 288),
    "uniform_fp8": PageFormat("uniform_fp8", dtype="float8_e4m3fn"),
}
"""SGLang's KVLayout values."""

INDEXER_FP8 = PageFormat("indexer_fp8")
INDEXER_FP4 = PageFormat("indexer_fp4")


def state_format(values: int, dtype: str = "float32") -> PageFormat:
    """Compressor state: one row per token of a ring (deepseek_v4_compress_state.py, CompressStatePool).

    Args:
        values: Values of a row.
        dtype: float32 or bfloat16 (SGLANG_DSV4_COMPRESS_STATE_DTYPE).
    """
    short = {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)
    return PageFormat(f"state_{short}_{values}", dtype=dtype)


def compressed_layout(main: str, *, ratio: int, option: str) -> str:
    """Which KVLayout the compressed cache of one ratio gets beside a main cache.

    Args:
        main: KVLayout of the sliding-window cache: v4, v41, v41_new or uniform_fp8.
        ratio: Compress ratio.
        option: auto, fp8 or fp4; auto keeps ratios 1 and 2 in fp4, whose rows are fp4-rounded already.

    Source: SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py (resolve_compressed_kv_layout).
    """
    if main in ("v4", "uniform_fp8"):
        return main
    fp4 = option == "fp4" or (option == "auto" and ratio in (1, 2))
    interleaved = main == "v41_new"
    return ("v41_fp4" if fp4 else "v41") + ("_new" if interleaved else "")
