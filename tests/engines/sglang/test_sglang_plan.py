"""The planner's numbers, defaults and refusals; needs neither SGLang nor torch."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from kvbridge.engine import Engine, EngineError, PlanRequest, load_engine
from kvbridge.engines.sglang import ENGINE
from kvbridge.manifest import Manifest
from kvbridge.models import ModelConfig, load_model, model_names


def plan(
    model: str, options: dict[str, Any] | None = None, *, memory: int | None = None, version: str = "0.5.23"
) -> Manifest:
    return ENGINE.plan(PlanRequest(load_model(model), version, options or {}, memory))


def page(manifest: Manifest, pool: str, record: str = "") -> tuple[int, int, int, int, int]:
    """page_rows, tokens_per_row, payload, stride, layers of the pool (of that record)."""
    found = [entry for entry in manifest.find_pools(pool) if entry.record.startswith(record)]
    assert len(found) == 1, found
    entry = found[0]
    return entry.page_rows, entry.tokens_per_row, entry.payload_bytes, entry.page_stride_bytes, len(entry.layers)


def test_engine_is_registered_and_complete() -> None:
    engine = load_engine("sglang")
    assert engine is ENGINE
    assert isinstance(engine, Engine)
    assert engine.versions[-1] == "0.5.23"


@pytest.mark.parametrize("model", model_names())
def test_every_built_in_model_is_planned(model: str) -> None:
    manifest = plan(model)
    assert manifest.origin == "planned"
    assert all(pool.num_pages is None for pool in manifest.pools)
    assert all(storage.storage_bytes is None for storage in manifest.storages)
    names = [layer.name for pool in manifest.pools for layer in pool.layers]
    assert len(names) == len(set(names)) == len(manifest.storages)


def test_deepseek_v4_flash() -> None:
    manifest = plan("deepseek-v4-flash")
    assert page(manifest, "swa") == (256, 1, 149_504, 149_760, 43)
    assert page(manifest, "c4") == (64, 4, 37_376, 37_440, 21)
    assert page(manifest, "c128") == (2, 128, 1_168, 1_728, 20)
    assert page(manifest, "indexer") == (64, 4, 8_448, 8_448, 21)
    assert page(manifest, "compressor_state", "state_fp32_2048") == (8, 1, 65_536, 65_536, 21)
    assert page(manifest, "compressor_state", "state_fp32_512") == (8, 1, 16_384, 16_384, 21)
    assert page(manifest, "compressor_state", "state_fp32_1024") == (128, 1, 524_288, 524_288, 20)
    (swa,) = manifest.find_pools("swa")
    assert (swa.padding.policy, swa.padding.alignment, swa.tail_pad_bytes) == ("aligned", 576, 256)
    (c128,) = manifest.find_pools("c128")
    assert round(100 * c128.waste_bytes / c128.page_bytes, 1) == 32.4
    (full,) = manifest.find_pools("full")
    assert (full.kind, full.payload_bytes, full.layers) == ("index_only", 0, ())


def test_deepseek_v41_has_no_padding_at_64_rows_and_keeps_its_alignment() -> None:
    manifest = plan("deepseek-v4.1-flash", {"kv-layout": "v41"})
    assert page(manifest, "swa") == (256, 1, 135_168, 135_168, 40)
    assert page(manifest, "c2") == (128, 2, 36_864, 36_864, 3)
    assert page(manifest, "c1") == (256, 1, 73_728, 73_728, 1)
    (swa,) = manifest.find_pools("swa")
    assert (swa.padding.policy, swa.padding.alignment, swa.tail_pad_bytes) == ("aligned", 512, 0)
    (c1,) = manifest.find_pools("c1")
    assert (c1.padding.policy, c1.padding.alignment) == ("aligned", 256)
    new = plan("deepseek-v4.1-flash", {"kv-layout": "v41_new"})
    (swa,) = new.find_pools("swa")
    assert (swa.record, swa.padding.policy, swa.padding.alignment) == ("v41_interleaved", "exact", 528)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv-layout": "v41"}, (64, 4, 33_792, 33_792, 21)),
        ({"kv-layout": "v41", "compressed-kv-layout": "fp4"}, (64, 4, 18_432, 18_432, 21)),
        ({"kv-layout": "v41_new"}, (64, 4, 33_792, 33_792, 21)),
        ({"dsv4-attn-backend": "trtllm"}, (64, 4, 32_768, 32_768, 21)),
    ],
)
def test_c4_pages_of_the_other_layouts(options: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert page(plan("deepseek-v4-flash", options), "c4") == expected


def test_c128_pages_of_the_v41_layouts_are_padded() -> None:
    assert page(plan("deepseek-v4-flash", {"kv-layout": "v41"}), "c128") == (2, 128, 1_056, 1_536, 20)
    fp4 = {"kv-layout": "v41", "compressed-kv-layout": "fp4"}
    assert page(plan("deepseek-v4-flash", fp4), "c128") == (2, 128, 576, 768, 20)
    assert page(plan("deepseek-v4-flash", {"kv-layout": "v41_new"}), "c128") == (2, 128, 1_056, 1_056, 20)


def test_sliding_window_pages() -> None:
    assert page(plan("deepseek-v4-flash", {"swa-page-size": 128}), "swa") == (128, 1, 74_752, 74_880, 43)
    direct = plan("deepseek-v4-flash", {"gpu": "sm120", "sm120-direct-swa-kv": True})
    assert page(direct, "swa") == (64, 1, 37_376, 37_440, 43)
    assert direct.find_pools("swa")[0].reserved_pages == 4  # one logical page of 256


def test_speculative_rings() -> None:
    for drafts, ring in ((0, 8), (2, 16), (8, 16)):
        manifest = plan("deepseek-v4-flash", {"speculative-num-draft-tokens": drafts})
        assert page(manifest, "compressor_state", "state_fp32_2048")[0] == ring
    for drafts, ring in ((0, 2), (1, 4), (2, 4), (4, 8), (6, 8), (7, 16)):
        manifest = plan("deepseek-v4.1-flash", {"speculative-num-draft-tokens": drafts})
        assert page(manifest, "compressor_state", "state_fp32_1024")[0] == ring


def test_classic_models() -> None:
    assert page(plan("deepseek-v3.2", {"kv-cache-dtype": "fp8_e4m3"}), "dsa") == (64, 1, 41_984, 41_984, 61)
    assert page(plan("deepseek-v3.2"), "indexer") == (64, 1, 8_448, 8_448, 61)
    assert page(plan("deepseek-v3"), "mla") == (64, 1, 73_728, 73_728, 61)
    assert page(plan("deepseek-v3", {"page-size": 1}), "mla") == (1, 1, 1_152, 1_152, 61)
    planes = plan("kimi-k2", {"kv-cache-dtype": "fp4_mx_block16"}).find_pools("mla")
    assert [(pool.plane, pool.row_bytes) for pool in planes] == [("values", 288), ("scales", 36)]


def test_defaults_follow_the_gpu() -> None:
    assert plan("deepseek-v3.2", {"gpu": "sm90"}).find_pools("dsa")[0].record == "mla_bf16"
    assert plan("deepseek-v3.2", {"gpu": "sm100"}).find_pools("dsa")[0].record == "dsa"
    assert plan("deepseek-v3", {"gpu": "sm90"}).find_pools("mla")[0].page_rows == 1
    assert plan("deepseek-v4.1-flash", {"gpu": "sm90"}).find_pools("swa")[0].record == "v4"
    chosen = plan("deepseek-v4.1-flash", {"gpu": "sm100"})
    assert chosen.find_pools("swa")[0].record == "v41"
    assert any("SGLANG_DSV4_KV_LAYOUT=v41" in note for note in chosen.notes)


def test_memory_says_why() -> None:
    manifest = plan("deepseek-v4-flash", memory=60 << 30)
    assert manifest.memory is not None
    assert manifest.memory.tokens == manifest.memory.num_blocks * 256
    assert "0.1 sliding-window slots a token" in manifest.memory.reason
    assert "2,715,811,840 fixed for 256 requests" in manifest.memory.reason
    limited = plan("deepseek-v4-flash", {"max-total-tokens": 100_000}, memory=60 << 30)
    assert limited.memory is not None
    assert limited.memory.tokens == 99_840
    assert "limited by max-total-tokens 100,000" in limited.memory.reason


def test_page_counts_from_a_token_limit_alone() -> None:
    manifest = plan("deepseek-v4-flash", {"max-total-tokens": 8192, "max-running-requests": 4})
    assert manifest.memory is None
    assert manifest.find_pools("c4")[0].num_pages == 8192 // 4 // 64 + 4
    assert manifest.find_pools("full")[0].num_pages == 33
    assert manifest.total_bytes is not None


def test_unknown_version_is_planned_with_a_note() -> None:
    manifest = plan("deepseek-v4-flash", version="0.6.1")
    assert manifest.engine.version == "0.6.1"
    assert manifest.notes[0] == "SGLang 0.6.1 was not read; planned by the rules of 0.5.23"
    assert plan("deepseek-v4-flash").notes == ()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("deepseek-v4-flash", {"page-size": 64}, "option page-size: got 64, expected 256 "),
        ("deepseek-v3.2", {"page-size": 16}, "option page-size: got 16, expected 64 "),
        ("deepseek-v3", {"page-size": -1}, "option page-size: got -1, expected at least 0"),
        (
            "deepseek-v4-flash",
            {"swa-page-size": 100},
            "option swa-page-size: got 100, expected a divisor of page-size 256",
        ),
        ("deepseek-v4-flash", {"kv-cache-dtype": "bfloat16"}, "option kv-cache-dtype: got bfloat16, expected fp8_e4m3"),
        ("deepseek-v4-flash", {"gpu": "sm90", "kv-layout": "v41"}, "option kv-layout: got v41, expected v4 on sm90"),
        ("deepseek-v4-flash", {"compressed-kv-layout": "fp4"}, "option compressed-kv-layout: got fp4, expected auto"),
        (
            "deepseek-v4-flash",
            {"dsv4-attn-backend": "trtllm", "kv-layout": "v41"},
            "option kv-layout: got v41, expected auto or v4",
        ),
        ("deepseek-v4-flash", {"kv-layout": "v41", "enable-hisparse": True}, "option enable-hisparse: got true"),
        ("deepseek-v3", {"enable-hisparse": True}, "option enable-hisparse: got true, expected false for mla models"),
        (
            "deepseek-v4-flash",
            {"swa-full-tokens-ratio": "2"},
            "option swa-full-tokens-ratio: got '2', expected a number",
        ),
        (
            "deepseek-v4-flash",
            {"swa-full-tokens-ratio": "x"},
            "option swa-full-tokens-ratio: got 'x', expected a number",
        ),
        ("deepseek-v3.2", {"kv-cache-dtype": "fp4_mx_block16"}, "option kv-cache-dtype: got fp4_mx_block16"),
        ("deepseek-v4-flash", {"kv-layout": "v5"}, "option kv-layout: got 'v5', expected one of"),
        ("deepseek-v4-flash", {"block-size": 1}, "option block-size: got an unknown option of sglang"),
    ],
)
def test_refusals_name_option_got_and_expected(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        plan(model, options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 576}, "head_dim: got 576, expected 512"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim: got 32, expected 64"),
        ({"index_head_dim": 64}, "index_head_dim: got 64, expected 128"),
        ({"compress_ratios": [0, 8]}, "compress_ratios[1]: got 8, expected one of [0, 1, 2, 4, 128]"),
        (
            {"compress_ratios": [2, 2], "kv_source_layer_ids": [1]},
            "kv_source_layer_ids: got [1], expected a layer of ratio 2",
        ),
        ({"compress_ratios": [1, 2], "kv_source_layer_ids": [0]}, "at or before layer 1"),
    ],
)
def test_models_that_sglang_does_not_build(change: dict[str, Any], message: str) -> None:
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "compress_ratios": [0, 4],
        "head_dim": 512,
    }
    model = ModelConfig.from_config(config | change, name="odd")
    with pytest.raises(EngineError, match=re.escape(message)):
        ENGINE.plan(PlanRequest(model, "0.5.23"))


def test_a_limit_below_a_page() -> None:
    with pytest.raises(EngineError, match="option max-total-tokens: got 63, expected at least 64"):
        plan("deepseek-v3", {"max-total-tokens": 63})


def test_budgets_too_small() -> None:
    with pytest.raises(EngineError, match=r"memory: got 1,000 bytes, expected more than .* fixed for 256 requests"):
        plan("deepseek-v4-flash", memory=1000)
    with pytest.raises(
        EngineError,
        match=r"option max-total-tokens: got 2,048, .*expected more than 384 slots \(window 128, page 256\)",
    ):
        plan("deepseek-v4-flash", {"max-total-tokens": 2048}, memory=60 << 30)
    with pytest.raises(EngineError, match=r"memory: got 1,000 bytes, expected at least .* \(one page\)"):
        plan("deepseek-v3", memory=1000)


def test_planning_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys\n"
        "from kvbridge.engine import PlanRequest\n"
        "from kvbridge.engines.sglang import ENGINE\n"
        "from kvbridge.models import load_model\n"
        "ENGINE.plan(PlanRequest(load_model('deepseek-v4-flash'), '0.5.23', {}, 60 << 30))\n"
        "print([name for name in ('torch', 'sglang', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
