"""Public bugs about layouts, strides, offsets, page counts, records and spans, each with the kind around it.

case  1  a tight page refused, or read at the padded stride      case 15  copy size taken for the stride
case  2  a full-width view past the slab                         case 20  V4 read as V4.1
case  6  a clear as long as the stride                           case 21  512 where 584 was meant
case  8  tail padding refused as not contiguous                  case 27  layout guessed from the rank
case 11  allocator and view with different strides               case 29  a pool with slots and no bytes
"""

from __future__ import annotations

import pytest
import torch

from kvbridge import PageLayout, PageView
from kvbridge.blocks import block_spans
from kvbridge.errors import (
    DensityError,
    OverlapError,
    PageRowsError,
    PageSplitError,
    PageStrideError,
    RankError,
    RecordWidthError,
    SpanError,
    StorageOverrunError,
)
from kvbridge.geometry import TensorShape, check_geometry
from kvbridge.layout import Padding
from kvbridge.manifest import EngineId, LayerPlacement, Manifest, Pool, Storage
from kvbridge.runs import SpanRun, Spans
from kvbridge.spans import Operation, Placement

rows = PageLayout.for_rows
EXACT = rows("v4", page_rows=64)
ALIGNED = rows("v4", page_rows=64, policy="aligned", alignment=576)


