"""Layouts of SGLang's live pools, read from the pool objects. Neither SGLang nor torch is imported here.

    DeepSeekV4TokenToKVPool   swa_kv_pool, kv_pools[ratio], index_pools[ratio], compress_state_pools[layer]
      DeepSeekV4SingleKVPool  kv_buffer[i]: [pages, bytes_per_page_padded] uint8; kv_layout names format and alignment
    MLATokenToKVPool          kv_buffer[i]: [size + page, 1, kv_cache_dim]
    DSATokenToKVPool          and index_key_cache.buffer[i]: [pages, 8448]; none where a layer shares its indexer
    MLATokenToKVPoolFP4       and kv_scale_buffer[i]: [size + page, 36]

Pools are told apart by the exact names of their classes: a subclass may lay its tensors out anew, and is refused until
somebody has read it. Host pools: host_pools.py.
Source: SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py, mem_cache/memory_pool.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvbridge.engine import EngineError
from kvbridge.engines.sglang.formats import INDEXER_FP4, INDEXER_FP8, KV_LAYOUTS, PageFormat, state_format
from kvbridge.engines.sglang.live import LiveCache
from kvbridge.engines.sglang.naming import FULL, HISPARSE, REQUEST, SWA, layer_name
from kvbridge.errors import PageStrideError, RecordWidthError
from kvbridge.layout import Padding, PaddingPolicy, PageLayout, PoolKind
from kvbridge.records import RECORDS, get_record

if TYPE_CHECKING:
    import torch


def read_pool(pool: Any) -> tuple[LiveCache, ...]:
    """Every cache of a live pool, in the order of a planned manifest.

    Args:
        pool: A pool object of SGLang's `mem_cache`.

    Raises:
        EngineError: A pool class whose layout is not known here.
        LayoutError: The pool's own figures contradict each other.
    """
    reader = _READERS.get(type(pool).__name__)
    if reader is None:
        raise EngineError(f"pool: got {type(pool).__name__}, expected one of {sorted(_READERS)}")
    return tuple(reader(pool))


def read_paged(
    pool: Any,
    *,
    name: str = "kv",
    cache: str = "kv",
    layers: Sequence[int] | None = None,
    group: str = FULL,
    reserved_pages: int = 1,
    tokens_per_row: int = 1,
) -> Iterator[LiveCache]:
    """Caches of one `DeepSeekV4SingleKVPool` or subclass.

    Args:
        pool: The pool.
        name: What it holds: swa, c4 ...
        cache: Name of the cache inside a layer.
        layers: Layers that own the buffers; the pool's own by default.
        group: Who shares the page table.
        reserved_pages: Pages that never hold live rows.
        tokens_per_row: Compress ratio.

    Raises:
        PageStrideError: The pool's page bytes are not what its layout pads to.
    """
    fmt = page_format(pool)
    layout = PageLayout.for_rows(
        fmt.record,
        page_rows=pool.page_size,
        policy=fmt.policy,
        alignment=fmt.alignment,
        dtype=fmt.dtype,
        num_pages=-(-(pool.size + pool.global_page_size) // pool.page_size),
        reserved_pages=reserved_pages,
        tokens_per_row=tokens_per_row,
        pool=name,
    )
    if pool.kv_buffer and pool.bytes_per_page_padded != layout.page_stride_bytes:
        raise PageStrideError(
            "bytes_per_page_padded",
            got=pool.bytes_per_page_padded,
            expected=layout.page_stride_bytes,
            detail=f"{type(pool).__name__} of layout {pool.kv_layout.value}, {pool.page_size} rows",
        )
    yield from _per_layer(pool.kv_buffer, layout, cache=cache, layers=layers or _layers_of(pool), group=group)


def page_format(pool: Any) -> PageFormat:
    """Format of a DeepSeek-V4 pool: the record by name, policy and alignment from SGLang's own KVLayout."""
    if type(pool).__name__ == "DeepSeekV4UniformFP8KVPool":
        return KV_LAYOUTS["uniform_fp8"]  # its kv_layout still says V4
    layout = pool.kv_layout
    known = KV_LAYOUTS.get(layout.value)
    if known is None:
        raise EngineError(f"kv_layout: got {layout.value!r}, expected one of {sorted(KV_LAYOUTS)}")
    policy = PaddingPolicy.EXACT if layout.is_interleaved else PaddingPolicy.ALIGNED
    return PageFormat(known.record, policy, layout.page_align, known.dtype)


def _layers_of(pool: Any) -> range:
    start = getattr(pool, "start_layer", 0) or 0
    return range(start, start + pool.layer_num)


