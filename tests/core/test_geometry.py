"""Tensors in numbers against a layout: what fits, what is refused, and the numbers in the message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbridge.errors import (
    AlignmentError,
    DensityError,
    DtypeError,
    KindError,
    LayoutError,
    OverlapError,
    PageCountError,
    PageRowsError,
    PageSplitError,
    PageStrideError,
    RankError,
    RecordWidthError,
    StorageOverrunError,
)
from kvbridge.geometry import TensorShape, check_geometry
from kvbridge.layout import Padding, PageLayout

EXACT = PageLayout.for_rows("v4", page_rows=64)
ALIGNED = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576)
V41 = PageLayout.for_rows("v41_interleaved", page_rows=64)
GRANULAR = PageLayout.for_rows("dsa", page_rows=64, kind="token_granular")
BF16 = PageLayout.for_rows("mla_bf16", page_rows=64, dtype="bfloat16")


def tensor(
    shape: tuple[int, ...],
    stride_bytes: tuple[int, ...],
    *,
    storage: int | None = None,
    offset: int = 0,
    dtype: str = "uint8",
    address: int = 0,
) -> TensorShape:
    return TensorShape(shape, stride_bytes, offset, storage, dtype, address)


RIGHT = tensor((3, 64, 584), (37440, 584, 1), storage=112320)

WRONG: list[tuple[TensorShape, PageLayout, type[LayoutError], str]] = [
    (replace(RIGHT, shape=(37440,), stride_bytes=(1,)), ALIGNED, RankError, r"got \[37440\], expected 2, 3 or 4 dim"),
    (
        replace(RIGHT, shape=(3, 2, 1, 64, 584), stride_bytes=(37440, 1, 1, 584, 1)),
        ALIGNED,
        RankError,
        "expected 2, 3 or 4 dimensions",
    ),
    (
        replace(RIGHT, shape=(3, 2, 64, 584), stride_bytes=(37440, 1, 584, 1)),
        ALIGNED,
        RankError,
        r"got \[3, 2, 64, 584\], expected an axis of size 1 for heads",
    ),
    (
        replace(RIGHT, shape=(3, 64, 512), stride_bytes=(37440, 512, 1)),
        ALIGNED,
        RecordWidthError,
        r"row bytes: got 512, expected 584 \(record v4; 512 looks like uniform_fp8",
    ),
    (
        replace(RIGHT, shape=(3, 64, 528), stride_bytes=(37440, 528, 1)),
        ALIGNED,
        RecordWidthError,
        "got 528, expected 584 .*looks like v41 or v41_interleaved",
    ),
    (
        replace(RIGHT, shape=(3, 64, 585), stride_bytes=(37440, 585, 1)),
        ALIGNED,
        RecordWidthError,
        r"got 585, expected 584 \(record v4\)",
    ),
    (
        replace(RIGHT, shape=(3, 63, 584)),
        ALIGNED,
        PageRowsError,
        "tensor rows in a page: got 63, expected 64",
    ),
    (
        replace(RIGHT, shape=(3, 32, 584), stride_bytes=(18688, 584, 1)),
        ALIGNED,
        PageSplitError,
        "page-split: tensor rows in a page: got 32, expected 64",
    ),
    (
        replace(RIGHT, shape=(1, 256, 584), stride_bytes=(149760, 584, 1), storage_bytes=149760),
        ALIGNED,
        PageSplitError,
        "got 256, expected 64 .*a split page of 256 rows is no view of pages of 64",
    ),
    (replace(RIGHT, stride_bytes=(37440, 585, 1)), ALIGNED, DensityError, "between rows: got 585, expected 584"),
    (replace(RIGHT, stride_bytes=(37440, 584, 2)), ALIGNED, DensityError, "inside a row: got 2, expected 1"),
    (replace(RIGHT, stride_bytes=(37440, 0, 1)), ALIGNED, DensityError, "between rows: got 0, expected 584"),
    (replace(RIGHT, stride_bytes=(37440, -584, 1)), ALIGNED, DensityError, "between rows: got -584"),
    (replace(RIGHT, stride_bytes=(37375, 584, 1)), ALIGNED, OverlapError, "got 37375, expected at least 37376"),
    (replace(RIGHT, stride_bytes=(0, 584, 1)), ALIGNED, OverlapError, "got 0, expected at least 37376"),
    (replace(RIGHT, stride_bytes=(-37440, 584, 1)), ALIGNED, OverlapError, "got -37440"),
    (replace(RIGHT, stride_bytes=(37376, 584, 1)), ALIGNED, PageStrideError, "got 37376, expected 37440"),
    (replace(RIGHT, stride_bytes=(149760, 584, 1)), ALIGNED, PageStrideError, "got 149760, expected 37440"),
    (replace(RIGHT, dtype="float16"), ALIGNED, DtypeError, "tensor.dtype: got float16, expected one of"),
    (
        replace(RIGHT, dtype="bfloat16"),
        ALIGNED,
        DtypeError,
        r"tensor.dtype: got bfloat16, expected a one-byte dtype \(record v4\)",
    ),
    (replace(RIGHT, storage_bytes=112255), ALIGNED, StorageOverrunError, "needed 112256, available 112255, excess 1"),
    (replace(RIGHT, offset_bytes=66), ALIGNED, StorageOverrunError, "needed 112322, available 112320, excess 2"),
    (replace(RIGHT, offset_bytes=-2), ALIGNED, StorageOverrunError, "offset_bytes: got -2, expected at least 0"),
    (
        replace(RIGHT, offset_bytes=1, storage_bytes=None),
        ALIGNED,
        AlignmentError,
        r"base address: got 0x1 \(mod 2 = 1\), expected a multiple of 2 \(widest element of record v4\)",
    ),
    (replace(RIGHT, address=0x7001), ALIGNED, AlignmentError, r"got 0x7001 \(mod 2 = 1\)"),
    (replace(RIGHT, shape=(-1, 64, 584)), ALIGNED, PageCountError, "num_pages: got -1, expected at least 0"),
    (
        tensor((3, 37439), (37440, 1)),
        ALIGNED,
        RecordWidthError,
        r"tensor.shape\[1\] in bytes: got 37439, expected 37376 or 37440",
    ),
    (tensor((3, 37376), (37440, 2)), ALIGNED, DensityError, r"tensor.stride\(1\): got 2, expected 1"),
    (tensor((3, 37376), (37375, 1)), EXACT, OverlapError, "got 37375, expected at least 37376"),
    (
        tensor((3, 37440), (37440, 1), storage=112319),
        ALIGNED,
        StorageOverrunError,
        "needed 112320, available 112319, excess 1",
    ),
    (tensor((100, 656), (656, 1)), GRANULAR, PageCountError, r"shape\[0\]: got 100, expected a multiple of page_rows"),
    (tensor((128, 656), (672, 1)), GRANULAR, DensityError, "got 672, expected 656"),
    (tensor((128, 2, 656), (1312, 656, 1)), GRANULAR, RankError, r"expected \[slots, row\] or \[slots, 1, row\]"),
    (tensor((128, 576), (576, 1)), GRANULAR, RecordWidthError, "got 576, expected 656"),
    (tensor((2, 64, 576), (36864, 576, 1), dtype="bfloat16"), BF16, DensityError, "got 1, expected 2"),
]


@pytest.mark.parametrize(("shape", "layout", "error", "message"), WRONG)
def test_refused(shape: TensorShape, layout: PageLayout, error: type[LayoutError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        check_geometry(shape, layout)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (RIGHT, ALIGNED),
        (tensor((3, 37376), (37440, 1), storage=112256), ALIGNED),
        (tensor((3, 37440), (37440, 1), storage=112320), ALIGNED),
        (tensor((3, 1, 64, 584), (37440, 37376, 584, 1), storage=112320), ALIGNED),
        (tensor((3, 64, 1, 584), (37440, 584, 584, 1), storage=112320), ALIGNED),
        (tensor((3, 64, 1, 584), (37440, 584, 9, 1), storage=112320), ALIGNED),  # nobody steps along an axis of size 1
        (tensor((1, 64, 584), (7, 584, 1), storage=37376), ALIGNED),
        (tensor((0, 64, 584), (37440, 584, 1), storage=0), ALIGNED),
        (tensor((3, 64, 576), (73728, 1152, 2), storage=3 * 73728, dtype="bfloat16"), BF16),
        (tensor((128, 656), (656, 1), storage=128 * 656), GRANULAR),
        (tensor((128, 1, 656), (656, 1, 1), storage=128 * 656), GRANULAR),
    ],
)
def test_accepted(shape: TensorShape, layout: PageLayout) -> None:
    geometry = check_geometry(shape, layout)
    assert geometry.payload_bytes == layout.payload_bytes
    assert geometry.page_stride_bytes == layout.page_stride_bytes


def test_page_count_of_the_layout() -> None:
    counted = ALIGNED.model_copy(update={"num_pages": 4})
    with pytest.raises(PageCountError, match="page-count: num_pages: got 3, expected 4"):
        check_geometry(RIGHT, counted)
    reserved = ALIGNED.model_copy(update={"reserved_pages": 4})
    with pytest.raises(PageCountError, match=r"num_pages: got 3, expected at least 4 \(reserved_pages\)"):
        check_geometry(RIGHT, reserved)


def test_index_only_pools_have_no_tensor() -> None:
    layout = PageLayout(
        kind="index_only", page_rows=64, payload_bytes=0, page_stride_bytes=0, padding=Padding(policy="exact")
    )
    with pytest.raises(KindError, match="kind: got index_only, expected a pool with bytes"):
        check_geometry(RIGHT, layout)


@pytest.mark.parametrize("rows", [2, 4, 8, 16, 32, 128, 256])
def test_a_page_cannot_be_split_or_joined_by_a_view(rows: int) -> None:
    """For every record with more than one region: the scales of the other page size lie elsewhere."""
    for record, width in (("v4", 584), ("v41", 528), ("indexer_fp8", 132)):
        layout = PageLayout.for_rows(record, page_rows=64)
        shape = tensor((4, rows, width), (rows * width, width, 1))
        with pytest.raises(PageSplitError):
            check_geometry(shape, layout)
    interleaved = tensor((4, rows, 528), (rows * 528, 528, 1))  # the same bytes, but not the pages declared
    with pytest.raises(PageRowsError, match=f"got {rows}, expected 64"):
        check_geometry(interleaved, V41)


def test_sizes_beyond_64_bits() -> None:
    layout = PageLayout.for_rows("v4", page_rows=64, policy="packed", page_stride_bytes=1 << 62)
    shape = tensor((1 << 62, 64, 584), (1 << 62, 584, 1), storage=1 << 63)
    with pytest.raises(StorageOverrunError, match=f"needed {((1 << 62) - 1) * (1 << 62) + 37376}, available {1 << 63}"):
        check_geometry(shape, layout)
