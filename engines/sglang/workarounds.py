"""Every trap of SGLang 0.5.23 that kvbridge steps around to build its pools without a GPU, in one place.

environment_variable  settings that SGLang reads from its environment only
published_arguments   pools read server arguments from a process-wide context; SGLang's own tests publish dummy ones
platform_sm120        the direct sliding-window pages are chosen by the platform, which is a CPU here
layout_without_gpu    select_dsv4_kv_layout asserts an SM100 GPU for the V4.1 layouts; the pools themselves do not
sliding_window_page   the configurator passes its page on; only the pool class takes another sliding-window page
fp4_without_gpu       is_float4_e2m1fn_x2 says no without CUDA, so fp4 rows would be built as a dtype that CPUs lack
attention_fixture_without_gpu   SGLang's attention fixture saves CUDA's random state and plans with CUDA kernels
index_page            the index page of ratios 1 and 2 is fixed on import, by whether DeepGEMM is there

Each is undone on leaving the `with` block. Looked at in SGLang 0.5.23: runtime_context.py (override_server_args,
override_platform), mem_cache/deepseek_v4_memory_pool.py, mem_cache/kv_cache_configurator.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

RELEASE = "0.5.23"
"""The release these are for; `capture` says so when it meets another."""


@contextmanager
def published_arguments(**fields: Any) -> Iterator[None]:
    """Publishes server arguments for the duration of the block."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(**fields):
        yield


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets one of SGLang's own environment variables."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def platform_sm120() -> Iterator[None]:
    """Makes SGLang believe in an SM120 GPU with direct sliding-window pages."""
    from sglang.srt.runtime_context import override_platform

    with environment_variable("SGLANG_OPT_SM120_DIRECT_SWA_KV", "1"), override_platform(is_sm120=True):
        yield


@contextmanager
def layout_without_gpu(kv_layout: str, compressed: str) -> Iterator[None]:
    """Answers SGLang's question for the page layout as an SM100 machine with these settings would."""
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator

    answer = (KVLayout.parse(kv_layout), None if kv_layout == "v4" else compressed)
    modules = (deepseek_v4_memory_pool, kv_cache_configurator)
    with _replaced(modules, "select_dsv4_kv_layout", lambda: answer):
        yield


@contextmanager
def sliding_window_page(rows: int) -> Iterator[None]:
    """Builds the DeepSeek-V4 pool with another logical sliding-window page."""
    from sglang.srt.mem_cache import kv_cache_configurator

    pool_class = kv_cache_configurator.DeepSeekV4TokenToKVPool

    def build(**arguments: Any) -> Any:
        return pool_class(**(arguments | {"swa_page_size": rows}))

    with _replaced((kv_cache_configurator,), "DeepSeekV4TokenToKVPool", build):
        yield


@contextmanager
def fp4_without_gpu() -> Iterator[None]:
    """Lets the configurator size and choose the fp4 pool, as on a CUDA machine."""
    import torch

    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor import pool_configurator

    def is_fp4(dtype: object) -> bool:
        return dtype == torch.float4_e2m1fn_x2

    with _replaced((kv_cache_configurator, pool_configurator), "is_float4_e2m1fn_x2", is_fp4):
        yield


@contextmanager
def attention_fixture_without_gpu() -> Iterator[None]:
    """Lets SGLang's attention fixture use the CPU's random state, and a dummy plan of compressed rows."""
    import torch

    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.layers.attention.dsv4 import compressor_v2

    def plan(compress_ratio: Any = None, *_: Any, **__: Any) -> Any:
        return deepseek_v4_backend._create_dummy_paged_compress_data(compress_ratio)

    with (
        _replaced((torch.cuda,), "get_rng_state", lambda device=None: torch.get_rng_state()),
        _replaced((torch.cuda,), "set_rng_state", lambda state, device=None: None),
        _replaced((deepseek_v4_backend, compressor_v2), "create_paged_compressor_data", plan),
    ):
        yield


@contextmanager
def index_page(rows: int) -> Iterator[None]:
    """Builds index pools of ratios 1 and 2 with the page that a machine with DeepGEMM's sparse logits would take."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool

    with _replaced((deepseek_v4_memory_pool,), "DSV41_INDEX_PAGE_SIZE", rows):
        yield


@contextmanager
def _replaced(modules: tuple[ModuleType, ...], name: str, value: Callable[..., Any] | int) -> Iterator[None]:
    before = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            setattr(module, name, original)
