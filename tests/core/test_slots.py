"""Slots and lengths: vectorised checks against loops, the cases' numbers, and no work under capture."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.consumers import consumer_names, fits, get_consumer
from kvbridge.contract import IndexUnitError, Sentinel
from kvbridge.errors import SlotError
from kvbridge.layout import PageLayout
from kvbridge.slot_tables import (
    clamp_lengths,
    effective_counts,
    live_lanes,
    normalise_slots,
    remap_slots,
    verify_lengths,
)
from kvbridge.slots import check_slots, check_table_stride, consumer_findings

V4 = PageLayout.for_rows("v4", page_rows=64)
DTYPES = [torch.int32, torch.int64]


def codes(report):
    return {finding.code for finding in report.findings}


def table(*rows, dtype=torch.int64):
    return torch.tensor(rows, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [1, 4, 8])
def test_case_30_capacity_is_the_first_slot_out_of_bounds(pages, dtype):
    capacity = pages * 64
    assert check_slots(table([0, capacity - 1, -1], dtype=dtype), capacity_rows=capacity).findings == ()
    (found,) = check_slots(table([0, capacity, -1], dtype=dtype), capacity_rows=capacity).findings
    assert (found.code, found.field, found.got) == ("slot-bounds", "slots[0][1]", capacity)
    assert found.message == f"slots[0][1]: got {capacity}, expected negative, or below {capacity} (row 0)"


def test_case_30_values_past_the_length_and_rows_of_length_zero_are_ignored():
    slots = table([3, 9000, 9000], [9000, 9000, 9000], [1, 2, 3])
    lengths = torch.tensor([1, 0, 3])
    assert check_slots(slots, lengths, capacity_rows=256).findings == ()
    assert codes(check_slots(slots, torch.tensor([2, 0, 3]), capacity_rows=256)) == {"slot-bounds"}


@pytest.mark.parametrize("negative", [-1, -2, -(2**31), -(2**63)])
def test_case_30_zero_capacity_accepts_negatives_only(negative):
    assert check_slots(table([negative, -1]), capacity_rows=0).findings == ()
    (found,) = check_slots(table([negative, 0]), capacity_rows=0).findings
    assert found.message == "slots[0][1]: got 0, expected negative: the pool has no rows (row 0)"


@pytest.mark.parametrize("slot", [2**31, 2**32 + 5, 2**63 - 1])
def test_large_slots_are_compared_before_narrowing(slot):
    """2**32 + 5 is slot 5 to whoever narrows first."""
    assert codes(check_slots(table([slot]), capacity_rows=256)) == {"slot-bounds"}


@pytest.mark.parametrize("capacity", [2**31, 2**31 - 1, 2**40])
def test_capacities_beyond_int32_never_overflow_the_comparison(capacity):
    slots = table([2**31 - 1, -1, 0], dtype=torch.int32)
    wanted = {"slot-bounds"} if capacity == 2**31 - 1 else set()
    assert codes(check_slots(slots, capacity_rows=capacity)) == wanted
    assert normalise_slots(slots, capacity_rows=capacity).tolist() == [[-1 if wanted else 2**31 - 1, -1, 0]]


@pytest.mark.parametrize("value", [-2, -3, -(2**31)])
def test_some_readers_know_only_minus_one(value):
    slots = table([1, value, -1])
    assert check_slots(slots, capacity_rows=8).findings == ()
    (found,) = check_slots(slots, capacity_rows=8, sentinel=Sentinel.MINUS_ONE).findings
    assert (found.code, found.got, found.expected) == ("slot-bounds", value, "-1, or below 8")


@pytest.mark.parametrize("row", [0, 1, 3])
def test_case_33_a_raw_negative_length_names_its_row(row):
    lengths = torch.tensor([2, 2, 2, 2])
    lengths[row] = -1
    (found,) = check_slots(torch.zeros(4, 2, dtype=torch.int64), lengths, capacity_rows=8).findings
    assert (found.code, found.field, found.got) == ("length-negative", f"lengths[{row}]", -1)
    assert "4,294,967,295" in found.consequence


@pytest.mark.parametrize(
    ("sequences", "queries", "wanted"),
    [
        ([7, 0], 2, [6, 7, 0, 0]),
        ([7, 1], 2, [6, 7, 0, 1]),
        ([3], 5, [0, 0, 1, 2, 3]),
        ([5, 9, 0], 1, [5, 9, 0]),
        ([], 3, []),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_33_verify_lengths_are_clamped(sequences, queries, wanted, dtype):
    lengths = verify_lengths(torch.tensor(sequences, dtype=dtype), queries=queries)
    assert lengths.tolist() == wanted and lengths.dtype is dtype


def test_clamp_lengths():
    assert clamp_lengths(torch.tensor([-5, -1, 0, 3, 99])).tolist() == [0, 0, 0, 3, 99]
    assert clamp_lengths(torch.tensor([-5, 3, 99]), width=64).tolist() == [0, 3, 64]


@pytest.mark.parametrize(("length", "bad"), [(3, False), (4, True), (2**31, True)])
def test_lengths_beyond_the_width(length, bad):
    report = check_slots(table([0, 0, 0]), torch.tensor([length]), capacity_rows=8)
    assert codes(report) == ({"length-width"} if bad else set())


def test_case_35_a_hole_in_the_live_prefix():
    slots, lengths = table([-1, -1], [0, -1]), torch.tensor([2, 2])
    assert check_slots(slots, lengths, capacity_rows=8).findings == ()
    assert effective_counts(slots, lengths, capacity_rows=8).tolist() == [0, 1]
    (found,) = check_slots(slots, lengths, capacity_rows=8, dense_prefix=True).findings
    assert (found.code, found.field, found.got) == ("slot-hole", "slots[0][0]", -1)
    assert "3 such lanes" in found.message


@pytest.mark.parametrize("lengths", [[0, 1], [0, 0]])
def test_case_35_holes_behind_the_length_are_none(lengths):
    report = check_slots(table([-1, -1], [0, -1]), torch.tensor(lengths), capacity_rows=8, dense_prefix=True)
    assert report.findings == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_31_lanes_beyond_the_length_are_set_to_minus_one(dtype):
    slots, lengths = table([3, 7, 9000, 9000], dtype=dtype), torch.tensor([2])
    clean = normalise_slots(slots, lengths)
    assert clean.tolist() == [[3, 7, -1, -1]] and clean.dtype is dtype
    assert slots.tolist() == [[3, 7, 9000, 9000]]
    assert check_slots(slots, lengths, capacity_rows=256).findings == ()
    (found,) = check_slots(slots, lengths, capacity_rows=256, bounds_lanes=False).findings
    assert (found.code, found.field, found.got) == ("lanes-unbounded", "slots[0][2]", 9000)
    assert check_slots(clean, lengths, capacity_rows=256, bounds_lanes=False).findings == ()


@pytest.mark.parametrize(("slot", "bad"), [(0, True), (63, True), (64, False), (-1, False)])
def test_reserved_pages_hold_no_live_rows(slot, bad):
    report = check_slots(table([slot]), capacity_rows=256, page_rows=64, reserved_pages=1)
    assert codes(report) == ({"slot-reserved"} if bad else set())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.float32])
def test_narrow_dtypes_are_refused(dtype):
    (found,) = check_slots(torch.zeros(1, 4, dtype=dtype), capacity_rows=8).findings
    assert (found.code, found.expected) == ("slot-dtype", "int32 or int64")
    (found,) = check_slots(table([0]), torch.zeros(1, dtype=dtype), capacity_rows=8).findings
    assert found.field == "lengths.dtype"


@pytest.mark.parametrize("shape", [(4,), (2, 2, 4), (1, 1, 1, 4)])
def test_shapes_of_slots(shape):
    assert codes(check_slots(torch.zeros(shape, dtype=torch.int64), capacity_rows=8)) == {"slot-shape"}


@pytest.mark.parametrize("name", consumer_names())
@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 4), (1, 1, 1, 4)])
def test_consumers_refuse_shapes_they_cannot_read(shape, name):
    slots = torch.zeros(shape, dtype=getattr(torch, get_consumer(name).slot_dtypes[0]))
    assert "slot-shape" in [finding.code for finding in fits(V4, name, slots=slots).findings]


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_shapes_of_lengths(shape):
    lengths = torch.zeros(shape, dtype=torch.int64)
    assert codes(check_slots(torch.zeros(2, 4, dtype=torch.int64), lengths, capacity_rows=8)) == {"slot-shape"}


def test_an_axis_of_size_one_in_the_middle_is_taken():
    slots = table([3, 300]).unsqueeze(1)
    assert codes(check_slots(slots, capacity_rows=256)) == {"slot-bounds"}
    assert normalise_slots(slots, capacity_rows=256).tolist() == [[3, -1]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_tables(shape):
    lengths = torch.zeros(shape[0], dtype=torch.int64)
    assert check_slots(torch.zeros(shape, dtype=torch.int64), lengths, capacity_rows=8).findings == ()


def test_nothing_is_looked_at_under_capture(monkeypatch):
    """The guard asks the CUDA stream; the answer is given here, the tensor's device with it."""

    class OnDevice:
        is_meta, is_cuda = False, True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    report = check_slots(OnDevice(), capacity_rows=1)
    assert report.skipped and report.findings == ()