def _per_layer(
    buffers: Sequence[torch.Tensor], layout: PageLayout, *, cache: str, layers: Sequence[int], group: str
) -> Iterator[LiveCache]:
    if len(buffers) != len(layers):
        raise EngineError(f"{cache}: got {len(buffers)} buffers, expected {len(layers)}, one for each of its layers")
    for layer, buffer in zip(layers, buffers, strict=True):
        yield LiveCache(layer_name(layer, cache), group, layout, buffer)


def _read_owner(pool: Any) -> Iterator[LiveCache]:
    """Caches of a `DeepSeekV4TokenToKVPool`."""
    if pool.unified_kv_pool is not None:
        from kvbridge.engines.sglang.unified import read_unified_owner

        yield from read_unified_owner(pool)
        return
    stage = range(pool._stage_start, pool._stage_end)
    window = pool.request_window
    swa = pool.swa_kv_pool if window is None else window.state
    if swa is not None:
        yield from read_paged(
            swa,
            name="swa",
            cache="swa",
            layers=stage,
            group=SWA if window is None else REQUEST,
            reserved_pages=pool.swa_page_size // swa.page_size,
        )
    for ratio, entry in pool.kv_pools.items():
        if entry is not None and entry.kv_buffer:
            hisparse = type(entry).__name__ == "HiSparseC4DevicePool"
            yield from read_paged(
                entry,
                name=f"c{ratio}",
                cache=f"c{ratio}",
                layers=pool.sources_by_ratio[ratio],
                group=HISPARSE if hisparse else FULL,
                tokens_per_row=ratio,
            )
    for ratio, entry in pool.index_pools.items():
        if entry.layer_num:
            yield from _read_indexer(
                entry,
                cache=f"c{ratio}_indexer",
                layers=pool.sources_by_ratio[ratio],
                reserved_pages=1 if ratio == 4 else pool.page_size // ratio // entry.page_size,
                tokens_per_row=ratio,
            )
    yield from read_states(pool)
    if not pool._unified_kv:
        pages = None if pool.full_size is None else pool.full_size // pool.page_size + 1
        yield LiveCache(FULL, FULL, anchor_layout(page_rows=pool.page_size, num_pages=pages, reserved_pages=1))


def read_states(pool: Any) -> Iterator[LiveCache]:
    """Compressor state of an owner pool: attention, then indexer, ratio by ratio."""
    for ratio in (4, 128, 2):
        for pools, suffix in ((pool.compress_state_pools, ""), (pool.indexer_compress_state_pools, "_indexer")):
            for layer, entry in enumerate(pools):
                if entry is not None and entry.ratio == ratio:
                    yield from _read_state(entry, name=layer_name(layer, f"c{ratio}{suffix}_state"))


def _read_state(pool: Any, *, name: str = "state") -> Iterator[LiveCache]:
    """A compressor's rows as pages of one ring; the last row is a sentinel that no page of a request covers."""
    rows = pool.kv_score_buffer.kv_score
    fmt = state_format(pool.last_dim, str(rows.dtype).removeprefix("torch."))
    if fmt.record not in RECORDS:
        known = sorted(record for record in RECORDS if record.startswith("state_"))
        raise EngineError(f"{name}: got rows of {pool.last_dim} {fmt.dtype}, expected one of {known}")
    pages = pool._size // pool.ring_size
    layout = PageLayout.for_rows(
        fmt.record,
        page_rows=pool.ring_size,
        dtype=fmt.dtype,
        num_pages=pages,
        reserved_pages=1,
        kind=PoolKind.TOKEN_GRANULAR,
        pool="compressor_state",
    )
    yield LiveCache(name, REQUEST if pool.request_scoped else SWA, layout, rows[: pages * pool.ring_size])


