"""Configurations whose planned manifest must equal what vLLM's own allocator makes: plain data for both interpreters.

Case(name, model's config.json, options) --planner--------------------> manifest   (this interpreter)
                                         --vLLM's specs, groups, tensors-> manifest (vLLM's interpreter)
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

NUM_BLOCKS = 3
"""Blocks that vLLM allocates for a case: enough for a stride, small enough for a test."""

MEMORY_BYTES = 40 << 30
"""Budget for which blocks and tokens are compared; nothing of this size is allocated."""

FLASH = [0, 0, *[4, 128] * 20, 4]
PRO = [*[128, 4] * 30, 128]
HF_DEFAULT = [128, 128, *[128, 4] * 20, 128]
TINY = [0, 4, 128, 4]


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        name: Test id.
        config: The model's config.json.
        options: vLLM's options, by the planner's names.
        slab_bytes: Published or printed block stride to meet besides; 0 for none.
    """

    name: str
    config: dict[str, Any]
    options: dict[str, str | int | bool] = field(default_factory=dict)
    slab_bytes: int = 0


def v4(ratios: list[int], **fields: Any) -> dict[str, Any]:
    """A V4 config with these compress ratios."""
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 64,
        "compress_ratios": ratios,
        "head_dim": 512,
        "sliding_window": 128,
        "index_head_dim": 128,
        "index_topk": 512,
        "max_position_embeddings": 65_536,
    } | fields


def v41(ratios: list[int], sources: list[int], **fields: Any) -> dict[str, Any]:
    """A V4.1 config; compressed rows are stored on source layers only."""
    config = v4(ratios, kv_source_layer_ids=sources, index_source_layer_ids=sources) | {"model_type": "deepseek_v41"}
    return config | fields


def classic(layers: int, *, sparse: bool, **fields: Any) -> dict[str, Any]:
    """A V3 or V3.2 config."""
    return {
        "model_type": "deepseek_v32" if sparse else "deepseek_v3",
        "num_hidden_layers": layers,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 163_840,
    } | fields


V41_RATIOS = [0, 0, *[2] * 18, *[1] * 20]
V41_SOURCES = [2, 8, 14, 20]

