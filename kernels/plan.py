"""Planning: workspace and launch tables from caps alone, on the host, before any KV memory is sized.

    queries            1 ............ 131 132 ........ 264 265 ........ caps.queries
    splits (132 SMs)  min(264, tiles) .. 2  1 ............ 1 ...
    partial results    queries * splits rows of tiled heads * (d_v + 3) fp32   the workspace holds the most of any count

A query's slots are cut into `splits` runs when there are too few queries to fill the machine. More queries need fewer
splits, so the peak is not at the most queries: a reserve computed there was too small in public (321.50 MiB reserved,
480.40 MiB needed). The bound here is the maximum over every query count and width at or below the caps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvbridge.kernels.errors import CapacityError, ValueRangeError, WorkspaceError
from kvbridge.records import get_record

MOST_HEADS = 128
MOST_CACHES = 3
MOST_SPLITS = 1024  # states of one head's splits that the merge keeps in shared memory; twice 512 units never reach it
SPLIT_SLOTS = 32
"""Slots below which a run is not cut further: one tile of the CUDA core."""
_FLOAT_BYTES = 4
_STATE_FLOATS = 3  # running maximum, rounded sum and exact sum of one head
_COUNTER_BYTES = 4
_COUNTERS_MULTIPLE = 128


class Mode(StrEnum):
    """What a plan may trade."""

    DEFAULT = "default"  # slots of a query are split when queries are few
    BATCH_INVARIANT = "batch_invariant"  # never split: a query's bits do not depend on its batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The largest call that will be made.

    Attributes:
        queries: Most queries of a call.
        heads: Query heads, 1..128; every call has exactly these.
        widths: Most slots of a query in each cache, one to three numbers.
        records: Record name of each cache, as many as `widths`. A call may leave out the last caches.
        mode: Default or batch-invariant.
        units: What runs at the same time: streaming multiprocessors of the GPU, or threads. 0 never splits.
        head_tile: Heads that one unit handles together; `cuda_tiles.caps_on` knows a GPU's.
    """

    queries: int
    heads: int
    widths: tuple[int, ...]
    records: tuple[str, ...]
    mode: Mode | str = Mode.DEFAULT
    units: int = 0
    head_tile: int = 32

    @classmethod
    def for_verify(cls, *, sequences: int, speculative_tokens: int, **fields: object) -> Caps:
        """Caps of speculative decoding: each sequence has 1 + `speculative_tokens` verify queries.

        Args:
            sequences: Most sequences of a batch.
            speculative_tokens: Draft tokens of a sequence, 0 for none.
            **fields: The other attributes.
        """
        if speculative_tokens < 0:
            raise ValueRangeError("speculative_tokens", got=speculative_tokens, expected="at least 0")
        return cls(queries=sequences * (1 + speculative_tokens), **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Launch:
    """One row of the launch table: how calls with `first_query_count`..`last_query_count` queries are cut.

    Attributes:
        first_query_count: Fewest queries of such a call.
        last_query_count: Most queries of such a call.
        splits: Runs that a query's slots are cut into at the widest.
        workspace_bytes: Most workspace of such a call.
    """

    first_query_count: int
    last_query_count: int
    splits: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A frozen plan. Equal caps give equal plans.

    Attributes:
        caps: What it was made from.
        head_groups: Units that share one query's heads.
        d_qk: Values of K that a query is multiplied with.
        d_v: Values of the output.
        launches: The launch table, ascending in query counts, without holes.
        workspace_bytes: Enough for every call at or below the caps.
    """

    caps: Caps
    head_groups: int
    d_qk: int
    d_v: int
    launches: tuple[Launch, ...]
    workspace_bytes: int

    def splits(self, queries: int, width: int) -> int:
        """Runs that each query's slots are cut into.

        Args:
            queries: Queries of the call.
            width: Slots of a query over all caches; lengths do not matter, so a captured graph stays valid.
        """
        return _splits(self.caps, self.head_groups, queries, width)

    def call_workspace_bytes(self, queries: int, width: int) -> int:
        """Workspace that one call needs.

        Args:
            queries: Queries of the call.
            width: Slots of a query over all caches.
        """
        return _call_bytes(self.caps, self.head_groups, self.d_v, queries, self.splits(queries, width))

    def check_workspace(self, workspace_bytes: int) -> None:
        """Refuses a workspace that some call at or below the caps would overrun.

        Raises:
            WorkspaceError: Names the peak.
        """
        if workspace_bytes < self.workspace_bytes:
            peak = max(self.launches, key=lambda launch: launch.workspace_bytes)
            raise WorkspaceError(
                "workspace bytes",
                got=workspace_bytes,
                expected=f"at least {self.workspace_bytes}",
                detail=f"peak at {peak.last_query_count} queries, {peak.splits} splits",
            )

    def check_queries(self, queries: int) -> None:
        """Refuses more queries than planned for.

        Raises:
            CapacityError: Names both counts.
        """
        if queries > self.caps.queries:
            raise CapacityError("q.shape[0]", got=queries, expected=f"at most {self.caps.queries}", detail="caps")


def plan(caps: Caps) -> Plan:
    """Plans for every call at or below the caps. Pure arithmetic: no device, no tensor.

    Args:
        caps: The largest call.

    Raises:
        ValueRangeError: A cap outside what the kernels can do.
        LayoutError: A record that is unknown.
    """
    d_qk, d_v = _check(caps)
    groups = -(-caps.heads // caps.head_tile)
    launches = tuple(_launches(caps, groups, d_v))
    return Plan(caps, groups, d_qk, d_v, launches, max((launch.workspace_bytes for launch in launches), default=0))


def _check(caps: Caps) -> tuple[int, int]:
    if caps.mode not in tuple(Mode):
        raise ValueRangeError("mode", got=caps.mode, expected=f"one of {[mode.value for mode in Mode]}")
    if not 1 <= caps.heads <= MOST_HEADS:
        raise ValueRangeError("heads", got=caps.heads, expected=f"1 .. {MOST_HEADS}")
    if caps.queries < 1:
        raise ValueRangeError("queries", got=caps.queries, expected="at least 1")
    if not 1 <= len(caps.widths) <= MOST_CACHES:
        raise ValueRangeError("widths", got=caps.widths, expected=f"one to {MOST_CACHES} numbers")
    if len(caps.records) != len(caps.widths):
        raise ValueRangeError("records", got=caps.records, expected=f"{len(caps.widths)} names, one for each width")
    for name, value, least in (("units", caps.units, 0), ("head_tile", caps.head_tile, 1), *_named_widths(caps)):
        if value < least:
            raise ValueRangeError(name, got=value, expected=f"at least {least}")
    records = [get_record(name) for name in caps.records]
    for index, record in enumerate(records):
        if not record.d_qk or not record.decodable:
            raise ValueRangeError(f"records[{index}]", got=record.name, expected="an MLA record with a known encoding")
        if (record.d_qk, record.d_v) != (records[0].d_qk, records[0].d_v):
            raise ValueRangeError(
                f"records[{index}]",
                got=f"{record.name} (d_qk {record.d_qk}, d_v {record.d_v})",
                expected=f"d_qk {records[0].d_qk}, d_v {records[0].d_v}",
                detail=f"as records[0], {records[0].name}",
            )
    return records[0].d_qk, records[0].d_v


def _named_widths(caps: Caps) -> tuple[tuple[str, int, int], ...]:
    return tuple((f"widths[{index}]", width, 0) for index, width in enumerate(caps.widths))


def _splits(caps: Caps, groups: int, queries: int, width: int) -> int:
    if caps.mode == Mode.BATCH_INVARIANT or queries < 1:
        return 1
    return max(1, min(2 * caps.units // (queries * groups), MOST_SPLITS, -(-width // SPLIT_SLOTS)))


def _call_bytes(caps: Caps, groups: int, d_v: int, queries: int, splits: int) -> int:
    """Counters, one for each (query, head group) of a split call, and what every unit leaves, whole tiles of heads."""
    if splits == 1:
        return 0
    counters = -(-_COUNTER_BYTES * caps.units // _COUNTERS_MULTIPLE) * _COUNTERS_MULTIPLE
    return counters + queries * splits * groups * caps.head_tile * (d_v + _STATE_FLOATS) * _FLOAT_BYTES


def _launches(caps: Caps, groups: int, d_v: int) -> list[Launch]:
    """Rows of equal splits. The widest call has the most splits, so it bounds the narrower ones."""
    width = sum(caps.widths)
    launches: list[Launch] = []
    first = 1
    while first <= caps.queries:
        splits = _splits(caps, groups, first, width)
        last = _last_with(caps, groups, first, splits, width)
        launches.append(Launch(first, last, splits, _call_bytes(caps, groups, d_v, last, splits)))
        first = last + 1
    return launches


def _last_with(caps: Caps, groups: int, first: int, splits: int, width: int) -> int:
    """The most queries that are still cut into `splits`; splits never grow with queries, so bisection finds it."""
    low, high = first, caps.queries
    while low < high:
        middle = (low + high + 1) // 2
        if _splits(caps, groups, middle, width) == splits:
            low = middle
        else:
            high = middle - 1
    return low
