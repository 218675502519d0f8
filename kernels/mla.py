"""Sparse MLA decode over paged KV caches: one call for every engine, record, page stride and backend.

    plan(caps)            host arithmetic: launch table, workspace       once per model
    prepare(plan, device) builds, loads, allocates the workspace         once per device and stream
    bind(prepared, ...)   checks tensors, fills the backend's structure  once per layer, or at every call
    bound.run(...)        launches; fresh tensors are checked and patched in

    out[query, head] = sum_i softmax(q . K_i * scale)_i V_i       over the live slots of one to three caches

`run` allocates nothing, waits for nothing and reads no device data on the host, so it may be captured in a CUDA graph;
pointers, counts, strides and scale are frozen at capture, slots, lengths and page bytes may change between replays.
The torch backends are the exception: they allocate. A `Prepared` owns one workspace: one for each CUDA stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvbridge.kernels.arguments import (
    Call,
    CallCache,
    check_lengths,
    check_lse,
    check_map,
    check_out,
    check_pages,
    check_q,
    check_sink,
    check_slots,
)
from kvbridge.kernels.backends import Choice
from kvbridge.kernels.caches import Cache, LseBase, LseFormat
from kvbridge.kernels.errors import NotPreparedError, ShapeError, ValueRangeError
from kvbridge.kernels.merge import merge_states
from kvbridge.kernels.plan import Caps, Mode, Plan, plan
from kvbridge.kernels.prepared import Prepared, explain, prepare

if TYPE_CHECKING:
    from kvbridge.kernels.backends import Runner

__all__ = [
    "Bound",
    "Cache",
    "Caps",
    "Choice",
    "LseBase",
    "LseFormat",
    "Mode",
    "Plan",
    "Prepared",
    "bind",
    "explain",
    "merge_states",
    "plan",
    "prepare",
    "run",
]

_NATURAL = LseFormat()
_NO_QUERIES = torch.empty(0, 0, 0, dtype=torch.bfloat16, device="cpu")
_NO_SLOTS = torch.empty(0, 0, dtype=torch.int64, device="cpu")


class Bound:
    """A checked call, ready to run again and again.

    Attributes:
        prepared: What it was bound under.
        call: The checked call.
    """

    __slots__ = ("_launch", "_runner", "call", "prepared")

    def __init__(self, prepared: Prepared, call: Call, runner: Runner) -> None:
        self.prepared = prepared
        self.call = call
        self._runner = runner
        self._launch = runner.launch

    def run(
        self,
        *,
        q: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        slots: Sequence[torch.Tensor] | None = None,
        lengths: Sequence[torch.Tensor | None] | None = None,
        sequence_of_query: torch.Tensor | None = None,
    ) -> None:
        """Launches, after taking over what is given. What is left out stays as it was; so do sink, scale and pages.

        Args:
            q: As in `bind`. Its query count may differ from the last one; then slots, lengths and outputs must follow.
            out: As in `bind`.
            lse: As in `bind`.
            slots: One tensor for each cache.
            lengths: One tensor or None for each cache.
            sequence_of_query: As in `bind`.

        Raises:
            ArgumentError: A tensor does not fit; nothing was launched.
        """
        if q is not None or out is not None or slots is not None or lengths is not None:
            self._patch(q=q, out=out, lse=lse, slots=slots, lengths=lengths, sequence_of_query=sequence_of_query)
        elif lse is not None or sequence_of_query is not None:
            self._patch(lse=lse, sequence_of_query=sequence_of_query)
        elif not self.call.queries:
            return  # nothing to compute; after `release` the addresses of the last call are stale as well
        self._launch()

    def release(self) -> None:
        """Lets go of q, out, lse, slots, lengths and map, so that an engine's allocator may use their memory again.

        The next `run` must be given all of them that the call has. A captured graph is unaffected: it holds addresses.
        """
        call = self.call
        call.q = call.out = _NO_QUERIES
        call.queries = 0
        call.lse = call.sequence_of_query = None
        for cache in call.caches:
            cache.slots, cache.lengths = _NO_SLOTS, None

    def _patch(
        self,
        *,
        q: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        slots: Sequence[torch.Tensor] | None = None,
        lengths: Sequence[torch.Tensor | None] | None = None,
        sequence_of_query: torch.Tensor | None = None,
    ) -> None:
        """Checks everything that is new, then takes it over."""
        call = self.call
        plan, device = self.prepared.plan, self.prepared.device
        queries = call.queries
        every = False
        if q is not None:
            queries = check_q(q, plan, device)
            # A new query count makes every tensor that was left out suspect as well, so all are checked then.
            every = queries != call.queries
        if every:
            out = call.out if out is None else out
            lse = call.lse if lse is None else lse
            sequence_of_query = call.sequence_of_query if sequence_of_query is None else sequence_of_query
        if out is not None:
            check_out(out, plan, queries, device)
        if lse is not None:
            check_lse(lse, plan, queries, device)
        if sequence_of_query is not None:
            check_map(sequence_of_query, queries, device)
        if slots is not None or lengths is not None or every:
            self._patch_slots(slots, lengths, queries)
        if q is not None:
            call.q, call.queries = q, queries
        if out is not None:
            call.out = out
        if lse is not None:
            call.lse = lse
        if sequence_of_query is not None:
            call.sequence_of_query = sequence_of_query
        self._runner.update(call)

    def _patch_slots(
        self,
        slots: Sequence[torch.Tensor] | None,
        lengths: Sequence[torch.Tensor | None] | None,
        queries: int,
    ) -> None:
        caches = self.call.caches
        plan, device = self.prepared.plan, self.prepared.device
        new_slots = [cache.slots for cache in caches] if slots is None else slots
        new_lengths = [cache.lengths for cache in caches] if lengths is None else lengths
        for name, given in (("slots", new_slots), ("lengths", new_lengths)):
            if len(given) != len(caches):
                raise ShapeError(name, got=len(given), expected=len(caches), detail="one for each cache bound")
        for index, cache in enumerate(caches):
            _check_cache(
                cache, new_slots[index], new_lengths[index], index=index, plan=plan, queries=queries, device=device
            )
        for index, cache in enumerate(caches):
            cache.slots, cache.lengths = new_slots[index], new_lengths[index]


def bind(
    prepared: Prepared,
    *,
    q: torch.Tensor,
    caches: Sequence[Cache],
    out: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_format: LseFormat = _NATURAL,
    sequence_of_query: torch.Tensor | None = None,
) -> Bound:
    """Checks the tensors of a call once.

    Args:
        prepared: What `prepare` returned.
        q: bf16 `[queries, heads, d_qk]`, last axis dense, any query and head stride. Further heads are not read.
        caches: One to three, in the order of the plan's records; the last ones may be left out.
        out: bf16 or fp32 `[queries, heads, d_v]`, last axis dense, any strides that do not overlap. Further heads, as
            in a buffer padded to 64, are not written.
        scale: Multiplies q . k.
        sink: fp32 `[heads]`, natural logits that join the denominator; a longer, padded one is cut to the heads.
        lse: fp32 `[queries, heads]`, any strides; not returned if None.
        lse_format: Base, whether the sink is inside, value of an empty query.
        sequence_of_query: int32 or int64 `[queries]`, for caches whose slots or lengths have a row for each sequence.
            A query whose sequence is out of range has no live slot.

    Raises:
        NotPreparedError: `prepared` is a plan.
        ArgumentError: Names argument, got and expected.
        StaleViewError: The memory under a view was moved or freed.
    """
    if type(prepared) is not Prepared:
        raise NotPreparedError(f"bind needs what prepare(plan, device=...) returned, got {type(prepared).__name__}")
    plan, device = prepared.plan, prepared.device
    call = Call()
    call.plan = plan
    call.heads = plan.caps.heads
    call.queries = queries = check_q(q, plan, device)
    check_out(out, plan, queries, device)
    if lse is not None:
        check_lse(lse, plan, queries, device)
    if sequence_of_query is not None:
        check_map(sequence_of_query, queries, device)
    if not caches:
        raise ValueRangeError("caches", got=0, expected="1 to 3")
    checked = []
    for index, cache in enumerate(caches):
        check_pages(cache, index, plan, device)
        mapped = cache.slots_per_sequence or cache.lengths_per_sequence
        if mapped and sequence_of_query is None:
            raise ValueRangeError("sequence_of_query", got=None, expected="a map", detail=f"caches[{index}] needs it")
        entry = CallCache(cache)
        _check_cache(entry, entry.slots, entry.lengths, index=index, plan=plan, queries=queries, device=device)
        checked.append(entry)
    if not math.isfinite(scale):
        raise ValueRangeError("scale", got=scale, expected="a finite number")
    call.q, call.out, call.lse, call.lse_format = q, out, lse, lse_format
    call.caches, call.scale, call.sequence_of_query = checked, float(scale), sequence_of_query
    call.sink = None if sink is None else check_sink(sink, call.heads, device)
    call.batch_invariant = plan.caps.mode == Mode.BATCH_INVARIANT
    return Bound(prepared, call, prepared.backend.bind(prepared._state, call, prepared.workspace))


def run(prepared: Prepared, **arguments: Any) -> None:
    """Binds and runs once; arguments as in `bind`."""
    bind(prepared, **arguments)._launch()


def _check_cache(
    cache: CallCache,
    slots: torch.Tensor,
    lengths: torch.Tensor | None,
    *,
    index: int,
    plan: Plan,
    queries: int,
    device: torch.device,
) -> None:
    per_sequence = cache.slots_per_sequence
    check_slots(slots, index=index, plan=plan, queries=queries, device=device, per_sequence=per_sequence)
    if lengths is not None:
        rows = slots.shape[0] if per_sequence else None
        per_sequence = cache.lengths_per_sequence
        check_lengths(lengths, index=index, rows=rows, queries=queries, device=device, per_sequence=per_sequence)