def test_meta_tensors_hold_nothing_to_look_at():
    report = check_slots(torch.zeros(2, 2, dtype=torch.int64, device="meta"), capacity_rows=1)
    assert report.skipped


@pytest.mark.parametrize("width", [1, 32, 63])
def test_an_index_table_that_is_a_slice_keeps_the_buffers_row_stride(width):
    """vLLM's C128 table: W slots of a buffer as wide as the longest sequence."""
    buffer = torch.zeros(5, 64, dtype=torch.int32)
    narrow = buffer[:, :width]
    (found,) = check_table_stride(narrow)
    assert (found.code, found.field, found.got, found.expected) == ("table-stride", "slots.stride(0)", 64, width)
    assert check_table_stride(narrow, row_stride=64) == []
    assert check_table_stride(narrow.contiguous()) == []
    assert check_table_stride(narrow[:1]) == []


def test_an_index_table_must_be_dense_inside_a_row():
    (found,) = check_table_stride(torch.zeros(1, 64, dtype=torch.int32)[:, ::2])
    assert (found.field, found.got) == ("slots.stride(1)", 2)


@pytest.mark.parametrize("row_stride", [4, 9])
def test_checks_honour_the_row_stride(row_stride):
    buffer = torch.full((3, row_stride), 9999)
    buffer[:, :4] = torch.arange(12).reshape(3, 4)
    assert check_slots(buffer[:, :4], capacity_rows=12).findings == ()
    (found,) = check_slots(buffer[:, :4], capacity_rows=11).findings
    assert found.field == "slots[2][3]"


