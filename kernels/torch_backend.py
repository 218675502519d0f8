"""The torch backend: always there, on any device. Gather, decode, two products, in fp32.

    chunk of queries:  slots -> keys [rows, d_qk] -> scores [chunk, heads, width] -> softmax -> out
                                 |------ once per row, for all heads and both products ------|

It serves where no compiled backend can, so it needs nothing but torch; it allocates, and on the CPU it looks at the
lengths to skip what is dead. In batch-invariant plans every query is a chunk of its own, so its shapes, and with them
its bits, do not depend on its batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvbridge.kernels.reference import format_lse
from kvbridge.kernels.torch_decode import RowDecoder

if TYPE_CHECKING:
    from kvbridge.kernels.arguments import Call, CallCache
    from kvbridge.kernels.plan import Plan

CHUNK_ROWS = 2048
"""Rows decoded together: their fp32 keys (4 MB) stay in the cache between decoding and both products."""


class TorchBackend:
    """Serves every plan on every device."""

    name = "torch"

    def missing(self, device_type: str) -> str | None:
        """Runs everywhere."""
        return None

    def unsupported(self, plan: Plan) -> str | None:
        """Serves every plan."""
        return None

    def workspace_bytes(self, plan: Plan, device: torch.device) -> int:
        """Needs none; it allocates."""
        return 0

    def prepare(self, plan: Plan, device: torch.device) -> None:
        """Nothing to prepare."""

    def bind(self, prepared: object, call: Call, workspace: torch.Tensor | None) -> TorchRunner:
        """Looks up where the fields of each cache lie."""
        return TorchRunner(call)


class TorchRunner:
    """One bound call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._decoders = [RowDecoder(cache) for cache in call.caches]

    def update(self, call: Call) -> None:
        """Keeps the call; pages do not change after bind."""
        self._call = call

    def launch(self) -> None:
        """Writes out and lse."""
        call = self._call
        width = sum(cache.slots.shape[1] for cache in call.caches)
        chunk = 1 if call.batch_invariant else max(1, CHUNK_ROWS // max(1, width))
        with torch.inference_mode():
            for first in range(0, call.queries, chunk):
                self._decode(call, first, min(first + chunk, call.queries))

    def _decode(self, call: Call, first: int, last: int) -> None:
        queries, heads, d_v = last - first, call.heads, call.plan.d_v
        q = call.q[first:last, :heads]
        keys: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for cache, decoder in zip(call.caches, self._decoders, strict=True):
            slots, live = _slots(call, cache, first, last)
            if not slots.shape[1] or not cache.view.capacity_rows:
                keys.append(torch.empty(queries, 0, decoder.d_qk, dtype=torch.float32, device=q.device))
                scores.append(torch.empty(queries, heads, 0, dtype=torch.float32, device=q.device))
                continue
            rows = decoder.keys(slots.flatten()).view(queries, -1, decoder.d_qk)
            score = torch.bmm(decoder.permute_query(q), rows.transpose(1, 2)).mul_(call.scale)
            if live is not None:
                # Dead rows may hold NaN, and 0 * NaN is NaN: they must not reach the second product either.
                rows.masked_fill_(~live.unsqueeze(-1), 0.0)
                score.masked_fill_(~live.unsqueeze(1), -math.inf)
            keys.append(rows)
            scores.append(score)
        weights = torch.cat(scores, -1) if len(scores) > 1 else scores[0]
        if not weights.shape[-1]:
            weights = torch.full((queries, heads, 1), -math.inf, device=q.device)
        largest = weights.amax(-1, keepdim=True)
        largest = torch.where(largest == -math.inf, 0.0, largest)
        weights = weights.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        if call.lse is not None:
            lse = (largest + total.log()).squeeze(-1)
            call.lse[first:last, :heads].copy_(format_lse(lse, call.sink, call.lse_format))
        if call.sink is not None:
            total = total + torch.exp(call.sink.view(1, heads, 1) - largest)
        out = torch.zeros(queries, heads, d_v, dtype=torch.float32, device=q.device)
        start = 0
        for rows, decoder in zip(keys, self._decoders, strict=True):
            end = start + rows.shape[1]
            if end > start:
                out += decoder.restore(torch.bmm(weights[:, :, start:end], rows[:, :, :d_v]))
            start = end
        # An empty query without sink divides 0 by 0.
        call.out[first:last, :heads].copy_(out.div_(torch.where(total == 0, 1.0, total)))


def _slots(call: Call, cache: CallCache, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int64 slots of a chunk with dead ones replaced by 0, and which are live (None: all)."""
    sequences = None if call.sequence_of_query is None else call.sequence_of_query[first:last].long()
    slots, inside = _rows(cache.slots, sequences if cache.slots_per_sequence else None, first, last)
    width = slots.shape[1]
    lengths = None
    if cache.lengths is not None:
        lengths, known = _rows(cache.lengths, sequences if cache.lengths_per_sequence else None, first, last)
        lengths = lengths.long().clamp(0, width)
        if known is not None:
            inside = known if inside is None else inside & known
    if inside is not None:
        lengths = torch.where(inside, width if lengths is None else lengths, 0)
    on_host = slots.device.type == "cpu"
    if lengths is not None and on_host and len(lengths):
        slots = slots[:, : int(lengths.max())]
    wide = slots.long()
    live = (wide >= 0) & (wide < cache.view.capacity_rows)
    if lengths is not None:
        live &= torch.arange(wide.shape[1], device=wide.device) < lengths.unsqueeze(1)
    if on_host and bool(live.all()):
        return wide, None
    return torch.where(live, wide, 0), live


def _rows(
    tensor: torch.Tensor, sequences: torch.Tensor | None, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of a chunk of queries, and which of them exist (None: all)."""
    if sequences is None:
        return tensor[first:last], None
    inside = (sequences >= 0) & (sequences < len(tensor))
    if not len(tensor):
        return tensor.new_zeros(len(sequences), *tensor.shape[1:]), inside
    return tensor[torch.where(inside, sequences, 0)], inside


BACKEND = TorchBackend()
