"""DeepSeek-V4 decode of vLLM on a GPU: a subclass of its FlashMLA attention, chosen where vLLM chooses the class.

    vllm.models.deepseek_v4.nvidia.model._select_dsv4_attn_cls(vllm_config) -> DeepseekV4FlashMLAAttention
        '-- wrapped when vLLM imports the module --> a subclass of it whose _forward_decode calls kvbridge's kernel

    q [tokens, 64 or 128 heads, 512]   window slots int32 [tokens, 1, 128], extra slots [tokens, 1, W], lengths of both
    64 or 128 heads are padding above n_local_heads: they are neither read nor written, vLLM cuts them off

Prefill, warm-up, head padding and the output projection stay vLLM's. Every other attention class (FlashInfer, SM120,
ROCm, mega attention) stays vLLM's as a whole. Sources: vLLM 0.32.0 and 0.33.0 models/deepseek_v4/nvidia/flashmla.py
(the same file in both), nvidia/model.py, models/deepseek_v4/sparse_mla.py.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvbridge.engine import EngineError
from kvbridge.engines.vllm.after_import import after_import
from kvbridge.engines.vllm.decode import refuse
from kvbridge.engines.vllm.decode_mode import KernelMode, KernelSwitch
from kvbridge.errors import KVBridgeError

if TYPE_CHECKING:
    import torch

    from kvbridge.kernels.mla import Bound, Caps, Prepared
    from kvbridge.view import PageView

log = logging.getLogger("vllm.kvbridge")

MODULE = "vllm.models.deepseek_v4.nvidia.model"
SELECTION = "_select_dsv4_attn_cls"
ATTENTION = "DeepseekV4FlashMLAAttention"
RECORD = "v4"
WINDOW_WIDTH_MULTIPLE = 64
"""vLLM pads the window's slots to FlashMLA's tile (sparse_mla.py, sparse_swa.py); the widest are a cap of the plan."""


def hook_selection(switch: KernelSwitch) -> Callable[[], None]:
    """Wraps the choice of the attention class as soon as vLLM imports the module that makes it.

    Returns:
        A function that takes the wrapper off again.
    """
    undo: list[Callable[[], None]] = []

    def wrap(module: Any) -> None:
        original = getattr(module, SELECTION)

        @functools.wraps(original)
        def select(vllm_config: Any) -> type:
            chosen: type = original(vllm_config)
            return served_class(chosen, vllm_config, switch.mode)

        setattr(module, SELECTION, select)
        undo.append(lambda: setattr(module, SELECTION, original))

    forget = after_import(MODULE, wrap)

    def take_off() -> None:
        forget()
        while undo:
            undo.pop()()

    return take_off


def served_class(chosen: type, vllm_config: Any, mode: KernelMode) -> type:
    """The class to build instead of the chosen one: its subclass, or itself where the kernel cannot serve it.

    Raises:
        EngineError: The mode is `force` and the kernel cannot serve.
    """
    from kvbridge.kernels import mla
    from vllm.platforms import current_platform

    try:
        module = sys.modules[MODULE]
        if chosen is not getattr(module, ATTENTION):
            raise EngineError(f"attention class: got {chosen.__name__}, expected {ATTENTION}")
        if mode is KernelMode.COMPARE:
            raise EngineError("mode: got compare, expected on or force on a GPU: prefill and decode differ there")
        for caps in caps_of(vllm_config):
            choice = mla.explain(mla.plan(caps), device=current_platform.device_type)
            if choice.backend != "cuda" and choice.by == "preference":
                raise EngineError(f"backend: got {choice}, expected cuda, or the name of another in KVBRIDGE_BACKEND")
    except Exception as refusal:
        _say_once(mode, str(refusal), functools.partial(refuse, mode, refusal))
        return chosen
    _say_once(mode, chosen.__name__, lambda: log.info("kvbridge: kernel %s: decode by backend %s", mode.value, choice))
    return decode_class(chosen)


_said: set[tuple[KernelMode, str]] = set()


def _say_once(mode: KernelMode, what: str, say: Callable[[], None]) -> None:
    """The class is chosen anew for every layer; what there is to say is said for the first."""
    if (mode, what) not in _said:
        _said.add((mode, what))
        try:
            say()
        except EngineError:
            _said.discard((mode, what))
            raise


def caps_of(vllm_config: Any) -> tuple[Caps, ...]:
    """Caps of each kind of layer, from the configuration alone: what can be asked before any memory is sized."""
    config = vllm_config.model_config.hf_config
    heads = int(config.num_attention_heads) // int(vllm_config.parallel_config.tensor_parallel_size)
    ratios = {max(1, int(ratio)) for ratio in config.compress_ratios}
    length = int(vllm_config.model_config.max_model_len)
    queries = int(vllm_config.scheduler_config.max_num_batched_tokens)
    return tuple(
        make_caps(queries=queries, heads=heads, window=int(config.sliding_window), extra=_extra(config, ratio, length))
        for ratio in sorted(ratios)
    )


def _extra(config: Any, ratio: int, length: int) -> int:
    if ratio <= 1:
        return 0
    # C128's slots are as wide as the longest sequence needs, rounded up to vLLM's tile of 128 (sparse_mla.py).
    return int(config.index_topk) if ratio == 4 else (-(-length // ratio) + 127) // 128 * 128


def make_caps(*, queries: int, heads: int, window: int, extra: int) -> Caps:
    """Caps of one kind of layer; one cache where `extra` is 0.

    Args:
        queries: Most tokens of a step.
        heads: Heads of this rank, without padding.
        window: Tokens of the sliding window.
        extra: Most slots of a query in the compressed cache.
    """
    from kvbridge.kernels import mla

    wide = (window + WINDOW_WIDTH_MULTIPLE - 1) // WINDOW_WIDTH_MULTIPLE * WINDOW_WIDTH_MULTIPLE
    widths = (wide, extra) if extra else (wide,)
    return mla.Caps(queries=queries, heads=heads, widths=widths, records=(RECORD,) * len(widths))


@functools.lru_cache(maxsize=64)
def left_to_vllm(kind: str, reason: str) -> None:
    """Says once for each reason that a call was left to vLLM's own kernel; nothing of it had been computed."""
    log.warning("kvbridge: kernel: a call is left to vLLM's own: %s: %s", kind, reason)


