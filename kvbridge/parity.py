"""Comparison of two kernels' outputs for the same call, and the report of many: engine-neutral, no engine imported.

    theirs [queries, heads, d_v]   ours [queries, heads, d_v]
       |  difference                                          relative RMS of the tensor, worst (query, head), maximum
       v
    CallRow(engine, call, shape, difference, bounds) -> verdict        ParityReport(rows, controls, tokens, times)

Where the bounds come from: each kernel may be 2.5e-3 relative RMS off float64 on the dequantised cache, most of it the
rounding of the output to bf16, which is the same in both. So two right kernels differ by less than one bound; a single
(query, head) may be 4.5e-3 off in each. A report is `ok` when every row is within its bounds and no control is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CALL_BOUND = 2.5e-3
"""Largest relative RMS of one call."""
ROW_BOUND = 9e-3
"""Largest relative RMS of one (query, head): both kernels at their own bound of 4.5e-3."""
NEAR_TIE_NATS = 1 / 16
"""Tokens may differ where the engine's own two best are no further apart than this: one step of bf16 logits."""
_QUERIES_AT_ONCE = 128  # bounds the fp32 copies of a prefill's outputs


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two outputs of one call are apart.

    Attributes:
        relative_rms: RMS of the difference over RMS of the second output.
        worst_row_rms: The same for the worst (query, head); inf where one output is 0 and the other is not.
        max_abs: Largest difference of two values.
        largest: Largest value of the second output.
    """

    relative_rms: float
    worst_row_rms: float
    max_abs: float
    largest: float


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> Difference:
    """Compares two outputs `[queries, heads, d_v]`; values that are not finite must be the same in both.

    Raises:
        ValueError: The shapes differ.
    """
    import torch

    if ours.shape != theirs.shape:
        raise ValueError(f"outputs: got shapes {list(ours.shape)} and {list(theirs.shape)}, expected the same")
    total = reference = worst = max_abs = largest = 0.0
    for first in range(0, ours.shape[0], _QUERIES_AT_ONCE):
        one = ours[first : first + _QUERIES_AT_ONCE].float()
        two = theirs[first : first + _QUERIES_AT_ONCE].float()
        finite = torch.isfinite(one) & torch.isfinite(two)
        if not bool((finite | (one == two) | (one.isnan() & two.isnan())).all()):
            return Difference(math.inf, math.inf, math.inf, math.inf)
        gap = torch.where(finite, one - two, 0)
        known = torch.where(finite, two, 0)
        gaps, knowns = gap.square().sum(-1), known.square().sum(-1)
        rows = torch.where(gaps > 0, gaps / knowns, 0).sqrt()
        total += float(gaps.sum(dtype=torch.float64))
        reference += float(knowns.sum(dtype=torch.float64))
        worst = max(worst, float(rows.max()) if rows.numel() else 0.0)
        max_abs = max(max_abs, float(gap.abs().max()) if gap.numel() else 0.0)
        largest = max(largest, float(known.abs().max()) if known.numel() else 0.0)
    relative = math.sqrt(total / reference) if reference else (math.inf if total else 0.0)
    return Difference(relative, worst, max_abs, largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """One compared call.

    Attributes:
        engine: Whose call it is.
        call: What it is, such as `prefill c4`; rows of one name are summarised together.
        layer: The engine's name of the layer.
        shape: Named sizes of the call: queries, heads, slots of each cache.
        difference: How far the outputs are apart.
        seconds: Time of each kernel in this call, by name, where it was measured.
        call_bound: Largest relative RMS allowed.
        row_bound: Largest relative RMS of one (query, head) allowed.
    """

    engine: str
    call: str
    layer: str
    shape: Mapping[str, int]
    difference: Difference
    seconds: Mapping[str, float] = field(default_factory=dict)
    call_bound: float = CALL_BOUND
    row_bound: float = ROW_BOUND

    @property
    def ok(self) -> bool:
        """Whether both bounds hold; NaN holds none."""
        return self.difference.relative_rms <= self.call_bound and self.difference.worst_row_rms <= self.row_bound

    def document(self) -> dict[str, Any]:
        """For JSON; infinite numbers become text."""
        return {
            "engine": self.engine,
            "call": self.call,
            "layer": self.layer,
            "shape": dict(self.shape),
            **{name: plain(value) for name, value in asdict(self.difference).items()},
            "seconds": dict(self.seconds),
            "call_bound": self.call_bound,
            "row_bound": self.row_bound,
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """The tokens of one request under both kernels.

    Attributes:
        request: Which request.
        theirs: Tokens under the engine's kernel.
        ours: Tokens under kvbridge's.
        gaps: The engine's own distance, in nats, between its best and second best token at each position.
        logprob_gaps: Distance of the log-probabilities of the same token under both, up to the first that differs.
        forced: The tokens are the best at each position of one given text, so that every position counts. Otherwise
            each kernel goes on from its own tokens, and behind the first that differs the texts are others anyway.
    """

    request: str
    theirs: Sequence[int]
    ours: Sequence[int]
    gaps: Sequence[float]
    logprob_gaps: Sequence[float] = ()
    forced: bool = False

    @property
    def differences(self) -> tuple[int, ...]:
        """Positions of tokens that differ and count."""
        pairs = enumerate(zip(self.theirs, self.ours, strict=True))
        found = tuple(index for index, (one, two) in pairs if one != two)
        return found if self.forced else found[:1]

    @property
    def ok(self) -> bool:
        """Equal, or different only at near ties of the engine's own."""
        return all(self.gaps[at] <= NEAR_TIE_NATS for at in self.differences)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        at = self.differences
        compared = len(self.theirs) if self.forced or not at else at[0] + 1
        return {
            "request": self.request,
            "tokens": len(self.theirs),
            "compared": compared,
            "equal": compared - len(at),
            "gap_there": max((self.gaps[index] for index in at), default=None),
            "largest_logprob_gap": max(self.logprob_gaps, default=0.0),
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A call that was spoilt on purpose: the comparison must see it.

    Attributes:
        name: What was spoilt.
        rows: The compared calls.
    """

    name: str
    rows: Sequence[CallRow]

    @property
    def ok(self) -> bool:
        """Whether every spoilt call was found out."""
        return bool(self.rows) and not any(row.ok for row in self.rows)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "control": self.name,
            "calls": len(self.rows),
            "found": sum(not row.ok for row in self.rows),
            "least_relative_rms": plain(min((row.difference.relative_rms for row in self.rows), default=0.0)),
            "least_worst_row_rms": plain(min((row.difference.worst_row_rms for row in self.rows), default=0.0)),
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """What a comparison found.

    Attributes:
        engine: Engine name.
        versions: Versions of all that took part.
        layouts: Numbers of the pools that both kernels read.
        rows: Compared calls.
        controls: Spoilt calls.
        tokens: Requests under both kernels.
        times: Named figures: sums of seconds, ratios, microseconds of host code.
        notes: Remarks.
    """

    engine: str
    versions: Mapping[str, str]
    layouts: Sequence[Mapping[str, Any]] = ()
    rows: Sequence[CallRow] = ()
    controls: Sequence[Control] = ()
    tokens: Sequence[TokenRow] = ()
    times: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether anything was compared, everything agrees and every control was found out."""
        parts: Iterable[bool] = (entry.ok for part in (self.rows, self.controls, self.tokens) for entry in part)
        return bool(self.rows) and all(parts)

    def document(self) -> dict[str, Any]:
        """For JSON: what `Engine.parity` returns and `inspect parity` writes."""
        return {
            "ok": self.ok,
            "versions": dict(self.versions),
            "layouts": [dict(layout) for layout in self.layouts],
            "summary": summarise(self.rows),
            "calls": [row.document() for row in self.rows],
            "controls": [control.document() for control in self.controls],
            "tokens": [row.document() for row in self.tokens],
            "times": dict(self.times),
            "notes": list(self.notes),
        }


def summarise(rows: Sequence[CallRow]) -> list[dict[str, Any]]:
    """One line for each kind of call, in order of first appearance."""
    kinds: dict[tuple[str, str], list[CallRow]] = {}
    for row in rows:
        kinds.setdefault((row.engine, row.call), []).append(row)
    return [
        {
            "engine": engine,
            "call": call,
            "calls": len(group),
            "shape": _shapes(group),
            "median_relative_rms": plain(statistics.median(row.difference.relative_rms for row in group)),
            "relative_rms": plain(max(row.difference.relative_rms for row in group)),
            "worst_row_rms": plain(max(row.difference.worst_row_rms for row in group)),
            "max_abs": plain(max(row.difference.max_abs for row in group)),
            "call_bound": min(row.call_bound for row in group),
            "ok": all(row.ok for row in group),
        }
        for (engine, call), group in kinds.items()
    ]


def plain(value: float) -> float | str:
    """A number that JSON knows, else its text."""
    return value if math.isfinite(value) else str(value)


def _shapes(group: Sequence[CallRow]) -> str:
    names = dict.fromkeys(name for row in group for name in row.shape)
    parts = []
    for name in names:
        sizes = [row.shape[name] for row in group if name in row.shape]
        low, high = min(sizes), max(sizes)
        parts.append(f"{name} {low}" if low == high else f"{name} {low}..{high}")
    return ", ".join(parts)
