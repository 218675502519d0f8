"""Tensors declared in numbers: public bug cases 1, 2, 8, 20, 21 and 27, and the JSON of a declaration."""

import json

import pytest
import torch

from kvbridge.consumers import Verdict, fits
from kvbridge.errors import ManifestError
from kvbridge.layout import PageLayout
from kvbridge.raw import RawTensor, audit_raw, parse_raw
from kvbridge.rule import Severity

for_rows = PageLayout.for_rows


def declared(shape, stride_bytes, storage_bytes, **fields):
    given = {"offset_bytes": 0, "dtype": "uint8", "record": "v4", "page_rows": 64} | fields
    return audit_raw(RawTensor(storage_bytes=storage_bytes, shape=shape, stride_bytes=stride_bytes, **given))


def errors(audit):
    return [finding.code for finding in audit.findings if finding.severity is Severity.ERROR]


# Case 1: a tight page is right; padding is no part of the contract.


@pytest.mark.parametrize(("storage", "stride"), [(112128, 37376), (112320, 37440), (112320 + 9, 37440)])
def test_case_1_tight_and_padded_pages_are_both_accepted(storage, stride):
    audit = declared((3, 64, 584), (stride, 584, 1), storage)
    assert errors(audit) == []
    assert (audit.geometry.num_pages, audit.geometry.payload_bytes) == (3, 37376)
    assert audit.geometry.page_stride_bytes == stride


@pytest.mark.parametrize(
    ("shape", "stride", "fields", "wanted"),
    [
        ((3, 64, 584), (37375, 584, 1), {}, "stride-overlap"),
        ((3, 64, 584), (37376, 585, 1), {}, "page-not-dense"),
        ((3, 37375), (37376, 1), {}, "record-width"),
        ((112128,), (1,), {}, "rank"),
        ((3, 64, 584), (37376, 584, 1), {"page_rows": 0}, "page-rows"),
        ((3, 64, 584), (37376, 584), {}, "rank"),
        ((3, 64, 584), (37376, -584, 1), {}, "page-not-dense"),
        ((3, -64, 584), (37376, 584, 1), {}, "rank"),
    ],
)
def test_case_1_what_must_still_be_rejected(shape, stride, fields, wanted):
    audit = declared(shape, stride, 10**6, **fields)
    assert wanted in errors(audit) and audit.geometry is None


def test_case_1_a_padded_width_on_a_tight_stride_is_64_bytes_too_many():
    audit = declared((3, 37440), (37376, 1), 112128)
    assert errors(audit) == ["record-width", "storage-overrun"]
    assert "needed 112192, available 112128, excess 64" in audit.findings[-1].message


@pytest.mark.parametrize("rows", [2, 16, 64, 256])
def test_case_1_validity_depends_on_the_consumer(rows):
    tight = for_rows("v4", page_rows=rows, pool="c4", num_pages=3)
    fit = fits(tight, "flashmla-sm100")
    padded = -(-tight.payload_bytes // 576) * 576
    assert (fit.verdict, fit.needs_stride_bytes) == (Verdict.NEEDS_STRIDE, padded)
    assert fits(tight, "kvbridge").verdict is Verdict.IN_PLACE
    if rows == 64:
        assert fit.findings[0].message == (
            "page_stride_bytes: got 37376, expected a multiple of 576, such as 37440 (37376 % 576 = 512)"
        )


# Case 2: a packed layer seen as wide as its slab.


def test_case_2_full_size_from_declared_numbers():
    audit = declared((7166, 64, 584), (1039680, 584, 1), 7450346880, offset_bytes=181440)
    assert errors(audit) == [] and audit.geometry.page_stride_bytes == 1039680
    wide = declared((7166, 1039680), (1039680, 1), 7450346880, offset_bytes=181440)
    assert "storage-overrun" in errors(wide)
    assert "needed 7450528320, available 7450346880, excess 181440" in wide.findings[-1].message


@pytest.mark.parametrize("offset", [0, 576, 181440])
@pytest.mark.parametrize("pages", [1, 3])
def test_case_2_the_excess_of_a_full_width_view_is_the_offset(pages, offset):
    slab = 1039680
    narrow = declared((pages, 64, 584), (slab, 584, 1), pages * slab, offset_bytes=offset)
    assert errors(narrow) == []
    need = offset + (pages - 1) * slab + 37376
    assert errors(declared((pages, 64, 584), (slab, 584, 1), need, offset_bytes=offset)) == []
    assert errors(declared((pages, 64, 584), (slab, 584, 1), need - 1, offset_bytes=offset)) == ["storage-overrun"]
    wide = declared((pages, slab), (slab, 1), pages * slab, offset_bytes=offset)
    overruns = [finding for finding in wide.findings if finding.code == "storage-overrun"]
    assert bool(overruns) == bool(offset)
    assert not offset or f"excess {offset}" in overruns[0].message


# Case 8: only the inside of a page must be dense; a block stride of 0 means tight.


@pytest.mark.parametrize(
    ("stride", "storage", "wanted"),
    [(37440, 74880, []), (0, 74752, []), (0, 74880, ["tight-claim"]), (37376, 74752, [])],
)
def test_case_8_tail_padded_views_are_accepted(stride, storage, wanted):
    audit = declared((2, 64, 584), (stride, 584, 1), storage)
    assert errors(audit) == wanted
    if wanted:
        assert audit.findings[0].message == (
            "stride_bytes[0]: got 0, expected 37440: what the storage says (declared tight: 2 * 37376 = 74752, "
            "storage has 74880)"
        )


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((2, 584, 64), (37440, 1, 584)), ((2, 64, 584), (37440, 1, 64)), ((2, 64, 584), (37440, 584, 2))],
)
def test_case_8_permuted_or_gapped_pages_are_refused(shape, stride):
    assert set(errors(declared(shape, stride, 10**6))) & {"record-width", "page-not-dense"}


