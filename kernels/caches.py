"""What a decode call reads: caches, and how the log-sum-exp is to be returned.

Cache = PageView (where rows lie) + slots [queries, width] (which rows) + lengths [queries] (how many of them count)

slots    | 7 | 130 | -1 | 9 | 2147483647 | garbage       a slot is page * page_rows + row
length 4  ^^^^^^^^^^^^^^^^^^  dead from here on          -1 is dead as well; dead slots are never dereferenced
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvbridge.kernels.errors import ValueRangeError

if TYPE_CHECKING:
    import torch

    from kvbridge.view import PageView


class LseBase(StrEnum):
    """Base of a log-sum-exp. There is no default where results of others are joined: backends differ."""

    NATURAL = "natural"
    TWO = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class LseFormat:
    """How the log-sum-exp is returned.

    FlashMLA and SGLang return natural logarithms without the sink, FlashInfer and b12x base 2 with it; an empty query
    is +inf in FlashMLA, -1e30 in FlashInfer, -inf elsewhere (facts read in those projects' sources).

    Attributes:
        base: Natural or 2.
        includes_sink: The sink joins; the LSE of an empty query is then the sink, unless `empty` is +inf.
        empty: LSE of a query without any live slot: -inf, or +inf as a mark that holds with a sink as well.
    """

    base: LseBase | str = LseBase.NATURAL
    includes_sink: bool = False
    empty: float = -math.inf

    def __post_init__(self) -> None:
        if self.base not in tuple(LseBase):
            raise ValueRangeError("lse.base", got=self.base, expected=f"one of {[base.value for base in LseBase]}")
        if self.empty not in (-math.inf, math.inf):
            raise ValueRangeError("lse.empty", got=self.empty, expected="-inf or +inf")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """One KV source of a decode call.

    Attributes:
        view: The pages.
        slots: int32 or int64 `[queries, width]` (or `[sequences, width]`), last axis dense, any row stride.
        lengths: int32 or int64 `[queries]` (or `[sequences]`), any stride; None: all positions count.
        external_scale: The layer's scale for records that keep it outside the page (uniform_fp8, mla_fp8).
        slots_per_sequence: `slots` has a row for each sequence; the call names each query's sequence.
        lengths_per_sequence: `lengths` has an entry for each sequence.
    """

    view: PageView
    slots: torch.Tensor
    lengths: torch.Tensor | None = None
    external_scale: float | None = None
    slots_per_sequence: bool = False
    lengths_per_sequence: bool = False
