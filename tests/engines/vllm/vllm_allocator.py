"""Runs in vLLM's interpreter: vLLM's own specs, groups, strides and tensors for each case, captured by kvbridge.

    python vllm_allocator.py OUT.json [RANDOM]

What is vLLM's: the cache layers' own `get_kv_cache_spec`, `customize_attention_spec`, `resolve_kv_cache_layout`,
`get_kv_cache_groups`, `get_kv_cache_config_from_groups`, `allocate_kv_cache`. What is this file's: the order of layers
(a live engine proves that order in its own test) and the pretended device, which on a CPU machine cannot be real.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.utils import get_pp_indices
from vllm.models.deepseek_v4 import attention as v4_attention
from vllm.models.deepseek_v4 import compressor as v4_compressor
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4SparseMLABackend as V4Backend
from vllm.models.deepseek_v41 import attention as v41_attention
from vllm.models.deepseek_v41 import compressor as v41_compressor
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4SparseMLABackend as V41Backend
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.worker import utils as worker

from kvbridge.engine import load_engine, resolve_options
from kvbridge.engines.vllm.layouts import installed_version
from kvbridge.engines.vllm.options import resolve
from kvbridge.engines.vllm.tensors import captured_manifest
from kvbridge.manifest import Rank
from kvbridge.models import Family, ModelConfig
from tests.engines.vllm.vllm_cases import CASES, MEMORY_BYTES, NUM_BLOCKS, Case, random_cases

try:  # vLLM 0.33 moved the planner
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core import kv_cache_utils as capacity
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

    capacity = planning


@dataclass(frozen=True)
class Layer:
    """A cache layer: vLLM's module (or the attributes its attention class reads), its spec and its backend."""

    module: Any
    spec: Any
    backend: Any


FAMILIES = {"sm90": 90, "sm100": 100, "sm120": 120}
_device = {"family": 0}


def pretend_device() -> None:
    """Makes the platform answer for the device of the case at hand; vLLM asks it which records and blocks to use."""
    cls = type(current_platform)
    cls.is_device_capability_family = lambda self, family, device_id=0: _device["family"] == family


def layers_of(model: ModelConfig, settings: Any, vllm_config: VllmConfig) -> dict[str, Layer]:
    """Spec and backend of every cache layer, in the order the models build them."""
    build = {Family.V4: v4_layers, Family.V41: v41_layers}.get(model.family, classic_layers)
    return build(model, settings, vllm_config)


def row_dtype(settings: Any) -> torch.dtype:
    if settings.packed_rows:
        return torch.uint8
    return torch.float8_e4m3fn if settings.kv_dtype == "fp8" else torch.bfloat16


def draft(model: ModelConfig, settings: Any) -> int:
    return model.num_draft_layers if settings.speculative_tokens else 0


def v4_layers(model: ModelConfig, settings: Any, vllm_config: VllmConfig) -> dict[str, Layer]:
    layers: dict[str, Any] = {}
    cache_config = vllm_config.cache_config
    for index in range(model.num_layers + draft(model, settings)):
        ratio = max(1, model.compress_ratios[index]) if index < model.num_layers else 1
        prefix = f"model.layers.{index}.attn"
        if ratio == 4:
            width = 64 + 4 if settings.indexer_fp4 else 128 + 4
            name = f"{prefix}.indexer.k_cache"
            layers[name] = v4_attention.DeepseekV4IndexerCache(width, torch.uint8, name, cache_config, ratio)
            name = f"{prefix}.indexer.compressor.state_cache"
            layers[name] = v4_compressor.CompressorStateCache(2 * 2 * 128, torch.float32, ratio, name)
        name = f"{prefix}.swa_cache"
        layers[name] = sparse_swa.DeepseekV4SWACache(
            model.head_dim, model.sliding_window, row_dtype(settings), name, cache_config
        )
        if ratio > 1:
            layers[prefix] = types.SimpleNamespace(
                compress_ratio=ratio,
                kv_cache_dtype=settings.kv_dtype,
                kv_cache_torch_dtype=row_dtype(settings),
                head_dim=model.head_dim,
            )
            name = f"{prefix}.compressor.state_cache"
            width = 2 * (2 if ratio == 4 else 1) * model.head_dim
            layers[name] = v4_compressor.CompressorStateCache(width, torch.float32, ratio, name)
    return specs_of(layers, vllm_config, v4_attention.DeepseekV4Attention, V4Backend)


