"""Manifest: every pool of one engine instance, planned from a model's config or captured from live tensors.

    {"schema_version": 1, "manifests": [{"engine", "model", "origin", "rank", "storages": [...], "pools": [...]}]}
      pool = what a page is (PageLayout) + where its layers lie (storage, group, layer_stride_bytes, layers)

Stored derived figures (tail_pad_bytes, foreign_bytes, waste_bytes) are for readers without kvbridge; on the way in they
are checked against the fields they follow from. `DeclaredManifest` holds any document that is on schema, contradictions
included, so that `check` can explain it; a `Manifest` holds only consistent pools.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from kvbridge.errors import DerivedFieldError, LayoutError, ManifestError
from kvbridge.layout import DeclaredLayout, Padding, PaddingPolicy, PageLayout, PoolKind

SCHEMA_VERSION = 1
"""Version of the JSON form; it changes when a reader of the old one would go wrong."""

_STRICT = ConfigDict(frozen=True, extra="forbid")


class EngineId(BaseModel):
    """Which engine allocates the pools, and the version whose rules apply."""

    model_config = _STRICT
    name: StrictStr
    version: StrictStr


class Rank(BaseModel):
    """Which worker of a parallel engine this is. DCP is decode context parallelism."""

    model_config = _STRICT
    tensor_parallel_rank: StrictInt = 0
    tensor_parallel_size: StrictInt = 1
    pipeline_parallel_rank: StrictInt = 0
    pipeline_parallel_size: StrictInt = 1
    decode_context_parallel_rank: StrictInt = 0
    decode_context_parallel_size: StrictInt = 1


class Storage(BaseModel):
    """One allocation. Tensors that share it are counted once.

    Attributes:
        id: Name inside the manifest.
        storage_bytes: Size; None while no memory budget is known.
    """

    model_config = _STRICT
    id: StrictStr
    storage_bytes: StrictInt | None = None


class LayerPlacement(BaseModel):
    """Where one layer's pages start.

    Attributes:
        name: The engine's name of the layer's cache.
        offset_bytes: First page's start, from the start of the storage.
        storage: Storage id, where it is not the pool's.
    """

    model_config = _STRICT
    name: StrictStr
    offset_bytes: StrictInt
    storage: StrictStr | None = None


class MemoryPlan(BaseModel):
    """What a memory budget holds, and why.

    Attributes:
        budget_bytes: Bytes given to the cache.
        used_bytes: Bytes the engine would allocate of them.
        num_blocks: Blocks (vLLM) or pages (SGLang) that fit.
        tokens: Tokens that fit in the pool that grows with the sequence.
        reason: The arithmetic in words.
    """

    model_config = _STRICT
    budget_bytes: StrictInt
    used_bytes: StrictInt
    num_blocks: StrictInt
    tokens: StrictInt
    reason: StrictStr


class DeclaredPadding(Padding):
    """Padding with the derived figures a document may carry."""

    tail_pad_bytes: StrictInt | None = None
    foreign_bytes: StrictInt | None = None


class DeclaredPool(DeclaredLayout):
    """A pool as a document states it: a declared layout and where its layers lie.

    Attributes:
        waste_bytes: Derived: the tail pad.
        group: Layers that share one block table. Groups may alias each other's bytes; layers inside one may not.
        storage: Id of the storage that holds the layers.
        layer_stride_bytes: Distance between two layers, where it is the same for all.
        layers: The layers in the engine's order.
    """

    padding: DeclaredPadding
    waste_bytes: StrictInt | None = None
    group: StrictStr | None = None
    storage: StrictStr | None = None
    layer_stride_bytes: StrictInt | None = None
    layers: tuple[LayerPlacement, ...] = ()

    def layout_fields(self) -> dict[str, Any]:
        """The fields of a `PageLayout`, without placement and derived figures."""
        fields = {name: getattr(self, name) for name in DeclaredLayout.model_fields}
        fields["record"] = self.record or ""  # index-only pools have none; all others are refused without one
        fields["padding"] = Padding(policy=self.padding.policy, alignment=self.padding.alignment)
        return fields

    def derived_violations(self, layout: PageLayout) -> Iterator[LayoutError]:
        """Stored derived figures that contradict a consistent layout of the same fields."""
        stored = {
            "padding.tail_pad_bytes": (self.padding.tail_pad_bytes, layout.tail_pad_bytes),
            "padding.foreign_bytes": (self.padding.foreign_bytes, layout.foreign_bytes),
            "waste_bytes": (self.waste_bytes, layout.waste_bytes),
        }
        for field, (got, expected) in stored.items():
            if got is not None and got != expected:
                yield DerivedFieldError(field, got=got, expected=expected)


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
        fields = self.model_dump(mode="json", exclude={"layers"})
        fields["padding"] |= {"tail_pad_bytes": self.tail_pad_bytes, "foreign_bytes": self.foreign_bytes}
        fields["waste_bytes"] = self.waste_bytes
        fields["layers"] = [layer.model_dump(mode="json", exclude_none=True) for layer in self.layers]
        return fields


class _ManifestFields(BaseModel):
    model_config = _STRICT

    engine: EngineId
    model: StrictStr | None = None
    origin: Literal["planned", "captured"]
    rank: Rank = Field(default_factory=Rank)
    options: dict[str, StrictStr | StrictInt | bool | None] = Field(default_factory=dict)
    storages: tuple[Storage, ...] = ()
    memory: MemoryPlan | None = None
    notes: tuple[StrictStr, ...] = ()


class DeclaredManifest(_ManifestFields):
    """A manifest as a document states it.

    Attributes:
        engine: Engine and version.
        model: Model name or folder name.
        origin: `planned` (computed) or `captured` (read from live tensors).
        rank: Which worker.
        options: Engine options that decided the layout.
        storages: Allocations.
        memory: What a budget holds; None without one.
        notes: Remarks for people.
        pools: The pools.
    """

    pools: tuple[DeclaredPool, ...] = ()


class Manifest(_ManifestFields):
    """Every pool of one engine instance; all pools consistent. Fields as `DeclaredManifest`."""

    pools: tuple[Pool, ...] = ()

    @classmethod
    def from_declared(cls, declared: DeclaredManifest) -> Self:
        """Builds a manifest from a document.

        Raises:
            LayoutError: The first contradiction of any pool.
        """
        pools = []
        for entry in declared.pools:
            pool = Pool(
                **entry.layout_fields(),
                group=entry.group,
                storage=entry.storage,
                layer_stride_bytes=entry.layer_stride_bytes,
                layers=entry.layers,
            )
            for violation in entry.derived_violations(pool):
                raise violation
            pools.append(pool)
        fields = {name: getattr(declared, name) for name in _ManifestFields.model_fields}
        return cls(**fields, pools=tuple(pools))

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
        fields = self.model_dump(mode="json", exclude={"pools"})
        fields["pools"] = [pool.document() for pool in self.pools]
        return fields


class ManifestDocument(BaseModel):
    """The JSON document: one or more manifests."""

    model_config = _STRICT
    schema_version: Literal[1]
    manifests: tuple[DeclaredManifest, ...]

    @model_validator(mode="before")
    @classmethod
    def _known_version(cls, data: Any) -> Any:
        version = data.get("schema_version") if isinstance(data, dict) else SCHEMA_VERSION
        if type(version) is not int or version != SCHEMA_VERSION:  # True and 1.0 equal 1, and are not it
            raise ValueError(f"schema_version: got {version!r}, expected {SCHEMA_VERSION}")
        return data


def dump_manifests(manifests: Iterable[Manifest]) -> str:
    """JSON text of a document: sorted keys, integers, two spaces, a final newline."""
    document = {"schema_version": SCHEMA_VERSION, "manifests": [manifest.document() for manifest in manifests]}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def parse_manifests(text: str | bytes) -> tuple[DeclaredManifest, ...]:
    """Reads a document; contradictions inside it are kept for an audit to explain.

    Args:
        text: JSON, UTF-8.

    Raises:
        ManifestError: Not JSON, or not on schema; the message names the place.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"manifest: got text that is not JSON ({error}), expected a JSON object") from error
    return validate_document(data)


def validate_document(data: object) -> tuple[DeclaredManifest, ...]:
    """Validates an already parsed document.

    Raises:
        ManifestError: Not on schema.
    """
    if not isinstance(data, dict):
        raise ManifestError(f"manifest: got a JSON {type(data).__name__}, expected an object")
    try:
        return ManifestDocument.model_validate(data).manifests
    except ValidationError as error:
        raise ManifestError(describe_validation(error)) from error


def describe_validation(error: ValidationError) -> str:
    """One line per fault of a pydantic error: where, what was got, what was expected."""
    lines = []
    for fault in error.errors(include_url=False):
        place = ".".join(str(part) for part in fault["loc"]) or "manifest"
        got = repr(fault["input"])
        lines.append(f"{place}: got {got[:80]}, expected: {fault['msg']}")
    return "\n".join(lines)


def manifest_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the document."""
    schema = ManifestDocument.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
