"""SGLang's host pools (HiCache): copies of device pages, in one of three arrangements of layers.

    layer_first        a tensor [pages, item] per layer
    page_first         [pages, layers, item]          a layer's pages lie one slab apart: packed
    page_first_direct  [pages, layers, 1, item]       the same bytes
    MLA page_first     [slots, layers, 1, dim]        here the slab is one row: pages of one row, packed
    MLA direct         [pages, layers, page, 1, dim]

A host pool holds bytes without knowing their record, so it is read with the device cache it mirrors.
Source: SGLang 0.5.23 mem_cache/memory_pool_host.py (DeepSeekV4PagedHostPool), mem_cache/pool_host/mla.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvbridge.engine import EngineError
from kvbridge.engines.sglang.live import LiveCache
from kvbridge.layout import PaddingPolicy, PageLayout, PoolKind

LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def read_host_pool(pool: Any, mirrored: Sequence[LiveCache]) -> Iterator[LiveCache]:
    """Caches of a host pool.

    Args:
        pool: `DeepSeekV4PagedHostPool` or `MLATokenToKVPoolHost`.
        mirrored: The device caches it mirrors, one per host layer, in its order.

    Raises:
        EngineError: Another arrangement or another number of layers.
        LayoutError: The pool's items are no pages of that record.
    """
    if pool.layout not in LAYOUTS:
        raise EngineError(f"host layout: got {pool.layout!r}, expected one of {list(LAYOUTS)}")
    if len(mirrored) != pool.layer_num:
        raise EngineError(f"host layers: got {len(mirrored)} device caches, expected {pool.layer_num}")
    token_granular = bool(mirrored) and mirrored[0].layout.kind is PoolKind.TOKEN_GRANULAR
    for layer, device in enumerate(mirrored):
        tensor = pool.kv_buffer[layer] if pool.layout == "layer_first" else pool.kv_buffer[:, layer]
        if token_granular:
            layout = _rows_layout(pool, device.layout)
        else:
            tensor = tensor.flatten(1) if tensor.dim() > 2 else tensor
            layout = _pages_layout(pool, device.layout)
        yield LiveCache(f"host.{device.name}", "host", layout, tensor)


def _pages_layout(pool: Any, device: PageLayout) -> PageLayout:
    """Padded pages travel whole: a host item is a device page."""
    fields: dict[str, Any] = {
        "page_rows": device.page_rows,
        "dtype": "uint8",
        "alignment": device.padding.alignment,
        "num_pages": pool.num_host_pages,
        "tokens_per_row": device.tokens_per_row,
        "pool": device.pool,
    }
    if pool.layout == "layer_first" or pool.layer_num == 1:
        return PageLayout.for_rows(device.record, policy=device.padding.policy, **fields)
    slab = pool.layer_num * pool.item_bytes
    return PageLayout.for_rows(device.record, policy=PaddingPolicy.PACKED, page_stride_bytes=slab, **fields)


def _rows_layout(pool: Any, device: PageLayout) -> PageLayout:
    fields: dict[str, Any] = {"dtype": device.dtype, "plane": device.plane, "pool": device.pool}
    if pool.layout == "layer_first" or (pool.layer_num == 1 and pool.layout == "page_first"):
        pages = pool.size // device.page_rows
        kind = PoolKind.TOKEN_GRANULAR
        return PageLayout.for_rows(device.record, page_rows=device.page_rows, num_pages=pages, kind=kind, **fields)
    page_rows = 1 if pool.layout == "page_first" else pool.page_size
    return PageLayout.for_rows(
        device.record,
        page_rows=page_rows,
        policy=PaddingPolicy.PACKED,
        page_stride_bytes=pool.layer_num * page_rows * device.row_bytes,
        num_pages=pool.size // page_rows,
        **fields,
    )
