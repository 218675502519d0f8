"""PageLayout: what is consistent, what is refused and how the refusal reads, fingerprints, row and span arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvbridge.errors import (
    AlignmentError,
    DtypeError,
    KindError,
    LayoutError,
    OverlapError,
    PaddingError,
    PageCountError,
    PageRowsError,
    PageStrideError,
    PayloadError,
    PlaneError,
    RecordMissingError,
    RecordUnknownError,
    SlotError,
    TokensPerRowError,
)
from kvbridge.layout import DeclaredLayout, Padding, PaddingPolicy, PageLayout, PoolKind, violations

V4_64: dict[str, Any] = {
    "record": "v4",
    "page_rows": 64,
    "payload_bytes": 37376,
    "page_stride_bytes": 37440,
    "padding": {"policy": "aligned", "alignment": 576},
}

# (record, page rows, alignment) -> payload, page: the sizes of both engines' pools.
PAGES = [
    ("v4", 256, 576, 149504, 149760),
    ("v4", 64, 576, 37376, 37440),
    ("v4", 2, 576, 1168, 1728),
    ("v4", 16, 576, 9344, 9792),
    ("v4", 1, 576, 584, 1152),
    ("v4", 32, 576, 18688, 19008),
    ("v4", 128, 576, 74752, 74880),
    ("v4", 64, 512, 37376, 37376),
    ("v41", 64, 512, 33792, 33792),
    ("v41_interleaved", 64, 528, 33792, 33792),
    ("v41_interleaved", 128, 512, 67584, 67584),
    ("v41_fp4", 64, 256, 18432, 18432),
    ("v41_fp4_interleaved", 128, 288, 36864, 36864),
    ("dsa", 64, 656, 41984, 41984),
    ("indexer_fp8", 64, 576, 8448, 8640),
    ("indexer_fp4", 64, 576, 4352, 4608),
    ("state_fp32_2048", 4, 576, 32768, 32832),
    ("state_fp32_512", 4, 576, 8192, 8640),
    ("nvfp4_352", 64, 352, 22528, 22528),
    ("uniform_fp8", 64, 512, 32768, 32768),
]


@pytest.mark.parametrize(("record", "page_rows", "alignment", "payload", "page"), PAGES)
def test_known_pages(record: str, page_rows: int, alignment: int, payload: int, page: int) -> None:
    layout = PageLayout.for_rows(record, page_rows=page_rows, policy="aligned", alignment=alignment)
    assert (layout.payload_bytes, layout.page_bytes, layout.page_stride_bytes) == (payload, page, page)
    assert layout.tail_pad_bytes == layout.waste_bytes == page - payload
    assert layout.foreign_bytes == 0


def test_one_payload_three_policies() -> None:
    exact = PageLayout.for_rows("v4", page_rows=64)
    aligned = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=512)
    packed = PageLayout.for_rows("v4", page_rows=64, policy="packed", page_stride_bytes=37376)
    assert exact.page_stride_bytes == aligned.page_stride_bytes == packed.page_stride_bytes == 37376
    assert len({exact.fingerprint, aligned.fingerprint, packed.fingerprint}) == 3


def test_a_stride_does_not_tell_the_rows() -> None:
    """149,760 is one padded page of 256 rows, and four packed pages of 64."""
    one = PageLayout.for_rows("v4", page_rows=256, policy="aligned", alignment=576)
    four = PageLayout.for_rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=149760)
    assert one.page_stride_bytes == four.page_stride_bytes
    assert (one.foreign_bytes, four.foreign_bytes) == (0, 112320)
    assert (one.tail_pad_bytes, four.tail_pad_bytes) == (256, 64)


def test_tail_pad_and_foreign_bytes_are_kept_apart() -> None:
    layout = PageLayout.for_rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=1002240)
    assert (layout.tail_pad_bytes, layout.foreign_bytes, layout.waste_bytes) == (64, 964800, 64)
    bare = PageLayout.for_rows("v4", page_rows=64, policy="packed", page_stride_bytes=1002240)
    assert (bare.tail_pad_bytes, bare.foreign_bytes) == (0, 964864)


WRONG: list[tuple[dict[str, Any], type[LayoutError], str]] = [
    ({"record": None}, RecordMissingError, "record: got None, expected one of"),
    ({"record": "fp8_ds_mla"}, RecordUnknownError, "record: got fp8_ds_mla, expected one of"),
    ({"plane": "values"}, PlaneError, "plane: got values, expected no plane"),
    ({"page_rows": 0}, PageRowsError, "page_rows: got 0, expected at least 1"),
    ({"page_rows": -64}, PageRowsError, "page_rows: got -64, expected at least 1"),
    ({"tokens_per_row": 0}, TokensPerRowError, "tokens_per_row: got 0, expected at least 1"),
    ({"payload_bytes": 37440}, PayloadError, r"payload_bytes: got 37440, expected 37376 \(64 rows of 584 bytes"),
    ({"page_rows": 65}, PayloadError, "payload_bytes: got 37376, expected 37960"),
    ({"page_stride_bytes": 37375}, OverlapError, r"page_stride_bytes: got 37375, expected at least 37376 \(payload"),
    ({"page_stride_bytes": 37376}, PageStrideError, "page_stride_bytes: got 37376, expected 37440"),
    ({"page_stride_bytes": 37568}, PageStrideError, "page_stride_bytes: got 37568, expected 37440"),
    ({"page_bytes": 37376}, PaddingError, "page_bytes: got 37376, expected 37440"),
    ({"padding": {"policy": "aligned"}}, PaddingError, "padding.alignment: got None, expected a byte count"),
    ({"padding": {"policy": "aligned", "alignment": 0}}, PaddingError, "padding.alignment: got 0, expected at least 1"),
    ({"padding": {"policy": "aligned", "alignment": -576}}, PaddingError, "padding.alignment: got -576"),
    ({"padding": {"policy": "exact"}}, PageStrideError, "page_stride_bytes: got 37440, expected 37376"),
    ({"padding": {"policy": "exact", "alignment": 576}}, PaddingError, "got 576, expected a divisor of payload_bytes"),
    ({"num_pages": -1}, PageCountError, "num_pages: got -1, expected at least 0"),
    ({"num_pages": 4, "reserved_pages": 5}, PageCountError, r"reserved_pages: got 5, expected 0 .. 4 \(num_pages\)"),
    ({"num_pages": 0, "reserved_pages": 1}, PageCountError, r"reserved_pages: got 1, expected 0 .. 0 \(num_pages\)"),
    ({"reserved_pages": -1}, PageCountError, "reserved_pages: got -1"),
    ({"dtype": "float16"}, DtypeError, "dtype: got float16, expected one of"),
    ({"dtype": "bfloat16"}, DtypeError, "dtype: got bfloat16, expected a one-byte dtype"),
    ({"kind": "index_only"}, KindError, "payload_bytes: got 37376, expected 0"),
    ({"kind": "token_granular"}, PageStrideError, "page_stride_bytes: got 37440, expected 37376"),
    (
        {"padding": {"policy": "packed", "alignment": 576}, "page_stride_bytes": 37400},
        OverlapError,
        r"page_stride_bytes: got 37400, expected at least 37440 \(page_bytes\)",
    ),
    (
        {"padding": {"policy": "packed"}, "page_stride_bytes": 99999},
        AlignmentError,
        "page_stride_bytes: got 99999, expected a multiple of 2",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_contradictions(change: dict[str, Any], error: type[LayoutError], message: str) -> None:
    fields = {**V4_64, **change}
    declared = DeclaredLayout(**fields)
    faults = list(violations(declared))
    assert type(faults[0]) is error
    with pytest.raises(error, match=message) as caught:
        PageLayout(**{**fields, "record": fields["record"] or ""})
    assert str(caught.value).startswith(f"{error.code}: ")
    assert caught.value.consequence in str(caught.value)


def test_every_contradiction_is_reported() -> None:
    declared = DeclaredLayout(
        record="v4",
        page_rows=64,
        tokens_per_row=0,
        payload_bytes=37440,
        page_stride_bytes=37375,
        padding=Padding(policy="aligned", alignment=576),
        num_pages=-3,
        dtype="float16",
    )
    assert [fault.code for fault in violations(declared)] == [
        "tokens-per-row",
        "page-count",
        "payload",
        "stride-overlap",
        "dtype",
    ]


@pytest.mark.parametrize("value", [64.0, "64", True, None])
def test_counts_are_integers(value: object) -> None:
    with pytest.raises(ValidationError):
        PageLayout(**{**V4_64, "page_rows": value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_pages", 3.0, r"PageLayout.num_pages: got 3.0, expected an integer"),
        ("reserved_pages", True, r"PageLayout.reserved_pages: got True, expected an integer"),
        ("block_size", 64, r"PageLayout.block_size: got an unknown field, expected one of \['dtype', "),
    ],
)
def test_fields_of_the_short_form(field: str, value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        PageLayout.for_rows("v4", page_rows=64, **{field: value})


def test_kinds_and_policies_may_be_texts() -> None:
    layout = PageLayout.for_rows("dsa", page_rows=64, policy="exact", kind="token_granular")
    assert (layout.kind, layout.padding.policy) == (PoolKind.TOKEN_GRANULAR, PaddingPolicy.EXACT)
    assert isinstance(layout.kind, PoolKind)
    with pytest.raises(ValueError, match="'slots' is not a valid PoolKind"):
        PageLayout.for_rows("dsa", page_rows=64, kind="slots")
    with pytest.raises(TypeError, match=r"PageLayout.kind: got 'paged', expected a PoolKind"):
        PageLayout.built(**{**dict(layout), "kind": "paged"})


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="block_size"):
        PageLayout(**V4_64, block_size=64)


def test_layouts_are_frozen() -> None:
    layout = PageLayout(**V4_64)
    with pytest.raises(ValidationError, match="frozen"):
        layout.page_rows = 65


def test_packed_needs_a_stride() -> None:
    with pytest.raises(PageStrideError, match="got None, expected the slab's stride"):
        PageLayout.for_rows("v4", page_rows=64, policy="packed")


def test_fingerprint() -> None:
    """Names and counts do not matter; anything that moves a byte, or changes its meaning, does."""
    layout = PageLayout(**V4_64)
    same = PageLayout(**V4_64, pool="swa", num_pages=7, reserved_pages=1)
    assert layout.fingerprint == same.fingerprint
    assert len(layout.fingerprint) == 16
    others = [
        PageLayout.for_rows("v4", page_rows=64),
        PageLayout.for_rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=37440),
        PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=32, page_stride_bytes=None),
        PageLayout(**V4_64, tokens_per_row=4),
        PageLayout(**V4_64, dtype="int8"),
        PageLayout.for_rows("v41", page_rows=64),
        PageLayout.for_rows("v41_interleaved", page_rows=64),
    ]
    prints = [layout.fingerprint, *(other.fingerprint for other in others)]
    assert len(set(prints)) == len(prints)


def test_fingerprint_is_stable() -> None:
    """Caches and handshakes keep it: a change here is a change of the format."""
    assert PageLayout(**V4_64).fingerprint == "d5faac639bff7771"


def test_counts() -> None:
    layout = PageLayout(**V4_64, tokens_per_row=4, num_pages=10)
    assert (layout.capacity_rows, layout.page_tokens) == (640, 256)
    assert layout.span_bytes() == 9 * 37440 + 37376
    assert (layout.span_bytes(0), layout.span_bytes(1)) == (0, 37376)
    assert PageLayout(**V4_64).capacity_rows is None
    with pytest.raises(PageCountError, match="num_pages: got None, expected a page count"):
        PageLayout(**V4_64).span_bytes()


def test_row_runs() -> None:
    layout = PageLayout(**V4_64, num_pages=10)
    assert layout.row_runs(0) == ((0, 576), (36864, 8))
    assert layout.row_runs(64 + 1) == ((37440 + 576, 576), (37440 + 36864 + 8, 8))
    assert PageLayout.for_rows("v41_interleaved", page_rows=64).row_runs(65) == ((33792 + 528, 528),)
    assert PageLayout.for_rows("v4", page_rows=1).row_runs(3) == ((3 * 584, 584),)
    with pytest.raises(SlotError, match="slot-bounds: slot: got 640, expected 0 <= slot < 640"):
        layout.row_runs(640)
    with pytest.raises(SlotError, match="got -1"):
        layout.row_runs(-1)


def test_numbers_beyond_64_bits() -> None:
    layout = PageLayout.for_rows(
        "v4", page_rows=64, policy="packed", page_stride_bytes=1 << 40, num_pages=1 << 50, reserved_pages=1
    )
    assert layout.span_bytes() == ((1 << 50) - 1) * (1 << 40) + 37376
    assert layout.row_runs((1 << 50) * 64 - 1)[0][0] == ((1 << 50) - 1) * (1 << 40) + 63 * 576


def test_an_index_only_pool_has_no_bytes() -> None:
    layout = PageLayout(
        kind="index_only", page_rows=64, payload_bytes=0, page_stride_bytes=0, padding=Padding(policy="exact")
    )
    assert layout.regions == ()
    assert layout.span_bytes(100) == 0
