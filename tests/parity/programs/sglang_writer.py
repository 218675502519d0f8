"""Runs in SGLang's interpreter: SGLang's writers fill SGLang's pools, kvbridge reads them, the bytes go to a file.

    sglang_writer.py ROWS.safetensors OUT.safetensors

V4 rows pass through SGLang's Triton quantiser (twice: with the floor of its production kernel, 1e-4 in store.cuh, and
with the 1e-8 of the test helper) and its Triton writer `set_key_buffer`. V4.1 rows come from SGLang's torch references,
whose writers are CUDA only. Uniform, classic and sparse-attention rows go through the pools' own setters.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.kernels.ops.attention.flash_mla_sm120 import _sm120_sparse_decode_fwd
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4IndexerPool,
    DeepSeekV4SingleKVPool,
    DeepSeekV4UniformFP8KVPool,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from sglang.test.kernels.deepseek_v4 import k_cache_reference as v4_reference
from sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference import (
    dequantize_k_cache_v41,
    dequantize_k_cache_v41_fp4,
    interleave_pages,
    quantize_k_cache_v41,
    quantize_k_cache_v41_fp4,
)

from kvbridge.codec import gather_rows
from kvbridge.engines.sglang.layouts import read_pool
from kvbridge.engines.sglang.triton_casts import exact_casts
from kvbridge.engines.sglang.workarounds import published_arguments
from tests.parity.parity_rows import make_slots

FP8 = torch.float8_e4m3fn
PRODUCTION_FLOOR = 1e-4


def quantise_v4(rows: torch.Tensor, floor: float) -> v4_reference.NopeFp8RopeBf16Pack:
    """SGLang's quantising kernel as its helper launches it, with the floor to choose."""
    count = len(rows)
    pack = v4_reference.NopeFp8RopeBf16Pack(
        k_nope_fp8=torch.empty((count, 448), dtype=FP8),
        k_rope_bf16=torch.empty((count, 64), dtype=torch.bfloat16),
        scale_k_nope_ue8m0=torch.empty((count, 7), dtype=torch.uint8),
    )
    outputs = (pack.k_nope_fp8, pack.k_rope_bf16, pack.scale_k_nope_ue8m0)
    v4_reference._quant_k_cache_fused_kernel[(count, 8)](
        rows,
        *outputs,
        rows.stride(0),
        *(output.stride(0) for output in outputs),
        DIM_NOPE=448,
        DIM_ROPE=64,
        TILE_SIZE=64,
        NUM_TILES=7,
        FP8_MIN=-448.0,
        FP8_MAX=448.0,
        EPS=floor,
    )
    return pack


