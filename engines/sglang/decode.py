"""SGLang's sparse decode calls served by `kvbridge.kernels.mla`, from the pool's own pages.

    flash_mla_with_kvcache(q [tokens, 1, heads, 512], k_cache [pages, rows, 1, 584], indices, topk_length, attn_sink,
                           extra_k_cache, extra_indices_in_kvcache, extra_topk_length, softmax_scale)
      k_cache.data_ptr() -> the pool's view, bound when the pool was built; slots, lengths and q are fresh each call

The width of a row does not name its record (528 bytes are V4.1 split or interleaved), so a call is served only for
pages of a pool that was registered; others go to SGLang's own kernel, with one line in the log for each reason.
Source: SGLang 0.5.23 layers/attention/deepseek_v4_backend.py (_forward_core), kernels/ops/attention/flash_mla_sm120.py.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbridge.engines.sglang.layouts import read_pool
from kvbridge.errors import KVBridgeError, LayoutError
from kvbridge.layout import PoolKind
from kvbridge.view import Liveness, PageView

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvbridge.sglang")

RECORDS = ("v4", "v41", "v41_interleaved", "v41_fp4", "v41_fp4_interleaved")
"""Records of SGLang's sparse decode that the kernel reads in place."""


class NotServedError(KVBridgeError):
    """A call, or a pool, that stays with SGLang's own kernel; the message says why."""


@dataclass(slots=True)
class _Binding:
    """A bound call of one pair of caches; the sink is held so that its address stays its own."""

    bound: Any
    sink: torch.Tensor
    scale: float