@pytest.mark.parametrize(
    ("name", "lane", "wanted"),
    [
        ("kvbridge", 300, {("slot-bounds", "warning")}),
        ("vllm-cpu", 300, {("slot-bounds", "warning")}),
        ("flashmla-sm100", 300, {("slot-bounds", "error")}),
        ("flashmla-sm100", -2, {("slot-bounds", "error")}),
        ("flashinfer-sm120", -2, set()),
        ("b12x", -1, {("slot-hole", "error")}),
    ],
)
def test_consumers_rules_on_slots(name, lane, wanted):
    consumer = get_consumer(name)
    dtype = getattr(torch, consumer.slot_dtypes[0])
    found = consumer_findings(
        table([0, lane, 1], dtype=dtype), torch.tensor([3]), layout=V4, consumer=consumer, pages=4
    )
    assert {(entry.code, entry.severity.value) for entry in found} == wanted
    assert all(entry.consumer == name for entry in found)


def test_consumers_rules_on_dtypes_tables_and_lanes():
    slots = torch.zeros(2, 8, dtype=torch.int32)[:, :4]
    cpu = get_consumer("vllm-cpu")
    found = consumer_findings(slots, torch.tensor([2, 4]), layout=V4, consumer=cpu, pages=4)
    assert {entry.code for entry in found} == {"slot-dtype", "table-stride", "lanes-unbounded"}
    assert consumer_findings(slots, torch.tensor([2, 4]), layout=V4, consumer=get_consumer("kvbridge"), pages=4) == []


@pytest.mark.parametrize(("record", "wanted"), [("v4", []), ("dsa", ["lanes-unbounded"])])
def test_lengths_that_a_kernel_does_not_take_with_a_record_bound_nothing(record, wanted):
    """FlashMLA on sm_90 honours topk_length for V4 only."""
    slots, lengths = table([0, 1, 2], dtype=torch.int32), torch.tensor([2])
    layout, consumer = PageLayout.for_rows(record, page_rows=64), get_consumer("flashmla-sm90")
    found = consumer_findings(slots, lengths, layout=layout, consumer=consumer, pages=4)
    assert [entry.code for entry in found] == wanted


