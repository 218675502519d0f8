"""PageView: a zero-copy, validated view of a pool tensor under a layout.

    tensor [pages, 64, 584] uint8, stride (1002240, 584, 1), offset 181440        one layer of a packed slab
        |  from_tensor(tensor, layout): checks, then as_strided on the same storage
        v
    pages  [pages, 37376] uint8, stride (1002240, 1)     every byte of every payload, nothing else
    data   [pages, 64, 576], scales [pages, 64, 8]       where the record's bytes lie, not where the shape says

The shape an engine gives its tensor is nominal: in a split page row 1 starts at byte 576, not at 584. Only the base
address, the page stride and the layout decide. A view knows the memory it was made for and can tell that it is gone.
"""

from __future__ import annotations

import weakref
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvbridge.errors import PlaneError, SlotError, StaleViewError
from kvbridge.geometry import Geometry, tensor_geometry
from kvbridge.layout import PageLayout

if TYPE_CHECKING:
    import torch


class Liveness(StrEnum):
    """What became of the memory under a view."""

    LIVE = "live"
    MOVED = "moved"  # the tensor, or its storage, points elsewhere now
    RESIZED = "resized"  # the storage has another size now
    FREED = "freed"  # the storage is empty


_memo: dict[tuple[int, int], weakref.ref[PageView]] = {}
"""Bindings by the identities of tensor and layout. The references are weak: the memo never keeps memory alive."""


def _nothing() -> None:
    """A reference to no view."""


_geometries: dict[tuple[Any, ...], tuple[PageLayout, Geometry]] = {}
_MOST_GEOMETRIES = 4096