@functools.lru_cache(maxsize=8)
def prepared_for(caps: Caps, device: torch.device) -> Prepared:
    """A plan made ready on a device; layers with equal caps share it, and its workspace: they run one after another."""
    from dataclasses import replace

    import torch

    from kvbridge.kernels import mla

    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    return mla.prepare(mla.plan(replace(caps, units=units)), device=device)


@functools.cache
def decode_class(base: Any) -> type:
    """The subclass; it is made from the class that vLLM chose, since vLLM is imported by nobody else."""

    class KvbridgeFlashMLAAttention(base):  # type: ignore[misc]
        """vLLM's attention layer with kvbridge's decode."""

        def __init__(self, vllm_config: Any, *arguments: Any, **keywords: Any) -> None:
            super().__init__(vllm_config, *arguments, **keywords)
            self.kvbridge_decode = LayerDecode(self, vllm_config)

        def _forward_decode(  # noqa: PLR0917  vLLM's own signature
            self,
            q: torch.Tensor,
            kv_cache: torch.Tensor | None,
            swa_metadata: Any,
            attn_metadata: Any,
            swa_only: bool,
            output: torch.Tensor,
        ) -> None:
            decode = self.kvbridge_decode
            try:
                decode.run(q, kv_cache, swa_metadata, attn_metadata, swa_only=swa_only, output=output)
            except KVBridgeError as refusal:
                left_to_vllm(type(refusal).__name__, str(refusal))
                super()._forward_decode(q, kv_cache, swa_metadata, attn_metadata, swa_only, output)

    return KvbridgeFlashMLAAttention


