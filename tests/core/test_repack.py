"""Repack: the same values in another layout, with guard bytes around every page that must not change."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from kvbridge import PageLayout, PageView
from kvbridge.copies import CopyPlan
from kvbridge.errors import (
    PlaneError,
)
from kvbridge.repack import copy_pages, copy_rows, plan_pages
from kvbridge.spans import Placement
from tests import oracle, strategies
from tests.pools import bind, stored

rows = PageLayout.for_rows


@pytest.fixture(autouse=True)
def _tiny_records() -> Iterator[None]:
    with strategies.tiny_records():
        yield


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


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread moves scattered pages through memoryviews, several gather them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


TARGETS = {
    "range": list(range(1500)),
    "shuffled": Random(2).sample(range(1500), 1500),
    "stretches": [*range(700, 800), *range(3, 500, 7), *range(40, 39, -1), *range(900, 940), *range(1400, 1200, -1)],
    "sparse": Random(3).sample(range(0, 1500, 3), 400),
}


@pytest.mark.parametrize("targets", list(TARGETS))
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize(
    ("source_layout", "target_layout"),
    [
        (rows("v4", page_rows=2), rows("v4", page_rows=2, policy="aligned", alignment=576)),
        (rows("v41", page_rows=2), rows("v41_interleaved", page_rows=2, policy="packed", page_stride_bytes=1600)),
        (
            rows("v41_fp4_interleaved", page_rows=1),
            rows("v41_fp4", page_rows=1, policy="packed", page_stride_bytes=300),
        ),
    ],
)
def test_many_pages(
    source_layout: PageLayout, target_layout: PageLayout, targets: str, ascending: bool, threads: int
) -> None:
    there = list(dict.fromkeys(TARGETS[targets]))
    here = Random(1).sample(range(1500), len(there))
    here = sorted(here) if ascending else here
    source, target = bind(source_layout, 1500, offset=6), bind(target_layout, 1500, offset=10, seed=1)
    guard = target.pages.as_strided((1500, target_layout.page_stride_bytes), (target_layout.page_stride_bytes, 1))
    before = guard.clone()
    copy_pages(source, target, source_pages=here, target_pages=there)
    for region in source_layout.regions:
        assert torch.equal(target.region(region.name)[there], source.region(region.name)[here])
    untouched = sorted(set(range(1500)) - set(there))
    assert torch.equal(guard[untouched], before[untouched])
    assert torch.equal(guard[:, target_layout.payload_bytes :], before[:, target_layout.payload_bytes :])


def test_equal_steps_are_one_strided_copy() -> None:
    source, target = bind(rows("v4", page_rows=2), 1500), bind(rows("v4", page_rows=2), 1500, seed=1)
    pages = list(range(100, 1500, 7))
    plan = copy_pages(source, target, source_pages=pages, target_pages=pages)
    assert len(plan.copies) == 1
    assert plan.copies[0].is_strided
    assert torch.equal(target.pages[pages], source.pages[pages])


def test_quarters_of_a_page_are_one_copy_a_block() -> None:
    large = Placement.from_layout(rows("v4", page_rows=256, policy="aligned", alignment=576), num_pages=100)
    small = Placement.from_layout(rows("v4", page_rows=64, policy="aligned", alignment=576), num_pages=400)
    for source, target in ((large, small), (small, large)):
        copies = plan_pages(source, target).copies
        assert [(copy.row_bytes, copy.rows, len(copy.sources)) for copy in copies] == [
            (36864, 4, 100),
            (512, 4, 100),
        ]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("kind", ["strided", "scattered", "rows"])
def test_pools_of_inference_mode(mode: bool, kind: str) -> None:
    """Engines allocate in inference mode; a transfer may run in it or not."""
    layout = rows("v41", page_rows=64)
    goal = rows("v41_interleaved", page_rows=64) if kind == "rows" else layout
    with torch.inference_mode():
        source, target = bind(layout, 64), bind(goal, 64, seed=1)
    plain = bind(goal, 64, seed=2)
    here = Random(1).sample(range(64), 64) if kind == "scattered" else list(range(64))
    with torch.inference_mode(mode):
        for pool in (target, plain):
            copy_pages(source, pool, source_pages=here, target_pages=range(64))
            assert torch.equal(pool.region("values"), source.region("values")[here])
    plain.pages[0] = 0  # still an ordinary tensor


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
