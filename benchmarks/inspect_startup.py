"""Start-up time of `python -m kvbridge.inspect show`, each in its own process, against one that imports libraries.

    python benchmarks/inspect_startup.py [RUNS]

    baseline   import pydantic, typer                              nothing else
    json       show --format json      limit 0.35 s and 1.5 times the baseline
    table      show                    limit twice that of json

Prints the minimum of RUNS (default 10) of each, interleaved, so that a noisy machine disturbs all alike. Exit code 1
where a limit is exceeded.
"""

from __future__ import annotations

import subprocess
import sys
import time

COMMANDS = {
    "baseline": ("-c", "import pydantic, typer"),
    "json": ("-m", "kvbridge.inspect", "show", "--format", "json"),
    "table": ("-m", "kvbridge.inspect", "show"),
}
SECONDS, RATIO, TABLE_FACTOR = 0.35, 1.5, 2.0


def measure(runs: int) -> dict[str, float]:
    """Minimum wall time of each command, in seconds."""
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(runs + 1):  # the first round also writes byte code and fills caches
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def limits(best: dict[str, float]) -> dict[str, float]:
    """Largest allowed time of each command, in seconds."""
    json = min(SECONDS, RATIO * best["baseline"])
    return {"json": json, "table": TABLE_FACTOR * json}


def main() -> int:
    """Measures, prints, compares."""
    best = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    allowed = limits(best)
    for name, seconds in best.items():
        ratio = seconds / best["baseline"]
        limit = f"  limit {1e3 * allowed[name]:.0f} ms" if name in allowed else ""
        print(f"{name:9} {1e3 * seconds:6.1f} ms  {ratio:.2f} times the baseline{limit}")
    return int(any(best[name] > limit for name, limit in allowed.items()))


if __name__ == "__main__":
    sys.exit(main())
