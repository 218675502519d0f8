"""Manifest: every pool of one engine instance, planned from a model's config or captured from live tensors.

    {"schema_version": 1, "manifests": [{"engine", "model", "origin", "rank", "storages": [...], "pools": [...]}]}
      pool = what a page is (PageLayout) + where its layers lie (storage, group, layer_stride_bytes, layers)

Stored derived figures (tail_pad_bytes, foreign_bytes, waste_bytes) are for readers without kvbridge; on the way in they
are checked against the fields they follow from (`documents.py`). A `Manifest` holds only consistent pools.
"""

# Annotations are evaluated here and now: pydantic would compile each of them from text, at every start.

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, StrictInt, StrictStr

from kvbridge.frozen import Frozen
from kvbridge.layout import DeclaredLayout, Padding, PaddingPolicy, PageLayout, PoolKind

SCHEMA_VERSION = 1
"""Version of the JSON form; it changes when a reader of the old one would go wrong."""


class EngineId(Frozen):
    """Which engine allocates the pools, and the version whose rules apply."""

    name: StrictStr
    version: StrictStr


class Rank(Frozen):
    """Which worker of a parallel engine this is. DCP is decode context parallelism."""

    tensor_parallel_rank: StrictInt = 0
    tensor_parallel_size: StrictInt = 1
    pipeline_parallel_rank: StrictInt = 0
    pipeline_parallel_size: StrictInt = 1
    decode_context_parallel_rank: StrictInt = 0
    decode_context_parallel_size: StrictInt = 1


class Storage(Frozen):
    """One allocation. Tensors that share it are counted once.

    Attributes:
        id: Name inside the manifest.
        storage_bytes: Size; None while no memory budget is known.
    """

    id: StrictStr
    storage_bytes: StrictInt | None = None


class LayerPlacement(Frozen):
    """Where one layer's pages start.

    Attributes:
        name: The engine's name of the layer's cache.
        offset_bytes: First page's start, from the start of the storage.
        storage: Storage id, where it is not the pool's.
    """

    name: StrictStr
    offset_bytes: StrictInt
    storage: StrictStr | None = None


class MemoryPlan(Frozen):
    """What a memory budget holds, and why.

    Attributes:
        budget_bytes: Bytes given to the cache.
        used_bytes: Bytes the engine would allocate of them.
        num_blocks: Blocks (vLLM) or pages (SGLang) that fit.
        tokens: Tokens that fit in the pool that grows with the sequence.
        reason: The arithmetic in words.
    """

    budget_bytes: StrictInt
    used_bytes: StrictInt
    num_blocks: StrictInt
    tokens: StrictInt
    reason: StrictStr


class Pool(PageLayout):
    """A pool whose layout is consistent, and where its layers lie. Fields as `DeclaredPool`."""

    group: StrictStr | None = None
    storage: StrictStr | None = None
    layer_stride_bytes: StrictInt | None = None
    layers: tuple[LayerPlacement, ...] = ()

    @property
    def layout(self) -> PageLayout:
        """The layout alone."""
        return PageLayout(**{name: getattr(self, name) for name in DeclaredLayout.model_fields})

    def storage_of(self, layer: LayerPlacement) -> str | None:
        """Id of the storage that holds a layer."""
        return layer.storage or self.storage

    def document(self) -> dict[str, Any]:
        """JSON form, derived figures included."""
        fields = self.as_json()
        fields["padding"] |= {"tail_pad_bytes": self.tail_pad_bytes, "foreign_bytes": self.foreign_bytes}
        fields["waste_bytes"] = self.waste_bytes
        fields["layers"] = [
            {name: value for name, value in layer.items() if value is not None} for layer in fields["layers"]
        ]
        return fields


class ManifestFields(Frozen):
    """What a manifest says besides its pools; attributes as in `Manifest`."""

    engine: EngineId
    model: StrictStr | None = None
    origin: Literal["planned", "captured"]
    rank: Rank = Field(default_factory=Rank.built)
    options: dict[str, StrictStr | StrictInt | bool | None] = Field(default_factory=dict)
    storages: tuple[Storage, ...] = ()
    memory: MemoryPlan | None = None
    notes: tuple[StrictStr, ...] = ()


class Manifest(ManifestFields):
    """Every pool of one engine instance; all pools consistent. Fields as `DeclaredManifest`."""

    pools: tuple[Pool, ...] = ()

    def find_pools(self, name: str) -> tuple[Pool, ...]:
        """Pools of one name (swa, c4 ...), in order."""
        return tuple(pool for pool in self.pools if pool.pool == name)

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all storages, each once; None where one is unknown."""
        sizes = [storage.storage_bytes for storage in self.storages]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def document(self) -> dict[str, Any]:
        """JSON form of this manifest alone."""
        fields = self.as_json()
        fields["pools"] = [pool.document() for pool in self.pools]
        return fields


def dump_manifests(manifests: Iterable[Manifest]) -> str:
    """JSON text of a document: sorted keys, integers, two spaces, a final newline."""
    document = {"schema_version": SCHEMA_VERSION, "manifests": [manifest.document() for manifest in manifests]}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def index_only_pool(name: str, *, page_rows: int, tokens_per_row: int = 1, num_pages: int | None = None) -> Pool:
    """A pool that hands out slots but owns no bytes (case 29: SGLang's anchor pool)."""
    return Pool(
        record="",
        pool=name,
        kind=PoolKind.INDEX_ONLY,
        page_rows=page_rows,
        tokens_per_row=tokens_per_row,
        payload_bytes=0,
        page_bytes=0,
        page_stride_bytes=0,
        padding=Padding(policy=PaddingPolicy.EXACT),
        num_pages=num_pages,
    )
