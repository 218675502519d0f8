"""Joins partial results of context parallelism: each rank attended over its own slots, the sink enters once.

    rank 0: out 0,  LSE ln 2     \\   out = sum_r exp(LSE_r) out_r / (sum_r exp(LSE_r) + exp(sink))
    rank 1: out 10, LSE ln 8     /   without sink 8.0; sink 0 once 80/11 = 7.2727, per rank it would be 80/12

A base-2 LSE read as natural gives 7.2330 instead of 8.0, and nothing looks wrong. So each base has to be said, and a
partial result whose LSE already holds the sink is refused: its weight cannot be told from its scores any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbridge.kernels.caches import LseBase
from kvbridge.kernels.errors import MergeError

if TYPE_CHECKING:
    import torch


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    bases: Sequence[LseBase | str],
    sink: torch.Tensor | None = None,
    sink_in_partials: Sequence[bool] | None = None,
    empty: float = -math.inf,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins partial results over disjoint slots.

    Args:
        outs: `[queries, heads, d_v]` each, normalised by their own sum, in one dtype and on one device.
        lses: `[queries, heads]` each, without sink; an empty query is -inf, or +inf (FlashMLA's) with an output of 0.
        bases: Base of each LSE.
        sink: fp32 `[heads]`, natural logits, joined here once; a longer, padded one is cut to the heads.
        sink_in_partials: Which partial outputs already had the sink in their denominator. At most one may, and only
            with `sink=None`: with one rank holding it the sum is still right, because its LSE holds it as well.
        empty: LSE of a query that is empty everywhere: -inf or +inf.
        out_dtype: dtype of the output; that of `outs` by default.

    Returns:
        out `[queries, heads, d_v]` and natural LSE fp32 `[queries, heads]`. The sink that is given here is in `out` and
        not in the LSE; one that came inside a partial is in both.

    Raises:
        MergeError: A base missing, counts or shapes that differ, a sink counted twice or of the wrong length.
    """
    import torch

    _check(outs, lses, bases)
    _check_sinks(outs, sink, sink_in_partials)
    weights = torch.stack([_natural(lse, base) for lse, base in zip(lses, bases, strict=True)])
    for index, out in enumerate(outs):
        # FlashMLA writes +inf for an empty query. A live query can have +inf only with an output that is not 0.
        flagged = weights[index].isposinf() & (out == 0).all(-1)
        weights[index] = torch.where(flagged, -math.inf, weights[index])
    lse = torch.logsumexp(weights, 0)
    joined = lse
    if sink is not None:
        joined = torch.logaddexp(lse, sink[: lse.shape[1]].to(lse))
    blank = joined == -math.inf
    share = torch.exp(weights - torch.where(blank, 0.0, joined))
    total = torch.zeros_like(outs[0], dtype=torch.float32)
    for index, out in enumerate(outs):
        # A rank without slots has weight 0; its output may hold anything, NaN included.
        used = (weights[index] != -math.inf).unsqueeze(-1)
        total += torch.where(used, out.float() * share[index].unsqueeze(-1), 0.0)
    lse = torch.where(lse == -math.inf, empty, lse)
    return total.to(out_dtype or outs[0].dtype), lse


def _natural(lse: torch.Tensor, base: LseBase | str) -> torch.Tensor:
    wide = lse.float()
    return wide * math.log(2) if base == LseBase.TWO else wide


def _check(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], bases: Sequence[LseBase | str]) -> None:
    if not outs:
        raise MergeError("outs", got=0, expected="at least 1")
    if len(lses) != len(outs):
        raise MergeError("lses", got=len(lses), expected=len(outs), detail="one for each of outs")
    if bases is None or isinstance(bases, str) or len(bases) != len(outs):
        raise MergeError("bases", got=bases, expected=f"{len(outs)} bases, one for each LSE")
    for index, (out, lse, base) in enumerate(zip(outs, lses, bases, strict=True)):
        if base not in tuple(LseBase):
            raise MergeError(f"bases[{index}]", got=base, expected=f"one of {[known.value for known in LseBase]}")
        if out.dim() != 3 or out.shape != outs[0].shape or out.dtype != outs[0].dtype or out.device != outs[0].device:
            got = (list(out.shape), out.dtype, str(out.device))
            expected = (list(outs[0].shape), outs[0].dtype, str(outs[0].device))
            raise MergeError(f"outs[{index}]", got=got, expected=expected, detail="as outs[0], three axes")
        if lse.shape != out.shape[:2]:
            raise MergeError(f"lses[{index}].shape", got=list(lse.shape), expected=list(out.shape[:2]))


def _check_sinks(
    outs: Sequence[torch.Tensor], sink: torch.Tensor | None, sink_in_partials: Sequence[bool] | None
) -> None:
    inside = [] if sink_in_partials is None else [index for index, holds in enumerate(sink_in_partials) if holds]
    if sink_in_partials is not None and len(sink_in_partials) != len(outs):
        raise MergeError("sink_in_partials", got=len(sink_in_partials), expected=len(outs))
    if len(inside) > 1:
        raise MergeError("sink_in_partials", got=f"sinks in partials {inside}", expected="at most one")
    if inside and sink is not None:
        raise MergeError("sink", got=f"a sink, and one in partial {inside[0]}", expected="one of them")
    heads = outs[0].shape[1]
    if sink is not None and (sink.dim() != 1 or sink.shape[0] < heads):
        raise MergeError("sink.shape", got=list(sink.shape), expected=[heads], detail="one logit for each real head")
