"""The reference: MLA decode in float64, one query at a time. The oracle of every other backend.

    K = dequantised rows [n, d_qk]      V = K[:, :d_v]
    score = q . K * scale               LSE = log sum exp(score)
    out = sum exp(score) V / (sum exp(score) + exp(sink))

UE8M0 and e4m3 scales are exact here. fp32 and external scales are multiplied in fp32 and rounded once to bf16, as
every backend does. Codes 0x7F and 0xFF are NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvbridge.codec import dequantise, gather_rows
from kvbridge.records import ScaleRule, get_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbridge.kernels.arguments import Call, CallCache
    from kvbridge.kernels.backends import Runner
    from kvbridge.kernels.caches import LseFormat
    from kvbridge.kernels.plan import Plan


def row_values(rows: torch.Tensor, record: str, external_scale: float) -> torch.Tensor:
    """float64 K of rows uint8 `[n, row_bytes]`, fields in the record's order."""
    rule = get_record(record).scale_rule
    given = external_scale if rule is ScaleRule.EXTERNAL else None
    if rule in (ScaleRule.FP32, ScaleRule.EXTERNAL):
        return dequantise(rows, record, external_scale=given, dtype=torch.bfloat16).double()
    return dequantise(rows, record, dtype=torch.float64)


def live_slots(cache: CallCache, query: int, sequence: int | None) -> torch.Tensor:
    """Slots of one query that count, int64: within the length, not negative, below the capacity; order kept."""
    row = sequence if cache.slots_per_sequence else query
    entry = sequence if cache.lengths_per_sequence else query
    if row is None or entry is None or not 0 <= row < len(cache.slots):
        return torch.empty(0, dtype=torch.int64)
    slots = cache.slots[row].long().cpu()
    if cache.lengths is not None:
        if not 0 <= entry < len(cache.lengths):
            return slots[:0]
        slots = slots[: max(0, int(cache.lengths[entry]))]
    return slots[(slots >= 0) & (slots < cache.view.capacity_rows)]


def query_keys(call: Call, query: int) -> torch.Tensor:
    """float64 K of all live slots of a query, `[n, d_qk]`."""
    sequence = None if call.sequence_of_query is None else int(call.sequence_of_query[query])
    keys = [torch.empty(0, call.plan.d_qk, dtype=torch.float64)]
    for cache in call.caches:
        slots = live_slots(cache, query, sequence)
        if len(slots):
            rows = gather_rows(cache.view, slots.to(cache.view.pages.device)).cpu()
            keys.append(row_values(rows, cache.record, cache.external_scale))
    return torch.cat(keys)


def decode(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes a call.

    Returns:
        out float64 `[queries, heads, d_v]`; natural LSE without sink `[queries, heads]`, -inf for an empty query; the
        largest |score| `[queries, heads]`, 0 for an empty query.
    """
    d_v, heads = call.plan.d_v, call.heads
    out = torch.zeros(call.queries, heads, d_v, dtype=torch.float64)
    lse = torch.full((call.queries, heads), -math.inf, dtype=torch.float64)
    largest = torch.zeros(call.queries, heads, dtype=torch.float64)
    for query in range(call.queries):
        keys = query_keys(call, query)
        if not len(keys):
            continue
        scores = call.q[query, :heads].double().cpu() @ keys.T * call.scale
        lse[query] = scores.logsumexp(-1)
        largest[query] = scores.abs().amax(-1)
        total = lse[query] if call.sink is None else torch.logaddexp(lse[query], call.sink.double().cpu())
        out[query] = (scores - total[:, None]).exp() @ keys[:, :d_v]
    return out, lse, largest


def format_lse(lse: torch.Tensor, sink: torch.Tensor | None, form: LseFormat) -> torch.Tensor:
    """Turns natural LSE without sink into the format asked for."""
    joined = torch.logaddexp(lse, sink.to(lse)) if form.includes_sink and sink is not None else lse
    if form.empty == math.inf:
        joined = torch.where(lse == -math.inf, math.inf, joined)
    return joined / math.log(2) if form.base == "2" else joined


class EagerBackend:
    """A backend of torch operations: serves every plan on every device, has nothing to prepare and no workspace.

    Attributes:
        name: Name among the backends.
        runner: Makes a runner from a checked call.
    """

    def __init__(self, name: str, runner: Callable[[Call], Runner]) -> None:
        self.name = name
        self.runner = runner

    def missing(self, device_type: str) -> str | None:
        """Runs everywhere."""
        return None

    def unsupported(self, plan: Plan) -> str | None:
        """Serves every plan."""
        return None

    def workspace_bytes(self, plan: Plan, device: torch.device) -> int:
        """Needs none; torch allocates."""
        return 0

    def prepare(self, plan: Plan, device: torch.device) -> None:
        """Nothing to prepare."""

    def bind(self, prepared: object, call: Call, workspace: torch.Tensor | None) -> Runner:
        """Makes a runner for a checked call."""
        return self.runner(call)


class ReferenceRunner:
    """Computes one call in float64."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def update(self, call: Call) -> None:
        """Keeps the call."""
        self.call = call

    def launch(self) -> None:
        """Writes out and lse."""
        call = self.call
        out, lse, _ = decode(call)
        call.out[:, : call.heads].copy_(out)
        if call.lse is not None:
            call.lse[:, : call.heads].copy_(format_lse(lse, call.sink, call.lse_format))


BACKEND = EagerBackend("reference", ReferenceRunner)
