"""The manifest SGLang would allocate, from a model's config and options. Neither SGLang nor torch is imported.

    DeepSeek-V4 owner pool                     one tensor, so one storage, per layer and cache
      swa    [pages, 149760]  256 rows         every layer                 group swa
      c4     [pages, 37440]    64 rows         layers of ratio 4           group full
      c128   [pages, 1728]      2 rows         layers of ratio 128         group full
      indexer, compressor_state                beside c4, c128, c2
      full   no bytes: the token slots that page tables are made of
    classic  [slots, 1, 576] bf16, [slots, 1, 656] dsa ...     token-granular

Source: SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py (DeepSeekV4TokenToKVPool), mem_cache/memory_pool.py,
mem_cache/index_key_cache.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbridge.engine import EngineError, OptionValue, PlanRequest, resolve_options
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.naming import Bank
from kvbridge.engines.sglang.options import Settings, resolve_settings
from kvbridge.engines.sglang.plan_classic import plan_classic
from kvbridge.engines.sglang.plan_v4 import plan_v4
from kvbridge.engines.sglang.sizes import Fit, PoolSizes, fit_classic, fit_v4
from kvbridge.manifest import EngineId, Manifest, MemoryPlan
from kvbridge.models import Family, ModelConfig

UNLIMITED_BYTES = 1 << 50
"""A budget that never decides: `max-total-tokens` alone does."""


def plan(request: PlanRequest) -> Manifest:
    """Computes the manifest of one SGLang worker.

    Args:
        request: Model, version, options; page counts need a memory budget or the option `max-total-tokens`.

    Raises:
        EngineError: The model or an option is not supported, or the budget holds nothing.
    """
    options = resolve_options(ENGINE, request.options)
    settings = resolve_settings(request.model, options)
    fit = _fit(request.model, settings, request.memory_bytes)
    bank = plan_bank(request.model, settings, fit.sizes if fit else None)
    manifest = Manifest.built(
        engine=EngineId.built(name=ENGINE.name, version=request.version),
        model=request.model.name,
        origin="planned",
        options=given_options(options),
        storages=tuple(bank.storages),
        notes=(*_notes(request, settings), *bank.notes),
        pools=tuple(bank.pools),
    )
    if fit is None or request.memory_bytes is None:
        return manifest
    memory = MemoryPlan.built(
        budget_bytes=request.memory_bytes,
        used_bytes=manifest.total_bytes or 0,
        num_blocks=fit.sizes.full_tokens // settings.page_rows,
        tokens=fit.sizes.full_tokens,
        reason=fit.reason,
    )
    return manifest.model_copy(update={"memory": memory})


def plan_bank(model: ModelConfig, settings: Settings, sizes: PoolSizes | None) -> Bank:
    """All pools and storages of one model.

    Args:
        model: The model.
        settings: Resolved options.
        sizes: Pool sizes; None leaves page counts and storage sizes open.
    """
    if _is_v4(model):
        return plan_v4(model, settings, sizes)
    if settings.hisparse_ratio:
        raise EngineError(f"option enable-hisparse: got true, expected false for {model.family.value} models")
    return plan_classic(model, settings, sizes)


def given_options(options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """The options that differ from their defaults: what a manifest states, planned or captured."""
    defaults = {option.name: option.default for option in ENGINE.options}
    return {name: value for name, value in options.items() if value != defaults[name]}


def _is_v4(model: ModelConfig) -> bool:
    return model.family in (Family.V4, Family.V41)


def _fit(model: ModelConfig, settings: Settings, budget_bytes: int | None) -> Fit | None:
    if budget_bytes is None:
        if not settings.max_total_tokens:
            return None
        budget_bytes = UNLIMITED_BYTES
    return (fit_v4 if _is_v4(model) else fit_classic)(model, settings, budget_bytes)


def _notes(request: PlanRequest, settings: Settings) -> tuple[str, ...]:
    notes = []
    if request.version not in ENGINE.versions:
        notes.append(f"SGLang {request.version} was not read; planned by the rules of {ENGINE.versions[-1]}")
    if settings.draft_tokens:
        notes.append("the draft worker allocates a pool of its own; this is the target's")
    if request.model.family is Family.V41 and settings.kv_layout == "v41" and "kv-layout" not in request.options:
        notes.append("v41 is SGLang's own choice only with flashmla_mega; else set SGLANG_DSV4_KV_LAYOUT=v41")
    return tuple(notes)