CASES = (
    Case("v4-flash", v4(FLASH), slab_bytes=1_002_240),
    Case("v4-flash-sm90", v4(FLASH), {"arch": "sm90"}, slab_bytes=1_002_240),
    Case("v4-flash-sm120", v4(FLASH), {"arch": "sm120"}, slab_bytes=1_002_240),
    Case("v4-default-schedule", v4(HF_DEFAULT), slab_bytes=961_344),
    Case("v4-pro", v4(PRO, num_attention_heads=128, index_topk=1024), slab_bytes=1_435_968),
    Case("v4-flash-fp4-indexer", v4(FLASH), {"indexer-kv-dtype": "mxfp4"}, slab_bytes=917_568),
    Case("v4-flash-bf16", v4(FLASH), {"kv-cache-dtype": "bfloat16"}, slab_bytes=1_600_000),
    Case("v4-flash-fp8-rows", v4(FLASH), {"kv-cache-dtype": "fp8", "attention-backend": "flashinfer"}),
    Case("v4-flash-block-512", v4(FLASH), {"block-size": 512}),
    Case("v4-tiny", v4(TINY), {"arch": "cpu"}, slab_bytes=93_888),
    Case("v4-window-only", v4([0, 0, 0])),
    Case("v4-flash-mtp", v4([*FLASH, 0], num_hidden_layers=43, num_nextn_predict_layers=1), {"speculative-tokens": 1}),
    *(
        Case(f"v4-pro-stage-{rank}-of-3", v4(PRO), {"pipeline-parallel-size": 3, "pipeline-parallel-rank": rank})
        for rank in range(3)
    ),
    Case(
        "v4-flash-mtp-last-stage",
        v4([*FLASH, 0], num_hidden_layers=43, num_nextn_predict_layers=1),
        {"speculative-tokens": 1, "pipeline-parallel-size": 4, "pipeline-parallel-rank": 3},
    ),
    Case("v41-528", v41(V41_RATIOS, V41_SOURCES), {"kv-cache-dtype": "fp8_ds_mla"}),
    Case("v41-288", v41(V41_RATIOS, V41_SOURCES)),
    Case("v41-288-fp4-indexer", v41(V41_RATIOS, V41_SOURCES), {"indexer-kv-dtype": "mxfp4"}),
    Case("v41-584", v41(V41_RATIOS, V41_SOURCES), {"arch": "sm90"}),
    Case("v41-584-sm120", v41(V41_RATIOS, V41_SOURCES), {"arch": "sm120", "kv-cache-dtype": "fp8"}),
    Case("v41-288-block-256", v41([2, 1, 2, 0], [0, 1]), {"block-size": 256}),
    Case("v41-528-block-256", v41([2, 1, 2, 0], [0, 1]), {"block-size": 256, "kv-cache-dtype": "fp8_ds_mla"}),
    Case("v41-bf16", v41(V41_RATIOS, V41_SOURCES), {"kv-cache-dtype": "bfloat16"}),
    Case(
        "v41-sparse-logits", v41(V41_RATIOS, V41_SOURCES), {"indexer-sparse-logits": True, "indexer-kv-dtype": "mxfp4"}
    ),
    Case(
        "v41-dspark",
        v41(V41_RATIOS, V41_SOURCES, dspark_target_layer_ids=[0], n_mtp_layers=3),
        {"speculative-tokens": 7},
    ),
    Case("v32-656", classic(61, sparse=True), {"kv-cache-dtype": "fp8_ds_mla"}),
    Case("v32-656-sm90", classic(61, sparse=True), {"kv-cache-dtype": "fp8", "arch": "sm90"}),
    Case("v32-352", classic(61, sparse=True), {"kv-cache-dtype": "nvfp4_ds_mla"}),
    Case("v32-bf16", classic(61, sparse=True)),
    Case("v32-fp8-rows", classic(61, sparse=True), {"kv-cache-dtype": "fp8"}),
    Case("v32-bf16-block-128", classic(4, sparse=True), {"block-size": 128}),
    Case(
        "v32-656-block-192-sm90", classic(4, sparse=True), {"kv-cache-dtype": "fp8", "arch": "sm90", "block-size": 192}
    ),
    Case(
        "glm-5.2",
        classic(78, sparse=True, model_type="glm_moe_dsa", index_topk_freq=4),
        {"kv-cache-dtype": "fp8_ds_mla"},
    ),
    Case("v3-bf16", classic(61, sparse=False)),
    Case("v3-fp8", classic(61, sparse=False), {"kv-cache-dtype": "fp8", "arch": "sm90"}),
    Case("v3-block-128", classic(3, sparse=False), {"block-size": 128}),
    Case("v3-block-96", classic(3, sparse=False), {"block-size": 96}),
    Case("v3-cpu", classic(3, sparse=False), {"arch": "cpu"}),
    Case("v3-cpu-amx", classic(3, sparse=False), {"arch": "cpu-amx"}),
    Case("v3-cpu-amx-block-96", classic(3, sparse=False), {"arch": "cpu-amx", "block-size": 96}),
)


def random_cases(count: int, *, seed: int = 20_261_201) -> tuple[Case, ...]:
    """V4 and V4.1 models with random schedules: the planner must hold for the kind, not for known models.

    Args:
        count: Cases.
        seed: Seed of the generator; the cases are the same in both interpreters.
    """
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        layers = rng.randint(1, 30)
        if index % 3 == 2:
            ratios = [rng.choice((0, 1, 2)) for _ in range(layers)]
            sources = [layer for layer, ratio in enumerate(ratios) if ratio and rng.random() < 0.5]
            options = {"arch": rng.choice(("sm90", "sm100", "sm120"))}
            if options["arch"] == "sm100":
                options["kv-cache-dtype"] = rng.choice(("auto", "fp8_ds_mla", "bfloat16"))
            config = v41(ratios, sources)
        else:
            weights = rng.choice(((1, 1, 1), (1, 5, 1), (1, 1, 5), (5, 1, 1)))
            ratios = rng.choices((0, 4, 128), weights, k=layers)
            options = {"kv-cache-dtype": rng.choice(("auto", "bfloat16"))}
            config = v4(ratios)
        options["indexer-kv-dtype"] = rng.choice(("fp8", "mxfp4"))
        cases.append(Case(f"random-{index}", config, dict(options)))
    return tuple(cases)
