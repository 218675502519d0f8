"""Errors: stable codes, texts that name field, got and expected, and one test that each class is really raised."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge import PageLayout, PageView, errors
from kvbridge.documents import parse_manifests, validate_document
from kvbridge.errors import KVBridgeError, LayoutError
from kvbridge.geometry import TensorShape, check_geometry
from kvbridge.layout import Padding
from kvbridge.manifest import dump_manifests
from kvbridge.records import get_record
from kvbridge.repack import plan_pages
from kvbridge.spans import Placement

CODES = {
    "record-missing": "RecordMissingError",
    "record-unknown": "RecordUnknownError",
    "record-width": "RecordWidthError",
    "record-mismatch": "RecordMismatchError",
    "plane": "PlaneError",
    "page-rows": "PageRowsError",
    "page-split": "PageSplitError",
    "tokens-per-row": "TokensPerRowError",
    "payload": "PayloadError",
    "stride-overlap": "OverlapError",
    "page-stride": "PageStrideError",
    "padding-policy": "PaddingError",
    "page-not-dense": "DensityError",
    "storage-overrun": "StorageOverrunError",
    "base-alignment": "AlignmentError",
    "dtype": "DtypeError",
    "rank": "RankError",
    "axes-ambiguous": "AxesError",
    "page-count": "PageCountError",
    "kind": "KindError",
    "derived-mismatch": "DerivedFieldError",
    "view-stale": "StaleViewError",
    "slot-bounds": "SlotError",
    "span": "SpanError",
}


def classes(base: type[LayoutError] = LayoutError) -> Iterator[type[LayoutError]]:
    for error in base.__subclasses__():
        yield error
        yield from classes(error)


def core_classes() -> list[type[LayoutError]]:
    return [error for error in classes() if error.__module__ == "kvbridge.errors"]


def test_codes_are_stable() -> None:
    assert CODES.items() <= {error.code: error.__name__ for error in core_classes()}.items()
    assert len({error.code for error in core_classes()}) == len(core_classes())


@pytest.mark.parametrize("error", core_classes(), ids=lambda error: error.code)
def test_texts(error: type[LayoutError]) -> None:
    one = error("page_rows", got=0, expected="at least 1")
    assert str(one) == f"{error.code}: page_rows: got 0, expected at least 1; {error.consequence}"
    assert (
        str(error("a", got=1, expected=2, detail="why"))
        == f"{error.code}: a: got 1, expected 2 (why); {error.consequence}"
    )
    assert (one.field, one.got, one.expected, one.detail) == ("page_rows", 0, "at least 1", "")
    assert "consequence" in error.__dict__, "each class says what breaks otherwise"
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", error.code)
    assert error.__doc__
    assert not issubclass(error, ValueError), "pydantic wraps that family"


def test_family() -> None:
    assert issubclass(LayoutError, KVBridgeError)
    assert issubclass(errors.ManifestError, KVBridgeError)
    assert not issubclass(errors.ManifestError, LayoutError)


def _view() -> PageView:
    return PageView.from_tensor(torch.zeros(2, 4, 584, dtype=torch.uint8), PageLayout.for_rows("v4", page_rows=4))


def _stale() -> None:
    view = _view()
    view.pages.untyped_storage().resize_(0)
    view.require_live()


def _layout(**change: Any) -> PageLayout:
    fields: dict[str, Any] = {
        "record": "v4",
        "page_rows": 4,
        "payload_bytes": 2336,
        "page_stride_bytes": 2336,
        "padding": Padding(policy="exact"),
    }
    return PageLayout(**{**fields, **change})


def _tensor(shape: tuple[int, ...], stride: tuple[int, ...], **change: Any) -> None:
    fields: dict[str, Any] = {"offset_bytes": 0, "storage_bytes": 1 << 20, "dtype": "uint8"}
    check_geometry(TensorShape(shape, stride, **{**fields, **change}), _layout())


def _derived() -> None:
    pool = {"pool": "swa", "record": "v4", "page_rows": 4, "payload_bytes": 2336, "page_stride_bytes": 2336}
    engine = {"name": "e", "version": "1"}
    manifest = {
        "engine": engine,
        "origin": "planned",
        "pools": [{**pool, "padding": {"policy": "exact"}, "waste_bytes": 7}],
    }
    (declared,) = validate_document({"schema_version": 1, "manifests": [manifest]})
    declared.to_manifest()


def _place(record: str = "v4", **fields: Any) -> Placement:
    return Placement.from_layout(PageLayout.for_rows(record, page_rows=4, **fields), num_pages=2)


# What raises each class, and the start of what it says.
RAISED: list[tuple[Callable[[], Any], str]] = [
    (lambda: get_record(None), "record-missing: record: got None, expected one of ['dsa'"),
    (lambda: get_record("fp8"), "record-unknown: record: got fp8, expected one of ['dsa'"),
    (
        lambda: _tensor((2, 4, 528), (2336, 528, 1)),
        "record-width: row bytes: got 528, expected 584 (record v4; 528 looks",
    ),
    (
        lambda: plan_pages(_place(), _place("dsa")),
        "record-mismatch: record: got dsa, expected the fields and scales of v4 (rows of 656 and 584 bytes)",
    ),
    (lambda: _layout(plane="x"), "plane: plane: got x, expected no plane (record v4)"),
    (lambda: _layout(page_rows=0), "page-rows: page_rows: got 0, expected at least 1"),
    (
        lambda: _tensor((2, 8, 584), (4672, 584, 1)),
        "page-split: tensor rows in a page: got 8, expected 4 (a split page",
    ),
    (lambda: _layout(tokens_per_row=0), "tokens-per-row: tokens_per_row: got 0, expected at least 1"),
    (lambda: _layout(payload_bytes=2337), "payload: payload_bytes: got 2337, expected 2336 (4 rows of 584 bytes"),
    (
        lambda: _tensor((2, 2336), (2335, 1)),
        "stride-overlap: tensor.stride(0): got 2335, expected at least 2336 (payload",
    ),
    (lambda: _tensor((2, 2336), (2340, 1)), "page-stride: tensor.stride(0): got 2340, expected 2336"),
    (lambda: _layout(page_bytes=2400), "padding-policy: page_bytes: got 2400, expected 2336 (policy exact"),
    (lambda: _tensor((2, 4, 584), (2400, 590, 1)), "page-not-dense: tensor stride between rows: got 590, expected 584"),
    (
        lambda: _tensor((2, 2336), (2336, 1), storage_bytes=4671),
        "storage-overrun: storage_bytes: got 4671, expected at least 4672 (needed 4672, available 4671, excess 1)",
    ),
    (
        lambda: _tensor((2, 2336), (2336, 1), address=0x7F01),
        "base-alignment: base address: got 0x7f01 (mod 2 = 1), expected a multiple of 2 (widest element of record v4)",
    ),
    (
        lambda: _tensor((2, 2336), (2336, 1), dtype="int64"),
        "dtype: tensor.dtype: got int64, expected one of ['bfloat16'",
    ),
    (lambda: _tensor((4672,), (1,)), "rank: tensor.shape: got [4672], expected 2, 3 or 4 dimensions"),
    (lambda: _layout(num_pages=-1), "page-count: num_pages: got -1, expected at least 0"),
    (lambda: _layout(kind="index_only"), "kind: payload_bytes: got 2336, expected 0 (kind index_only owns no bytes)"),
    (_derived, "derived-mismatch: waste_bytes: got 7, expected 0"),
    (_stale, "view-stale: storage: got freed (0 bytes at 0x0), expected 4672 bytes at 0x"),
    (lambda: _view().row_addresses(8), "slot-bounds: slot: got 8, expected 0 <= slot < 8"),
    (lambda: _place().check([(0, 4673)]), "span: plan: got [0, 4673), expected inside page 0, [0, 2336)"),
]


@pytest.mark.parametrize(("raiser", "text"), RAISED, ids=[text.partition(":")[0] for _, text in RAISED])
def test_each_class_is_raised_with_its_numbers(raiser: Callable[[], Any], text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        raiser()
    assert str(caught.value).startswith(text)
    assert caught.value.code == text.partition(":")[0]


def test_no_class_is_left_out() -> None:
    """Axes are judged where axis names are read: `kvbridge.raw` and its tests."""
    assert {text.partition(":")[0] for _, text in RAISED} | {"axes-ambiguous"} >= CODES.keys()
    home = Path(errors.__file__).parent
    sources = [*home.glob("*.py"), *(home / "engines").rglob("*.py")]
    raised = "".join(path.read_text(encoding="utf-8") for path in sources)
    for error in core_classes():
        assert f"{error.__name__}(" in raised.replace(f"class {error.__name__}(", ""), (
            f"{error.__name__} is never raised"
        )


def test_errors_travel_between_processes() -> None:
    """Workers of an engine report them."""
    error = errors.StorageOverrunError("storage_bytes", got=1, expected="at least 2", detail="excess 1")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), type(again)) == (str(error), type(error))


def test_manifest_errors_are_texts() -> None:
    with pytest.raises(
        errors.ManifestError, match=r"manifest: got text that is not JSON \(.*\), expected a JSON object"
    ):
        parse_manifests("{")
    assert parse_manifests(dump_manifests([])) == ()
