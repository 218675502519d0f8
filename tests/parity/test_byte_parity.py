"""Both engines' writers, kvbridge's view and codec: the same bytes, or a difference that is named, counted, bounded."""

from __future__ import annotations

import pytest
import torch

from kvbridge.codec import dequantise
from tests.parity import byte_parity
from tests.parity.parity_rows import COUNT, make_rows

pytestmark = pytest.mark.timeout(1500)  # the first test waits for every program in SGLang's interpreter

Rows = dict[str, torch.Tensor]


def test_the_rows_hold_every_special_value() -> None:
    rows = make_rows().float()
    assert rows.shape == (COUNT, 512)
    assert bool((rows[0] == 0).all())
    assert bool(torch.signbit(rows[1]).all())
    amax = rows.abs().amax(-1)
    assert float(amax.max()) > 2.9e38  # finite, near the end of bf16
    assert bool(torch.isfinite(rows).all())
    assert 0 < float(amax[amax > 0].min()) < 2.0**-126  # bf16 subnormals
    assert 448.0 in amax.tolist()
    assert {2.0**-13, 1.0, 2.0**20} <= set(amax.tolist())


def test_sglang_and_codec_agree_byte_for_byte(parity_inputs: Rows, sglang_rows: Rows) -> None:
    comparisons = list(byte_parity.sglang_and_codec(parity_inputs, sglang_rows))
    assert [entry.line() for entry in comparisons if entry.unexplained] == []
    exact = {entry.record for entry in comparisons if not any(entry.causes.values())}
    assert exact >= {
        "v4",
        "v41",
        "v41_interleaved",
        "v41_fp4",
        "v41_fp4_interleaved",
        "uniform_fp8",
        "mla_bf16",
        "mla_fp8",
        "indexer_fp8",
    }
    for entry in comparisons:
        assert all(entry.causes.values()), entry.line()  # every named cause does occur in these rows


@pytest.mark.parametrize("written", ["v4.256", "v4.64", "v4.2", "v4-helper.64"])
def test_sglangs_reader_and_the_codec_decode_alike(written: str, sglang_rows: Rows) -> None:
    decoded = dequantise(sglang_rows[written], "v4", dtype=torch.bfloat16)
    assert torch.equal(decoded.view(torch.int16), sglang_rows[f"{written}.decoded"].view(torch.int16))


@pytest.mark.parametrize("record", ["v41", "v41_fp4"])
def test_sglangs_v41_references_and_the_codec_decode_alike(record: str, sglang_rows: Rows) -> None:
    decoded = dequantise(sglang_rows[record], record, dtype=torch.bfloat16)
    assert torch.equal(decoded.view(torch.int16), sglang_rows[f"{record}.decoded"].view(torch.int16))


def test_sglang_writes_the_same_rows_into_pages_of_any_size(sglang_rows: Rows) -> None:
    assert torch.equal(sglang_rows["v4.256"], sglang_rows["v4.64"])
    assert torch.equal(sglang_rows["v4.256"], sglang_rows["v4.2"])


def test_vllm_and_codec_differ_only_by_named_causes(parity_inputs: Rows, vllm_rows: Rows) -> None:
    comparisons = list(byte_parity.vllm_and_codec(parity_inputs, vllm_rows))
    assert len(comparisons) == 3
    for entry in comparisons:
        assert entry.unexplained == 0, entry.line()
        assert entry.rows == COUNT
        assert entry.causes[byte_parity.FLUSH] > 0


def test_sglang_and_vllm_differ_only_by_named_causes(parity_inputs: Rows, sglang_rows: Rows, vllm_rows: Rows) -> None:
    for entry in byte_parity.sglang_and_vllm(parity_inputs, sglang_rows, vllm_rows):
        assert entry.unexplained == 0, entry.line()
        assert all(entry.causes.values()), entry.line()


def test_rope_bytes_and_values_of_both_engines(parity_inputs: Rows, sglang_rows: Rows, vllm_rows: Rows) -> None:
    left, right = sglang_rows["v4.64"], vllm_rows["c4"]
    differ = (left != right)[:, 448:576]
    zero = (parity_inputs["rows"][:, 448:] == 0).repeat_interleave(2, 1)
    assert not bool((differ & ~zero).any())  # RoPE bytes are equal; zeros may lose their sign
    assert not bool((left != right)[:, 583].any())  # and so is the unused byte
    rows = parity_inputs["rows"].double()[:, :448]
    a, b = (dequantise(side, "v4", dtype=torch.float64)[:, :448] for side in (left, right))
    scales = [torch.exp2(side[:, 576:583].double() - 127).repeat_interleave(64, 1) for side in (left, right)]
    same_tile = scales[0] == scales[1]
    flushed = same_tile & (rows.abs() < byte_parity.SMALLEST_NORMAL * scales[1])
    assert torch.equal(a[same_tile & ~flushed], b[same_tile & ~flushed])  # decoded values equal, bit for bit
    assert not bool(b[flushed].any())
    assert bool((a[flushed].abs() <= byte_parity.SMALLEST_NORMAL * scales[1][flushed]).all())
    # Under another floor each side rounds by itself: half a step of three mantissa bits, or half a subnormal step,
    # and vLLM flushes below its smallest normal code.
    other = ~same_tile
    bound = rows.abs() * 2.0**-3 + scales[0] * 2.0**-10 + scales[1] * byte_parity.SMALLEST_NORMAL
    assert bool(((a - b).abs()[other] <= bound[other]).all())
    assert bool((rows[other].abs() < 448e-4).all())
