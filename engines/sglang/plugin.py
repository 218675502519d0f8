"""The plugin that SGLang loads in every process (entry-point group `sglang.srt.plugins`).

    load_plugins() -> register() -> hooks
      DeepSeekV4TokenToKVPool.__init__    after: the owner pool, wherever it is built
      ModelRunner.alloc_memory_pool       after: every pool family, target and draft, before backends and CUDA graphs
      flash_mla_with_kvcache, flash_mla_with_kvcache_sm120    around: decode by kvbridge.kernels.mla

Audit and manifest are switched on by KVBRIDGE_MANIFEST_DIR or KVBRIDGE_AUDIT (kvbridge/startup.py), decode by
KVBRIDGE_DECODE (decode_switch.py); with none of them set no object of SGLang is touched. SGLang logs what a plugin's
function raises and goes on, but not what a hook raises: that ends the worker before it serves.
Source: SGLang 0.5.23 srt/plugins/__init__.py, srt/plugins/hook_registry.py, model_executor/model_runner.py.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

from kvbridge.documents import DeclaredManifest
from kvbridge.engines.sglang.decode_switch import OWNER_POOL, DecodeSwitch, register_decode
from kvbridge.manifest import Rank
from kvbridge.rules import Finding
from kvbridge.startup import Startup, worker_name

ALLOCATION = "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool"

log = logging.getLogger("kvbridge.sglang")
_roles: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def register() -> None:
    """Registers the hooks when the environment asks for them; the entry point."""
    startup = Startup.from_environment(log)
    if startup.active:
        _register_audit(startup)
    switch = DecodeSwitch.read()
    if switch.mode != "off":
        rank, replica = worker_rank()
        register_decode(switch, worker=worker_name("sglang", rank, replica=replica))


def _register_audit(startup: Startup) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_owner_pool(_: None, pool: Any, *arguments: Any, **keywords: Any) -> None:
        check_pool(startup, pool, draft=bool(keywords.get("is_draft_worker")))

    def after_allocation(_: None, runner: Any, *arguments: Any, **keywords: Any) -> None:
        pool = getattr(runner, "token_to_kv_pool", None)
        path = getattr(getattr(runner, "model_config", None), "model_path", None)
        draft = bool(getattr(runner, "is_draft_worker", False))
        check_pool(startup, pool, draft=draft, model=Path(path).name if path else None)

    HookRegistry.register(OWNER_POOL, after_owner_pool, HookType.AFTER)
    HookRegistry.register(ALLOCATION, after_allocation, HookType.AFTER)
    log.info("kvbridge: SGLang plugin registered, audit %s, manifests to %s", startup.mode.value, startup.directory)


def check_pool(startup: Startup, pool: Any, *, draft: bool = False, model: str | None = None) -> None:
    """Writes and audits the manifest of one live pool.

    Args:
        startup: What the environment asks for.
        pool: The pool.
        draft: Whether it is a draft worker's.
        model: Model name.

    Raises:
        StartupAuditError: The mode is `error` and the pool contradicts its layout. Nothing else is raised.
    """
    role = _role(pool, draft=draft)
    rank, replica = worker_rank()

    def capture() -> tuple[DeclaredManifest, tuple[Finding, ...]]:
        from kvbridge.engines.sglang.capture import sglang_version
        from kvbridge.engines.sglang.layouts import read_pool
        from kvbridge.engines.sglang.live import declare, live_findings

        caches = read_pool(pool)
        options = {"worker": role, "pool-class": type(pool).__name__}
        manifest = declare(caches, version=sglang_version(), model=model, rank=rank, options=options)
        return manifest, live_findings(caches)

    startup.check(capture, worker=worker_name("sglang", rank, role=role, replica=replica), log=log)


def _role(pool: Any, *, draft: bool) -> str:
    """`target` or `draft`, numbered from the second pool on: a draft of several heads has a pool for each."""
    role = "draft" if draft else "target"
    try:
        known = _roles.get(pool)
        if known is not None:
            return known
        number = sum(name.startswith(role) for name in _roles.values())
        return _roles.setdefault(pool, role if not number else f"{role}{number + 1}")
    except TypeError:  # a pool class that is no key of a weak dictionary
        return role


def worker_rank() -> tuple[Rank, int | None]:
    """This process's rank, and its data-parallel replica; SGLang raises for facts that nobody published."""

    def read(name: str, default: int) -> int:
        try:
            from sglang.srt.runtime_context import get_parallel

            value = getattr(get_parallel(), name)
        except Exception:  # unpublished facts raise errors of several types
            return default
        return default if value is None else int(value)

    rank = Rank(
        tensor_parallel_rank=read("tp_rank", 0),
        tensor_parallel_size=read("tp_size", 1),
        pipeline_parallel_rank=read("pp_rank", 0),
        pipeline_parallel_size=read("pp_size", 1),
        decode_context_parallel_rank=read("attn_dcp_rank", 0),
        decode_context_parallel_size=read("attn_dcp_size", 1),
    )
    replica = read("dp_rank", -1)
    return rank, replica if replica >= 0 and read("dp_size", 1) > 1 else None
