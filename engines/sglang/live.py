"""One live cache: a tensor of SGLang's, the layout SGLang says it has, and what the tensor's own numbers say.

    LiveCache(name="layers.3.c4", tensor [585, 37440] uint8, layout v4, 64 rows, aligned 576)
      .view()      PageView, zero copy; raises where tensor and layout disagree
      .fault()     that disagreement as an error object, or None
      .declared()  a manifest's pool from the tensor's shape, stride and offset, right or wrong

A manifest is captured from the tensors and an audit compares them with the layouts: the two never come from one source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.documents import DeclaredManifest, DeclaredPadding, DeclaredPool
from kvbridge.engines.sglang import ENGINE
from kvbridge.errors import KVBridgeError, LayoutError
from kvbridge.geometry import tensor_geometry
from kvbridge.layout import PageLayout, PoolKind
from kvbridge.manifest import EngineId, LayerPlacement, Rank, Storage
from kvbridge.rules import Finding, finding_of
from kvbridge.view import PageView

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LiveCache:
    """One layer's cache.

    Attributes:
        name: Layer and cache: `layers.3.c4`.
        group: Who shares its page table.
        layout: What SGLang's pool class says its pages are.
        tensor: The pool's own tensor, or the part of it that pages cover; None for an index-only pool.
    """

    name: str
    group: str
    layout: PageLayout
    tensor: torch.Tensor | None = None

    def view(self) -> PageView:
        """The pages, without a copy.

        Raises:
            LayoutError: The tensor is not what the layout says.
        """
        if self.tensor is None:
            raise KVBridgeError(f"cache {self.name}: got an index-only pool, expected a pool with a tensor")
        return PageView.from_tensor(self.tensor, self.layout)

    def fault(self) -> LayoutError | None:
        """The first disagreement of tensor and layout."""
        if self.tensor is None:
            return None
        try:
            tensor_geometry(self.tensor, self.layout)
        except LayoutError as error:
            return error
        return None

    def declared(self) -> DeclaredPool:
        """The pool with this layer alone, its numbers read from the tensor."""
        layout, tensor = self.layout, self.tensor
        fields = {name: getattr(layout, name) for name in type(layout).model_fields if name != "padding"}
        padding = DeclaredPadding(policy=layout.padding.policy, alignment=layout.padding.alignment)
        if tensor is None:
            return DeclaredPool(**fields, padding=padding, group=self.group)
        size = tensor.element_size()
        rows = tensor.shape[0] if layout.kind is PoolKind.TOKEN_GRANULAR else 0
        fields |= {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "num_pages": rows // layout.page_rows if rows else tensor.shape[0],
            "page_stride_bytes": tensor.stride(0) * size * (layout.page_rows if rows else 1),
        }
        offset = int(tensor.storage_offset()) * size
        layer = LayerPlacement(name=self.name, offset_bytes=offset, storage=self.name)
        return DeclaredPool(**fields, padding=padding, group=self.group, layers=(layer,))


def declare(
    caches: Iterable[LiveCache],
    *,
    version: str,
    model: str | None = None,
    rank: Rank | None = None,
    options: Mapping[str, str | int | bool | None] | None = None,
    notes: Iterable[str] = (),
) -> DeclaredManifest:
    """The captured manifest of some caches, contradictions included.

    Args:
        caches: In the order of the manifest.
        version: SGLang's version.
        model: Model name.
        rank: Which worker.
        options: Options that decided the layout.
        notes: Remarks.
    """
    pools: list[DeclaredPool] = []
    storages: dict[int, Storage] = {}
    for cache in caches:
        entry = cache.declared()
        if cache.tensor is not None:
            memory = cache.tensor.untyped_storage()
            storage = storages.setdefault(memory._cdata, Storage(id=cache.name, storage_bytes=memory.nbytes()))
            placed = (entry.layers[0].model_copy(update={"storage": storage.id}),)
            entry = entry.model_copy(update={"layers": placed})
        for place, known in enumerate(pools):
            if known.model_copy(update={"layers": ()}) == entry.model_copy(update={"layers": ()}):
                pools[place] = known.model_copy(update={"layers": (*known.layers, *entry.layers)})
                break
        else:
            pools.append(entry)
    return DeclaredManifest(
        engine=EngineId(name=ENGINE.name, version=version),
        model=model,
        origin="captured",
        rank=rank or Rank(),
        options=dict(options or {}),
        storages=tuple(storages.values()),
        notes=tuple(notes),
        pools=tuple(pools),
    )


def live_findings(caches: Iterable[LiveCache]) -> tuple[Finding, ...]:
    """Disagreements of tensors and layouts as findings that name the layer."""
    faults = [(cache, cache.fault()) for cache in caches]
    return tuple(
        finding_of(fault, pool=cache.layout.pool, place=cache.name) for cache, fault in faults if fault is not None
    )
