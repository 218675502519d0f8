"""`diff`: every field in which two manifests differ, the first address that differs, what breaks, what could be copied.

    diff captured.json config.json                     a file against the plan with the file's engine and options
    diff vllm@0.32.0:deepseek-v3 sglang:deepseek-v3    two plans; ENGINE: or ENGINE@VERSION: in front of a SOURCE

JSON: {"schema_version", "same", "a", "b", "relation", "differences", "pools"}. Exit code 1 for any difference.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.documents import DeclaredManifest
from kvbridge.engine import OptionValue, engine_names, load_engine
from kvbridge.inspect.command import Exit, Parser, UsageError, add_format, add_no_color
from kvbridge.inspect.options import ENGINE_OPTION, parse_assignments, split_engine_options
from kvbridge.inspect.reporting import Limit, report
from kvbridge.inspect.sources import SourceManifest, find_source, load_found
from kvbridge.inspect.terminal import Cell, Terminal, emit, printable
from kvbridge.manifest import SCHEMA_VERSION, Manifest
from kvbridge.models import ModelConfig

if TYPE_CHECKING:
    from kvbridge.diff import FieldDifference, ManifestDiff, PoolDiff
    from kvbridge.rules import Finding

SUMMARY = "Every field in which two manifests differ: both values, first byte that differs, what breaks, copy unit."
EXAMPLES = (
    "diff vllm:deepseek-v4-flash sglang:deepseek-v4-flash",
    "diff captured.json config.json",
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
    places = {name: _place(name, getattr(arguments, name)) for name in ("a", "b")}
    made = [side for place in places.values() for side in place.made]
    used: set[str] = set()
    sides = [_side(name, place, arguments.given_options, used, made) for name, place in places.items()]
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one side comes from.

    Attributes:
        text: As given.
        engine: The engine in front; empty for none.
        version: Its version; None for none.
        source: The rest.
        found: A model to plan for, or manifests that are already made.
    """

    text: str
    engine: str
    version: str | None
    source: str
    found: ModelConfig | tuple[SourceManifest, ...]

    @property
    def made(self) -> tuple[SourceManifest, ...]:
        """The manifests; empty for a model."""
        return self.found if isinstance(self.found, tuple) else ()


def _place(name: str, text: str) -> _Place:
    prefix, colon, source = text.partition(":")
    engine, at, version = prefix.partition("@")
    if not colon or engine not in engine_names():
        engine, at, source = "", "", text
    if engine and not source:
        raise UsageError(f"{name.upper()}: got {text!r}, expected a SOURCE behind {prefix}:")
    return _Place(text, engine, version if at else None, source, find_source(source))


def _side(
    name: str,
    place: _Place,
    options: Mapping[str, OptionValue],
    used: set[str],
    made: list[SourceManifest],
) -> SourceManifest:
    """One side, read or planned. A plan beside one made manifest takes over its engine, version and options."""
    engine, version = place.engine, place.version
    taken: dict[str, OptionValue] = {}
    if not place.made and len(made) == 1 and engine in ("", made[0].manifest.engine.name):
        stated = made[0].manifest
        engine, version = stated.engine.name, version or stated.engine.version
        taken = {option: value for option, value in stated.options.items() if value is not None}
    known = {option.name for option in load_engine(engine).options} if engine and (options or taken) else set()
    mine = {option: value for option, value in options.items() if option in known}
    used.update(mine)
    given = {option: value for option, value in taken.items() if option in known} | mine
    found = load_found(place.found, place.source, engine=engine or None, version=version, options=given).manifests
    if len(found) != 1:
        engines = ", ".join(entry.manifest.engine.name for entry in found)
        raise UsageError(
            f"{name.upper()}: got {len(found)} manifests in {place.text!r} ({engines}), expected ENGINE:{place.text}"
        )
    return found[0]


def _faults(name: str, side: SourceManifest) -> Iterator[Finding]:
    from kvbridge.rules import finding_of

    for label, entry in side.labelled().items():
        for fault in entry.faults:
            yield finding_of(fault, pool=f"{name}:{label}")


def _manifest(side: SourceManifest) -> Manifest:
    stated = side.manifest
    return stated.to_manifest() if isinstance(stated, DeclaredManifest) else stated


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
    from kvbridge.rule import Severity
    from kvbridge.rules import finding

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
