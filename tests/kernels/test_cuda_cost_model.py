"""The cost model: the roofline against figures worked by hand, counts against the emulator, tables against the docs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge import PageLayout, PageView
from kvbridge.kernels import cuda_tiles, mla
from kvbridge.kernels.cost_model import Instructions, merge_ns, predict, resident_blocks, served_plan, tile_counts
from kvbridge.kernels.cuda_arguments import Launch, Switches
from kvbridge.kernels.cuda_tiles import Variant, choose_variant
from kvbridge.kernels.roofline import H200, roofline
from kvbridge.records import get_record

ROOT = Path(__file__).resolve().parents[2]
V4 = cuda_tiles.formats_of(("v4",))
SOME = Instructions(chunk=80, softmax=110, registers=128)


BY_HAND = (  # heads, slots, KV bytes, q and out bytes, MFLOP, memory ns, matrix ns, bound
    (16, 640, 373_760, 32_768, 21.0, 94.5, 26.5, "memory"),
    (16, 2176, 1_270_784, 32_768, 71.3, 303, 90, "memory"),
    (32, 640, 373_760, 65_536, 41.9, 102, 53, "memory"),
    (64, 128, 74_752, 131_072, 16.8, 48, 21, "memory"),
    (64, 640, 373_760, 131_072, 83.9, 117, 106, "memory"),
    (64, 1152, 672_768, 131_072, 151, 187, 191, "matrix"),
    (64, 2176, 1_270_784, 131_072, 285, 326, 361, "matrix"),
    (128, 640, 373_760, 262_144, 168, 148, 212, "matrix"),
    (128, 1152, 672_768, 262_144, 302, 217, 382, "matrix"),
    (128, 2176, 1_270_784, 262_144, 570, 356, 722, "matrix"),
)


@pytest.mark.parametrize("row", BY_HAND, ids=lambda row: f"{row[0]}-{row[1]}")
def test_roofline_of_one_query_equals_the_figures_worked_out_by_hand(row: tuple[Any, ...]) -> None:
    heads, slots, kv_bytes, query_bytes, mflop, memory_ns, matrix_ns, bound = row
    got = roofline(heads=heads, slots=slots)
    assert (got.kv_bytes, got.query_bytes, got.bound) == (kv_bytes, query_bytes, bound)
    assert got.flop / 1e6 == pytest.approx(mflop, rel=5e-3)
    assert got.memory_ns == pytest.approx(memory_ns, rel=6e-3)
    assert got.matrix_ns == pytest.approx(matrix_ns, rel=1.2e-2)
    assert got.ns == max(got.memory_ns, got.matrix_ns)


@pytest.mark.parametrize(
    ("queries", "heads", "slots", "us"),
    [(1, 16, 640, 0.0945), (4, 64, 1152, 0.76), (64, 128, 640, 13.6), (256, 64, 640, 30.1), (512, 128, 2176, 370)],
)
def test_roofline_grows_with_queries(queries: int, heads: int, slots: int, us: float) -> None:
    assert roofline(heads=heads, slots=slots, queries=queries).ns / 1000 == pytest.approx(us, rel=5e-2)


def test_counts_of_flop_and_bytes_are_those_of_the_products() -> None:
    for heads in (8, 16, 32, 64):
        for record in ("v4", "v41", "v41_fp4", "dsa", "v4_bf16", "mla_bf16", "v41_interleaved"):
            form = get_record(record)
            counts = tile_counts(Variant(cuda_tiles.formats_of((record,)), heads), record)
            assert counts.flop == 32 * heads * 2 * (form.d_qk + form.d_v)
            assert counts.copied_bytes == 32 * form.row_bytes
            assert counts.chunks * 16 == 32 * form.d_qk


@pytest.mark.parametrize(("heads", "record"), [(16, "v4"), (64, "v4"), (8, "dsa")])
def test_counts_are_what_the_emulator_counts(heads: int, record: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++: the emulator cannot be built")
    from tests.simt import emulator as simt

    form = get_record(record)
    plan = mla.plan(mla.Caps(queries=1, heads=heads, widths=(96,), records=(record,)))
    emulated = simt.with_options(simt.Emulator(heads=heads, stages=2), count=1)
    prepared = emulated.prepared(plan)
    layout = PageLayout.for_rows(record, page_rows=96)
    pages = torch.zeros(1, 96, form.row_bytes, dtype=torch.uint8)
    bound = mla.bind(
        prepared,
        q=torch.zeros(1, heads, form.d_qk, dtype=torch.bfloat16),
        caches=[mla.Cache(view=PageView.from_tensor(pages, layout), slots=torch.arange(96, dtype=torch.int32)[None])],
        out=torch.empty(1, heads, 512, dtype=torch.bfloat16),
        scale=1.0,
    )
    bound.run()
    runner = bound._runner
    assert isinstance(runner, simt.EmulatedRunner)
    counted = runner.counters
    expected = tile_counts(replace(emulated.variant(plan), formats=cuda_tiles.formats_of((record,))), record)
    assert counted.copies == 3 * expected.copies
    assert counted.copied_bytes == 3 * expected.copied_bytes
    assert counted.matrix_loads == 3 * expected.matrix_loads
    assert counted.multiplies == 3 * expected.multiplies


def test_no_prediction_is_faster_than_the_roofline_and_more_work_takes_longer() -> None:
    for heads in (8, 16, 64, 128):
        variant = choose_variant(served_plan(heads, 640, 1), 90)
        for slots in (640, 1152, 2176):
            times = []
            for queries in (132, 264, 512, 1024):
                found = predict(served_plan(heads, slots, queries), variant, SOME, queries=queries)
                assert found.ns > roofline(heads=heads, slots=slots, queries=queries).ns
                assert found.blocks == queries * -(-heads // variant.heads) * found.splits
                times.append(found.ns)
            assert times == sorted(times)
    assert predict(served_plan(8, 640, 1), Variant(V4, 8), SOME, queries=1).splits == 20


def test_prediction_names_what_limits_it() -> None:
    slow_decode = replace(SOME, chunk=1000)
    assert predict(served_plan(8, 2176, 512), Variant(V4, 8), slow_decode, queries=512).limit == "issue"
    starved = replace(H200, bytes_per_second=1e11)
    assert predict(served_plan(8, 2176, 512), Variant(V4, 8), SOME, queries=512, machine=starved).limit == "memory"
    assert predict(served_plan(8, 160, 1), Variant(V4, 8), SOME, queries=1).limit == "launch"


def test_merge_takes_the_cheaper_way_and_never_as_long_as_one_block_would() -> None:
    for heads in (8, 16, 64):
        for queries in (1, 8, 64):
            for splits in (2, 4, 20, 68):
                plan = served_plan(heads, 2176, queries)
                ways = [Switches(wide_merge=True), Switches(), Switches(fused_merge=False, wide_merge=True)]
                launches = [Launch(plan, Variant(V4, heads), 132, way) for way in ways]
                chosen, fused, separate = (merge_ns(each, queries=queries, splits=splits) for each in launches)
                assert chosen in {fused, separate}
                assert chosen <= 1.7 * min(fused, separate), (heads, queries, splits)
    assert merge_ns(launches[0], queries=1, splits=1) == 0
    assert merge_ns(Launch(plan, Variant(V4, 64), 132, Switches()), queries=1, splits=68) > 50_000


def test_resident_blocks_follow_registers_and_shared_memory() -> None:
    assert resident_blocks(Variant(V4, 64), 200) == 1
    assert resident_blocks(Variant(V4, 16), 119) == 2  # 95,496 + 1,024 twice in 233,472
    assert resident_blocks(Variant(V4, 8), 255) == 1  # 65,536 registers hold 256 threads of 256


def test_committed_tables_are_current() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings and nvidia-cuda-nvrtc are not installed")
    command = [sys.executable, "benchmarks/gpu_predict.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "up to date", done.stdout + done.stderr


def test_every_shape_of_the_benchmark_has_a_prediction_in_the_docs() -> None:
    rows = json.loads((ROOT / "benchmarks" / "predicted_h200.json").read_text())
    document = (ROOT / "docs" / "cuda.md").read_text()
    shapes = {(row["heads"], row["slots"], row["queries"]) for row in rows}
    assert shapes == {
        (heads, slots, 2**power) for heads in (8, 16, 64, 128) for slots in (640, 1152, 2176) for power in range(10)
    }
    for row in rows:
        assert f"| {row['heads']} | {row['slots']} | {row['queries']} | " in document
        assert row["predicted_us"] > row["roofline_us"] > 0
    assert "Nothing in this repository has run on a GPU yet" in document
