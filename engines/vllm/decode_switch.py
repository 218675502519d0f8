"""Switches the kernel on in one worker: hooks the allocator, and the choice of the attention class on a GPU.

    switch_on --> after each allocation:  bind every layer, replace the CPU operator          decode.py
              |-> when vLLM imports its CUDA model:  a subclass of its attention class        decode_cuda.py
              '-> on a GPU, in vLLM's registry:      a subclass of FLASHMLA_SPARSE for V3.2   decode_v32.py

Called by the plugin in every process and by the connector in its worker; doing it twice does nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvbridge.engines.vllm.decode_mode import KernelMode, KernelSwitch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbridge.engines.vllm.decode import Observer
    from kvbridge.engines.vllm.live import Allocation

log = logging.getLogger("vllm.kvbridge")
PATCHED = (
    ("torch.ops._C", "flash_mla_with_kvcache_cpu"),
    ("vllm.v1.worker.utils", "allocate_kv_cache"),
    ("vllm.v1.worker.gpu_model_runner", "allocate_kv_cache"),
    ("vllm.v1.worker.gpu.attn_utils", "allocate_kv_cache"),
    ("vllm.models.deepseek_v4.nvidia.model", "_select_dsv4_attn_cls"),
)
"""Every name of vLLM that may be replaced, by module; none of them is while the mode is `off`."""
_undo: list[Callable[[], None]] = []


def switch_on(switch: KernelSwitch) -> None:
    """Makes this process's worker use the kernel as soon as it has caches.

    Args:
        switch: What is asked for; `off` does nothing.
    """
    if switch.mode is KernelMode.OFF or _undo:
        return
    from kvbridge.engines.vllm.decode_cuda import hook_selection
    from kvbridge.engines.vllm.live import after_allocation

    _undo.append(after_allocation(lambda allocation: serve(allocation, switch)))
    _undo.append(hook_selection(switch))
    if on_gpu():
        from kvbridge.engines.vllm.decode_v32 import register

        _undo.append(register(switch))


def on_gpu() -> bool:
    """Whether this process's platform is a CUDA GPU; asks no driver."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def switch_off() -> None:
    """Gives vLLM everything back; layers of a GPU model that were built meanwhile stay what they are."""
    from kvbridge.engines.vllm.decode import DECODER

    DECODER.uninstall()
    while _undo:
        _undo.pop()()


def serve(allocation: Allocation, switch: KernelSwitch) -> None:
    """Binds an allocation's layers; on a GPU the attention class was chosen before and there is nothing to do.

    Raises:
        EngineError: The mode is `force` and the kernel cannot serve.
    """
    from kvbridge.engine import EngineError
    from kvbridge.engines.vllm.decode import refuse, take_over
    from kvbridge.engines.vllm.live import runs_on_cpu

    if runs_on_cpu():
        take_over(allocation, switch.mode, observer_of(allocation, switch))
    elif not _undo:
        late = EngineError("config of a connector: got a GPU, expected a CPU: set KVBRIDGE_DECODE before vLLM starts")
        refuse(switch.mode, late)


def observer_of(allocation: Allocation, switch: KernelSwitch) -> Observer | None:
    """What gets the calls instead of the kernel: a comparison under `compare`, else nobody."""
    if switch.mode is not KernelMode.COMPARE:
        return None
    from kvbridge.engines.vllm.decode_compare import Comparison
    from kvbridge.engines.vllm.live import worker_rank
    from kvbridge.startup import worker_name

    path = None
    if switch.directory is not None:
        switch.directory.mkdir(parents=True, exist_ok=True)
        path = switch.directory / f"{worker_name('vllm', worker_rank(allocation.vllm_config))}-calls.jsonl"
        path.unlink(missing_ok=True)
    return Comparison(path)