def _read_indexer(
    pool: Any,
    *,
    cache: str = "indexer",
    layers: Sequence[int] | None = None,
    reserved_pages: int = 1,
    tokens_per_row: int = 1,
) -> Iterator[LiveCache]:
    """Caches of a `DeepSeekV4IndexerPool`."""
    if pool.uses_aiter_fp4_layout:
        raise EngineError(f"{cache}: got the HIP fp4 indexer (keys and scales in two tensors), expected the CUDA one")
    fmt = INDEXER_FP4 if pool.use_fp4_indexer else INDEXER_FP8
    row_bytes = get_record(fmt.record).row_bytes
    if pool.get_bytes_per_token() != row_bytes:
        raise RecordWidthError("get_bytes_per_token", got=pool.get_bytes_per_token(), expected=row_bytes)
    layout = PageLayout.for_rows(
        fmt.record,
        page_rows=pool.page_size,
        num_pages=-(-(pool.size + pool.global_page_size) // pool.page_size),
        reserved_pages=reserved_pages,
        tokens_per_row=tokens_per_row,
        pool="indexer",
    )
    buffers = pool.index_k_with_scale_buffer
    yield from _per_layer(buffers, layout, cache=cache, layers=layers or _layers_of(pool), group=FULL)


def _read_classic(pool: Any) -> Iterator[LiveCache]:
    """Caches of `MLATokenToKVPool`, `MLATokenToKVPoolFP4` and `DSATokenToKVPool`."""
    yield from _read_classic_rows(pool)
    index = getattr(pool, "index_key_cache", None)
    if index is None:
        return
    if pool.index_kpool != 1:
        raise EngineError(f"index_kpool: got {pool.index_kpool}, expected 1")
    layout = PageLayout.for_rows(
        INDEXER_FP8.record,
        page_rows=pool.index_page_size,
        num_pages=(pool.index_buf_size + pool.page_size + 1) // pool.page_size,
        reserved_pages=1,
        pool="indexer",
    )
    for layer, buffer in zip(_layers_of(pool), index.buffer, strict=True):
        if buffer.shape[0]:  # layers that share an indexer hold an empty placeholder
            yield LiveCache(layer_name(layer, "index_k"), FULL, layout, buffer)


def _read_classic_rows(pool: Any) -> Iterator[LiveCache]:
    record = get_record(classic_record(pool))
    for plane in record.planes:
        buffers = pool.kv_scale_buffer if plane == "scales" else pool.kv_buffer
        layout = PageLayout.for_rows(
            record.name,
            page_rows=pool.page_size,
            plane=plane or None,
            dtype=str(pool.store_dtype).removeprefix("torch."),
            num_pages=(pool.size + pool.page_size) // pool.page_size,
            reserved_pages=1,
            kind=PoolKind.TOKEN_GRANULAR,
            pool="dsa" if pool.use_dsa else "mla",
        )
        cache = f"kv.{plane}" if plane else "kv"
        yield from _per_layer(buffers, layout, cache=cache, layers=_layers_of(pool), group=FULL)


def classic_record(pool: Any) -> str:
    """Record of a classic MLA pool, from its class, its dtype and its row width."""
    if pool.kv_lora_rank != 512 or pool.qk_rope_head_dim != 64:
        raise EngineError(
            f"kv_lora_rank, qk_rope_head_dim: got {pool.kv_lora_rank}, {pool.qk_rope_head_dim}, expected 512, 64"
        )
    if pool.kv_scale_buffer is not None:
        return "mla_fp4"
    if pool.dsa_kv_cache_store_fp8:
        if pool.kv_cache_dim != get_record("dsa").row_bytes:
            raise RecordWidthError("kv_cache_dim", got=pool.kv_cache_dim, expected=get_record("dsa").row_bytes)
        return "dsa"
    names = {"torch.bfloat16": "mla_bf16", "torch.float8_e4m3fn": "mla_fp8"}
    if str(pool.dtype) not in names:
        raise EngineError(f"dtype: got {pool.dtype}, expected one of {sorted(names)}")
    return names[str(pool.dtype)]


def anchor_layout(*, page_rows: int, num_pages: int | None, reserved_pages: int) -> PageLayout:
    """Layout of a pool that hands out slots and owns no bytes."""
    return PageLayout(
        pool=FULL,
        kind=PoolKind.INDEX_ONLY,
        page_rows=page_rows,
        payload_bytes=0,
        page_bytes=0,
        page_stride_bytes=0,
        padding=Padding(policy=PaddingPolicy.EXACT),
        num_pages=num_pages,
        reserved_pages=reserved_pages,
    )


def _read_logical_host(pool: Any) -> Iterator[LiveCache]:
    """`LogicalHostPool`: HiCache's anchor, slots without a buffer."""
    if pool.kv_buffer is not None:
        raise EngineError("LogicalHostPool.kv_buffer: got a buffer, expected None")
    layout = anchor_layout(page_rows=pool.page_size, num_pages=pool.size // pool.page_size, reserved_pages=0)
    yield LiveCache("host.full", FULL, layout)


_READERS: dict[str, Callable[[Any], Iterator[LiveCache]]] = {
    "DeepSeekV4TokenToKVPool": _read_owner,
    "DeepSeekV4SingleKVPool": read_paged,
    "DeepSeekV4UniformFP8KVPool": read_paged,
    "HiSparseC4DevicePool": read_paged,
    "DeepSeekV4IndexerPool": _read_indexer,
    "CompressStatePool": _read_state,
    "MLATokenToKVPool": _read_classic,
    "MLATokenToKVPoolFP4": _read_classic,
    "DSATokenToKVPool": _read_classic,
    "LogicalHostPool": _read_logical_host,
}
