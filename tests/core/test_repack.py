"""Repack: the same values in another layout, with guard bytes around every page that must not change."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from kvbridge import PageLayout, PageView
from kvbridge.copies import CopyPlan
from kvbridge.errors import (
    PageCountError,
    PlaneError,
    RecordMismatchError,
    SlotError,
    SpanError,
    StaleViewError,
    TokensPerRowError,
)
from kvbridge.records import RECORDS, Record
from kvbridge.repack import copy_pages, copy_rows, plan_pages, plan_rows
from kvbridge.spans import Placement
from tests import oracle, strategies

rows = PageLayout.for_rows


@pytest.fixture(autouse=True)
def _tiny_records() -> Iterator[None]:
    with strategies.tiny_records():
        yield


def bind(layout: PageLayout, num_pages: int, *, offset: int = 0, seed: int = 0) -> PageView:
    """A pool of random bytes, guard bytes before, between and behind the pages included."""
    generator = torch.Generator().manual_seed(seed)
    size = offset + num_pages * layout.page_stride_bytes + 64
    storage = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    shape, stride = (num_pages, layout.payload_bytes), (layout.page_stride_bytes, 1)
    return PageView.from_tensor(storage.as_strided(shape, stride, offset), layout)


def stored(view: PageView) -> bytearray:
    return bytearray(view.pages.as_strided((view.storage_bytes,), (1,), 0).numpy().tobytes())


def rows_of(view: PageView, memory: bytearray) -> dict[tuple[int, int, str, int], int]:
    """Every payload byte of a pool by its owner, found by the oracle."""
    owners = oracle.pool_owners(view.layout, view.num_pages, view.offset_bytes)
    return {owner: memory[byte] for byte, owner in owners.items()}


def check_copy(
    source: PageView, target: PageView, slots: list[tuple[int, int]], plan: CopyPlan, before: bytearray
) -> None:
    """Target rows hold the source rows; every other byte of the target's storage is what it was."""
    after = stored(target)
    values = rows_of(source, stored(source))
    expected = bytearray(before)
    by_row: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for page, row, field, byte in values:
        by_row.setdefault((page, row), []).append((field, byte))
    places = {
        owner: byte for byte, owner in oracle.pool_owners(target.layout, target.num_pages, target.offset_bytes).items()
    }
    for slot, goal in slots:
        page, row = divmod(slot, source.page_rows)
        goal_page, goal_row = divmod(goal, target.page_rows)
        for field, byte in by_row[page, row]:
            expected[places[goal_page, goal_row, field, byte]] = values[page, row, field, byte]
    assert after == expected
    written = {byte for start, length in plan.target_spans for byte in range(start, start + length)}
    assert written == {
        places[divmod(goal, target.page_rows)[0], goal % target.page_rows, field, byte]
        for slot, goal in slots
        for field, byte in by_row[divmod(slot, source.page_rows)]
    }
    assert plan.total_bytes == len(slots) * source.layout.row_bytes == plan.target_spans.total_bytes


def expand(pages: range | list[int], page_rows: int) -> list[int]:
    return [page * page_rows + row for page in pages for row in range(page_rows)]


PAIRS = [
    (rows("v4", page_rows=4), rows("v4", page_rows=4, policy="aligned", alignment=576)),
    (rows("v4", page_rows=4), rows("v4", page_rows=4, policy="packed", alignment=576, page_stride_bytes=9216)),
    (rows("v4", page_rows=4, policy="packed", page_stride_bytes=4000), rows("v4", page_rows=4)),
    (rows("v4", page_rows=8), rows("v4", page_rows=2, policy="aligned", alignment=576)),
    (rows("v4", page_rows=2), rows("v4", page_rows=8)),
    (rows("v4", page_rows=6), rows("v4", page_rows=4)),
    (rows("v41", page_rows=4), rows("v41_interleaved", page_rows=4)),
    (rows("v41_interleaved", page_rows=2), rows("v41", page_rows=8, policy="aligned", alignment=576)),
    (rows("v41_fp4", page_rows=3), rows("v41_fp4_interleaved", page_rows=2)),
    (rows("dsa", page_rows=4), rows("dsa", page_rows=1)),
    (rows("mla_bf16", page_rows=4), rows("mla_bf16", page_rows=2, policy="packed", page_stride_bytes=4000)),
    (rows("mla_fp4", page_rows=4, plane="scales"), rows("mla_fp4", page_rows=8, plane="scales")),
    (rows("nvfp4_352", page_rows=4), rows("nvfp4_352", page_rows=2)),
    (rows("indexer_fp8", page_rows=4), rows("indexer_fp8", page_rows=4, policy="aligned", alignment=576)),
]


