"""The oracle: who owns which byte, found by enumerating them, with no formula shared with the library.

    storage  . . [p0 r0 data0][p0 r1 data0][p0 r0 scales1]... . . [p1 r0 ...        one owner a byte, or none
    layout   right when two pages of it leave no byte owned twice, and none free where the policy allows none
    tensor   right when walking its elements meets the bytes of page 0, 1, 2 ... in order, inside the storage

Sizes are small enough to walk: a few pages of a few rows of a few bytes.
"""

from __future__ import annotations

from itertools import pairwise, product

from kvbridge import records
from kvbridge.geometry import TensorShape
from kvbridge.layout import DeclaredLayout, PaddingPolicy, PoolKind
from kvbridge.records import Arrangement, Encoding, Record
from kvbridge.spans import Operation

Owner = tuple[int, int, str, int]
"""Page, row, field, byte in the field."""

ELEMENT = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float32": 4}
_WIDTHS = {Encoding.BF16: 2, Encoding.FP32: 4}


def page_owners(record: Record, plane: str | None, page_rows: int) -> list[tuple[int, str, int]]:
    """(row, field, byte) of every payload byte of a page, in byte order."""
    fields = [field for field in record.fields if field.plane == (plane or "")]
    if record.arrangement is Arrangement.SPLIT:
        blocks = [[f for f in fields if f.block == "data"], [f for f in fields if f.block == "scales"]]
    else:
        blocks = [fields]
    return [
        (row, field.name, byte)
        for block in blocks
        for row in range(page_rows)
        for field in block
        for byte in range(field.row_bytes)
    ]


def layout_is_valid(layout: DeclaredLayout) -> bool:
    """Whether a declared layout is free of contradictions."""
    counts = layout.page_rows > 0 and layout.tokens_per_row > 0 and layout.reserved_pages >= 0
    if not counts or (layout.num_pages is not None and layout.reserved_pages > layout.num_pages):
        return False
    if layout.kind is PoolKind.INDEX_ONLY:
        return not (layout.payload_bytes or layout.page_bytes or layout.page_stride_bytes)
    record = records.RECORDS.get(layout.record or "")
    if record is None or (layout.plane or "") not in {field.plane for field in record.fields}:
        return False
    encodings = _encodings(record, layout.plane)
    if not _dtype_fits(layout.dtype, encodings):
        return False
    return _bytes_fit(layout, len(page_owners(record, layout.plane, layout.page_rows))) and not any(
        layout.page_stride_bytes % _WIDTHS.get(encoding, 1) for encoding in encodings
    )


def _bytes_fit(layout: DeclaredLayout, payload: int) -> bool:
    """Marks the bytes of two pages: none twice, and none free but where the policy leaves room."""
    alignment, policy = layout.padding.alignment, layout.padding.policy
    wrong_alignment = alignment is None if policy is PaddingPolicy.ALIGNED else False
    if payload != layout.payload_bytes or wrong_alignment or (alignment is not None and alignment < 1):
        return False
    page = payload
    while alignment is not None and page % alignment:
        page += 1
    if (policy is PaddingPolicy.EXACT and page != payload) or layout.page_bytes not in (None, page):
        return False
    marks: dict[int, int] = {}
    for number in (0, 1):
        for byte in range(page):
            if marks.setdefault(number * layout.page_stride_bytes + byte, number) != number:
                return False
    if min(marks, default=0) < 0 or (policy is not PaddingPolicy.PACKED and sorted(marks) != list(range(2 * page))):
        return False
    # Slots of a token-granular pool lie one behind the other, so its pages are no further apart than their rows.
    return layout.kind is not PoolKind.TOKEN_GRANULAR or layout.page_stride_bytes == payload


def _encodings(record: Record, plane: str | None) -> set[Encoding]:
    return {field.encoding for field in record.fields if field.plane == (plane or "")}


def _dtype_fits(dtype: str, encodings: set[Encoding]) -> bool:
    if dtype not in ELEMENT:
        return False
    return ELEMENT[dtype] == 1 or {encoding.value for encoding in encodings} == {dtype}