class LayerDecode:
    """Decode of one layer: views bound once, every step's slots and lengths patched in.

    Attributes:
        layer: vLLM's attention layer.
        bound: The call, once there was one.
    """

    def __init__(self, layer: Any, vllm_config: Any) -> None:
        self.layer = layer
        self.bound: Bound | None = None
        self._vllm_config = vllm_config
        self._tensors: tuple[torch.Tensor | None, ...] = ()
        self._views: tuple[PageView, ...] = ()
        extra = _extra(vllm_config.model_config.hf_config, int(layer.compress_ratio), int(layer.max_model_len))
        self._caps = make_caps(
            queries=int(layer.max_num_batched_tokens),
            heads=int(layer.n_local_heads),
            window=int(layer.window_size),
            extra=extra,
        )

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | None,
        swa_metadata: Any,
        attn_metadata: Any,
        *,
        swa_only: bool,
        output: torch.Tensor,
    ) -> None:
        """vLLM's `_forward_decode`.

        Args:
            q: bf16 `[decode tokens, padded heads, 512]`.
            kv_cache: The compressed pages `[pages, rows, 584]`; None for layers with a window only.
            swa_metadata: vLLM's DeepseekSparseSWAMetadata.
            attn_metadata: vLLM's DeepseekV4FlashMLAMetadata, or None.
            swa_only: Whether the layer has a window only.
            output: bf16 `[decode tokens, padded heads, 512]`.

        Raises:
            ArgumentError: A tensor does not fit the plan; nothing was computed.
            LayoutError: The pages are not what the layer's spec says.
        """
        slots = [swa_metadata.decode_swa_indices.squeeze(1)]
        lengths = [swa_metadata.decode_swa_lens]
        if not swa_only:
            extra_slots, extra_lengths = self._extra_slots(swa_metadata, attn_metadata)
            slots.append(extra_slots)
            lengths.append(extra_lengths)
        tensors = (self.layer.swa_cache_layer.kv_cache, kv_cache, self.layer.attn_sink)
        bound = self.bound
        if bound is None or any(new is not old for new, old in zip(tensors, self._tensors, strict=True)):
            bound = self._bind(q, output, slots, lengths, tensors)
            bound.run()
        else:
            bound.run(q=q, out=output, slots=slots, lengths=lengths)
        bound.release()

    def _bind(
        self,
        q: torch.Tensor,
        output: torch.Tensor,
        slots: list[torch.Tensor],
        lengths: list[torch.Tensor],
        tensors: tuple[torch.Tensor | None, ...],
    ) -> Bound:
        from kvbridge.engines.vllm.layouts import view_of_layer
        from kvbridge.kernels import mla

        owners = [self.layer.swa_cache_layer, self.layer][: len(slots)]
        self._views = tuple(view_of_layer(owner, self._vllm_config) for owner in owners)
        caches = [
            mla.Cache(view=view, slots=given, lengths=length)
            for view, given, length in zip(self._views, slots, lengths, strict=True)
        ]
        prepared = prepared_for(self._caps, q.device)
        sink = self.layer.attn_sink
        self.bound = mla.bind(prepared, q=q, caches=caches, out=output, scale=self.layer.scale, sink=sink)
        self._tensors = tensors
        return self.bound

    def _extra_slots(self, swa_metadata: Any, attn_metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and lengths in the compressed cache, by vLLM's own function or from its metadata."""
        layer = self.layer
        if layer.compress_ratio != 4:
            indices: torch.Tensor = attn_metadata.c128a_global_decode_topk_indices
            return indices.squeeze(1), attn_metadata.c128a_decode_topk_lens
        from vllm.models.deepseek_v4.common.ops import compute_global_topk_indices_and_lens

        tokens = swa_metadata.num_decode_tokens
        slots, lengths = compute_global_topk_indices_and_lens(
            layer.topk_indices_buffer[:tokens],
            swa_metadata.token_to_req_indices,
            attn_metadata.block_table[: swa_metadata.num_decodes],
            attn_metadata.block_size // layer.compress_ratio,
            swa_metadata.is_valid_token[:tokens],
        )
        return slots.view(tokens, -1), lengths
