"""Runs of byte spans: many (start, length) pairs kept as few arithmetic progressions.

    spans  [ 10,14)  [ 30,34)  [ 50,54)  [ 54,58)        what a clear or a copy touches
    runs   (start 10, length 4, stride 20, count 2)      [10,14) [30,34)
           (start 50, length 8, stride  0, count 1)      [50,58): spans that touch are joined

A pool has hundreds of thousands of pages; a plan over a range of them is one run, whatever the count. Starts are
offsets in a storage, or addresses: whoever makes the spans says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

from kvbridge.overlap import PageRun, first_overlap


class Span(NamedTuple):
    """A byte range.

    Attributes:
        start: Offset or address of the first byte.
        length: Bytes.
    """

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SpanRun:
    """`count` spans of `length` bytes, `stride` bytes apart, in ascending order.

    Attributes:
        start: First byte of the first span.
        length: Bytes of each span.
        stride: Bytes between two starts, at least `length`; 0 for a single span.
        count: Spans.
    """

    start: int
    length: int
    stride: int = 0
    count: int = 1

    @property
    def end(self) -> int:
        """One past the last byte of the last span."""
        return self.start + (self.count - 1) * self.stride + self.length

    def __iter__(self) -> Iterator[Span]:
        return (Span(self.start + number * self.stride, self.length) for number in range(self.count))

    @property
    def page_run(self) -> PageRun:
        """The same bytes in the form that `overlap` takes."""
        return PageRun(self.start, self.stride or self.length, self.count, self.length)

    def overlaps(self, other: SpanRun) -> bool:
        """Whether any byte lies in both runs; exact for any two strides, and as fast for many spans as for few."""
        return first_overlap(self.page_run, other.page_run) is not None


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans in the order in which they were given; neighbours that touch are one span.

    Iterating gives `Span(start, length)`; `len()` counts them without expanding.

    Attributes:
        runs: The spans as arithmetic progressions.
    """

    runs: tuple[SpanRun, ...] = ()

    def __iter__(self) -> Iterator[Span]:
        return (span for run in self.runs for span in run)

    def __len__(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def total_bytes(self) -> int:
        """Bytes of all spans together."""
        return sum(run.count * run.length for run in self.runs)

    @property
    def first(self) -> int:
        """Lowest start; 0 without spans."""
        return min((run.start for run in self.runs), default=0)

    @property
    def end(self) -> int:
        """One past the highest byte; 0 without spans."""
        return max((run.end for run in self.runs), default=0)

    def shifted(self, distance: int) -> Spans:
        """The same spans `distance` bytes further: offsets to addresses, or one layer to another."""
        return Spans(tuple(SpanRun(run.start + distance, run.length, run.stride, run.count) for run in self.runs))

    def ordered(self) -> Spans:
        """The bytes as a set: ascending, each once, joined wherever two spans touch or overlap."""
        merged: list[list[int]] = []
        for start, length in sorted(self):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + length)
            else:
                merged.append([start, start + length])
        return join_spans((start, end - start) for start, end in merged)


class SpanBuilder:
    """Collects spans and runs in order, joining what touches and folding equal steps into runs."""

    def __init__(self) -> None:
        self._done: list[SpanRun] = []
        self._start = self._length = self._stride = self._count = 0

    def add(self, start: int, length: int, stride: int = 0, count: int = 1) -> None:
        """Appends `count` spans of `length` bytes, `stride` apart; empty spans are dropped."""
        if not length or not count:
            return
        if count > 1 and stride == length:
            length, count = length * count, 1
        last = self._start + (self._count - 1) * self._stride
        if self._count and last + self._length == start:
            self._join(last, length)
            if count > 1:
                self.add(start + stride, length, stride, count - 1)
        elif not self._fold(start, length, stride, count):
            self._close()
            self._start, self._length, self._stride, self._count = start, length, stride if count > 1 else 0, count

    def finish(self) -> Spans:
        """The spans collected so far."""
        self._close()
        self._count = 0
        return Spans(tuple(self._done))

    def _join(self, last: int, length: int) -> None:
        """Lengthens the last span, which may have to leave its run for that."""
        joined = self._length + length
        if self._count > 1:
            self._count -= 1
            self._close()
        self._start, self._length, self._stride, self._count = last, joined, 0, 1
        if self._done and self._done[-1].length == joined:
            previous = self._done.pop()
            self._start, self._stride, self._count = previous.start, previous.stride, previous.count
            if not self._fold(last, joined, 0, 1):
                self._done.append(previous)
                self._start, self._stride, self._count = last, 0, 1

    def _fold(self, start: int, length: int, stride: int, count: int) -> bool:
        """Extends the open run, if the new spans continue it."""
        if not self._count or length != self._length:
            return False
        step = start - self._start if self._count == 1 else self._stride
        if step < length or start != self._start + self._count * step or (count > 1 and stride != step):
            return False
        self._stride, self._count = step, self._count + count
        return True

    def _close(self) -> None:
        if self._count:
            stride = self._stride if self._count > 1 else 0
            self._done.append(SpanRun(self._start, self._length, stride, self._count))


def join_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Builds `Spans` from (start, length) pairs, in their order."""
    builder = SpanBuilder()
    for start, length in spans:
        builder.add(start, length)
    return builder.finish()


def as_numbers(numbers: Iterable[int] | Any) -> range | list[int]:
    """Page ids or slots as a range (kept as it is) or a list; tensors and arrays are read in one go.

    Raises:
        TypeError: An entry is not an integer.
    """
    if isinstance(numbers, range):
        return numbers
    entries = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    return list(map(index, entries))


def progressions(numbers: range | list[int]) -> Iterator[tuple[int, int, int]]:
    """Splits numbers, in their order, into (first, step, count) with step >= 1; a rising range is one."""
    if isinstance(numbers, range) and numbers.step > 0:
        if numbers:
            yield numbers.start, numbers.step, len(numbers)
        return
    first = step = count = 0
    for number in numbers:
        if count == 1 and number > first:
            step, count = number - first, 2
        elif count > 1 and number == first + step * count:
            count += 1
        else:
            if count:
                yield first, step or 1, count
            first, step, count = number, 0, 1
    if count:
        yield first, step or 1, count
