"""Runs in SGLang's interpreter: rows of one sequence are written into SGLang's own pool by SGLang's own writer.

    sglang_places.py MODEL ROWS.safetensors OUT.safetensors

    ROWS: "3.c4" uint8 [rows, 584], ...    OUT: "3.c4" the pool's tensor, its layout as JSON in the file's metadata

The sequence has token slots 256, 257, ...: page 1 on, page 0 is SGLang's dummy. A compressed row lies at token slot //
ratio, in SGLang's own arithmetic. SGLang has no CPU writer for index rows; those are copied row by row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.test.kernels.deepseek_v4 import k_cache_reference as v4_reference

from kvbridge.codec import gather_rows, scatter_rows
from kvbridge.engine import resolve_options
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.build import built_pool
from kvbridge.engines.sglang.layouts import read_pool
from kvbridge.engines.sglang.options import resolve_settings
from kvbridge.engines.sglang.plan import UNLIMITED_BYTES
from kvbridge.models import load_model

FIRST_TOKEN_SLOT = 256
RATIOS = {"swa": 1, "c4": 4, "c128": 128, "c4_indexer": 4}


def main(model: Path, rows_file: str, out_file: str) -> None:
    options = resolve_options(ENGINE, {"max-total-tokens": 16384, "max-running-requests": 2})
    settings = resolve_settings(load_model(model), options)
    rows = load_file(rows_file)
    with built_pool(model, settings=settings, options=options, budget_bytes=UNLIMITED_BYTES) as pool:
        caches = {cache.name: cache for cache in read_pool(pool)}
        out: dict[str, torch.Tensor] = {}
        layouts: dict[str, Any] = {}
        for name, values in rows.items():
            layer, kind = name.split(".")
            cache = caches[f"layers.{layer}.{kind}"]
            slots = torch.arange(len(values)) + FIRST_TOKEN_SLOT // RATIOS[kind]
            view = cache.view()
            if kind == "c4_indexer":
                scatter_rows(view, slots, values)
            else:
                paged = pool.swa_kv_pool if kind == "swa" else pool.kv_pools[RATIOS[kind]]
                index = [c.name for c in caches.values() if c.name.endswith(f".{kind}")].index(cache.name)
                paged.set_key_buffer(index, slots, as_pack(values))
            written = gather_rows(view, slots)
            assert torch.equal(written[:, :583], values[:, :583]) or kind == "c4_indexer", name
            out[name] = view.pages.as_strided((view.num_pages, view.page_stride_bytes), (view.page_stride_bytes, 1))
            layouts[name] = {
                "record": cache.layout.record,
                "page_rows": cache.layout.page_rows,
                "tokens_per_row": cache.layout.tokens_per_row,
                "policy": cache.layout.padding.policy.value,
                "alignment": cache.layout.padding.alignment,
                "page_stride_bytes": cache.layout.page_stride_bytes,
                "first_slot": int(slots[0]),
            }
        save_file({name: tensor.clone() for name, tensor in out.items()}, out_file, {"layouts": json.dumps(layouts)})


def as_pack(rows: torch.Tensor) -> Any:
    """Rows of 584 bytes as the three tensors that SGLang's writer takes."""
    return v4_reference.NopeFp8RopeBf16Pack(
        k_nope_fp8=rows[:, :448].contiguous().view(torch.float8_e4m3fn),
        k_rope_bf16=rows[:, 448:576].contiguous().view(torch.bfloat16),
        scale_k_nope_ue8m0=rows[:, 576:583].contiguous(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
