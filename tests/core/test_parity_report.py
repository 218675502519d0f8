"""The comparison of outputs, its verdicts, and the report as table, JSON and page."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kvbridge.parity import CallRow, Control, Difference, ParityReport, TokenRow, difference, summarise
from kvbridge.parity_pages import render_html, render_table


def row(relative: float = 1e-3, worst: float = 2e-3, *, call: str = "decode c4", queries: int = 1) -> CallRow:
    gap = Difference(relative, worst, 0.01, 1.0)
    return CallRow(engine="toy", call=call, layer="layer.1", shape={"queries": queries, "heads": 8}, difference=gap)


def token_row(ours: list[int], gaps: list[float]) -> TokenRow:
    return TokenRow(request="one", theirs=[1, 2, 3], ours=ours, gaps=gaps, logprob_gaps=[0.01])


def test_difference_of_known_outputs() -> None:
    theirs = torch.ones(300, 2, 4)
    ours = theirs.clone()
    ours[299, 1] *= 1.5  # in the last of several chunks
    gap = difference(ours.bfloat16(), theirs.bfloat16())
    assert gap.relative_rms == pytest.approx(0.5 / math.sqrt(600))
    assert (gap.worst_row_rms, gap.max_abs, gap.largest) == (0.5, 0.5, 1.0)


def test_equal_outputs_have_no_difference() -> None:
    out = torch.randn(3, 2, 8)
    assert difference(out, out.clone()) == Difference(0.0, 0.0, 0.0, float(out.abs().max()))
    assert difference(torch.empty(0, 2, 8), torch.empty(0, 2, 8)) == Difference(0.0, 0.0, 0.0, 0.0)


def test_something_where_there_should_be_zero_is_infinitely_wrong() -> None:
    theirs = torch.zeros(2, 1, 4)
    theirs[0] = 1
    ours = theirs.clone()
    ours[1, 0, 0] = 1e-6
    assert difference(ours, theirs).worst_row_rms == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_in_one_output_only(bad: float) -> None:
    theirs = torch.ones(2, 1, 4)
    ours = theirs.clone()
    ours[1, 0, 2] = bad
    assert difference(ours, theirs).relative_rms == math.inf
    assert difference(ours, ours.clone()).relative_rms == 0.0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"got shapes \[1, 2, 4\] and \[1, 3, 4\], expected the same"):
        difference(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4))


@pytest.mark.parametrize(("relative", "worst", "ok"), [(2.5e-3, 9e-3, True), (2.6e-3, 0, False), (0, 9.1e-3, False)])
def test_both_bounds_decide(relative: float, worst: float, ok: bool) -> None:
    assert row(relative, worst).ok is ok
    assert row(math.nan, 0).ok is False


def test_a_token_may_differ_only_at_a_near_tie_of_the_engines_own() -> None:
    assert token_row([1, 2, 3], [1.0, 1.0, 1.0]).ok
    assert token_row([1, 9, 9], [1.0, 1 / 16, 9.0]).ok
    assert not token_row([1, 9, 3], [0.0, 0.0626, 0.0]).ok
    document = token_row([1, 9, 3], [0.0, 0.5, 0.0]).document()
    assert (document["compared"], document["equal"], document["gap_there"]) == (2, 1, 0.5)


def test_of_a_given_text_every_position_counts() -> None:
    row = TokenRow(request="one", theirs=[1, 2, 3], ours=[1, 9, 8], gaps=[1.0, 1 / 16, 0.5], forced=True)
    assert row.differences == (1, 2)
    assert not row.ok
    assert (row.document()["compared"], row.document()["equal"], row.document()["gap_there"]) == (3, 1, 0.5)


def test_a_control_must_be_found_in_every_call() -> None:
    assert Control(name="spoilt", rows=[row(0.1, 0.2)]).ok
    assert not Control(name="spoilt", rows=[row(0.1, 0.2), row()]).ok
    assert not Control(name="spoilt", rows=[]).ok


def test_a_report_without_calls_is_not_ok() -> None:
    assert not ParityReport(engine="toy", versions={}).ok
    assert ParityReport(engine="toy", versions={}, rows=[row()]).ok
    bad_control = Control(name="spoilt", rows=[row()])
    assert not ParityReport(engine="toy", versions={}, rows=[row()], controls=[bad_control]).ok


def test_summary_has_a_line_for_each_kind() -> None:
    (first, second) = summarise([row(), row(2e-3, queries=7), row(call="prefill c4")])
    assert (first["call"], first["calls"], first["relative_rms"], first["shape"]) == (
        "decode c4",
        2,
        2e-3,
        "queries 1..7, heads 8",
    )
    assert second["shape"] == "queries 1, heads 8"


def test_table_and_page_hold_the_same_figures_in_json_order_or_not() -> None:
    report = ParityReport(
        engine="toy <engine>",
        versions={"toy": "1.0"},
        rows=[row()],
        controls=[Control(name="sink dropped", rows=[row(math.inf, math.inf)])],
        tokens=[token_row([1, 2, 3], [1.0, 1.0, 1.0])],
        times={"prefill_ratio": 0.25},
        notes=["a note"],
    )
    document = {"engine": report.engine, "parity": report.document()}
    sorted_document = json.loads(json.dumps(document, sort_keys=True, allow_nan=False))
    table, page = render_table(document), render_html(document)
    assert table == render_table(sorted_document)
    for text in ("decode c4", "sink dropped", "prefill ratio", "0.25", "a note", "the kernels agree", "0.001"):
        assert text in table
        assert text in page
    assert "toy &lt;engine&gt;" in page


def test_tables_of_named_rows_are_shown_as_well() -> None:
    document = {"engine": "toy", "parity": {"modes": {"swa": {"calls": 3}, "c4": {"calls": 5, "left": 1}}}}
    table = render_table(document)
    assert "Modes" in table
    assert [line.split() for line in table.splitlines()[3:]] == [
        ["name", "calls", "left"],
        ["swa", "3"],
        ["c4", "5", "1"],
    ]
