"""What a page is: payload bytes, physical stride, padding policy, record, rows.

    exact      [payload][payload][payload]                        stride = payload
    aligned    [payload|tail][payload|tail]                       stride = page = payload rounded up to the alignment
    packed     [payload|tail]..foreign..[payload|tail]..foreign.. stride = the slab; foreign bytes are other layers'

The three facts that engines disagree on are stored, not guessed: `payload_bytes`, `page_stride_bytes`, `padding`.
`DeclaredLayout` holds whatever somebody declared, so that an audit can explain a contradiction; a `PageLayout` is
always consistent. Alignment is data, not an engine's name: 37,376 may be exact, packed or 512-aligned, 37,440 is
576-aligned.
"""

# Annotations are evaluated here and now: pydantic would compile each of them from text, at every start.

from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, StrictInt, StrictStr, model_validator

from kvbridge.errors import (
    AlignmentError,
    DtypeError,
    KindError,
    LayoutError,
    OverlapError,
    PaddingError,
    PageCountError,
    PageRowsError,
    PageStrideError,
    PayloadError,
    SlotError,
    TokensPerRowError,
)
from kvbridge.frozen import Frozen
from kvbridge.records import Record, Region, get_record

DTYPE_BYTES = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float32": 4}
"""Element bytes of the dtypes a pool tensor may have, by torch's names."""


class PaddingPolicy(StrEnum):
    """What lies between two payloads, as the engine declares it; a tensor alone cannot tell."""

    EXACT = "exact"
    ALIGNED = "aligned"
    PACKED = "packed"


class PoolKind(StrEnum):
    """How a pool is addressed."""

    PAGED = "paged"
    TOKEN_GRANULAR = "token_granular"  # one tensor row per slot; a page is a run of rows
    INDEX_ONLY = "index_only"  # slot bookkeeping without bytes


class Padding(Frozen):
    """Padding policy of a page.

    Attributes:
        policy: `exact`, `aligned` or `packed`.
        alignment: Bytes that page_bytes is rounded up to; required for `aligned`, optional for `packed`.
    """

    policy: PaddingPolicy
    alignment: StrictInt | None = None


class DeclaredLayout(Frozen):
    """A page layout as somebody declared it; it may contradict itself (see `violations`).

    Attributes:
        record: Record name, a key of `kvbridge.records.RECORDS`.
        page_rows: Rows in a page.
        tokens_per_row: Tokens that one row stands for: 1, 2, 4 or 128 in the models known.
        payload_bytes: Bytes of a page that carry meaning: page_rows times the record's bytes.
        page_stride_bytes: Distance between the starts of two neighbouring pages.
        padding: Policy and alignment.
        page_bytes: Payload and tail padding; None to have it follow from payload and alignment.
        num_pages: Pages of the pool; None for as many as the tensor has.
        reserved_pages: Pages at the start that never hold live rows (null block, dummy page).
        dtype: Torch's name of the tensor's dtype.
        kind: Paged, token-granular or index-only.
        plane: Which tensor this is, for records whose rows are spread over several.
        pool: What the pool holds: swa, c1, c2, c4, c128, indexer, compressor_state, mla, dsa ...
    """

    record: StrictStr | None = None
    page_rows: StrictInt
    tokens_per_row: StrictInt = 1
    payload_bytes: StrictInt
    page_stride_bytes: StrictInt
    padding: Padding
    page_bytes: StrictInt | None = None
    num_pages: StrictInt | None = None
    reserved_pages: StrictInt = 0
    dtype: StrictStr = "uint8"
    kind: PoolKind = PoolKind.PAGED
    plane: StrictStr | None = None
    pool: Annotated[StrictStr, Field(min_length=1)] = "kv"


