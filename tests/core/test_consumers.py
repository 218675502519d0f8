"""Consumers as data, and the rules that compare a page with them."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.consumers import CONSUMERS, Verdict, consumer_names, fit_manifest, fits, get_consumer, storage_row_span
from kvbridge.contract import Accepts, Consumer, IndexUnit, Offsets, StrideUse
from kvbridge.errors import KVBridgeError
from kvbridge.layout import PageLayout
from kvbridge.manifest import EngineId, LayerPlacement, Manifest, Pool, Storage, index_only_pool
from kvbridge.records import RECORDS
from kvbridge.rule import Severity
from kvbridge.rules import get_rule

for_rows = PageLayout.for_rows
TIGHT = for_rows("v4", page_rows=64, pool="c4", num_pages=3)
PADDED = for_rows("v4", page_rows=64, pool="c4", policy="aligned", alignment=576, num_pages=3)
SLAB = for_rows(
    "v4", page_rows=64, pool="c4", policy="packed", alignment=576, page_stride_bytes=1_002_240, num_pages=7166
)
PLAIN = Consumer(name="plain", title="t", accepts=(Accepts(record="v4"),), engine="e", versions="1", source="s")


def codes(fit):
    return [finding.code for finding in fit.findings]


@pytest.mark.parametrize("name", consumer_names())
def test_every_consumer_is_complete_data(name):
    consumer = get_consumer(name)
    assert consumer.name == name and re.fullmatch(r"[a-z0-9.\-]+", name)
    assert all((consumer.title, consumer.engine, consumer.versions, consumer.source, consumer.accepts))
    assert consumer.heads == tuple(sorted(set(consumer.heads)))
    assert consumer.topk_widths == tuple(sorted(set(consumer.topk_widths)))
    for record in (*consumer.records, *(name for pair in consumer.mistakes for name in pair)):
        assert record in RECORDS
    for mistaken, taken_for in consumer.mistakes:
        assert mistaken not in consumer.records and taken_for in consumer.records
        assert RECORDS[mistaken].row_bytes == RECORDS[taken_for].row_bytes, "else its width would tell"
    assert json.loads(json.dumps(consumer.document()))["name"] == name


def test_the_list_starts_with_kvbridge_and_has_the_known_ones():
    assert consumer_names()[0] == "kvbridge"
    assert {
        *("kvbridge", "flashmla-sm90", "flashmla-sm100", "flashinfer-sm100", "flashinfer-sm120", "b12x", "vllm-cpu"),
        *("sglang-cuda-writer", "sglang-triton-writer", "sglang-sm120", "sglang-hisparse"),
        "flashinfer-0.6.18-sm120-prefill",
    } <= set(CONSUMERS)


def test_an_unknown_consumer_is_refused():
    with pytest.raises(KVBridgeError, match=r"consumer: got 'flashmla', expected one of \['kvbridge'"):
        fits(TIGHT, "flashmla")


@pytest.mark.parametrize("record", [r.name for r in RECORDS.values() if r.decodable and r.d_qk])
@pytest.mark.parametrize("rows", [1, 2, 61, 64, 256])
def test_kvbridge_reads_every_decodable_record_in_place(record, rows):
    packed = for_rows(record, page_rows=rows, policy="packed", alignment=8, page_stride_bytes=8 * 10**6)
    assert fits(packed, "kvbridge", offset_bytes=8, heads=11, topk=133, pages=100).verdict is Verdict.IN_PLACE


@pytest.mark.parametrize("record", [r.name for r in RECORDS.values() if not r.d_qk])
@pytest.mark.parametrize("name", consumer_names())
def test_pools_that_are_no_mla_cache_are_a_note_not_an_error(name, record):
    consumer = get_consumer(name)
    fit = fits(for_rows(record, page_rows=64, pool="indexer", dtype="uint8"), name)
    if record in consumer.records:
        assert fit.verdict is Verdict.IN_PLACE
    else:
        assert fit.verdict is Verdict.UNSUPPORTED
        assert [finding.severity for finding in fit.findings] == [Severity.NOTE]


def test_index_only_pools_are_a_note():
    fit = fits(index_only_pool("full", page_rows=256).layout, "kvbridge")
    assert (fit.verdict, codes(fit)) == (Verdict.UNSUPPORTED, ["consumer-record"])
    assert fit.findings[0].severity is Severity.NOTE


@pytest.mark.parametrize(
    ("name", "tight", "padded", "slab"),
    [
        ("kvbridge", "in_place", "in_place", "in_place"),
        ("flashmla-sm100", "needs_stride 37440", "in_place", "in_place"),
        ("flashmla-sm100-split", "needs_stride 37440", "in_place", "in_place"),
        ("flashmla-sm90", "in_place", "in_place", "in_place"),
        ("flashinfer-sm100", "unsupported", "unsupported", "unsupported"),
        ("flashinfer-sm120", "in_place", "in_place", "in_place"),
        ("b12x", "in_place", "in_place", "in_place"),
        ("vllm-cpu", "in_place", "in_place", "in_place"),
        ("sglang-cuda-writer", "needs_stride 37440", "in_place", "needs_stride 37440"),
        ("sglang-triton-writer", "in_place", "in_place", "needs_stride 37440"),
        ("sglang-sm120", "in_place", "in_place", "in_place"),
        ("sglang-hisparse", "silent_misread 37440", "in_place", "silent_misread 37440"),
    ],
)
def test_three_forms_of_one_page(name, tight, padded, slab):
    for layout, wanted in ((TIGHT, tight), (PADDED, padded), (SLAB, slab)):
        fit = fits(layout, name)
        stride = f" {fit.needs_stride_bytes}" if fit.needs_stride_bytes else ""
        assert f"{fit.verdict.value}{stride}" == wanted
        assert bool(fit.findings) == (wanted != "in_place")


@pytest.mark.parametrize("rows", [1, 2, 16, 53, 61, 64, 69, 128, 256])
@pytest.mark.parametrize("name", ["flashmla-sm100", "sglang-cuda-writer", "sglang-hisparse", "kvbridge"])
def test_a_stride_that_is_asked_for_is_taken(name, rows):
    """Whatever needs_stride names, a pool allocated so is read in place."""
    tight = for_rows("v4", page_rows=rows, pool="c4", num_pages=4)
    fit = fits(tight, name)
    if fit.verdict is Verdict.NEEDS_STRIDE:
        wanted = fit.needs_stride_bytes
        again = for_rows("v4", page_rows=rows, pool="c4", num_pages=4, policy="aligned", alignment=wanted)
        assert fits(again, name).verdict is Verdict.IN_PLACE
        assert wanted >= tight.payload_bytes


@pytest.mark.parametrize(("stride", "wanted"), [(1_002_240, None), (1_002_240 + 16, 1_002_816), (1_000_008, 1_000_512)])
def test_a_slab_never_shrinks_to_fit(stride, wanted):
    slab = for_rows("v4", page_rows=64, pool="c4", policy="packed", alignment=576, page_stride_bytes=stride)
    assert fits(slab, "flashmla-sm100").needs_stride_bytes == wanted


def test_needs_stride_of_a_padded_page_may_be_smaller_than_its_stride():
    loose = for_rows("v4", page_rows=2, pool="c128", policy="aligned", alignment=2048)
    assert fits(loose, "flashmla-sm100").needs_stride_bytes == 1728


@pytest.mark.parametrize("rest", [0, 2, 8, 16])
def test_bases_are_compared_with_the_consumers_alignment(rest):
    fit = fits(SLAB, "flashmla-sm100", offset_bytes=181440 + rest)
    assert fit.verdict is (Verdict.UNSUPPORTED if rest % 16 else Verdict.IN_PLACE)
    assert ("consumer-alignment" in codes(fit)) == bool(rest % 16)


@pytest.mark.parametrize(("stride", "verdict"), [(2**31 - 64, "in_place"), (2**31 + 192, "unsupported")])
def test_strides_are_passed_as_32_bit_numbers(stride, verdict):
    assert stride % 64 == 0
    huge = for_rows("v4", page_rows=64, pool="c4", policy="packed", page_stride_bytes=stride)
    assert fits(huge, "flashmla-sm90").verdict.value == verdict
    assert fits(huge, "kvbridge").verdict is Verdict.IN_PLACE


@pytest.mark.parametrize("name", ["flashmla-sm100", "flashmla-sm100-split"])
def test_flashmla_counts_rows_of_the_whole_cache(name):
    """Strides of 576-byte rows in int32: 2**31 rows of 576 bytes are 1.2 TB."""
    most = (2**31 * 576 - SLAB.payload_bytes) // SLAB.page_stride_bytes + 1
    assert fits(SLAB, name, pages=most).verdict is Verdict.IN_PLACE
    fit = fits(SLAB, name, pages=most + 1)
    assert (fit.verdict, codes(fit)) == (Verdict.UNSUPPORTED, ["consumer-offset-width"])
    assert fit.findings[0].expected == f"at most {most}"


@pytest.mark.parametrize("record", ["v41", "v41_interleaved", "v41_fp4", "v41_fp4_interleaved"])
@pytest.mark.parametrize("name", ["flashmla-sm100", "flashmla-sm100-split", "flashinfer-sm120", "b12x"])
def test_arrangements_of_one_width_are_never_told_apart(name, record):
    interleaved = "interleaved" in record
    reads_interleaved = name in ("flashmla-sm100", "b12x")
    pool = "c2" if "fp4" in record else "swa"
    fit = fits(for_rows(record, page_rows=64, pool=pool), name)
    wanted = Verdict.IN_PLACE if interleaved is reads_interleaved else Verdict.SILENT_MISREAD
    assert fit.verdict is wanted
    if wanted is Verdict.SILENT_MISREAD:
        assert codes(fit) == ["consumer-silent"]
        assert "bytes a row either way" in fit.findings[0].message


@pytest.mark.parametrize("record", ["v41_fp4_interleaved", "v41_interleaved"])
@pytest.mark.parametrize("pool", ["swa", "c1", "c2"])
def test_case_20_b12x_takes_528_for_the_window_and_288_for_the_rest(record, pool):
    fit = fits(for_rows(record, page_rows=64, pool=pool), "b12x")
    right = (record == "v41_interleaved") == (pool == "swa")
    assert fit.verdict is (Verdict.IN_PLACE if right else Verdict.UNSUPPORTED)
    assert [finding.field for finding in fit.findings] == ([] if right else ["pool"])


@pytest.mark.parametrize("record", ["v41_fp4_interleaved", "v41_interleaved"])
def test_an_unnamed_pool_may_be_any(record):
    assert fits(for_rows(record, page_rows=64), "b12x").verdict is Verdict.IN_PLACE


@pytest.mark.parametrize(("rows", "verdict"), [(2, "in_place"), (64, "in_place"), (128, "needs_repack")])
def test_an_unnamed_pool_gets_the_widest_set_of_page_sizes(rows, verdict):
    layout = for_rows("v4", page_rows=rows, policy="aligned", alignment=576)
    assert fits(layout, "flashinfer-0.6.18-sm120-prefill").verdict.value == verdict


@pytest.mark.parametrize(("dtype", "bad"), [(None, True), ("int32", False), ("any", False), ("int64", True)])
def test_slots_may_stand_for_those_of_another_dtype(dtype, bad):
    slots = torch.zeros(1, 64, dtype=torch.int64)
    fit = fits(PADDED, "flashmla-sm100", slots=slots, slots_dtype=dtype)
    assert codes(fit) == (["slot-dtype"] if bad else [])


def test_a_consumer_that_compares_nothing_misreads_in_silence():
    fit = fits(for_rows("v41", page_rows=64, pool="swa"), "vllm-cpu")
    assert (fit.verdict, codes(fit)) == (Verdict.SILENT_MISREAD, ["consumer-silent"])
    bf16 = for_rows("v4_bf16", page_rows=64, pool="swa", dtype="bfloat16")
    assert fits(bf16, "vllm-cpu").verdict is Verdict.UNSUPPORTED


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 96, 256])
def test_writers_that_shift_need_powers_of_two(rows):
    layout = for_rows("v4", page_rows=rows, pool="c4", policy="aligned", alignment=576)
    assert fits(layout, "sglang-cuda-writer").verdict is (Verdict.UNSUPPORTED if rows in (3, 96) else Verdict.IN_PLACE)


@pytest.mark.parametrize(("rows", "verdict"), [(64, "in_place"), (2, "silent_misread"), (256, "silent_misread")])
def test_bare_pointers_misread_other_page_sizes(rows, verdict):
    layout = for_rows("v4", page_rows=rows, pool="c4", policy="aligned", alignment=576)
    assert fits(layout, "sglang-hisparse").verdict.value == verdict


@pytest.mark.parametrize("offset", [0, 576, 181440])
def test_readers_that_map_the_whole_stride_overrun_by_the_offset(offset):
    size = SLAB.page_stride_bytes * 7166
    for storage in (size, None):
        fit = fits(SLAB, "sglang-sm120", offset_bytes=offset, storage_bytes=storage)
        assert codes(fit) == (["consumer-range"] if offset else [])
    assert fits(SLAB, "sglang-sm120", offset_bytes=offset, storage_bytes=size + offset).verdict is Verdict.IN_PLACE


@pytest.mark.parametrize("heads", [1, 8, 11, 64])
def test_heads_and_widths_do_not_hide_the_page(heads):
    fit = fits(TIGHT, "flashmla-sm100", heads=heads, topk=133)
    assert (fit.padded_heads, fit.padded_topk, fit.needs_stride_bytes) == (64, 192, 37440)
    assert fit.verdict is Verdict.NEEDS_STRIDE


@pytest.mark.parametrize("topk", [0, -1])
def test_widths_must_be_positive(topk):
    fit = fits(PADDED, "kvbridge", topk=topk)
    assert (fit.verdict, fit.padded_topk, codes(fit)) == (Verdict.UNSUPPORTED, None, ["consumer-topk"])


@given(st.integers(1, 128), st.integers(1, 4096), st.sampled_from(consumer_names()))
def test_padding_is_the_least_that_fits(heads, topk, name):
    consumer = get_consumer(name)
    padded = consumer.padded_heads(heads)
    assert padded in consumer.heads and padded >= heads
    assert not [count for count in consumer.heads if heads <= count < padded]
    if not consumer.topk_widths or topk <= max(consumer.topk_widths):
        width = consumer.padded_topk(topk)
        assert width >= topk and consumer.padded_topk(width) == width
        assert width % consumer.topk_multiple == 0 and width >= consumer.least_topk


OFFSETS = st.builds(
    Offsets,
    bits=st.sampled_from([8, 9, 12]),
    signed=st.booleans(),
    unit_bytes=st.sampled_from([512, 1536]),
    from_storage=st.booleans(),
)


@given(OFFSETS, st.integers(1, 300), st.integers(0, 200), st.integers(1, 400), st.integers(0, 50))
def test_offset_reach_agrees_with_the_last_byte_of_every_page(offsets, payload, gap, pages, base):
    consumer = replace(PLAIN, accepts=(Accepts(record="uniform_fp8"),), offsets=offsets)
    layout = for_rows("uniform_fp8", page_rows=payload, policy="packed", page_stride_bytes=512 * (payload + gap))
    start = 512 * base if offsets.from_storage else 0
    lasts = [start + page * layout.page_stride_bytes + layout.payload_bytes - 1 for page in range(pages)]
    fitting = [last // offsets.unit_bytes <= offsets.most for last in lasts]
    fit = fits(layout, consumer, pages=pages, offset_bytes=512 * base)
    assert (fit.verdict is Verdict.IN_PLACE) == all(fitting)
    if not all(fitting):
        assert fit.findings[0].expected == f"at most {fitting.index(False)}"


@pytest.mark.parametrize("unit", [None, IndexUnit.SLOT, IndexUnit.STORAGE_ROW])
@pytest.mark.parametrize("stride", [64 * 1024, 1_600_000 - 1_600_000 % 1024, 1_600_000])
@pytest.mark.parametrize("name", ["flashinfer-sm100", "flashinfer-0.6.13-sm100"])
def test_row_addressing_readers(name, stride, unit):
    policy = "exact" if stride == 65536 else "packed"
    layout = for_rows("v4_bf16", page_rows=64, pool="c4", policy=policy, page_stride_bytes=stride)
    fit = fits(layout, name, index_unit=unit)
    silent = name == "flashinfer-0.6.13-sm100"
    if stride == 65536:
        assert fit.verdict is Verdict.IN_PLACE
    elif stride % 1024:
        assert fit.verdict is (Verdict.SILENT_MISREAD if silent else Verdict.NEEDS_STRIDE)
        assert fit.needs_stride_bytes == 1_600_512
    elif unit is IndexUnit.STORAGE_ROW:
        assert fit.verdict is Verdict.IN_PLACE
    elif silent:
        assert fit.verdict is Verdict.SILENT_MISREAD
    else:
        assert fit.verdict is (Verdict.UNSUPPORTED if unit is None else Verdict.IN_PLACE)


def test_vllms_flat_rows_need_whole_rows_between_blocks():
    slab = for_rows("dsa", page_rows=64, pool="mla", policy="packed", page_stride_bytes=656 * 100)
    assert storage_row_span(slab) == 100
    assert fits(slab, "vllm-flat-rows").verdict is Verdict.IN_PLACE
    odd = for_rows("dsa", page_rows=64, pool="mla", policy="packed", page_stride_bytes=656 * 100 + 4)
    fit = fits(odd, "vllm-flat-rows")
    assert (fit.verdict, fit.needs_stride_bytes) == (Verdict.NEEDS_STRIDE, 656 * 101)


def test_findings_are_of_catalogued_rules_and_name_the_consumer():
    broken = for_rows("v4", page_rows=96, pool="c4", policy="packed", page_stride_bytes=70_002)
    for name in consumer_names():
        for finding in fits(broken, name, offset_bytes=3, heads=129, topk=5000, pool="c4").findings:
            assert get_rule(finding.code)
            assert (finding.consumer, finding.pool) == (name, "c4")


def test_verdict_is_the_worst_and_refusals_are_not_hidden():
    consumer = replace(PLAIN, stride=StrideUse.OWN_PAGE_UNCHECKED, base_alignment_bytes=16, heads=(64,))
    fit = fits(PADDED, consumer, offset_bytes=4, heads=65)
    assert fit.verdict is Verdict.SILENT_MISREAD
    assert codes(fit) == ["consumer-stride", "consumer-alignment", "consumer-heads"]


def test_a_manifest_gets_one_fit_for_each_pool_and_consumer_at_its_worst_layer():
    layers = tuple(LayerPlacement(name=f"l{n}", offset_bytes=offset) for n, offset in enumerate((0, 181440, 8)))
    manifest = Manifest(
        engine=EngineId(name="vllm", version="0.33.0"),
        origin="planned",
        storages=(Storage(id="kv", storage_bytes=7166 * 1_002_240),),
        pools=(
            Pool(**SLAB.model_dump(), storage="kv", layers=layers),
            index_only_pool("full", page_rows=256),
        ),
    )
    found = [fit.document() for fit in fit_manifest(manifest, ["kvbridge", get_consumer("flashmla-sm100")], heads=8)]
    assert [tuple(entry.values()) for entry in found] == [
        ("c4", "kvbridge", "in_place", None),
        ("c4", "flashmla-sm100", "unsupported", None),
        ("full", "kvbridge", "unsupported", None),
        ("full", "flashmla-sm100", "unsupported", None),
    ]
