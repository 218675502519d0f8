"""Model folders that SGLang's own ModelConfig reads, and the configurations every SGLang test runs over.

CASES["v41-new"] = Case("v41", {"kv-layout": "v41_new"})     a model and options; its name is the test's id
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "vocab_size": 1000,
    "num_key_value_heads": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "torch_dtype": "bfloat16",
}
_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 128,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "vocab_size": 1000,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
_INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}


def _v4(ratios: list[int], *, layers: int, **fields: Any) -> dict[str, Any]:
    return _V4 | {"compress_ratios": ratios, "num_hidden_layers": layers} | fields


_V41_FIELDS = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}

CONFIGS: dict[str, dict[str, Any]] = {
    "v4": _v4([0, 4, 128, 4, 128, 0], layers=5, num_nextn_predict_layers=1),
    "v4-flash": _v4([0, 0, *[4, 128] * 20, 4, 0], layers=43, num_nextn_predict_layers=1),
    "v4-pro": _v4([128, *[128, 4] * 30, 0], layers=61, num_nextn_predict_layers=1, index_topk=1024),
    "v41": _v4([0, 2, 2, 1, 1, 1, 0], layers=6, kv_source_layer_ids=[1, 3], **_V41_FIELDS),
    "v41-flash": _v4(
        [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        layers=40,
        kv_source_layer_ids=[2, 8, 14, 20],
        index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        **_V41_FIELDS,
    ),
    "v41-mixed": _v4([0, 1, 2, 4, 128, 1], layers=6, kv_source_layer_ids=[1, 2], **_V41_FIELDS),
    "v3": _V3,
    "v32": _V3 | _INDEXER | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "v32-shared": _V3
    | _INDEXER
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_hidden_layers": 8,
        "index_topk_freq": 4,
    },
}
"""config.json by the name of its folder."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and SGLang's options for it.

    Attributes:
        model: Key of `CONFIGS`.
        options: Options as on the command line.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "v4-page-256": Case("v4"),
    "v4-swa-128": Case("v4", {"swa-page-size": 128}),
    "v4-swa-64": Case("v4", {"swa-page-size": 64}),
    "v4-sm120-direct": Case("v4", {"gpu": "sm120", "sm120-direct-swa-kv": True}),
    "v4-sm120-direct-swa-128": Case("v4", {"gpu": "sm120", "sm120-direct-swa-kv": True, "swa-page-size": 128}),
    "v4-fp4-indexer": Case("v4", {"enable-deepseek-v4-fp4-indexer": True}),
    "v4-hisparse": Case("v4", {"enable-hisparse": True, "hisparse-host-to-device-ratio": 4}),
    "v4-uniform-fp8": Case("v4", {"dsv4-attn-backend": "trtllm"}),
    "v4-draft-2": Case("v4", {"speculative-num-draft-tokens": 2}),
    "v4-draft-4": Case("v4", {"speculative-num-draft-tokens": 4}),
    "v4-draft-8": Case("v4", {"speculative-num-draft-tokens": 8}),
    "v4-uniform-draft-4": Case("v4", {"dsv4-attn-backend": "trtllm", "speculative-num-draft-tokens": 4}),
    "v4-bf16-state": Case("v4", {"compress-state-dtype": "bfloat16"}),
    "v41-bf16-state": Case("v41-mixed", {"kv-layout": "v41", "compress-state-dtype": "bfloat16"}),
    "v4-in-v41-layout": Case("v4", {"kv-layout": "v41"}),
    "v4-in-v41-new-layout": Case("v4", {"kv-layout": "v41_new", "compressed-kv-layout": "fp4"}),
    "v4-request-cap": Case("v4", {"swa-full-tokens-ratio": "0.5", "disable-radix-cache": True}),
    "v4-flash": Case("v4-flash"),
    "v4-pro": Case("v4-pro", {"enable-deepseek-v4-fp4-indexer": True}),
    "v41": Case("v41", {"kv-layout": "v41"}),
    "v41-new": Case("v41", {"kv-layout": "v41_new"}),
    "v41-fp4": Case("v41-mixed", {"kv-layout": "v41", "compressed-kv-layout": "fp4"}),
    "v41-new-fp4": Case("v41-mixed", {"kv-layout": "v41_new", "compressed-kv-layout": "fp4"}),
    "v41-fp8": Case("v41-mixed", {"kv-layout": "v41", "compressed-kv-layout": "fp8"}),
    "v41-mixed": Case("v41-mixed", {"kv-layout": "v41"}),
    "v41-in-v4-layout": Case("v41", {"kv-layout": "v4"}),
    "v41-uniform-fp8": Case("v41-mixed", {"dsv4-attn-backend": "trtllm"}),
    "v41-draft-4": Case("v41", {"kv-layout": "v41", "speculative-num-draft-tokens": 4}),
    "v41-deepgemm": Case("v41", {"kv-layout": "v41", "deepgemm-sparse-logits": True}),
    "v41-flash": Case("v41-flash", {"kv-layout": "v41"}),
    "v32-fp8": Case("v32", {"kv-cache-dtype": "fp8_e4m3"}),
    "v32-bf16": Case("v32", {"kv-cache-dtype": "bfloat16"}),
    "v32-trtllm": Case(
        "v32", {"kv-cache-dtype": "fp8_e4m3", "dsa-prefill-backend": "trtllm", "dsa-decode-backend": "trtllm"}
    ),
    "v32-draft-4": Case("v32", {"kv-cache-dtype": "fp8_e4m3", "speculative-num-draft-tokens": 4}),
    "v32-shared-indexers": Case("v32-shared", {"kv-cache-dtype": "fp8_e4m3"}),
    "v3-bf16-page-64": Case("v3", {"page-size": 64}),
    "v3-bf16-page-1": Case("v3", {"page-size": 1}),
    "v3-fp8": Case("v3", {"page-size": 64, "kv-cache-dtype": "fp8_e4m3"}),
    "v3-fp4": Case("v3", {"page-size": 64, "kv-cache-dtype": "fp4_mx_block16"}),
    "v3-draft-4": Case("v3", {"page-size": 32, "speculative-num-draft-tokens": 4}),
}
"""Every configuration by name."""

