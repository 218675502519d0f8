"""One entry of the catalogue of rules, and how bad its findings are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # wrong bytes are read or written, or the declaration contradicts itself
    WARNING = "warning"  # right today, wrong after a change that looks harmless
    NOTE = "note"  # worth knowing; nothing is wrong

    @property
    def rank(self) -> int:
        """0 for the worst; a finding fails a run when its rank is at most that of the limit."""
        return ("error", "warning", "note").index(self.value)


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the catalogue.

    Attributes:
        code: Stable identifier.
        severity: Severity of its findings.
        title: One line.
        explanation: What is checked, and why it can go wrong.
        consequence: What happens when the fault is ignored.
        fix: What to change.
    """

    code: str
    severity: Severity
    title: str
    explanation: str
    consequence: str
    fix: str

    def document(self) -> dict[str, str]:
        """JSON form."""
        return {name: str(getattr(self, name)) for name in self.__slots__}
