"""Runs in SGLang's interpreter: layouts and views of every pool class that a CPU can build.

    adapter_checks.py MODELS OUT.json      OUT.json: {check: "" or the traceback}

Every check builds SGLang's own pool, reads it through the adapters and touches bytes through both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4IndexerPool,
    DeepSeekV4UnifiedKVPool,
    DeepSeekV4UniformFP8KVPool,
    HiSparseC4DevicePool,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool, MLATokenToKVPoolFP4
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from kvbridge.engine import EngineError
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.capture import capture_pool
from kvbridge.engines.sglang.layouts import read_pool
from kvbridge.engines.sglang.live import declare, live_findings
from kvbridge.engines.sglang.unified import read_unified
from kvbridge.engines.sglang.workarounds import published_arguments
from kvbridge.errors import LayoutError, StaleViewError
from kvbridge.records import get_record
from kvbridge.view import Liveness
from tests.engines.sglang.programs.checks_support import (
    CHECKS,
    FP8,
    check,
    classic,
    run_checks,
    single,
    state,
    views_share_memory,
)

MODELS = Path(sys.argv[1])


@check
def single_pools_of_every_layout() -> None:
    """V4, V41, V41_FP4 and their interleaved forms at 1, 2, 64, 128 and 256 rows."""
    expected = {
        ("v4", 64): (37_376, 37_440),
        ("v4", 256): (149_504, 149_760),
        ("v4", 2): (1_168, 1_728),
        ("v4", 1): (584, 1_152),
        ("v41", 2): (1_056, 1_536),
        ("v41", 64): (33_792, 33_792),
        ("v41_fp4", 2): (576, 768),
        ("v41_fp4", 64): (18_432, 18_432),
        ("v41_new", 2): (1_056, 1_056),
        ("v41_fp4_new", 2): (576, 576),
    }
    for layout in ("v4", "v41", "v41_fp4", "v41_new", "v41_fp4_new"):
        for page in (1, 2, 64, 128, 256):
            caches = read_pool(single(page, layout))
            assert views_share_memory(caches) == 2
            found = caches[0].layout
            if (layout, page) in expected:
                assert (found.payload_bytes, found.page_stride_bytes) == expected[layout, page], (layout, page)
            assert found.padding.alignment, layout


@check
def uniform_and_hisparse_pools() -> None:
    """The uniform pool keeps kv_layout V4 but no V4 pages; HiSparse's C4 pool is a V4 pool."""
    uniform = read_pool(single(64, cls=DeepSeekV4UniformFP8KVPool))
    assert views_share_memory(uniform) == 2
    assert (uniform[0].layout.record, uniform[0].layout.dtype) == ("uniform_fp8", "float8_e4m3fn")
    hisparse = read_pool(single(64, cls=HiSparseC4DevicePool))
    assert views_share_memory(hisparse) == 2
    assert hisparse[0].layout.page_stride_bytes == 37_440


@check
def indexer_pools() -> None:
    """fp8 and fp4 keys at 64 and 128 rows."""
    for fp4, row in ((False, 132), (True, 68)):
        for page in (64, 128):
            pool = DeepSeekV4IndexerPool(1024, page, FP8, 128, 2, "cpu", False, use_fp4_indexer=fp4)
            caches = read_pool(pool)
            assert views_share_memory(caches) == 2
            assert caches[0].layout.payload_bytes == page * row == caches[0].layout.page_stride_bytes


@check
def an_indexer_of_another_head_size_is_refused() -> None:
    """Its rows are no record."""
    pool = DeepSeekV4IndexerPool(1024, 64, FP8, 256, 1, "cpu", False, use_fp4_indexer=False)
    try:
        read_pool(pool)
    except LayoutError as error:
        assert (error.field, error.got, error.expected) == ("get_bytes_per_token", 264, 132)
    else:
        raise AssertionError("accepted")


