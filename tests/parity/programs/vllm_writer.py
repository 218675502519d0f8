"""Runs in vLLM's interpreter: vLLM's CPU writer fills vLLM's own packed cache, kvbridge reads it into a file.

    vllm_writer.py ROWS.safetensors OUT.safetensors

The cache comes from vLLM's specs, grouping and `allocate_kv_cache` for the tiny DeepSeek-V4: pages of all layers in one
slab. RoPE is the identity (cos 1, sin 0), so that K rows arrive as they are.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform

from kvbridge.codec import gather_rows
from kvbridge.engines.vllm.layouts import views_of
from tests.engines.vllm import vllm_allocator
from tests.engines.vllm.vllm_cases import CASES
from tests.parity.parity_rows import make_slots

UNTOUCHED = 0xCD
BLOCKS = 136  # pages of two rows must hold every row


def write(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, page_rows: int) -> None:
    """vLLM's CPU writer."""
    count = len(rows)
    identity = torch.cat([torch.ones(count, 32), torch.zeros(count, 32)], dim=1)
    query = torch.zeros(count, 1, 512, dtype=torch.bfloat16)
    torch.ops._C.fused_qnorm_rope_kv_insert_cpu(
        query, rows, torch.arange(count), cache, slots, identity, 1, 1e-6, page_rows
    )


def decode(data: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """vLLM's CPU decode. Window and compressed pages share the slab, so each has blocks of its own."""
    rows = data["rows"]
    window, extra = (tensors[pool].view(tensors[pool].shape[0], -1) for pool in ("swa", "c4"))
    window_slots, extra_slots = torch.arange(len(rows)) + 64, torch.arange(len(rows)) + 64 * 8
    write(rows, window, window_slots, 64)
    write(rows, extra, extra_slots, 64)

    def live(slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        lanes = torch.arange(slots.shape[1]) < lengths.unsqueeze(1)
        return torch.where(lanes, slots, -1).contiguous()

    out = torch.empty_like(data["q"])
    torch.ops._C.flash_mla_with_kvcache_cpu(
        out,
        data["q"],
        window,
        live(window_slots[data["window_rows"]], data["window_lengths"]),
        64,
        extra,
        live(extra_slots[data["extra_rows"]], data["extra_lengths"]),
        64,
        data["sink"],
        512**-0.5,
    )
    return out


def main() -> None:
    data = load_file(sys.argv[1])
    rows = data["rows"]
    vllm_allocator.pretend_device()
    vllm_allocator.NUM_BLOCKS = BLOCKS
    current_platform.import_kernels()
    allocated = vllm_allocator.allocate(next(case for case in CASES if case.name == "v4-tiny"))
    views = views_of(allocated.kv_caches, allocated.config)
    out: dict[str, torch.Tensor] = {}
    for pool in ("swa", "c4", "c128"):
        name = next(name for name, view in views.items() if view.layout.pool == pool)
        view, tensor = views[name], allocated.kv_caches[name]
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        storage.fill_(UNTOUCHED)
        written = min(len(rows), view.capacity_rows - view.page_rows)
        slots = make_slots(written, capacity=view.capacity_rows, first=view.page_rows)
        write(rows[:written], tensor.view(tensor.shape[0], -1), slots, view.page_rows)
        out[pool] = gather_rows(view, slots)
        for slot in slots.tolist():
            for address, length in view.row_addresses(slot):
                start = address - storage.data_ptr()
                storage[start : start + length] = UNTOUCHED
        assert bool((storage == UNTOUCHED).all()), f"{name}: bytes outside the written rows were touched"
        print(f"{pool}: {written} rows, pages {view.page_stride_bytes} bytes apart")
    names = {view.layout.pool: name for name, view in views.items()}
    out["decode"] = decode(data, {pool: allocated.kv_caches[names[pool]] for pool in ("swa", "c4")})
    save_file(out, sys.argv[2])


if __name__ == "__main__":
    main()
