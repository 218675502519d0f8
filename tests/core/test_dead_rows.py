"""Case 36: NaN in bytes nobody should read, and what each consumer makes of it."""

import pytest
import torch

from kvbridge.consumers import CONSUMERS, get_consumer
from kvbridge.dead_rows import FILL_POLICIES, FillPolicy, dead_row_findings, find_dead_rows
from kvbridge.layout import PageLayout
from kvbridge.view import PageView

for_rows = PageLayout.for_rows


@pytest.mark.parametrize("record", ["v4", "mla_bf16", "v41_interleaved", "dsa", "uniform_fp8"])
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_case_36_dead_rows_are_counted_and_looked_at(record, fill):
    layout = for_rows(record, page_rows=4)
    pages = torch.zeros(4, layout.payload_bytes, dtype=torch.uint8)
    view = PageView.from_tensor(pages, layout)
    for region in layout.regions:
        view.region(region.name)[3, 1:] = fill
    dead = find_dead_rows(view, torch.arange(13))
    assert (dead.rows, dead.dead_rows) == (16, 3)
    not_finite = bool(fill) and (fill == 0xFF or record != "mla_bf16")  # 0x7F7F is a large finite bf16
    assert dead.nan_in_dead is not_finite
    assert dead.first_nan_slot == (13 if not_finite else None)
    assert not dead.nan_in_slot_zero


def test_case_36_live_rows_padding_and_unused_pages_do_not_count():
    layout = for_rows("v4", page_rows=4, policy="aligned", alignment=576)
    storage = torch.full((3, layout.page_bytes), 0x7F, dtype=torch.uint8)
    view = PageView.from_tensor(storage, layout)
    view.pages[1] = 0
    live = torch.zeros(12, dtype=torch.bool)
    live[4:7] = True
    dead = find_dead_rows(view, live)
    assert (dead.dead_rows, dead.nan_in_dead, dead.nan_in_slot_zero) == (1, False, True)
    view.region("unused")[1, 3] = 0xFF
    assert not find_dead_rows(view, live).nan_in_dead, "the unused byte is never decoded"
    view.region("scales")[1, 3, 6] = 0xFF
    assert find_dead_rows(view, live).first_nan_slot == 7


@pytest.mark.parametrize("name", CONSUMERS)
def test_case_36_each_consumer_says_whether_it_needs_zeroed_pages(name):
    layout = for_rows("v4", page_rows=4)
    view = PageView.from_tensor(torch.full((4, layout.payload_bytes), 0x7F, dtype=torch.uint8), layout)
    dead = find_dead_rows(view, torch.arange(13))
    consumer = get_consumer(name)
    plain, masked = dead_row_findings(dead, consumer), dead_row_findings(dead, consumer, masked_lanes=True)
    assert [finding.field for finding in plain] == (["slot 13"] if consumer.needs_zero_fill else [])
    assert [finding.field for finding in masked] == (["slot 13", "slot 0"] if consumer.needs_zero_fill else [])


def test_case_36_engines_fill_policies():
    assert FILL_POLICIES == {"sglang": FillPolicy.ZEROED_ONCE, "vllm": FillPolicy.RECYCLED}
    assert get_consumer("vllm-cpu").needs_zero_fill and not get_consumer("kvbridge").needs_zero_fill
