"""Do two strided sequences of pages share a byte? Exactly, without looking at the pages one by one.

    a:  [####]......[####]......[####]......      offset, stride, pages, extent (bytes of one page)
    b:  ....[##]........[##]........[##]....
              ^ page i of a and page j of b share bytes  <=>  j * Sb lies in [x - eb + 1, x + ea - 1],
                                                              x = i * Sa + offset a - offset b
For each i that interval holds floor((x + ea - 1) / Sb) - floor((x - eb) / Sb) multiples of Sb. Summed over i these
are two floor sums, which Euclid's algorithm gives in as many steps as a number has digits; the first i with a positive
count is found by bisection. So 7,166 blocks, or 2**40, cost the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPEN_PAGES = 1 << 40
"""Pages assumed where a plan leaves the count open: more than any memory holds."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """A strided sequence of pages in one storage.

    Attributes:
        offset: First byte of the first page.
        stride: Bytes between two page starts, at least 1.
        pages: Number of pages, at least 0.
        extent: Bytes of each page, at least 1.
    """

    offset: int
    stride: int
    pages: int
    extent: int


def first_overlap(a: PageRun, b: PageRun) -> tuple[int, int] | None:
    """The first page of `a` that shares a byte with a page of `b`, and that page of `b`.

    Returns:
        (page of a, page of b), or None where the sequences are disjoint.
    """
    distance = a.offset - b.offset
    high, low = distance + a.extent - 1, distance - b.extent
    # Pages of a whose candidates in b are not all before page 0, nor all behind the last page.
    first = max(0, -(high // a.stride))
    last = min(a.pages - 1, ((b.pages - 1) * b.stride - low - 1) // a.stride)
    if first > last or b.pages <= 0:
        return None

    def candidates(count: int) -> int:
        """Pairs among the pages first .. first + count - 1 of a."""
        start = first * a.stride
        return floor_sum(count, b.stride, a.stride, start + high) - floor_sum(count, b.stride, a.stride, start + low)

    total = last - first + 1
    if candidates(total) == 0:
        return None
    least, most = 1, total
    while least < most:
        middle = (least + most) // 2
        if candidates(middle):
            most = middle
        else:
            least = middle + 1
    page = first + least - 1
    return page, max(0, (page * a.stride + low) // b.stride + 1)


def floor_sum(count: int, divisor: int, factor: int, start: int) -> int:
    """Sum of floor((factor * i + start) / divisor) for i = 0 .. count - 1, in logarithmic time.

    Args:
        count: Terms, at least 0.
        divisor: At least 1.
        factor: Any integer of at least 0.
        start: Any integer.
    """
    total = 0
    while count > 0:
        quotient, factor = divmod(factor, divisor)
        total += quotient * count * (count - 1) // 2
        quotient, start = divmod(start, divisor)
        total += quotient * count
        highest = factor * count + start
        if highest < divisor:
            break
        # Count lattice points under the line along the other axis.
        count, start = divmod(highest, divisor)
        divisor, factor = factor, divisor
    return total


def overlapping_pairs(runs: Sequence[PageRun]) -> Iterator[tuple[int, int, int, int]]:
    """Pairs of runs in one storage that share a byte.

    Args:
        runs: Page runs of one storage.

    Yields:
        (index of one, index of the other, page of the one, page of the other), smaller index first.
    """
    for one, other in _candidates(runs):
        hit = first_overlap(runs[one], runs[other])
        if hit is not None:
            yield one, other, *hit


def _candidates(runs: Sequence[PageRun]) -> Iterator[tuple[int, int]]:
    """Pairs that may overlap: all, or, where every stride is the same, those that meet on a circle of that length."""
    strides = {run.stride for run in runs}
    if len(strides) != 1:
        yield from ((one, other) for one in range(len(runs)) for other in range(one + 1, len(runs)))
        return
    stride = strides.pop()
    order = sorted(range(len(runs)), key=lambda index: runs[index].offset % stride)
    starts = [runs[index].offset % stride for index in order]
    seen: set[tuple[int, int]] = set()
    for place, index in enumerate(order):
        end = starts[place] + runs[index].extent
        for step in range(1, len(order)):
            wrapped, other_place = divmod(place + step, len(order))
            if starts[other_place] + wrapped * stride >= end:
                break
            pair = (min(index, order[other_place]), max(index, order[other_place]))
            if pair not in seen:
                seen.add(pair)
                yield pair
