"""Runs in SGLang's interpreter: the plugin as SGLang itself loads it, once per scenario, each in a forked process.

    plugin_cases.py MODELS FOLDER OUT.json     OUT.json: {scenario: {"error", "log", "files"}}

SGLang is imported once; a fork gives every scenario a process in which no plugin was loaded yet, like a new worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang.srt.model_executor.model_runner  # noqa: F401  imported here so that forks share it
import sglang.test.kits.attention_unittest.attention_methods.dsv4_attention as dsv4
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, override_platform

from kvbridge.engine import resolve_options
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.build import built_pool, make_configurator, server_arguments
from kvbridge.engines.sglang.options import resolve_settings
from kvbridge.engines.sglang.workarounds import published_arguments
from kvbridge.models import load_model

MODELS, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
OPTIONS = {"max-running-requests": 4, "max-total-tokens": 8192}
WRONG_STRIDE = 38_016  # 37,440 + 576: a multiple of 576, so no kernel would refuse it


@contextlib.contextmanager
def tiny_pool(model: str = "v4", **given: Any) -> Iterator[Any]:
    """SGLang's owner pool for a tiny model."""
    config = load_model(MODELS / model)
    options = resolve_options(ENGINE, OPTIONS | given)
    settings = resolve_settings(config, options)
    with built_pool(MODELS / model, settings=settings, options=options, budget_bytes=1 << 50) as pool:
        yield pool


def alter_one_stride() -> None:
    """A test hook: the second layer of the C4 pool gets pages that start further apart than SGLang says."""

    def alter(_: None, pool: Any, *arguments: Any, **keywords: Any) -> None:
        if pool.page_size == 64 and len(pool.kv_buffer) == 2:
            pages, width = pool.kv_buffer[1].shape
            wide = torch.zeros(pages * WRONG_STRIDE, dtype=torch.uint8)
            pool.kv_buffer[1] = wide.as_strided((pages, width), (WRONG_STRIDE, 1))

    target = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4SingleKVPool.__init__"
    HookRegistry.register(target, alter, HookType.AFTER)


def build() -> None:
    """Loads the plugins as a worker does and builds the owner pool."""
    load_plugins()
    with tiny_pool():
        pass


def build_altered() -> None:
    """The same with one stride altered."""
    alter_one_stride()
    build()


def build_other_rank() -> None:
    """Worker 1 of 2."""
    load_plugins()
    with get_parallel().override(tp_rank=1, tp_size=2), tiny_pool():
        pass


def build_two_drafts() -> None:
    """Two heads of a draft model beside their target."""
    load_plugins()
    with tiny_pool() as target:
        drafts = [type(target)(**draft_arguments()) for _ in range(2)]
        assert len(drafts) == 2


def draft_arguments() -> dict[str, Any]:
    """What SGLang passes for a draft worker: a sliding-window layer and no compressed pools."""
    return {
        "max_num_reqs": 4,
        "swa_size": 1024,
        "c4_size": 0,
        "c128_size": 0,
        "c4_state_pool_size": 0,
        "c128_state_pool_size": 0,
        "page_size": 256,
        "swa_page_size": 256,
        "dtype": torch.float8_e4m3fn,
        "c4_state_dtype": torch.float32,
        "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "indexer_head_dim": 128,
        "layer_num": 1,
        "device": "cpu",
        "enable_memory_saver": False,
        "compression_ratios": [0],
        "is_draft_worker": True,
    }


def allocate_classic() -> None:
    """ModelRunner.alloc_memory_pool itself, on a runner that has SGLang's configurator and nothing else."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load_plugins()
    given = OPTIONS | {"page-size": 64, "kv-cache-dtype": "bfloat16"}
    options = resolve_options(ENGINE, given)
    settings = resolve_settings(load_model(MODELS / "v3"), options)
    arguments = server_arguments(settings, options) | {"mem_fraction_static": 0.9}
    with published_arguments(**arguments):
        configurator = make_configurator(MODELS / "v3", settings)
        # Free GPU memory is the one thing that cannot be measured here.
        type(configurator)._profile_available_bytes = lambda *_: 1 << 30
        runner = SimpleNamespace(
            init_kv_cache_configurator=lambda _: None,
            kv_cache_configurator=configurator,
            pre_model_load_memory=0,
            is_hybrid_swa=False,
            is_draft_worker=False,
            model_config=configurator.model_config,
            memory_pool_config=None,
            _init_post_memory_pool_components=lambda: None,
        )
        ModelRunner.alloc_memory_pool(runner)
        assert type(runner.token_to_kv_pool).__name__ == "MLATokenToKVPool"


def backend_decodes() -> None:
    """SGLang's own attention fixture: the real DeepseekV4AttnBackend decodes from an audited pool."""
    load_plugins()
    override_platform(is_sm120=True).install()
    case = next(case for case in dsv4.make_dsv4_cases("dsv4") if case.name == "dsv4_swa_decode_within_window")
    case = dataclasses.replace(case, attn_sink_value=0.0)
    dsv4.run_dsv4_attention_case(unittest.TestCase(), case, device="cpu")


