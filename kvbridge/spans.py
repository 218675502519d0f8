"""Which bytes an operation on given pages reads, writes or may clear: plans as (start, length) spans.

    slab   |A payload|tail|B payload|tail|C ...|A payload|tail|B ...        one layer: A
    read   [=========]                         [=========]                  payload only, one span a page
    clear  [==============]                    [==============]             its tail pad too, never B or C

An exact layer's pages touch, so neighbouring ids become one span; a packed layer's never do. A length is never taken
for a stride: zeroing a stride's worth of bytes from a layer's page wipes its neighbours, or runs off the slab
(cases 6 and 15). A plan that somebody else made can be checked against what the layer owns; `blocks` does the same
for whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvbridge.errors import KindError, PageCountError, SlotError, SpanError
from kvbridge.integers import Numbers, extremes
from kvbridge.layout import PageLayout, PoolKind
from kvbridge.runs import Span, SpanBuilder, SpanRun, Spans, as_numbers, progressions

if TYPE_CHECKING:
    from kvbridge.manifest import LayerPlacement, Manifest, Pool
    from kvbridge.view import PageView


class Operation(StrEnum):
    """What is done with the bytes."""

    READ = "read"
    WRITE = "write"
    CLEAR = "clear"  # may cover the tail pad, so that whole pages become one span


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One layer's pages at a place: offsets in a storage, or addresses.

    Attributes:
        layout: What the pages are.
        num_pages: Pages.
        start: First page's first byte.
        storage_start: Storage's first byte, in the same coordinates.
        storage_end: One past the storage's last byte; None where it is unknown.
        name: Layer name for messages.
    """

    layout: PageLayout
    num_pages: int
    start: int = 0
    storage_start: int = 0
    storage_end: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.layout.kind is PoolKind.INDEX_ONLY:
            raise KindError("kind", got="index_only", expected="a pool with bytes", detail=self.name)
        end = self.start + self.layout.span_bytes(self.num_pages)
        if not self.num_pages:
            return
        if self.start < self.storage_start or (self.storage_end is not None and end > self.storage_end):
            raise SpanError(
                "pages",
                got=f"[{self.start}, {end})",
                expected=f"inside the storage [{self.storage_start}, {self.storage_end})",
                detail=self._about(),
            )

    @classmethod
    def from_layout(
        cls,
        layout: PageLayout,
        *,
        offset_bytes: int = 0,
        num_pages: int | None = None,
        storage_bytes: int | None = None,
        name: str = "",
    ) -> Placement:
        """Places a layout's pages at an offset of a storage.

        Args:
            layout: What the pages are.
            offset_bytes: First page's start.
            num_pages: Pages; the layout's own count by default.
            storage_bytes: Size of the storage, where it is known.
            name: Layer name for messages.

        Raises:
            PageCountError: No page count is known.
            SpanError: The pages do not fit the storage.
        """
        pages = layout.num_pages if num_pages is None else num_pages
        if pages is None:
            raise PageCountError("num_pages", got=None, expected="a page count", detail="the layout leaves it open")
        return cls(layout=layout, num_pages=pages, start=offset_bytes, storage_end=storage_bytes, name=name)

    @classmethod
    def from_view(cls, view: PageView, *, addresses: bool = True) -> Placement:
        """Places a view's pages at their addresses.

        Args:
            view: Pages in memory.
            addresses: False for offsets in the view's storage; meta tensors, which have no address, always give those.

        Raises:
            StaleViewError: The view's memory is gone.
        """
        view.require_live()
        start = (addresses and view.base_address) or view.offset_bytes
        first = start - view.offset_bytes
        return cls(
            layout=view.layout,
            num_pages=view.num_pages,
            start=start,
            storage_start=first,
            storage_end=first + view.storage_bytes,
        )

    @classmethod
    def from_layer(cls, manifest: Manifest, pool: Pool, layer: LayerPlacement) -> Placement:
        """Places one layer of a manifest's pool at its offset of its storage.

        Raises:
            PageCountError: The pool's page count is open.
            SpanError: The pages do not fit the storage.
        """
        sizes = {storage.id: storage.storage_bytes for storage in manifest.storages}
        return cls.from_layout(
            pool,
            offset_bytes=layer.offset_bytes,
            storage_bytes=sizes.get(pool.storage_of(layer) or ""),
            name=layer.name,
        )

    def pages(self, pages: Iterable[int] | None = None, *, operation: Operation = Operation.READ) -> Spans:
        """Spans of whole pages, in the order of their ids; ids whose bytes touch are joined.

        Args:
            pages: Page ids: a range (constant time), a list, or an integer tensor; all pages by default.
            operation: `read` and `write` cover payloads, `clear` the tail pads too (as far as the storage goes).

        Raises:
            SlotError: A page id is outside the pool.
        """
        numbers = as_numbers(range(self.num_pages) if pages is None else pages)
        self.require_inside("pages", numbers, self.num_pages)
        stride, length = self.layout.page_stride_bytes, self.extent(operation)
        builder = SpanBuilder()
        for first, step, count in progressions(numbers):
            begin = self.start + first * stride
            missing = self._clipped(first + (count - 1) * step, length)
            if missing:  # the storage ends inside the last page's tail pad
                builder.add(begin, length, step * stride, count - 1)
                builder.add(begin + (count - 1) * step * stride, length - missing)
            else:
                builder.add(begin, length, step * stride, count)
        return builder.finish()

    def rows(self, slots: Iterable[int]) -> Spans:
        """Spans of single rows, in the order of their slots: in a split page a row is data and scales.

        Args:
            slots: page * page_rows + row: a range, a list, or an integer tensor.

        Raises:
            SlotError: A slot is outside the pool.
        """
        numbers = as_numbers(slots)
        page_rows = self.layout.page_rows
        self.require_inside("slots", numbers, self.num_pages * page_rows)
        builder = SpanBuilder()
        for first, step, count in progressions(numbers):
            if step == 1:
                self._add_slots(builder, first, first + count)
            else:
                for slot in range(first, first + step * count, step):
                    self._add_slots(builder, slot, slot + 1)
        return builder.finish()

    def check(
        self,
        plan: Spans | Iterable[tuple[int, int]],
        *,
        pages: Iterable[int] | None = None,
        operation: Operation = Operation.CLEAR,
        neighbours: Iterable[Placement] = (),
    ) -> None:
        """Refuses a plan that touches anything but this layer's own pages.

        Args:
            plan: Spans in this placement's coordinates.
            pages: Page ids the caller owns; all pages by default.
            operation: `clear` may cover tail pads, `read` and `write` only payloads.
            neighbours: Layers of the storage, to be named in the message (`blocks.group_placements`).

        Raises:
            SpanError: A span leaves the storage, or its page, or touches a page that is not the caller's.
        """
        owned = None if pages is None else frozenset(as_numbers(pages))
        stride = self.layout.page_stride_bytes
        for run in plan.runs if isinstance(plan, Spans) else (SpanRun(*span) for span in plan):
            # Spans a whole number of pages apart are inside exactly when the first and the last are.
            whole = run.count > 1 and run.stride % stride == 0 and owned is None
            for start in (run.start, run.end - run.length) if whole else (span.start for span in run):
                self._check_span(Span(start, run.length), owned, operation, neighbours)

    def _check_span(
        self, span: Span, owned: frozenset[int] | None, operation: Operation, neighbours: Iterable[Placement]
    ) -> None:
        start, length = span
        end = start + length
        if length <= 0:
            raise SpanError("length", got=length, expected="at least 1", detail=self._about())
        if start < self.storage_start or (self.storage_end is not None and end > self.storage_end):
            raise SpanError(
                "plan",
                got=f"[{start}, {end})",
                expected=f"inside the storage [{self.storage_start}, {self.storage_end})",
                detail=f"{max(end - (self.storage_end or end), 0)} bytes beyond; {self._about()}",
            )
        stride, extent = self.layout.page_stride_bytes, self.extent(operation)
        first, last = (start - self.start) // stride, (end - 1 - self.start) // stride
        begin = self.start + first * stride
        inside = first >= 0 and last < self.num_pages and end <= self.start + last * stride + extent
        if not inside or start >= begin + extent or (first < last and extent < stride):
            touched = [other.name for other in neighbours if other != self and other.touches(span)]
            raise SpanError(
                "plan",
                got=f"[{start}, {end})",
                expected=f"inside page {first}, [{begin}, {begin + extent})",
                detail=f"{self._about()}" + (f"; touches {', '.join(touched)}" if touched else ""),
            )
        if owned is not None and not owned.issuperset(range(first, last + 1)):
            foreign = next(page for page in range(first, last + 1) if page not in owned)
            raise SpanError("plan", got=f"page {foreign}", expected="a page of the caller's", detail=self._about())

    def touches(self, span: Span) -> bool:
        """Whether a span touches any payload byte of this layer."""
        return self.run(Operation.READ).overlaps(SpanRun(*span))

    def run(self, operation: Operation) -> SpanRun:
        """All pages as one run of unjoined spans."""
        return SpanRun(self.start, self.extent(operation), self.layout.page_stride_bytes, self.num_pages)

    def _add_slots(self, builder: SpanBuilder, first: int, end: int) -> None:
        """Adds the rows [first, end): a partial page, whole pages, a partial page."""
        layout = self.layout
        stride, page_rows = layout.page_stride_bytes, layout.page_rows
        while first < end:
            page, row = divmod(first, page_rows)
            begin = self.start + page * stride
            whole = (end - first) // page_rows if not row else 0
            if whole:
                builder.add(begin, layout.payload_bytes, stride, whole)
                first += whole * page_rows
                continue
            rows = min(page_rows - row, end - first)
            for block in row_blocks(layout):
                builder.add(begin + block.start + row * block.length, rows * block.length)
            first += rows

    def extent(self, operation: Operation) -> int:
        """Bytes of a page that an operation covers."""
        return self.layout.page_bytes if operation is Operation.CLEAR else self.layout.payload_bytes

    def _clipped(self, page: int, length: int) -> int:
        """Bytes of a page's extent that lie beyond the storage: only tail pads can."""
        if self.storage_end is None:
            return 0
        return max(self.start + page * self.layout.page_stride_bytes + length - self.storage_end, 0)

    def require_inside(self, field: str, numbers: Numbers | list[int], limit: int) -> None:
        """Refuses page ids or slots outside 0 .. limit - 1.

        Raises:
            SlotError: The smallest or the largest number is outside.
        """
        if not numbers:
            return
        for number in extremes(numbers):
            if not 0 <= number < limit:
                raise SlotError(field, got=number, expected=f"0 <= number < {limit}", detail=self._about())

    def _about(self) -> str:
        layout = self.layout
        name = f"layer {self.name}, " if self.name else ""
        return f"{name}payload {layout.payload_bytes}, page {layout.page_bytes}, stride {layout.page_stride_bytes}"


def row_blocks(layout: PageLayout) -> tuple[Span, ...]:
    """Blocks of dense rows in a page, as (offset in the page, bytes of one row): split pages have data and scales."""
    blocks: list[Span] = []
    row_stride = 0
    for region in layout.regions:
        # Fields of one block fill its row; with one row in a page the next block follows at once, so compare strides.
        if region.row_stride == row_stride and blocks[-1].length < row_stride:
            blocks[-1] = Span(blocks[-1].start, blocks[-1].length + region.row_bytes)
        else:
            blocks.append(Span(region.offset, region.row_bytes))
            row_stride = region.row_stride
    return tuple(blocks)
