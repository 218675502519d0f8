"""Record formats: widths, regions, planes and the numbers of the sources they were read in."""

from __future__ import annotations

import pytest

from kvbridge.errors import PageRowsError, PlaneError, RecordMissingError, RecordUnknownError
from kvbridge.records import RECORDS, Arrangement, Encoding, ScaleRule, get_record, records_of_width

WIDTHS = {
    "v4": 584,
    "v41": 528,
    "v41_interleaved": 528,
    "v41_fp4": 288,
    "v41_fp4_interleaved": 288,
    "uniform_fp8": 512,
    "v4_bf16": 1024,
    "dsa": 656,
    "mla_bf16": 1152,
    "mla_fp8": 576,
    "mla_fp4": 324,
    "unified_fp8": 640,
    "nvfp4_352": 352,
    "nvfp4_368": 368,
    "nvfp4_384": 384,
    "nvfp4_432": 432,
    "indexer_fp8": 132,
    "indexer_fp4": 68,
}


def test_widths() -> None:
    widths = {name: record.row_bytes for name, record in RECORDS.items()}
    states = {name: width for name, width in widths.items() if name.startswith("state_")}
    assert {name: width for name, width in widths.items() if name not in states} == WIDTHS
    element = {"fp32": 4, "bf16": 2}
    assert states == {name: element[name.split("_")[1]] * int(name.split("_")[2]) for name in states}
    assert {"state_fp32_512", "state_fp32_1024", "state_fp32_2048"} <= set(states)


@pytest.mark.parametrize("name", sorted(RECORDS))
@pytest.mark.parametrize("page_rows", [1, 2, 3, 64])
def test_regions_tile_the_payload(name: str, page_rows: int) -> None:
    record = RECORDS[name]
    for plane in record.planes:
        owners: dict[int, tuple[str, int]] = {}
        for region in record.regions(page_rows, plane or None):
            assert region.rows == page_rows
            for row in range(page_rows):
                first = region.offset + row * region.row_stride
                for byte in range(first, first + region.row_bytes):
                    assert byte not in owners
                    owners[byte] = (region.name, row)
        assert sorted(owners) == list(range(page_rows * record.plane_bytes(plane or None)))


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_elements_are_aligned_in_the_page(name: str) -> None:
    record = RECORDS[name]
    for plane in record.planes:
        for page_rows in (1, 2, 3, 64):
            for region in record.regions(page_rows, plane or None):
                assert region.offset % region.dtype.element_bytes == 0
                assert region.row_stride % region.dtype.element_bytes == 0


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_records_say_what_they_are(name: str) -> None:
    record = RECORDS[name]
    assert record.title
    assert record.source
    names = [field.name for field in record.fields]
    assert len(set(names)) == len(names)
    assert record.d_v <= record.d_qk or not record.d_qk
    if record.decodable and record.d_qk:
        values = sum(field.values for field in record.fields if field.block == "data")
        assert values == record.d_qk
    if record.decodable and record.scale_group:
        scaled = {Encoding.E4M3, Encoding.E2M1}
        groups = (
            sum(f.values for f in record.fields if f.block == "data" and f.encoding in scaled) // record.scale_group
        )
        assert sum(f.values for f in record.fields if f.name == "scales") == groups


def test_v4_page_of_64_rows() -> None:
    regions = {region.name: region for region in get_record("v4").regions(64)}
    assert (regions["nope"].offset, regions["nope"].row_stride, regions["nope"].row_bytes) == (0, 576, 448)
    assert (regions["rope"].offset, regions["rope"].row_bytes) == (448, 128)
    assert (regions["scales"].offset, regions["scales"].row_stride, regions["scales"].row_bytes) == (36864, 8, 7)
    assert regions["unused"].offset == 36864 + 7


def test_split_and_interleaved_hold_the_same_fields() -> None:
    for name in ("v41", "v41_fp4"):
        split, interleaved = get_record(name), get_record(f"{name}_interleaved")
        assert split.fields == interleaved.fields
        assert split.scale_rule is interleaved.scale_rule
        assert (split.arrangement, interleaved.arrangement) == (Arrangement.SPLIT, Arrangement.INTERLEAVED)
    assert get_record("v41").regions(64)[1].offset == 32768
    assert get_record("v41_interleaved").regions(64)[1].row_stride == 528


def test_scale_rules() -> None:
    rules = {name: (record.scale_rule, record.scale_group) for name, record in RECORDS.items()}
    assert rules["v4"] == (ScaleRule.UE8M0, 64)
    assert rules["v41"] == (ScaleRule.UE8M0, 32)
    assert rules["v41_fp4"] == (ScaleRule.E4M3, 16)
    assert rules["dsa"] == (ScaleRule.FP32, 128)
    assert rules["indexer_fp4"] == (ScaleRule.UE8M0, 32)


def test_planes() -> None:
    record = get_record("mla_fp4")
    assert record.planes == ("values", "scales")
    assert (record.plane_bytes("values"), record.plane_bytes("scales")) == (288, 36)
    with pytest.raises(PlaneError, match=r"plane: plane: got None, expected one of \['values', 'scales'\]"):
        record.plane_bytes()
    with pytest.raises(PlaneError, match="plane: got scales, expected no plane"):
        get_record("v4").plane_bytes("scales")


@pytest.mark.parametrize("name", [None, ""])
def test_a_record_is_never_guessed(name: str | None) -> None:
    with pytest.raises(RecordMissingError, match=r"record-missing: record: got None, expected one of \['dsa', "):
        get_record(name)


@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "V4", "auto"])
def test_dtype_names_are_no_records(name: str) -> None:
    """Case 25: one dtype name stands for 512, 576, 584 and 656 bytes."""
    with pytest.raises(RecordUnknownError, match=f"record-unknown: record: got {name}, expected one of"):
        get_record(name)


def test_widths_are_hints_only() -> None:
    assert records_of_width(528) == ("v41", "v41_interleaved")
    assert records_of_width(512) == ("uniform_fp8", "unified_fp8")
    assert records_of_width(513) == ()


@pytest.mark.parametrize("page_rows", [0, -1])
def test_a_page_has_rows(page_rows: int) -> None:
    with pytest.raises(PageRowsError, match=f"page_rows: got {page_rows}, expected at least 1"):
        get_record("v4").regions(page_rows)
