"""Byte copies as strided runs: what a repack moves, folded, and how it is moved.

    source   [====]......[====]......[====]          sources range(0, 30, 10), targets range(0, 12, 4)
    target   [====][====][====]

Equal steps stay one strided copy, whatever the count, so that a plan is small; scattered pieces are lists of starts.
`moving` runs a plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvbridge.integers import Numbers, affine, regular_parts
from kvbridge.runs import Span, Spans, join_spans
from kvbridge.spans import Placement, row_blocks

_Shape = tuple[int, int, int, int]  # row_bytes, rows, source_row_stride, target_row_stride


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Equal copies: `rows` rows from each source start to the target start in the same place of the list.

    Attributes:
        sources: First bytes to read, as offsets in the source's storage or addresses; a range where steps are equal.
        targets: First bytes to write, as many.
        row_bytes: Bytes of one row's piece.
        rows: Rows of one copy; 1 where they are one run of bytes on both sides.
        source_row_stride: Bytes between two rows of the source; 0 for a single row.
        target_row_stride: Likewise in the target.
    """

    sources: Numbers
    targets: Numbers
    row_bytes: int
    rows: int = 1
    source_row_stride: int = 0
    target_row_stride: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return len(self.sources) * self.rows * self.row_bytes

    @property
    def is_strided(self) -> bool:
        """Whether one strided copy does it."""
        return isinstance(self.sources, range) and isinstance(self.targets, range)

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """Every piece as (source, target, length)."""
        for source, target in zip(self.sources, self.targets, strict=True):
            for row in range(self.rows):
                yield source + row * self.source_row_stride, target + row * self.target_row_stride, self.row_bytes


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a copy moves; reading it moves nothing.

    Attributes:
        copies: The copies, folded.
    """

    copies: tuple[RowCopy, ...]

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """Every piece as (source, target, length), in the order in which they are moved."""
        return (segment for copy in self.copies for segment in copy.segments())

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return sum(copy.total_bytes for copy in self.copies)

    @property
    def source_spans(self) -> Spans:
        """Bytes read, ascending, joined where they touch."""
        return join_spans((source, length) for source, _, length in self.segments()).ordered()

    @property
    def target_spans(self) -> Spans:
        """Bytes written, ascending, joined where they touch."""
        return join_spans((target, length) for _, target, length in self.segments()).ordered()


class CopyBuilder:
    """Folds row-to-row copies between two placements.

    Args:
        source: Where rows are read.
        target: Where rows are written.
    """

    def __init__(self, source: Placement, target: Placement) -> None:
        self._source, self._target = source, target
        self._pieces = _pieces(source, target)
        self._whole = source.layout.regions == target.layout.regions
        self._loose: dict[_Shape, tuple[array[int], array[int]]] = {}
        self._copies: list[RowCopy] = []

    def add(self, here: Numbers, there: Numbers, source_row: int, target_row: int, rows: int) -> None:
        """Adds the same rows of many pages: page here[i] to page there[i].

        Args:
            here: Source page ids.
            there: Target page ids, as many, each once.
            source_row: First row in each source page.
            target_row: First row in each target page.
            rows: Rows, which stay inside the page on both sides.
        """
        layout = self._source.layout
        if self._whole and rows == layout.page_rows:
            self._add(here, there, 0, 0, (layout.payload_bytes, 1, 0, 0))
            return
        for source, target, row_bytes in self._pieces:
            first, target_first = source.start + source_row * source.length, target.start + target_row * target.length
            dense = rows == 1 or source.length == target.length == row_bytes
            shape = (rows * row_bytes, 1, 0, 0) if dense else (row_bytes, rows, source.length, target.length)
            self._add(here, there, first, target_first, shape)

    def finish(self) -> CopyPlan:
        """The plan."""
        copies = self._copies
        for shape, (sources, targets) in self._loose.items():
            copies.extend(RowCopy(*pair, *shape) for pair in regular_parts(sources, targets))
        return CopyPlan(tuple(map(_joined, _stacked(copies))))

    def _add(
        self, here: Numbers, there: Numbers, first: int, target_first: int, shape: tuple[int, int, int, int]
    ) -> None:
        sources = affine(here, self._source.start + first, self._source.layout.page_stride_bytes)
        targets = affine(there, self._target.start + target_first, self._target.layout.page_stride_bytes)
        if not here:
            return
        if isinstance(sources, range) and isinstance(targets, range):
            self._copies.append(RowCopy(sources, targets, *shape))
            return
        loose_sources, loose_targets = self._loose.setdefault(shape, (array("q"), array("q")))
        loose_sources.extend(sources)
        loose_targets.extend(targets)


def _pieces(source: Placement, target: Placement) -> tuple[tuple[Span, Span, int], ...]:
    """Runs of a row that stay together on both sides: (offset and row stride) in source and target, and their bytes."""
    here, there = source.layout, target.layout
    pieces: list[tuple[Span, Span, int]] = []
    if here.record_format.arrangement is there.record_format.arrangement:
        for block, goal in zip(row_blocks(here), row_blocks(there), strict=True):
            pieces.append((block, goal, block.length))
        return tuple(pieces)
    goals = {region.name: region for region in there.regions}
    for region in here.regions:
        goal_region = goals[region.name]
        pieces.append(
            (
                Span(region.offset, region.row_stride),
                Span(goal_region.offset, goal_region.row_stride),
                region.row_bytes,
            )
        )
    return tuple(pieces)


def _stacked(copies: list[RowCopy]) -> list[RowCopy]:
    """Strided copies of one shape at equal distances are one: the quarters of a page of 256 rows, as four pages of 64.

    One copy walks a page to its end before the next page, several walk the pool once each.
    """
    stacks: dict[object, list[RowCopy]] = {}
    for place, copy in enumerate(copies):
        sources, targets = copy.sources, copy.targets
        alike: object = place
        if copy.rows == 1 and isinstance(sources, range) and isinstance(targets, range):
            alike = ("strided", copy.row_bytes, len(sources), sources.step, targets.step)
        stacks.setdefault(alike, []).append(copy)
    return [part for stack in stacks.values() for part in _equal_distances(stack)]


def _equal_distances(stack: list[RowCopy]) -> Iterator[RowCopy]:
    starts = [(copy.sources[0], copy.targets[0]) for copy in stack]
    place = 0
    while place < len(stack):
        end = place + 1
        if end < len(stack):
            step = starts[end][0] - starts[place][0]
            target_step = starts[end][1] - starts[place][1]
            while (
                min(step, target_step) > 0
                and end < len(stack)
                and starts[end] == (starts[end - 1][0] + step, starts[end - 1][1] + target_step)
            ):
                end += 1
        copy = stack[place]
        if end - place > 1:
            copy = RowCopy(copy.sources, copy.targets, copy.row_bytes, end - place, step, target_step)
        yield copy
        place = end


def _joined(copy: RowCopy) -> RowCopy:
    """A strided copy whose pieces touch on both sides is one piece."""
    if copy.rows > 1 and copy.source_row_stride == copy.target_row_stride == copy.row_bytes:
        copy = RowCopy(copy.sources, copy.targets, copy.rows * copy.row_bytes)
    sources, targets = copy.sources, copy.targets
    if copy.rows > 1 or not isinstance(sources, range) or not isinstance(targets, range) or len(sources) < 2:
        return copy
    if sources.step == targets.step == copy.row_bytes:
        return RowCopy(sources[:1], targets[:1], copy.row_bytes * len(sources))
    return copy