def build_uniform() -> None:
    """A pool of uniform fp8 rows, which kvbridge's kernel does not serve."""
    load_plugins()
    with tiny_pool(**{"dsv4-attn-backend": "trtllm"}):
        pass


def backend_altered() -> None:
    """The same fixture with the sliding-window pool's stride altered: it must not come as far as a backend."""

    def alter(_: None, pool: Any, *arguments: Any, **keywords: Any) -> None:
        pages, width = pool.kv_buffer[0].shape
        wide = torch.zeros(pages * (width + 576), dtype=torch.uint8)
        pool.kv_buffer[0] = wide.as_strided((pages, width), (width + 576, 1))

    target = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4SingleKVPool.__init__"
    HookRegistry.register(target, alter, HookType.AFTER)
    built: list[str] = []
    backend = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend.__init__"
    HookRegistry.register(backend, lambda *_, **__: built.append("backend"), HookType.AFTER)
    try:
        backend_decodes()
    finally:
        print(f"backends built: {len(built)}")


def patched_functions() -> tuple[Any, Any]:
    """What the plugin may wrap."""
    from sglang.kernels.ops.attention import flash_mla_sm120
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    return flash_mla_sm120.flash_mla_with_kvcache_sm120, DeepSeekV4TokenToKVPool.__init__


SCENARIOS: dict[str, tuple[dict[str, str], Callable[[], None]]] = {
    "error-good": ({"KVBRIDGE_AUDIT": "error", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, build),
    "error-altered": ({"KVBRIDGE_AUDIT": "error", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, build_altered),
    "warn-altered": ({"KVBRIDGE_AUDIT": "warn", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, build_altered),
    "off": ({"KVBRIDGE_AUDIT": "off", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, build_altered),
    "folder-alone": ({"KVBRIDGE_MANIFEST_DIR": "{folder}"}, build_altered),
    "not-asked": ({}, build_altered),
    "misspelt": ({"KVBRIDGE_AUDIT": "eror"}, build_altered),
    "own-fault": ({"KVBRIDGE_AUDIT": "error", "KVBRIDGE_MANIFEST_DIR": "/dev/null/manifests"}, build_altered),
    "other-rank": ({"KVBRIDGE_AUDIT": "error", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, build_other_rank),
    "two-drafts": ({"KVBRIDGE_AUDIT": "error", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, build_two_drafts),
    "classic": ({"KVBRIDGE_AUDIT": "error", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, allocate_classic),
    "backend-decodes": ({"KVBRIDGE_AUDIT": "error", "KVBRIDGE_MANIFEST_DIR": "{folder}"}, backend_decodes),
    "decode-on": ({"KVBRIDGE_DECODE": "on"}, backend_decodes),
    "decode-uniform": ({"KVBRIDGE_DECODE": "on"}, build_uniform),
    "decode-forced-uniform": ({"KVBRIDGE_DECODE": "force"}, build_uniform),
    "decode-forced-backend": ({"KVBRIDGE_DECODE": "force", "KVBRIDGE_BACKEND": "cuda"}, build),
    "decode-compare": ({"KVBRIDGE_DECODE": "compare", "KVBRIDGE_COMPARE_DIR": "{folder}"}, backend_decodes),
    "decode-misspelt": ({"KVBRIDGE_DECODE": "yes"}, build),
    "backend-altered": ({"KVBRIDGE_AUDIT": "error"}, backend_altered),
}


def run(name: str) -> None:
    """Runs one scenario in a fork; its log and its exception go to files."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        return
    with (FOLDER / f"{name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", force=True)
        variables, scenario = SCENARIOS[name]
        os.environ.update({key: value.format(folder=folder) for key, value in variables.items()})
        error = ""
        try:
            scenario()
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"
            traceback.print_exc()
        wrapped = [hasattr(function, "__wrapped__") for function in patched_functions()]
        print(f"decode wrapped: {wrapped[0]}, pool wrapped: {wrapped[1]}")
        sys.stdout.flush()
        sys.stderr.flush()
        (FOLDER / f"{name}.error").write_text(error)
    os._exit(0)


def main() -> None:
    """Runs every scenario."""
    torch.set_num_threads(1)
    results = {}
    for name in SCENARIOS:
        run(name)
        files = {path.name: json.loads(path.read_text()) for path in sorted((FOLDER / name).glob("*.json"))}
        lines = {
            path.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted((FOLDER / name).glob("*.jsonl"))
        }
        log, error = (FOLDER / f"{name}.log").read_text(), (FOLDER / f"{name}.error").read_text()
        results[name] = {"error": error, "log": log, "files": files, "lines": lines}
    Path(sys.argv[3]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
