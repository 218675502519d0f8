"""`rules`, `consumers`, `engines`, `schema`: what can be found, who reads pages, which engines are known, the JSON.

Each is a list of data kept elsewhere in the package; here it only gets columns, or JSON with sorted keys.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence

from kvbridge.inspect.command import Exit, Parser, UsageError, add_format, add_no_color
from kvbridge.inspect.terminal import Terminal, emit
from kvbridge.manifest import SCHEMA_VERSION

_SUMMARIES = {
    "rules": "Catalogue of finding codes: severity, what is checked, what breaks, how to mend it.",
    "consumers": "Catalogue of consumers: kernels that read or write pages, their demands, and where those were read.",
    "engines": "Engines registered here: installed version, versions whose rules are known, options of layouts.",
    "schema": "JSON Schema (draft 2020-12) of the manifest, as published in kvbridge/schema/manifest.schema.json.",
}
_EXAMPLES = {
    "rules": ("rules", "rules stride-overlap", "rules --format json"),
    "consumers": ("consumers", "consumers flashmla-sm100", "consumers --format json"),
    "engines": ("engines", "engines vllm", "engines --format json"),
    "schema": ("schema > manifest.schema.json",),
}


def parse(command: str, tokens: list[str]) -> Namespace:
    """Reads the command line behind a catalogue's name."""
    parser = Parser(
        command, "[OPTIONS]" if command == "schema" else "[NAME] [OPTIONS]", _SUMMARIES[command], _EXAMPLES[command]
    )
    if command != "schema":
        parser.add_argument("name", nargs="?", metavar="NAME", help="one entry, in full")
        add_format(parser, "table", "json")
    add_no_color(parser)
    arguments = parser.parse_args(tokens)
    arguments.command = command
    return arguments


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    if arguments.command == "schema":
        emit(schema_text())
        return Exit.CLEAN
    entries, columns = {"rules": _rules, "consumers": _consumers, "engines": _engines}[arguments.command]()
    if arguments.name is not None:
        key = columns[0]
        found = [entry for entry in entries if entry[key] == arguments.name]
        if not found:
            expected = ", ".join(str(entry[key]) for entry in entries)
            raise UsageError(f"NAME: got {arguments.name!r}, expected one of {expected}")
        entries = found
    if arguments.format == "json":
        document = {"schema_version": SCHEMA_VERSION, arguments.command: entries}
        emit(json.dumps(document, indent=2, sort_keys=True) + "\n")
    elif arguments.name is not None:
        emit("".join(_details(entries[0], terminal)))
    else:
        rows = [[_cell(entry[column]) for column in columns] for entry in entries]
        emit(terminal.table(columns, rows, left=columns))
    return Exit.CLEAN


def schema_text() -> str:
    """The published schema: sorted keys, two spaces, a final newline."""
    from kvbridge.documents import manifest_schema

    return json.dumps(manifest_schema(), indent=2, sort_keys=True) + "\n"


_Entries = list[Mapping[str, object]]


def _rules() -> tuple[_Entries, tuple[str, ...]]:
    from kvbridge.rules import all_rules

    return [rule.document() for rule in all_rules()], ("code", "severity", "title")


def _consumers() -> tuple[_Entries, tuple[str, ...]]:
    from kvbridge.consumers import CONSUMERS

    return [consumer.document() for consumer in CONSUMERS.values()], ("name", "role", "engine", "versions", "title")


def _engines() -> tuple[_Entries, tuple[str, ...]]:
    from kvbridge.engine import engine_names, installed_version, load_engine

    engines = [load_engine(name) for name in engine_names()]
    entries = [
        {
            "name": engine.name,
            "installed": installed_version(engine),
            "packages": list(engine.packages),
            "versions": list(engine.versions),
            "options": [
                {
                    "name": option.name,
                    "default": option.default,
                    "choices": list(option.choices),
                    "help": option.help,
                }
                for option in engine.options
            ],
        }
        for engine in engines
    ]
    return list(entries), ("name", "installed", "versions", "packages")


def _details(entry: Mapping[str, object], terminal: Terminal) -> Iterator[str]:
    width = max(map(len, entry))
    for name, value in entry.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield "\n"
            header = list(value[0])
            yield terminal.table(header, [[_cell(item[column]) for column in header] for item in value], left=header)
        else:
            yield f"{terminal.paint(name.ljust(width), 'bold')}  {_cell(value)}\n"


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items()) or "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_cell, value)) or "-"
    return "true" if value is True else "false" if value is False else str(value)
