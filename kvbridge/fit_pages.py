"""Fitting rules about what a page holds: record, rows, and the shape of a call.

record     taken / taken in other pools only / mistaken for another / a sibling arrangement is taken / refused
page rows  a set of sizes, or powers of two
heads, slot widths: padded up to the next kernel, or refused
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.contract import HeadsError, StrideUse, TopkError
from kvbridge.layout import DTYPE_BYTES, PoolKind
from kvbridge.obstacles import Obstacle, Question, Verdict
from kvbridge.records import Encoding, Record, get_record
from kvbridge.rule import Severity


def record_obstacles(question: Question) -> Iterator[Obstacle]:
    """What the consumer says of the record in this pool; after one of these nothing else is worth comparing."""
    layout, consumer = question.layout, question.consumer
    if layout.kind is PoolKind.INDEX_ONLY:
        yield question.obstacle(
            "consumer-record",
            "kind",
            Verdict.UNSUPPORTED,
            got="index_only",
            expected="a pool with bytes",
            detail="there is nothing to read",
            severity=Severity.NOTE,
            consequence="the pool only hands out slots",
        )
    elif question.accepts is not None:
        return
    elif layout.record in consumer.records:
        pools = [pool for entry in consumer.accepts if entry.record == layout.record for pool in entry.pools]
        yield question.obstacle(
            "consumer-record",
            "pool",
            Verdict.UNSUPPORTED,
            got=layout.pool,
            expected=f"record {layout.record} in pool {' or '.join(pools)}",
        )
    elif layout.record in consumer.records_mistaken:
        yield from _mistaken_record(question, consumer.records_mistaken[layout.record])
    elif not consumer.checks_record and layout.record_format.d_qk and DTYPE_BYTES[layout.dtype] == 1:
        yield question.obstacle(
            "consumer-silent",
            "record",
            Verdict.SILENT_MISREAD,
            got=layout.record,
            expected=consumer.records[0],
            detail="the consumer compares nothing that tells records apart",
        )
    else:
        yield _refused_record(question)


def _mistaken_record(question: Question, taken_for: str) -> Iterator[Obstacle]:
    layout, consumer = question.layout, question.consumer
    if consumer.accepted(taken_for, layout.pool) is not None:
        yield question.obstacle(
            "consumer-silent",
            "record",
            Verdict.SILENT_MISREAD,
            got=layout.record,
            expected=taken_for,
            detail=f"{layout.row_bytes} bytes a row either way; nothing tells them apart",
        )
    else:
        yield _refused_record(question)


def _refused_record(question: Question) -> Obstacle:
    layout, consumer = question.layout, question.consumer
    record = layout.record_format
    taken = [entry.record for entry in consumer.accepts if entry.takes_pool(layout.pool)]
    sibling = next((name for name in taken if _field_bytes(record) == _field_bytes(get_record(name))), None)
    return question.obstacle(
        "consumer-record",
        "record",
        Verdict.NEEDS_REPACK if sibling else Verdict.UNSUPPORTED,
        got=layout.record,
        expected=f"one of {list(consumer.records)}",
        detail=f"{sibling} holds the same fields in another order" if sibling else "",
        severity=None if record.d_qk else Severity.NOTE,
        consequence="" if record.d_qk else "the pool is no MLA cache, and a decode call is never given it",
    )


def _field_bytes(record: Record) -> frozenset[tuple[str, int, Encoding]]:
    return frozenset((field.name, field.row_bytes, field.encoding) for field in record.fields)


def page_rows_obstacles(question: Question) -> Iterator[Obstacle]:
    """Rows a page against the kernels there are."""
    rows, consumer = question.layout.page_rows, question.consumer
    known = question.accepts.page_rows if question.accepts else ()
    if known and rows not in known:
        fitting = [count for count in known if count % rows == 0 or rows % count == 0]
        verdict = Verdict.NEEDS_REPACK if fitting else Verdict.UNSUPPORTED
        if consumer.stride is StrideUse.OWN_PAGE_UNCHECKED:
            verdict = Verdict.SILENT_MISREAD
        yield question.obstacle(
            "consumer-page-rows",
            "page_rows",
            verdict,
            got=rows,
            expected=" or ".join(map(str, known)),
            detail=f"rows can be copied into pages of {max(fitting)}" if fitting else "",
        )
    elif consumer.page_rows_power_of_two and rows & (rows - 1):
        yield question.obstacle(
            "consumer-page-rows", "page_rows", Verdict.UNSUPPORTED, got=rows, expected="a power of two"
        )


def head_obstacles(question: Question, heads: int) -> Iterator[Obstacle]:
    """Query heads of a rank against the kernels there are."""
    try:
        padded = question.consumer.padded_heads(heads)
    except HeadsError as error:
        yield question.obstacle_of(error, Verdict.UNSUPPORTED)
        return
    if padded != heads:
        yield question.obstacle(
            "consumer-heads-pad",
            "heads",
            Verdict.IN_PLACE,
            got=heads,
            expected=padded,
            detail="q padded with zeros, the sink with -inf, the output cut back",
        )


def topk_obstacles(question: Question, topk: int) -> Iterator[Obstacle]:
    """Width of a row of slots against the kernels there are."""
    try:
        padded = question.consumer.padded_topk(topk)
    except TopkError as error:
        yield question.obstacle_of(error, Verdict.UNSUPPORTED)
        return
    if padded != topk:
        yield question.obstacle(
            "consumer-topk",
            "topk",
            Verdict.IN_PLACE,
            got=topk,
            expected=padded,
            detail="pad with -1 and keep the lengths",
            severity=Severity.WARNING,
        )
