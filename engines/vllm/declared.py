"""What vLLM declares of a layer's cache, and the layout that follows.

    spec (MLAAttentionSpec ...)        record, rows, tokens per row, alignment    what a page is
    KVCacheTensor                      offset, layer stride, block stride         where pages lie

Sources: vLLM 0.32.0 and 0.33.0 v1/kv_cache_interface.py, v1/worker/utils.py (allocate_kv_cache).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from kvbridge.engines.vllm.formats import MLA_SPECS, alignment_of, is_indexer, is_state, pool_of, record_of
from kvbridge.engines.vllm.specs import is_split
from kvbridge.errors import LayoutError
from kvbridge.layout import Padding, PaddingPolicy, PageLayout
from kvbridge.records import get_record

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache as vLLM declares it.

    Attributes:
        name: vLLM's name of the layer's cache, with `#` and a number where a block holds several pages of it.
        tensor: vLLM's name of the layer's cache: the key of its tensor.
        group: Index of the group whose block table the layer uses.
        placement: Index of the KVCacheTensor that places the layer.
        layout: What the layer's pages are.
        offset_bytes: First page's start, from the start of the storage.
        layer_stride_bytes: Distance to the next layer of the placement.
        block_rows: Rows of a block, over all its pages.
        first_row: Row of the block at which the page starts.
    """

    name: str
    tensor: str
    group: int
    placement: int
    layout: PageLayout
    offset_bytes: int
    layer_stride_bytes: int
    block_rows: int
    first_row: int = 0


def declared_layout(
    spec: Any,
    *,
    block_stride_bytes: int,
    packed: bool,
    num_blocks: int,
    version: str,
    sparse: bool,
    page_tokens: int = 0,
) -> PageLayout:
    """The layout of one layer as its spec and placement declare it.

    Args:
        spec: vLLM's cache spec of one layer.
        block_stride_bytes: Bytes between two blocks.
        packed: Whether blocks are outermost, so that other layers' pages lie between.
        num_blocks: Blocks of the allocation.
        version: vLLM's version.
        sparse: Whether the model has an indexer.
        page_tokens: Tokens of a page, where a kernel takes smaller blocks than the manager's; 0 for the whole block.

    Raises:
        LayoutError: The declaration contradicts itself, or names no record.
    """
    record = record_of(spec, version=version)
    pages_per_block = spec.block_size // (page_tokens or spec.block_size)
    rows = spec.get_num_kernel_states(page_tokens or spec.block_size)
    alignment = alignment_of(spec)
    if packed:
        policy = PaddingPolicy.PACKED
        if pages_per_block > 1:
            alignment = None  # pages of one block follow each other; only the last one is padded
            pages_per_block = 1
    else:
        if block_stride_bytes != spec.page_size_bytes:
            alignment = lcm(alignment or 1, spec.get_block_stride_alignment())
        elif spec.page_size_bytes == spec.unpadded_page_size_bytes:
            alignment = None  # merged specs of a group keep an alignment only where it pads
        policy = PaddingPolicy.EXACT if alignment is None else PaddingPolicy.ALIGNED
    return _layout(
        record=record,
        pool=pool_of(spec, record, sparse=sparse),
        page_rows=rows,
        tokens_per_row=int(spec.tokens_per_state),
        page_stride_bytes=block_stride_bytes // pages_per_block,
        policy=policy,
        alignment=alignment,
        num_pages=num_blocks * pages_per_block,
        reserved_pages=pages_per_block,
        dtype=str(spec.dtype).removeprefix("torch."),
    )


@lru_cache(maxsize=1024)
def _layout(
    *,
    record: str,
    pool: str,
    page_rows: int,
    tokens_per_row: int,
    page_stride_bytes: int,
    policy: PaddingPolicy,
    alignment: int | None,
    num_pages: int,
    reserved_pages: int,
    dtype: str,
) -> PageLayout:
    """One object for equal layouts: `PageView.from_tensor` remembers by the layout's identity."""
    return PageLayout(
        record=record,
        pool=pool,
        page_rows=page_rows,
        tokens_per_row=tokens_per_row,
        payload_bytes=page_rows * get_record(record).row_bytes,
        page_stride_bytes=page_stride_bytes,
        padding=Padding(policy=policy, alignment=alignment),
        num_pages=num_pages,
        reserved_pages=reserved_pages,
        dtype=dtype,
    )


