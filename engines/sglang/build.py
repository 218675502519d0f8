"""SGLang's own allocator on a CPU: its ModelConfig reads config.json, its configurator sizes and builds the pool.

    config.json -> ModelConfig -> KVCacheConfigurator.config_from_budget -> _derive_pool_sizes -> pool of CPU tensors

Nothing is imitated: the sizes are those of SGLang's formula and the pool is the object a server would serve from. Only
the GPU is missing; what that takes is in workarounds.py. Source: SGLang 0.5.23 mem_cache/kv_cache_configurator.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbridge.engine import OptionValue
from kvbridge.engines.sglang import workarounds
from kvbridge.engines.sglang.options import Settings

if TYPE_CHECKING:
    import torch


@contextmanager
def built_pool(
    model: Path, *, settings: Settings, options: Mapping[str, OptionValue], budget_bytes: int
) -> Iterator[Any]:
    """Builds SGLang's pool for a model folder; server arguments stay published while the block runs.

    Args:
        model: Folder with config.json.
        settings: Resolved settings.
        options: All options, resolved.
        budget_bytes: Memory given to the cache.

    Yields:
        The pool object.
    """
    with configured(model, settings=settings, options=options) as configurator:
        yield _build(configurator, memory_config(configurator, budget_bytes))


@contextmanager
def configured(model: Path, *, settings: Settings, options: Mapping[str, OptionValue]) -> Iterator[Any]:
    """Publishes server arguments and yields SGLang's KVCacheConfigurator. Arguments as `built_pool`."""
    with ExitStack() as stack:
        stack.enter_context(workarounds.published_arguments(**server_arguments(settings, options)))
        stack.enter_context(workarounds.environment_variable("SGLANG_DSV4_COMPRESS_STATE_DTYPE", settings.state_dtype))
        if settings.swa_physical_rows != settings.swa_page_rows:
            stack.enter_context(workarounds.platform_sm120())
        if settings.kv_layout not in ("", "uniform_fp8"):
            stack.enter_context(workarounds.layout_without_gpu(settings.kv_layout, settings.compressed_option))
        if settings.swa_page_rows != settings.page_rows:
            stack.enter_context(workarounds.sliding_window_page(settings.swa_page_rows))
        if settings.classic_record == "mla_fp4":
            stack.enter_context(workarounds.fp4_without_gpu())
        if settings.kv_layout:
            stack.enter_context(workarounds.index_page(settings.index_page_rows))
        yield make_configurator(model, settings)


def server_arguments(settings: Settings, options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """Server arguments as SGLang's resolution would leave them."""
    arguments: dict[str, Any] = {
        "device": "cpu",
        "page_size": settings.page_rows,
        "kv_cache_dtype": kv_dtype_name(settings),
        "chunked_prefill_size": settings.chunked_prefill_rows,
        "disable_radix_cache": not settings.radix_cache,
        "max_running_requests": settings.max_running_requests or None,
        "max_total_tokens": settings.max_total_tokens or None,
        "swa_full_tokens_ratio": settings.swa_ratio,
        "_swa_full_tokens_ratio_explicitly_set": settings.swa_ratio is not None,
        "enable_hisparse": settings.hisparse_ratio > 0,
        "enable_deepseek_v4_fp4_indexer": settings.indexer_fp4,
        "dsv4_attn_backend": "trtllm" if settings.kv_layout == "uniform_fp8" else "flashmla",
    }
    if settings.hisparse_ratio:
        arguments["hisparse_config"] = json.dumps({"host_to_device_ratio": settings.hisparse_ratio})
    for name in ("dsa-prefill-backend", "dsa-decode-backend"):
        if options[name] != "auto":
            arguments[name.replace("-", "_")] = options[name]
    if settings.draft_tokens:
        arguments |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_draft_tokens": settings.draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_steps": max(settings.draft_tokens - 1, 1),
        }
    return arguments


def kv_dtype_name(settings: Settings) -> str:
    """SGLang's name of the rows' dtype."""
    return {"mla_bf16": "bfloat16", "mla_fp4": "fp4_mx_block16"}.get(settings.classic_record, "fp8_e4m3")


def kv_dtype(settings: Settings) -> torch.dtype:
    """Torch's dtype of the same name, as SGLang's configure_kv_cache_dtype maps it."""
    import torch

    dtypes = {"bfloat16": torch.bfloat16, "fp4_mx_block16": torch.float4_e2m1fn_x2, "fp8_e4m3": torch.float8_e4m3fn}
    return dtypes[kv_dtype_name(settings)]


def make_configurator(model: Path, settings: Settings) -> Any:
    """SGLang's KVCacheConfigurator for one worker without parallelism."""
    import torch

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config = ModelConfig(model_path=str(model))
    layers = config.num_hidden_layers
    v4 = bool(settings.kv_layout)
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=config,
        server_args=get_server_args(),
        kv_cache_dtype=kv_dtype(settings),
        model_dtype=torch.bfloat16,
        page_size=settings.page_rows,
        sliding_window_size=config.sliding_window_size,
        spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE" if settings.draft_tokens else None),
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=SpecAuxHiddenStateConfig(eagle_draft_num_layers=1 if settings.draft_tokens else None),
        is_hybrid_swa=v4,
        is_hybrid_swa_compress=v4,
        use_mla_backend=not v4,
        layer_info=ModelLayerInfo(start_layer=0, end_layer=layers, num_effective_layers=layers),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
        kv_cache_dtype_str=kv_dtype_name(settings),
    )


def memory_config(configurator: Any, budget_bytes: int) -> Any:
    """SGLang's MemoryPoolConfig for a budget: the steps of KVCacheConfigurator._resolve_memory_pool_config."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    config = configurator.config_from_budget(budget_bytes)
    config.max_running_requests = configurator.resolve_max_num_reqs(config.max_total_num_tokens)
    return create_memory_pool_configurator(configurator).finalize_with_max_running_requests(config)


def _build(configurator: Any, config: Any) -> Any:
    """The steps of KVCacheConfigurator.configure behind its measurement of free GPU memory."""
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4

    sizes = configurator._derive_pool_sizes(config=config)
    hf_config = configurator.model_config.hf_config
    return configurator._build_token_to_kv_pool(
        sizes=sizes,
        is_dsa_model=is_deepseek_dsa(hf_config),
        is_dsv4_model=is_deepseek_v4(hf_config),
        req_to_token_pool=configurator._build_req_to_token_pool(max_num_reqs=sizes.max_running_requests),
    )
