"""Findings and verdicts on the way out, for every command that has some: tables, JSON, SARIF, GitHub annotations.

report(findings, verdicts, ...)  ->  data on stdout, exit code by the limit, the same under every format
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.inspect.command import Exit
from kvbridge.inspect.sources import (
    Source,
)
from kvbridge.inspect.terminal import Cell, Terminal, emit, printable
from kvbridge.manifest import SCHEMA_VERSION
from kvbridge.rule import Severity
from kvbridge.rules import Finding, failing

if TYPE_CHECKING:
    from kvbridge.consumers import PoolFit

_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
_VERDICT_STYLES = {"in_place": "green", "needs_stride": "yellow", "needs_repack": "yellow"}


@dataclass(frozen=True, slots=True)
class Limit:
    """What `--fail-on` asks for.

    Attributes:
        severity: Least severity that fails a run.
        waste_percent: Share of a page's bytes that may be tail padding, as written; None for no limit.
    """

    severity: Severity = Severity.ERROR
    waste_percent: str | None = None


def source_file(arguments: Namespace) -> str | None:
    """The file a source was read from, for locations in reports; None for plans and stdin."""
    from pathlib import Path

    name = arguments.raw if arguments.raw is not None else arguments.source
    return name if name and name != "-" and Path(name).is_file() else None


def report(
    findings: Sequence[Finding],
    fits: Sequence[PoolFit],
    arguments: Namespace,
    terminal: Terminal,
    *,
    limit: Limit,
    file: str | None,
) -> Exit:
    """Writes findings and verdicts in the format asked for; the exit code does not depend on it."""
    failed = bool(failing(findings, limit.severity))
    if arguments.format == "sarif":
        from kvbridge.inspect.findings import render_sarif

        emit(render_sarif(findings, source=file))
    elif arguments.format == "github":
        from kvbridge.inspect.findings import render_github

        emit(render_github(findings, source=file))
    elif arguments.format == "json":
        from kvbridge.inspect.findings import check_document

        verdicts = [pool_fit.document() for pool_fit in fits]
        emit(check_document(findings, verdicts, ok=not failed, schema_version=SCHEMA_VERSION))
    else:
        emit("".join(_tables(findings, fits, terminal, ok=not failed)))
    return Exit.FINDINGS if failed else Exit.CLEAN


def _tables(findings: Sequence[Finding], fits: Sequence[PoolFit], terminal: Terminal, *, ok: bool) -> Iterator[str]:
    """Verdicts, then findings. Notes that a pool is no MLA cache are gathered in one line; JSON has them all."""
    used = {pool_fit.pool for pool_fit in fits if not _is_aside(pool_fit)}
    idle = dict.fromkeys(pool_fit.pool for pool_fit in fits if pool_fit.pool not in used)
    asked = [pool_fit for pool_fit in fits if pool_fit.pool not in idle]
    if asked:
        yield verdict_table(asked, terminal) + "\n"
    if idle:
        yield f"no MLA caches, given to no consumer: {', '.join(map(printable, idle))}\n\n"
    aside = {(pool_fit.pool, pool_fit.fit.consumer) for pool_fit in fits if _is_aside(pool_fit)}
    for entry in findings:
        if (entry.pool, entry.consumer) in aside:
            continue
        place = "".join(f" {printable(part)}" for part in (entry.pool, entry.consumer) if part)
        yield terminal.paint(f"{entry.severity.value} {entry.code}", _STYLES[entry.severity.value], "bold") + place
        yield f"\n  {printable(entry.message)}\n  {terminal.paint(printable(entry.consequence), 'dim')}\n"
    counts = {severity: sum(entry.severity is severity for entry in findings) for severity in Severity}
    total = ", ".join(f"{count} {severity.value}{'s' * (count != 1)}" for severity, count in counts.items())
    verdict = terminal.paint("ok", "green", "bold") if ok else terminal.paint("not ok", "red", "bold")
    yield f"{verdict}: {total}\n"


def _is_aside(pool_fit: PoolFit) -> bool:
    """Whether a pool is none that the consumer would ever be given: every finding on it is a note."""
    fit = pool_fit.fit
    return fit.verdict.value == "unsupported" and all(entry.severity is Severity.NOTE for entry in fit.findings)


def verdict_table(fits: Sequence[PoolFit], terminal: Terminal) -> str:
    """Pools down and consumers across, or the other way round where there are more consumers than fit beside."""
    pools = list(dict.fromkeys(pool_fit.pool for pool_fit in fits))
    consumers = list(dict.fromkeys(pool_fit.fit.consumer for pool_fit in fits))
    cells = {(pool_fit.pool, pool_fit.fit.consumer): _verdict_cell(pool_fit) for pool_fit in fits}
    if len(consumers) <= 4:
        header = ["pool", *consumers]
        rows: list[list[Cell]] = [[pool, *(cells[pool, consumer] for consumer in consumers)] for pool in pools]
    else:
        header = ["consumer", *pools]
        rows = [[consumer, *(cells[pool, consumer] for pool in pools)] for consumer in consumers]
    return terminal.table(header, rows, left=header, styles=_VERDICT_STYLES)


def _verdict_cell(pool_fit: PoolFit) -> str:
    fit = pool_fit.fit
    stride = "" if fit.needs_stride_bytes is None else f" (to {fit.needs_stride_bytes:,})"
    return f"{fit.verdict.value}{stride}"


def report_source(source: Source, arguments: Namespace, terminal: Terminal) -> Exit:
    """Reports the contradictions inside a source, for `show --format sarif|github`."""
    from kvbridge.rules import finding_of

    findings = [
        finding_of(fault, pool=label)
        for manifest in source.manifests
        for label, entry in manifest.labelled().items()
        for fault in entry.faults
    ]
    return report(findings, (), arguments, terminal, limit=Limit(), file=source_file(arguments))
