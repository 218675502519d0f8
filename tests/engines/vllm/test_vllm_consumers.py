"""The consumers' data against vLLM's own code: CPU decode on every form of a pool, row views, head counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbridge.consumers import Verdict, fits, get_consumer
from kvbridge.contract import HeadsError, IndexUnit, Sentinel
from kvbridge.layout import PageLayout
from tests.environments import run_in_engine

FORMS = ("tight", "padded", "slab", "slab-offset")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("vllm-consumers") / "facts.json"
    run_in_engine("vllm", ["tests/engines/vllm/vllm_consumer_facts.py", out])
    results: dict[str, Any] = json.loads(out.read_text())
    return results


@pytest.mark.parametrize("name", ["flashmla", "flashinfer"])
def test_head_counts(facts: dict[str, Any], name: str) -> None:
    kernel = get_consumer(f"{name}-sm100")
    for heads, padded in enumerate(facts[f"{name}_heads"], start=1):
        if isinstance(padded, int):
            assert kernel.padded_heads(heads) == padded
        else:
            assert padded.startswith("ValueError")
            with pytest.raises(HeadsError, match=f"got {heads}"):
                kernel.padded_heads(heads)


@pytest.mark.parametrize(("record", "consumer"), [("dsa", "vllm-flat-rows"), ("v4_bf16", "flashinfer-sm100")])
def test_readers_of_whole_rows(facts: dict[str, Any], record: str, consumer: str) -> None:
    pool = "mla" if record == "dsa" else "c4"
    for stride, said in facts["row_spans"][record].items():
        layout = PageLayout.for_rows(
            record, page_rows=64, pool=pool, policy="packed", page_stride_bytes=int(stride), num_pages=4
        )
        fit = fits(layout, consumer, index_unit=IndexUnit.STORAGE_ROW)
        if isinstance(said, int):
            assert fit.verdict is Verdict.IN_PLACE
            assert said == layout.page_stride_bytes // layout.row_bytes
        else:
            assert said.startswith(("AssertionError", "NotImplementedError"))
            assert fit.verdict is Verdict.NEEDS_STRIDE and fit.needs_stride_bytes % layout.row_bytes == 0


@pytest.mark.parametrize("rows", [2, 61, 64, 256])
@pytest.mark.parametrize("name", FORMS)
def test_the_cpu_decode_reads_every_form_in_place(facts: dict[str, Any], name: str, rows: int) -> None:
    packed = name.startswith("slab")
    policy = {"tight": "exact", "padded": "aligned"}.get(name, "packed")
    layout = PageLayout.for_rows(
        "v4",
        page_rows=rows,
        num_pages=4,
        pool="c4",
        policy=policy,
        alignment=None if name == "tight" else 576,
        page_stride_bytes=facts["slab"] if packed else None,
    )
    fit = fits(layout, "vllm-cpu", offset_bytes=17_280 if name == "slab-offset" else 0, heads=16, topk=40)
    assert fit.verdict is Verdict.IN_PLACE
    assert facts["decode"][f"{rows} {name}"] == {"same": True, "finite": True}


def test_the_cpu_decodes_rules_on_slots(facts: dict[str, Any]) -> None:
    kernel, said = get_consumer("vllm-cpu"), facts["slots"]
    assert kernel.sentinel is Sentinel.NEGATIVE_OR_BEYOND
    assert all(said[name] for name in ("capacity", "2**32 + 5", "-2", "int64 min")), "all of them are masked"
    assert said["empty row is zero"] and kernel.empty_row_output == "0"
    assert kernel.slot_dtypes == ("int64",) and said["int32"] != ""
    assert kernel.dense_tables and said["wider table"] != ""
    assert not kernel.checks_record and said["other width"] == ""
