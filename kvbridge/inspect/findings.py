"""Findings for machines: SARIF 2.1.0 for code scanning, GitHub's workflow commands, and the JSON of `check`.

    sarif    {"version": "2.1.0", "runs": [{"tool": {"driver": {"rules"}}, "results": [{"ruleId", "level", ...}]}]}
    github   ::error title=stride-overlap::pool c4: page_stride_bytes: got 37375, expected at least 37376

Severity becomes SARIF's level unchanged: error, warning, note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbridge import __version__
from kvbridge.inspect.terminal import printable
from kvbridge.rule import Severity
from kvbridge.rules import Finding, get_rule

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
"""Address of the schema that SARIF documents name."""

_GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def render_sarif(findings: Sequence[Finding], *, source: str | None) -> str:
    """A SARIF log with one run.

    Args:
        findings: Findings, in order.
        source: File that was checked, for the location of each result; None where there is no file.
    """
    codes = sorted({entry.code for entry in findings})
    rules = [_sarif_rule(code) for code in codes]
    results = [_sarif_result(entry, codes.index(entry.code), source) for entry in findings]
    driver = {"name": "kvbridge", "semanticVersion": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, sort_keys=True) + "\n"


def _sarif_rule(code: str) -> dict[str, Any]:
    rule = get_rule(code)
    return {
        "id": code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.explanation},
        "help": {"text": rule.fix},
        "defaultConfiguration": {"level": rule.severity.value},
    }


def _sarif_result(entry: Finding, index: int, source: str | None) -> dict[str, Any]:
    place: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": _place(entry), "kind": "member"}]}
    if source is not None:
        place |= {"physicalLocation": {"artifactLocation": {"uri": _uri(source)}}}
    return {
        "ruleId": entry.code,
        "ruleIndex": index,
        "level": entry.severity.value,
        "message": {"text": _sentence(entry)},
        "locations": [place],
        "properties": {name: value for name, value in entry.document().items() if value is not None},
    }


def _uri(source: str) -> str:
    from urllib.parse import quote

    return quote(source.encode("utf-8", "surrogateescape"), safe="/")


def _place(entry: Finding) -> str:
    return ".".join(part for part in (entry.pool, entry.consumer, entry.field) if part) or entry.code


def _sentence(entry: Finding) -> str:
    about = [f"pool {entry.pool}" if entry.pool else "", f"for {entry.consumer}" if entry.consumer else ""]
    return ": ".join(printable(part) for part in (*about, f"{entry.message}; {entry.consequence}") if part)


def render_github(findings: Iterable[Finding], *, source: str | None) -> str:
    """GitHub workflow commands, one line a finding.

    Args:
        findings: Findings, in order.
        source: File that was checked; None where there is no file.
    """
    lines = []
    for entry in findings:
        properties = {"title": entry.code} | ({"file": source} if source is not None else {})
        packed = ",".join(f"{name}={github_property(value)}" for name, value in properties.items())
        lines.append(f"::{_GITHUB[entry.severity]} {packed}::{github_data(_sentence(entry))}\n")
    return "".join(lines)


def github_data(text: str) -> str:
    """Escapes the message of a workflow command: percent signs and line ends."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def github_property(text: str) -> str:
    """Escapes a property of a workflow command: as the message, and colons and commas."""
    return github_data(printable(text)).replace(":", "%3A").replace(",", "%2C")


def check_document(
    findings: Iterable[Finding], verdicts: Iterable[Mapping[str, object]], *, ok: bool, schema_version: int
) -> str:
    """JSON of `check`: sorted keys, integers."""
    document = {
        "schema_version": schema_version,
        "ok": ok,
        "findings": [entry.document() for entry in findings],
        "verdicts": list(verdicts),
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"
