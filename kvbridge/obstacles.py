"""What is asked of a consumer, and what stands in the way: the shared words of the fitting rules.

    Question(layout, consumer, pages, offset ...) --rules--> Obstacle(finding, verdict, stride that would do)

The worst verdict of all obstacles is the verdict on the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvbridge.contract import Accepts, Consumer, IndexUnit
from kvbridge.errors import LayoutError
from kvbridge.layout import PageLayout
from kvbridge.rule import Severity
from kvbridge.rules import Finding, finding, finding_of


class Verdict(StrEnum):
    """How a pool can be used by a consumer, best first."""

    IN_PLACE = "in_place"
    NEEDS_STRIDE = "needs_stride"
    NEEDS_REPACK = "needs_repack"
    UNSUPPORTED = "unsupported"
    SILENT_MISREAD = "silent_misread"

    @property
    def rank(self) -> int:
        """0 for the best."""
        return tuple(Verdict).index(self)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One thing that stands in the way, or that a caller must know.

    Attributes:
        finding: What it is.
        verdict: What it makes of the pool; in_place for mere notes.
        needs_stride_bytes: Stride that would do.
    """

    finding: Finding
    verdict: Verdict
    needs_stride_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A layout and a consumer, and what else is known of the call.

    Attributes:
        layout: A consistent layout.
        consumer: The kernel.
        pages: Pages of the pool, None where open.
        offset: First page's start in its storage.
        storage_bytes: Size of the storage, None where unknown.
        index_unit: What the caller's slots count, None where not stated.
        pool: Pool label.
    """

    layout: PageLayout
    consumer: Consumer
    pages: int | None = None
    offset: int = 0
    storage_bytes: int | None = None
    index_unit: IndexUnit | None = None
    pool: str = ""

    @property
    def accepts(self) -> Accepts | None:
        """The consumer's entry for this record in this pool."""
        return self.consumer.accepted(self.layout.record, self.layout.pool)

    @property
    def stride_multiple(self) -> int:
        """What the page stride must be a multiple of."""
        return self.accepts.stride_multiple_bytes if self.accepts else 1

    def obstacle(
        self,
        code: str,
        field: str,
        verdict: Verdict,
        *,
        got: object,
        expected: object,
        detail: str = "",
        severity: Severity | None = None,
        consequence: str = "",
        needs_stride_bytes: int | None = None,
    ) -> Obstacle:
        """Makes an obstacle of a catalogued rule."""
        found = finding(
            code,
            field,
            got=got,
            expected=expected,
            detail=detail,
            pool=self.pool,
            consumer=self.consumer.name,
            severity=severity,
            consequence=consequence,
        )
        return Obstacle(found, verdict, needs_stride_bytes)

    def obstacle_of(self, error: LayoutError, verdict: Verdict, *, needs_stride_bytes: int | None = None) -> Obstacle:
        """Makes an obstacle of a typed error."""
        found = finding_of(error, pool=self.pool, consumer=self.consumer.name)
        return Obstacle(found, verdict, needs_stride_bytes)
