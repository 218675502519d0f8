"""The consumers' data against the code they describe: SGLang 0.5.23, and the FlashInfer and b12x it brings.

One program asks (programs/consumer_facts.py): layouts, checks and head counts, and SGLang's own torch decode and Triton
writer on the same pages in every form.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbridge.consumers import Verdict, fits, get_consumer
from kvbridge.layout import PageLayout
from kvbridge.records import get_record
from tests.environments import run_in_engine

RECORDS = {
    "V4": "v4",
    "V41": "v41",
    "V41_NEW": "v41_interleaved",
    "V41_FP4": "v41_fp4",
    "V41_FP4_NEW": "v41_fp4_interleaved",
}
FORMS = ("tight", "padded", "slab", "slab-offset")
OFFSET = 17_280


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("sglang-consumers") / "facts.json"
    program = "tests/engines/sglang/programs/consumer_facts.py"
    run_in_engine("sglang", [program, out], workarounds=("triton-interpreter",))
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def form(name: str, slab: int, rows: int = 64) -> PageLayout:
    policy = {"tight": "exact", "padded": "aligned"}.get(name, "packed")
    return PageLayout.for_rows(
        "v4",
        page_rows=rows,
        num_pages=4,
        pool="c4",
        policy=policy,
        alignment=None if name == "tight" else 576,
        page_stride_bytes=slab if policy == "packed" else None,
    )


@pytest.mark.parametrize(("name", "record"), RECORDS.items())
def test_the_writers_pages_are_those_of_sglangs_layouts(facts: dict[str, Any], name: str, record: str) -> None:
    layout = facts["kv_layouts"][name]
    entry = next(entry for entry in get_consumer("sglang-cuda-writer").accepts if entry.record == record)
    assert entry.page_alignment_bytes == layout["align"]
    assert get_record(record).row_bytes == layout["row"]
    for rows, size in layout["pages"].items():
        page = PageLayout.for_rows(record, page_rows=int(rows), policy="aligned", alignment=layout["align"])
        assert page.page_bytes == size
        assert fits(page, "sglang-cuda-writer").verdict is Verdict.IN_PLACE
    data, scales, scale_stride = layout["addresses"]
    regions = {region.name: region for region in PageLayout.for_rows(record, page_rows=64).regions}
    first = regions["nope" if record == "v4" else "values"]
    assert (first.row_stride, regions["scales"].offset, regions["scales"].row_stride) == (data, scales, scale_stride)


@pytest.mark.parametrize(("consumer", "interleaved"), [("flashmla-sm100", True), ("flashmla-sm100-split", False)])
def test_flashmla_strides_are_what_sglang_pads_to(facts: dict[str, Any], consumer: str, interleaved: bool) -> None:
    kernel = get_consumer(consumer)
    for name, record in RECORDS.items():
        layout = facts["kv_layouts"][name]
        if name != "V4" and layout["interleaved"] is not interleaved:
            assert record not in kernel.records and record in kernel.records_mistaken
            continue
        (entry,) = (entry for entry in kernel.accepts if entry.record == record)
        assert entry.stride_multiple_bytes == layout["align"]
        assert bool(entry.pools) == ("FP4" in name), "fp4 rows are taken as the extra cache only"


def test_hisparse_constants(facts: dict[str, Any]) -> None:
    (entry,) = get_consumer("sglang-hisparse").accepts
    assert entry.page_rows == (facts["hisparse_rows"],)
    assert entry.page_alignment_bytes == facts["hisparse_alignment"]


def test_the_cuda_writer_checks_strides_and_shifts(facts: dict[str, Any]) -> None:
    assert facts["writer_checks_stride"] and facts["writer_powers_of_two"]
    assert get_consumer("sglang-cuda-writer").page_rows_power_of_two


def test_flashinfers_head_counts_and_widths(facts: dict[str, Any]) -> None:
    kernel = get_consumer("flashinfer-sm100")
    assert tuple(facts["flashinfer_heads"]) == kernel.heads
    assert facts["flashinfer_widths"] == [width for width in range(120, 141) if kernel.padded_topk(width) == width]


@pytest.mark.parametrize(("family", "record"), [("dsv4", "v4"), ("dsv4_1", "v41"), ("dsv3_2", "dsa")])
def test_flashinfers_sm120_envelope(facts: dict[str, Any], family: str, record: str) -> None:
    row_bytes, least_topk, any_page, most_heads = facts["flashinfer_sm120"][family]
    kernel = get_consumer("flashinfer-sm120")
    (entry,) = (entry for entry in kernel.accepts if entry.record == record)
    assert get_record(record).row_bytes == row_bytes
    assert (kernel.least_topk, max(kernel.heads)) == (least_topk, most_heads)
    assert any_page and entry.page_rows == ()


def test_b12x_takes_what_its_check_takes(facts: dict[str, Any]) -> None:
    said = facts["b12x"]
    for name in FORMS:
        verdict = fits(form(name, facts["slab"]), "b12x", offset_bytes=OFFSET if name == "slab-offset" else 0).verdict
        assert (said[f"v4 {name}"] == "") == (verdict is Verdict.IN_PLACE)
    assert "page byte width" in said["v4 short"]
    for kind, record, pool in (("swa", "v41_interleaved", "swa"), ("indexed", "v41_fp4_interleaved", "c2")):
        for base, extra in ((0, 0), (8, 0), (0, 16), (0, 8)):
            payload = 64 * get_record(record).row_bytes
            layout = PageLayout.for_rows(
                record, page_rows=64, num_pages=3, pool=pool, policy="packed", page_stride_bytes=payload + extra
            )
            verdict = fits(layout, "b12x", offset_bytes=base).verdict
            assert (said[f"v41 {kind} base {base} stride {extra}"] == "") == (verdict is Verdict.IN_PLACE)
        assert said[f"v41 {kind} of the other record"] != ""


@pytest.mark.parametrize("rows", [2, 64, 256])
@pytest.mark.parametrize("name", FORMS)
def test_sglangs_torch_decode_does_what_the_verdict_says(facts: dict[str, Any], name: str, rows: int) -> None:
    offset = OFFSET if name == "slab-offset" else 0
    fit = fits(form(name, facts["slab"], rows), "sglang-sm120", offset_bytes=offset)
    result = facts["decode"][f"{rows} {name}"]
    if fit.verdict is Verdict.IN_PLACE:
        assert result == {"error": "", "same": True}
    else:
        assert fit.findings[0].code == "consumer-range"
        assert "out of bounds" in result["error"]


@pytest.mark.parametrize("name", FORMS)
def test_sglangs_triton_writer_does_what_the_verdict_says(facts: dict[str, Any], name: str) -> None:
    offset = OFFSET if name == "slab-offset" else 0
    fit = fits(form(name, facts["slab"]), "sglang-triton-writer", offset_bytes=offset)
    assert (facts["writer"][name] == "") == (fit.verdict is Verdict.IN_PLACE)
    if fit.verdict is not Verdict.IN_PLACE:
        assert facts["writer"][name].startswith("AssertionError")
