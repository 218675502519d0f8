"""What other programs assume of a cache: cases 11, 12 and 26."""

import pytest

from kvbridge.engine import PlanRequest, load_engine
from kvbridge.layout import PageLayout
from kvbridge.manifest import Manifest
from kvbridge.models import load_model
from kvbridge.peers import audit_allocator, audit_chunk, audit_flat_cache, chunk_bytes
from kvbridge.rule import Severity

for_rows = PageLayout.for_rows
PADDED = for_rows("v4", page_rows=64, policy="aligned", alignment=576)


def plan(engine: str, model: str = "deepseek-v4-flash") -> Manifest:
    adapter = load_engine(engine)
    return adapter.plan(PlanRequest(model=load_model(model), version=adapter.versions[-1]))


def test_case_11_equal_page_counts_are_luck():
    (found,) = audit_allocator(PADDED, stride_bytes=37376, budget_bytes=1_000_000)
    assert (found.code, found.got, found.expected) == ("page-stride", 37376, 37440)
    assert "allocator stride 37376 against view stride 37440" in found.message
    assert "1000000 bytes hold 26 and 26 pages" in found.message


@pytest.mark.parametrize("stride", [37440, 37376, 37439, 0, 149760])
def test_case_11_the_stride_decides(stride):
    findings = audit_allocator(PADDED, stride_bytes=stride)
    assert [finding.code for finding in findings] == ([] if stride == 37440 else ["page-stride"])


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "divisible"),
    [
        (PADDED, False),
        (for_rows("v4", page_rows=64), False),
        (for_rows("dsa", page_rows=64), True),
        (for_rows("dsa", page_rows=64, policy="aligned", alignment=65536), False),
        (for_rows("v41_interleaved", page_rows=128), True),
        (for_rows("v41_interleaved", page_rows=128, policy="packed", page_stride_bytes=10**6), False),
    ],
)
def test_case_11_padded_or_split_pages_are_no_run_of_kernel_blocks(layout, divisible, blocks):
    findings = audit_allocator(layout, stride_bytes=layout.page_stride_bytes, kernel_blocks_per_page=blocks)
    wanted = [] if divisible or blocks == 1 else ["page-split"]
    assert [finding.code for finding in findings] == wanted


def groups(dtype: str = "uint8") -> dict[str, PageLayout]:
    return {
        "c4": for_rows("v4", page_rows=64, policy="aligned", alignment=576, dtype=dtype),
        "c128": for_rows("v4", page_rows=2, policy="aligned", alignment=576, dtype=dtype),
        "indexer": for_rows("indexer_fp8", page_rows=64, dtype=dtype),
    }


def test_case_12_every_failing_assumption_is_listed_and_no_other():
    findings = audit_flat_cache(groups())
    faults = [finding for finding in findings if finding.severity is Severity.ERROR]
    assert [(finding.field, finding.got) for finding in faults] == [
        ("dtype", ["uint8"]),
        ("page_stride_bytes", [1728, 8448, 37440]),
    ]
    assert "c4 37440, c128 1728, indexer 8448" in faults[1].message
    assert not [finding for finding in findings if finding.field == "copy_unit_bytes"], "all three are multiples of 8"


@pytest.mark.parametrize(("unit", "odd"), [(8, []), (64, []), (16, []), (128, ["c4", "c128"]), (9, ["indexer"])])
def test_case_12_the_copy_unit_is_named_only_where_it_fails(unit, odd):
    findings = audit_flat_cache(groups(), copy_unit_bytes=unit)
    named = [finding for finding in findings if finding.field == "copy_unit_bytes"]
    assert bool(named) == bool(odd)
    assert all(label in named[0].message for label in odd)


def test_case_12_a_flat_cache_passes():
    assert audit_flat_cache([for_rows("dsa", page_rows=64, dtype="int8")] * 3) == ()
    assert [finding.field for finding in audit_flat_cache([groups("int8")["c4"]])] == ["padding"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_case_26_the_planned_bytes_of_a_chunk(engine):
    chunks = {chunk.pool: chunk for chunk in chunk_bytes(plan(engine), tokens=1024)}
    assert {name: (chunk.layers, chunk.rows, chunk.payload_bytes) for name, chunk in chunks.items()} == {
        "c4": (21, 256, 21 * 256 * 584),
        "c128": (20, 8, 20 * 8 * 584),
        "indexer": (21, 256, 21 * 256 * 132),
    }
    assert sum(chunk.payload_bytes for chunk in chunks.values()) == 3_942_656


def test_case_26_the_finding_says_who_is_right():
    (found,) = audit_chunk(plan("vllm"), tokens=1024, sizes={"lmcache": 3_942_656, "vllm": 15_495_168})
    assert (found.code, found.field, found.got, found.expected) == ("chunk-size", "vllm", 15_495_168, 3_942_656)
    assert "c4 3139584" in found.message and "indexer 709632" in found.message and "c128 93440" in found.message
    assert "3.93 times the plan" in found.message and "lmcache matches the plan" in found.message


@pytest.mark.parametrize("sizes", [{"a": 3_942_656, "b": 3_942_656}, {}, {"a": 0}, {"a": 1, "b": 1}])
def test_case_26_other_sizes(sizes):
    findings = audit_chunk(plan("sglang"), tokens=1024, sizes=sizes)
    assert [finding.field for finding in findings] == [name for name, size in sizes.items() if size != 3_942_656]
    assert all("nobody matches the plan" in finding.message for finding in findings)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (127, 0), (128, 1), (255, 1), (1023, 7)])
def test_case_26_rows_that_a_chunk_does_not_complete_are_not_counted(tokens, rows):
    (c128,) = [chunk for chunk in chunk_bytes(plan("vllm"), tokens=tokens) if chunk.pool == "c128"]
    assert (c128.rows, c128.payload_bytes) == (rows, rows * 584 * 20)


@pytest.mark.parametrize(
    ("model", "per_token"),
    [("deepseek-v3.2", 61 * (1152 + 132)), ("deepseek-v3", 61 * 576 * 2), ("kimi-k2", 61 * 1152)],
)
def test_case_26_models_whose_rows_are_tokens(model, per_token):
    chunks = chunk_bytes(plan("vllm", model), tokens=10)
    assert sum(chunk.payload_bytes for chunk in chunks) == 10 * per_token