@check
def compressor_states() -> None:
    """fp32 and bf16 rings, and the online form; the sentinel row lies behind the last page a request owns."""
    for pool, record, pages in (
        (state(4, 8), "state_fp32_2048", 17),
        (state(4, 16), "state_fp32_2048", 17),
        (state(4, 8, head_dim=128), "state_fp32_512", 17),
        (state(128, 128), "state_fp32_1024", 18),
        (state(2, 2), "state_fp32_1024", 18),
        (state(128, 128, dtype=torch.bfloat16), "state_bf16_1024", 18),
        (state(128, 1, online=True), "state_fp32_1536", 18),
    ):
        (cache,) = read_pool(pool)
        assert views_share_memory([cache]) == 1
        assert (cache.layout.record, cache.layout.num_pages, cache.layout.page_rows) == (record, pages, pool.ring_size)
        assert cache.group == ("swa" if pool.ratio == 4 else "request")
        size = pool.kv_score_buffer.kv_score.untyped_storage().nbytes()
        assert declare([cache], version="0.5.23").storages[0].storage_bytes == size


@check
def classic_pools() -> None:
    """bf16, fp8 and fp4 rows; fp4 keeps its scales in a second plane that get_contiguous_buf_infos leaves out."""
    for dtype, record in ((torch.bfloat16, "mla_bf16"), (FP8, "mla_fp8")):
        for page in (1, 32, 64):
            caches = read_pool(classic(MLATokenToKVPool, dtype, page=page))
            assert views_share_memory(caches) == 2
            assert caches[0].layout.record == record
            assert caches[0].layout.num_pages == 1024 // page + 1
    pool = classic(MLATokenToKVPoolFP4, torch.uint8)
    caches = read_pool(pool)
    assert views_share_memory(caches) == 4
    assert [(cache.layout.plane, cache.layout.row_bytes) for cache in caches] == [
        ("values", 288),
        ("values", 288),
        ("scales", 36),
        ("scales", 36),
    ]
    assert len(pool.get_contiguous_buf_infos()[0]) == 2


@check
def sparse_attention_pools() -> None:
    """656-byte rows, bf16 rows, index keys, and layers without an indexer of their own."""
    pool = classic(DSATokenToKVPool, FP8, index_head_dim=128, kv_cache_dim=656)
    caches = read_pool(pool)
    assert views_share_memory(caches) == 4
    assert [cache.layout.record for cache in caches] == ["dsa", "dsa", "indexer_fp8", "indexer_fp8"]
    assert caches[0].layout.payload_bytes == 41_984
    bf16 = classic(DSATokenToKVPool, torch.bfloat16, index_head_dim=128, kv_cache_dim=576)
    assert read_pool(bf16)[0].layout.record == "mla_bf16"
    shared = classic(DSATokenToKVPool, FP8, index_head_dim=128, kv_cache_dim=656, skip_topk_layers=[False, True])
    assert [cache.name for cache in read_pool(shared)] == ["layers.0.kv", "layers.1.kv", "layers.0.index_k"]


@check
def unified_pools() -> None:
    """One tensor holds the window and the compressed rows; fp8 has a second one for RoPE."""
    for fp8, count in ((False, 5), (True, 10)):
        pool = DeepSeekV4UnifiedKVPool(
            stage_ratios=[0, 4, 128],
            num_slots=5,
            num_blocks=16,
            page_size=256,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            device="cpu",
            memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
            custom_mem_pool=None,
            swa_ring_size=128,
            fp8=fp8,
        )
        caches = list(read_unified(pool, ratios=[0, 4, 128]))
        assert views_share_memory(caches) == count
        manifest = declare(caches, version="0.5.23").to_manifest()
        assert len(manifest.storages) == (6 if fp8 else 3)  # window and compressed rows of a layer share a storage
        c4 = manifest.find_pools("c4")[0]
        assert c4.layers[0].offset_bytes == pool.swa_pages * (512 if fp8 else 1024)
        assert c4.storage_of(c4.layers[0]) == ("layers.1.swa.nope" if fp8 else "layers.1.swa")


