"""SGLang's host pools (HiCache): copies of device pages, in one of three arrangements of layers.

    layer_first        a tensor [pages, item] per layer
    page_first         [pages, layers, item]          a layer's pages lie one slab apart: packed
    page_first_direct  [pages, layers, 1, item]       the same bytes
    MLA page_first     [slots, layers, 1, dim]        here the slab is one row: pages of one row, packed
    MLA direct         [pages, layers, page, 1, dim]

Compressor state travels by rings, indexer keys by pages. A host pool holds bytes without knowing their record, so it is
read with the device cache it mirrors. Source: SGLang 0.5.23 mem_cache/memory_pool_host.py, mem_cache/pool_host/mla.py,
mem_cache/pool_host/dsa.py.
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
        pool: `DeepSeekV4PagedHostPool`, `DeepSeekV4StateHostPool`, `DSAIndexerPoolHost` or `MLATokenToKVPoolHost`.
        mirrored: The device caches it mirrors, one per host layer, in its order.

    Raises:
        EngineError: Another arrangement or another number of layers.
        LayoutError: The pool's items are no pages of that record.
    """
    if pool.layout not in LAYOUTS:
        raise EngineError(f"host layout: got {pool.layout!r}, expected one of {list(LAYOUTS)}")
    if len(mirrored) != pool.layer_num:
        raise EngineError(f"host layers: got {len(mirrored)} device caches, expected {pool.layer_num}")
    items = _page_items(pool)
    buffers = pool.kv_buffer if items is None else items[0]
    for layer, device in enumerate(mirrored):
        tensor = buffers[layer] if pool.layout == "layer_first" else buffers[:, layer]
        if items is None:
            layout = _rows_layout(pool, device.layout)
        else:
            tensor = tensor.flatten(1) if tensor.dim() > 2 else tensor
            layout = _pages_layout(pool, device.layout, num_pages=items[1], item_bytes=items[2])
        yield LiveCache(f"host.{device.name}", "host", layout, tensor)


def _page_items(pool: Any) -> tuple[Any, int, int] | None:
    """Buffers, pages and bytes of an item of a pool that moves whole pages; None for one that moves rows."""
    for buffers, pages, item in (
        ("kv_buffer", "num_host_pages", "item_bytes"),
        ("kv_buffer", "num_host_pages", "state_page_bytes"),
        ("index_k_with_scale_buffer", "indexer_page_num", "indexer_page_stride_size"),
    ):
        if hasattr(pool, pages) and hasattr(pool, item):
            return getattr(pool, buffers), getattr(pool, pages), getattr(pool, item)
    return None


def _pages_layout(pool: Any, device: PageLayout, *, num_pages: int, item_bytes: int) -> PageLayout:
    """Padded pages travel whole: a host item is a device page, as bytes."""
    fields: dict[str, Any] = {
        "page_rows": device.page_rows,
        "dtype": "uint8",
        "alignment": device.padding.alignment,
        "num_pages": num_pages,
        "tokens_per_row": device.tokens_per_row,
        "pool": device.pool,
    }
    if pool.layout == "layer_first" or pool.layer_num == 1:
        return PageLayout.for_rows(device.record, policy=device.padding.policy, **fields)
    slab = pool.layer_num * item_bytes
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
