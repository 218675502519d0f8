"""Pools of SGLang's classic MLA and sparse-attention models.

    kv       [size + page, 1, 576] bf16 or uint8, [size + page, 1, 656] for dsa     one tensor row per slot
    kv fp4   [size + page, 1, 288] values and [size + page, 36] scales              two tensors per layer
    index_k  [pages, 8448]: 64 keys of 128 e4m3, then 64 fp32 scales                layers with an indexer

The page with slot 0 takes dummy writes. Source: SGLang 0.5.23 mem_cache/memory_pool.py (MLATokenToKVPool,
MLATokenToKVPoolFP4, DSATokenToKVPool), mem_cache/index_key_cache.py.
"""

from __future__ import annotations

from kvbridge.engines.sglang.formats import INDEXER_FP8, PageFormat
from kvbridge.engines.sglang.naming import FULL, Bank
from kvbridge.engines.sglang.options import Settings
from kvbridge.engines.sglang.sizes import PoolSizes, index_layers_of
from kvbridge.layout import PoolKind
from kvbridge.models import Family, ModelConfig
from kvbridge.records import get_record


def plan_classic(model: ModelConfig, settings: Settings, sizes: PoolSizes | None) -> Bank:
    """All pools of one classic MLA or sparse-attention worker.

    Args:
        model: The model.
        settings: Resolved options.
        sizes: Pool sizes; None leaves page counts open.
    """
    bank = Bank()
    record = get_record(settings.classic_record)
    page = settings.page_rows
    for plane in record.planes:
        bank.plan(
            "dsa" if model.family is Family.DSA else "mla",
            PageFormat(record.name, dtype="bfloat16" if record.name == "mla_bf16" else "uint8"),
            cache=f"kv.{plane}" if plane else "kv",
            layers=range(model.num_layers),
            group=FULL,
            page_rows=page,
            num_pages=None if sizes is None else sizes.full_tokens // page + 1,
            plane=plane or None,
            reserved_pages=1,
            kind=PoolKind.TOKEN_GRANULAR,
        )
    bank.plan(
        "indexer",
        INDEXER_FP8,
        cache="index_k",
        layers=index_layers_of(model),
        group=FULL,
        page_rows=page,
        num_pages=None if sizes is None else (sizes.full_tokens + page + 1) // page,
        reserved_pages=1,
    )
    return bank
