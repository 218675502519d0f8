"""Spans of pages, rows and whole blocks: which bytes, joined where they touch, refused where they are not one's own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbridge import PageLayout, PageView
from kvbridge.errors import KindError, PageCountError, SlotError, SpanError, StaleViewError
from kvbridge.layout import Padding
from kvbridge.runs import Span, SpanRun, Spans, as_numbers, join_spans, progressions
from kvbridge.spans import Operation, Placement

EXACT = PageLayout.for_rows("v4", page_rows=64, num_pages=100)
ALIGNED = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576, num_pages=100)
PACKED = PageLayout.for_rows(
    "v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=149760, num_pages=100
)


def pages(layout: PageLayout, ids: object, operation: Operation = Operation.READ, **place: int) -> list[Span]:
    return list(Placement.from_layout(layout, **place).pages(ids, operation=operation))  # type: ignore[arg-type]


# Runs -----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=25))
def test_joined_spans_are_the_same_bytes_in_the_same_order(spans: list[tuple[int, int]]) -> None:
    joined = join_spans(spans)
    expected: list[Span] = []
    for start, length in spans:
        if not length:
            continue
        if expected and sum(expected[-1]) == start:
            expected[-1] = Span(expected[-1].start, expected[-1].length + length)
        else:
            expected.append(Span(start, length))
    assert list(joined) == expected
    assert (len(joined), joined.total_bytes) == (len(expected), sum(length for _, length in expected))
    assert (joined.first, joined.end) == (
        min((start for start, _ in expected), default=0),
        max((sum(span) for span in expected), default=0),
    )
    bytes_touched = sorted({byte for start, length in spans for byte in range(start, start + length)})
    ordered = list(joined.ordered())
    assert [byte for start, length in ordered for byte in range(start, start + length)] == bytes_touched
    assert all(first.start + first.length < second.start for first, second in pairwise(ordered))


@given(st.lists(st.integers(0, 30), max_size=30))
def test_progressions_give_the_numbers_back(numbers: list[int]) -> None:
    parts = list(progressions(numbers))
    assert [first + step * place for first, step, count in parts for place in range(count)] == numbers
    assert all(step > 0 and count > 0 for _, step, count in parts)


def test_equal_steps_are_one_run() -> None:
    assert join_spans((10 * number, 4) for number in range(1000)).runs == (SpanRun(0, 4, 10, 1000),)
    assert join_spans((4 * number, 4) for number in range(1000)).runs == (SpanRun(0, 4000),)
    assert join_spans([(0, 4), (10, 4), (20, 4), (24, 4)]).runs == (SpanRun(0, 4, 10, 2), SpanRun(20, 8))


def test_a_joined_span_may_continue_an_earlier_run() -> None:
    assert join_spans([(0, 8), (20, 4), (24, 4), (40, 8)]).runs == (SpanRun(0, 8, 20, 3),)


@given(
    st.tuples(st.integers(0, 60), st.integers(1, 6), st.integers(0, 8), st.integers(1, 6)),
    st.tuples(st.integers(0, 60), st.integers(1, 6), st.integers(0, 8), st.integers(1, 6)),
)
def test_overlap_of_two_runs(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> None:
    runs = []
    for start, length, gap, count in (first, second):
        runs.append(SpanRun(start, length, length + gap if count > 1 else 0, count))
    marked = [{byte for start, length in run for byte in range(start, start + length)} for run in runs]
    assert runs[0].overlaps(runs[1]) is bool(marked[0] & marked[1])
    assert runs[1].overlaps(runs[0]) is bool(marked[0] & marked[1])


def test_numbers_from_tensors() -> None:
    assert as_numbers(torch.tensor([5, 6, 7])) == [5, 6, 7]
    assert as_numbers(range(3)) == range(3)
    assert as_numbers(number for number in (3, 1)) == [3, 1]
    with pytest.raises(TypeError):
        as_numbers([1.5])


# One layer ------------------------------------------------------------------------------------------------------------


def test_neighbouring_exact_pages_are_one_span() -> None:
    """Case 15, tight side."""
    assert pages(EXACT, [5, 6, 7]) == [(5 * 37376, 112128)]
    assert pages(EXACT, range(5, 8)) == [(5 * 37376, 112128)]
    assert pages(EXACT, [5, 7, 8]) == [(5 * 37376, 37376), (7 * 37376, 2 * 37376)]


def test_packed_pages_are_never_joined() -> None:
    """Case 15, packed side."""
    assert pages(PACKED, [5, 6, 7]) == [(number * 149760, 37376) for number in (5, 6, 7)]
    assert pages(PACKED, [5, 6, 7], Operation.CLEAR) == [(number * 149760, 37440) for number in (5, 6, 7)]


def test_aligned_pages_are_joined_by_a_clear_only() -> None:
    assert pages(ALIGNED, [5, 6, 7]) == [(number * 37440, 37376) for number in (5, 6, 7)]
    assert pages(ALIGNED, [5, 6, 7], Operation.WRITE) == pages(ALIGNED, [5, 6, 7])
    assert pages(ALIGNED, [5, 6, 7], Operation.CLEAR) == [(5 * 37440, 3 * 37440)]


def test_a_clear_ends_with_the_storage() -> None:
    size = 99 * 37440 + 37376 + 10
    assert pages(ALIGNED, range(98, 100), Operation.CLEAR, storage_bytes=size) == [(98 * 37440, 37440 + 37386)]
    assert pages(ALIGNED, [99], Operation.CLEAR, storage_bytes=size) == [(99 * 37440, 37386)]


def test_the_order_of_the_ids_is_kept() -> None:
    assert [start // 37440 for start, _ in pages(ALIGNED, [9, 3, 3, 4])] == [9, 3, 3, 4]
    assert [start // 37440 for start, _ in pages(ALIGNED, range(9, 3, -2))] == [9, 7, 5]


def test_many_pages_are_few_runs() -> None:
    layout = PACKED.model_copy(update={"num_pages": 1 << 40})
    place = Placement.from_layout(layout)
    spans = place.pages(range(1 << 40))
    assert spans.runs == (SpanRun(0, 37376, 149760, 1 << 40),)
    assert len(spans) == 1 << 40
    assert place.pages(range(0, 1 << 40, 2)).runs == (SpanRun(0, 37376, 299520, 1 << 39),)
    place.check(spans)
    assert place.rows(range(64 * 1000)).runs == (SpanRun(0, 37376, 149760, 1000),)


def test_rows_of_a_split_page_are_data_and_scales() -> None:
    place = Placement.from_layout(ALIGNED)
    assert list(place.rows([65])) == [(37440 + 576, 576), (37440 + 36864 + 8, 8)]
    assert list(place.rows(range(2, 5))) == [(2 * 576, 3 * 576), (36864 + 2 * 8, 3 * 8)]
    # The last row of a page, the next page, and a first row: the scales touch nothing behind a tail pad.
    assert list(place.rows(range(63, 129))) == [
        (63 * 576, 576),
        (36864 + 63 * 8, 8),
        (37440, 37376),
        (2 * 37440, 576),
        (2 * 37440 + 36864, 8),
    ]


def test_rows_of_an_interleaved_page_are_one_span() -> None:
    layout = PageLayout.for_rows("dsa", page_rows=64, num_pages=4)
    assert list(Placement.from_layout(layout).rows([3, 4, 9])) == [(3 * 656, 2 * 656), (9 * 656, 656)]
    assert list(Placement.from_layout(layout).rows(range(60, 70))) == [(60 * 656, 10 * 656)]


@pytest.mark.parametrize("number", [-1, 100, 1 << 40])
def test_ids_outside_the_pool(number: int) -> None:
    place = Placement.from_layout(PACKED, name="layer 3")
    with pytest.raises(SlotError, match=rf"pages: got {number}, expected 0 <= number < 100 \(layer layer 3"):
        place.pages([5, number])
    with pytest.raises(SlotError, match=f"slots: got {number * 64}, expected 0 <= number < 6400"):
        place.rows([number * 64])


def test_layouts_that_have_no_place() -> None:
    with pytest.raises(PageCountError, match="num_pages: got None"):
        Placement.from_layout(PageLayout.for_rows("v4", page_rows=64))
    index_only = PageLayout(
        kind="index_only", page_rows=64, payload_bytes=0, page_stride_bytes=0, padding=Padding(policy="exact")
    )
    with pytest.raises(KindError, match="got index_only, expected a pool with bytes"):
        Placement.from_layout(index_only, num_pages=3)
    with pytest.raises(SpanError, match=r"pages: got \[10, 14863626\), expected inside the storage \[0, 14863625\)"):
        Placement.from_layout(PACKED, offset_bytes=10, storage_bytes=14863625)


def test_addresses_of_a_view() -> None:
    storage = torch.zeros(3 * 149760, dtype=torch.uint8)
    layout = PACKED.model_copy(update={"num_pages": 3})
    bound = PageView.from_tensor(storage.as_strided((3, 64, 584), (149760, 584, 1), 37440), layout)
    base = storage.data_ptr()
    place = Placement.from_view(bound)
    assert list(place.pages([2])) == [(base + 37440 + 2 * 149760, 37376)]
    assert list(place.rows([1])) == list(bound.row_addresses(1))
    assert list(Placement.from_view(bound, addresses=False).pages([2])) == [(37440 + 2 * 149760, 37376)]
    with pytest.raises(SpanError, match="inside the storage"):
        place.check([(base + 3 * 149760 - 1, 2)])
    for start, length in place.pages(operation=Operation.CLEAR):
        storage[start - base : start - base + length] = 255
    assert int((storage == 255).sum()) == 3 * 37440
    assert bool((bound.pages == 255).all())
    storage.untyped_storage().resize_(0)
    with pytest.raises(StaleViewError):
        Placement.from_view(bound)


def test_meta_views_have_offsets() -> None:
    tensor = torch.empty(7166 * 1039680, dtype=torch.uint8, device="meta")
    layout = PageLayout.for_rows("v4", page_rows=64, policy="packed", page_stride_bytes=1039680)
    bound = PageView.from_tensor(tensor.as_strided((7166, 64, 584), (1039680, 584, 1), 181440), layout)
    spans = Placement.from_view(bound).pages()
    assert spans.runs == (SpanRun(181440, 37376, 1039680, 7166),)
    assert spans.end == 7449526016


# Plans of others ------------------------------------------------------------------------------------------------------


@pytest.fixture
def layers() -> list[Placement]:
    """Case 6: four layers in one slab."""
    return [
        Placement.from_layout(PACKED, offset_bytes=offset, storage_bytes=14976000, name=name)
        for name, offset in (("A", 0), ("B", 37440), ("C", 74880), ("D", 112320))
    ]


def test_own_plans_are_accepted(layers: list[Placement]) -> None:
    for layer in layers:
        for operation in Operation:
            plan = layer.pages([0, 98, 99], operation=operation)
            layer.check(plan, operation=operation, pages=[0, 98, 99], neighbours=layers)
            layer.check(list(plan), operation=operation)


@pytest.mark.parametrize(
    ("plan", "arguments", "message"),
    [
        ((112320 + 99 * 149760, 149760), {}, r"plan: got \[14938560, 15088320\), expected inside the storage"),
        ((112320 + 99 * 149760, 149760), {}, "112320 bytes beyond; layer D"),
        (
            (112320 + 98 * 149760, 149760),
            {},
            r"plan: got \[14788800, 14938560\), expected inside page 98, \[14788800, 14826240\) .*touches A, B, C",
        ),
        ((112320, 37441), {}, r"expected inside page 0, \[112320, 149760\).*touches A\)"),
        ((112320, 37377), {"operation": Operation.WRITE}, r"expected inside page 0, \[112320, 149696\)"),
        ((112319, 2), {}, r"expected inside page -1"),
        ((74880, 37376), {}, "touches C"),
        ((-1, 4), {}, r"plan: got \[-1, 3\), expected inside the storage \[0, 14976000\)"),
        ((112320, 0), {}, "length: got 0, expected at least 1"),
        ((112320, -5), {}, "length: got -5, expected at least 1"),
        ((112320 + 5 * 149760, 10), {"pages": [4, 6]}, "plan: got page 5, expected a page of the caller's"),
    ],
)
def test_foreign_plans_are_refused(
    layers: list[Placement], plan: tuple[int, int], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(SpanError, match=message):
        layers[3].check([plan], neighbours=layers[:3], **arguments)  # type: ignore[arg-type]


def test_a_run_is_refused_where_its_last_span_is(layers: list[Placement]) -> None:
    good = SpanRun(112320, 37376, 149760, 100)
    layers[3].check(Spans((good,)))
    with pytest.raises(SpanError, match="inside the storage"):
        layers[3].check(Spans((SpanRun(112320, 37376, 149760, 101),)))
    with pytest.raises(SpanError, match="inside page 65"):  # each span one byte further than the last, past the pad
        layers[3].check(Spans((SpanRun(112320, 37376, 149761, 100),)))


def test_a_clear_over_joined_pages_is_accepted() -> None:
    place = Placement.from_layout(ALIGNED)
    place.check([(0, 100 * 37440)])
    with pytest.raises(SpanError):
        place.check([(0, 100 * 37440)], operation=Operation.WRITE)
    with pytest.raises(SpanError, match="expected inside page 0"):
        place.check([(0, 100 * 37440 + 1)])