@pytest.mark.parametrize(("source_layout", "target_layout"), PAIRS)
def test_all_pages(source_layout: PageLayout, target_layout: PageLayout) -> None:
    source = bind(source_layout, 24 // source_layout.page_rows, offset=32)
    target = bind(target_layout, 24 // target_layout.page_rows, offset=96, seed=1)
    before = stored(target)
    plan = copy_pages(source, target)
    check_copy(source, target, [(slot, slot) for slot in range(24)], plan, before)


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_random_copies_against_marked_bytes(first: int) -> None:
    """Random records, page rows, policies, arrangements and page lists."""
    for seed in range(first, first + 300):
        rng = Random(seed)
        record = rng.choice(strategies.TINY)
        layouts = []
        for _ in range(2):
            declared = strategies.random_layout(rng, record=record, valid=True)
            layouts.append(
                PageLayout(
                    **{**dict(declared), "num_pages": None, "reserved_pages": 0, "tokens_per_row": 1, "kind": "paged"}
                )
            )
        source_layout, target_layout = layouts
        if source_layout.plane != target_layout.plane:
            with pytest.raises(PlaneError):
                plan_pages(*(Placement.from_layout(layout, num_pages=3) for layout in layouts))
            continue
        total = source_layout.page_rows * target_layout.page_rows * rng.randint(1, 3)
        source = bind(source_layout, 24, offset=4 * rng.randint(0, 5), seed=seed)
        target = bind(target_layout, 24, offset=4 * rng.randint(0, 5), seed=seed + 1)
        here: range | list[int] = rng.sample(range(24), total // source_layout.page_rows)
        there: range | list[int] = rng.sample(range(24), total // target_layout.page_rows)
        if rng.random() < 0.3:
            here, there = range(2, 2 + len(here)), range(1, 1 + len(there))
        before = stored(target)
        plan = copy_pages(source, target, source_pages=here, target_pages=there)
        slots = list(zip(expand(here, source.page_rows), expand(there, target.page_rows), strict=True))
        check_copy(source, target, slots, plan, before)
        count = rng.randint(0, 12)
        slots = list(
            zip(
                rng.choices(range(source.capacity_rows), k=count),
                rng.sample(range(target.capacity_rows), count),
                strict=True,
            )
        )
        before = stored(target)
        plan = copy_rows(source, target, source_slots=[s for s, _ in slots], target_slots=[t for _, t in slots])
        check_copy(source, target, slots, plan, before)


def test_there_and_back_is_the_same() -> None:
    split, interleaved = rows("v41", page_rows=64), rows("v41_interleaved", page_rows=16)
    first, between, last = bind(split, 8), bind(interleaved, 32, seed=1), bind(split, 8, seed=2)
    copy_pages(first, between)
    copy_pages(between, last)
    assert torch.equal(first.pages, last.pages)


@pytest.mark.parametrize("scattered", [False, True])
def test_large_copies_take_both_ways(scattered: bool) -> None:
    """More than a thousand scattered pages are sorted on the way; long ranges are one strided copy."""
    layout = rows("v4", page_rows=2, policy="aligned", alignment=576)
    exact = rows("v4", page_rows=2)
    source, target = bind(exact, 1500), bind(layout, 1500, seed=1)
    here, there = list(range(1500)), list(range(1500))
    if scattered:
        Random(1).shuffle(here)
        Random(2).shuffle(there)
    guard = stored(target)
    plan = copy_pages(source, target, source_pages=here, target_pages=there)
    assert len(plan.copies) == 1
    assert plan.copies[0].is_strided is not scattered
    assert torch.equal(target.pages[there], source.pages[here])
    after = stored(target)
    for page in range(1500):
        tail = slice(page * 1728 + 1168, (page + 1) * 1728)
        assert after[tail] == guard[tail]


def test_bf16_pools() -> None:
    layout = rows("mla_bf16", page_rows=4, dtype="bfloat16")
    source = PageView.from_tensor(torch.randn(3, 4, 576).to(torch.bfloat16), layout)
    target = PageView.from_tensor(
        torch.zeros(12, 576, dtype=torch.bfloat16),
        rows("mla_bf16", page_rows=12, dtype="bfloat16", kind="token_granular"),
    )
    copy_pages(source, target)
    assert torch.equal(source.pages.reshape(-1), target.pages.reshape(-1))


# The plan is the dry run ----------------------------------------------------------------------------------------------


def test_a_plan_reads_numbers_only() -> None:
    """Pools of hundreds of gigabytes: one strided copy each way."""
    source = Placement.from_layout(rows("v4", page_rows=64), num_pages=1 << 23)
    target = Placement.from_layout(
        rows("v4", page_rows=64, policy="packed", page_stride_bytes=1002240), num_pages=1 << 23, offset_bytes=181440
    )
    plan = plan_pages(source, target)
    assert len(plan.copies) == 1
    assert plan.total_bytes == (1 << 23) * 37376
    assert next(plan.segments()) == (0, 181440, 37376)


def test_segments_of_a_plan() -> None:
    source = Placement.from_layout(rows("v4", page_rows=128), num_pages=4)
    target = Placement.from_layout(rows("v4", page_rows=64, policy="aligned", alignment=576), num_pages=8)
    plan = plan_pages(source, target, source_pages=[3], target_pages=[6, 1])
    start = 3 * 74752
    assert sorted(plan.segments()) == [
        (start, 6 * 37440, 36864),
        (start + 36864, 37440, 36864),
        (start + 73728, 6 * 37440 + 36864, 512),
        (start + 73728 + 512, 37440 + 36864, 512),
    ]
    assert list(plan.source_spans) == [(start, 74752)]
    assert list(plan.target_spans) == [(37440, 37376), (6 * 37440, 37376)]


def test_pages_that_touch_on_both_sides_are_one_copy() -> None:
    exact = Placement.from_layout(rows("v4", page_rows=64), num_pages=10)
    assert list(plan_pages(exact, exact, source_pages=range(3), target_pages=range(5, 8)).segments()) == [
        (0, 5 * 37376, 3 * 37376)
    ]


def test_plans_between_addresses() -> None:
    source, target = bind(rows("v4", page_rows=4), 3), bind(rows("v4", page_rows=4), 3, offset=8)
    plan = plan_pages(Placement.from_view(source), Placement.from_view(target), source_pages=[1], target_pages=[2])
    assert list(plan.segments()) == [(source.base_address + 2336, target.base_address + 2 * 2336, 2336)]


def test_an_empty_copy() -> None:
    source, target = bind(rows("v4", page_rows=4), 3), bind(rows("v4", page_rows=2), 3, seed=1)
    before = stored(target)
    assert copy_pages(source, target, source_pages=[], target_pages=[]).copies == ()
    assert copy_rows(source, target, source_slots=[], target_slots=[]).total_bytes == 0
    assert stored(target) == before


# Refusals -------------------------------------------------------------------------------------------------------------


def families() -> list[Record]:
    return [record for record in RECORDS.values() if not record.name.startswith("tiny") and record.planes == ("",)]


def test_only_records_of_the_same_bytes_are_copied() -> None:
    allowed = set()
    for source in families():
        for target in families():
            places = [Placement.from_layout(rows(record.name, page_rows=2), num_pages=2) for record in (source, target)]
            try:
                plan_pages(*places)
            except RecordMismatchError as error:
                assert error.field == "record"
                continue
            if source is not target:
                allowed.add((source.name, target.name))
    assert allowed == {
        ("v41", "v41_interleaved"),
        ("v41_interleaved", "v41"),
        ("v41_fp4", "v41_fp4_interleaved"),
        ("v41_fp4_interleaved", "v41_fp4"),
    }


def test_refusals_name_the_numbers() -> None:
    source = Placement.from_layout(rows("v4", page_rows=64), num_pages=4)
    with pytest.raises(
        RecordMismatchError,
        match=r"record-mismatch: record: got v41, expected the fields and scales of v4 \(rows of 528 and 584 bytes\)",
    ):
        plan_pages(source, Placement.from_layout(rows("v41", page_rows=64), num_pages=4))
    with pytest.raises(TokensPerRowError, match="tokens_per_row: got 128, expected 1"):
        plan_pages(source, Placement.from_layout(rows("v4", page_rows=64, tokens_per_row=128), num_pages=4))
    small = Placement.from_layout(rows("v4", page_rows=16), num_pages=16)
    with pytest.raises(
        PageCountError,
        match=r"target_pages: got 3 pages of 16 rows, expected 64 rows \(the source's 1 pages of 64\)",
    ):
        plan_pages(source, small, source_pages=[0], target_pages=[0, 1, 2])
    with pytest.raises(SlotError, match="source_pages: got 4, expected 0 <= number < 4"):
        plan_pages(source, source, source_pages=[4], target_pages=[0])
    with pytest.raises(SlotError, match="target_pages: got -1, expected 0 <= number < 4"):
        plan_pages(source, source, source_pages=[0], target_pages=[-1])
    with pytest.raises(SlotError, match="target_pages: got 2 twice, expected each target once"):
        plan_pages(source, source, source_pages=[0, 1], target_pages=[2, 2])
    with pytest.raises(SlotError, match="target_slots: got 256, expected 0 <= number < 256"):
        plan_rows(source, source, source_slots=[0], target_slots=[256])
    with pytest.raises(PageCountError, match=r"target_slots: got 1, expected 2 \(source_slots\)"):
        plan_rows(source, source, source_slots=[0, 1], target_slots=[2])
    values, scales = (
        Placement.from_layout(rows("mla_fp4", page_rows=4, plane=p), num_pages=2) for p in ("values", "scales")
    )
    with pytest.raises(PlaneError, match="plane: got scales, expected values"):
        plan_pages(values, scales)


def test_a_source_page_may_be_copied_twice() -> None:
    source, target = bind(rows("v4", page_rows=4), 3), bind(rows("v4", page_rows=4), 3, seed=1)
    copy_pages(source, target, source_pages=[1, 1], target_pages=[0, 2])
    assert torch.equal(target.pages[0], source.pages[1])
    assert torch.equal(target.pages[2], source.pages[1])


def test_copies_within_a_pool() -> None:
    pool = bind(rows("v4", page_rows=4, policy="aligned", alignment=576), 8)
    expected = pool.pages[[1, 3]].clone()
    copy_pages(pool, pool, source_pages=[1, 3], target_pages=[0, 7])
    assert torch.equal(pool.pages[[0, 7]], expected)
    for target in ([2, 1], [3, 2], [1, 3]):
        with pytest.raises(
            SpanError, match=r"target_pages: got 2336 bytes at 0x\w+ that are read too, expected pages that"
        ):
            copy_pages(pool, pool, source_pages=[1, 3], target_pages=target)


def test_layers_of_one_slab() -> None:
    slab = torch.randint(0, 256, (4 * 9216,), dtype=torch.uint8)
    layout = rows("v4", page_rows=4, policy="packed", page_stride_bytes=9216)
    one, two = (PageView.from_tensor(slab.as_strided((4, 2336), (9216, 1), offset), layout) for offset in (0, 2336))
    copy_pages(one, two)
    assert torch.equal(one.pages, two.pages)
    other = PageView.from_tensor(slab.as_strided((4, 2336), (9216, 1), 2334), layout)
    with pytest.raises(SpanError, match="got 2 bytes at"):
        copy_pages(one, other)


def test_two_storages_on_one_memory() -> None:
    pool = bind(rows("v4", page_rows=4), 4)
    alias = torch.from_numpy(pool.pages.as_strided((pool.storage_bytes,), (1,), 0).numpy())
    other = PageView.from_tensor(alias[: 4 * 2336].view(4, 2336), rows("v4", page_rows=4))
    assert other.pages.untyped_storage() is not pool.pages.untyped_storage()
    with pytest.raises(SpanError, match="read too"):
        copy_pages(pool, other, source_pages=[0], target_pages=[0])
    copy_pages(pool, other, source_pages=[0], target_pages=[1])
    assert torch.equal(pool.pages[0], pool.pages[1])


def test_stale_views() -> None:
    source, target = bind(rows("v4", page_rows=4), 3), bind(rows("v4", page_rows=4), 3)
    source.pages.untyped_storage().resize_(0)
    with pytest.raises(StaleViewError, match="got freed"):
        copy_pages(source, target)
    with pytest.raises(StaleViewError, match="got freed"):
        copy_pages(target, source)


def test_meta_pools_plan_and_move_nothing() -> None:
    layout = rows("v4", page_rows=64)
    source = PageView.from_tensor(torch.empty(100, 64, 584, dtype=torch.uint8, device="meta"), layout)
    target = PageView.from_tensor(torch.empty(100, 64, 584, dtype=torch.uint8, device="meta"), layout)
    assert copy_pages(source, target, source_pages=[3, 1], target_pages=[0, 9]).total_bytes == 2 * 37376
