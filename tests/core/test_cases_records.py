"""Public bugs about records and the roles of axes, each with the kind around it.

case 20  V4 read as V4.1                     case 27  layout guessed from the rank
case 21  512 where 584 was meant             case 29  a pool with slots and no bytes
"""

from __future__ import annotations

import pytest
import torch

from kvbridge import PageLayout, PageView
from kvbridge.documents import DeclaredPool
from kvbridge.errors import (
    KindError,
    PageRowsError,
    PayloadError,
    RankError,
    RecordMissingError,
    RecordWidthError,
)
from kvbridge.layout import DeclaredLayout, Padding, violations
from kvbridge.manifest import index_only_pool
from kvbridge.spans import Placement

rows = PageLayout.for_rows
EXACT = rows("v4", page_rows=64)
ALIGNED = rows("v4", page_rows=64, policy="aligned", alignment=576)


def view_of(
    size: tuple[int, ...], stride: tuple[int, ...], *, storage: int, offset: int = 0, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """T(storage, off, size, stride) of the case notes."""
    return torch.zeros(storage, dtype=torch.uint8).view(dtype).as_strided(size, stride, offset)


# Case 20: V4 read as V4.1, or the reverse -----------------------------------------------------------------------------


def test_case_20_tight_v41_pages_are_too_short_for_v4() -> None:
    tensor = view_of((2, 33792), (33792, 1), storage=67584)
    with pytest.raises(RecordWidthError, match="got 33792, expected 37376"):
        PageView.from_tensor(tensor, EXACT)
    assert PageView.from_tensor(tensor, rows("v41", page_rows=64)).num_pages == 2


def test_case_20_packed_v41_pages_fit_the_stride_and_are_refused() -> None:
    """The stride has room for a V4 page, so only the width of the rows and the record tell."""
    packed_v4 = rows("v4", page_rows=64, policy="packed", page_stride_bytes=149760)
    for size, stride in (((2, 33792), (149760, 1)), ((2, 64, 528), (149760, 528, 1))):
        with pytest.raises(RecordWidthError, match=r"33792|528 looks like v41 or v41_interleaved"):
            PageView.from_tensor(view_of(size, stride, storage=2 * 149760), packed_v4)


def test_case_20_the_record_is_required() -> None:
    declared = DeclaredLayout(
        page_rows=64, payload_bytes=33792, page_stride_bytes=33792, padding=Padding(policy="exact")
    )
    faults = list(violations(declared))
    assert [type(fault) for fault in faults] == [RecordMissingError]
    assert "record-missing: record: got None, expected one of" in str(faults[0])


def test_case_20_v41_and_fp4_pools_are_not_exchanged() -> None:
    """288-byte rows are the extra cache only, 528 the window: neither passes for the other."""
    for record, width in (("v41", 288), ("v41_fp4", 528), ("v41_interleaved", 288), ("v4", 528), ("v41", 584)):
        tensor = view_of((2, 64, width), (64 * width, width, 1), storage=128 * width)
        with pytest.raises(RecordWidthError, match=f"got {width}"):
            PageView.from_tensor(tensor, rows(record, page_rows=64))


# Case 21: one cache of the model came with 512-byte rows --------------------------------------------------------------


def test_case_21_only_the_window_cache_is_wrong() -> None:
    main = view_of((4, 64, 1, 584), (37376, 584, 584, 1), storage=4 * 37376)
    window = view_of((4, 64, 1, 512), (32768, 512, 512, 1), storage=4 * 32768)
    assert PageView.from_tensor(main, EXACT).num_pages == 4
    with pytest.raises(
        RecordWidthError, match=r"row bytes: got 512, expected 584 \(record v4; 512 looks like uniform_fp8"
    ):
        PageView.from_tensor(window, EXACT)
    assert PageView.from_tensor(window, rows("uniform_fp8", page_rows=64)).num_pages == 4


@pytest.mark.parametrize("width", [68, 132, 288, 512, 528, 576, 583, 585, 656, 1024, 1152])
def test_case_21_every_other_width(width: int) -> None:
    tensor = view_of((4, 64, 1, width), (64 * width, width, width, 1), storage=4 * 64 * width)
    with pytest.raises(RecordWidthError, match=f"got {width}, expected 584"):
        PageView.from_tensor(tensor, EXACT)


def test_case_21_full_size() -> None:
    tensor = torch.empty(83520, 64, 1, 512, dtype=torch.uint8, device="meta")
    with pytest.raises(RecordWidthError):
        PageView.from_tensor(tensor, EXACT)
    assert PageView.from_tensor(tensor, rows("uniform_fp8", page_rows=64)).num_pages == 83520


# Case 27: the layout guessed from the rank ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(10, 64, 576), (10, 1, 64, 576), (10, 64, 1, 576)])
def test_case_27_the_layout_decides_not_the_rank(size: tuple[int, ...]) -> None:
    tensor = torch.zeros(size, dtype=torch.uint8)
    bound = PageView.from_tensor(tensor, rows("mla_fp8", page_rows=64))
    assert (bound.num_pages, bound.data.shape) == (10, (10, 64, 576))


def test_case_27_two_rows_are_two_rows_because_the_layout_says_so() -> None:
    tensor = torch.zeros(10, 2, 576, dtype=torch.uint8)
    assert PageView.from_tensor(tensor, rows("mla_fp8", page_rows=2)).data.shape == (10, 2, 576)
    with pytest.raises(PageRowsError, match="tensor rows in a page: got 2, expected 64"):
        PageView.from_tensor(tensor, rows("mla_fp8", page_rows=64))


@pytest.mark.parametrize("size", [(2, 10, 64, 576), (10, 2, 64, 576), (10, 64, 2, 576), (2, 10, 64, 1, 576)])
def test_case_27_a_key_value_split_is_no_mla_cache(size: tuple[int, ...]) -> None:
    with pytest.raises(RankError):
        PageView.from_tensor(torch.zeros(size, dtype=torch.uint8), rows("mla_fp8", page_rows=64))


# Case 29: a pool that hands out slots and owns no bytes ---------------------------------------------------------------


def test_case_29_index_only_pools() -> None:
    anchor = index_only_pool("anchor", page_rows=64, num_pages=100)
    assert (anchor.payload_bytes, anchor.span_bytes(), anchor.capacity_rows, anchor.regions) == (0, 0, 6400, ())
    with pytest.raises(KindError, match="index-only pool has no tensor"):
        PageView.from_tensor(torch.zeros(100, 64, 584, dtype=torch.uint8), anchor)
    with pytest.raises(KindError, match="got index_only, expected a pool with bytes"):
        Placement.from_layout(anchor)


@pytest.mark.parametrize("field", ["payload_bytes", "page_bytes", "page_stride_bytes"])
def test_case_29_index_only_and_bytes_contradict(field: str) -> None:
    fields = {"payload_bytes": 0, "page_bytes": 0, "page_stride_bytes": 0, field: 37376}
    declared = DeclaredPool(pool="anchor", kind="index_only", page_rows=64, padding={"policy": "exact"}, **fields)
    faults = list(violations(declared))
    assert [(type(fault), fault.field, fault.got, fault.expected) for fault in faults] == [(KindError, field, 37376, 0)]


def test_case_29_a_paged_pool_without_bytes_contradicts_itself() -> None:
    declared = DeclaredPool(
        pool="swa",
        record="v4",
        page_rows=64,
        payload_bytes=0,
        page_stride_bytes=0,
        padding={"policy": "exact"},
    )
    assert [type(fault) for fault in violations(declared)] == [PayloadError]
