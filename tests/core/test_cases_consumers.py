"""Public bug cases about consumers and dtypes (3, 17, 19, 25, 39, 43): the right answer, and the kind around it.

Cases 1, 2, 8, 20, 21 and 27 are in test_raw.py, 29, 2 and 6 on placement in test_audit.py, 30, 31, 33 and 35 in
test_slots.py, 36 in test_dead_rows.py, 44 in test_diff.py, 11, 12 and 26 in test_peers.py.
"""

from dataclasses import replace

import pytest
import torch

from kvbridge.consumers import CONSUMERS, Consumer, Verdict, fits, get_consumer
from kvbridge.contract import Accepts, IndexUnit, Offsets, StrideUse
from kvbridge.dtype_names import resolve_record
from kvbridge.errors import RecordMissingError, RecordUnknownError
from kvbridge.layout import PageLayout
from kvbridge.models import Family
from kvbridge.rule import Severity
from kvbridge.view import PageView

for_rows = PageLayout.for_rows


# Case 3: a reader that ignores the page stride.


@pytest.mark.parametrize(
    ("stride", "unit", "verdict"),
    [
        (2048, None, Verdict.IN_PLACE),
        (8192, None, Verdict.SILENT_MISREAD),
        (8192, IndexUnit.SLOT, Verdict.SILENT_MISREAD),
        (8192, IndexUnit.STORAGE_ROW, Verdict.IN_PLACE),
        (8200, None, Verdict.SILENT_MISREAD),
        (8200, IndexUnit.STORAGE_ROW, Verdict.SILENT_MISREAD),
        (2560, IndexUnit.STORAGE_ROW, Verdict.IN_PLACE),
    ],
)
def test_case_3_flat_token_readers(stride, unit, verdict):
    policy = "exact" if stride == 2048 else "packed"
    layout = for_rows("uniform_fp8", page_rows=4, pool="c4", policy=policy, page_stride_bytes=stride, num_pages=3)
    fit = fits(layout, "flashinfer-0.6.13-sm100", index_unit=unit)
    assert fit.verdict is verdict
    if stride == 8192 and unit is not IndexUnit.STORAGE_ROW:
        assert "page stride 8192 != 4*512, span 16 rows" in fit.findings[0].message


@pytest.mark.parametrize("unit", [None, IndexUnit.SLOT, IndexUnit.STORAGE_ROW])
def test_case_3_the_unit_of_slots_must_be_stated_on_a_strided_pool(unit):
    strided = for_rows("uniform_fp8", page_rows=4, pool="c4", policy="packed", page_stride_bytes=8192)
    fit = fits(strided, "flashinfer-sm100", index_unit=unit)
    assert fit.verdict is (Verdict.UNSUPPORTED if unit is None else Verdict.IN_PLACE)
    assert fits(for_rows("uniform_fp8", page_rows=4, pool="c4"), "flashinfer-sm100").verdict is Verdict.IN_PLACE


# Case 17: offsets of 32 bits.

XPU = Consumer(
    name="int32-bytes",
    title="byte offsets in 32 bits",
    accepts=(Accepts(record="v4"),),
    offsets=Offsets(bits=32),
    engine="vllm-xpu-kernels",
    versions="pull 445",
    source="vllm-xpu-kernels pull 445",
)


@pytest.mark.parametrize(("pages", "fitting"), [(7166, False), (2067, False), (2066, True), (1, True)])
def test_case_17_the_first_bad_block_by_the_last_byte(pages, fitting):
    slab = for_rows("v4", page_rows=64, pool="c4", policy="packed", page_stride_bytes=1039680, num_pages=pages)
    fit = fits(slab, XPU)
    assert fit.verdict is (Verdict.IN_PLACE if fitting else Verdict.UNSUPPORTED)
    if not fitting:
        assert "first bad block 2066: 2147978880 + 37376 - 1" in fit.findings[0].message
        assert fit.findings[0].expected == "at most 2066"
    assert fits(slab, replace(XPU, offsets=Offsets(bits=64))).verdict is Verdict.IN_PLACE


