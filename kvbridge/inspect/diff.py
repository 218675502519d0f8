"""`diff`: every field in which two manifests differ, the first address that differs, what breaks, what could be copied.

    diff captured.json vllm:deepseek-v4-flash          a file against a plan
    diff vllm@0.32.0:deepseek-v3 sglang:deepseek-v3    two plans; ENGINE: or ENGINE@VERSION: in front of a SOURCE

JSON: {"schema_version", "same", "a", "b", "relation", "differences", "pools"}. Exit code 1 for any difference.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvbridge.documents import DeclaredManifest
from kvbridge.engine import OptionValue, engine_names, load_engine
from kvbridge.inspect.check import Limit, report
from kvbridge.inspect.command import Exit, Parser, UsageError, add_format, add_no_color
from kvbridge.inspect.options import ENGINE_OPTION, parse_assignments, split_engine_options
from kvbridge.inspect.sources import SourceManifest, load
from kvbridge.inspect.terminal import Cell, Terminal, emit, printable
from kvbridge.manifest import SCHEMA_VERSION, Manifest

if TYPE_CHECKING:
    from kvbridge.diff import FieldDifference, ManifestDiff, PoolDiff
    from kvbridge.rules import Finding

SUMMARY = "Every field in which two manifests differ: both values, first byte that differs, what breaks, copy unit."
EXAMPLES = (
    "diff vllm:deepseek-v4-flash sglang:deepseek-v4-flash",
    "diff captured.json vllm:deepseek-v4-flash",
    "diff vllm@0.32.0:deepseek-v4.1-flash vllm@0.33.0:deepseek-v4.1-flash",
    "diff prefill.json decode.json --format json",
)
_STYLES = {"same": "green", "copy": "green", "repack": "yellow", "incompatible": "red"}


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `diff`."""
    parser = Parser("diff", "A B [OPTIONS]", SUMMARY, EXAMPLES)
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="manifest JSON, a model's config.json or its folder, - for stdin, or a built-in model; ENGINE: or "
            "ENGINE@VERSION: in front picks one engine",
        )
    parser.add_argument("-O", **ENGINE_OPTION)
    add_format(parser, "table", "json", "sarif", "github")
    add_no_color(parser)
    rest, options = split_engine_options(tokens, parser)
    arguments = parser.parse_args(rest)
    arguments.given_options = parse_assignments(arguments.engine_options) | options
    return arguments


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    from kvbridge.diff import diff_manifests

    if arguments.a == arguments.b == "-":
        raise UsageError("B: got '-' twice, expected one side on stdin")
    used: set[str] = set()
    sides = [_side(name, getattr(arguments, name), arguments.given_options, used) for name in ("a", "b")]
    unused = sorted(set(arguments.given_options) - used)
    if unused:
        raise UsageError(f"option {unused[0]}: got an option that no planned side has, expected one of its engine")
    findings = [entry for name, side in zip("ab", sides, strict=True) for entry in _faults(name, side)]
    if findings:
        return report(findings, (), arguments, terminal, limit=Limit(), file=None)
    a, b = (_manifest(side) for side in sides)
    difference = diff_manifests(a, b)
    if arguments.format == "json":
        emit(_document(sides, difference))
    elif arguments.format == "table":
        emit("".join(_table(sides, difference, terminal)))
    else:
        report(tuple(_findings(difference)), (), arguments, terminal, limit=Limit(), file=None)
    return Exit.CLEAN if difference.is_same else Exit.FINDINGS


def _side(name: str, text: str, options: Mapping[str, OptionValue], used: set[str]) -> SourceManifest:
    """One side: its source, read or planned."""
    prefix, colon, source = text.partition(":")
    engine, at, version = prefix.partition("@")
    if not colon or engine not in engine_names():
        engine, at, source = "", "", text
    if engine and not source:
        raise UsageError(f"{name.upper()}: got {text!r}, expected a SOURCE behind {prefix}:")
    known = {option.name for option in load_engine(engine).options} if engine and options else set()
    mine = {option: value for option, value in options.items() if option in known}
    used.update(mine)
    found = load(source, engine=engine or None, version=version if at else None, options=mine).manifests
    if len(found) != 1:
        engines = ", ".join(entry.manifest.engine.name for entry in found)
        raise UsageError(f"{name.upper()}: got {len(found)} manifests in {text!r} ({engines}), expected ENGINE:{text}")
    return found[0]


