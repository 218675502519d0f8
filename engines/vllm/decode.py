"""DeepSeek-V4's sparse MLA attention of vLLM's CPU platform, served by kvbridge's kernel from vLLM's own pages.

    forward_mqa --> torch.ops._C.flash_mla_with_kvcache_cpu(out, q, window pages and slots, extra ones, sink, scale)
                                 ^ the one name that is replaced; the sink's address says which layer is calling
    window page  |64 x 576 data|64 x 8 scales|  C4 page  the same  |  C128 page  |2 x 576|2 x 8|     one block each

KVBRIDGE_DECODE=off|compare|on|force. Views are bound when vLLM allocates its caches, plans and the compiled
kernel made ready then as well; a call costs one look-up and the checks of its fresh tensors. What the kernel cannot
serve stays with vLLM, all layers of it, with one line in the log; `force` stops the start instead. Prefill and decode
are the same call on this platform. Source: vLLM 0.32.0 and 0.33.0 models/deepseek_v4/cpu/cpu_sparse.py (forward_mqa).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbridge.engine import EngineError
from kvbridge.engines.vllm.decode_mode import KernelMode
from kvbridge.errors import KVBridgeError

if TYPE_CHECKING:
    import torch

    from kvbridge.engines.vllm.live import Allocation
    from kvbridge.kernels.mla import Bound, Prepared
    from kvbridge.view import PageView

log = logging.getLogger("vllm.kvbridge")

MODULE = "vllm.models.deepseek_v4.cpu.cpu_sparse"
ATTENTION = "DeepseekV4CPUAttention"
OPERATOR = "flash_mla_with_kvcache_cpu"


class DecodeLayer:
    """One attention layer: its pages, its plan, and the call bound to them.

    Attributes:
        name: vLLM's layer name.
        kind: `swa`, `c4` or `c128`.
        views: Window pages, then the compressed ones where the layer has any.
        prepared: The plan made ready; layers with equal caps share it, and its workspace.
        bound: The call, once there was one.
    """

    __slots__ = ("_scale", "_sink", "addresses", "bound", "kind", "name", "prepared", "views")

    def __init__(self, name: str, kind: str, views: tuple[PageView, ...], prepared: Prepared) -> None:
        self.name = name
        self.kind = kind
        self.views = views
        self.addresses = tuple(view.base_address for view in views)
        self.prepared = prepared
        self.bound: Bound | None = None
        self._sink: torch.Tensor | None = None
        self._scale = 0.0

    def run(
        self, out: torch.Tensor, q: torch.Tensor, slots: list[torch.Tensor], sink: torch.Tensor, scale: float
    ) -> None:
        """Computes one call.

        Args:
            out: bf16 `[queries, heads, 512]`.
            q: bf16 `[queries, heads, 512]`.
            slots: int64 `[queries, width]` of the window, then of the compressed cache; -1 is dead.
            sink: fp32 `[heads]`.
            scale: Multiplies q . k.

        Raises:
            ArgumentError: A tensor does not fit the plan; nothing was computed.
        """
        bound = self.bound
        if bound is None or sink is not self._sink or scale != self._scale:
            bound = self._bind(out, q, slots, sink, scale)
            bound.run()
        else:
            bound.run(q=q, out=out, slots=slots)
        bound.release()  # outputs of a prefill are 64 KiB a token, and every layer has a call of its own

    def _bind(
        self, out: torch.Tensor, q: torch.Tensor, slots: list[torch.Tensor], sink: torch.Tensor, scale: float
    ) -> Bound:
        from kvbridge.kernels import mla

        caches = [mla.Cache(view=view, slots=given) for view, given in zip(self.views, slots, strict=True)]
        self.bound = mla.bind(self.prepared, q=q, caches=caches, out=out, scale=scale, sink=sink)
        self._sink, self._scale = sink, scale
        return self.bound


@dataclass(frozen=True, slots=True)
class Call:
    """One call of vLLM's operator, in its own words.

    Attributes:
        layer: The layer that calls.
        q: bf16 `[queries, heads, 512]`.
        slots: Slots of the caches that the layer reads.
        sink: fp32 `[heads]`.
        scale: Multiplies q . k.
    """

    layer: DecodeLayer
    q: torch.Tensor
    slots: list[torch.Tensor]
    sink: torch.Tensor
    scale: float


Observer = Callable[[Call, "torch.Tensor", Callable[[], None]], None]
"""Gets a call, vLLM's output tensor, and a function that lets vLLM's own kernel fill it."""


class Decoder:
    """What stands in the place of vLLM's operator.

    Attributes:
        layers: Layers by the address of their sink, the one tensor of a call that no two layers share.
        observer: Gets every call instead of the kernel; None lets the kernel serve.
        calls: Calls served by the kernel.
        fallbacks: Calls left to vLLM, by reason; each reason is logged once.
    """

    def __init__(self) -> None:
        self.layers: dict[int, DecodeLayer] = {}
        self.observer: Observer | None = None
        self.calls = 0
        self.fallbacks: dict[str, int] = {}
        self._original: Any = None

    @property
    def installed(self) -> bool:
        """Whether vLLM's operator is replaced."""
        return self._original is not None

    def install(self) -> None:
        """Puts itself in the place of vLLM's operator."""
        import torch

        if self._original is None:
            self._original = getattr(torch.ops._C, OPERATOR)
            setattr(torch.ops._C, OPERATOR, self)

    def uninstall(self) -> None:
        """Gives vLLM its operator back."""
        import torch

        if self._original is not None:
            setattr(torch.ops._C, OPERATOR, self._original)
            self._original = None

    def __call__(  # noqa: PLR0917  vLLM's own signature
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        window_cache: torch.Tensor,
        window_slots: torch.Tensor,
        window_rows: int,
        extra_cache: torch.Tensor,
        extra_slots: torch.Tensor,
        extra_rows: int,
        sink: torch.Tensor,
        scale: float,
    ) -> None:
        """vLLM's operator: same arguments, same output."""
        layer = self.layers.get(sink.data_ptr())
        original = self._original
        if layer is None:
            self._fall_back("the sink belongs to no layer that was bound")
        else:
            addresses = layer.addresses
            slots = [window_slots] if len(addresses) == 1 else [window_slots, extra_slots]
            if window_cache.data_ptr() != addresses[0] or (
                len(addresses) > 1 and extra_cache.data_ptr() != addresses[1]
            ):
                self._fall_back(f"{layer.name}: the pages are elsewhere than when they were bound")
            elif self.observer is not None:
                arguments = (q, window_cache, window_slots, window_rows, extra_cache, extra_slots, extra_rows)
                self.observer(Call(layer, q, slots, sink, scale), out, lambda: original(out, *arguments, sink, scale))
                return
            else:
                try:
                    layer.run(out, q, slots, sink, scale)
                    self.calls += 1
                    return
                except KVBridgeError as refusal:
                    self._fall_back(f"{layer.name}: {refusal}")
        original(out, q, window_cache, window_slots, window_rows, extra_cache, extra_slots, extra_rows, sink, scale)

    def _fall_back(self, reason: str) -> None:
        count = self.fallbacks.get(reason, 0)
        self.fallbacks[reason] = count + 1
        if not count:
            log.warning("kvbridge: kernel: a call is left to vLLM's own: %s", reason)