def layer_specs_of(kv_cache_config: Any) -> dict[str, tuple[int, Any]]:
    """Group index and spec of every layer of a KVCacheConfig."""
    specs: dict[str, tuple[int, Any]] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        nested = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            specs[name] = index, nested[name] if nested is not None else group.kv_cache_spec
    return specs


def is_packed(kv_cache_config: Any) -> bool:
    """Whether blocks are outermost, by the layout vLLM resolved, or by its strides where it does not say."""
    resolved = getattr(kv_cache_config, "kv_cache_layout", None)
    if resolved:
        return str(resolved).startswith("B")
    tensors = kv_cache_config.kv_cache_tensors
    return any(tensor.layer_stride < tensor.block_stride * kv_cache_config.num_blocks for tensor in tensors)


def declared_caches(
    kv_cache_config: Any,
    *,
    version: str,
    packed: bool | None = None,
    page_tokens: Mapping[int, int] | None = None,
    skipped: dict[str, LayoutError] | None = None,
) -> Iterator[LayerCache]:
    """Every layer's cache as a KVCacheConfig declares it, in the order of its placements.

    A packed block larger than the kernel's holds several pages where rows are split: scales follow the rows of a kernel
    block, not those of the whole block. Each of these pages is a cache of its own here.

    Args:
        kv_cache_config: vLLM's KVCacheConfig.
        version: vLLM's version.
        packed: Whether blocks are outermost; by `is_packed` where not given.
        page_tokens: Kernel block of each group, where vLLM allocated kernel blocks.
        skipped: Takes the layers that hold no MLA cache, with the reason; without it they are refused.

    Raises:
        LayoutError: A declaration contradicts itself, or names no record.
    """
    specs = layer_specs_of(kv_cache_config)
    sparse = any(is_indexer(spec) for _, spec in specs.values())
    blocks_outermost = is_packed(kv_cache_config) if packed is None else packed
    kernel_blocks = _kernel_blocks(specs)
    for placement, tensor in enumerate(kv_cache_config.kv_cache_tensors):
        for place, name in enumerate(tensor.layers):
            group, spec = specs[name]
            try:
                record = record_of(spec, version=version)
            except LayoutError as reason:
                if skipped is None:
                    raise
                skipped[name] = reason
                continue
            tokens = spec.block_size
            if blocks_outermost:
                if is_split(record) and not is_state(spec):
                    tokens = gcd(kernel_blocks.get(group, tokens), tokens)
            elif page_tokens:
                tokens = page_tokens.get(group, tokens)
            layout = declared_layout(
                spec,
                block_stride_bytes=tensor.block_stride,
                packed=blocks_outermost,
                num_blocks=kv_cache_config.num_blocks,
                version=version,
                sparse=sparse,
                page_tokens=tokens,
            )
            pages = spec.block_size // tokens if blocks_outermost else 1
            for page in range(pages):
                yield LayerCache(
                    name=name if pages == 1 else f"{name}#{page}",
                    tensor=name,
                    group=group,
                    placement=placement,
                    layout=layout,
                    offset_bytes=tensor.offset + place * tensor.layer_stride + page * layout.payload_bytes,
                    layer_stride_bytes=tensor.layer_stride,
                    block_rows=spec.num_states,
                    first_row=page * layout.page_rows,
                )


def page_tokens_of(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any) -> dict[int, int]:
    """Kernel block of each group, read off the tensors of a layer-outermost allocation."""
    tokens: dict[int, int] = {}
    for name, (group, spec) in layer_specs_of(kv_cache_config).items():
        tensor = kv_caches.get(name)
        if tensor is not None and group not in tokens and type(spec).__name__ in MLA_SPECS:
            rows = tensor.shape[-2]
            fits = rows and spec.num_states % rows == 0
            tokens[group] = rows * int(spec.tokens_per_state) if fits else spec.block_size
    return tokens


def _kernel_blocks(specs: Mapping[str, tuple[int, Any]]) -> dict[int, int]:
    """Largest kernel block of each group, where its backends take fixed sizes; vLLM notes it as a stride alignment."""
    blocks: dict[int, int] = {}
    for group, spec in specs.values():
        base = getattr(spec.block_stride_alignment, "base", None)
        if base is not None:
            blocks[group] = gcd(blocks.get(group, base), base)
    return blocks
