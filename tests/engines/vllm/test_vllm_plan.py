"""The planner without vLLM: published numbers, options and their refusals, versions, memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from kvbridge.audit import audit_manifest
from kvbridge.engine import EngineError, OptionValue, PlanRequest, load_engine
from kvbridge.manifest import Manifest, Pool
from kvbridge.models import ModelConfig, load_model, model_names
from kvbridge.rule import Severity


def plan(
    model: str | ModelConfig = "deepseek-v4-flash",
    version: str = "0.33.0",
    memory_bytes: int | None = None,
    **options: OptionValue,
) -> Manifest:
    config = load_model(model) if isinstance(model, str) else model
    names = {name.replace("_", "-"): value for name, value in options.items()}
    return load_engine("vllm").plan(PlanRequest(config, version, names, memory_bytes))


def only(manifest: Manifest, pool: str, record: str | None = None) -> Pool:
    (found,) = [entry for entry in manifest.find_pools(pool) if record in (None, entry.record)]
    return found


def test_v4_flash_slab_and_offsets() -> None:
    manifest = plan()
    assert {pool.page_stride_bytes for pool in manifest.pools} == {1_002_240}
    c4 = only(manifest, "c4")
    assert (c4.payload_bytes, c4.page_bytes, c4.layers[0].offset_bytes) == (37_376, 37_440, 181_440)
    assert [layer.offset_bytes for layer in c4.layers] == [181_440 + 37_440 * index for index in range(21)]
    indexer = only(manifest, "indexer")
    assert (indexer.payload_bytes, indexer.page_bytes) == (8_448, 8_640)
    c128 = only(manifest, "c128")
    assert (c128.page_rows, c128.payload_bytes, c128.page_bytes) == (2, 1_168, 1_728)
    assert [(pool.group, len(pool.layers)) for pool in manifest.find_pools("swa")] == [("0", 22), ("1", 21)]
    assert [pool.record for pool in manifest.find_pools("compressor_state")] == [
        "state_fp32_512",
        "state_fp32_2048",
        "state_fp32_1024",
    ]
    assert all(pool.reserved_pages == 1 for pool in manifest.pools)


@pytest.mark.parametrize(
    ("model", "options", "slab_bytes"),
    [
        ("deepseek-v4-pro", {}, 1_435_968),
        ("deepseek-v4-flash", {"indexer_kv_dtype": "mxfp4"}, 917_568),
        ("deepseek-v4-flash", {"kv_cache_dtype": "bfloat16"}, 1_600_000),
    ],
)
def test_published_slabs(model: str, options: dict[str, str], slab_bytes: int) -> None:
    assert {pool.page_stride_bytes for pool in plan(model, **options).pools} == {slab_bytes}


def test_v41_pages_have_no_padding_at_64_rows() -> None:
    fp8, fp4 = plan("deepseek-v4.1-flash", kv_cache_dtype="fp8_ds_mla"), plan("deepseek-v4.1-flash")
    for manifest, record, page_bytes in ((fp8, "v41_interleaved", 33_792), (fp4, "v41_fp4_interleaved", 18_432)):
        c2 = only(manifest, "c2")
        assert (c2.record, c2.page_rows, c2.payload_bytes, c2.page_bytes) == (record, 64, page_bytes, page_bytes)
    assert only(fp4, "c1").page_rows == 128
    assert {pool.record for pool in fp4.find_pools("swa")} == {"v41_interleaved"}
    # Compressed rows and index keys are stored on the four source layers only.
    assert sum(len(pool.layers) for pool in fp4.pools if pool.pool in ("c1", "c2")) == 4
    assert sum(len(pool.layers) for pool in fp4.find_pools("indexer")) == 4


def test_v41_records_are_split_until_032() -> None:
    assert only(plan("deepseek-v4.1-flash", "0.32.0"), "c2").record == "v41_fp4"
    assert only(plan("deepseek-v4.1-flash", arch="sm90"), "c2").record == "v4"


def test_glm_shares_indexers() -> None:
    manifest = plan("glm-5.2", kv_cache_dtype="fp8_ds_mla")
    assert sum(len(pool.layers) for pool in manifest.find_pools("dsa")) == 78
    assert len(only(manifest, "indexer").layers) == 21
    drafting = plan("glm-5.2", kv_cache_dtype="fp8_ds_mla", speculative_tokens=1)
    assert sum(len(pool.layers) for pool in drafting.find_pools("dsa")) == 79
    assert len(only(drafting, "indexer").layers) == 22
    per_token = sum(
        len(pool.layers) * pool.payload_bytes // pool.page_rows for pool in drafting.pools if pool.tokens_per_row == 1
    )
    assert per_token == 54_728


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
@pytest.mark.parametrize("model", model_names())
def test_every_built_in_model_is_consistent(model: str, arch: str, version: str) -> None:
    options: dict[str, OptionValue] = {"arch": arch, "kv_cache_dtype": "fp8"}
    manifest = plan(model, version, 200 << 30, **options)
    assert not [entry for entry in audit_manifest(manifest) if entry.severity is Severity.ERROR]
    assert manifest.memory is not None
    assert manifest.total_bytes == manifest.memory.used_bytes
    assert len({layer.name for pool in manifest.pools for layer in pool.layers}) == sum(
        len(pool.layers) for pool in manifest.pools
    )


def test_memory_says_how_much_fits_and_why() -> None:
    memory = plan(memory_bytes=100 << 30).memory
    assert memory is not None
    assert (memory.num_blocks, memory.used_bytes) == (107_134, 107_134 * 1_002_240)
    assert memory.reason == (
        "107134 blocks (107374182400 // 1002240 bytes a block); a sequence of 1048576 tokens takes 10778 of them "
        "(group 0 swa 259, group 1 swa 259, group 2 indexer+c4+c128 4096, group 3 compressor_state 4099, "
        "group 4 compressor_state 2065); 107134 / 10778 * 1048576 = 10422911 tokens"
    )


def test_a_budget_too_small_to_start_is_said() -> None:
    (note,) = plan(memory_bytes=1 << 30).notes
    assert note == (
        "vLLM refuses to start: one sequence of 1048576 tokens needs 10778 blocks besides the null block, 1071 fit; "
        "the longest max-model-len that fits is 2592"
    )
    with pytest.raises(EngineError, match="memory: got 1000 bytes, expected at least 1002240: one block of all layers"):
        plan(memory_bytes=1000)


def test_the_longest_length_that_fits_does_fit() -> None:
    assert plan(memory_bytes=1 << 30, max_model_len=2592).notes == ()
    assert plan(memory_bytes=1 << 30, max_model_len=2593).notes


def test_without_a_budget_offsets_of_packed_blocks_are_known_and_others_planned_for_one_sequence() -> None:
    assert plan().storages[0].storage_bytes is None
    classic = plan("deepseek-v3.2", kv_cache_dtype="fp8_ds_mla")
    assert {pool.num_pages for pool in classic.pools} == {2_561}
    assert classic.notes == (
        "offsets depend on the number of blocks; planned with 2561, the fewest that hold one sequence of 163840 tokens",
    )


@pytest.mark.parametrize(
    ("version", "rules"),
    [("0.31.2", "0.32.0"), ("0.34.0", "0.33.0"), ("1.0.0", "0.33.0"), ("0.20", "0.32.0")],
)
def test_unknown_versions_use_the_nearest_rules(version: str, rules: str) -> None:
    manifest = plan("deepseek-v4.1-flash", version)
    assert manifest.engine.version == version
    assert f"vLLM {version} is not known here; planned with the rules of {rules}" in manifest.notes
    assert manifest.pools == plan("deepseek-v4.1-flash", rules).pools


def test_local_versions_are_known() -> None:
    assert plan(version="0.32.0+cpu").notes == ()
    with pytest.raises(EngineError, match=r"engine version: got 'latest', expected digits such as 0\.33\.0"):
        plan(version="latest")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("deepseek-v4-flash", {"block_size": 100}, "option block-size: got 100, expected a multiple of 256"),
        ("deepseek-v4-flash", {"kv_cache_dtype": "nvfp4_ds_mla"}, "got nvfp4_ds_mla, expected fp8"),
        ("deepseek-v4-flash", {"kv_cache_dtype": "bfloat16", "arch": "sm90"}, "got bfloat16, expected fp8: flashmla"),
        ("deepseek-v4-flash", {"kv_cache_dtype": "int8"}, "option kv-cache-dtype: got 'int8', expected one of"),
        ("deepseek-v4-flash", {"decode_context_parallel_size": 2}, "got 2, expected 1: vLLM refuses to split"),
        ("deepseek-v4-flash", {"attention_backend": "flashmla_mega_attn"}, "expected flashmla: it serves V4.1"),
        ("deepseek-v4.1-flash", {"arch": "cpu"}, "vLLM has no DeepSeek-V4.1 for CPUs"),
        ("deepseek-v4.1-flash", {"attention_backend": "flashinfer", "kv_cache_dtype": "nvfp4_ds_mla"}, "plain rows"),
        ("deepseek-v3", {"kv_cache_dtype": "fp8_ds_mla"}, "expected auto, bfloat16 or fp8 for dense attention"),
        ("deepseek-v3.2", {"kv_cache_dtype": "nvfp4_ds_mla", "arch": "sm90"}, "FlashMLA on sm100 alone reads it"),
        ("deepseek-v3.2", {"speculative_tokens": -1}, "got -1, expected an integer of at least 0"),
        ("deepseek-v3", {"page_size": 64}, "option page-size: got an unknown option of vllm"),
    ],
)
def test_refusals_name_option_got_and_expected(model: str, options: dict[str, OptionValue], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        plan(model, **options)


def test_schedules_that_vllm_cannot_lay_out_are_refused() -> None:
    flash = load_model("deepseek-v4-flash")
    with pytest.raises(EngineError, match="vLLM refuses such a model"):
        plan(replace(flash, num_layers=2, compress_ratios=(0, 128)))
    with pytest.raises(EngineError, match=r"compress_ratios\[1\]: got 2, expected 0, 1, 4 or 128"):
        plan(replace(flash, num_layers=2, compress_ratios=(4, 2)))


def test_pipeline_stages_hold_their_own_layers_and_as_many_blocks_as_the_largest_can() -> None:
    sizes: dict[str, OptionValue] = {"pipeline_parallel_size": 4}
    stages = [plan(memory_bytes=40 << 30, **sizes, pipeline_parallel_rank=rank) for rank in range(4)]
    slabs = [stage.pools[0].page_stride_bytes for stage in stages]
    assert len(set(slabs)) > 1
    assert {stage.memory.num_blocks for stage in stages if stage.memory} == {(40 << 30) // max(slabs)}
    names = [layer.name for stage in stages for pool in stage.pools for layer in pool.layers]
    assert len(names) == len(set(names)) == sum(len(pool.layers) for pool in plan().pools)
    assert [stage.rank.pipeline_parallel_rank for stage in stages] == [0, 1, 2, 3]
    smallest = stages[slabs.index(min(slabs))].memory
    assert smallest is not None
    assert f"{max(slabs)} bytes a block on the rank with most; {min(slabs)} here" in smallest.reason


def test_pipelines_that_vllm_cannot_split_are_refused() -> None:
    with pytest.raises(EngineError, match="with its source; vLLM refuses to split layers that share compressed rows"):
        plan("deepseek-v4.1-flash", pipeline_parallel_size=5, pipeline_parallel_rank=2)
    with pytest.raises(EngineError, match="got rank 2 of 2, expected rank < size <= 43 layers"):
        plan(pipeline_parallel_size=2, pipeline_parallel_rank=2)
    with pytest.raises(EngineError, match=r"rank 0 has layers 0 \.\. 0, and none of some group"):
        plan(pipeline_parallel_size=43)


def test_context_parallel_ranks_share_a_sequence() -> None:
    one = plan("deepseek-v3", memory_bytes=40 << 30).memory
    two = plan("deepseek-v3", memory_bytes=40 << 30, decode_context_parallel_size=2).memory
    assert one is not None
    assert two is not None
    assert (two.num_blocks, two.tokens) == (one.num_blocks, 2 * one.tokens)


def test_planning_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys\n"
        "from kvbridge.engine import PlanRequest, load_engine\n"
        "from kvbridge.models import load_model\n"
        "load_engine('vllm').plan(PlanRequest(load_model('deepseek-v4-flash'), '0.33.0'))\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