def view_of(
    size: tuple[int, ...], stride: tuple[int, ...], *, storage: int, offset: int = 0, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """T(storage, off, size, stride) of the case notes."""
    return torch.zeros(storage, dtype=torch.uint8).view(dtype).as_strided(size, stride, offset)


# Case 1: a valid tight page of 37,376 bytes refused because only 37,440 was accepted ----------------------------------


def test_case_1_tight_and_padded_twins() -> None:
    tight = PageView.from_tensor(view_of((3, 64, 584), (37376, 584, 1), storage=112128), EXACT)
    assert (tight.pages.shape, tight.pages.stride()) == ((3, 37376), (37376, 1))
    assert (tight.layout.padding.policy, tight.layout.tail_pad_bytes) == ("exact", 0)
    padded = PageView.from_tensor(view_of((3, 64, 584), (37440, 584, 1), storage=112320), ALIGNED)
    assert (padded.pages.shape, padded.pages.stride()) == ((3, 37376), (37440, 1))
    assert padded.layout.tail_pad_bytes == 64


def test_case_1_the_padded_width_at_the_tight_stride() -> None:
    """(3, 37440) at stride 37,376 needs 112,192 bytes: 64 too many."""
    shape = TensorShape((3, 37440), (37376, 1), 0, 112128, "uint8")
    with pytest.raises(RecordWidthError, match=r"tensor.shape\[1\] in bytes: got 37440, expected 37376"):
        check_geometry(shape, EXACT)
    with pytest.raises(PageStrideError, match="got 37376, expected 37440"):
        check_geometry(shape, ALIGNED)


@pytest.mark.parametrize(
    ("size", "stride", "storage", "error"),
    [
        ((3, 64, 584), (37375, 584, 1), 112128, OverlapError),
        ((3, 64, 584), (37376, 585, 1), 112200, DensityError),
        ((3, 37375), (37375, 1), 112125, RecordWidthError),
        ((3, 37375), (37376, 1), 112128, RecordWidthError),
        ((112128,), (1,), 112128, RankError),
        ((3, 64, 583), (37376, 584, 1), 112128, RecordWidthError),
        ((3, 63, 584), (37376, 584, 1), 112128, PageRowsError),
    ],
)
def test_case_1_still_refused(
    size: tuple[int, ...], stride: tuple[int, ...], storage: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        PageView.from_tensor(view_of(size, stride, storage=storage), EXACT)


@pytest.mark.parametrize("page_rows", [0, -1])
def test_case_1_pages_have_rows(page_rows: int) -> None:
    with pytest.raises(PageRowsError, match=f"page_rows: got {page_rows}, expected at least 1"):
        rows("v4", page_rows=page_rows)


@pytest.mark.parametrize("page_rows", [1, 2, 16, 63, 64, 65, 128, 256])
@pytest.mark.parametrize("record", ["v4", "v41", "v41_interleaved", "v41_fp4", "dsa", "indexer_fp8", "indexer_fp4"])
def test_case_1_every_record_and_size_has_both_twins(record: str, page_rows: int) -> None:
    for policy, alignment in (("exact", None), ("aligned", 576), ("aligned", 512)):
        layout = rows(record, page_rows=page_rows, policy=policy, alignment=alignment)
        bound = PageView.from_tensor(
            view_of(
                (3, page_rows, layout.row_bytes),
                (layout.page_stride_bytes, layout.row_bytes, 1),
                storage=layout.span_bytes(3),
            ),
            layout,
        )
        assert bound.pages.stride() == (layout.page_stride_bytes, 1)
        short = view_of((3, layout.payload_bytes), (layout.payload_bytes - 1, 1), storage=layout.span_bytes(3))
        with pytest.raises(OverlapError):
            PageView.from_tensor(short, layout)


# Case 2: as_strided out of bounds by exactly the layer's offset -------------------------------------------------------


def test_case_2_small_form() -> None:
    layout = rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=1039680)
    tensor = view_of((3, 64, 584), (1039680, 584, 1), storage=3119040, offset=181440)
    bound = PageView.from_tensor(tensor, layout)
    assert bound.base_address == tensor.untyped_storage().data_ptr() + 181440
    assert bound.offset_bytes + layout.span_bytes(3) == 2298176
    whole = TensorShape((3, 1039680), (1039680, 1), 181440, 3119040, "uint8")
    with pytest.raises(RecordWidthError, match="got 1039680, expected 37376 or 37440"):
        check_geometry(whole, layout)


def test_case_2_a_slab_wide_page_is_past_the_slab_by_the_offset() -> None:
    """What the full-width view claims: pages as wide as the stride."""
    wide = rows("uniform_fp8", page_rows=1039680 // 512, policy="packed", page_stride_bytes=1039680)
    shape = TensorShape((7166, wide.payload_bytes), (1039680, 1), 181440, 7450346880, "uint8")
    excess = 181440 + 7165 * 1039680 + wide.payload_bytes - 7450346880
    with pytest.raises(StorageOverrunError, match=f"excess {excess}"):
        check_geometry(shape, wide)


@pytest.mark.parametrize(("pages", "fits"), [(7165, True), (7166, True), (7167, False)])
def test_case_2_full_size_from_numbers(pages: int, fits: bool) -> None:
    layout = rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=1039680)
    shape = TensorShape((pages, 64, 584), (1039680, 584, 1), 181440, 7450346880, "uint8")
    if fits:
        geometry = check_geometry(shape, layout)
        assert (geometry.num_pages, geometry.payload_bytes, geometry.page_stride_bytes) == (pages, 37376, 1039680)
        return
    with pytest.raises(StorageOverrunError, match="needed 7450565696, available 7450346880, excess 218816"):
        check_geometry(shape, layout)


def test_case_2_the_last_layer_of_a_slab_ends_with_it() -> None:
    for offset, excess in ((1039680 - 37376, 0), (1039680 - 37376 + 2, 2), (1039680, 37376)):
        layout = rows("v4", page_rows=64, policy="packed", page_stride_bytes=1039680)
        shape = TensorShape((3, 64, 584), (1039680, 584, 1), offset, 3119040, "uint8")
        if not excess:
            assert check_geometry(shape, layout).offset_bytes == offset
            continue
        with pytest.raises(StorageOverrunError, match=f"excess {excess}"):
            check_geometry(shape, layout)


# Case 6: zeroing as many bytes as the stride --------------------------------------------------------------------------


def test_case_6_spans_stop_at_the_payload() -> None:
    layout = rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=149760, num_pages=100)
    places = [
        Placement.from_layout(layout, offset_bytes=offset, storage_bytes=14976000, name=f"layer at {offset}")
        for offset in (0, 37440, 74880, 112320)
    ]
    for place in places:
        for start, length in place.pages([0, 98, 99], operation=Operation.WRITE):
            assert length == 37376
            assert (start - place.start) % 149760 == 0
    assert places[3].pages([0, 98, 99]).end == 14975936
    with pytest.raises(SpanError, match=r"\[14938560, 15088320\), expected inside the storage \[0, 14976000\)"):
        places[3].check([(112320 + block * 149760, 149760) for block in (99,)], neighbours=places[:3])
    with pytest.raises(SpanError, match="touches layer at 0, layer at 37440, layer at 74880"):
        places[3].check([(112320 + block * 149760, 149760) for block in (0, 98)], neighbours=places[:3])


def test_case_6_live_bytes_of_neighbours_survive() -> None:
    layout = rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=149760)
    slab = torch.full((4 * 149760,), 0xAA, dtype=torch.uint8)
    layers = [
        PageView.from_tensor(slab.as_strided((4, 64, 584), (149760, 584, 1), offset), layout)
        for offset in (0, 37440, 74880, 112320)
    ]
    place = Placement.from_view(layers[1], addresses=False)
    for start, length in place.pages([0, 2, 3], operation=Operation.CLEAR):
        slab[start : start + length] = 0
    for number, layer in enumerate(layers):
        cleared = [page for page in range(4) if not layer.pages[page].any()]
        assert cleared == ([0, 2, 3] if number == 1 else [])
    assert int((slab == 0).sum()) == 3 * 37440


