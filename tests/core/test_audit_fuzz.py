"""Whatever is on schema is explained, never answered with an exception: random manifests and declared tensors."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.audit import audit_declared
from kvbridge.consumers import consumer_names, fit_manifest, fits
from kvbridge.diff import diff_manifests
from kvbridge.documents import parse_manifests, validate_document
from kvbridge.errors import LayoutError, ManifestError
from kvbridge.layout import PaddingPolicy, PoolKind
from kvbridge.raw import audit_raw, validate_raw
from kvbridge.records import RECORDS
from kvbridge.rules import get_rule

CLEAN = json.loads((Path(__file__).parent / "bad_manifests" / "clean--packed.json").read_text())
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([0, 576, 584, 37376, 37440, 93888, 2**31, 2**32, 2**63 - 1, -(2**63), 10**30]),
)
NAMES = st.one_of(st.sampled_from(["", *RECORDS, "kv", "values", "scales", "uint8", "bfloat16"]), st.text(max_size=3))
VALUES = st.one_of(NUMBERS, NAMES, st.none(), st.sampled_from([*PaddingPolicy, *PoolKind]), st.just([]), st.floats())


def places(document, path=()):
    """Every place of a JSON document that holds a value."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield (*path, key)
            yield from places(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield (*path, index)
            yield from places(value, (*path, index))


PLACES = list(places(CLEAN))


def changed(document, changes):
    copy = json.loads(json.dumps(document))
    for path, value in changes:
        holder = copy
        try:
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    return copy


@settings(max_examples=600, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), max_size=4))
def test_manifests(changes):
    try:
        manifests = validate_document(changed(CLEAN, changes))
    except ManifestError as error:
        assert str(error)
        return
    for declared in manifests:
        for finding in audit_declared(declared):
            assert get_rule(finding.code) and json.dumps(finding.document())
        for fit in fit_manifest(declared, consumer_names(), heads=16):
            assert json.dumps(fit.document())
        try:
            manifest = declared.to_manifest()
        except LayoutError as error:
            assert error.field and str(error)
            continue
        assert diff_manifests(manifest, manifest).is_same
        assert json.dumps(diff_manifests(manifest, parse_clean().to_manifest()).document())


def parse_clean():
    return parse_manifests(json.dumps(CLEAN))[0]


RAW = st.fixed_dictionaries(
    {
        "storage_bytes": NUMBERS,
        "offset_bytes": NUMBERS,
        "shape": st.lists(NUMBERS, max_size=5),
        "stride_bytes": st.lists(NUMBERS, max_size=5),
        "dtype": NAMES,
        "page_rows": NUMBERS,
    },
    optional={
        "record": st.none() | NAMES,
        "axes": st.lists(st.sampled_from(["pages", "rows", "row", "heads", "slots", "B", "N", "C", "kv"]), max_size=5),
        "plane": st.none() | NAMES,
        "kind": st.sampled_from([kind.value for kind in PoolKind]),
        "tokens_per_row": NUMBERS,
        "policy": st.sampled_from([policy.value for policy in PaddingPolicy]),
        "alignment": NUMBERS,
        "page_bytes": NUMBERS,
        "num_pages": NUMBERS,
        "reserved_pages": NUMBERS,
        "slots": st.lists(st.lists(NUMBERS, max_size=3), max_size=3),
        "lengths": st.lists(NUMBERS, max_size=3),
    },
)


@settings(max_examples=1500, deadline=None)
@given(RAW)
def test_declared_tensors(declaration):
    try:
        raw = validate_raw(declaration)
    except ManifestError as error:
        assert str(error)
        return
    audit = audit_raw(raw)
    for finding in audit.findings:
        assert get_rule(finding.code) and json.dumps(finding.document())
    assert audit.findings or audit.geometry is not None
    if audit.layout is not None:
        for name in consumer_names():
            assert fits(audit.layout, name, offset_bytes=raw.offset_bytes, pages=raw.num_pages).verdict


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(VALUES | st.booleans(), lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=9)
)
def test_any_json_at_all(value):
    with pytest.raises(ManifestError):
        validate_document(value)
    with pytest.raises(ManifestError):
        validate_raw(value)
