"""A KV connector that transfers nothing: it audits the tensors that every connector is handed.

    KVTransferConfig(kv_connector="KvbridgeConnector", kv_connector_module_path="kvbridge.engines.vllm.connector",
                     kv_role="kv_both", kv_connector_extra_config={"audit": "error", "manifest_dir": "manifests"})

`"kernel": "on"` in the same config switches the kernel on (decode_mode.py), on a CPU: on a GPU the attention class is
chosen before a connector exists, so there it takes the environment's KVBRIDGE_DECODE.

The connector interface is vLLM's public one, so this is the way in where plugins are not allowed. The class derives
from vLLM's base class and is therefore made when it is asked for. Source: vLLM 0.32.0
distributed/kv_transfer/kv_connector/{factory.py,v1/base.py}.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from kvbridge.engines.vllm.decode_mode import COMPARE_VARIABLE, KERNEL_VARIABLE, KernelMode, KernelSwitch
from kvbridge.engines.vllm.plugin import check_allocation, log
from kvbridge.startup import AUDIT_VARIABLE, DIRECTORY_VARIABLE, Startup

if TYPE_CHECKING:
    import torch


def __getattr__(name: str) -> Any:
    if name == "KvbridgeConnector":
        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def startup_of(extra_config: dict[str, Any]) -> Startup:
    """What a connector's own config asks for; the environment's variables where it says nothing; else `warn`.

    Args:
        extra_config: `kv_connector_extra_config`, with `audit` and `manifest_dir`.
    """
    asked = {
        AUDIT_VARIABLE: str(extra_config.get("audit") or os.environ.get(AUDIT_VARIABLE) or "warn"),
        DIRECTORY_VARIABLE: str(extra_config.get("manifest_dir") or os.environ.get(DIRECTORY_VARIABLE) or ""),
    }
    return Startup.from_environment(log, asked)


def switch_of(extra_config: dict[str, Any]) -> KernelSwitch:
    """Which kernel a connector's own config asks for, with `kernel` and `compare_dir`; `off` where it says nothing."""
    names = {KERNEL_VARIABLE: "kernel", COMPARE_VARIABLE: "compare_dir"}
    return KernelSwitch.read(log, {name: str(extra_config.get(key) or "") for name, key in names.items()})


@cache
def connector_class() -> type:
    """Makes the connector's class; it is the same for every caller in a process."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

    class KvbridgeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
        """Audits at start-up and otherwise does nothing."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            self._config = vllm_config
            self._cache_config = kv_cache_config
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
            self._startup = startup_of(dict(extra))
            self._switch = switch_of(dict(extra))

        def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
            """Audits the tensors; vLLM calls this once in every worker, before it serves."""
            from kvbridge.engines.vllm.declared import is_packed, page_tokens_of
            from kvbridge.engines.vllm.live import Allocation

            allocation = Allocation(
                kv_caches=kv_caches,
                kv_cache_config=self._cache_config,
                packed=is_packed(self._cache_config),
                page_tokens=page_tokens_of(kv_caches, self._cache_config),
                vllm_config=self._config,
            )
            check_allocation(self._startup, allocation)
            if self._switch.mode is not KernelMode.OFF:
                from kvbridge.engines.vllm.decode_switch import serve

                serve(allocation, self._switch)

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            """Loads nothing."""

        def wait_for_layer_load(self, layer_name: str) -> None:
            """Waits for nothing."""

        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
            """Saves nothing."""

        def wait_for_save(self) -> None:
            """Waits for nothing."""

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            """Offers no tokens."""
            return 0, False

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            """Keeps no state."""

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            """Sends nothing from the scheduler to the workers."""
            return KVConnectorMetadata()

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            """Lets vLLM free the blocks."""
            return False, None

    return KvbridgeConnector