def pool_owners(layout: DeclaredLayout, num_pages: int, offset: int) -> dict[int, Owner]:
    """Owner of every payload byte of a pool, by offset in the storage; the layout is valid."""
    record = records.RECORDS[layout.record or ""]
    owners: dict[int, Owner] = {}
    for page in range(num_pages):
        for place, owner in enumerate(page_owners(record, layout.plane, layout.page_rows)):
            byte = offset + page * layout.page_stride_bytes + place
            assert byte not in owners
            owners[byte] = (page, *owner)
    return owners


def tensor_pages(tensor: TensorShape, layout: DeclaredLayout) -> list[list[int]] | None:
    """Bytes of each page in the order of the tensor's elements, or None where its axes cannot be pages and rows.

    A tensor without pages gives the page it would have.
    """
    size, shape = ELEMENT[tensor.dtype], tensor.shape
    if len(shape) not in (2, 3, 4) or min(shape) < 0 or not _axes_fit(tensor, layout):
        return None
    if layout.kind is PoolKind.TOKEN_GRANULAR:
        first = [range(page, page + layout.page_rows) for page in range(0, max(shape[0], 1), layout.page_rows)]
    else:
        first = [range(page, page + 1) for page in range(max(shape[0], 1))]
    return [
        [
            tensor.offset_bytes
            + sum(place * step for place, step in zip(index, tensor.stride_bytes, strict=True))
            + byte
            for index in product(places, *(range(count) for count in shape[1:]))
            for byte in range(size)
        ]
        for places in first
    ]


def _axes_fit(tensor: TensorShape, layout: DeclaredLayout) -> bool:
    shape, size = tensor.shape, ELEMENT[tensor.dtype]
    row_bytes = len(page_owners(records.RECORDS[layout.record or ""], layout.plane, 1))
    if layout.kind is PoolKind.TOKEN_GRANULAR:
        middle_fits = all(count == 1 for count in shape[1:-1])
        return middle_fits and shape[0] % layout.page_rows == 0 and shape[-1] * size == row_bytes
    if len(shape) == 2:
        return shape[1] * size in (layout.payload_bytes, layout.page_bytes)
    middle = list(shape[1:-1])
    if len(middle) == 2 and 1 in middle:
        middle.remove(1)
    return middle == [layout.page_rows] and shape[-1] * size == row_bytes


def tensor_is_valid(tensor: TensorShape, layout: DeclaredLayout) -> bool:
    """Whether a tensor holds the pages of a valid layout."""
    if layout.kind is PoolKind.INDEX_ONLY:
        return False
    encodings = _encodings(records.RECORDS[layout.record or ""], layout.plane)
    pages = tensor_pages(tensor, layout) if _dtype_fits(tensor.dtype, encodings) else None
    if pages is None:
        return False
    starts = [page[0] for page in pages]
    dense = all(page == list(range(page[0], page[0] + len(page))) for page in pages)
    apart = all(after - before == layout.page_stride_bytes for before, after in pairwise(starts))
    address = tensor.address or tensor.offset_bytes
    aligned = not any(address % _WIDTHS.get(encoding, 1) for encoding in encodings)
    num_pages = len(pages) if tensor.shape[0] else 0
    counted = layout.num_pages in (None, num_pages) and num_pages >= layout.reserved_pages
    last = max(max(page) for page in pages) if num_pages else -1
    inside = tensor.offset_bytes >= 0 and (tensor.storage_bytes is None or last < tensor.storage_bytes)
    return dense and apart and aligned and counted and inside


def bytes_of_pages(layout: DeclaredLayout, pages: list[int], offset: int, operation: Operation) -> list[int]:
    """Bytes an operation covers, in the order of the page ids."""
    page_bytes = layout.payload_bytes
    if operation is Operation.CLEAR:
        page_bytes = layout.page_bytes if layout.page_bytes is not None else layout.payload_bytes
    return [offset + page * layout.page_stride_bytes + byte for page in pages for byte in range(page_bytes)]
