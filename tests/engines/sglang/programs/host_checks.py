"""Runs in SGLang's interpreter: layouts and views of HiCache's host pools.

host_checks.py OUT.json      OUT.json: {check: "" or the traceback}
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvbridge.engines.sglang.host_pools import read_host_pool
from kvbridge.engines.sglang.layouts import read_pool
from kvbridge.engines.sglang.live import declare, live_findings
from kvbridge.engines.sglang.workarounds import published_arguments
from kvbridge.errors import KVBridgeError
from tests.engines.sglang.programs.checks_support import (
    FP8,
    check,
    classic,
    run_checks,
    single,
    state,
    views_share_memory,
)


@check
def paged_host_pools() -> None:
    """layer_first is padded pages; page_first and page_first_direct are slabs of all layers."""
    device = single(64)
    caches = read_pool(device)
    for layout, policy, stride in (
        ("layer_first", "aligned", 37_440),
        ("page_first", "packed", 74_880),
        ("page_first_direct", "packed", 74_880),
    ):
        host = DeepSeekV4PagedHostPool("c4", device.kv_buffer, 37_440, 8, 64, layout=layout, pin_memory=False)
        mirrored = list(read_host_pool(host, caches))
        assert views_share_memory(mirrored) == 2
        assert [cache.layout.padding.policy for cache in mirrored] == [policy] * 2
        assert mirrored[1].layout.page_stride_bytes == stride
        assert live_findings(mirrored) == ()
        pool = declare(mirrored, version="0.5.23").pools[0]
        offsets = [layer.offset_bytes for layer in pool.layers]
        assert offsets == ([0, 0] if layout == "layer_first" else [0, 37_440])


@check
def state_host_pools() -> None:
    """A ring of compressor state is an item; the sentinel row stays on the device."""
    pools = [state(4, 8), state(4, 8)]
    caches = [cache for pool in pools for cache in read_pool(pool)]
    for layout in ("layer_first", "page_first", "page_first_direct"):
        host = DeepSeekV4StateHostPool("c4_state", pools, 6, 256, layout=layout, pin_memory=False)
        mirrored = list(read_host_pool(host, caches))
        assert views_share_memory(mirrored) == 2
        stride = 65_536 if layout == "layer_first" else 131_072
        assert [cache.layout.page_stride_bytes for cache in mirrored] == [stride] * 2
        assert mirrored[0].layout.record == "state_fp32_2048"


@check
def index_key_host_pools() -> None:
    """Indexer keys of sparse attention, page by page, beside the rows' host pool."""
    device = classic(DSATokenToKVPool, FP8, index_head_dim=128, kv_cache_dim=656)
    caches = read_pool(device)
    keys = [cache for cache in caches if cache.layout.pool == "indexer"]
    for layout in ("layer_first", "page_first", "page_first_direct"):
        anchor = classic_host(device, layout)
        host = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor, pin_memory=False)
        mirrored = list(read_host_pool(host, keys))
        assert views_share_memory(mirrored) == 2
        assert mirrored[1].layout.payload_bytes == 8_448
        assert mirrored[1].layout.page_stride_bytes == (8_448 if layout == "layer_first" else 16_896)
        rows = list(read_host_pool(anchor, [cache for cache in caches if cache.layout.pool == "dsa"]))
        assert views_share_memory(rows) == 2
        assert rows[0].layout.record == "dsa"


def classic_host(device: Any, layout: str) -> Any:
    """The host pool of a classic or sparse-attention pool of two layers."""
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        2.0,
        0,
        64,
        layout,
        pin_memory=False,
        override_kv_cache_dim=device.kv_cache_dim,
        device_capacity_tokens=1024,
        start_layer=0,
        end_layer=2,
        target_layer_num=2,
    )


@check
def classic_host_pools() -> None:
    """page_first keeps one row of every layer together, so its pages are single rows."""
    device = classic(MLATokenToKVPool, torch.bfloat16)
    caches = read_pool(device)
    for layout, page_rows, stride in (
        ("layer_first", 64, 73_728),
        ("page_first", 1, 2_304),
        ("page_first_direct", 64, 147_456),
    ):
        host = classic_host(device, layout)
        mirrored = list(read_host_pool(host, caches))
        assert views_share_memory(mirrored) == 2
        found = mirrored[1].layout
        assert (found.page_rows, found.page_stride_bytes) == (page_rows, stride), layout


@check
def the_logical_host_pool_is_index_only() -> None:
    """HiCache's anchor hands out slots and owns no byte."""
    (cache,) = read_pool(LogicalHostPool(1024, 256))
    assert (cache.layout.kind, cache.layout.payload_bytes, cache.layout.num_pages) == ("index_only", 0, 4)
    try:
        cache.view()
    except KVBridgeError as error:
        assert "got an index-only pool, expected a pool with a tensor" in str(error)
    else:
        raise AssertionError("an index-only pool gave a view")


def main() -> None:
    """Runs every check."""
    with published_arguments(device="cpu", kv_cache_dtype="auto"):
        run_checks(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
