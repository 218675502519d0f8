"""Timing on a shared machine: contenders take turns, minima and medians, samples that a barrier stretched are refused.

round 1: A B C    round 2: B C A    ...          a slow moment hits all of them
sample = fastest + k * 8 ms                      libgomp's barrier slept; the sample says nothing about the kernel
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BARRIER_SECONDS = 8e-3
_NEAR = 0.4e-3


@dataclass(slots=True)
class Timing:
    """Samples of one contender.

    Attributes:
        samples: Seconds of each call that counts.
        refused: Calls that a barrier stretched.
    """

    samples: list[float] = field(default_factory=list)
    refused: int = 0

    @property
    def least(self) -> float:
        """The fastest call."""
        return min(self.samples)

    @property
    def median(self) -> float:
        """The median of what counts."""
        return statistics.median(self.samples)


def quantised(sample: float, fastest: float) -> bool:
    """Whether a sample lies a whole number of barrier steps above the fastest one."""
    steps = round((sample - fastest) / BARRIER_SECONDS)
    return steps >= 1 and abs(sample - fastest - steps * BARRIER_SECONDS) < _NEAR


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least_rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times contenders in turns.

    Args:
        contenders: Name -> call.
        seconds: Time to spend on all of them.
        least_rounds: Rounds even if that takes longer.
        clock: `time.perf_counter`, or `time.thread_time` for one thread's CPU time.
    """
    names = list(contenders)
    raw: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contenders[name]()
    started, rounds = time.perf_counter(), 0
    while rounds < least_rounds or time.perf_counter() - started < seconds:
        for step in range(len(names)):
            name = names[(rounds + step) % len(names)]
            before = clock()
            contenders[name]()
            raw[name].append(clock() - before)
        rounds += 1
    timings = {}
    for name, samples in raw.items():
        fastest = min(samples)
        # CPU time of one thread knows no barrier.
        kept = [sample for sample in samples if clock is time.thread_time or not quantised(sample, fastest)]
        timings[name] = Timing(kept, len(samples) - len(kept))
    return timings
