"""How many tokens and rows of each cache a memory budget holds: SGLang's own arithmetic.

    budget - fixed bytes          request-scoped compressor state, a capped sliding window
    ---------------------- = full tokens, rounded down to a page -> rows of every other pool
     bytes per full token

Source: SGLang 0.5.23 model_executor/pool_configurator.py (DSV4PoolConfigurator, DefaultPoolConfigurator),
mem_cache/kv_cache_configurator.py (resolve_max_num_reqs). Fractions are floats there, so they are here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.engine import EngineError
from kvbridge.engines.sglang.formats import INDEXER_FP4, INDEXER_FP8, KV_LAYOUTS, compressed_layout
from kvbridge.engines.sglang.options import Settings
from kvbridge.layout import DTYPE_BYTES, PageLayout
from kvbridge.models import ModelConfig
from kvbridge.records import get_record

SWA_EVICTION_TOKENS = 128
"""SGLANG_SWA_EVICTION_INTERVAL."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Sizes that SGLang hands to its pool constructors.

    Attributes:
        full_tokens: Token capacity, a multiple of the page.
        swa_tokens: Sliding-window slots.
        c4_rows: Rows of the C4 pool on the device.
        c128_rows: Rows of the C128 pool.
        c4_state_rows: Rows of C4 compressor state, before the ring's own padding.
        request_slots: Requests that can be addressed, the reserved slot 0 included.
    """

    full_tokens: int
    swa_tokens: int = 0
    c4_rows: int = 0
    c128_rows: int = 0
    c4_state_rows: int = 0
    request_slots: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """What a budget holds, and why."""

    sizes: PoolSizes
    reason: str


def ring_rows(ratio: int, *, draft_tokens: int) -> int:
    """Rows of one compressor ring (deepseek_v4_memory_pool.py, get_compress_state_ring_size)."""
    if ratio == 2:
        return 1 << (draft_tokens + 1).bit_length() if draft_tokens else 2
    rows = 8 if ratio == 4 else 128
    return 2 * rows if draft_tokens else rows


def state_rows(rows: int, *, ring: int, ratio: int) -> int:
    """Rows of a compressor state tensor: one more ring, a sentinel row, rounded up to the ratio (CompressStatePool)."""
    return -(-(rows + ring + 1) // ratio) * ratio


def source_layers(model: ModelConfig, ratio: int) -> tuple[int, ...]:
    """Layers that own compressed rows of a ratio (deepseek_v4_memory_pool.py, collect_sources_by_ratio)."""
    candidates = range(model.num_layers) if ratio in (4, 128) else model.kv_source_layers
    ratios = model.compress_ratios
    return tuple(layer for layer in candidates if layer < model.num_layers and ratios[layer] == ratio)


def fit_v4(model: ModelConfig, settings: Settings, budget_bytes: int) -> Fit:
    """Sizes of a DeepSeek-V4 pool for a budget, at most `max_total_tokens`.

    Raises:
        EngineError: The budget is too small for one request, as SGLang would say at start-up.
    """
    page = settings.page_rows
    layers = {ratio: len(source_layers(model, ratio)) for ratio in (4, 128, 1, 2)}
    rings = {ratio: ring_rows(ratio, draft_tokens=settings.draft_tokens) for ratio in (4, 128, 2)}
    swa_cap = _swa_cap_tokens(model, settings) if settings.swa_ratio is None else None
    swa_token_bytes = _row_bytes(settings, 0) * model.num_layers
    if layers[4]:
        floats = 4 * model.head_dim + 4 * model.index_head_dim
        swa_token_bytes += rings[4] / page * (floats * DTYPE_BYTES[settings.state_dtype]) * layers[4]
    full_token_bytes = (settings.swa_ratio or 0) * swa_token_bytes
    full_token_bytes += sum(_full_token_bytes(model, settings, ratio) * count for ratio, count in layers.items())
    if settings.draft_tokens:  # room for the draft worker's own sliding-window layer
        inflation = (model.num_layers + 1) / model.num_layers
        full_token_bytes, swa_token_bytes = full_token_bytes * inflation, swa_token_bytes * inflation
    slots = settings.max_running_requests + 1
    state_bytes = sum(
        state_rows(slots * rings[ratio], ring=rings[ratio], ratio=ratio) * layers[ratio] * DTYPE_BYTES[dtype]
        for ratio, dtype in ((128, settings.state_dtype), (2, "float32"))
    )
    fixed_bytes = 2 * model.head_dim * state_bytes + (swa_cap or 0) * swa_token_bytes
    available = max(budget_bytes - fixed_bytes, 0)
    full = int(available / full_token_bytes) // page * page
    while full > 0 and full * full_token_bytes + _low_ratio_padding(settings, layers, full, model) > available:
        full -= page
    full, limit = _limited(full, settings)
    given = (
        f"option max-total-tokens: got {settings.max_total_tokens:,}"
        if limit
        else f"memory: got {budget_bytes:,} bytes"
    )
    if full <= 0:
        raise EngineError(
            f"{given}, expected more than {int(fixed_bytes + page * full_token_bytes):,} bytes "
            f"({int(fixed_bytes):,} fixed for {settings.max_running_requests} requests, {full_token_bytes:.2f} a token)"
        )
    swa = int(full * (settings.swa_ratio or 0)) // page * page if swa_cap is None else swa_cap
    if swa_cap is None and swa <= model.sliding_window + page:
        raise EngineError(
            f"{given}, which makes {full:,} tokens and {swa:,} sliding-window slots, expected more than "
            f"{model.sliding_window + page:,} slots (window {model.sliding_window}, page {page})"
        )
    requests = min(settings.max_running_requests, full // 2)
    sizes = PoolSizes(
        full_tokens=full,
        swa_tokens=swa,
        c4_rows=full // (4 * max(settings.hisparse_ratio, 1)),
        c128_rows=full // 128,
        c4_state_rows=swa // page * rings[4] if layers[4] else 0,
        request_slots=requests + 1,
    )
    window = f"{settings.swa_ratio} sliding-window slots a token" if swa_cap is None else f"{swa_cap:,} window slots"
    reason = (
        f"({budget_bytes:,} - {int(fixed_bytes):,} fixed for {settings.max_running_requests} requests) / "
        f"{full_token_bytes:,.2f} bytes a token ({window}), rounded down to pages of {page}{limit}: {full:,} tokens"
    )
    return Fit(sizes, reason)


def fit_classic(model: ModelConfig, settings: Settings, budget_bytes: int) -> Fit:
    """Sizes of a classic MLA or sparse-attention pool for a budget.

    Raises:
        EngineError: The budget holds no page.
    """
    row_bytes = get_record(settings.classic_record).row_bytes
    token_bytes = row_bytes * model.num_layers
    index_bytes = get_record(INDEXER_FP8.record).row_bytes
    index_layers = len(index_layers_of(model))
    draft_layers = (model.num_draft_layers or 1) if settings.draft_tokens else 0
    cell_bytes = token_bytes + index_bytes * index_layers
    cell_bytes += token_bytes * draft_layers // model.num_layers + (index_bytes * draft_layers if index_layers else 0)
    page = settings.page_rows
    full = budget_bytes // cell_bytes // page * page
    full, limit = _limited(full, settings)
    if full <= 0:
        raise EngineError(f"memory: got {budget_bytes:,} bytes, expected at least {cell_bytes * page:,} (one page)")
    reason = f"{budget_bytes:,} / {cell_bytes:,} bytes a token, rounded down to pages of {page}{limit}: {full:,} tokens"
    return Fit(PoolSizes(full_tokens=full), reason)


def _limited(full: int, settings: Settings) -> tuple[int, str]:
    """Applies --max-total-tokens (_apply_token_constraints)."""
    if not settings.max_total_tokens or settings.max_total_tokens >= full:
        return full, ""
    if settings.max_total_tokens < settings.page_rows:
        raise EngineError(
            f"option max-total-tokens: got {settings.max_total_tokens}, expected at least {settings.page_rows} (a page)"
        )
    limited = settings.max_total_tokens // settings.page_rows * settings.page_rows
    return limited, f", limited by max-total-tokens {settings.max_total_tokens:,}"


def index_layers_of(model: ModelConfig) -> tuple[int, ...]:
    """Layers of a sparse-attention model that hold indexer keys; shared indexers hold none."""
    if not model.index_head_dim:
        return ()
    return model.index_source_layers or tuple(range(model.num_layers))


def _row_bytes(settings: Settings, ratio: int) -> float:
    """Bytes of one row, its share of the page's padding included (_get_paged_kv_bytes_per_token)."""
    name = settings.kv_layout
    rows = settings.page_rows
    if ratio:
        name = compressed_layout(name, ratio=ratio, option=settings.compressed_option)
        rows //= ratio
    fmt = KV_LAYOUTS[name]
    layout = PageLayout.for_rows(
        fmt.record, page_rows=rows, policy=fmt.policy, alignment=fmt.alignment, dtype=fmt.dtype
    )
    return layout.page_stride_bytes / rows