def write_v4(rows: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """SGLang's quantiser, writer and reader on pages of 256, 64 and 2 rows."""
    helper = v4_reference.quant_to_nope_fp8_rope_bf16_pack_triton(rows)
    written = quantise_v4(rows, PRODUCTION_FLOOR)
    for page_rows in (256, 64, 2):
        packs = {"v4": written, "v4-helper": helper} if page_rows == 64 else {"v4": written}
        for name, pack in packs.items():
            pool = DeepSeekV4SingleKVPool(1024, page_rows, FP8, 448, 64, 1, "cpu", False, global_page_size=256)
            slots = make_slots(len(rows), capacity=1024, first=page_rows)
            pool.set_key_buffer(0, slots, pack)
            (cache,) = read_pool(pool)
            view = cache.view()
            out[f"{name}.{page_rows}"] = gather_rows(view, slots)
            decoded = v4_reference.dequantize_k_cache_paged_ref(pool.get_key_buffer(0), slots, page_rows)
            out[f"{name}.{page_rows}.decoded"] = decoded[:, 0].contiguous()
            tails = pool.kv_buffer[0][:, cache.layout.payload_bytes :]
            assert not bool(tails.any()), "the tail pad was written"


def decode_v4(data: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
    """SGLang's torch decode of its SM120 path, from a window pool of 256 rows a page and a C4 pool of 64."""
    pack = quantise_v4(data["rows"], PRODUCTION_FLOOR)
    caches = []
    for page_rows in (256, 64):
        pool = DeepSeekV4SingleKVPool(1024, page_rows, FP8, 448, 64, 1, "cpu", False, global_page_size=256)
        slots = make_slots(len(data["rows"]), capacity=1024, first=page_rows)
        pool.set_key_buffer(0, slots, pack)
        pages = pool.get_key_buffer(0)
        caches.append((pages[:, : page_rows * 584].view(pages.shape[0], page_rows, 1, 584), slots.int()))
    (window, window_slots), (extra, extra_slots) = caches
    result, _ = _sm120_sparse_decode_fwd(
        data["q"].unsqueeze(1),
        window,
        window_slots[data["window_rows"]].unsqueeze(1),
        data["window_lengths"],
        data["sink"],
        512,
        512**-0.5,
        extra,
        extra_slots[data["extra_rows"]].unsqueeze(1),
        data["extra_lengths"],
    )
    out["decode"] = result.squeeze(1).contiguous()


def write_v41(rows: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """SGLang's torch references of V4.1 pages, laid into SGLang's own pools, split and interleaved."""
    forms = {
        "v41": (quantize_k_cache_v41, dequantize_k_cache_v41, 512, 16),
        "v41_fp4": (quantize_k_cache_v41_fp4, dequantize_k_cache_v41_fp4, 256, 32),
    }
    for name, (quantise, dequantise, data, scales) in forms.items():
        pages = quantise(rows.view(len(rows) // 64, 64, 512))
        out[f"{name}.decoded"] = dequantise(pages, 64).reshape(len(rows), 512)
        for layout in (name, f"{name}_new"):
            pool = DeepSeekV4SingleKVPool(
                len(rows), 64, FP8, 448, 64, 1, "cpu", False, kv_layout=layout, global_page_size=64
            )
            buffer = pool.kv_buffer[0][1 : 1 + len(pages)]
            buffer[:] = pages if layout == name else interleave_pages(pages, 64, data, scales)
            (cache,) = read_pool(pool)
            out[layout] = gather_rows(cache.view(), torch.arange(len(rows)) + 64)


def write_uniform(rows: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """The uniform pool's own setter; its scale is 1."""
    pool = DeepSeekV4UniformFP8KVPool(1024, 64, FP8, 448, 64, 1, "cpu", False, global_page_size=256)
    slots = make_slots(len(rows), capacity=1024, first=64)
    pool.set_key_buffer_fused(0, slots, rows)
    (cache,) = read_pool(pool)
    out["uniform_fp8"] = gather_rows(cache.view(), slots)


class Layer:
    """What the setters read of an attention layer."""

    layer_id = 0


def write_classic(rows: torch.Tensor, rope: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """set_mla_kv_buffer of the classic and the sparse-attention pools."""
    arguments: dict[str, Any] = {
        "size": 1024,
        "page_size": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "layer_num": 1,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    slots = make_slots(len(rows), capacity=1024, first=64)
    pools = {
        "mla_bf16": MLATokenToKVPool(dtype=torch.bfloat16, **arguments),
        "mla_fp8": MLATokenToKVPool(dtype=FP8, **arguments),
        "dsa": DSATokenToKVPool(dtype=FP8, index_head_dim=128, kv_cache_dim=656, **arguments),
    }
    for name, pool in pools.items():
        pool.set_mla_kv_buffer(Layer(), slots, rows.unsqueeze(1), rope.unsqueeze(1))
        out[name] = gather_rows(read_pool(pool)[0].view(), slots)


def write_index_keys(keys: torch.Tensor, scales: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """Index keys, quantised outside, through SGLang's writer of index pages."""
    pool = DeepSeekV4IndexerPool(1024, 64, FP8, 128, 1, "cpu", False, use_fp4_indexer=False)
    slots = make_slots(len(keys), capacity=1024, first=64)
    pool.set_index_k_scale_buffer(0, slots, keys.view(FP8), scales)
    (cache,) = read_pool(pool)
    out["indexer_fp8"] = gather_rows(cache.view(), slots)


def main() -> None:
    data = load_file(sys.argv[1])
    out: dict[str, torch.Tensor] = {}
    arguments = published_arguments(device="cpu", kv_cache_dtype="auto")
    with exact_casts(), arguments, get_parallel().override(attn_dcp_rank=0):
        write_v4(data["rows"], out)
        decode_v4(data, out)
        write_v41(data["rows"], out)
        write_uniform(data["rows"], out)
        write_classic(data["rows"], data["rope"], out)
        write_index_keys(data["index_keys"], data["index_scales"], out)
    save_file(out, sys.argv[2])


if __name__ == "__main__":
    main()
