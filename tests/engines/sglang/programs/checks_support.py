"""What the adapter checks share: registration, SGLang's pools, and the proof that a view copies nothing."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool

from kvbridge.engines.sglang.live import LiveCache
from kvbridge.view import Liveness

FP8 = torch.float8_e4m3fn
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a check under its name."""
    CHECKS[function.__name__] = function
    return function


def run_checks(out: Path, names: Iterable[str] = ()) -> None:
    """Runs the registered checks, or some of them, and adds {check: "" or its traceback} to a file."""
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in names or CHECKS:
        try:
            CHECKS[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    out.write_text(json.dumps(results))


def views_share_memory(caches: Iterable[LiveCache]) -> int:
    """Every view lies in the pool's storage and shows what is written through the pool's tensor; returns the count."""
    count = 0
    for cache in caches:
        if cache.tensor is None:
            continue
        view = cache.view()
        assert view.pages.untyped_storage().data_ptr() == cache.tensor.untyped_storage().data_ptr(), cache.name
        assert view.base_address == cache.tensor.data_ptr(), cache.name
        assert view.liveness is Liveness.LIVE
        page = view.num_pages - 1
        view.pages[page].fill_(0x5A)
        raw = torch.empty(0, dtype=torch.uint8).set_(cache.tensor.untyped_storage())
        for slot in (page * view.page_rows, view.capacity_rows - 1):
            for address, length in view.row_addresses(slot):
                start = address - cache.tensor.untyped_storage().data_ptr()
                assert bool((raw[start : start + length] == 0x5A).all()), (cache.name, slot)
        view.pages[page].zero_()
        count += 1
    return count


def single(page: int, layout: str = "v4", cls: type = DeepSeekV4SingleKVPool) -> Any:
    """One paged pool of 1,024 rows and two layers."""
    return cls(1024, page, FP8, 448, 64, 2, "cpu", False, kv_layout=layout, global_page_size=256)


def state(ratio: int, ring: int, **fields: Any) -> Any:
    """A compressor's state for 16 rings."""
    defaults = {"overlap": ratio == 4, "head_dim": 512, "dtype": torch.float32, "request_scoped": ratio != 4}
    return CompressStatePool(
        size=16 * ring, ring_size=ring, device="cpu", enable_memory_saver=False, ratio=ratio, **(defaults | fields)
    )


def classic(cls: type, dtype: torch.dtype, *, page: int = 64, **fields: Any) -> Any:
    """A classic pool of 1,024 slots and two layers."""
    return cls(
        size=1024,
        page_size=page,
        dtype=dtype,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        **fields,
    )