def test_consumers_take_any_slot_where_the_page_count_is_open():
    slots = table([2**40])
    assert consumer_findings(slots, None, layout=V4, consumer=get_consumer("kvbridge"), pages=None) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_3_remapped_slots(dtype):
    layout = PageLayout.for_rows("uniform_fp8", page_rows=4, policy="packed", page_stride_bytes=8192, num_pages=3)
    slots = torch.tensor([0, 3, 4, 7, 8, -1], dtype=dtype)
    assert remap_slots(slots, layout).tolist() == [0, 3, 16, 19, 32, -1]
    assert remap_slots(slots, layout).dtype is dtype


@pytest.mark.parametrize("stride", [8200, 2049, 4095])
def test_case_3_strides_of_no_whole_number_of_rows_cannot_be_remapped(stride):
    layout = PageLayout.for_rows("uniform_fp8", page_rows=4, policy="packed", page_stride_bytes=stride, num_pages=3)
    with pytest.raises(IndexUnitError, match=f"page_stride_bytes: got {stride}, expected a multiple of 512"):
        remap_slots(torch.tensor([0]), layout)


def test_case_3_split_pages_cannot_be_remapped():
    with pytest.raises(IndexUnitError, match="record: got v4"):
        remap_slots(torch.tensor([0]), V4)


def test_remapped_slots_must_fit_their_dtype():
    layout = PageLayout.for_rows(
        "uniform_fp8", page_rows=4, policy="packed", page_stride_bytes=512 * 2**20, num_pages=2**11 + 1
    )
    with pytest.raises(SlotError, match="expected int64"):
        remap_slots(torch.tensor([0], dtype=torch.int32), layout)
    assert remap_slots(torch.tensor([2**11 * 4]), layout).tolist() == [2**31]


SLOTS = st.one_of(st.integers(-3, 20), st.sampled_from([2**31 - 1, -(2**31)]))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_checks_agree_with_a_loop(data):
    queries, width = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    rows = data.draw(st.lists(st.lists(SLOTS, min_size=width, max_size=width), min_size=queries, max_size=queries))
    lengths = data.draw(st.none() | st.lists(st.integers(-2, width + 2), min_size=queries, max_size=queries))
    capacity, reserved = data.draw(st.integers(0, 18)), data.draw(st.integers(0, 3))
    minus_one, dense, bounds = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    dtype = data.draw(st.sampled_from(DTYPES))
    slots = torch.tensor(rows, dtype=dtype).reshape(queries, width)
    tensor = None if lengths is None else torch.tensor(lengths, dtype=dtype).reshape(queries)
    wanted: dict[str, tuple[int, int]] = {}
    counts, normal = [], []
    for q, row in enumerate(rows):
        length = width if lengths is None else lengths[q]
        for lane, slot in enumerate(row):
            faults = []
            if lane < length:
                beyond = slot >= capacity or (minus_one and slot < -1)
                faults = [("slot-bounds", beyond), ("slot-hole", dense and slot < 0)]
                faults += [("slot-reserved", 0 <= slot < reserved * 4)]
            elif lengths is not None:
                faults = [("lanes-unbounded", not bounds and slot >= 0)]
            for code in (code for code, bad in faults if bad):
                wanted.setdefault(code, (q, lane))
        alive = [slot if lane < length and 0 <= slot < capacity else -1 for lane, slot in enumerate(row)]
        normal.append(alive)
        counts.append(sum(slot >= 0 for slot in alive))
    report = check_slots(
        slots,
        tensor,
        capacity_rows=capacity,
        page_rows=4,
        reserved_pages=reserved,
        sentinel=Sentinel.MINUS_ONE if minus_one else Sentinel.NEGATIVE,
        dense_prefix=dense,
        bounds_lanes=bounds,
    )
    fields = {entry.code: entry.field for entry in report.findings if entry.field.startswith("slots")}
    assert fields == {code: f"slots[{q}][{lane}]" for code, (q, lane) in wanted.items()}
    bad = [] if lengths is None else lengths
    wanted_lengths = {f"lengths[{n}]" for test in (lambda v: v < 0, lambda v: v > width) for n in _first(bad, test)}
    assert {entry.field for entry in report.findings if entry.field.startswith("lengths")} == wanted_lengths
    assert normalise_slots(slots, tensor, capacity_rows=capacity).tolist() == normal
    assert effective_counts(slots, tensor, capacity_rows=capacity).tolist() == counts
    assert live_lanes(slots, tensor).shape == slots.shape


def _first(values, test):
    return [n for n, value in enumerate(values) if test(value)][:1]
