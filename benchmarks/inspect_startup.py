"""Start-up time of `python -m kvbridge.inspect show`, each in its own process, against one that imports libraries.

    python benchmarks/inspect_startup.py [RUNS]

    baseline   from pydantic import the names that the contract uses; import typer     nothing else
    lazy       import pydantic, typer     for comparison: pydantic loads its models only when they are named
    json       show --format json      limit 0.35 s and 1.5 times the baseline
    table      show                    limit twice that of json

Prints the minimum of RUNS (default 10) of each, interleaved, so that a noisy machine disturbs all alike: wall time, and
processor time, which other programs on the machine disturb less. Exit code 1 where both exceed a limit: with idle
cores the two are the same, and on a busy machine wall time measures the others.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import dataclass

COMMANDS = {
    "baseline": (
        "-c",
        "from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator; import typer",
    ),
    "lazy": ("-c", "import pydantic, typer"),
    "json": ("-m", "kvbridge.inspect", "show", "--format", "json"),
    "table": ("-m", "kvbridge.inspect", "show"),
}
SECONDS, RATIO, TABLE_FACTOR = 0.35, 1.5, 2.0


@dataclass(frozen=True)
class Times:
    """Minimum seconds of each command."""

    wall: dict[str, float]
    processor: dict[str, float]

    def exceeded(self) -> list[str]:
        """Commands beyond their limit in wall time and in processor time."""
        return [name for name in ("json", "table") if all(times[name] > limit(times, name) for times in self.both)]

    @property
    def both(self) -> tuple[dict[str, float], dict[str, float]]:
        """Wall and processor times."""
        return self.wall, self.processor


def limit(times: dict[str, float], name: str) -> float:
    """Largest allowed seconds of a command."""
    json = min(SECONDS, RATIO * times["baseline"])
    return json * TABLE_FACTOR if name == "table" else json


def measure(runs: int) -> Times:
    """Runs each command that often, and once before to write byte code and fill caches."""
    times = Times(dict.fromkeys(COMMANDS, float("inf")), dict.fromkeys(COMMANDS, float("inf")))
    for _ in range(runs + 1):
        for name, arguments in COMMANDS.items():
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
            after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            times.wall[name] = min(times.wall[name], wall)
            times.processor[name] = min(times.processor[name], used)
    return times


def main() -> int:
    """Measures, prints, compares."""
    times = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print("           wall               processor")
    for name in COMMANDS:
        cells = [f"{1e3 * found[name]:6.1f} ms {found[name] / found['baseline']:5.2f}x" for found in times.both]
        print(f"{name:9}  {cells[0]}   {cells[1]}")
    for name in times.exceeded():
        print(f"{name}: beyond its limit of {1e3 * limit(times.processor, name):.0f} ms")
    return int(bool(times.exceeded()))


if __name__ == "__main__":
    sys.exit(main())