# Case 20: V4 read as V4.1, and the reverse.


def test_case_20_tight_v41_declared_v4_is_short():
    audit = declared((2, 33792), (33792, 1), 67584)
    assert errors(audit) == ["stride-overlap", "record-width"]
    assert "528 looks like v41 or v41_interleaved" in audit.findings[-1].message


def test_case_20_packed_v41_declared_v4_is_refused_by_its_width_not_its_stride():
    audit = declared((2, 33792), (149760, 1), 299520)
    assert errors(audit) == ["record-width"]


@pytest.mark.parametrize("record", [None, ""])
def test_case_20_no_record_no_reading(record):
    audit = declared((2, 33792), (33792, 1), 67584, record=record)
    assert errors(audit) == ["record-missing"] and audit.layout is None


@pytest.mark.parametrize("record", ["v41", "v41_interleaved"])
def test_case_20_the_right_record_is_accepted(record):
    assert errors(declared((2, 33792), (33792, 1), 67584, record=record)) == []


# Case 21: 512 where 584 was meant.


@pytest.mark.parametrize(
    ("width", "record", "good"), [(584, "v4", True), (512, "v4", False), (512, "uniform_fp8", True)]
)
def test_case_21_the_swa_cache_alone_is_refused(width, record, good):
    audit = declared((4, 64, 1, width), (64 * width, width, width, 1), 4 * 64 * width, record=record)
    if good:
        assert errors(audit) == []
    else:
        assert "record-width" in errors(audit)
        message = next(finding.message for finding in audit.findings if finding.code == "record-width")
        assert "got 512, expected 584" in message and "looks like uniform_fp8" in message


# Case 27: a layout is not guessed from the rank.


@pytest.mark.parametrize("axes", [None, ("pages", "rows", "row"), ("B", "N", "C")])
@pytest.mark.parametrize(("rows", "record"), [(64, "mla_fp8"), (1, "mla_fp8"), (2, "mla_fp8"), (2, "v4")])
def test_case_27_a_page_of_two_rows_needs_axis_names(rows, record, axes):
    width = {"mla_fp8": 576, "v4": 584}[record]
    shape, stride = (10, rows, width), (rows * width, width, 1)
    audit = declared(shape, stride, 10 * rows * width, record=record, page_rows=rows, axes=axes)
    ambiguous = rows == 2 and axes is None
    assert errors(audit) == (["axes-ambiguous"] if ambiguous else [])
    if ambiguous:
        assert f"shape [10, 2, {width}]: the axis of size 2 may be a K/V split" in audit.findings[0].message


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((10, 1, 64, 576), None),
        ((10, 64, 1, 576), None),
        ((10, 1, 64, 576), ("B", "H", "N", "C")),
        ((10, 64, 1, 576), ("B", "N", "H", "C")),
        ((1, 10, 64, 576), ("H", "B", "N", "C")),
        ((10, 1, 2, 576), ("B", "H", "N", "C")),
    ],
)
def test_case_27_the_head_axis_may_stand_anywhere(shape, axes):
    stride = tuple(torch.empty(shape, device="meta").stride())
    rows = 2 if 2 in shape else 64
    audit = declared(shape, stride, 10 * rows * 576, record="mla_fp8", page_rows=rows, axes=axes)
    assert errors(audit) == [] and audit.geometry.num_pages == 10


