"""SGLang's unified pool (HIP): one tensor per layer holds the sliding window and then the compressed rows.

    bf16  [swa rows | compressed rows, 512] bf16                              record v4_bf16
    fp8   [swa rows | compressed rows, 512] e4m3 and [same rows, 64] bf16     record unified_fp8, planes nope and rope

A ring of the window is a page of the first part, 64 or 2 compressed rows a page of the second.
Source: SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py (DeepSeekV4UnifiedKVPool).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvbridge.engines.sglang.live import LiveCache
from kvbridge.engines.sglang.naming import FULL, REQUEST, layer_name
from kvbridge.layout import PageLayout, PoolKind


def read_unified_owner(pool: Any) -> Iterator[LiveCache]:
    """Caches of a `DeepSeekV4TokenToKVPool` that keeps a unified pool."""
    from kvbridge.engines.sglang.layouts import read_states

    stage = range(pool._stage_start, pool._stage_end)
    ratios = [pool.compression_ratios[layer] for layer in stage]
    yield from read_unified(pool.unified_kv_pool, ratios=ratios, first_layer=stage.start)
    yield from read_states(pool)


def read_unified(pool: Any, *, ratios: Sequence[int], first_layer: int = 0) -> Iterator[LiveCache]:
    """Caches of one `DeepSeekV4UnifiedKVPool`.

    Args:
        pool: The pool.
        ratios: Compress ratio of each of its layers; the pool does not keep them.
        first_layer: Number of its first layer.
    """
    planes = (("nope", pool.kv_buffer), ("rope", pool.kv_buffer_rope)) if pool.fp8 else ((None, pool.kv_buffer),)
    for plane, buffers in planes:
        for place, (ratio, buffer) in enumerate(zip(ratios, buffers, strict=True)):
            suffix = f".{plane}" if plane else ""
            window = buffer[: pool.swa_pages]
            layout = _layout(buffer, plane, name="swa", page_rows=pool.swa_ring_size, rows=pool.swa_pages)
            yield LiveCache(layer_name(first_layer + place, f"swa{suffix}"), REQUEST, layout, window)
            if ratio:
                rows = buffer.shape[0] - pool.swa_pages
                layout = _layout(
                    buffer, plane, name=f"c{ratio}", page_rows=pool.page_size // ratio, rows=rows, tokens_per_row=ratio
                )
                name = layer_name(first_layer + place, f"c{ratio}{suffix}")
                yield LiveCache(name, FULL, layout, buffer[pool.swa_pages :])


def _layout(
    buffer: Any, plane: str | None, *, name: str, page_rows: int, rows: int, tokens_per_row: int = 1
) -> PageLayout:
    dtype = str(buffer.dtype).removeprefix("torch.")
    return PageLayout.for_rows(
        "unified_fp8" if plane else "v4_bf16",
        page_rows=page_rows,
        plane=plane,
        dtype=dtype,
        num_pages=rows // page_rows,
        reserved_pages=1,
        tokens_per_row=tokens_per_row,
        kind=PoolKind.TOKEN_GRANULAR,
        pool=name,
    )
