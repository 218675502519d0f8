"""What a repack refuses, and copies inside one pool, slab or memory."""

from __future__ import annotations

import pytest
import torch

from kvbridge import PageLayout, PageView
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
from kvbridge.repack import copy_pages, plan_pages, plan_rows
from kvbridge.spans import Placement
from tests.pools import bind

rows = PageLayout.for_rows


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