@pytest.mark.parametrize("pages", [2049, 2048])
def test_case_17_a_page_whose_start_fits_and_whose_last_byte_does_not(pages):
    """2,048 * 1,048,560 = 2,147,450,880 fits in 31 bits; 37,376 bytes on it does not."""
    slab = for_rows("v4", page_rows=64, pool="c4", policy="packed", page_stride_bytes=1_048_560, num_pages=pages)
    assert 2048 * 1_048_560 < 2**31 < 2048 * 1_048_560 + 37376
    assert fits(slab, XPU).verdict is (Verdict.UNSUPPORTED if pages == 2049 else Verdict.IN_PLACE)


def test_case_17_unsigned_offsets_and_offsets_from_the_storage():
    slab = for_rows("v4", page_rows=64, pool="c4", policy="packed", page_stride_bytes=1039680, num_pages=2066)
    unsigned = replace(XPU, offsets=Offsets(bits=32, signed=False))
    assert fits(slab, unsigned, pages=4132).verdict is Verdict.IN_PLACE
    assert fits(slab, unsigned, pages=4133).verdict is Verdict.UNSUPPORTED
    from_storage = replace(XPU, offsets=Offsets(bits=32, from_storage=True))
    assert fits(slab, from_storage, offset_bytes=181440).verdict is Verdict.IN_PLACE
    assert fits(slab, from_storage, offset_bytes=576 * 1000).verdict is Verdict.UNSUPPORTED
    assert fits(slab, XPU, offset_bytes=576 * 1000).verdict is Verdict.IN_PLACE


def test_case_17_token_strides_of_576_end_at_slot_3728270():
    """Rows of 576 bytes: slot 3,728,270 starts in reach and ends beyond it."""
    rows = replace(XPU, accepts=(Accepts(record="mla_fp8"),))
    layout = for_rows("mla_fp8", page_rows=1, pool="mla")
    fit = fits(layout, rows, pages=4_000_000)
    assert fit.findings[0].expected == "at most 3728270"


# Case 19: a flat reader of split pages.


@pytest.mark.parametrize(
    ("record", "row_bytes", "data"),
    [("indexer_fp8", 132, 128), ("indexer_fp4", 68, 64), ("v4", 584, 576), ("v41", 528, 512)],
)
def test_case_19_flat_readers_of_split_pages_are_refused(record, row_bytes, data):
    flat = Consumer(
        name="flat",
        title="reads row r at r * row bytes",
        accepts=(Accepts(record=record),),
        stride=StrideUse.IGNORED,
        flat_rows=True,
        engine="e",
        versions="1",
        source="s",
    )
    fit = fits(for_rows(record, page_rows=64, pool="indexer"), flat)
    assert fit.verdict is Verdict.SILENT_MISREAD
    (found,) = fit.findings
    assert (found.code, found.got, found.expected) == ("consumer-row-address", row_bytes, data)
    assert f"scales at byte {64 * data + row_bytes - data}" in found.message
    assert fits(for_rows(record, page_rows=1, pool="indexer"), flat).verdict is Verdict.IN_PLACE


def test_case_19_equal_total_bytes_are_no_agreement():
    """Token 1 of the case: split reads 0.515873, interleaved bytes 60..63 of it: finite, plausible, wrong."""
    split = for_rows("indexer_fp8", page_rows=64)
    page = torch.empty(1, 8448, dtype=torch.uint8)
    view = PageView.from_tensor(page, split)
    view.data.copy_((torch.arange(64 * 128) % 200).to(torch.uint8).reshape(1, 64, 128))
    view.scales.copy_(torch.linspace(0.5, 1.5, 64).view(torch.uint8).reshape(1, 64, 4))
    right = view.scales[0, 1].view(torch.float32).item()
    flat = page.view(64, 132)[1, 128:].contiguous().view(torch.float32).item()
    assert right == pytest.approx(0.515873, abs=1e-6)
    assert flat != pytest.approx(right, abs=1e-3)
    assert page.numel() == split.payload_bytes == 64 * 132