RANDOM_CASES = 40


def random_cases(count: int, *, seed: int = 20_261_201) -> Iterator[tuple[str, dict[str, Any], Case]]:
    """Names, configs and cases of the DeepSeek-V4 family that nobody chose: schedules, layouts, sizes and options."""
    choose = random.Random(seed)
    for number in range(count):
        name = f"random-{number}"
        newer = choose.random() < 0.5
        layers = choose.randint(2, 9)
        ratios = [choose.choice((0, 1, 2, 4, 128) if newer else (0, 4, 128)) for _ in range(layers)]
        sources = [
            layer
            for layer, ratio in enumerate(ratios)
            if ratio in (1, 2) and (ratio not in ratios[:layer] or choose.random() < 0.4)
        ]
        fields = _V41_FIELDS | {"kv_source_layer_ids": sources} if newer else {}
        layout = choose.choice(("v4", "v4", "v41", "v41_new", "trtllm"))
        options: dict[str, Any] = {
            "max-running-requests": choose.randint(1, 9),
            "max-total-tokens": choose.randint(8192, 30_000),
            "swa-full-tokens-ratio": choose.choice(("0.1", "0.25", "1.0")),
            "swa-page-size": choose.choice((256, 128, 64)),
            "compress-state-dtype": choose.choice(("float32", "bfloat16")),
            "enable-deepseek-v4-fp4-indexer": choose.random() < 0.5,
            "speculative-num-draft-tokens": choose.choice((0, 0, 2, 3, 5, 8)),
            "deepgemm-sparse-logits": choose.random() < 0.3,
        }
        if layout == "trtllm":
            options["dsv4-attn-backend"] = "trtllm"
        else:
            options["kv-layout"] = layout
        if layout in ("v41", "v41_new"):
            options["compressed-kv-layout"] = choose.choice(("auto", "fp8", "fp4"))
        if layout == "v4" and choose.random() < 0.4:
            options |= {"enable-hisparse": True, "hisparse-host-to-device-ratio": choose.randint(1, 5)}
        elif layout == "v4" and choose.random() < 0.4:
            options |= {"gpu": "sm120", "sm120-direct-swa-kv": True}
        defaults = {"swa-page-size": 256, "compress-state-dtype": "float32", "speculative-num-draft-tokens": 0}
        defaults |= {"compressed-kv-layout": "auto", "hisparse-host-to-device-ratio": 2}
        given = {key: value for key, value in options.items() if value != defaults.get(key, False) or value == "v4"}
        yield name, _v4(ratios, layers=layers, **fields), Case(name, given)


for _name, _config, _case in random_cases(RANDOM_CASES):
    CONFIGS[_name] = _config
    CASES[_name] = _case

GIGABYTE = 10**9
BUDGETS = (
    ("v4-page-256", 20_000_000),
    ("v4-page-256", 123_456_789),
    ("v4-flash", 400_000_000),
    ("v4-flash", GIGABYTE + 1),
    ("v4-pro", 3 * GIGABYTE),
    ("v4-draft-4", 100_000_000),
    ("v4-bf16-state", 88_888_888),
    ("v4-hisparse", 77_777_777),
    ("v4-uniform-fp8", 50_000_000),
    ("v4-request-cap", 60_000_000),
    ("v41", 400_000_000),
    ("v41-new-fp4", 500_000_001),
    ("v41-draft-4", 444_444_444),
    ("v41-in-v4-layout", 512_000_000),
    ("v41-deepgemm", 399_999_999),
    ("v41-flash", 2 * GIGABYTE),
    ("v32-fp8", 99_999_999),
    ("v32-draft-4", 99_999_999),
    ("v32-shared-indexers", 99_999_999),
    ("v3-bf16-page-64", 64_000_000),
    ("v3-fp4", 64_000_000),
    ("v3-draft-4", 64_000_000),
)
"""Cases and memory budgets in bytes from which SGLang's own formula finds the capacity."""

GPU_BUDGETS = (40 * 10**9 + 7, 60 << 30, 141_000_000_000)
"""Budgets that are only sized: with SGLang's default for the number of requests."""

CAPTURED = {"max-running-requests": 4, "max-total-tokens": 8192}
UNLIMITED = 1 << 50
"""A budget that never decides: `max-total-tokens` does."""


def all_cases() -> dict[str, dict[str, Any]]:
    """What capture_cases.py does: every case small, budgets that are built, and budgets of real GPUs that are sized."""
    cases = {
        name: {"model": case.model, "options": CAPTURED | case.options, "budget": UNLIMITED, "sized": False}
        for name, case in CASES.items()
    }
    for name, budget in BUDGETS:
        options = {"max-running-requests": 4} | CASES[name].options
        cases[f"{name}@{budget}"] = {
            "model": CASES[name].model,
            "options": options,
            "budget": budget,
            "sized": False,
        }
    for name, case in CASES.items():
        for budget in () if name.startswith("random") else GPU_BUDGETS:
            cases[f"{name}/{budget}"] = {
                "model": case.model,
                "options": case.options,
                "budget": budget,
                "sized": True,
            }
    return cases


def write_models(folder: Path) -> None:
    """Writes a folder with config.json for every model."""
    for name, config in CONFIGS.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config))
