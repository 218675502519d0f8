"""Fitting rules about where pages lie: stride, unit of slots, base, reach of offsets, range that is mapped.

honoured     [payload|....][payload|....]   any stride that is a multiple of the consumer's step
own page     [its page    ][its page    ]   a constant of the kernel, checked or not
whole rows   stride = span * row bytes      slots count storage rows: page * span + row
ignored      address = slot * row bytes     right only where pages touch
reach        last byte of the last page must have an offset: at a stride of 1,039,680 a 32-bit offset ends in page
             2,065, whose last byte still fits, while page 2,066 starts beyond
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from kvbridge.contract import IndexUnit, IndexUnitError, StrideUse
from kvbridge.layout import PaddingPolicy, PageLayout
from kvbridge.obstacles import Obstacle, Question, Verdict


def storage_row_span(layout: PageLayout) -> int:
    """Storage rows from one page to the next, for consumers that address rows: slot p * rows + r becomes p * span + r.

    Raises:
        IndexUnitError: The stride is not a whole number of rows, or the rows of a page are not dense (split pages).
    """
    if _split_rows(layout):
        raise IndexUnitError(
            "record",
            got=layout.record,
            expected="a record whose rows are dense",
            detail="in a split page row r does not start at r times the row's bytes",
        )
    span, rest = divmod(layout.page_stride_bytes, layout.row_bytes)
    if rest:
        raise IndexUnitError(
            "page_stride_bytes",
            got=layout.page_stride_bytes,
            expected=f"a multiple of {layout.row_bytes} (row bytes)",
            detail=f"remainder {rest}: slots cannot be remapped to storage rows",
        )
    return span


def stride_obstacles(question: Question) -> Iterator[Obstacle]:
    """Page stride, and unit of slots where it matters."""
    layout, consumer = question.layout, question.consumer
    if consumer.flat_rows and _split_rows(layout) and layout.page_rows > 1:
        yield _flat_rows(question)
    match consumer.stride:
        case StrideUse.HONOURED:
            yield from _multiple(question)
        case StrideUse.WHOLE_ROWS | StrideUse.IGNORED:
            yield from _row_addressed(question)
        case _:
            yield from _own_page(question)
    if consumer.most_stride_bytes and layout.page_stride_bytes > consumer.most_stride_bytes:
        yield question.obstacle(
            "consumer-stride",
            "page_stride_bytes",
            Verdict.UNSUPPORTED,
            got=layout.page_stride_bytes,
            expected=f"at most {consumer.most_stride_bytes}",
            detail="the stride is passed as a signed 32-bit number",
        )


def _split_rows(layout: PageLayout) -> bool:
    return len({region.row_stride for region in layout.regions}) > 1


def _flat_rows(question: Question) -> Obstacle:
    layout = question.layout
    first = layout.regions[0]
    scales = next(region for region in layout.regions if region.row_stride != first.row_stride)
    return question.obstacle(
        "consumer-row-address",
        "row stride",
        Verdict.SILENT_MISREAD,
        got=layout.row_bytes,
        expected=first.row_stride,
        detail=f"split page: row 1 has {first.name} at byte {first.row_stride} and {scales.name} at byte "
        f"{scales.offset + scales.row_stride}, a flat reader looks at byte {layout.row_bytes}",
    )


def _multiple(question: Question) -> Iterator[Obstacle]:
    layout, multiple = question.layout, question.stride_multiple
    rest = layout.page_stride_bytes % multiple
    if not rest:
        return
    if layout.padding.policy is PaddingPolicy.PACKED:  # the slab must go on holding the other layers
        step, least = lcm(multiple, layout.padding.alignment or 1), layout.page_stride_bytes
    else:
        step, least = multiple, layout.payload_bytes
    wanted = -(-least // step) * step
    yield question.obstacle(
        "consumer-stride",
        "page_stride_bytes",
        Verdict.NEEDS_STRIDE,
        got=layout.page_stride_bytes,
        expected=f"a multiple of {multiple}, such as {wanted}",
        detail=f"{layout.page_stride_bytes} % {multiple} = {rest}",
        needs_stride_bytes=wanted,
    )


def _own_page(question: Question) -> Iterator[Obstacle]:
    layout, use = question.layout, question.consumer.stride
    alignment = question.accepts.page_alignment_bytes if question.accepts else 1
    own = layout.page_bytes if use is StrideUse.CONTIGUOUS else -(-layout.payload_bytes // alignment) * alignment
    if layout.page_stride_bytes != own:
        reason = "only contiguous buffers are taken" if use is StrideUse.CONTIGUOUS else "a constant of the kernel"
        unchecked = use is StrideUse.OWN_PAGE_UNCHECKED
        yield question.obstacle(
            "consumer-stride",
            "page_stride_bytes",
            Verdict.SILENT_MISREAD if unchecked else Verdict.NEEDS_STRIDE,
            got=layout.page_stride_bytes,
            expected=own,
            detail=f"{layout.page_rows} rows: {reason}" + (", which checks nothing" if unchecked else ""),
            needs_stride_bytes=own,
        )


def _row_addressed(question: Question) -> Iterator[Obstacle]:
    layout, consumer = question.layout, question.consumer
    if layout.page_stride_bytes == layout.payload_bytes:
        return
    refuses = consumer.stride is StrideUse.WHOLE_ROWS
    try:
        span = storage_row_span(layout)
    except IndexUnitError as error:
        wanted = -(-layout.page_stride_bytes // layout.row_bytes) * layout.row_bytes
        verdict = Verdict.NEEDS_STRIDE if refuses else Verdict.SILENT_MISREAD
        yield question.obstacle_of(error, verdict, needs_stride_bytes=wanted)
        return
    unit = question.index_unit
    detail = f"page stride {layout.page_stride_bytes} != {layout.page_rows}*{layout.row_bytes}, span {span} rows"
    if unit is None and consumer.unit_stated:
        yield question.obstacle(
            "consumer-index-unit",
            "index_unit",
            Verdict.UNSUPPORTED,
            got=None,
            expected=f"stated: {' or '.join(consumer.index_units)}",
            detail=detail,
        )
        return
    unit = unit or consumer.index_units[0]
    remaps = refuses and unit in consumer.index_units
    if unit is not IndexUnit.STORAGE_ROW and not remaps:
        yield question.obstacle(
            "consumer-index-unit",
            "index_unit",
            Verdict.SILENT_MISREAD,
            got=unit,
            expected="storage_row: slots remapped to page * span + row",
            detail=detail,
        )


def address_obstacles(question: Question) -> Iterator[Obstacle]:
    """Base alignment, reach of the offsets, and the range that is mapped."""
    consumer, offset = question.consumer, question.offset
    rest = offset % consumer.base_alignment_bytes
    if rest:
        unchecked = "" if consumer.base_checked else "; not checked by the consumer, its loads fault"
        yield question.obstacle(
            "consumer-alignment",
            "offset_bytes",
            Verdict.UNSUPPORTED,
            got=offset,
            expected=f"a multiple of {consumer.base_alignment_bytes}",
            detail=f"remainder {rest}{unchecked}",
        )
    if question.pages:
        yield from _reach(question, question.pages)
        if consumer.maps_whole_stride:
            yield from _mapped_range(question, question.pages)


def _reach(question: Question, pages: int) -> Iterator[Obstacle]:
    layout, offsets = question.layout, question.consumer.offsets
    unit = offsets.unit_bytes or _own_unit(question)
    base = question.offset if offsets.from_storage else 0
    reach = (offsets.most + 1) * unit  # bytes that have an offset
    last = base + (pages - 1) * layout.page_stride_bytes + layout.payload_bytes
    if last <= reach:
        return
    usable = max(0, (reach - base - layout.payload_bytes) // layout.page_stride_bytes + 1)
    start = base + usable * layout.page_stride_bytes
    units = f" in units of {unit} bytes" if unit > 1 else ""
    yield question.obstacle(
        "consumer-offset-width",
        "num_pages",
        Verdict.UNSUPPORTED,
        got=pages,
        expected=f"at most {usable}",
        detail=f"first bad block {usable}: {start} + {layout.payload_bytes} - 1 = {start + layout.payload_bytes - 1} "
        f"does not fit {offsets.bits} bits{units}",
    )


def _own_unit(question: Question) -> int:
    by_rows = question.consumer.stride in (StrideUse.WHOLE_ROWS, StrideUse.IGNORED)
    return question.layout.row_bytes if by_rows else question.stride_multiple


def _mapped_range(question: Question, pages: int) -> Iterator[Obstacle]:
    layout, size = question.layout, question.storage_bytes
    if size is None and layout.padding.policy is PaddingPolicy.PACKED:
        size = pages * layout.page_stride_bytes
    end = question.offset + pages * layout.page_stride_bytes
    if size is not None and end > size:
        yield question.obstacle(
            "consumer-range",
            "offset_bytes",
            Verdict.UNSUPPORTED,
            got=question.offset,
            expected=f"at most {size - pages * layout.page_stride_bytes}",
            detail=f"maps {pages} * {layout.page_stride_bytes} bytes, up to {end}, storage has {size}",
        )
