"""The captured manifest: what vLLM's live tensors really are, beside what it declared.

    KVCacheConfig + {layer: tensor} -> findings (tensor against declaration) and a Manifest of the tensors' own numbers

One placement becomes one pool, unless its layers differ in their numbers; then each kind becomes a pool of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbridge.engines.vllm.declared import LayerCache, declared_caches
from kvbridge.engines.vllm.layouts import bind_cache, pages_of, require_allocation_view
from kvbridge.engines.vllm.plan import STORAGE
from kvbridge.errors import LayoutError
from kvbridge.layout import PageLayout
from kvbridge.manifest import EngineId, LayerPlacement, Manifest, MemoryPlan, Pool, Rank, Storage
from kvbridge.rule import Severity
from kvbridge.rules import Finding, finding, finding_of

if TYPE_CHECKING:
    import torch


def check_tensors(kv_caches: Mapping[str, torch.Tensor], caches: Sequence[LayerCache]) -> tuple[Finding, ...]:
    """Compares every live tensor with what vLLM declares of its layer.

    Args:
        kv_caches: Layer name to tensor.
        caches: The declarations.

    Returns:
        One finding for each layer that differs; its field starts with the layer's name.
    """
    findings = []
    for cache in caches:
        tensor = kv_caches.get(cache.tensor)
        if tensor is None:
            findings.append(
                finding("page-count", f"{cache.name}.tensor", got=None, expected="a tensor", pool=cache.layout.pool)
            )
            continue
        try:
            bind_cache(cache, tensor)
        except LayoutError as fault:
            findings.append(finding_of(fault, pool=cache.layout.pool, place=cache.name))
    return tuple(findings)


def captured_manifest(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    *,
    version: str,
    packed: bool | None = None,
    page_tokens: Mapping[int, int] | None = None,
    model: str | None = None,
    options: Mapping[str, str | int | bool] | None = None,
    rank: Rank | None = None,
    memory: MemoryPlan | None = None,
    notes: Sequence[str] = (),
) -> tuple[Manifest, tuple[Finding, ...]]:
    """Builds the manifest of live tensors.

    Args:
        kv_caches: Layer name to tensor, as KV connectors receive them or `allocate_kv_cache` returns them.
        kv_cache_config: The KVCacheConfig they were allocated from.
        version: vLLM's version.
        packed: Whether blocks are outermost; by the config where not given.
        page_tokens: Kernel block of each group, where vLLM allocated kernel blocks.
        model: Model name.
        options: Options that decided the layout.
        rank: Which worker.
        memory: What the memory holds.
        notes: Remarks.

    Returns:
        The manifest of every layer that is consistent, and the findings on those that differ from the declaration.
    """
    skipped: dict[str, LayoutError] = {}
    caches = tuple(
        declared_caches(kv_cache_config, version=version, packed=packed, page_tokens=page_tokens, skipped=skipped)
    )
    findings = list(check_tensors(kv_caches, caches))
    findings.extend(_skipped_note(skipped))
    storages: dict[int, Storage] = {}
    pools: dict[tuple[Any, ...], list[LayerPlacement]] = {}
    for cache in caches:
        whole = kv_caches.get(cache.tensor)
        if whole is None:
            continue
        storage = storages.setdefault(whole.untyped_storage().data_ptr(), _storage_of(whole, len(storages)))
        try:
            require_allocation_view(cache, whole)
            tensor = pages_of(cache, whole)
            layout = live_layout(cache, tensor)
        except LayoutError as fault:
            if not any(entry.field.startswith(f"{cache.name}.") for entry in findings):
                findings.append(finding_of(fault, pool=cache.layout.pool, place=cache.name))
            continue
        offset = int(tensor.storage_offset()) * tensor.element_size()
        key = (cache.placement, cache.first_row, cache.group, cache.layer_stride_bytes, storage.id, layout)
        pools.setdefault(key, []).append(LayerPlacement(name=cache.name, offset_bytes=offset))
    manifest = Manifest(
        engine=EngineId(name="vllm", version=version),
        model=model,
        origin="captured",
        rank=rank or Rank(),
        options=dict(options or {}),
        storages=tuple(storages.values()),
        memory=memory,
        notes=tuple(notes),
        pools=tuple(
            Pool(
                **{name: getattr(layout, name) for name in type(layout).model_fields},
                group=str(group),
                storage=storage,
                layer_stride_bytes=_layer_stride(layers, declared),
                layers=tuple(layers),
            )
            for (_, _, group, declared, storage, layout), layers in pools.items()
        ),
    )
    return manifest, tuple(findings)


def _skipped_note(skipped: Mapping[str, LayoutError]) -> Iterator[Finding]:
    """A note on the layers that hold no MLA cache: nothing is wrong with them, but nothing here describes them."""
    for code in dict.fromkeys(reason.code for reason in skipped.values()):
        names = [name for name, reason in skipped.items() if reason.code == code]
        reason = skipped[names[0]]
        yield finding(
            code,
            f"{names[0]}.{reason.field}",
            got=reason.got,
            expected=reason.expected,
            detail=f"{len(names)} layers are not audited",
            severity=Severity.NOTE,
            consequence="these layers are missing from the manifest",
        )


def live_layout(cache: LayerCache, tensor: torch.Tensor) -> PageLayout:
    """The layout with the tensor's own page count, stride, rows and dtype in place of the declared ones.

    Raises:
        LayoutError: These numbers contradict the layer's record or padding.
    """
    size = tensor.element_size()
    rows = tensor.shape[-2]
    declared = cache.layout
    pages, stride = tensor.shape[0], tensor.stride(0) * size
    return PageLayout(
        record=declared.record,
        pool=declared.pool,
        page_rows=rows,
        tokens_per_row=declared.tokens_per_row,
        payload_bytes=rows * tensor.shape[-1] * size,
        page_stride_bytes=stride if pages > 1 else declared.page_stride_bytes,
        padding=declared.padding,
        num_pages=pages,
        reserved_pages=declared.reserved_pages,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _storage_of(tensor: torch.Tensor, count: int) -> Storage:
    return Storage(id=STORAGE if not count else f"{STORAGE}{count}", storage_bytes=tensor.untyped_storage().nbytes())


def _layer_stride(layers: Sequence[LayerPlacement], declared: int) -> int:
    """The tensors' own distance where there are two layers; what vLLM declares where there is one."""
    return layers[1].offset_bytes - layers[0].offset_bytes if len(layers) > 1 else declared
