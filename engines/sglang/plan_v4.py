"""Pools of SGLang's DeepSeek-V4 owner pool.

    swa   ceil((swa tokens + page) / rows) pages: one logical page is reserved, slot 0 takes dummy writes
    c4    64-row pages, ceil((c4 rows + page) / 64)         page number = page number of the token's slot
    c128   2-row pages
    state [size + ring + 1 rows, up to the ratio]: a page is one ring, the last row a sentinel

Source: SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py (_num_dsv4_physical_kv_pages, _init_compressed_pools,
_init_paged_compress_states), mem_cache/deepseek_v4_compress_state.py.
"""

from __future__ import annotations

from kvbridge.engines.sglang.formats import INDEXER_FP4, INDEXER_FP8, KV_LAYOUTS, compressed_layout, state_format
from kvbridge.engines.sglang.naming import FULL, HISPARSE, REQUEST, SWA, Bank
from kvbridge.engines.sglang.options import Settings
from kvbridge.engines.sglang.sizes import PoolSizes, ring_rows, source_layers, state_rows
from kvbridge.layout import PoolKind
from kvbridge.models import ModelConfig


def plan_v4(model: ModelConfig, settings: Settings, sizes: PoolSizes | None) -> Bank:
    """All pools of one DeepSeek-V4 worker, in SGLang's order.

    Args:
        model: The model.
        settings: Resolved options.
        sizes: Pool sizes; None leaves page counts open.
    """
    bank = Bank()
    page = settings.page_rows
    rows = settings.swa_physical_rows
    bank.plan(
        "swa",
        KV_LAYOUTS[settings.kv_layout],
        cache="swa",
        layers=range(model.num_layers),
        group=SWA,
        page_rows=rows,
        num_pages=None if sizes is None else pages(sizes.swa_tokens, rows=rows, logical_rows=settings.swa_page_rows),
        reserved_pages=settings.swa_page_rows // rows,
    )
    for ratio in (4, 128, 1, 2):
        _plan_rows(bank, model, settings, sizes, ratio)
    for ratio in (4, 1, 2):
        _plan_indexer(bank, model, settings, sizes, ratio)
    for ratio in (4, 128, 2):
        _plan_state(bank, model, settings, sizes, ratio)
    bank.anchor(page_rows=page, num_pages=None if sizes is None else sizes.full_tokens // page + 1)
    for ratio in (1, 2):
        sharing = model.compress_ratios[: model.num_layers].count(ratio) - len(source_layers(model, ratio))
        if sharing:
            bank.notes.append(f"{sharing} layers of ratio {ratio} read the rows of the kv source layer before them")
    return bank


def pages(size: int, *, rows: int, logical_rows: int) -> int:
    """Pages of a pool of `size` rows: the allocator's reserved logical page comes on top."""
    return -(-(size + logical_rows) // rows)


def _plan_rows(bank: Bank, model: ModelConfig, settings: Settings, sizes: PoolSizes | None, ratio: int) -> None:
    page = settings.page_rows
    hisparse = ratio == 4 and settings.hisparse_ratio > 0
    size = 0
    if sizes is not None:
        size = {4: sizes.c4_rows, 128: sizes.c128_rows}.get(ratio, sizes.full_tokens // ratio)
    bank.plan(
        f"c{ratio}",
        KV_LAYOUTS[compressed_layout(settings.kv_layout, ratio=ratio, option=settings.compressed_option)],
        cache=f"c{ratio}",
        layers=source_layers(model, ratio),
        group=HISPARSE if hisparse else FULL,
        page_rows=page // ratio,
        num_pages=None if sizes is None else pages(size, rows=page // ratio, logical_rows=page),
        reserved_pages=1,
        tokens_per_row=ratio,
    )


def _plan_indexer(bank: Bank, model: ModelConfig, settings: Settings, sizes: PoolSizes | None, ratio: int) -> None:
    page = settings.page_rows
    fmt, rows, reserved = INDEXER_FP4, settings.index_page_rows, page // ratio // settings.index_page_rows
    num_pages = None
    if ratio == 4:
        fmt, rows, reserved = INDEXER_FP4 if settings.indexer_fp4 else INDEXER_FP8, page // ratio, 1
        if sizes is not None:
            num_pages = pages(sizes.c128_rows * 32, rows=rows, logical_rows=page)
    elif sizes is not None:
        num_pages = pages((sizes.full_tokens + page) // ratio, rows=rows, logical_rows=rows)
    bank.plan(
        "indexer",
        fmt,
        cache=f"c{ratio}_indexer",
        layers=source_layers(model, ratio),
        group=FULL,
        page_rows=rows,
        num_pages=num_pages,
        reserved_pages=reserved,
        tokens_per_row=ratio,
    )


def _plan_state(bank: Bank, model: ModelConfig, settings: Settings, sizes: PoolSizes | None, ratio: int) -> None:
    ring = ring_rows(ratio, draft_tokens=settings.draft_tokens)
    rows = None
    if sizes is not None:
        size = sizes.c4_state_rows if ratio == 4 else sizes.request_slots * ring
        rows = state_rows(size, ring=ring, ratio=ratio)
    # Key and score of a compressor, twice where its windows overlap (ratio 4).
    values = {"": model.head_dim, "_indexer": model.index_head_dim} if ratio == 4 else {"": model.head_dim}
    for suffix, width in values.items():
        bank.plan(
            "compressor_state",
            state_format(width * (4 if ratio == 4 else 2), "float32" if ratio == 2 else settings.state_dtype),
            cache=f"c{ratio}{suffix}_state",
            layers=source_layers(model, ratio),
            group=SWA if ratio == 4 else REQUEST,
            page_rows=ring,
            num_pages=None if rows is None else rows // ring,
            extra_rows=0 if rows is None else rows % ring,
            reserved_pages=1,
            kind=PoolKind.TOKEN_GRANULAR,
        )