# Case 25: a dtype name is no record.


@pytest.mark.parametrize(
    ("dtype", "family", "backend", "record"),
    [
        ("fp8", Family.DSA, "dense", "mla_fp8"),
        ("fp8", Family.DSA, "sparse", "dsa"),
        ("fp8", Family.V4, "trtllm", "uniform_fp8"),
        ("fp8", Family.V4, "flashmla", "v4"),
        ("fp8_ds_mla", Family.V4, None, "v4"),
        ("fp8_ds_mla", Family.V41, "sm100", "v41_interleaved"),
        ("fp8_ds_mla", Family.V41, "sm90", "v4"),
        ("fp8_ds_mla", Family.DSA, None, "dsa"),
        ("bfloat16", Family.MLA, None, "mla_bf16"),
        ("float8_e4m3fn", Family.MLA, None, "mla_fp8"),
        ("bf16", "deepseek_v4", None, "v4_bf16"),
    ],
)
def test_case_25_model_dtype_and_backend_name_the_record(dtype, family, backend, record):
    assert resolve_record(dtype, family=family, backend=backend) == record


@pytest.mark.parametrize(
    ("dtype", "family", "listed"),
    [
        ("fp8", None, ["uniform_fp8", "v4", "dsa", "mla_fp8"]),
        ("fp8", Family.DSA, ["dsa", "mla_fp8"]),
        ("fp8", Family.V4, ["uniform_fp8", "v4"]),
        ("fp8_ds_mla", None, ["v4", "v41", "dsa"]),
        ("fp8_ds_mla", Family.V41, ["v41_interleaved", "v4"]),
    ],
)
def test_case_25_a_bare_name_is_ambiguous_and_the_readings_are_listed(dtype, family, listed):
    with pytest.raises(RecordMissingError) as raised:
        resolve_record(dtype, family=family)
    assert all(f"{record} (" in str(raised.value) for record in listed)


@pytest.mark.parametrize(("dtype", "family"), [("int4", None), ("nvfp4_ds_mla", Family.MLA), ("fp8_ds_mla", "llama")])
def test_case_25_unknown_combinations_are_refused(dtype, family):
    with pytest.raises(RecordUnknownError, match="expected"):
        resolve_record(dtype, family=family)


# Case 39: head counts.


@pytest.mark.parametrize(
    ("name", "heads", "padded"),
    [
        ("flashmla-sm100", 12, 64),
        ("flashmla-sm90", 12, 64),
        ("flashinfer-sm100", 12, 16),
        ("flashinfer-0.6.13-sm100", 12, 64),
        ("b12x", 12, 16),
        ("b12x", 8, 16),
        ("flashinfer-sm120", 12, 12),
        ("kvbridge", 12, 12),
        ("flashmla-sm100", 65, 128),
        ("flashinfer-sm100", 65, 128),
        ("flashmla-sm100", 64, 64),
        ("kvbridge", 128, 128),
    ],
)
def test_case_39_pad_plans(name, heads, padded):
    record = "uniform_fp8" if name.startswith("flashinfer") and "sm100" in name else "v4"
    fit = fits(for_rows(record, page_rows=64, pool="c4", policy="aligned", alignment=576), name, heads=heads)
    assert fit.padded_heads == padded
    notes = [finding for finding in fit.findings if finding.code == "consumer-heads-pad"]
    assert bool(notes) == (padded != heads)
    assert all(note.severity is Severity.NOTE and "the output cut back" in note.message for note in notes)