class PageLayout(DeclaredLayout):
    """A page layout that is consistent. Frozen; equal layouts have equal fingerprints.

    Raises:
        LayoutError: The first of `violations`, with field, got and expected.
    """

    page_bytes: StrictInt = 0
    record: StrictStr = ""

    @model_validator(mode="before")
    @classmethod
    def _fill_page_bytes(cls, data: Any) -> Any:
        return _with_page_bytes(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._require_invariants()
        return self

    def _require_invariants(self) -> None:
        for violation in violations(self):
            raise violation

    @classmethod
    def built(cls, **fields: Any) -> Self:
        """As `Frozen.built`; `page_bytes` may be left out.

        Raises:
            LayoutError: The fields contradict each other.
            TypeError: A field is unknown, missing or no integer.
        """
        return super().built(**_with_page_bytes(fields))

    @classmethod
    def for_rows(
        cls,
        record: str,
        *,
        page_rows: int,
        policy: PaddingPolicy | str = PaddingPolicy.EXACT,
        alignment: int | None = None,
        page_stride_bytes: int | None = None,
        kind: PoolKind | str = PoolKind.PAGED,
        plane: str | None = None,
        **fields: Any,
    ) -> Self:
        """Builds the layout whose payload and stride follow from the record and the policy.

        Args:
            record: Record name.
            page_rows: Rows in a page.
            policy: Padding policy.
            alignment: Bytes to round a page up to.
            page_stride_bytes: Slab stride; required for `packed`, implied otherwise.
            kind: How the pool is addressed.
            plane: Plane name, for records with several.
            **fields: Further fields of `PageLayout`.

        Raises:
            LayoutError: The result would be inconsistent.
        """
        payload_bytes = page_rows * get_record(record).plane_bytes(plane)
        page_bytes = _round_up(payload_bytes, alignment)
        if page_stride_bytes is None and policy == PaddingPolicy.PACKED:
            raise PageStrideError(
                "page_stride_bytes", got=None, expected="the slab's stride", detail="policy packed needs one"
            )
        return cls.built(
            record=record,
            page_rows=page_rows,
            payload_bytes=payload_bytes,
            page_bytes=page_bytes,
            page_stride_bytes=page_bytes if page_stride_bytes is None else page_stride_bytes,
            padding=Padding.built(policy=PaddingPolicy(policy), alignment=alignment),
            kind=PoolKind(kind),
            plane=plane,
            **fields,
        )

    @cached_property
    def record_format(self) -> Record:
        """The record itself."""
        return get_record(self.record)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Regions of a page; they tile the payload."""
        return self.record_format.regions(self.page_rows, self.plane) if self.payload_bytes else ()

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row in this plane."""
        return self.record_format.plane_bytes(self.plane)

    @property
    def tail_pad_bytes(self) -> int:
        """Bytes between the payload's end and the page's end."""
        return self.page_bytes - self.payload_bytes

    @property
    def foreign_bytes(self) -> int:
        """Bytes between the page's end and the next page of this layer: never touched by one layer's operation."""
        return self.page_stride_bytes - self.page_bytes

    @property
    def waste_bytes(self) -> int:
        """Bytes a page spends on padding: the tail pad."""
        return self.tail_pad_bytes

    @property
    def page_tokens(self) -> int:
        """Tokens that one page stands for."""
        return self.page_rows * self.tokens_per_row

    @property
    def capacity_rows(self) -> int | None:
        """Slots of the pool, or None where the page count is open. A slot is page * page_rows + row."""
        return None if self.num_pages is None else self.num_pages * self.page_rows

    def span_bytes(self, num_pages: int | None = None) -> int:
        """Bytes from the first page's start to the last payload byte.

        Args:
            num_pages: Pages to span; the layout's own count by default.

        Raises:
            PageCountError: No page count is known.
        """
        pages = self.num_pages if num_pages is None else num_pages
        if pages is None:
            raise PageCountError("num_pages", got=None, expected="a page count", detail="the layout leaves it open")
        return (pages - 1) * self.page_stride_bytes + self.payload_bytes if pages else 0

    def row_runs(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Where one row's bytes lie, as (offset from the first page's start, length) runs in byte order.

        Args:
            slot: page * page_rows + row.

        Returns:
            Two runs for a split page with scales (data, scales), one otherwise.

        Raises:
            SlotError: The slot is negative or beyond the pool.
        """
        capacity = self.capacity_rows
        if slot < 0 or (capacity is not None and slot >= capacity):
            raise SlotError("slot", got=slot, expected=f"0 <= slot < {capacity}")
        page, row = divmod(slot, self.page_rows)
        runs: list[tuple[int, int]] = []
        for region in self.regions:
            first = page * self.page_stride_bytes + region.offset + row * region.row_stride
            if runs and sum(runs[-1]) == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + region.row_bytes)
            else:
                runs.append((first, region.row_bytes))
        return tuple(runs)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over everything that decides where a byte lies and what it means; not over names or counts."""
        parts = (
            self.record,
            self.plane or "",
            self.kind.value,
            self.dtype,
            self.padding.policy.value,
            self.padding.alignment or 0,
            self.page_rows,
            self.tokens_per_row,
            self.payload_bytes,
            self.page_bytes,
            self.page_stride_bytes,
        )
        import hashlib  # OpenSSL takes longer to load than a page table to print

        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _round_up(value: int, multiple: int | None) -> int:
    return value if not multiple or multiple < 0 else -(-value // multiple) * multiple


def _with_page_bytes(data: dict[str, Any]) -> dict[str, Any]:
    return data if data.get("page_bytes") is not None else {**data, "page_bytes": _default_page_bytes(data)}


def _default_page_bytes(data: dict[str, Any]) -> Any:
    padding = data.get("padding")
    alignment = padding.get("alignment") if isinstance(padding, dict) else getattr(padding, "alignment", None)
    payload_bytes = data.get("payload_bytes")
    if not isinstance(payload_bytes, int) or not isinstance(alignment, int | None):
        return payload_bytes
    return _round_up(payload_bytes, alignment)


def violations(layout: DeclaredLayout) -> Iterator[LayoutError]:
    """Every contradiction inside one declared layout, most basic first.

    Args:
        layout: Declared fields; `page_bytes=None` stands for payload rounded up to the alignment.

    Yields:
        One typed error per contradiction.
    """
    counts = tuple(_count_violations(layout))
    yield from counts
    if layout.kind is PoolKind.INDEX_ONLY:
        yield from _index_only_violations(layout)
        return
    record: Record | None
    try:
        record = get_record(layout.record)
        row_bytes = record.plane_bytes(layout.plane)
    except LayoutError as error:
        yield error
        record, row_bytes = None, 0
    if row_bytes and layout.page_rows > 0 and layout.payload_bytes != layout.page_rows * row_bytes:
        yield PayloadError(
            "payload_bytes",
            got=layout.payload_bytes,
            expected=layout.page_rows * row_bytes,
            detail=f"{layout.page_rows} rows of {row_bytes} bytes, record {layout.record}",
        )
    elif layout.payload_bytes <= 0 and not counts:
        yield KindError("payload_bytes", got=layout.payload_bytes, expected="at least 1 for a pool with bytes")
    yield from _padding_violations(layout)
    if layout.kind is PoolKind.TOKEN_GRANULAR and layout.page_stride_bytes > layout.payload_bytes:
        yield PageStrideError(
            "page_stride_bytes",
            got=layout.page_stride_bytes,
            expected=layout.payload_bytes,
            detail="slots of a token-granular pool lie one behind the other",
        )
    if record is not None:
        yield from _dtype_violations(layout, record)


def _count_violations(layout: DeclaredLayout) -> Iterator[LayoutError]:
    if layout.page_rows <= 0:
        yield PageRowsError("page_rows", got=layout.page_rows, expected="at least 1")
    if layout.tokens_per_row <= 0:
        yield TokensPerRowError("tokens_per_row", got=layout.tokens_per_row, expected="at least 1")
    if layout.num_pages is not None and layout.num_pages < 0:
        yield PageCountError("num_pages", got=layout.num_pages, expected="at least 0")
    elif layout.reserved_pages < 0 or (layout.num_pages is not None and layout.reserved_pages > layout.num_pages):
        yield PageCountError(
            "reserved_pages", got=layout.reserved_pages, expected=f"0 .. {layout.num_pages} (num_pages)"
        )


def _index_only_violations(layout: DeclaredLayout) -> Iterator[LayoutError]:
    for field in ("payload_bytes", "page_bytes", "page_stride_bytes"):
        value = getattr(layout, field)
        if value:
            yield KindError(field, got=value, expected=0, detail="kind index_only owns no bytes")


def _dtype_violations(layout: DeclaredLayout, record: Record) -> Iterator[LayoutError]:
    element_bytes = DTYPE_BYTES.get(layout.dtype)
    if element_bytes is None:
        yield DtypeError("dtype", got=layout.dtype, expected=f"one of {sorted(DTYPE_BYTES)}")
        return
    uniform = record.uniform_encoding(layout.plane)
    if element_bytes > 1 and (uniform is None or uniform.value != layout.dtype):
        yield DtypeError("dtype", got=layout.dtype, expected="a one-byte dtype", detail=f"record {record.name}")
    needed = record.element_bytes(layout.plane)
    if layout.page_stride_bytes % needed:
        yield AlignmentError(
            "page_stride_bytes",
            got=layout.page_stride_bytes,
            expected=f"a multiple of {needed}",
            detail=f"widest element of record {record.name}",
        )


def _padding_violations(layout: DeclaredLayout) -> Iterator[LayoutError]:
    policy, alignment = layout.padding.policy, layout.padding.alignment
    payload, stride = layout.payload_bytes, layout.page_stride_bytes
    if alignment is not None and alignment <= 0:
        yield PaddingError("padding.alignment", got=alignment, expected="at least 1")
        return
    if stride < payload:
        yield OverlapError("page_stride_bytes", got=stride, expected=f"at least {payload} (payload_bytes)")
    if policy is PaddingPolicy.ALIGNED and alignment is None:
        yield PaddingError("padding.alignment", got=None, expected="a byte count", detail="policy aligned")
        return
    if policy is PaddingPolicy.EXACT and alignment is not None and payload % alignment:
        yield PaddingError(
            "padding.alignment",
            got=alignment,
            expected=f"a divisor of payload_bytes {payload}",
            detail="policy exact has no tail pad",
        )
    page = payload if policy is PaddingPolicy.EXACT else _round_up(payload, alignment)
    if layout.page_bytes is not None and layout.page_bytes != page:
        yield PaddingError(
            "page_bytes",
            got=layout.page_bytes,
            expected=page,
            detail=f"policy {policy.value}, payload {payload}, alignment {alignment}",
        )
    if policy is PaddingPolicy.PACKED:
        if payload <= stride < page:
            yield OverlapError("page_stride_bytes", got=stride, expected=f"at least {page} (page_bytes)")
    elif stride > payload and stride != page:
        yield PageStrideError("page_stride_bytes", got=stride, expected=page, detail=f"policy {policy.value}")
    elif policy is PaddingPolicy.ALIGNED and payload == stride != page:
        yield PageStrideError("page_stride_bytes", got=stride, expected=page, detail="policy aligned")
