"""`check`: what is wrong in a source, and what each consumer makes of each pool.

findings   error group-overlap: pool c4: layers[1].offset_bytes: got 200000, expected at least 218880; ...
verdicts   in_place | needs_stride (to N) | needs_repack | unsupported | silent_misread
exit code  1 for findings at or above --fail-on, under every format
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbridge.documents import DeclaredManifest
from kvbridge.inspect.command import Exit, Parser, UsageError, add_format, add_no_color
from kvbridge.inspect.sources import (
    Source,
    SourceManifest,
    add_source_arguments,
    load_source,
    parse_with_engine_options,
)
from kvbridge.inspect.terminal import Cell, Terminal, emit, printable
from kvbridge.manifest import SCHEMA_VERSION
from kvbridge.rules import Finding, Severity, failing, finding

if TYPE_CHECKING:
    from kvbridge.consumers import PoolFit

SUMMARY = "Findings on a manifest, and each consumer's verdict on each pool."
EXAMPLES = (
    "check captured.json",
    "check deepseek-v4-flash --engine vllm --consumer flashmla-sm100 flashinfer-sm100",
    "check captured.json --consumer all --heads 16 --format sarif > kvbridge.sarif",
    "check deepseek-v4-flash --engine sglang --fail-on waste=5%",
    "check --raw tensor.json --consumer kvbridge",
)

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


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `check`."""
    parser = Parser("check", "[SOURCE] [OPTIONS]", SUMMARY, EXAMPLES)
    add_source_arguments(parser)
    parser.add_argument(
        "--consumer",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="kernels to give verdicts for, or all (default: kvbridge); `consumers` lists them",
    )
    parser.add_argument("--heads", type=int, metavar="N", help="query heads of a rank, to compare with the kernels'")
    parser.add_argument(
        "--fail-on",
        action="append",
        metavar="LIMIT",
        help="error, warning, note, or waste=P%% for tail padding above P percent of a page (default: error)",
    )
    parser.add_argument("--raw", metavar="FILE", help="one declared tensor instead of a SOURCE, as in `show --raw`")
    add_format(parser, "table", "json", "sarif", "github")
    add_no_color(parser)
    return parse_with_engine_options(parser, tokens)


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    limit = parse_limit(arguments.fail_on or [])
    consumers = choose_consumers(arguments.consumer or ["kvbridge"])
    if arguments.raw is not None:
        from kvbridge.inspect.raw import check_raw

        return check_raw(arguments, terminal, consumers=consumers, limit=limit)
    source = load_source(arguments)
    findings: list[Finding] = []
    fits: list[PoolFit] = []
    for manifest in source.manifests:
        prefix = f"{manifest.manifest.engine.name}:" if len(source.manifests) > 1 else ""
        for entry in (*audit(manifest), *_waste_findings(manifest, limit)):
            findings.append(replace(entry, pool=f"{prefix}{entry.pool}") if prefix and entry.pool else entry)
        for pool_fit in _fits(manifest, consumers, arguments.heads):
            named = replace(pool_fit, pool=f"{prefix}{pool_fit.pool}")
            fits.append(named)
            findings += [replace(entry, pool=named.pool) for entry in named.fit.findings]
    return report(findings, fits, arguments, terminal, limit=limit, file=source_file(arguments))


def audit(manifest: SourceManifest) -> tuple[Finding, ...]:
    """Findings on one manifest of a source, without consumers."""
    from kvbridge.audit import audit_declared, audit_manifest

    stated = manifest.manifest
    return audit_declared(stated) if isinstance(stated, DeclaredManifest) else audit_manifest(stated)


def _fits(manifest: SourceManifest, consumers: Sequence[str], heads: int | None) -> Iterator[PoolFit]:
    from kvbridge.consumers import fit_manifest

    return fit_manifest(manifest.manifest, consumers, heads=heads)


def choose_consumers(names: Iterable[str]) -> tuple[str, ...]:
    """Consumers by name; `all` stands for every one.

    Raises:
        UsageError: No such consumer.
    """
    from kvbridge.consumers import consumer_names

    known = consumer_names()
    wanted = [name for text in names for name in text.split(",")]
    for name in wanted:
        if name not in known and name != "all":
            raise UsageError(f"--consumer: got {name!r}, expected all or one of {', '.join(known)}")
    return known if "all" in wanted else tuple(dict.fromkeys(wanted))


def parse_limit(texts: Sequence[str]) -> Limit:
    """Reads `--fail-on`, given once or several times.

    Raises:
        UsageError: Neither a severity nor `waste=P%`.
    """
    limit = Limit()
    for text in texts:
        name, equals, value = text.partition("=")
        if name == "waste" and equals:
            limit = replace(limit, waste_percent=str(_percentage(text, value)))
        elif not equals and name in set(Severity):
            limit = replace(limit, severity=Severity(name))
        else:
            raise UsageError(f"--fail-on: got {text!r}, expected error, warning, note or waste=5%")
    return limit


def _percentage(text: str, value: str) -> object:
    from fractions import Fraction

    try:
        share = Fraction(value.removesuffix("%").strip())
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 100:
        raise UsageError(f"--fail-on: got {text!r}, expected a percentage such as waste=5%")
    return share


def _waste_findings(manifest: SourceManifest, limit: Limit) -> Iterator[Finding]:
    """Findings on pages whose tail padding exceeds the limit; they fail the run whatever severity it asks for."""
    if limit.waste_percent is None:
        return
    from fractions import Fraction

    share = Fraction(limit.waste_percent)
    for label, entry in manifest.labelled().items():
        pool = entry.pool
        if pool is not None and 100 * pool.waste_bytes > share * pool.page_bytes:
            most = int(share * pool.page_bytes / 100)
            yield finding(
                "waste",
                "waste_bytes",
                got=pool.waste_bytes,
                expected=f"at most {most}",
                detail=f"{limit.waste_percent} % of a page of {pool.page_bytes}",
                pool=label,
                severity=Severity.ERROR,
            )


def source_file(arguments: Namespace) -> str | None:
    """The file a source was read from, for locations in reports; None for plans and stdin."""
    from pathlib import Path

    name = arguments.raw if arguments.raw is not None else arguments.source
    return name if name and name != "-" and Path(name).is_file() else None


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