@pytest.mark.parametrize("heads", [0, -1, 129])
@pytest.mark.parametrize("name", CONSUMERS)
def test_case_39_heads_beyond_every_kernel(name, heads):
    fit = fits(for_rows("v4", page_rows=64, pool="c4"), name, heads=heads)
    assert fit.padded_heads is None
    assert any(finding.code == "consumer-heads" and finding.got == heads for finding in fit.findings)
    assert fit.verdict in (Verdict.UNSUPPORTED, Verdict.SILENT_MISREAD)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_case_39_128_heads_over_every_tensor_parallel_size(ranks):
    heads = 128 // ranks
    assert get_consumer("flashinfer-sm100").padded_heads(heads) == heads
    assert get_consumer("flashmla-sm100").padded_heads(heads) == max(64, heads)


# Case 43: no kernel for the derived geometry.


@pytest.mark.parametrize(("ratio", "rows"), [(1, 128), (2, 64), (4, 32), (64, 2), (128, 1)])
def test_case_43_the_page_follows_from_block_and_ratio(ratio, rows):
    assert 128 // ratio == rows
    layout = for_rows("v4", page_rows=rows, tokens_per_row=ratio, pool=f"c{ratio if ratio < 64 else 128}")
    fit = fits(replace_stride(layout), "flashinfer-0.6.18-sm120-prefill")
    if rows in (2, 64):
        assert fit.verdict is Verdict.IN_PLACE
    else:
        assert fit.verdict is Verdict.NEEDS_REPACK
        message = fit.findings[0].message
        assert message.startswith(f"page_rows: got {rows}, expected 2 or 64")


def replace_stride(layout: PageLayout) -> PageLayout:
    """The same page at a stride that 16-byte loads allow."""
    return for_rows(
        layout.record,
        page_rows=layout.page_rows,
        policy="aligned",
        alignment=576,
        pool=layout.pool,
        tokens_per_row=layout.tokens_per_row,
    )


@pytest.mark.parametrize(("rows", "verdict"), [(64, "in_place"), (256, "needs_repack"), (2, "needs_repack")])
def test_case_43_the_window_cache_has_its_own_page_set(rows, verdict):
    layout = for_rows("v4", page_rows=rows, pool="swa", policy="aligned", alignment=576)
    assert fits(layout, "flashinfer-0.6.18-sm120-prefill").verdict.value == verdict


def test_case_43_pages_that_share_no_factor_cannot_be_repacked_evenly():
    layout = for_rows("v4", page_rows=53, pool="swa", policy="aligned", alignment=576)
    assert fits(layout, "flashinfer-0.6.18-sm120-prefill").verdict is Verdict.UNSUPPORTED


@pytest.mark.parametrize(
    ("widths", "topk", "padded"),
    [
        ((128, 512, 1024, 2048), 133, 512),
        ((128, 192, 256, 512, 1024, 2048), 133, 192),
        ((128, 512, 1024, 2048), 128, 128),
        ((128, 512, 1024, 2048), 1, 128),
        ((128, 512, 1024, 2048), 2048, 2048),
        ((128, 512, 1024, 2048), 2049, None),
    ],
)
def test_case_43_widths_are_padded_to_the_next_kernel(widths, topk, padded):
    consumer = replace(get_consumer("flashinfer-0.6.18-sm120-prefill"), topk_widths=widths)
    fit = fits(for_rows("v4", page_rows=64, pool="swa"), consumer, topk=topk)
    assert fit.padded_topk == padded
    if padded is None:
        assert (fit.verdict, fit.findings[0].got) == (Verdict.UNSUPPORTED, 2049)
    elif padded != topk:
        assert "keep the lengths" in fit.findings[0].message and fit.verdict is Verdict.IN_PLACE


def test_case_43_the_width_of_given_slots_counts():
    slots = torch.zeros(2, 133, dtype=torch.int32)
    layout = for_rows("v4", page_rows=64, pool="swa", num_pages=4)
    fit = fits(layout, "flashinfer-0.6.18-sm120-prefill", slots=slots, lengths=torch.tensor([133, 5]))
    assert fit.padded_topk == 512
    assert [finding.code for finding in fit.findings] == ["consumer-topk", "lanes-unbounded"][: len(fit.findings)]
    assert "lanes-unbounded" in {finding.code for finding in fit.findings}
