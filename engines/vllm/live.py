"""What a live vLLM worker says of itself: its allocation, its options by the planner's names, its rank.

    allocate_kv_cache(kv_cache_config, device, layout, kernel_block_sizes) -> {layer: tensor}
        '-- after_allocation(callback): both model runners allocate through this one function

Sources: vLLM 0.32.0 and 0.33.0 v1/worker/utils.py, v1/worker/gpu_model_runner.py, v1/worker/gpu/attn_utils.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbridge.engines.vllm.declared import layer_specs_of
from kvbridge.engines.vllm.layouts import installed_version
from kvbridge.engines.vllm.tensors import captured_manifest
from kvbridge.manifest import Manifest, Rank
from kvbridge.rules import Finding

if TYPE_CHECKING:
    import torch

# Both runners import the function by name, so a wrapper must be put where they look.
_USERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")


@dataclass(frozen=True, slots=True)
class Allocation:
    """One call of vLLM's allocator.

    Attributes:
        kv_caches: Layer name to tensor.
        kv_cache_config: What was allocated.
        packed: Whether blocks are outermost.
        page_tokens: Kernel block of each group.
        vllm_config: The worker's configuration; None where none is set.
    """

    kv_caches: Mapping[str, torch.Tensor]
    kv_cache_config: Any
    packed: bool
    page_tokens: Mapping[int, int]
    vllm_config: Any


def after_allocation(callback: Callable[[Allocation], None]) -> Callable[[], None]:
    """Calls back after each allocation of KV caches in this process, before anything is served.

    Args:
        callback: Gets the allocation; what it raises ends the worker's start.

    Returns:
        A function that takes the wrapper off again.
    """
    from vllm.config import vllm as configs
    from vllm.v1.worker import utils

    original = utils.allocate_kv_cache

    def allocate_kv_cache(
        kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        kv_caches: dict[str, torch.Tensor] = original(kv_cache_config, device, layout, kernel_block_sizes)
        callback(
            Allocation(
                kv_caches=kv_caches,
                kv_cache_config=kv_cache_config,
                packed=layout.is_block_outermost,
                page_tokens=dict(enumerate(kernel_block_sizes or ())),
                vllm_config=configs.get_current_vllm_config_or_none(),
            )
        )
        return kv_caches

    def put(function: Any, instead_of: Any) -> None:
        for module in (utils, *(sys.modules[name] for name in _USERS if name in sys.modules)):
            if getattr(module, "allocate_kv_cache", None) is instead_of:
                module.allocate_kv_cache = function

    put(allocate_kv_cache, original)
    return lambda: put(original, allocate_kv_cache)


def manifest_of(allocation: Allocation) -> tuple[Manifest, tuple[Finding, ...]]:
    """The manifest of an allocation, and the findings where a tensor differs from vLLM's declaration of it."""
    config = allocation.vllm_config
    return captured_manifest(
        allocation.kv_caches,
        allocation.kv_cache_config,
        version=installed_version(),
        packed=allocation.packed,
        page_tokens=allocation.page_tokens,
        model=model_name(config),
        options=options_of(config, allocation.kv_cache_config),
        rank=worker_rank(config),
    )


def model_name(vllm_config: Any) -> str | None:
    """Last part of the model's path or repository name."""
    model = getattr(getattr(vllm_config, "model_config", None), "model", None)
    return None if model is None else str(model).rstrip("/").rsplit("/", maxsplit=1)[-1]


def options_of(vllm_config: Any, kv_cache_config: Any) -> dict[str, str | int | bool]:
    """The worker's settings by the planner's option names: planning with them gives the same layouts.

    Args:
        vllm_config: The worker's configuration; None gives no options.
        kv_cache_config: What was allocated.
    """
    if vllm_config is None:
        return {}
    cache, scheduler, parallel = (
        vllm_config.cache_config,
        vllm_config.scheduler_config,
        vllm_config.parallel_config,
    )
    attention = vllm_config.attention_config
    return {
        "block-size": block_tokens(kv_cache_config) or int(cache.block_size),
        "kv-cache-dtype": str(cache.cache_dtype),
        "attention-backend": _backend(getattr(attention, "backend", None)),
        "indexer-kv-dtype": "mxfp4" if getattr(attention, "indexer_kv_dtype", "") == "mxfp4" else "fp8",
        "indexer-sparse-logits": bool(getattr(attention, "indexer_sparse_logits", False)),
        "arch": device_arch(),
        "speculative-tokens": int(vllm_config.num_speculative_tokens),
        "tensor-parallel-size": int(parallel.tensor_parallel_size),
        "decode-context-parallel-size": int(parallel.decode_context_parallel_size),
        "pipeline-parallel-size": int(parallel.pipeline_parallel_size),
        "pipeline-parallel-rank": worker_rank(vllm_config).pipeline_parallel_rank,
        "max-model-len": int(vllm_config.model_config.max_model_len),
        "max-num-batched-tokens": int(scheduler.max_num_batched_tokens),
        "async-scheduling": bool(scheduler.async_scheduling),
        "num-gpu-blocks-override": int(kv_cache_config.num_blocks),
    }


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens of a block of the caches that grow with the sequence; 0 where there are none.

    `cache_config.block_size` is no help: once groups are known vLLM sets it to the smallest of their block sizes.
    """
    kinds = ("SlidingWindowMLASpec", "CircularBufferSpec")
    sizes = [
        spec.block_size for _, spec in layer_specs_of(kv_cache_config).values() if type(spec).__name__ not in kinds
    ]
    return int(sizes[0]) if sizes else 0


def _backend(backend: Any) -> str:
    name = getattr(backend, "name", "") or ""
    if "MEGA" in name:
        return "flashmla_mega_attn"
    return "flashinfer" if "FLASHINFER" in name else "flashmla" if "FLASHMLA" in name else "auto"


def device_arch() -> str:
    """The planner's name of the worker's device: `cpu`, `cpu-amx`, or `sm` and the capability's family."""
    from vllm.platforms import current_platform

    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    if capability is not None:
        return f"sm{capability.major}0"
    import torch

    return "cpu-amx" if torch.cpu._is_amx_tile_supported() else "cpu"


def runs_on_cpu() -> bool:
    """Whether the worker's device is a CPU, with AMX or without."""
    return device_arch().startswith("cpu")


def worker_rank(vllm_config: Any) -> Rank:
    """Which worker this process is; rank 0 of 1 where no groups were made."""
    from vllm.distributed import parallel_state

    def rank(name: str) -> int:
        try:
            return int(getattr(parallel_state, name)().rank_in_group)
        except (AssertionError, AttributeError):
            return 0

    parallel = getattr(vllm_config, "parallel_config", None)
    return Rank(
        tensor_parallel_rank=rank("get_tp_group"),
        tensor_parallel_size=getattr(parallel, "tensor_parallel_size", 1),
        pipeline_parallel_rank=rank("get_pp_group"),
        pipeline_parallel_size=getattr(parallel, "pipeline_parallel_size", 1),
        decode_context_parallel_rank=rank("get_dcp_group"),
        decode_context_parallel_size=getattr(parallel, "decode_context_parallel_size", 1),
    )