DECODER = Decoder()
"""This process's decoder; it is not installed until vLLM has allocated caches under a mode that asks for it."""


def take_over(allocation: Allocation, mode: KernelMode, observer: Observer | None = None) -> None:
    """Binds every attention layer of an allocation and replaces vLLM's operator, or says why not.

    Args:
        allocation: What vLLM allocated.
        mode: `on` and `compare` leave what cannot be served to vLLM; `force` does not start.
        observer: Gets every call; None lets the kernel serve.

    Raises:
        EngineError: The mode is `force` and the kernel cannot serve this model.
    """
    DECODER.uninstall()
    try:
        layers = bind_layers(allocation)
    except Exception as refusal:
        refuse(mode, refusal)
        return
    DECODER.layers = layers
    DECODER.observer = observer
    DECODER.install()
    log.info("kvbridge: kernel %s: %s", mode.value, describe(layers))


def refuse(mode: KernelMode, refusal: Exception) -> None:
    """Leaves a model to vLLM's own kernel, with one line in the log that says why.

    Args:
        mode: `force` does not start.
        refusal: Why; a fault of kvbridge's own is logged with its traceback.

    Raises:
        EngineError: The mode is `force`.
    """
    reason = f"{refusal}" if isinstance(refusal, KVBridgeError) else f"{type(refusal).__name__}: {refusal}"
    if mode is KernelMode.FORCE:
        raise EngineError(
            f"kvbridge: kernel {mode.value}: the kernel cannot serve, so vLLM does not start: {reason}"
        ) from refusal
    expected = isinstance(refusal, KVBridgeError)
    log.warning("kvbridge: kernel %s: vLLM's own kernel serves: %s", mode.value, reason, exc_info=not expected)


