"""Documents: manifests as JSON states them, contradictions included, and their published schema.

    JSON text --parse_manifests--> DeclaredManifest (on schema)  --to_manifest--> Manifest (consistent)
                                        |  violations, audit: what contradicts what

A document that is on schema can be explained even where no consistent manifest exists. Apart from `manifest.py`,
because planning and showing a manifest reads no document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import StrictInt, StrictStr, ValidationError, model_validator

from kvbridge.errors import DerivedFieldError, LayoutError, ManifestError
from kvbridge.frozen import Frozen
from kvbridge.layout import DeclaredLayout, Padding, PageLayout
from kvbridge.manifest import SCHEMA_VERSION, LayerPlacement, Manifest, ManifestFields, Pool


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

    def to_pool(self) -> Pool:
        """The pool, where its layout is consistent; derived figures are not looked at.

        Raises:
            LayoutError: The layout contradicts itself.
        """
        return Pool(
            **self.layout_fields(),
            group=self.group,
            storage=self.storage,
            layer_stride_bytes=self.layer_stride_bytes,
            layers=self.layers,
        )

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


class DeclaredManifest(ManifestFields):
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

    def to_manifest(self) -> Manifest:
        """The manifest, where nothing in it contradicts anything.

        Raises:
            LayoutError: The first contradiction of any pool.
        """
        pools = []
        for entry in self.pools:
            pool = entry.to_pool()
            for violation in entry.derived_violations(pool):
                raise violation
            pools.append(pool)
        fields = {name: getattr(self, name) for name in ManifestFields.model_fields}
        return Manifest(**fields, pools=tuple(pools))


class ManifestDocument(Frozen):
    """The JSON document: one or more manifests."""

    schema_version: Literal[1]
    manifests: tuple[DeclaredManifest, ...]

    @model_validator(mode="before")
    @classmethod
    def _known_version(cls, data: Any) -> Any:
        version = data.get("schema_version") if isinstance(data, dict) else SCHEMA_VERSION
        if type(version) is not int or version != SCHEMA_VERSION:  # True and 1.0 equal 1, and are not it
            raise ValueError(f"schema_version: got {version!r}, expected {SCHEMA_VERSION}")
        return data


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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