class PageView:
    """The pages of one tensor, byte for byte.

    Attributes:
        layout: The layout the tensor was checked against.
        pages: uint8 `[num_pages, payload_bytes]`, stride `(page_stride_bytes, 1)`, on the tensor's own storage.
        num_pages: Pages of this tensor.
        page_rows: Rows in a page.
        page_stride_bytes: Bytes between page starts.
        offset_bytes: First page's start, from the start of the storage.
        storage_bytes: Size of the storage when the view was made.
        base_address: Address of the first page; 0 on meta tensors.
    """

    __slots__ = (
        "__weakref__",
        "_storage",
        "_storage_address",
        "_strides",
        "_tensor",
        "_values",
        "base_address",
        "layout",
        "num_pages",
        "offset_bytes",
        "page_stride_bytes",
        "pages",
        "storage_bytes",
    )

    layout: PageLayout
    pages: torch.Tensor
    num_pages: int
    page_stride_bytes: int
    offset_bytes: int
    storage_bytes: int
    base_address: int
    _storage: torch.UntypedStorage
    _storage_address: int
    _tensor: weakref.ref[torch.Tensor]
    _strides: tuple[int, ...]
    _values: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, layout: PageLayout) -> PageView:
        """Binds a tensor to a layout without copying or allocating cache memory.

        The same tensor object under the same layout object gives the same view while somebody holds that view.

        Args:
            tensor: Rank 2 `[pages, payload or page bytes]`, rank 3 `[pages, page_rows, row]`, rank 4 with an axis of
                size 1 for heads, or a token-granular `[slots, row]` / `[slots, 1, row]`; any one-byte dtype, or
                bf16 / fp32 where all fields of the record have that dtype; CPU, CUDA or meta.
            layout: What the pages are.

        Returns:
            A view on the tensor's storage with the tensor's page stride.

        Raises:
            LayoutError: A subclass that names the field, the value got and the value expected: rank, record width, page
                rows, page stride, overlap, density, dtype, alignment, page count or storage overrun.
            TypeError: Not a strided torch.Tensor.
        """
        view = _memo.get((id(tensor), id(layout)), _nothing)()
        if (
            # Both identities still mean the same objects: the view holds its layout, and a tensor that dies takes its
            # entry along before its identity can be used again. It may have been moved, reshaped or resized in place.
            view is not None
            and view.base_address == tensor.data_ptr()
            and view._strides == tensor.stride()
            and view._values == tensor.numel()
            and view.storage_bytes == view._storage.nbytes()
        ):
            return view
        return _bind(tensor, layout)

    @property
    def page_rows(self) -> int:
        """Rows in a page."""
        return self.layout.page_rows

    @property
    def capacity_rows(self) -> int:
        """Slots: every live slot is below this."""
        return self.num_pages * self.layout.page_rows

    @property
    def payload(self) -> torch.Tensor:
        """uint8 `[num_pages, payload_bytes]`: `pages` under its other name."""
        return self.pages

    @property
    def data(self) -> torch.Tensor:
        """uint8 `[num_pages, page_rows, data bytes of a row]`.

        Raises:
            PlaneError: The record's data fields are not one run of bytes (dsa: scales lie between values and RoPE).
        """
        return self._block("data")

    @property
    def scales(self) -> torch.Tensor:
        """uint8 `[num_pages, page_rows, scale bytes of a row]`; in V4 the eighth byte is unused.

        Raises:
            PlaneError: The plane has no scales in its pages.
        """
        return self._block("scales")

    def region(self, name: str) -> torch.Tensor:
        """uint8 `[num_pages, page_rows, row_bytes]` of one field.

        Args:
            name: A field name of the record, such as `nope`, `rope`, `scales`.

        Raises:
            PlaneError: No such field in this plane.
        """
        for region in self.layout.regions:
            if region.name == name:
                return self._rows(region.offset, region.row_stride, region.row_bytes)
        expected = [region.name for region in self.layout.regions]
        raise PlaneError("region", got=name, expected=f"one of {expected}")

    def row_addresses(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Where one row lies in memory, as (address, length) runs in byte order.

        Args:
            slot: page * page_rows + row, below `capacity_rows`.

        Raises:
            SlotError: The slot is outside the pool.
        """
        if slot >= self.capacity_rows:
            raise SlotError("slot", got=slot, expected=f"0 <= slot < {self.capacity_rows}")
        return tuple((self.base_address + offset, length) for offset, length in self.layout.row_runs(slot))

    @property
    def liveness(self) -> Liveness:
        """Whether the memory is still the one the view was made for."""
        size = self._storage.nbytes()
        if size != self.storage_bytes:
            return Liveness.RESIZED if size else Liveness.FREED
        if self._storage.data_ptr() != self._storage_address:
            return Liveness.MOVED
        tensor = self._tensor()
        if tensor is not None and tensor.data_ptr() != self.base_address:
            return Liveness.MOVED
        return Liveness.LIVE

    def require_live(self) -> None:
        """Checks that the memory is still there.

        Raises:
            StaleViewError: It was moved, resized or freed.
        """
        liveness = self.liveness
        if liveness is not Liveness.LIVE:
            raise StaleViewError(
                "storage",
                got=f"{liveness.value} ({self._storage.nbytes()} bytes at {self._storage.data_ptr():#x})",
                expected=f"{self.storage_bytes} bytes at {self._storage_address:#x}",
            )

    def __repr__(self) -> str:
        return (
            f"PageView({self.layout.record}, pages {self.num_pages} x {self.layout.page_rows} rows, payload "
            f"{self.layout.payload_bytes}, stride {self.page_stride_bytes}, offset {self.offset_bytes})"
        )

    def _block(self, block: str) -> torch.Tensor:
        regions = [region for region in self.layout.regions if region.block == block]
        end = 0
        for region in regions:
            if end and region.offset != end:
                raise PlaneError(
                    block, got=f"{region.name} at byte {region.offset}", expected=f"byte {end}; use region(name)"
                )
            end = region.offset + region.row_bytes
        if not regions:
            raise PlaneError(block, got="no such fields", expected=f"a record with {block} in its pages")
        first = regions[0]
        return self._rows(first.offset, first.row_stride, end - first.offset)

    def _rows(self, offset: int, row_stride: int, row_bytes: int) -> torch.Tensor:
        pages = self.pages
        return pages.as_strided(
            (self.num_pages, self.layout.page_rows, row_bytes),
            (self.page_stride_bytes, row_stride, 1),
            pages.storage_offset() + offset,
        )


def _bind(tensor: torch.Tensor, layout: PageLayout) -> PageView:
    view = PageView()
    try:
        view._storage = storage = tensor.untyped_storage()
    except (AttributeError, NotImplementedError) as error:
        raise TypeError(f"tensor: got {type(tensor).__name__}, expected a strided torch.Tensor") from error
    view.storage_bytes = storage.nbytes()
    view.base_address = address = tensor.data_ptr()
    view._strides = strides = tensor.stride()
    key = (id(layout), tensor.shape, strides, tensor.storage_offset(), tensor.dtype, view.storage_bytes, address & 15)
    known = _geometries.get(key)
    geometry = known[1] if known is not None else _check(key, tensor, layout)
    view.layout = layout
    view.num_pages = geometry.num_pages
    view.page_stride_bytes = geometry.page_stride_bytes
    view.offset_bytes = geometry.offset_bytes
    view.pages = geometry.normalise(tensor)
    view._storage_address = storage.data_ptr()
    view._values = tensor.numel()
    memo_key = (id(tensor), id(layout))

    def forget(_: object) -> None:
        """The entry goes with whichever dies first; one that has replaced it stays."""
        if _memo.get(memo_key) is entry:
            _memo.pop(memo_key, None)

    entry: weakref.ref[PageView] = weakref.ref(view, forget)
    view._tensor = weakref.ref(tensor, forget)
    _memo[memo_key] = entry
    return view


def _check(key: tuple[Any, ...], tensor: torch.Tensor, layout: PageLayout) -> Geometry:
    geometry = tensor_geometry(tensor, layout)
    if len(_geometries) >= _MOST_GEOMETRIES:
        _geometries.clear()
    # Holding the layout keeps its id from being reused; a layout is a few hundred bytes and owns no cache memory.
    _geometries[key] = (layout, geometry)
    return geometry
