"""Findings and the rules behind them: stable codes, what each means, what it breaks, how to mend it.

    error group-overlap: pool c4: layers[1].offset_bytes: got 200000, expected at least 218816 (...)
    ^     ^                  ^    ^                          ^             ^
    |     code               pool field                      got           expected        -> Finding -> JSON, SARIF

Every `LayoutError` is a rule under its own code, so what an exception printed and what an audit reports can be looked
up alike. The audits add rules that no single layout can break: placement, consumers, peers, slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvbridge.errors import KVBridgeError, LayoutError
from kvbridge.rule import Rule, Severity

JSONValue = int | str | bool | None | list[Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault or remark of an audit.

    Attributes:
        code: Key of the catalogue.
        severity: Error, warning or note.
        field: Offending field: `page_stride_bytes`, `layers[3].offset_bytes` ...
        message: Field, got and expected in one sentence.
        consequence: What goes wrong when it is ignored.
        expected: Integer where the right value is a number, text otherwise.
        got: Value found.
        pool: Pool label; empty for findings on a whole manifest.
        consumer: Consumer name; empty for findings that concern no kernel.
    """

    code: str
    severity: Severity
    field: str
    message: str
    consequence: str
    expected: JSONValue = None
    got: JSONValue = None
    pool: str = ""
    consumer: str = ""

    def document(self) -> dict[str, JSONValue]:
        """JSON form: null where no pool or no consumer is concerned."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "pool": self.pool or None,
            "consumer": self.consumer or None,
            "field": self.field,
            "expected": self.expected,
            "got": self.got,
            "message": self.message,
            "consequence": self.consequence,
        }

    def __str__(self) -> str:
        place = "".join(f" {name} {value}:" for name, value in (("pool", self.pool), ("for", self.consumer)) if value)
        return f"{self.severity.value} {self.code}:{place} {self.message}; {self.consequence}"


def finding(
    code: str,
    field: str,
    *,
    got: object,
    expected: object,
    detail: str = "",
    pool: str = "",
    consumer: str = "",
    severity: Severity | None = None,
    consequence: str = "",
) -> Finding:
    """Makes a finding of a catalogued rule.

    Args:
        code: Rule code.
        field: Offending field.
        got: Value found.
        expected: Right value, or a phrase that names it.
        detail: Arithmetic behind the expectation.
        pool: Pool label.
        consumer: Consumer name.
        severity: Other than the rule's.
        consequence: Other than the rule's.

    Raises:
        KVBridgeError: No such rule.
    """
    rule = get_rule(code)
    return Finding(
        code=code,
        severity=severity or rule.severity,
        field=field,
        message=f"{field}: got {got}, expected {expected}" + (f" ({detail})" if detail else ""),
        consequence=consequence or rule.consequence,
        expected=_json_value(expected),
        got=_json_value(got),
        pool=pool,
        consumer=consumer,
    )


def finding_of(error: LayoutError, *, pool: str = "", consumer: str = "", place: str = "") -> Finding:
    """Turns a typed error into a finding under the same code.

    Args:
        error: What a check raised.
        pool: Pool label.
        consumer: Consumer name.
        place: Path put in front of the error's field, such as `layers[2]`.
    """
    return Finding(
        code=error.code,
        severity=Severity.ERROR,
        field=f"{place}.{error.field}" if place else error.field,
        message=f"{f'{place}.' if place else ''}{error.field}: got {error.got}, expected {error.expected}"
        + (f" ({error.detail})" if error.detail else ""),
        consequence=error.consequence,
        expected=_json_value(error.expected),
        got=_json_value(error.got),
        pool=pool,
        consumer=consumer,
    )


def failing(findings: Iterable[Finding], limit: Severity) -> tuple[Finding, ...]:
    """Findings at or above a severity."""
    return tuple(entry for entry in findings if entry.severity.rank <= limit.rank)


def all_rules() -> tuple[Rule, ...]:
    """The catalogue, sorted by code: every `LayoutError` class known now, and the audits' own rules."""
    catalogue = {rule.code: rule for rule in _error_rules()}
    catalogue.update(_own_rules())
    return tuple(catalogue[code] for code in sorted(catalogue))


def get_rule(code: str) -> Rule:
    """Looks a rule up.

    Raises:
        KVBridgeError: No such rule.
    """
    own = _own_rules().get(code)
    if own is not None:
        return own
    for rule in _error_rules():
        if rule.code == code:
            return rule
    raise KVBridgeError(f"rule: got {code!r}, expected one of {[rule.code for rule in all_rules()]}")


def _own_rules() -> dict[str, Rule]:
    from kvbridge.rule_data import RULES

    return RULES


def _error_rules() -> Iterator[Rule]:
    from kvbridge.error_advice import ADVICE

    classes: list[type[LayoutError]] = [LayoutError]
    while classes:
        error = classes.pop()
        classes.extend(error.__subclasses__())
        if "code" not in error.__dict__:
            continue
        title = (error.__doc__ or error.code).strip().partition("\n")[0].rstrip(".")
        explanation, fix = ADVICE.get(error.code, (f"{title}.", "Change it to the value expected."))
        yield Rule(error.code, Severity.ERROR, title, explanation, error.consequence, fix)


def _json_value(value: object) -> JSONValue:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return str(value)