class Decoder:
    """Serves SGLang's decode calls for the pools that were registered.

    Attributes:
        served: Calls served.
        left: Calls left to SGLang, by reason.
    """

    def __init__(self, *, backend: str | None = None, out_dtype: torch.dtype | None = None) -> None:
        """Makes a decoder without pools.

        Args:
            backend: Backend of `kvbridge.kernels.mla`; the best present by default.
            out_dtype: Dtype of outputs; bf16, as SGLang expects it, by default.
        """
        self.backend = backend
        self.out_dtype = out_dtype
        self.served = 0
        self.left: dict[str, int] = {}
        self._views: dict[int, PageView] = {}
        self._prepared: dict[tuple[Any, ...], Any] = {}
        self._bindings: dict[tuple[Any, ...], _Binding] = {}

    def register(self, pool: Any) -> None:
        """Binds the caches of an owner pool.

        Args:
            pool: A `DeepSeekV4TokenToKVPool`.

        Raises:
            NotServedError: The pool keeps rows that the kernel does not read in place, or pages that contradict it.
        """
        try:
            caches = [cache for cache in read_pool(pool) if cache.layout.kind is PoolKind.PAGED]
            rows = [cache for cache in caches if cache.layout.pool != "indexer"]
            for cache in rows:
                if cache.layout.record not in RECORDS:
                    raise NotServedError(f"{cache.name}: got record {cache.layout.record}, expected one of {RECORDS}")
            views = {view.base_address: view for view in (cache.view() for cache in rows)}
        except LayoutError as error:
            raise NotServedError(str(error)) from error
        self._views.update(views)
        # Views hold the pool's memory: they must go when it goes.
        weakref.finalize(pool, self._forget, tuple(views))

    def __call__(self, original: Callable[..., Any], *arguments: Any, **call: Any) -> Any:
        """The hook around SGLang's decode function: serves the call, or hands it on.

        Args:
            original: SGLang's function.
            *arguments: Positional arguments; SGLang gives none.
            **call: Keyword arguments of the call.

        Returns:
            (out bf16 `[tokens, 1, heads, 512]`, lse fp32 `[tokens, heads, 1]` natural, without the sink).
        """
        try:
            if arguments:
                raise NotServedError(f"got {len(arguments)} positional arguments, expected none")
            result = self.decode(**call)
        except Exception as error:  # whatever is wrong on our side, SGLang's own kernel answers
            self._leave(str(error) if isinstance(error, KVBridgeError) else f"{type(error).__name__}: {error}")
            return original(*arguments, **call)
        self.served += 1
        return result

    def decode(
        self,
        *,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        indices: torch.Tensor,
        attn_sink: torch.Tensor,
        head_dim_v: int,
        topk_length: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None,
        extra_topk_length: torch.Tensor | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Serves one call; arguments as SGLang names them. Scheduling metadata of FlashMLA is not needed.

        Raises:
            NotServedError: The call is none that the kernel serves.
            ArgumentError: A tensor does not fit.
            StaleViewError: The pool's memory is gone.
        """
        import torch

        from kvbridge.kernels import mla

        if q.dim() != 4 or q.shape[1] != 1:
            raise NotServedError(f"q: got shape {tuple(q.shape)}, expected [tokens, 1, heads, 512]")
        if unused.get("cache_seqlens") is not None or unused.get("block_table") is not None:
            raise NotServedError("block_table, cache_seqlens: got dense decode, expected a sparse call with indices")
        views = [self._view(k_cache, "k_cache")]
        slots = [indices.squeeze(1)]
        lengths = [topk_length]
        if extra_k_cache is not None:
            if extra_indices_in_kvcache is None:
                raise NotServedError("extra_indices_in_kvcache: got None, expected the slots of extra_k_cache")
            views.append(self._view(extra_k_cache, "extra_k_cache"))
            slots.append(extra_indices_in_kvcache.squeeze(1))
            lengths.append(extra_topk_length)
        query = q.squeeze(1)
        tokens, heads, width = query.shape
        if head_dim_v != 512 or width != 512:
            raise NotServedError(f"head_dim_v, q width: got {head_dim_v}, {width}, expected 512, 512")
        scale = width**-0.5 if softmax_scale is None else float(softmax_scale)
        out = torch.empty(tokens, heads, head_dim_v, dtype=self.out_dtype or torch.bfloat16, device=q.device)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        prepared = self._prepare(views, slots, tokens, heads, q.device)
        key = (prepared, *(view.base_address for view in views))
        known = self._bindings.get(key)
        if known is not None and known.sink.data_ptr() == attn_sink.data_ptr() and known.scale == scale:
            bound = known.bound
            bound.run(q=query, out=out, lse=lse, slots=slots, lengths=lengths)
        else:
            caches = [
                mla.Cache(view=view, slots=rows, lengths=counts)
                for view, rows, counts in zip(views, slots, lengths, strict=True)
            ]
            bound = mla.bind(prepared, q=query, caches=caches, out=out, scale=scale, sink=attn_sink, lse=lse)
            bound.run()
            self._bindings[key] = _Binding(bound, attn_sink, scale)
        bound.release()
        return out.unsqueeze(1), lse.unsqueeze(-1)

    def _view(self, pages: torch.Tensor, name: str) -> PageView:
        """The registered view of the pages that SGLang hands over; SGLang's own tensor is a fresh one each call."""
        view = self._views.get(pages.data_ptr())
        if view is None:
            raise NotServedError(f"{name}: got pages at an address of no registered pool")
        layout = view.layout
        got = (*pages.shape, pages.stride(0) * pages.element_size())
        expected = (view.num_pages, layout.page_rows, 1, layout.row_bytes, layout.page_stride_bytes)
        if got != expected:
            raise NotServedError(f"{name}: got pages, rows, heads, row bytes, page stride {got}, expected {expected}")
        if view.liveness is not Liveness.LIVE:
            view.require_live()
        return view

    def _prepare(
        self, views: list[PageView], slots: list[torch.Tensor], tokens: int, heads: int, device: torch.device
    ) -> Any:
        """A prepared plan for at least this call; query counts grow by powers of two, so that few plans are made."""
        import torch

        from kvbridge.kernels import mla

        queries = 1 << max(tokens - 1, 0).bit_length()
        widths = tuple(rows.shape[-1] for rows in slots)
        records = tuple(view.layout.record for view in views)
        key = (queries, heads, widths, records, device)
        prepared = self._prepared.get(key)
        if prepared is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise NotServedError(f"got a call with {tokens} queries under capture, expected it prepared before")
            units = torch.get_num_threads()
            if device.type == "cuda":
                units = torch.cuda.get_device_properties(device).multi_processor_count
            caps = mla.Caps(queries=queries, heads=heads, widths=widths, records=records, units=units)
            prepared = mla.prepare(mla.plan(caps), device=device, backend=self.backend)
            self._prepared[key] = prepared
            log.info("kvbridge: decode prepared: up to %d queries, %d heads, %s", queries, heads, prepared)
        return prepared

    @property
    def backend_name(self) -> str:
        """Backend of the first plan prepared, and why it was chosen; empty before any call."""
        return next((str(prepared.choice) for prepared in self._prepared.values()), "")

    def explain(self) -> str:
        """Which backend would serve the registered pages, and why.

        Raises:
            NotServedError: None can.
        """
        from kvbridge.kernels import mla

        view = next(iter(self._views.values()))
        caps = mla.Caps(queries=1, heads=64, widths=(64,), records=(view.layout.record,))
        try:
            return str(mla.explain(mla.plan(caps), device=view.pages.device, backend=self.backend))
        except KVBridgeError as error:
            raise NotServedError(str(error)) from error

    def layouts(self) -> list[dict[str, Any]]:
        """Numbers of the pages that are registered, a line for each cache."""
        return [
            {
                "pool": view.layout.pool,
                "record": view.layout.record,
                "page_rows": view.page_rows,
                "payload_bytes": view.layout.payload_bytes,
                "page_stride_bytes": view.page_stride_bytes,
                "offset_bytes": view.offset_bytes,
            }
            for view in self._views.values()
        ]

    def twin(self, *, backend: str | None, out_dtype: torch.dtype) -> Decoder:
        """A decoder over the same pools with another backend or output dtype."""
        other = Decoder(backend=backend, out_dtype=out_dtype)
        other._views = self._views
        return other

    def _forget(self, addresses: tuple[int, ...]) -> None:
        for address in addresses:
            self._views.pop(address, None)
        gone = set(addresses)
        self._bindings = {key: entry for key, entry in self._bindings.items() if not gone.intersection(key[1:])}

    def _leave(self, reason: str) -> None:
        if reason not in self.left:
            log.warning("kvbridge: a call stays with SGLang's own kernel: %s", reason)
        self.left[reason] = self.left.get(reason, 0) + 1
