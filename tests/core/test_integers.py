"""Long lists of ids and starts: the same numbers as plain Python gives, short and long, in any form."""

from __future__ import annotations

from array import array
from random import Random

import pytest
import torch

from kvbridge.errors import SlotError, SpanError
from kvbridge.integers import affine, extremes, packed, regular_parts, repeated

SIZES = [1, 2, 31, 32, 33, 511, 512, 513, 3000]


def sample(rng: Random, size: int) -> list[int]:
    """Random numbers with stretches of equal steps, rising, falling and standing."""
    numbers: list[int] = []
    while len(numbers) < size:
        length, step = rng.choice((1, 1, 3, 31, 32, 33, 200)), rng.choice((-7, -1, 0, 1, 1, 5))
        first = rng.randrange(10_000, 100_000)
        numbers.extend(first + step * place for place in range(length))
    return numbers[:size]


@pytest.mark.parametrize("size", SIZES)
def test_parts_give_the_pairs_back(size: int) -> None:
    for seed in range(40):
        rng = Random(seed)
        sources = array("q", sample(rng, size))
        targets = array("q", [number + 3 for number in sources] if rng.random() < 0.5 else sample(rng, size))
        parts = list(regular_parts(sources, targets))
        assert [pair for here, there in parts for pair in zip(here, there, strict=True)] == list(
            zip(sources, targets, strict=True)
        )
        for here, there in parts:
            if isinstance(here, range) and isinstance(there, range):
                assert here.step > 0
                assert there.step > 0
                assert len(here) >= 31


@pytest.mark.parametrize("size", [32, 512, 3000])
def test_a_whole_stretch_is_one_pair_of_ranges(size: int) -> None:
    sources, targets = range(5, 5 + 7 * size, 7), range(0, 2 * size, 2)
    assert list(regular_parts(array("q", sources), array("q", targets))) == [(sources, targets)]


def test_stretches_of_a_long_list_are_found() -> None:
    noise = Random(1).sample(range(10**6, 2 * 10**6), 700)
    numbers = array("q", [*noise[:350], *range(100), *noise[350:]])
    parts = [here for here, _ in regular_parts(numbers, numbers) if isinstance(here, range)]
    assert parts == [range(100)]


@pytest.mark.parametrize("size", SIZES)
def test_arithmetic(size: int) -> None:
    rng = Random(size)
    numbers = [rng.randrange(10**6) for _ in range(size)]
    entries = packed("pages", numbers)
    assert extremes(entries) == (min(numbers), max(numbers))
    assert list(affine(entries, 181440, 1002240)) == [181440 + number * 1002240 for number in numbers]
    assert repeated(packed("pages", range(size))) is None
    unique = rng.sample(range(10**6), size)
    assert repeated(packed("pages", unique)) is None
    assert repeated(packed("pages", [*unique, unique[size // 2]])) == unique[size // 2]


def test_ranges_stay_ranges() -> None:
    assert packed("pages", range(1 << 60)) == range(1 << 60)
    assert affine(range(2, 10, 3), 5, 100) == range(205, 1005, 300)
    assert list(affine(range(9, 1, -3), 5, 100)) == [905, 605, 305]
    assert extremes(range(9, 1, -3)) == (3, 9)


@pytest.mark.parametrize("size", [3, 3000])
def test_forms_of_a_list(size: int) -> None:
    numbers = Random(size).sample(range(10**6), size)
    for form in (
        numbers,
        tuple(numbers),
        iter(numbers),
        torch.tensor(numbers),
        torch.tensor(numbers, dtype=torch.int32),
    ):
        assert packed("pages", form) == array("q", numbers)


def test_what_is_no_page_id() -> None:
    for wrong in ([1.5], ["3"], [None], torch.tensor([1.5])):
        with pytest.raises(TypeError):
            packed("pages", wrong)
    with pytest.raises(SlotError, match="pages: got a number beyond 64 bits, expected a page or slot of the pool"):
        packed("pages", [1, 1 << 63])
    with pytest.raises(SpanError, match="got a start beyond 64 bits"):
        affine(array("q", [1 << 40]), 0, 1 << 40)
