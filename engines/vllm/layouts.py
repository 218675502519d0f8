"""Views of vLLM's live tensors: zero copy, checked against what vLLM declares of each layer.

    (kv_caches, kv_cache_config)       as KV connectors receive them, or allocate_kv_cache returns them   views_of
    a bound layer                      layer.kv_cache [B, N, C]                                           view_of_layer

Where a kernel takes smaller blocks than the manager's, vLLM binds another view to the layer: it looks dense but spans
other layers' pages, and is refused. Sources: vLLM 0.32.0 and 0.33.0 v1/worker/utils.py (allocate_kv_cache,
AttentionGroup.map_kv_cache_to_kernel_blocks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbridge.engines.vllm.declared import LayerCache, declared_caches, declared_layout, page_tokens_of
from kvbridge.errors import BoundViewError, LayoutError, PageCountError, PageStrideError
from kvbridge.layout import PaddingPolicy
from kvbridge.view import PageView

if TYPE_CHECKING:
    import torch


def bind_cache(cache: LayerCache, tensor: torch.Tensor) -> PageView:
    """A zero-copy view of a layer's tensor, checked against what vLLM declares of the layer.

    Args:
        cache: The declaration.
        tensor: The allocator's view of the layer, as `allocate_kv_cache` returns it and KV connectors receive it.

    Raises:
        BoundViewError: A kernel's view, which spans other layers' pages.
        LayoutError: Shape, strides, offset, dtype or storage differ from the declaration.
    """
    require_allocation_view(cache, tensor)
    pages = pages_of(cache, tensor)
    offset = int(pages.storage_offset()) * pages.element_size()
    if offset != cache.offset_bytes:
        raise LayoutError("storage_offset in bytes", got=offset, expected=cache.offset_bytes)
    return PageView.from_tensor(pages, cache.layout)


def pages_of(cache: LayerCache, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a layer's tensor that are this cache's pages: all, or those of one of several pages in a block."""
    if cache.name == cache.tensor:
        return tensor
    return tensor.narrow(-2, cache.first_row, cache.layout.page_rows)


def require_allocation_view(cache: LayerCache, tensor: torch.Tensor) -> None:
    """Refuses the view that vLLM binds to a layer whose kernel takes smaller blocks.

    Source: vLLM 0.33.0 v1/worker/utils.py (AttentionGroup.map_kv_cache_to_kernel_blocks).

    Raises:
        BoundViewError: The tensor's pages are kernel blocks inside a packed block.
    """
    if tensor.dim() < 3 or cache.layout.padding.policy is not PaddingPolicy.PACKED:
        return
    rows = tensor.shape[-2]
    if rows < cache.block_rows and cache.block_rows % rows == 0:
        stride = tensor.stride(0) * tensor.element_size()
        raise BoundViewError(
            "tensor rows in a page",
            got=rows,
            expected=cache.block_rows,
            detail=f"kernel blocks {stride} bytes apart in blocks {cache.layout.page_stride_bytes} bytes apart",
        )


def views_of(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, *, version: str | None = None
) -> dict[str, PageView]:
    """Views of all layers, from what KV connectors receive or `allocate_kv_cache` returns.

    Args:
        kv_caches: Layer name to tensor.
        kv_cache_config: The KVCacheConfig they were allocated from.
        version: vLLM's version; the installed one's by default.

    Raises:
        LayoutError: A tensor differs from the declaration.
        PageCountError: A declared layer has no tensor.
    """
    views = {}
    page_tokens = page_tokens_of(kv_caches, kv_cache_config)
    for cache in declared_caches(kv_cache_config, version=version or installed_version(), page_tokens=page_tokens):
        tensor = kv_caches.get(cache.tensor)
        if tensor is None:
            raise PageCountError(f"kv_caches[{cache.tensor!r}]", got=None, expected="a tensor")
        views[cache.name] = bind_cache(cache, tensor)
    return views


def view_of_layer(layer: Any, vllm_config: Any, *, block_stride_bytes: int | None = None) -> PageView:
    """The view of one bound layer, from the tensor its kernel uses.

    Args:
        layer: A layer of vLLM's `static_forward_context`, after its cache was bound.
        vllm_config: The VllmConfig the layer was built with.
        block_stride_bytes: The block stride to expect; that of the tensor by default.

    Raises:
        BoundViewError: The layer is bound to kernel blocks of a packed cache; use the allocation's view.
        LayoutError: The tensor does not fit the layer's spec.
    """
    spec = layer.get_kv_cache_spec(vllm_config)
    tensor = layer.kv_cache
    size = tensor.element_size()
    stride = tensor.stride(0) * size
    rows = tensor.shape[-2]
    resolved = str(vllm_config.cache_config.kv_cache_layout or "")
    packed = resolved.startswith("B")
    if packed and rows < spec.num_states and spec.num_states % rows == 0:
        raise BoundViewError(
            "tensor rows in a page",
            got=rows,
            expected=spec.num_states,
            detail=f"kernel blocks {stride} bytes apart inside blocks of {spec.num_states} rows",
        )
    if block_stride_bytes is not None and stride != block_stride_bytes:
        raise PageStrideError("tensor.stride(0)", got=stride, expected=block_stride_bytes)
    layout = declared_layout(
        spec,
        block_stride_bytes=stride,
        packed=packed,
        num_blocks=tensor.shape[0],
        version=installed_version(),
        sparse=bool(getattr(layer, "indexer", None)) or getattr(spec, "topk_buffer_width", None) is not None,
        page_tokens=0 if packed or rows == spec.num_states else rows * int(spec.tokens_per_state),
    )
    return PageView.from_tensor(tensor, layout)


def installed_version() -> str:
    """vLLM's version, without a local part."""
    import vllm

    return str(vllm.__version__).split("+", maxsplit=1)[0]
