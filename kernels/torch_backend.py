"""The torch backend: always there, on any device. Gather, decode, two products, in fp32.

    chunk of queries:  slots -> keys [rows, d_qk] -> scores [chunk, heads, width] -> softmax -> out
                                 |------ once per row, for all heads and both products ------|

It serves where no compiled backend can, so it needs nothing but torch; it allocates, and on the CPU it looks at the
lengths to skip what is dead. In batch-invariant plans every query is a chunk of its own, so its shapes, and with them
its bits, do not depend on its batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvbridge.kernels.reference import EagerBackend, format_lse
from kvbridge.kernels.torch_decode import RowDecoder

if TYPE_CHECKING:
    from kvbridge.kernels.arguments import Call, CallCache

CHUNK_ROWS = 2048
"""Rows decoded together: their fp32 keys (4 MB) stay in the cache between decoding and both products."""


_MODERATE_SCORE = 32.0
"""Scores up to here may carry a relative error of 2**-16: their weights are then off by less than 5e-4."""


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
        out, lse = call.out[first:last, :heads], None if call.lse is None else call.lse[first:last, :heads]
        gathered = [_gather(call, cache, decoder, first, last) for cache, decoder in self._pairs()]
        found = [(rows, live, decoder) for rows, live, decoder in gathered if rows.shape[1]]
        if not found:
            out.zero_()
            if lse is not None:
                empty = torch.full((queries, heads), -math.inf, device=lse.device)
                lse.copy_(format_lse(empty, call.sink, call.lse_format))
            return
        keys, order = _join([(rows, decoder) for rows, _, decoder in found])
        q = call.q[first:last, :heads]
        scores = _scores(q if order is None else order.permute_query(q), keys, call.scale, exact=lse is not None)
        start = 0
        for rows, live, _ in found:
            end = start + rows.shape[1]
            if live is not None:
                scores[:, :, start:end].masked_fill_(~live.unsqueeze(1), -math.inf)
            start = end
        largest = scores.amax(-1, keepdim=True)
        largest = torch.where(largest == -math.inf, 0.0, largest)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        if lse is not None:
            lse.copy_(format_lse((largest + total.log()).squeeze(-1), call.sink, call.lse_format))
        if call.sink is not None:
            total = total + torch.exp(call.sink.view(1, heads, 1) - largest)
        # An empty query without sink would divide 0 by 0.
        weights.div_(torch.where(total == 0, 1.0, total))
        product = _weighted(weights, keys[:, :, :d_v], out.dtype)
        out.copy_(product if order is None else order.restore(product))

    def _pairs(self) -> Iterator[tuple[CallCache, RowDecoder]]:
        return zip(self._call.caches, self._decoders, strict=True)


def _gather(
    call: Call, cache: CallCache, decoder: RowDecoder, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor | None, RowDecoder]:
    """fp32 keys [chunk, width, d_qk] of one cache, 0 where dead, and which are live (None: all)."""
    slots, live = _slots(call, cache, first, last)
    if not slots.shape[1] or not cache.view.capacity_rows:
        return torch.empty(last - first, 0, decoder.d_qk, device=slots.device), None, decoder
    rows = decoder.keys(slots.flatten()).view(last - first, -1, decoder.d_qk)
    if live is not None:
        # Dead rows may hold NaN, and 0 * NaN is NaN: weight 0 alone would let them through.
        rows.masked_fill_(~live.unsqueeze(-1), 0.0)
    return rows, live, decoder


def _join(found: list[tuple[torch.Tensor, RowDecoder]]) -> tuple[torch.Tensor, RowDecoder | None]:
    """Keys of all caches in one tensor, bf16 where such products are fast, and whose column order they have.

    The order is the record's own (None) where the caches' orders differ.
    """
    rows, order = found[0]
    kind = torch.bfloat16 if _fast_bf16(rows.device.type) else torch.float32
    if len(found) == 1:
        return rows.to(kind), order
    alike = all(decoder.order == order.order for _, decoder in found)
    width = sum(part.shape[1] for part, _ in found)
    keys = torch.empty(len(rows), width, rows.shape[2], dtype=kind, device=rows.device)
    start = 0
    for part, decoder in found:
        keys[:, start : start + part.shape[1]].copy_(part if alike else decoder.restore(part))
        start += part.shape[1]
    return keys, order if alike else None


def _scores(q: torch.Tensor, keys: torch.Tensor, scale: float, *, exact: bool) -> torch.Tensor:
    """fp32 q . K * scale.

    q and K are bf16 numbers. A bf16 product sums in fp32 and rounds the sums to 8 bits; a second one that takes the
    first result off before it rounds gives the next 8, and both take half the time of one fp32 product. 16 bits are
    enough for weights while scores are moderate, not for a log-sum-exp.
    """
    if keys.dtype is not torch.bfloat16 or exact:
        return torch.bmm(q.float() * scale, keys.float().transpose(1, 2))
    narrow, transposed = q.bfloat16(), keys.transpose(1, 2)
    high = torch.bmm(narrow, transposed)
    scores = high.float().add_(torch.baddbmm(high.neg(), narrow, transposed)).mul_(scale)
    # Query by query, so that none depends on what the others hold; NaN is not moderate either.
    moderate = high.abs().amax((1, 2)).float() * abs(scale) <= _MODERATE_SCORE
    if not bool(moderate.all()):
        others = (~moderate).nonzero().flatten()
        scores[others] = torch.bmm(q[others].float() * scale, keys[others].float().transpose(1, 2))
    return scores


def _weighted(weights: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weights [chunk, heads, width] times values, rounded once to the output's dtype.

    For a bf16 output each weight is split into two bf16 numbers; the sums of the lower ones enter the other product
    before it is rounded.
    """
    if values.dtype is not torch.bfloat16:
        return torch.bmm(weights, values)
    if dtype is not torch.bfloat16:
        return torch.bmm(weights, values.float())
    high = weights.bfloat16()
    low = weights.sub_(high).bfloat16()
    return torch.baddbmm(torch.bmm(low, values), high, values)


@functools.cache
def _fast_bf16(device_type: str) -> bool:
    """Whether bf16 products sum in fp32 and beat fp32 ones: oneDNN's do, from AVX-512 on."""
    return device_type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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


BACKEND = EagerBackend("torch", TorchRunner)
