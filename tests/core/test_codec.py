"""kvbridge.codec: exact decoding over every byte, named scale rules, and fields going to their own bytes of a page."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.codec import (
    WriterRule,
    decode_e2m1,
    dequantise,
    encode_e2m1,
    gather_rows,
    pack_pages,
    quantise,
    row_values,
    scatter_rows,
    unpack_pages,
)
from kvbridge.errors import CodecError, LayoutError
from kvbridge.layout import PageLayout
from kvbridge.records import RECORDS, UE8M0_EXACT, ScaleRule
from kvbridge.view import PageView

DECODABLE = [name for name, record in RECORDS.items() if record.decodable]
RULES_AND_ZERO_BYTES = [
    (WriterRule.AMAX_FLOOR, 105),
    (WriterRule.AMAX_FLOOR_RECIPROCAL, 105),
    (WriterRule.SCALE_FLOOR, 114),
    (WriterRule.TINY_FLOOR, 1),
    (WriterRule.NO_FLOOR, 127),
]


def external(name: str) -> float | None:
    return 0.37 if RECORDS[name].scale_rule is ScaleRule.EXTERNAL else None


def e4m3_value(code: int) -> float:
    """The value of one e4m3 code from its bit fields, independent of torch."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def v4_rows(codes: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """One V4 row for each scale byte, with the codes repeated over all tiles and RoPE zero."""
    rows = torch.zeros(len(scale_bytes), 584, dtype=torch.uint8)
    rows[:, :448] = codes.repeat(-(-448 // len(codes)))[:448]
    rows[:, 576:583] = scale_bytes[:, None]
    return rows


@pytest.mark.parametrize("half", [0, 1])
def test_every_e4m3_code_under_every_ue8m0_byte_decodes_exactly(half: int) -> None:
    codes = torch.arange(128 * half, 128 * half + 128, dtype=torch.uint8)
    scale_bytes = torch.arange(256, dtype=torch.uint8)
    got = dequantise(v4_rows(codes, scale_bytes), "v4", dtype=torch.float64)[:, :128]
    bare = torch.tensor([e4m3_value(int(code)) for code in codes], dtype=torch.float64)
    for byte in range(255):
        assert torch.equal(got[byte].nan_to_num(7e7), (bare * 2.0 ** (byte - 127)).nan_to_num(7e7)), byte
    assert got[255].isnan().all()


def test_bf16_is_exact_exactly_over_the_named_range_of_scale_bytes() -> None:
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    rows = v4_rows(codes, torch.arange(255, dtype=torch.uint8))
    wide = dequantise(rows, "v4", dtype=torch.float64)[:, :254]
    narrow = dequantise(rows, "v4", dtype=torch.bfloat16)[:, :254].double()
    exact = {byte for byte in range(255) if torch.equal(wide[byte], narrow[byte])}
    assert set(UE8M0_EXACT) <= exact
    assert 247 not in exact
    small = narrow[:10]
    assert small.isfinite().all()
    assert (small.sign() * wide[:10].sign() >= 0).all()
    assert (small - wide[:10]).abs().max() <= 2.0**-133
    assert (narrow[247:].isinf() | (narrow[247:] == wide[247:])).all()


def test_every_e2m1_code_and_every_e4m3_scale_is_exact_in_bf16() -> None:
    rows = torch.zeros(256, 288, dtype=torch.uint8)
    rows[:, :256] = torch.arange(256, dtype=torch.uint8)
    rows[:, 256:] = torch.arange(256, dtype=torch.uint8)[:, None]
    wide = dequantise(rows, "v41_fp4", dtype=torch.float64)
    assert torch.equal(wide.nan_to_num(7e7), dequantise(rows, "v41_fp4", dtype=torch.bfloat16).double().nan_to_num(7e7))
    # Byte 0x21: even value in the low nibble, code 1 = 0.5, then code 2 = 1.0; scale byte 0x38 is 1.0.
    assert wide[0x38, 2 * 0x21].item() == 0.5
    assert wide[0x38, 2 * 0x21 + 1].item() == 1.0
    assert wide[0x38, 2 * 0xF0 + 1].item() == -6.0


@pytest.mark.parametrize(("rule", "byte"), RULES_AND_ZERO_BYTES)
def test_zero_tile_has_the_byte_of_its_named_rule(rule: WriterRule, byte: int) -> None:
    for name, scales in (("v4", slice(576, 583)), ("v41", slice(512, 528))):
        row = quantise(torch.zeros(512), name, rule=rule)
        assert set(row[scales].tolist()) == {byte}
        assert not row[: scales.start].any()


def test_rules_part_only_below_amax_0_0448() -> None:
    for amax, by_amax, by_scale in ((0.001, 109, 114), (0.027, 113, 114), (0.0440, 114, 114), (3.0, 120, 120)):
        values = torch.full((512,), amax)
        assert int(quantise(values, "v4", rule="amax_floor")[576]) == by_amax
        assert int(quantise(values, "v4", rule="scale_floor")[576]) == by_scale


@pytest.mark.parametrize("exponent", [-12, -3, 0, 5])
def test_scale_is_an_exact_ceiling_at_and_around_powers_of_two(exponent: int) -> None:
    amax = torch.tensor(448.0 * 2.0**exponent)
    above, below = torch.nextafter(amax, torch.tensor(math.inf)), torch.nextafter(amax, torch.tensor(0.0))
    for value, byte in ((below, 127 + exponent), (amax, 127 + exponent), (above, 128 + exponent)):
        row = quantise(value.expand(512), "v4")
        assert row[576].item() == byte
        assert row[0].item() == (0x76 if byte == 128 + exponent else 0x7E)


def test_default_rules_are_those_of_the_engine_that_defined_the_record() -> None:
    assert quantise(torch.zeros(512), "v4")[576] == 105
    assert quantise(torch.zeros(512), "v41")[512] == 114
    assert quantise(torch.zeros(512), "v41_interleaved")[512] == 114


def test_fp4_scale_is_rounded_to_e4m3_and_divides_before_rounding() -> None:
    values = torch.linspace(-6.5, 6.5, 512)
    row = quantise(values, "v41_fp4")
    tiles = values.view(32, 16)
    scales = (tiles.abs().amax(1) / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    assert torch.equal(row[256:], scales.view(torch.uint8))
    assert torch.equal(row[:256], encode_e2m1((tiles / scales.float()[:, None]).flatten()))
    assert quantise(torch.zeros(512), "v41_fp4")[256] == 0x01  # 2**-9, the smallest e4m3


def test_e2m1_rounds_ties_to_even_saturates_and_keeps_the_sign_of_small_values() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 1e9, -0.1, -0.25, -0.26, math.inf, math.nan])
    codes = encode_e2m1(values)
    unpacked = torch.stack([codes & 15, codes >> 4], -1).flatten().tolist()
    assert unpacked == [0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 8, 9, 7, 0]
    assert decode_e2m1(torch.tensor([0x98], dtype=torch.uint8), torch.float32).tolist() == [-0.0, -0.5]


@pytest.mark.parametrize("name", DECODABLE)
def test_decoded_values_survive_another_round_trip(name: str) -> None:
    record = RECORDS[name]
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, row_values(record), generator=generator)
    rows = quantise(values, record, external_scale=external(name), unused_byte=0xFF)
    assert rows.shape == (5, record.row_bytes)
    decoded = dequantise(rows, record, external_scale=external(name))
    bound = 0.0 if "fp32" in name else 2.0**-2 * values.abs().max().item()
    assert (decoded - values).abs().max() <= bound
    again = quantise(decoded, record, external_scale=external(name), unused_byte=0xFF)
    assert torch.equal(dequantise(again, record, external_scale=external(name)), decoded)


@pytest.mark.parametrize("name", DECODABLE)
def test_no_rows_are_no_error(name: str) -> None:
    rows = quantise(torch.zeros(0, row_values(name)), name, external_scale=external(name))
    assert rows.shape == (0, RECORDS[name].row_bytes)
    assert dequantise(rows, name, external_scale=external(name)).shape == (0, row_values(name))


def test_dsa_scale_is_the_plain_quotient_and_power_of_two_on_request() -> None:
    values = torch.randn(2, 576, generator=torch.Generator().manual_seed(1))
    rows = quantise(values, "dsa")
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, values[:, :512].view(2, 4, 128).abs().amax(-1) / 448)
    powers = quantise(values, "dsa", power_of_two=True)[:, 512:528].contiguous().view(torch.int32)
    assert not (powers & 0x7FFFFF).any()
    assert torch.equal(dequantise(rows, "dsa")[:, 512:], values[:, 512:].bfloat16().float())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["v4", "v41", "v41_fp4", "dsa", "indexer_fp8", "indexer_fp4", "uniform_fp8"])
def test_a_value_that_is_not_finite_poisons_its_tile_and_no_other(name: str, bad: float) -> None:
    values = torch.ones(row_values(name))
    values[3] = bad
    decoded = dequantise(quantise(values, name, external_scale=external(name)), name, external_scale=external(name))
    group = RECORDS[name].scale_group or 1
    if name == "uniform_fp8" and math.isinf(bad):
        assert abs(decoded[3].item()) == pytest.approx(448 * 0.37)
    else:
        assert decoded[: max(group, 4)].isnan().any()
    assert torch.isfinite(decoded[max(group, 4) :]).all()


@pytest.mark.parametrize(
    "name", ["v4", "v41", "v41_interleaved", "v41_fp4", "v41_fp4_interleaved", "dsa", "indexer_fp8"]
)
@pytest.mark.parametrize("page_rows", [1, 2, 53, 64])
def test_pages_hold_each_field_in_its_own_region(name: str, page_rows: int) -> None:
    layout = PageLayout.for_rows(
        name, page_rows=page_rows, policy="packed", page_stride_bytes=(page_rows + 1) * 584 * 2
    )
    rows = torch.randint(0, 256, (3, page_rows, RECORDS[name].row_bytes), dtype=torch.uint8)
    slab = pack_pages(rows, layout, fill=0xAB)
    view = PageView.from_tensor(slab[:, : layout.payload_bytes], layout)
    assert torch.equal(unpack_pages(view), rows)
    assert (slab[:, layout.payload_bytes :] == 0xAB).all()
    slot = 2 * page_rows + page_rows - 1
    flat = slab.flatten()
    runs = [flat[offset : offset + length] for offset, length in layout.row_runs(slot)]
    assert torch.equal(torch.cat(runs), rows[2, page_rows - 1])


def test_scatter_writes_only_its_rows() -> None:
    layout = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576)
    slab = torch.full((4, 37440), 0x5A, dtype=torch.uint8)
    view = PageView.from_tensor(slab, layout)
    rows = torch.randint(0, 256, (3, 584), dtype=torch.uint8)
    slots = torch.tensor([5, 64, 255])
    scatter_rows(view, slots, rows)
    assert torch.equal(gather_rows(view, slots.int()), rows)
    touched = torch.zeros(4 * 37440, dtype=torch.bool)
    for slot in slots.tolist():
        for offset, length in layout.row_runs(slot):
            touched[offset : offset + length] = True
    assert (slab.flatten()[~touched] == 0x5A).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100), min_size=64, max_size=64)
)
def test_quantisation_error_is_half_a_code_of_its_tile(values: list[float]) -> None:
    tile = torch.tensor(values)
    full = torch.zeros(512)
    full[:64] = tile
    row = quantise(full, "v4", rule="no_floor")
    scale = 2.0 ** (int(row[576]) - 127)
    decoded = dequantise(row, "v4", dtype=torch.float64)[:64]
    bound = torch.maximum(tile.double().abs() * 2.0**-4, torch.tensor(scale * 2.0**-10, dtype=torch.float64))
    assert ((decoded - tile.double()).abs() <= bound).all()
    assert tile.abs().max() <= 448 * scale


def test_errors_name_field_got_and_expected() -> None:
    cases = [
        (lambda: quantise(torch.zeros(512), "uniform_fp8"), "external_scale: got None, expected a positive number"),
        (lambda: quantise(torch.zeros(512), "v4", external_scale=1.0), "external_scale: got 1.0, expected none"),
        (lambda: quantise(torch.zeros(512), "nvfp4_384"), "record: got nvfp4_384, expected a record with a known"),
        (lambda: quantise(torch.zeros(500), "v4"), "values.shape[-1]: got 500, expected 512"),
        (lambda: dequantise(torch.zeros(528, dtype=torch.uint8), "v4"), "rows.shape[-1]: got 528, expected 584"),
    ]
    for call, text in cases:
        with pytest.raises(LayoutError) as raised:
            call()
        assert text in str(raised.value)
    assert issubclass(CodecError, LayoutError)