def v41_layers(model: ModelConfig, settings: Any, vllm_config: VllmConfig) -> dict[str, Layer]:
    layers: dict[str, Any] = {}
    cache_config = vllm_config.cache_config
    mxfp8 = v41_attention._use_v41_mxfp8_kv_record()
    window_bytes = 528 if mxfp8 else 584
    row_bytes = 288 if settings.kv_dtype == "nvfp4_ds_mla" else window_bytes
    alignment = 512 if mxfp8 else 576
    window: dict[str, Any] = {
        "block_size": 32,
        "packed_bytes_per_token": window_bytes,
        "packed_page_alignment": alignment,
    }
    if "packed_block_stride_alignment" in sparse_swa.DeepseekV4SWACache.__init__.__code__.co_varnames:
        window["packed_block_stride_alignment"] = math.lcm(window_bytes, row_bytes) if mxfp8 else None
    for index in range(model.num_layers + draft(model, settings)):
        ratio = model.compress_ratios[index] if index < model.num_layers else 0
        prefix = f"model.layers.{index}.attn"
        source = index in model.kv_source_layers
        if source:
            layers[prefix] = types.SimpleNamespace(
                is_kv_source=True,
                compress_ratio=ratio,
                kv_cache_dtype=settings.kv_dtype,
                kv_cache_torch_dtype=row_dtype(settings),
                head_dim=model.head_dim,
                kv_page_alignment=alignment,
                compressed_bytes_per_token=row_bytes,
            )
            name = f"{prefix}.indexer.k_cache"
            width = v41_attention._indexer_k_cache_head_dim(128, settings.indexer_fp4)
            layers[name] = v41_attention.DeepseekV4IndexerCache(width, torch.uint8, name, cache_config, ratio)
        name = f"{prefix}.swa_cache"
        layers[name] = sparse_swa.DeepseekV4SWACache(
            model.head_dim, model.sliding_window, row_dtype(settings), name, cache_config, **window
        )
        if source and ratio > 1:
            name = f"{prefix}.compressor.state_cache"
            layers[name] = v41_compressor.CompressorStateCache(2 * model.head_dim, torch.float32, name)
    return specs_of(layers, vllm_config, v41_attention.DeepseekV4Attention, V41Backend)


def classic_layers(model: ModelConfig, settings: Any, vllm_config: VllmConfig) -> dict[str, Layer]:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    sparse = model.family is Family.DSA
    layers: dict[str, Any] = {}
    for index in range(model.num_layers + draft(model, settings)):
        prefix = f"model.layers.{index}.self_attn"
        owns = sparse and (not model.index_source_layers or index in model.index_source_layers)
        if owns:
            name = f"{prefix}.indexer.k_cache"
            layers[name] = DeepseekV32IndexerCache(132, torch.uint8, name, vllm_config.cache_config)
        layers[f"{prefix}.attn"] = types.SimpleNamespace(
            kv_cache_dtype=settings.kv_dtype,
            head_size=model.head_dim + model.rope_dim,
            sliding_window=None,
            indexer=object() if owns else None,
            non_causal_multi_token_decode=False,
            topk_buffer_width=2048 if sparse else None,
        )
    return specs_of(layers, vllm_config, MLAAttention, classic_backend(settings, sparse=sparse))


def classic_backend(settings: Any, *, sparse: bool) -> Any:
    if settings.backend == "flashinfer":
        # The backend's module imports kernels; its block sizes and spec rules, asked for here, do not need them.
        for name in ("flashinfer", "flashinfer.decode", "flashinfer.utils"):
            module = sys.modules.setdefault(name, types.ModuleType(name))
            module.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
    if sparse:
        if settings.backend == "flashinfer":
            from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseTRTLLMBackend

            return FlashInferMLASparseTRTLLMBackend
        from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

        return FlashMLASparseBackend
    if settings.backend == "flashinfer":
        from vllm.v1.attention.backends.mla.flashinfer_mla import FlashInferMLABackend

        return FlashInferMLABackend
    if settings.backend == "cpu":
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

        return CPUMLABackend
    if settings.backend == "amx":
        from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend

        return AMXMLABackend
    from vllm.v1.attention.backends import fa_utils

    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        if not hasattr(fa_utils, name):  # kernels that a CPU build lacks; block sizes and spec rules do not need them
            setattr(fa_utils, name, None)
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend

    return FlashAttnMLABackend


