"""Does a tensor's shape, stride, offset and dtype fit a layout? And which as_strided gives its pages?

    shape  [pages, 64, 584]      rank 3: pages, rows, row              ┐
    stride [S,     584, 1]       page stride, dense inside a page      ├─> pages [pages, payload], stride (S, 1)
    offset  o                    o + (pages-1)*S + payload <= storage  ┘

Pure numbers: the same checks serve a live tensor and one that was only declared (`--raw`), of any size, unallocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import TYPE_CHECKING

from kvbridge.errors import (
    AlignmentError,
    DensityError,
    DtypeError,
    KindError,
    OverlapError,
    PageCountError,
    PageRowsError,
    PageSplitError,
    PageStrideError,
    RankError,
    RecordWidthError,
    StorageOverrunError,
)
from kvbridge.layout import DTYPE_BYTES, PageLayout, PoolKind
from kvbridge.records import Arrangement, records_of_width

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A strided tensor in numbers, live or declared.

    Attributes:
        shape: Sizes.
        stride_bytes: Strides in bytes.
        offset_bytes: First element, from the start of the storage.
        storage_bytes: Size of the storage; None where it is unknown.
        dtype: Torch's name of the dtype.
        address: Address of the first element; 0 where there is none.
    """

    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    offset_bytes: int
    storage_bytes: int | None
    dtype: str
    address: int = 0


@dataclass(frozen=True)
class Geometry:
    """The pages of a tensor that fits its layout.

    Attributes:
        num_pages: Pages.
        payload_bytes: Bytes of each.
        page_stride_bytes: Bytes between two.
        offset_bytes: First page's start, from the start of the storage.
        dtype: Torch's name of the tensor's dtype.
    """

    num_pages: int
    payload_bytes: int
    page_stride_bytes: int
    offset_bytes: int
    dtype: str

    @cached_property
    def _elements(self) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Size, stride and offset of the pages in elements of the tensor."""
        size = DTYPE_BYTES[self.dtype]
        return (
            (self.num_pages, self.payload_bytes // size),
            (self.page_stride_bytes // size, 1),
            self.offset_bytes // size,
        )

    def normalise(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives uint8 `[num_pages, payload_bytes]` on the tensor's storage; no copy, no check.

        Args:
            tensor: A tensor of the shape, stride and dtype this geometry was made from.
        """
        size, stride, offset = self._elements
        pages = tensor.as_strided(size, stride, offset)
        if self.dtype == "uint8":
            return pages
        import torch

        return pages.view(torch.uint8)