@pytest.mark.parametrize(
    "axes",
    [
        ("pages", "rows"),
        ("pages", "kv", "row"),
        ("pages", "pages", "row"),
        ("rows", "heads", "row"),
        ("pages", "rows", "rows"),
    ],
)
def test_case_27_axis_names_must_make_sense(axes):
    assert errors(declared((10, 2, 576), (1152, 576, 1), 11520, record="mla_fp8", page_rows=2, axes=axes)) == [
        "axes-ambiguous"
    ]


def test_case_27_named_axes_in_another_order_are_followed():
    """Rows and pages exchanged in the shape, and in the strides with them."""
    audit = declared((64, 10, 576), (576, 36864, 1), 368640, record="mla_fp8", axes=("N", "B", "C"))
    assert errors(audit) == [] and audit.geometry.num_pages == 10


# The JSON of one declared tensor.


GOOD = {
    "storage_bytes": 37376,
    "offset_bytes": 0,
    "shape": [1, 64, 584],
    "stride_bytes": [37376, 584, 1],
    "dtype": "uint8",
    "record": "v4",
    "page_rows": 64,
}


def test_raw_input_on_schema():
    assert audit_raw(parse_raw(json.dumps(GOOD))).findings == ()


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{}", '{"storage_bytes": 1}', "[" * 100_000])
def test_raw_input_that_is_no_declaration(text):
    with pytest.raises(ManifestError):
        parse_raw(text)


@pytest.mark.parametrize("field", [name for name in GOOD if name != "record"])
@pytest.mark.parametrize("value", [None, "64", 1.5, {"a": 1}, [[1]], True, ...])
def test_raw_input_off_schema_is_refused(field, value):
    given = GOOD | {field: value}
    if value is ...:
        given.pop(field)
    if field == "dtype" and value == "64":
        assert errors(audit_raw(parse_raw(json.dumps(given)))) == ["dtype"]
        return
    with pytest.raises(ManifestError, match=field):
        parse_raw(json.dumps(given))


@pytest.mark.parametrize(
    "extra", [{"x": 1}, {"slots": [[2**63]]}, {"slots": [1]}, {"lengths": [1.0]}, {"kind": "ring"}]
)
def test_raw_input_with_unknown_or_unfit_extras_is_refused(extra):
    with pytest.raises(ManifestError):
        parse_raw(json.dumps(GOOD | extra))


def test_raw_slots_and_lengths_are_checked_against_the_tensors_pages():
    audit = declared(
        (4, 64, 584),
        (37376, 584, 1),
        149504,
        slots=[[3, 255, 256, -1], [0, 0, 0, 0]],
        lengths=[3, -1],
        reserved_pages=1,
    )
    assert [(finding.code, finding.field) for finding in audit.findings] == [
        ("length-negative", "lengths[1]"),
        ("slot-bounds", "slots[0][2]"),
        ("slot-reserved", "slots[0][0]"),
    ]
    ragged = declared((4, 64, 584), (37376, 584, 1), 149504, slots=[[1, 2], [3]])
    assert errors(ragged) == ["slot-shape"]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"num_pages": 3}, "page-count"),
        ({"policy": "exact"}, "page-stride"),
        ({"policy": "aligned", "alignment": 512}, "page-stride"),
        ({"page_bytes": 37500}, "padding-policy"),
        ({"record": "v4x"}, "record-unknown"),
        ({"offset_bytes": -1}, "storage-overrun"),
        ({"dtype": "fp8"}, "dtype"),
        ({"plane": "values"}, "plane"),
        ({"kind": "index_only"}, "kind"),
    ],
)
def test_raw_declarations_that_contradict_themselves(fields, wanted):
    assert wanted in errors(declared((4, 64, 584), (37440, 584, 1), 149760, **fields))


@pytest.mark.parametrize(("policy", "alignment"), [("aligned", 576), ("packed", 576), ("packed", None), (None, 576)])
def test_raw_policies_are_taken_as_declared(policy, alignment):
    audit = declared((4, 64, 584), (37440, 584, 1), 149760, policy=policy, alignment=alignment)
    assert audit.findings == ()
    assert audit.layout.padding.policy == (policy or "aligned")


def test_raw_token_granular_pools():
    audit = declared(
        (640, 1, 576), (576, 576, 1), 368640, record="mla_fp8", kind="token_granular", axes=("slots", "heads", "row")
    )
    assert audit.findings == () and audit.geometry.num_pages == 10
    assert errors(declared((641, 576), (576, 1), 369216, record="mla_fp8", kind="token_granular")) == ["page-count"]