def specs_of(layers: dict[str, Any], vllm_config: VllmConfig, attention: Any, backend: Any) -> dict[str, Layer]:
    """Asks each layer, or the attention class for its own cache, for its spec and lets the backend adjust it."""
    specs = {}
    for name, layer in layers.items():
        if isinstance(layer, types.SimpleNamespace):
            spec, layer_backend = attention.get_kv_cache_spec(layer, vllm_config), backend
        else:
            spec, layer_backend = layer.get_kv_cache_spec(vllm_config), layer.get_attn_backend()
        specs[name] = Layer(layer, worker.customize_attention_spec(layer_backend, spec), layer_backend)
    return specs


def make_config(model: ModelConfig, settings: Any, options: Mapping[str, Any]) -> VllmConfig:
    """A VllmConfig with the parts that decide caches."""
    cache_config = CacheConfig(block_size=settings.block_tokens)
    cache_config.cache_dtype = settings.kv_dtype
    vllm_config = VllmConfig(cache_config=cache_config, device_config=DeviceConfig(device="cpu"))
    vllm_config.model_config = types.SimpleNamespace(
        max_model_len=settings.max_model_len, original_max_model_len=settings.max_model_len, dtype=torch.bfloat16
    )
    vllm_config.attention_config.indexer_sparse_logits = settings.sparse_logits
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    vllm_config.parallel_config.pipeline_parallel_size = settings.pipeline_parallel
    vllm_config.scheduler_config.max_num_batched_tokens = int(options["max-num-batched-tokens"])
    vllm_config.scheduler_config.async_scheduling = True
    if settings.speculative_tokens:
        vllm_config.speculative_config = types.SimpleNamespace(
            num_speculative_tokens=settings.speculative_tokens,
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
        )
    return vllm_config


@dataclass(frozen=True)
class Allocated:
    """One case as vLLM allocated it."""

    layers: dict[str, Layer]
    kv_caches: dict[str, torch.Tensor]
    config: Any
    layout: Any
    kernel_blocks: list[int]
    vllm_config: VllmConfig
    options: dict[str, str | int | bool]
    planned_blocks: int
    tokens: int


def allocate(case: Case) -> Allocated:
    """Lets vLLM group, place and allocate one case; raises what vLLM raises where it refuses the model."""
    engine = load_engine("vllm")
    model = ModelConfig.from_config(case.config, name=case.name)
    options = resolve_options(engine, case.options | {"num-gpu-blocks-override": NUM_BLOCKS})
    settings = resolve(model, options, version=installed_version())
    _device["family"] = FAMILIES.get(settings.arch, 0)
    vllm_config = make_config(model, settings, options)
    with set_current_vllm_config(vllm_config, check_compile=False):
        layers = layers_of(model, settings, vllm_config)
        specs = {name: layer.spec for name, layer in layers.items()}
        names = [entry.name for entry in get_supported_kv_cache_layouts([layer.backend for layer in layers.values()])]
        layout = resolve_kv_cache_layout(vllm_config, [names], specs.values())
        groups = planning.get_kv_cache_groups(vllm_config, dict(specs))
        stages = [stage_groups(model, settings, groups, specs, rank) for rank in range(settings.pipeline_parallel)]
        groups = stages[settings.pipeline_rank]
        budgets = [planning.get_kv_cache_config_from_groups(vllm_config, stage, MEMORY_BYTES) for stage in stages]
        planned = budgets[settings.pipeline_rank]
        planned.num_blocks = min(budget.num_blocks for budget in budgets)
        tokens, _ = capacity.get_kv_cache_capacity(vllm_config, planned)
        vllm_config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
        config = planning.get_kv_cache_config_from_groups(vllm_config, groups, MEMORY_BYTES)
        kernel_blocks = kernel_block_sizes(config, layers)
        kv_caches = worker.allocate_kv_cache(config, torch.device("cpu"), layout, kernel_blocks)
    return Allocated(layers, kv_caches, config, layout, kernel_blocks, vllm_config, options, planned.num_blocks, tokens)


