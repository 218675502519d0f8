"""Long lists of page ids and byte starts, without a Python step for each entry.

    ids     range(0, 7166), or 8 bytes an entry: | 5 | 9 | 2 | ...      a million ids are 8 MB, not 36
    starts  first + id * stride, in the same form
    parts   [5 6 7 ... 99][3 1 8][200 202 204 ...]                       stretches of equal steps, and what lies between

Entries of an `array` lie one behind the other, so torch computes on them in place. Short ones are not worth its calls.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvbridge.errors import SlotError, SpanError

if TYPE_CHECKING:
    import torch

Numbers = range | array  # type: ignore[type-arg]  # array[int] is for the type checker only until Python 3.12
"""A range, or signed 64-bit entries."""

_MANY = 512
"""Entries from which on torch is faster."""

_REGULAR = 32
"""Entries with equal steps from which on a stretch is worth a range of its own."""


def packed(field: str, numbers: Iterable[int] | Any) -> Numbers:
    """Page ids or slots as a range (kept as it is) or an array; tensors are read in one go.

    Args:
        field: Name for messages.
        numbers: Integers.

    Raises:
        TypeError: An entry is not an integer.
        SlotError: An entry needs more than 64 bits.
    """
    if isinstance(numbers, range):
        return numbers
    entries = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    try:
        return array("q", entries)
    except OverflowError:
        raise SlotError(field, got="a number beyond 64 bits", expected="a page or slot of the pool") from None


def as_tensor(numbers: Numbers) -> torch.Tensor:
    """int64 tensor; of an array without a copy."""
    import torch

    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def extremes(numbers: range | list[int] | Numbers) -> tuple[int, int]:
    """Smallest and largest of at least one number."""
    if isinstance(numbers, range):
        first, last = numbers[0], numbers[-1]
        return min(first, last), max(first, last)
    if isinstance(numbers, array) and len(numbers) >= _MANY:
        low, high = as_tensor(numbers).aminmax()
        return int(low), int(high)
    return min(numbers), max(numbers)


def repeated(numbers: Numbers) -> int | None:
    """A number that occurs twice, or None. The numbers are not negative, and small enough to be counted."""
    if isinstance(numbers, range):
        return None
    if len(numbers) >= _MANY:
        most, number = as_tensor(numbers).bincount().max(0)
        return int(number) if int(most) > 1 else None
    return next((number for number, times in Counter(numbers).items() if times > 1), None)


def affine(numbers: Numbers, first: int, stride: int) -> Numbers:
    """first + number * stride; a rising range stays a range.

    Raises:
        SpanError: A result needs more than 64 bits.
    """
    if isinstance(numbers, range) and numbers.step > 0:
        return range(first + numbers.start * stride, first + numbers.stop * stride, numbers.step * stride)
    if not numbers:
        return array("q")
    if first + extremes(numbers)[1] * stride >= 1 << 63:
        raise SpanError("pages", got="a start beyond 64 bits", expected="bytes that memory can hold")
    if len(numbers) < _MANY:
        return array("q", [first + number * stride for number in numbers])
    starts = array("q", bytes(8 * len(numbers)))
    as_tensor(starts).copy_(as_tensor(numbers)).mul_(stride).add_(first)
    return starts


def regular_parts(sources: Numbers, targets: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Cuts two arrays of one length into pairs of ranges, where both rise by equal steps, and arrays between them."""
    count = len(sources)
    if count < _MANY:
        yield (_as_range(sources), _as_range(targets)) if count >= _REGULAR else (sources, targets)
        return
    import torch

    steps, target_steps = as_tensor(sources).diff(), as_tensor(targets).diff()
    change = (steps[1:] != steps[:-1]).logical_or_(target_steps[1:] != target_steps[:-1])
    if len(change) - int(change.count_nonzero()) < _REGULAR - 2:  # no stretch can be long enough
        yield sources, targets
        return
    changes = change.nonzero().flatten() + 1
    ends = torch.cat((torch.tensor([0]), changes, torch.tensor([count - 1])))
    rising = (steps[ends[:-1]] > 0) & (target_steps[ends[:-1]] > 0)
    long = rising & (ends.diff() + 1 >= _REGULAR)
    begin = 0
    for first, last in zip(ends[:-1][long].tolist(), ends[1:][long].tolist(), strict=True):
        start = max(first, begin)  # a stretch may begin with the entry that ended the one before
        if begin < start:
            yield sources[begin:start], targets[begin:start]
        yield _as_range(sources[start : last + 1]), _as_range(targets[start : last + 1])
        begin = last + 1
    if begin < count:
        yield sources[begin:], targets[begin:]


def _as_range(numbers: Numbers) -> Numbers:
    """The range of the same entries, where there is one that rises."""
    if isinstance(numbers, range) or len(numbers) < 2 or numbers[1] <= numbers[0]:
        return numbers
    equal = range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0])
    return equal if len(equal) == len(numbers) and array("q", equal) == numbers else numbers
