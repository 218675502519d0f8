"""DeepSeek-V3.2 decode of vLLM on a GPU, through vLLM's public registry of attention backends.

    register_backend(FLASHMLA_SPARSE, "kvbridge.engines.vllm.decode_v32.KvbridgeFlashMLASparseBackend")
        impl._fp8_flash_mla_kernel(q, pages, slots, ...) -> out, lse         the one method that is overridden

    q [batch, queries, heads, 576]   page |512 e4m3|4 fp32 scales|64 bf16| x 64 rows of 656 bytes   slots int32, -1 dead
    out [batch, queries, heads, 512]   lse [batch, heads, queries], natural, +inf where no slot is live, as FlashMLA

bf16 and NVFP4 caches stay with vLLM's kernel. Source: vLLM 0.32.0 and 0.33.0 v1/attention/backends/registry.py
(register_backend), v1/attention/backends/mla/flashmla_sparse.py (FlashMLASparseImpl; the method is the same in both).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbridge.engine import EngineError
from kvbridge.engines.vllm.decode import refuse
from kvbridge.engines.vllm.decode_cuda import left_to_vllm, prepared_for
from kvbridge.engines.vllm.decode_mode import KernelMode, KernelSwitch
from kvbridge.errors import KVBridgeError

if TYPE_CHECKING:
    import torch

    from kvbridge.kernels.mla import Caps
    from kvbridge.layout import PageLayout

log = logging.getLogger("vllm.kvbridge")
BACKEND = "FLASHMLA_SPARSE"
CLASS = "KvbridgeFlashMLASparseBackend"
RECORD = "dsa"
CACHE_DTYPE = "fp8_ds_mla"
_mode = KernelMode.ON


def __getattr__(name: str) -> Any:
    if name == CLASS:
        return backend_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(switch: KernelSwitch) -> Callable[[], None]:
    """Registers the backend in place of vLLM's FLASHMLA_SPARSE.

    Returns:
        A function that gives vLLM its own backend back.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    global _mode  # noqa: PLW0603  vLLM builds the backend from its name and hands nothing over
    _mode = switch.mode
    register_backend(AttentionBackendEnum[BACKEND], f"{__name__}.{CLASS}")
    return AttentionBackendEnum[BACKEND].clear_override  # type: ignore[no-any-return]


@functools.cache
def backend_class() -> type:
    """vLLM's backend with kvbridge's implementation; made when vLLM asks for it by name."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    class KvbridgeFlashMLASparseBackend(FlashMLASparseBackend):  # type: ignore[misc]
        """vLLM's FLASHMLA_SPARSE in everything but the fp8 kernel."""

        @staticmethod
        def get_impl_cls() -> type:
            return impl_class()

    return KvbridgeFlashMLASparseBackend


@functools.cache
def impl_class() -> type:
    """vLLM's implementation with the fp8 kernel replaced."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    class KvbridgeFlashMLASparseImpl(FlashMLASparseImpl):  # type: ignore[misc]
        """vLLM's sparse MLA with kvbridge's kernel."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.kvbridge_decode = make_decode(self, _mode)

        def _fp8_flash_mla_kernel(
            self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, topk_indices: torch.Tensor, kernel_metadata: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if self.kvbridge_decode is not None:
                try:
                    return self.kvbridge_decode.run(q, kv_c_and_k_pe_cache, topk_indices)
                except KVBridgeError as refusal:
                    left_to_vllm(type(refusal).__name__, str(refusal))
            return super()._fp8_flash_mla_kernel(  # type: ignore[no-any-return]
                q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata
            )

    return KvbridgeFlashMLASparseImpl


def make_decode(impl: Any, mode: KernelMode) -> SparseDecode | None:
    """The decode of one layer, or None with one line in the log where vLLM's kernel stays.

    Raises:
        EngineError: The mode is `force` and the kernel cannot serve.
    """
    from kvbridge.kernels import mla
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    try:
        if impl.kv_cache_dtype != CACHE_DTYPE:
            raise EngineError(f"kv_cache_dtype: got {impl.kv_cache_dtype}, expected {CACHE_DTYPE}")
        config = get_current_vllm_config()
        caps = mla.Caps(
            queries=int(config.scheduler_config.max_num_batched_tokens),
            heads=int(impl.num_heads),
            widths=(int(impl.topk_indices_buffer.shape[-1]),),
            records=(RECORD,),
        )
        choice = mla.explain(mla.plan(caps), device=current_platform.device_type)
        if choice.backend != "cuda" and choice.by == "preference":
            raise EngineError(f"backend: got {choice}, expected cuda, or the name of another in KVBRIDGE_BACKEND")
    except KVBridgeError as refusal:
        _refuse_once(mode, str(refusal))
        return None
    return SparseDecode(caps, float(impl.softmax_scale))


@functools.lru_cache(maxsize=64)
def _refuse_once(mode: KernelMode, reason: str) -> None:
    """Every layer has an implementation of its own; what there is to say is said for the first."""
    refuse(mode, EngineError(reason))


@functools.lru_cache(maxsize=64)
def _layout(page_rows: int, page_stride_bytes: int) -> PageLayout:
    from kvbridge.layout import PageLayout

    return PageLayout.for_rows(RECORD, page_rows=page_rows, policy="packed", page_stride_bytes=page_stride_bytes)


class SparseDecode:
    """Decode of one layer; all sequences' queries in one call.

    Attributes:
        caps: The largest call.
        scale: Multiplies q . k.
    """

    def __init__(self, caps: Caps, scale: float) -> None:
        self.caps = caps
        self.scale = scale

    def run(self, q: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's `_fp8_flash_mla_kernel`.

        Args:
            q: bf16 `[batch, queries, heads, 576]`.
            pages: One-byte `[pages, 64, 656]`, any page stride.
            slots: int32 `[batch, queries, width]`; -1 is dead.

        Returns:
            Output bf16 `[batch, queries, heads, 512]` and log-sum-exp fp32 `[batch, heads, queries]`.

        Raises:
            ArgumentError: A tensor does not fit the plan; nothing was computed.
            LayoutError: The pages are not dense rows of 656 bytes.
        """
        import torch

        from kvbridge.kernels import mla
        from kvbridge.view import PageView

        batch, queries, heads, _ = q.shape
        # Under decode context parallelism the heads of all ranks are gathered into q.
        caps = self.caps if heads == self.caps.heads else replace(self.caps, heads=heads)
        view = PageView.from_tensor(pages, _layout(int(pages.shape[1]), int(pages.stride(0)) * pages.element_size()))
        out = q.new_empty((batch * queries, heads, 512))
        lse = out.new_empty((batch, queries, heads), dtype=torch.float32)
        mla.run(
            prepared_for(caps, q.device),
            q=q.reshape(batch * queries, heads, q.shape[3]),
            caches=[mla.Cache(view=view, slots=slots.reshape(batch * queries, -1))],
            out=out,
            scale=self.scale,
            lse=lse.view(batch * queries, heads),
            lse_format=mla.LseFormat(empty=math.inf),
        )
        return out.view(batch, queries, heads, 512), lse.transpose(1, 2)