def stage_groups(
    model: ModelConfig, settings: Any, groups: list[Any], specs: dict[str, Any], pipeline_rank: int
) -> list[Any]:
    """The groups of one pipeline rank, by vLLM's own split of layers and projection of groups."""
    if settings.pipeline_parallel == 1:
        return groups
    first, last = get_pp_indices(model.num_layers, pipeline_rank, settings.pipeline_parallel)
    if pipeline_rank == settings.pipeline_parallel - 1:
        last += draft(model, settings)
    local = {name: spec for name, spec in specs.items() if first <= int(name.split(".")[2]) < last}
    projected: list[Any] = planning._project_kv_cache_groups_to_worker(groups, local)
    return projected


def capture(case: Case) -> dict[str, Any]:
    """The captured manifest and vLLM's own capacity figures of one case; an `error` where vLLM refuses it."""
    try:
        allocated = allocate(case)
    except (AssertionError, NotImplementedError, ValueError) as refusal:
        return {"error": f"{type(refusal).__name__}: {refusal}"}
    manifest, findings = captured_manifest(
        allocated.kv_caches,
        allocated.config,
        version=installed_version(),
        packed=allocated.layout.is_block_outermost,
        page_tokens=dict(enumerate(allocated.kernel_blocks)),
        model=case.name,
        options=allocated.options,
        rank=Rank(
            pipeline_parallel_rank=int(allocated.options["pipeline-parallel-rank"]),
            pipeline_parallel_size=int(allocated.options["pipeline-parallel-size"]),
        ),
    )
    storages = {tensor.untyped_storage().data_ptr() for tensor in allocated.kv_caches.values()}
    return {
        "manifest": manifest.document(),
        "findings": [entry.document() for entry in findings],
        "shared_storage": len(storages) == 1,
        "num_blocks": allocated.planned_blocks,
        "tokens": allocated.tokens,
    }


def kernel_block_sizes(config: Any, layers: dict[str, Layer]) -> list[int]:
    """vLLM's own choice of kernel blocks, from groups of layers of one backend and spec."""
    attention_groups = []
    for index, group in enumerate(config.kv_cache_groups):
        kinds: dict[Any, list[str]] = {}
        for name in group.layer_names:
            kinds.setdefault((layers[name].backend, layers[name].spec), []).append(name)
        attention_groups.append(
            [worker.AttentionGroup(backend, names, spec, index) for (backend, spec), names in kinds.items()]
        )
    sizes: list[int] = worker.prepare_kernel_block_sizes(config, attention_groups)
    return sizes


def build_order() -> dict[str, list[str]]:
    """Order in which the models' constructors register caches, read off their source; planner and cases rely on it."""
    from vllm.models.deepseek_v32 import attention as v32_attention

    marks = {
        "attn": "static_forward_context[prefix] = self",
        "swa": "DeepseekV4SWACache(",
        "indexer": "self.indexer = ",
        "state": "self.compressor = ",
    }
    constructors = {
        "v4": (v4_attention.DeepseekV4Attention.__init__, marks),
        "v4-indexer": (
            v4_attention.DeepseekV4Indexer.__init__,
            {"indexer": "self.k_cache = ", "state": marks["state"]},
        ),
        "v41": (v41_attention.DeepseekV4Attention.__init__, marks | {"indexer": "DeepseekV4IndexerCache("}),
        "v32": (
            v32_attention.DeepseekV32Attention.__init__,
            {"attn": "super().__init__(", "indexer": "indexer = type(self).indexer_cls("},
        ),
    }
    orders = {}
    for name, (constructor, texts) in constructors.items():
        source = inspect.getsource(constructor)
        orders[name] = sorted(texts, key=lambda part: source.rindex(texts[part]))
    return orders


def main() -> None:
    out, *rest = sys.argv[1:]
    cases = (*CASES, *random_cases(int(rest[0]) if rest else 0))
    pretend_device()
    results = {
        "version": installed_version(),
        "cases": {case.name: capture(case) for case in cases},
        "order": build_order(),
    }
    Path(out).write_text(json.dumps(results, sort_keys=True))


if __name__ == "__main__":
    main()