@check
def unknown_pools_are_refused_by_name() -> None:
    """A class whose pages nobody described is no layout, even where it derives from one that was."""

    class OtherPool(MLATokenToKVPool):
        """May lay its tensors out anew."""

    for pool, name in ((object(), "object"), (classic(OtherPool, torch.bfloat16), "OtherPool")):
        try:
            read_pool(pool)
        except EngineError as error:
            expected = f"pool: got {name}, expected one of ['CompressStatePool', 'DSATokenToKVPool'"
            assert str(error).startswith(expected), error
        else:
            raise AssertionError("accepted")


@check
def views_of_gone_memory_are_told_apart() -> None:
    """Freed as SGLang's memory saver frees, resized, and a pool whose buffers were cleared."""
    pool = single(64)
    views = [cache.view() for cache in read_pool(pool)]
    pool.kv_buffer[0].untyped_storage().resize_(0)
    assert views[0].liveness is Liveness.FREED
    try:
        views[0].require_live()
    except StaleViewError:
        pass
    else:
        raise AssertionError("a freed view passed for a live one")
    pool.kv_buffer[1].untyped_storage().resize_(37_440 * 3)
    assert views[1].liveness is Liveness.RESIZED
    mla = classic(MLATokenToKVPool, torch.bfloat16)
    kept = [cache.view() for cache in read_pool(mla)]
    mla._clear_buffers()
    mla._create_buffers()
    fresh = [cache.view() for cache in read_pool(mla)]
    for old, new in zip(kept, fresh, strict=True):
        assert old is not new
        assert new.liveness is Liveness.LIVE
        assert new.base_address != old.base_address


@check
def the_same_tensor_gives_the_same_view() -> None:
    """Engines bind once a layer."""
    (first, _) = read_pool(single(64))
    assert first.view() is first.view()


@check
def altered_tensors_are_findings_with_numbers() -> None:
    """Width, stride, page count and dtype, each on one layer of a pool."""
    cases = (
        (torch.zeros(20, 37_376, dtype=torch.uint8), "tensor.stride(0)", 37_376, 37_440),
        (torch.zeros(20, 37_440 * 2, dtype=torch.uint8)[:, :37_440], "tensor.stride(0)", 74_880, 37_440),
        (torch.zeros(19, 37_440, dtype=torch.uint8), "num_pages", 19, 20),
        (torch.zeros(20, 33_792, dtype=torch.uint8), "tensor.shape[1] in bytes", 33_792, "37376 or 37440"),
        (torch.zeros(20, 18_720, dtype=torch.float16), "tensor.dtype", "float16", None),
    )
    for tensor, field, got, expected in cases:
        pool = single(64)
        pool.kv_buffer[1] = tensor
        (finding,) = live_findings(read_pool(pool))
        assert finding.field == f"layers.1.kv.{field}", finding
        assert finding.got == got, finding
        assert expected is None or finding.expected == expected, finding


@check
def capture_of_a_folder() -> None:
    """ENGINE.capture runs SGLang's allocator for a model folder."""
    manifest = ENGINE.capture(model=MODELS / "v4", options={})
    assert manifest.origin == "captured"
    assert manifest.options == {"max-total-tokens": 8192, "max-running-requests": 4}
    assert manifest.find_pools("c4")[0].page_stride_bytes == 37_440
    try:
        ENGINE.capture(model=MODELS / "v4", options={"max-total-tokens": 256})
    except EngineError as error:
        assert "SGLang 0.5.23 refused it: ValueError: SWA pool (0 tokens) cannot hold even one request" in str(error)
    else:
        raise AssertionError("accepted")


@check
def capture_of_a_live_pool_needs_no_import_of_its_class() -> None:
    """capture_pool takes whatever object serves."""
    manifest = capture_pool(single(256), model="live").to_manifest()
    assert (manifest.engine.version, manifest.model) == ("0.5.23", "live")
    assert manifest.pools[0].row_bytes == get_record("v4").row_bytes


def main() -> None:
    """Runs every check; capture publishes server arguments of its own."""
    out = Path(sys.argv[2])
    with published_arguments(device="cpu", kv_cache_dtype="auto"):
        run_checks(out, [name for name in CHECKS if name != "capture_of_a_folder"])
    run_checks(out, ["capture_of_a_folder"])


if __name__ == "__main__":
    main()