def describe(layers: Mapping[int, DecodeLayer]) -> str:
    """One line: layers of each kind, backend, page strides."""
    kinds: dict[str, int] = {}
    for layer in layers.values():
        kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    strides = sorted({view.page_stride_bytes for layer in layers.values() for view in layer.views})
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    backend = next(iter(layers.values())).prepared.choice
    return f"{len(layers)} attention layers ({counts}), backend {backend}, page strides {strides}"


def bind_layers(allocation: Allocation) -> dict[int, DecodeLayer]:
    """Binds the pages of every DeepSeek-V4 attention layer and makes its plan ready.

    Returns:
        Layers by the address of their sink.

    Raises:
        KVBridgeError: A layer that the kernel cannot serve, or none that calls the operator. No layer is bound then.
    """
    from kvbridge.engines.vllm.layouts import views_of
    from kvbridge.kernels import mla

    layers = _attention_layers(allocation.vllm_config)
    views = views_of(allocation.kv_caches, allocation.kv_cache_config)
    queries = int(allocation.vllm_config.scheduler_config.max_num_batched_tokens)
    prepared: dict[mla.Caps, Prepared] = {}
    bound: dict[int, DecodeLayer] = {}
    for name, layer in layers.items():
        ratio = int(layer.compress_ratio)
        own = [views[layer.swa_cache_layer.prefix], *([views[layer.prefix]] if ratio > 1 else [])]
        widths = [int(layer.window_size), *([_extra_width(layer, ratio)] if ratio > 1 else [])]
        caps = mla.Caps(
            queries=queries,
            heads=int(layer.n_local_heads),
            widths=tuple(widths),
            records=tuple(view.layout.record for view in own),
        )
        if caps not in prepared:
            prepared[caps] = mla.prepare(mla.plan(caps))
        kind = "swa" if ratio <= 1 else f"c{ratio}"
        bound[layer.attn_sink.data_ptr()] = DecodeLayer(name, kind, tuple(own), prepared[caps])
    if len(bound) != len(layers):
        raise EngineError(f"sinks: got {len(bound)} addresses for {len(layers)} layers, expected one for each layer")
    return bound


def _attention_layers(vllm_config: Any) -> dict[str, Any]:
    """Attention layers of vLLM's model by name.

    Raises:
        EngineError: The model has no layer that calls the operator.
    """
    module = sys.modules.get(MODULE)
    attention = None if module is None else getattr(module, ATTENTION)
    context = {} if vllm_config is None else vllm_config.compilation_config.static_forward_context
    layers = {} if attention is None else {n: layer for n, layer in context.items() if isinstance(layer, attention)}
    if not layers:
        kinds = sorted({type(layer).__name__ for layer in context.values()})
        raise EngineError(f"attention layers: got {', '.join(kinds) or 'none'}, expected {ATTENTION}")
    return layers


def _extra_width(layer: Any, ratio: int) -> int:
    """Slots a query has in the compressed cache: the indexer's choice, or all that the longest sequence can have."""
    return int(layer.topk_indices_buffer.shape[-1]) if ratio == 4 else -(-int(layer.max_model_len) // ratio)
