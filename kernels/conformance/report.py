"""Runs a target over the grid and the properties, and prints the table.

cpu                      cases   ok  failed  skipped   rms max   head max   LSE max
record v4                   14   14       0        0   1.9e-03    2.8e-03   3.1e-07
...
property run_to_run          1    1       0        0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvbridge.kernels.conformance.bounds import judge
from kvbridge.kernels.conformance.grid import Case, flashmla_cases
from kvbridge.kernels.conformance.properties import PROPERTIES
from kvbridge.kernels.conformance.scenario import build
from kvbridge.kernels.conformance.targets import Target

_NUMBERS = re.compile(r"[-+]?[0-9][0-9.,e+-]*")


@dataclass(slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: Group of cases, or property.
        passed: Cases that conform.
        failed: Cases that do not.
        skipped: Cases that the target does not claim.
        rms: Worst relative RMS.
        head_rms: Worst relative RMS of a (query, head).
        lse: Worst LSE error in its unit.
    """

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    rms: float = 0.0
    head_rms: float = 0.0
    lse: float = 0.0


@dataclass(slots=True)
class Report:
    """What a run found.

    Attributes:
        target: Name of the target.
        rows: Lines of the table.
        failures: (case or property, what was missed).
        skips: Reason -> how many cases.
        unclaimed: What the target does not claim and the grid left out.
    """

    target: str
    rows: dict[str, Row] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)
    unclaimed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything that was run conforms."""
        return not self.failures

    def table(self, *, most_failures: int = 20) -> str:
        """The table as text.

        Args:
            most_failures: Kinds of failures listed below it; texts that differ in numbers only are one kind.
        """
        head = f"{self.target:<31}{'cases':>6}{'ok':>6}{'failed':>8}{'skipped':>9}"
        lines = [head + f"{'rms max':>11}{'head max':>11}{'LSE max':>11}"]
        for row in self.rows.values():
            total = row.passed + row.failed + row.skipped
            line = f"{row.name:<31}{total:>6}{row.passed:>6}{row.failed:>8}{row.skipped:>9}"
            if not row.name.startswith("property"):
                line += f"{row.rms:>11.1e}{row.head_rms:>11.1e}{row.lse:>11.1e}"
            lines.append(line)
        if self.unclaimed:
            lines.append(f"  not claimed: {', '.join(self.unclaimed)}")
        for reason, count in sorted(self.skips.items(), key=lambda item: -item[1]):
            lines.append(f"  skipped {count:>4}  {reason}")
        kinds: dict[str, list[tuple[str, str]]] = {}
        for name, text in self.failures:
            kinds.setdefault(_NUMBERS.sub("#", text), []).append((name, text))
        for found in list(kinds.values())[:most_failures]:
            name, text = found[0]
            lines.append(f"  FAILED  {name}: {text}" + (f"  (and {len(found) - 1} alike)" if found[1:] else ""))
        if len(kinds) > most_failures:
            lines.append(f"  ... {len(kinds) - most_failures} more kinds")
        return "\n".join(lines)


def run(
    target: Target,
    *,
    grid: Sequence[Case] | None = None,
    properties: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Holds a target to the kit.

    Args:
        target: What to test.
        grid: Cases; by default the pairwise grid and FlashMLA's.
        properties: Also test what one answer cannot show.
        seed: Of the pairwise grid and of all data.
        progress: Called with the name of each case before it runs.
    """
    report = Report(target.name)
    if grid is None:
        report.unclaimed = target.traits.unclaimed()
        lse = "natural" if "natural" in target.traits.lse_formats else "none"
        chosen = [*target.traits.grid(seed), *(replace(case, lse=lse) for case in flashmla_cases())]
    else:
        chosen = list(grid)
    for case in sorted(chosen, key=lambda case: (case.values == "flashmla", case.record)):
        name = "FlashMLA grid" if case.values == "flashmla" else f"record {case.record}"
        _one_case(report, report.rows.setdefault(name, Row(name)), target, case, seed=seed, progress=progress)
    if properties:
        for name, check in PROPERTIES.items():
            row = report.rows.setdefault(f"property {name}", Row(f"property {name}"))
            if progress:
                progress(row.name)
            _one_property(report, row, target, check)
    return report


def _one_case(
    report: Report, row: Row, target: Target, case: Case, *, seed: int, progress: Callable[[str], None] | None
) -> None:
    refusal = target.traits.refuses(case)
    if refusal:
        row.skipped += 1
        report.skips[refusal] = report.skips.get(refusal, 0) + 1
        return
    if progress:
        progress(str(case))
    scenario = build(case, seed=seed)
    try:
        target.decode(scenario)
    except Exception as error:  # a target that raises does not conform; the table says how
        row.failed += 1
        report.failures.append((str(case), f"raised {type(error).__name__}: {error}"))
        return
    judgement = judge(scenario)
    row.rms, row.head_rms = max(row.rms, judgement.rms), max(row.head_rms, judgement.head_rms)
    row.lse = max(row.lse, judgement.lse)
    if judgement.failures:
        row.failed += 1
        report.failures.extend((str(case), text) for text in judgement.failures)
    else:
        row.passed += 1


def _one_property(
    report: Report, row: Row, target: Target, check: Callable[[Target], tuple[list[str], str | None]]
) -> None:
    try:
        failures, skipped = check(target)
    except Exception as error:
        failures, skipped = [f"raised {type(error).__name__}: {error}"], None
    if skipped:
        row.skipped += 1
        report.skips[skipped] = report.skips.get(skipped, 0) + 1
    elif failures:
        row.failed += 1
        report.failures.extend((row.name, text) for text in failures)
    else:
        row.passed += 1