def _full_token_bytes(model: ModelConfig, settings: Settings, ratio: int) -> float:
    if ratio in (1, 2):
        return (_row_bytes(settings, ratio) + get_record(INDEXER_FP4.record).row_bytes) / ratio
    if ratio == 4:
        # CUDA budgets fp8 indexer keys even where it allocates fp4 ones.
        indexer = 1 / 4 * get_record(INDEXER_FP8.record).row_bytes
        return 1 / (4 * max(settings.hisparse_ratio, 1)) * _row_bytes(settings, 4) + indexer
    return 1 / 128 * _row_bytes(settings, 128)


def _low_ratio_padding(settings: Settings, layers: dict[int, int], full: int, model: ModelConfig) -> float:
    """Reserved pages of ratios 1 and 2 (_get_low_ratio_kv_padding_bytes)."""
    if settings.kv_layout == "uniform_fp8":
        return 0
    padding = 0.0
    index_bytes = get_record(INDEXER_FP4.record).row_bytes
    index_rows = settings.index_page_rows
    for ratio in (1, 2):
        if layers[ratio]:
            slots = -(-((full + settings.page_rows) // ratio + index_rows) // index_rows) * index_rows
            padding += settings.page_rows * _row_bytes(settings, ratio) * layers[ratio]
            padding += (slots - full // ratio) * index_bytes * layers[ratio]
    return padding


def _swa_cap_tokens(model: ModelConfig, settings: Settings) -> int:
    """Sliding-window slots for the request cap (_resolve_swa_cap_tokens, compute_swa_request_cap)."""
    page, window, requests = settings.page_rows, model.sliding_window, settings.max_running_requests
    drafts = settings.draft_tokens
    trailing = window + SWA_EVICTION_TOKENS * max(drafts, 1) + page
    per_request = trailing + (2 * drafts if drafts else page)
    cap = per_request * requests + 2 * settings.chunked_prefill_rows + page
    tails = 4 * requests if settings.radix_cache else 0
    return -(-(cap + tails * (window + page)) // page) * page
