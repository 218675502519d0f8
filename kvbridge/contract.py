"""What a reader or writer kernel demands of a page, as data. No rule of a kernel is written anywhere else.

    Consumer "flashmla-sm100"
      accepts   v4 at strides that are multiples of 576, v41_interleaved of 528, fp4 rows in the extra cache only
      stride    honoured           a packed slab is read in place
      offsets   int32 count of 576-byte rows
      heads     64, 128            slots: exactly -1 means none

Validity belongs to (layout, consumer), never to the layout alone: the tight 37,376-byte page is right for one kernel
and refused by another. `consumers.fits` compares the two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvbridge.errors import LayoutError

UNNAMED_POOL = "kv"
"""Pool of a layout that nobody named: it may be any."""

WINDOW_POOLS = ("swa",)
"""Pools that a decode call takes as its sliding-window cache."""

EXTRA_POOLS = ("c1", "c2", "c4", "c128")
"""Pools that a decode call takes as its second, compressed cache."""


class HeadsError(LayoutError):
    """A head count the consumer has no kernel for."""

    code = "consumer-heads"
    consequence = "the call is refused"


class TopkError(LayoutError):
    """A slot width the consumer has no kernel for."""

    code = "consumer-topk"
    consequence = "the call is refused, or the extra lanes are read"


class IndexUnitError(LayoutError):
    """Slots that cannot be expressed in the unit a consumer takes."""

    code = "consumer-index-unit"
    consequence = "every page after the first is read from the wrong byte"


class StrideUse(StrEnum):
    """What a consumer makes of the page stride."""

    HONOURED = "honoured"  # addresses pages by it
    OWN_PAGE = "own_page"  # compiled for its own page bytes; any other stride is refused
    OWN_PAGE_UNCHECKED = "own_page_unchecked"  # compiled for its own page bytes; takes a bare pointer, checks nothing
    CONTIGUOUS = "contiguous"  # refuses tensors that are not contiguous; pages are as wide as the tensor says
    WHOLE_ROWS = "whole_rows"  # addresses rows; the stride must be a whole number of rows, else refused
    IGNORED = "ignored"  # addresses rows by flat slot, whatever the stride


class IndexUnit(StrEnum):
    """What a slot number counts."""

    SLOT = "slot"  # page * page_rows + row
    STORAGE_ROW = "storage_row"  # page * (page_stride_bytes / row bytes) + row


class Sentinel(StrEnum):
    """Which slots mean "none"."""

    MINUS_ONE = "minus_one"  # exactly -1; any other value reaches address arithmetic
    NEGATIVE = "negative"
    NEGATIVE_OR_BEYOND = "negative_or_beyond"  # also slots at or beyond the pool's capacity


class Role(StrEnum):
    """What a consumer does with pages."""

    READER = "reader"
    WRITER = "writer"
    TRANSFER = "transfer"


class LSEBase(StrEnum):
    """Base of the log-sum-exp a consumer returns."""

    NATURAL = "natural"
    BASE2 = "base2"
    EITHER = "either"  # the caller chooses
    NONE = "none"  # returns none


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepts:
    """One record a consumer takes, and where.

    Attributes:
        record: Record name.
        pools: Pools it may be in; empty for any.
        page_rows: Rows a page there are kernels for; empty for any.
        stride_multiple_bytes: What the page stride must be a multiple of.
        page_alignment_bytes: What the consumer's own page is rounded up to; for strides it does not take from the
            tensor.
        takes_lengths: Whether it takes lengths with this record.
    """

    record: str
    pools: tuple[str, ...] = ()
    page_rows: tuple[int, ...] = ()
    stride_multiple_bytes: int = 1
    page_alignment_bytes: int = 1
    takes_lengths: bool = True

    def takes_pool(self, pool: str) -> bool:
        """Whether the record is taken in that pool."""
        return not self.pools or pool in self.pools or pool == UNNAMED_POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """How a consumer counts addresses.

    Attributes:
        bits: Width of the number.
        signed: Whether half of it is negative.
        unit_bytes: Bytes that one step stands for; 0 for the stride multiple of the record.
        from_storage: Counted from the storage's start rather than from the first page.
    """

    bits: int = 64
    signed: bool = True
    unit_bytes: int = 1
    from_storage: bool = False

    @property
    def most(self) -> int:
        """Largest offset."""
        return int((1 << (self.bits - int(self.signed))) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A reader or writer kernel, with the demands it makes of a page.

    Attributes:
        name: Key in the list of consumers.
        title: One line for people.
        role: Reader, writer or transfer.
        accepts: Records it takes.
        mistakes: (record, record) pairs: it takes the first for the second, without an error.
        checks_record: Whether it compares anything that tells records apart; if not, it takes all for its own.
        stride: What it makes of the page stride.
        flat_rows: Whether it finds row r at r times the row's bytes: wrong in a split page with scales.
        base_alignment_bytes: What the first page's address must be a multiple of.
        base_checked: Whether it refuses a misaligned base.
        most_stride_bytes: Largest page stride it can be told; 0 for no limit.
        page_rows_power_of_two: Whether it divides slots by shifting.
        offsets: How it counts addresses.
        maps_whole_stride: Whether it maps num_pages * page_stride_bytes from the first page on.
        index_units: Units of slots it takes; the first is what it assumes when not told.
        unit_stated: Whether the caller must say which unit it is on a strided pool.
        slot_dtypes: Dtypes of slots.
        dense_tables: Whether rows of slots must follow each other without a gap.
        heads: Head counts there are kernels for; others are padded up to the next.
        topk_widths: Slot widths there are kernels for; empty for any.
        topk_multiple: What a width must be a multiple of.
        least_topk: Smallest width.
        sentinel: Which slots mean none.
        takes_lengths: Whether it takes lengths of the rows of slots.
        lengths_per_query: Whether there is one for each query; else one for all queries of a sequence.
        bounds_lanes: Whether slots at or beyond the length are left alone.
        dense_prefix: Whether every slot before the length must be live.
        needs_zero_fill: Whether bytes of dead rows can reach an output.
        lse_base: Base of the log-sum-exp.
        lse_includes_sink: Whether the sink is inside it; None where it depends or is unknown.
        empty_row_lse: Log-sum-exp of a query without live slots.
        empty_row_output: Output of such a query.
        graph: Rules under CUDA graph capture.
        engine: Project it belongs to.
        versions: Versions it was read in.
        source: Files it was read in.
    """

    name: str
    title: str
    accepts: tuple[Accepts, ...]
    engine: str
    versions: str
    source: str
    role: Role = Role.READER
    mistakes: tuple[tuple[str, str], ...] = ()
    checks_record: bool = True
    stride: StrideUse = StrideUse.HONOURED
    flat_rows: bool = False
    base_alignment_bytes: int = 1
    base_checked: bool = True
    most_stride_bytes: int = 0
    page_rows_power_of_two: bool = False
    offsets: Offsets = Offsets()
    maps_whole_stride: bool = False
    index_units: tuple[IndexUnit, ...] = (IndexUnit.SLOT,)
    unit_stated: bool = False
    slot_dtypes: tuple[str, ...] = ("int32",)
    dense_tables: bool = False
    heads: tuple[int, ...] = tuple(range(1, 129))
    topk_widths: tuple[int, ...] = ()
    topk_multiple: int = 1
    least_topk: int = 1
    sentinel: Sentinel = Sentinel.NEGATIVE
    takes_lengths: bool = True
    lengths_per_query: bool = True
    bounds_lanes: bool = True
    dense_prefix: bool = False
    needs_zero_fill: bool = False
    lse_base: LSEBase = LSEBase.NONE
    lse_includes_sink: bool | None = None
    empty_row_lse: str = ""
    empty_row_output: str = "0"
    graph: str = ""

    @property
    def records(self) -> tuple[str, ...]:
        """Records it takes, in any pool."""
        return tuple(dict.fromkeys(entry.record for entry in self.accepts))

    def accepted(self, record: str, pool: str) -> Accepts | None:
        """The entry for a record in a pool, or None; for an unnamed pool the one with most page sizes."""
        entries = [entry for entry in self.accepts if entry.record == record and entry.takes_pool(pool)]
        return max(entries, key=lambda entry: (not entry.page_rows, len(entry.page_rows)), default=None)

    @property
    def records_mistaken(self) -> dict[str, str]:
        """Which record it takes another one for."""
        return dict(self.mistakes)

    def document(self) -> dict[str, Any]:
        """JSON form."""
        fields = asdict(self)
        fields["mistakes"] = [list(pair) for pair in self.mistakes]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def padded_heads(self, heads: int) -> int:
        """Heads a call must be padded to; q rows with zeros, the sink with -inf, the output cut back.

        Args:
            heads: Real heads of the rank.

        Raises:
            HeadsError: No kernel is large enough, or the count is not positive.
        """
        fitting = [count for count in self.heads if count >= heads]
        if heads < 1 or not fitting:
            raise HeadsError(
                "heads",
                got=heads,
                expected=f"1 .. {max(self.heads)}",
                detail=f"kernels for {_ranges(self.heads)} heads",
            )
        return min(fitting)

    def padded_topk(self, topk: int) -> int:
        """Width a row of slots must be padded to with -1; lengths stay as they are.

        Args:
            topk: Slots of a query, live or not.

        Raises:
            TopkError: No kernel is wide enough, or the width is not positive.
        """
        width = max(topk, self.least_topk)
        width = -(-width // self.topk_multiple) * self.topk_multiple
        fitting = [known for known in self.topk_widths if known >= width] if self.topk_widths else [width]
        if topk < 1 or not fitting:
            expected = f"1 .. {max(self.topk_widths)}" if self.topk_widths else "at least 1"
            detail = f"kernels for widths {list(self.topk_widths)}" if self.topk_widths else ""
            raise TopkError("topk", got=topk, expected=expected, detail=detail)
        return min(fitting)


def _ranges(counts: tuple[int, ...]) -> str:
    if len(counts) > 8 and counts == tuple(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]} .. {counts[-1]}"
    return ", ".join(map(str, counts))
