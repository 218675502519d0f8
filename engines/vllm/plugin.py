"""The plugin that vLLM loads in every process (entry-point group `vllm.general_plugins`).

    register() in main, engine core and every worker -> allocate_kv_cache wrapped
      worker allocates -> manifest written, audited, one line in the log -> StartupAuditError under `error`

Switched on by KVBRIDGE_MANIFEST_DIR or KVBRIDGE_AUDIT (kvbridge/startup.py), and by KVBRIDGE_DECODE for the kernel
(decode_mode.py); off, nothing of vLLM is touched or imported. Source: vLLM 0.32.0 plugins/__init__.py,
v1/engine/core.py, v1/worker/worker_base.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvbridge.engines.vllm.decode_mode import KernelMode, KernelSwitch
from kvbridge.startup import Startup, worker_name

if TYPE_CHECKING:
    from kvbridge.documents import DeclaredManifest
    from kvbridge.engines.vllm.live import Allocation
    from kvbridge.rules import Finding

log = logging.getLogger("vllm.kvbridge")  # below vLLM's own logger, so that its handlers and format apply
_state = {"registered": False}


def register() -> None:
    """Wraps vLLM's allocator when the environment asks for it; the entry point. Never raises."""
    try:
        startup, switch = Startup.from_environment(log), KernelSwitch.read(log)
        if _state["registered"]:
            return
        if startup.active:
            from kvbridge.engines.vllm.live import after_allocation

            after_allocation(lambda allocation: check_allocation(startup, allocation))
            log.info("kvbridge: plugin registered, audit %s, manifests to %s", startup.mode.value, startup.directory)
        if switch.mode is not KernelMode.OFF:
            from kvbridge.engines.vllm.decode_switch import switch_on

            switch_on(switch)
        _state["registered"] = startup.active or switch.mode is not KernelMode.OFF
    except Exception:
        log.exception("kvbridge: the plugin failed by its own fault; the engine goes on without it")


def check_allocation(startup: Startup, allocation: Allocation) -> None:
    """Writes and audits the manifest of one allocation.

    Args:
        startup: What was asked for.
        allocation: The tensors and what vLLM declared of them.

    Raises:
        StartupAuditError: The mode is `error` and the tensors contradict their layout. Nothing else is raised.
    """
    worker = "vllm"

    def capture() -> tuple[DeclaredManifest, tuple[Finding, ...]]:
        from kvbridge.documents import DeclaredManifest
        from kvbridge.engines.vllm.live import manifest_of

        manifest, findings = manifest_of(allocation)
        return DeclaredManifest.model_validate(manifest.document()), findings

    try:
        from kvbridge.engines.vllm.live import worker_rank

        parallel = getattr(allocation.vllm_config, "parallel_config", None)
        replica = parallel.data_parallel_rank if parallel is not None and parallel.data_parallel_size > 1 else None
        worker = worker_name("vllm", worker_rank(allocation.vllm_config), replica=replica)
    except Exception:
        log.exception("kvbridge: no rank found; the manifest is named %s", worker)
    startup.check(capture, worker=worker, log=log)
