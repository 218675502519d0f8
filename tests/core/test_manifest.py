"""Manifests: JSON in and out, the published schema, derived figures, and everything that is off schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge import PageLayout
from kvbridge.documents import manifest_schema, parse_manifests, validate_document
from kvbridge.errors import DerivedFieldError, LayoutError, ManifestError, OverlapError
from kvbridge.layout import violations
from kvbridge.manifest import (
    SCHEMA_VERSION,
    EngineId,
    LayerPlacement,
    Manifest,
    MemoryPlan,
    Pool,
    Rank,
    Storage,
    dump_manifests,
    index_only_pool,
)


def v4_manifest() -> Manifest:
    layout = PageLayout.for_rows(
        "v4",
        page_rows=64,
        policy="packed",
        alignment=576,
        page_stride_bytes=1002240,
        num_pages=100,
        reserved_pages=1,
        tokens_per_row=4,
        pool="c4",
    )
    return Manifest(
        engine=EngineId(name="vllm", version="0.33.0"),
        model="deepseek-v4-flash",
        origin="planned",
        rank=Rank(tensor_parallel_rank=1, tensor_parallel_size=2),
        options={"block-size": 256, "kv-cache-dtype": "fp8", "prefix-caching": True},
        storages=(Storage(id="slab", storage_bytes=100224000),),
        memory=MemoryPlan(
            budget_bytes=100300000, used_bytes=100224000, num_blocks=100, tokens=25344, reason="100 blocks fit"
        ),
        notes=("block 0 is the null block",),
        pools=(
            Pool(
                **layout.model_dump(),
                group="mla",
                storage="slab",
                layer_stride_bytes=37440,
                layers=tuple(LayerPlacement(name=f"L{n}", offset_bytes=181440 + n * 37440) for n in range(3)),
            ),
            index_only_pool("anchor", page_rows=64, num_pages=100),
        ),
    )


def test_round_trip() -> None:
    manifest = v4_manifest()
    text = dump_manifests([manifest, manifest])
    again = [declared.to_manifest() for declared in parse_manifests(text)]
    assert again == [manifest, manifest]
    assert dump_manifests(again) == text


def test_the_form_of_the_document() -> None:
    text = dump_manifests([v4_manifest()])
    document = json.loads(text)
    assert text == json.dumps(document, indent=2, sort_keys=True) + "\n"
    assert document["schema_version"] == SCHEMA_VERSION == 1
    pool = document["manifests"][0]["pools"][0]
    assert pool["padding"] == {"policy": "packed", "alignment": 576, "tail_pad_bytes": 64, "foreign_bytes": 964800}
    assert (pool["payload_bytes"], pool["page_bytes"], pool["page_stride_bytes"]) == (37376, 37440, 1002240)
    assert (pool["waste_bytes"], pool["reserved_pages"], pool["tokens_per_row"]) == (64, 1, 4)
    assert pool["layers"][1] == {"name": "L1", "offset_bytes": 218880}

    def numbers(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [number for part in value.values() for number in numbers(part)]
        if isinstance(value, list):
            return [number for part in value for number in numbers(part)]
        return [value] if isinstance(value, float) else []

    assert numbers(document) == [], "bytes are integers"


def test_the_schema_accepts_what_is_written_and_refuses_what_is_refused() -> None:
    schema = manifest_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    document = json.loads(dump_manifests([v4_manifest()]))
    validator.validate(document)
    for broken in off_schema():
        assert not validator.is_valid(broken), broken
        with pytest.raises(ManifestError):
            validate_document(broken)


def off_schema() -> list[Any]:
    documents = []

    def change(path: str, value: Any) -> None:
        document = json.loads(dump_manifests([v4_manifest()]))
        place: Any = document
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        for part in parents:
            place = place[part]
        if value is ...:
            del place[last]
        else:
            place[last] = value
        documents.append(document)

    change("schema_version", 2)
    change("schema_version", ...)
    change("manifests", {})
    change("extra", 1)
    change("manifests/0/engine", "vllm")
    change("manifests/0/engine", ...)
    change("manifests/0/origin", "guessed")
    change("manifests/0/pools/0/page_rows", "64")
    change("manifests/0/pools/0/page_rows", 64.5)
    change("manifests/0/pools/0/page_rows", None)
    change("manifests/0/pools/0/payload_bytes", ...)
    change("manifests/0/pools/0/page_stride_bytes", ...)
    change("manifests/0/pools/0/padding", ...)
    change("manifests/0/pools/0/padding/policy", "loose")
    change("manifests/0/pools/0/kind", "other")
    change("manifests/0/pools/0/block_size", 64)
    change("manifests/0/pools/0/layers/0/offset_bytes", ...)
    change("manifests/0/pools/0/layers/0/name", 3)
    change("manifests/0/storages/0/storage_bytes", "many")
    change("manifests/0/rank/tensor_parallel_rank", [])
    return [*documents, [], {}, {"schema_version": 1}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "manifest: got text that is not JSON"),
        ("[1", "manifest: got text that is not JSON"),
        ("NaN", "NaN is no JSON number"),
        ('{"schema_version": Infinity}', "Infinity is no JSON number"),
        ("[]", "manifest: got a JSON list, expected an object"),
        ("3", "manifest: got a JSON int, expected an object"),
        ("null", "manifest: got a JSON NoneType, expected an object"),
        ('{"schema_version": 2, "manifests": []}', "schema_version: got 2, expected 1"),
        ('{"schema_version": 1}', "manifests: got .*, expected: Field required"),
        (b"\xff\xfe\x00", "manifest: got text that is not JSON"),
        ("[" * 100000, "manifest: got text that is not JSON"),
    ],
)
def test_input_that_is_no_manifest(text: str | bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_manifests(text)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_input_gives_manifests_or_a_manifest_error(text: str | bytes) -> None:
    try:
        assert parse_manifests(text) == ()
    except ManifestError as error:
        assert str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, st.integers(0, 10**6))
def test_one_value_replaced_by_anything(value: Any, seed: int) -> None:
    document = json.loads(dump_manifests([v4_manifest()]))
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                walk(part[key])

    walk(document)
    part, key = places[seed % len(places)]
    part[key] = value
    try:
        declared = validate_document(document)
    except ManifestError:
        return
    for one in declared:
        faults = [fault for pool in one.pools for fault in violations(pool)]
        try:
            one.to_manifest()
        except LayoutError:
            continue
        assert faults == []


def test_contradictions_are_kept_for_the_audit() -> None:
    document = json.loads(dump_manifests([v4_manifest()]))
    document["manifests"][0]["pools"][0]["page_stride_bytes"] = 37375
    (declared,) = validate_document(document)
    assert isinstance(next(iter(violations(declared.pools[0]))), OverlapError)
    with pytest.raises(OverlapError, match="page_stride_bytes: got 37375, expected at least 37376"):
        declared.to_manifest()


@pytest.mark.parametrize(
    ("field", "value"),
    [("padding.tail_pad_bytes", 0), ("padding.foreign_bytes", 64), ("waste_bytes", 964864)],
)
def test_derived_figures_are_checked(field: str, value: int) -> None:
    document = json.loads(dump_manifests([v4_manifest()]))
    pool = document["manifests"][0]["pools"][0]
    *parent, name = field.split(".")
    (pool[parent[0]] if parent else pool)[name] = value
    (declared,) = validate_document(document)
    with pytest.raises(DerivedFieldError, match=f"derived-mismatch: {field}: got {value}, expected"):
        declared.to_manifest()


def test_derived_figures_may_be_left_out() -> None:
    document = json.loads(dump_manifests([v4_manifest()]))
    for pool in document["manifests"][0]["pools"]:
        del pool["waste_bytes"], pool["padding"]["tail_pad_bytes"], pool["padding"]["foreign_bytes"]
    (declared,) = validate_document(document)
    assert declared.to_manifest() == v4_manifest()


def test_storage_is_counted_once() -> None:
    manifest = v4_manifest()
    assert manifest.total_bytes == 100224000
    open_plan = manifest.model_copy(update={"storages": (Storage(id="slab"),)})
    assert open_plan.total_bytes is None
    assert [pool.pool for pool in manifest.find_pools("c4")] == ["c4"]
    own = LayerPlacement(name="x", offset_bytes=0, storage="own")
    assert [manifest.pools[0].storage_of(layer) for layer in (manifest.pools[0].layers[0], own)] == ["slab", "own"]


def test_pool_and_layout() -> None:
    pool = v4_manifest().pools[0]
    assert type(pool.layout) is PageLayout
    assert pool.layout.fingerprint == pool.fingerprint