def test_case_6_a_whole_block_is_a_group_operation_once_per_storage() -> None:
    pool = Pool(
        **rows(
            "v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=149760, num_pages=100
        ).model_dump(),
        group="g0",
        storage="slab",
        layers=tuple(LayerPlacement(name=f"L{n}", offset_bytes=n * 37440) for n in range(4)),
    )
    manifest = Manifest(
        engine=EngineId(name="vllm", version="0.33.0"),
        origin="planned",
        storages=(Storage(id="slab", storage_bytes=14976000),),
        pools=(pool,),
    )
    assert block_spans(manifest, group="g0", blocks=[0, 98]) == {"slab": Spans((SpanRun(0, 149760, 98 * 149760, 2),))}
    aliasing = manifest.model_copy(update={"pools": (pool, pool.model_copy(update={"group": "g1"}))})
    assert len(block_spans(aliasing, group="g1", blocks=[5])["slab"]) == 1


# Case 8: tail padding refused as non-contiguous -----------------------------------------------------------------------


def test_case_8_only_the_inside_of_a_page_must_be_dense() -> None:
    tensor = view_of((2, 64, 584), (37440, 584, 1), storage=74880)
    assert not tensor.is_contiguous()
    assert PageView.from_tensor(tensor, ALIGNED).num_pages == 2
    # A storage that ends with the last payload is enough, too.
    assert PageView.from_tensor(view_of((2, 64, 584), (37440, 584, 1), storage=74816), ALIGNED).num_pages == 2


def test_case_8_declared_tight_but_padded() -> None:
    with pytest.raises(PageStrideError, match=r"tensor.stride\(0\): got 37440, expected 37376"):
        PageView.from_tensor(view_of((2, 64, 584), (37440, 584, 1), storage=74880), EXACT)


def test_case_8_permuted_inside_the_page() -> None:
    for size, stride in (
        ((2, 584, 64), (37440, 1, 584)),
        ((2, 64, 584), (37440, 1, 64)),
        ((2, 1, 584, 64), (37440, 37440, 1, 584)),
    ):
        with pytest.raises((DensityError, RecordWidthError)):
            PageView.from_tensor(view_of(size, stride, storage=74880), ALIGNED)


# Case 11: the allocator lays pages at another stride than the view reads ----------------------------------------------


def test_case_11_strides_are_compared_not_page_counts() -> None:
    """1,000,000 bytes hold 26 pages of either size: the count proves nothing."""
    assert 1_000_000 // 37376 == 1_000_000 // 37440 == 26
    allocated = TensorShape((26, 64, 584), (37376, 584, 1), 0, 1_000_000, "uint8")
    with pytest.raises(PageStrideError, match=r"page-stride: tensor.stride\(0\): got 37376, expected 37440"):
        check_geometry(allocated, ALIGNED)
    assert check_geometry(allocated, EXACT).num_pages == 26


@pytest.mark.parametrize("parts", [2, 4, 64])
def test_case_11_a_padded_page_is_no_view_of_smaller_pages(parts: int) -> None:
    smaller = rows("v4", page_rows=64 // parts)
    for layout in (EXACT, ALIGNED):
        tensor = view_of((3, 64, 584), (layout.page_stride_bytes, 584, 1), storage=layout.span_bytes(3))
        with pytest.raises(PageSplitError, match=f"got 64, expected {64 // parts}"):
            PageView.from_tensor(tensor, smaller)


# Case 15: the copy size taken for the stride, or the reverse ----------------------------------------------------------


@pytest.mark.parametrize("ids", [[5, 6, 7], range(5, 8), torch.tensor([5, 6, 7])])
def test_case_15_segments(ids: object) -> None:
    packed = rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=149760, num_pages=100)
    spans = Placement.from_layout(packed).pages(ids)  # type: ignore[arg-type]
    assert list(spans) == [(5 * 149760, 37376), (6 * 149760, 37376), (7 * 149760, 37376)]
    tight = Placement.from_layout(rows("v4", page_rows=64, num_pages=100)).pages(ids)  # type: ignore[arg-type]
    assert list(tight) == [(186880, 112128)]


def test_case_15_both_numbers_are_required() -> None:
    fields = {"record": "v4", "page_rows": 64, "padding": Padding(policy="exact")}
    for missing in ("payload_bytes", "page_stride_bytes"):
        stated = {name: 37376 for name in ("payload_bytes", "page_stride_bytes") if name != missing}
        with pytest.raises(ValueError, match=missing):
            PageLayout(**fields, **stated)
