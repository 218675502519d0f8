"""Plans: the workspace bound over every call at or below the caps, launch tables, foreign reserves (cases 40, 42)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.kernels.errors import CapacityError, ValueRangeError, WorkspaceError
from kvbridge.kernels.plan import Caps, Mode, Plan, plan
from kvbridge.kernels.scratch import RowSplitScratch, check_decode_rows

MIB = 2**20


def make(**changes: object) -> Plan:
    fields = {
        "queries": 300,
        "heads": 64,
        "widths": (128, 2048),
        "records": ("v4", "v4"),
        "units": 132,
        "head_tile": 32,
    }
    return plan(Caps(**{**fields, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("units", [0, 82, 108, 132, 148, 188])
@pytest.mark.parametrize(("heads", "tile"), [(64, 32), (128, 32), (64, 64), (8, 8), (66, 16), (1, 16)])
def test_bound_holds_for_every_query_count_and_width(units: int, heads: int, tile: int) -> None:
    made = make(units=units, heads=heads, head_tile=tile, queries=300)
    needs = {
        (queries, width): made.call_workspace_bytes(queries, width)
        for queries in range(1, 301)
        for width in (0, 1, 31, 32, 33, 64, 128, 640, 2175, 2176)
    }
    assert max(needs.values()) == made.workspace_bytes
    assert made.call_workspace_bytes(300, 2176) == needs[300, 2176]


def test_bound_holds_for_every_width_of_a_small_plan() -> None:
    made = make(units=132, queries=140, widths=(97,), records=("v4",), heads=16, head_tile=16)
    assert max(made.call_workspace_bytes(q, w) for q in range(1, 141) for w in range(98)) == made.workspace_bytes


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(1, 128),
    st.lists(st.integers(0, 5000), min_size=1, max_size=3),
    st.tuples(st.integers(0, 200), st.sampled_from([8, 16, 32, 64])),
    st.data(),
)
def test_no_call_below_the_caps_needs_more(
    queries: int, heads: int, widths: list[int], machine: tuple[int, int], data: st.DataObject
) -> None:
    units, tile = machine
    made = make(
        queries=queries, heads=heads, widths=tuple(widths), records=("v41",) * len(widths), units=units, head_tile=tile
    )
    for _ in range(20):
        count = data.draw(st.integers(1, queries))
        width = data.draw(st.integers(0, sum(widths)))
        assert made.call_workspace_bytes(count, width) <= made.workspace_bytes
        made.check_workspace(made.workspace_bytes)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 128), st.integers(0, 5000), st.integers(0, 200))
def test_launch_table_is_the_function_and_has_no_hole(queries: int, heads: int, width: int, units: int) -> None:
    made = make(queries=queries, heads=heads, widths=(width,), records=("v4",), units=units)
    expected = 1
    for launch in made.launches:
        assert launch.first_query_count == expected
        for count in (launch.first_query_count, launch.last_query_count):
            assert made.splits(count, width) == launch.splits
            assert made.call_workspace_bytes(count, width) <= launch.workspace_bytes
        expected = launch.last_query_count + 1
    assert expected == queries + 1


def test_default_splits_follow_the_formula_and_stay_below_35_mb_on_132_units() -> None:
    made = make(queries=4096)
    for queries in (1, 2, 7, 33, 66, 131, 132, 133, 4096):
        assert made.splits(queries, 10**6) == max(1, 2 * 132 // (queries * 2))
    assert made.workspace_bytes <= 35e6
    assert made.call_workspace_bytes(133, 2176) == 0


def test_peak_is_not_at_the_most_queries_and_the_message_says_where() -> None:
    made = make(queries=2048)
    at_most_queries = made.call_workspace_bytes(2048, 2176)
    assert at_most_queries == 0 < made.workspace_bytes
    with pytest.raises(WorkspaceError) as raised:
        made.check_workspace(made.workspace_bytes - 1)
    peak = max(made.launches, key=lambda launch: launch.workspace_bytes)
    assert f"at least {made.workspace_bytes} (peak at {peak.last_query_count} queries" in str(raised.value)


def test_batch_invariant_plans_never_split_and_need_no_workspace() -> None:
    made = make(mode=Mode.BATCH_INVARIANT)
    assert made.workspace_bytes == 0
    assert {made.splits(queries, 2176) for queries in range(1, 301)} == {1}


def test_plans_are_values() -> None:
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make(units=108)


def test_verify_queries_are_sequences_times_one_plus_speculative_tokens() -> None:
    caps = Caps.for_verify(sequences=64, speculative_tokens=5, heads=16, widths=(128,), records=("v4",))
    assert caps.queries == 384
    with pytest.raises(ValueRangeError, match="speculative_tokens: got -1"):
        Caps.for_verify(sequences=64, speculative_tokens=-1, heads=16, widths=(128,), records=("v4",))
    with pytest.raises(CapacityError, match=r"q.shape\[0\]: got 385, expected at most 384"):
        plan(caps).check_queries(385)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": 0}, "heads: got 0, expected 1 .. 128"),
        ({"heads": 129}, "heads: got 129, expected 1 .. 128"),
        ({"queries": 0}, "queries: got 0, expected at least 1"),
        ({"widths": ()}, "widths: got (), expected one to 3 numbers"),
        ({"widths": (1, 2, 3, 4)}, "widths: got (1, 2, 3, 4), expected one to 3 numbers"),
        ({"widths": (1,)}, "records: got ('v4', 'v4'), expected 1 names"),
        ({"widths": (1, -2)}, "widths[1]: got -2, expected at least 0"),
        ({"mode": "fast"}, "mode: got fast, expected one of ['default', 'batch_invariant']"),
        ({"head_tile": 0}, "head_tile: got 0, expected at least 1"),
        ({"records": ("v4", "nvfp4_384")}, "records[1]: got nvfp4_384, expected an MLA record with a known encoding"),
        ({"records": ("v4", "indexer_fp8")}, "records[1]: got indexer_fp8, expected an MLA record"),
        ({"records": ("v4", "dsa")}, "records[1]: got dsa (d_qk 576, d_v 512), expected d_qk 512, d_v 512"),
    ],
)
def test_caps_that_no_kernel_serves_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueRangeError) as raised:
        make(**changes)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("width", "heads", "mebibytes"),
    [
        (128, 32, 64.503),
        (512, 32, 64.503),
        (2176, 32, 273.315),
        (2560, 32, 321.503),
        (4224, 32, 530.315),
        (4608, 32, 578.503),
        (4224, 64, 1060.628),
    ],
)
def test_case_40_published_reserves_are_reproduced(width: int, heads: int, mebibytes: float) -> None:
    assert RowSplitScratch(heads=heads).reserve_bytes(2048, width) / MIB == pytest.approx(mebibytes, abs=6e-4)


def test_case_40_reserve_at_the_most_rows_is_refused_at_its_peak() -> None:
    scratch = RowSplitScratch(heads=32)
    reserved = scratch.call_bytes(2048, 4224, most_rows=2048)
    assert reserved / MIB == pytest.approx(321.50, abs=5e-3)
    assert scratch.call_bytes(232, 4224, most_rows=232) / MIB == pytest.approx(480.40, abs=5e-3)
    with pytest.raises(WorkspaceError) as raised:
        scratch.check_reserve(reserved, most_rows=2048, width=4224)
    assert "(321.50 MiB)" in str(raised.value)
    assert "(530.32 MiB)" in str(raised.value) or "(530.31 MiB)" in str(raised.value)
    assert "peak at 256 rows, 66 splits" in str(raised.value)
    scratch.check_reserve(scratch.reserve_bytes(2048, 4224), most_rows=2048, width=4224)


def test_case_40_the_foreign_bound_is_the_maximum_over_all_rows_and_widths() -> None:
    scratch = RowSplitScratch(heads=8)
    for most_rows in (1, 100, 256, 257, 300, 2048):
        worst = max(scratch.call_bytes(rows, 4224, most_rows=most_rows) for rows in range(1, most_rows + 1))
        assert scratch.reserve_bytes(most_rows, 4224) == worst
        assert all(scratch.reserve_bytes(most_rows, width) <= worst for width in range(0, 4225, 16))


def test_case_40_growth_after_lock_is_refused() -> None:
    scratch = RowSplitScratch(heads=32)
    locked = int(578.50 * 10**6)
    scratch.check_locked(locked, rows=232, width=4224, most_rows=2048)
    with pytest.raises(WorkspaceError, match="captured graphs hold the old addresses"):
        scratch.check_locked(int(321.50 * MIB), rows=232, width=4224, most_rows=2048)


def test_case_42_verify_rows_above_the_declared_capacity_are_refused() -> None:
    with pytest.raises(CapacityError) as raised:
        check_decode_rows(256, sequences=64, speculative_tokens=5)
    assert str(raised.value).startswith("decode row capacity: got 256, expected at least 384")
    for sequences, tokens, needed in ((64, 7, 512), (128, 5, 768)):
        with pytest.raises(CapacityError, match=f"at least {needed}"):
            check_decode_rows(256, sequences=sequences, speculative_tokens=tokens)
    assert check_decode_rows(144, sequences=42, speculative_tokens=5) == 256
    assert check_decode_rows(384, sequences=64, speculative_tokens=5) == 384
    with pytest.raises(ValueRangeError, match="got 0, expected at least 1"):
        check_decode_rows(0, sequences=1, speculative_tokens=0)


def test_case_42_legacy_chunks_change_between_256_and_257_rows() -> None:
    scratch = RowSplitScratch(heads=32)
    assert (scratch.chunk(256), scratch.splits(256, 384)) == (64, 6)
    assert (scratch.chunk(257), scratch.splits(257, 384)) == (1024, 1)


def test_case_42_our_own_plan_serves_any_number_of_verify_queries() -> None:
    for sequences, tokens in ((64, 5), (64, 7), (128, 5), (10_000, 7)):
        caps = Caps.for_verify(
            sequences=sequences,
            speculative_tokens=tokens,
            heads=64,
            widths=(128, 4096),
            records=("v4", "v4"),
            units=132,
        )
        made = plan(caps)
        made.check_queries(sequences * (1 + tokens))
        assert made.workspace_bytes <= 35e6
