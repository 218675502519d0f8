"""`check`: what is wrong in a source, and what each consumer makes of each pool.

findings   error group-overlap: pool c4: layers[1].offset_bytes: got 200000, expected at least 218880; ...
verdicts   in_place | needs_stride (to N) | needs_repack | unsupported | silent_misread
exit code  1 for findings at or above --fail-on, under every format
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbridge.documents import DeclaredManifest
from kvbridge.inspect.command import Exit, Parser, UsageError, add_format, add_no_color
from kvbridge.inspect.reporting import Limit, report, source_file
from kvbridge.inspect.sources import (
    SourceManifest,
    add_source_arguments,
    load_source,
    parse_with_engine_options,
)
from kvbridge.inspect.terminal import Terminal
from kvbridge.rule import Severity
from kvbridge.rules import Finding, finding

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