def tensor_geometry(tensor: torch.Tensor, layout: PageLayout) -> Geometry:
    """Checks a live or meta tensor against a layout.

    Args:
        tensor: Any strided tensor.
        layout: What it should hold.

    Raises:
        LayoutError: See `check_geometry`.
    """
    size = tensor.element_size()
    shape = TensorShape(
        shape=tuple(tensor.shape),
        stride_bytes=tuple(stride * size for stride in tensor.stride()),
        offset_bytes=int(tensor.storage_offset()) * size,
        storage_bytes=tensor.untyped_storage().nbytes(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        address=tensor.data_ptr(),
    )
    return check_geometry(shape, layout)


def check_geometry(tensor: TensorShape, layout: PageLayout) -> Geometry:
    """Checks a tensor, given in numbers, against a layout.

    Args:
        tensor: Shape, strides, offset, storage and dtype.
        layout: What it should hold.

    Returns:
        The pages.

    Raises:
        KindError: The layout is index-only.
        RankError: Rank below 2 or above 4, or an axis that fits no role.
        DtypeError: The dtype cannot hold the record.
        RecordWidthError: Rows or pages of another width.
        PageRowsError: Another number of rows in a page.
        PageSplitError: A page of another row count that no view can turn into the declared one.
        DensityError: Gaps or permuted dimensions inside a page.
        OverlapError: Page stride shorter than the payload.
        PageStrideError: Page stride other than the layout's.
        PageCountError: Page count other than the layout's.
        AlignmentError: Base address not aligned to the record's widest element.
        StorageOverrunError: Pages beyond the storage.
    """
    if layout.kind is PoolKind.INDEX_ONLY:
        raise KindError(
            "kind", got="index_only", expected="a pool with bytes", detail="an index-only pool has no tensor"
        )
    element_bytes = _element_bytes(tensor, layout)
    rank = len(tensor.shape)
    if rank < 2 or rank > 4:
        raise RankError("tensor.shape", got=list(tensor.shape), expected="2, 3 or 4 dimensions")
    if layout.kind is PoolKind.TOKEN_GRANULAR:
        num_pages, stride = _token_granular(tensor, layout, element_bytes)
    else:
        num_pages, stride = _paged(tensor, layout, element_bytes)
    if layout.num_pages is not None and num_pages != layout.num_pages:
        raise PageCountError("num_pages", got=num_pages, expected=layout.num_pages)
    if num_pages < layout.reserved_pages:
        raise PageCountError("num_pages", got=num_pages, expected=f"at least {layout.reserved_pages} (reserved_pages)")
    _check_alignment(tensor, layout)
    _check_storage(tensor, layout, num_pages)
    return Geometry(num_pages, layout.payload_bytes, stride, tensor.offset_bytes, tensor.dtype)


def _element_bytes(tensor: TensorShape, layout: PageLayout) -> int:
    size = DTYPE_BYTES.get(tensor.dtype)
    if size is None:
        raise DtypeError("tensor.dtype", got=tensor.dtype, expected=f"one of {sorted(DTYPE_BYTES)}")
    uniform = layout.record_format.uniform_encoding(layout.plane)
    if size > 1 and (uniform is None or uniform.value != tensor.dtype):
        expected = "a one-byte dtype" if uniform is None else f"a one-byte dtype or {uniform.value}"
        raise DtypeError("tensor.dtype", got=tensor.dtype, expected=expected, detail=f"record {layout.record}")
    return size


def _paged(tensor: TensorShape, layout: PageLayout, element_bytes: int) -> tuple[int, int]:
    axes = list(zip(tensor.shape, tensor.stride_bytes, strict=True))
    num_pages, page_stride = axes.pop(0)
    if len(axes) == 1:
        _check_page_width(axes[0], layout, element_bytes)
    else:
        rows, row = _row_axes(axes, layout, tensor)
        _check_rows(rows, row, layout, element_bytes)
    if num_pages <= 1:
        return num_pages, layout.page_stride_bytes
    if page_stride < layout.payload_bytes:
        raise OverlapError(
            "tensor.stride(0)", got=page_stride, expected=f"at least {layout.payload_bytes} (payload_bytes)"
        )
    if page_stride != layout.page_stride_bytes:
        raise PageStrideError("tensor.stride(0)", got=page_stride, expected=layout.page_stride_bytes)
    return num_pages, page_stride


def _check_page_width(axis: tuple[int, int], layout: PageLayout, element_bytes: int) -> None:
    size, stride = axis
    width = size * element_bytes
    allowed = sorted({layout.payload_bytes, layout.page_bytes})
    if width not in allowed:
        raise RecordWidthError(
            "tensor.shape[1] in bytes",
            got=width,
            expected=" or ".join(map(str, allowed)),
            detail=f"payload, or payload with its tail pad, of {layout.page_rows} rows of record {layout.record}",
        )
    if stride != element_bytes and size > 1:
        raise DensityError("tensor.stride(1)", got=stride, expected=element_bytes)


def _row_axes(
    axes: list[tuple[int, int]], layout: PageLayout, tensor: TensorShape
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Finds the row axis and the byte axis behind the page axis; a rank-4 tensor has a head axis of size 1."""
    *middle, row = axes
    if len(middle) == 2:
        heads = [axis for axis in middle if axis[0] == 1]
        if not heads:
            raise RankError("tensor.shape", got=list(tensor.shape), expected="an axis of size 1 for heads")
        middle.remove(heads[0])
        if len(heads) == 2:
            middle = [heads[1]]
    return middle[0], row


def _check_rows(rows: tuple[int, int], row: tuple[int, int], layout: PageLayout, element_bytes: int) -> None:
    width = row[0] * element_bytes
    if width != layout.row_bytes:
        names = records_of_width(width)
        raise RecordWidthError(
            "row bytes",
            got=width,
            expected=layout.row_bytes,
            detail=f"record {layout.record}" + (f"; {width} looks like {' or '.join(names)}" if names else ""),
        )
    if rows[0] != layout.page_rows:
        blocks = {region.block for region in layout.regions}
        split = layout.record_format.arrangement is Arrangement.SPLIT and len(blocks) > 1
        if split and rows[0] > 0 and gcd(rows[0], layout.page_rows) in (rows[0], layout.page_rows):
            raise PageSplitError(
                "tensor rows in a page",
                got=rows[0],
                expected=layout.page_rows,
                detail=f"a split page of {rows[0]} rows is no view of pages of {layout.page_rows}",
            )
        raise PageRowsError("tensor rows in a page", got=rows[0], expected=layout.page_rows)
    if row[1] != element_bytes and row[0] > 1:
        raise DensityError("tensor stride inside a row", got=row[1], expected=element_bytes)
    if rows[1] != width and rows[0] > 1:
        raise DensityError(
            "tensor stride between rows", got=rows[1], expected=width, detail="rows of a page must be dense"
        )


def _token_granular(tensor: TensorShape, layout: PageLayout, element_bytes: int) -> tuple[int, int]:
    if prod(tensor.shape[1:-1]) != 1:
        raise RankError(
            "tensor.shape", got=list(tensor.shape), expected="[slots, row] or [slots, 1, row]", detail="token-granular"
        )
    rows = (layout.page_rows, tensor.stride_bytes[0])
    _check_rows(rows, (tensor.shape[-1], tensor.stride_bytes[-1]), layout, element_bytes)
    slots = tensor.shape[0]
    if slots % layout.page_rows:
        raise PageCountError(
            "tensor.shape[0]",
            got=slots,
            expected=f"a multiple of page_rows {layout.page_rows}",
            detail="token-granular",
        )
    if slots > 1 and tensor.stride_bytes[0] != layout.row_bytes:
        raise DensityError("tensor.stride(0)", got=tensor.stride_bytes[0], expected=layout.row_bytes)
    return slots // layout.page_rows, layout.page_stride_bytes


def _check_storage(tensor: TensorShape, layout: PageLayout, num_pages: int) -> None:
    if tensor.offset_bytes < 0:
        raise StorageOverrunError("offset_bytes", got=tensor.offset_bytes, expected="at least 0")
    if not num_pages or tensor.storage_bytes is None:
        return
    steps = zip(tensor.shape, tensor.stride_bytes, strict=True)
    own = sum((size - 1) * stride for size, stride in steps) + DTYPE_BYTES[tensor.dtype]
    # A tensor as wide as the page spans its tail pad too, and must own it.
    needed = tensor.offset_bytes + max(layout.span_bytes(num_pages), own)
    if needed > tensor.storage_bytes:
        raise StorageOverrunError(
            "storage_bytes",
            got=tensor.storage_bytes,
            expected=f"at least {needed}",
            detail=f"needed {needed}, available {tensor.storage_bytes}, excess {needed - tensor.storage_bytes}",
        )


def _check_alignment(tensor: TensorShape, layout: PageLayout) -> None:
    needed = layout.record_format.element_bytes(layout.plane)
    address = tensor.address or tensor.offset_bytes
    if address % needed:
        raise AlignmentError(
            "base address",
            got=f"{address:#x} (mod {needed} = {address % needed})",
            expected=f"a multiple of {needed}",
            detail=f"widest element of record {layout.record}",
        )