def _faults(name: str, side: SourceManifest) -> Iterator[Finding]:
    from kvbridge.rules import finding_of

    for label, entry in side.labelled().items():
        for fault in entry.faults:
            yield finding_of(fault, pool=f"{name}:{label}")


def _manifest(side: SourceManifest) -> Manifest:
    stated = side.manifest
    return Manifest.from_declared(stated) if isinstance(stated, DeclaredManifest) else stated


def _document(sides: list[SourceManifest], difference: ManifestDiff) -> str:
    document = {"schema_version": SCHEMA_VERSION, "same": difference.is_same, **difference.document()}
    for name, side in zip("ab", sides, strict=True):
        stated = side.manifest
        document[name] = {
            "engine": {"name": stated.engine.name, "version": stated.engine.version},
            "model": stated.model,
            "origin": stated.origin,
        }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _table(sides: list[SourceManifest], difference: ManifestDiff, terminal: Terminal) -> Iterator[str]:
    for name, side in zip("ab", sides, strict=True):
        yield f"{terminal.paint(name, 'bold')}  {side.title}\n"
    relation = difference.relation.value
    yield f"\nrelation: {terminal.paint(relation, _STYLES[relation], 'bold')}\n"
    if difference.differences:
        yield "\n" + _field_table(difference.differences, terminal)
    for pool in difference.pools:
        yield from _pool_lines(pool, terminal)


def _pool_lines(pool: PoolDiff, terminal: Terminal) -> Iterator[str]:
    relation = pool.relation.value
    name = terminal.paint(printable(pool.pool), "bold")
    yield f"\n{name}: {terminal.paint(relation, _STYLES[relation])}"
    layout = pool.layout
    yield f", copy unit {layout.copy_unit}\n" if layout is not None and layout.copy_unit is not None else "\n"
    differences = (*pool.differences, *(layout.differences if layout is not None else ()))
    if layout is not None and layout.reason:
        yield f"  {printable(layout.reason)}\n"
    if differences:
        yield "".join(f"  {line}\n" for line in _field_table(differences, terminal).splitlines())
    if layout is not None and layout.first is not None:
        first = layout.first
        place = first.field if first.slot is None else f"slot {first.slot:,}, {first.field}"
        yield f"  first difference: {printable(place)}: {_cell(first.a)} in a, {_cell(first.b)} in b\n"


def _field_table(differences: tuple[FieldDifference, ...], terminal: Terminal) -> str:
    header = ("field", "a", "b", "what it breaks")
    rows = [
        (entry.field, _cell(entry.a), _cell(entry.b), ("breaks: " if entry.breaks else "") + entry.consequence)
        for entry in differences
    ]
    return terminal.table(header, rows, left=header)


def _cell(value: int | str | bool | None) -> Cell:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "true", False: "false"}[value]
    return f"{value:,}" if isinstance(value, int) else value


def _findings(difference: ManifestDiff) -> Iterator[Finding]:
    """Differences as findings: what breaks is an error, what needs a repack a warning, the rest a note."""
    from kvbridge.rules import Severity, finding

    def tell(entry: FieldDifference, pool: str, severity: Severity) -> Finding:
        return finding(
            "peer-mismatch",
            entry.field,
            got=entry.b,
            expected=entry.a,
            pool=pool,
            severity=Severity.ERROR if entry.breaks else severity,
            consequence=entry.consequence,
        )

    for entry in difference.differences:
        yield tell(entry, "", Severity.NOTE)
    levels = {"incompatible": Severity.ERROR, "repack": Severity.WARNING}
    for pool in difference.pools:
        layout = pool.layout
        for entry in (*pool.differences, *(layout.differences if layout is not None else ())):
            yield tell(entry, pool.pool, levels.get(pool.relation.value, Severity.NOTE))
