"""A DeepSeek-V4 small enough for a CPU, with random weights under which attention decides the tokens.

    layer     0     1     2      3            64 heads, head_dim 512, window 128, 256 experts, 1,024 words
    ratio     0     4     128    4            sliding window only, C4 (indexer, 512 slots), C128 (all slots), C4

vLLM's own `dummy` weights are of the order 1e-3: attention would not reach the output. Here matrices keep the size of
what passes through them, norms are near 1 and sinks are of the order of the scores. 256 experts because vLLM's CPU
router takes no other count (0.32.0 csrc/cpu, biased_topk_cpu).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

LOAD_FORMAT = "kvbridge_random"
LAYERS = 4
VOCABULARY = 1024
SEED = 1234

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": LAYERS,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 8,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "num_hash_layers": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
    "expert_dtype": "fp8",
}


def write_model(folder: Path) -> Path:
    """Writes the model's config.json.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    return folder


@cache
def register_loader() -> str:
    """Registers the loader of the random weights with vLLM.

    Returns:
        The load format to ask vLLM for.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]
        """Fills every parameter by its role."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            del model_config
            fill(model)

    register_model_loader(LOAD_FORMAT)(RandomLoader)
    return LOAD_FORMAT


def fill(model: Any) -> None:
    """Gives every parameter of a model random values of a size that suits its role; the same ones each time."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.data.copy_(_values(name, noise).to(parameter.dtype))


def _values(name: str, noise: Any) -> Any:
    matrix = noise.dim() >= 2
    if "norm" in name:
        # K of both caches is what these norms let through: twice as large makes the softmax peaky.
        peaky = "kv_norm" in name or ("compressor.norm" in name and "indexer" not in name)
        return (1 + 0.1 * noise) * (2.0 if peaky else 1.0)
    if "attn_sink" in name:
        return noise + 4.0  # of the order of the largest scores, so that every head notices its sink
    for part, size in (("e_score_correction_bias", 0.01), ("ape", 0.1), ("embed", 0.3)):
        if part in name:
            return noise * size
    if "hc_" in name:
        return noise * (0.02 if matrix else 0.5)
    if matrix:
        # Logits near 1: the rounding of the hidden state to bf16 then moves them by less than the bound of a near tie.
        gain = 3.0 if "wo_" in name else 0.2 if "experts" in name else 0.35 if "lm_head" in name else 1.5
        return noise * noise.shape[-1] ** -0.5 * gain
    return noise
