"""Argument checks of a decode call, and the numbers that backends need of each tensor.

    q [queries, heads, d_qk]  ->  (address, query stride, head stride)      checked beside the launch, once per tensor

Every stride that a kernel relies on is looked at here and nowhere else. The checks are written for speed: a fresh
tensor costs well under a microsecond, so that an engine can hand over new views at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from kvbridge.kernels.errors import (
    ArgumentDtypeError,
    CapacityError,
    DeviceError,
    ShapeError,
    StrideError,
    ValueRangeError,
)
from kvbridge.records import ScaleRule

if TYPE_CHECKING:
    from kvbridge.kernels.caches import Cache, LseFormat
    from kvbridge.kernels.plan import Plan
    from kvbridge.view import PageView

INDEX_BITS = {torch.int32: 32, torch.int64: 64}
_OUT_DTYPES = (torch.bfloat16, torch.float32)


class CallCache:
    """One cache of a checked call.

    Attributes:
        view: The pages.
        record: Record name.
        external_scale: The layer's scale, 1 where the record has none outside its pages.
        slots: `[rows, width]`.
        lengths: `[rows]` or None.
        slots_per_sequence: Rows of `slots` are sequences.
        lengths_per_sequence: Entries of `lengths` are sequences.
    """

    __slots__ = (
        "external_scale",
        "lengths",
        "lengths_per_sequence",
        "record",
        "slots",
        "slots_per_sequence",
        "view",
    )

    def __init__(self, cache: Cache) -> None:
        self.view: PageView = cache.view
        self.record: str = cache.view.layout.record
        self.external_scale: float = 1.0 if cache.external_scale is None else cache.external_scale
        self.slots: torch.Tensor = cache.slots
        self.lengths: torch.Tensor | None = cache.lengths
        self.slots_per_sequence: bool = cache.slots_per_sequence
        self.lengths_per_sequence: bool = cache.lengths_per_sequence


class Call:
    """A checked call: what every backend computes from. `q` may have more heads than count; `heads` of them do."""

    __slots__ = (
        "batch_invariant",
        "caches",
        "heads",
        "lse",
        "lse_format",
        "out",
        "plan",
        "q",
        "queries",
        "scale",
        "sequence_of_query",
        "sink",
    )

    plan: Plan
    caches: list[CallCache]
    heads: int
    queries: int
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    lse_format: LseFormat
    sink: torch.Tensor | None
    scale: float
    sequence_of_query: torch.Tensor | None
    batch_invariant: bool


def check_q(q: torch.Tensor, plan: Plan, device: torch.device) -> int:
    """Checks q and gives its query count; bf16 `[queries, >= heads, d_qk]`, last axis dense, other strides free."""
    shape = q.shape
    if len(shape) != 3:
        raise ShapeError("q.shape", got=list(shape), expected="[queries, heads, d_qk]")
    queries, heads, width = shape
    if q.dtype is not torch.bfloat16:
        raise ArgumentDtypeError("q.dtype", got=q.dtype, expected=torch.bfloat16)
    if heads < plan.caps.heads:
        raise ShapeError("q.shape[1]", got=heads, expected=f"at least {plan.caps.heads}", detail="heads of the plan")
    if width != plan.d_qk:
        raise ShapeError("q.shape[2]", got=width, expected=plan.d_qk, detail=f"record {plan.caps.records[0]}")
    if q.stride()[2] != 1:
        raise StrideError("q.stride(2)", got=q.stride()[2], expected=1)
    if queries > plan.caps.queries:
        raise CapacityError("q.shape[0]", got=queries, expected=f"at most {plan.caps.queries}", detail="caps.queries")
    if q.device != device:
        _wrong_device("q", q, device)
    return queries


def check_out(out: torch.Tensor, plan: Plan, queries: int, device: torch.device) -> None:
    """Checks out: bf16 or fp32 `[queries, >= heads, d_v]`; heads beyond the plan's are left alone."""
    shape = out.shape
    if len(shape) != 3:
        raise ShapeError("out.shape", got=list(shape), expected="[queries, heads, d_v]")
    if shape[0] != queries:
        raise ShapeError("out.shape[0]", got=shape[0], expected=queries, detail="queries of q")
    if shape[1] < plan.caps.heads:
        raise ShapeError("out.shape[1]", got=shape[1], expected=f"at least {plan.caps.heads}", detail="heads")
    if shape[2] != plan.d_v:
        raise ShapeError("out.shape[2]", got=shape[2], expected=plan.d_v, detail="d_v of the record")
    if out.dtype not in _OUT_DTYPES:
        raise ArgumentDtypeError("out.dtype", got=out.dtype, expected="torch.bfloat16 or torch.float32")
    query_stride, head_stride, last = out.stride()
    if last != 1:
        raise StrideError("out.stride(2)", got=last, expected=1)
    if head_stride < plan.d_v or query_stride < head_stride * plan.caps.heads:
        _check_no_alias("out", (queries, plan.caps.heads), (query_stride, head_stride), plan.d_v)
    if out.device != device:
        _wrong_device("out", out, device)


def check_lse(lse: torch.Tensor, plan: Plan, queries: int, device: torch.device) -> None:
    """Checks lse: fp32 `[queries, >= heads]`, any strides."""
    shape = lse.shape
    if len(shape) != 2 or shape[0] != queries or shape[1] < plan.caps.heads:
        raise ShapeError("lse.shape", got=list(shape), expected=f"[{queries}, at least {plan.caps.heads}]")
    if lse.dtype is not torch.float32:
        raise ArgumentDtypeError("lse.dtype", got=lse.dtype, expected=torch.float32)
    query_stride, head_stride = lse.stride()
    if not head_stride or query_stride < head_stride * plan.caps.heads:
        _check_no_alias("lse", (queries, plan.caps.heads), (query_stride, head_stride), 1)
    if lse.device != device:
        _wrong_device("lse", lse, device)


def check_sink(sink: torch.Tensor, heads: int, device: torch.device) -> torch.Tensor:
    """Checks the sink, fp32 natural logits; a padded one is cut to the real heads.

    Returns:
        fp32 `[heads]`, dense.
    """
    if sink.dim() != 1 or sink.shape[0] < heads:
        raise ShapeError("sink.shape", got=list(sink.shape), expected=f"[{heads}]", detail="one logit for each head")
    if sink.dtype is not torch.float32:
        raise ArgumentDtypeError("sink.dtype", got=sink.dtype, expected=torch.float32)
    if sink.stride(0) != 1 and heads > 1:
        raise StrideError("sink.stride(0)", got=sink.stride(0), expected=1)
    if sink.device != device:
        _wrong_device("sink", sink, device)
    return sink[:heads] if sink.shape[0] != heads else sink


def check_slots(
    slots: torch.Tensor, *, index: int, plan: Plan, queries: int, device: torch.device, per_sequence: bool
) -> None:
    """Checks the slots of cache `index`: int32 or int64 `[queries, width]`, last axis dense."""
    shape = slots.shape
    if len(shape) != 2:
        raise ShapeError(f"caches[{index}].slots.shape", got=list(shape), expected="[queries, width]")
    if not per_sequence and shape[0] != queries:
        raise ShapeError(f"caches[{index}].slots.shape[0]", got=shape[0], expected=queries, detail="queries of q")
    if shape[1] > plan.caps.widths[index]:
        raise CapacityError(
            f"caches[{index}].slots.shape[1]",
            got=shape[1],
            expected=f"at most {plan.caps.widths[index]}",
            detail=f"caps.widths[{index}]",
        )
    if slots.dtype not in INDEX_BITS:
        raise ArgumentDtypeError(f"caches[{index}].slots.dtype", got=slots.dtype, expected="torch.int32 or torch.int64")
    if shape[1] > 1 and slots.stride()[1] != 1:
        raise StrideError(f"caches[{index}].slots.stride(1)", got=slots.stride(1), expected=1)
    if slots.device != device:
        _wrong_device(f"caches[{index}].slots", slots, device)


def check_lengths(
    lengths: torch.Tensor, *, index: int, rows: int | None, queries: int, device: torch.device, per_sequence: bool
) -> None:
    """Checks the lengths of cache `index`: int32 or int64, one for each query, or for each sequence."""
    shape = lengths.shape
    expected = rows if per_sequence else queries
    if len(shape) != 1 or (expected is not None and shape[0] != expected):
        raise ShapeError(
            f"caches[{index}].lengths.shape",
            got=list(shape),
            expected=f"[{'sequences' if expected is None else expected}]",
            detail="sequences" if per_sequence else "queries of q",
        )
    if lengths.dtype not in INDEX_BITS:
        raise ArgumentDtypeError(f"caches[{index}].lengths.dtype", got=lengths.dtype, expected="int32 or int64")
    if lengths.stride()[0] != 1 and shape[0] > 1:
        raise StrideError(f"caches[{index}].lengths.stride(0)", got=lengths.stride(0), expected=1)
    if lengths.device != device:
        _wrong_device(f"caches[{index}].lengths", lengths, device)


def check_map(sequence_of_query: torch.Tensor, queries: int, device: torch.device) -> None:
    """Checks the query-to-sequence map: int32 or int64 `[queries]`, dense."""
    if sequence_of_query.dim() != 1 or sequence_of_query.shape[0] != queries:
        raise ShapeError(
            "sequence_of_query.shape", got=list(sequence_of_query.shape), expected=[queries], detail="queries of q"
        )
    if sequence_of_query.dtype not in INDEX_BITS:
        raise ArgumentDtypeError("sequence_of_query.dtype", got=sequence_of_query.dtype, expected="int32 or int64")
    if queries > 1 and sequence_of_query.stride(0) != 1:
        raise StrideError("sequence_of_query.stride(0)", got=sequence_of_query.stride(0), expected=1)
    if sequence_of_query.device != device:
        _wrong_device("sequence_of_query", sequence_of_query, device)


def check_pages(cache: Cache, index: int, plan: Plan, device: torch.device) -> None:
    """Checks that a cache is what the plan was made for."""
    if index >= len(plan.caps.records):
        raise CapacityError("caches", got=f"more than {index}", expected=f"at most {index}", detail="caps.records")
    layout = cache.view.layout
    if layout.record != plan.caps.records[index]:
        raise ValueRangeError(
            f"caches[{index}].view.layout.record",
            got=layout.record,
            expected=plan.caps.records[index],
            detail="record of the plan",
        )
    external = layout.record_format.scale_rule is ScaleRule.EXTERNAL
    scale = cache.external_scale
    if (external and (scale is None or not 0 < scale < float("inf"))) or (not external and scale is not None):
        expected = "a positive finite number" if external else "none"
        raise ValueRangeError(
            f"caches[{index}].external_scale", got=scale, expected=expected, detail=f"record {layout.record}"
        )
    if cache.view.pages.device != device:
        _wrong_device(f"caches[{index}].view", cache.view.pages, device)
    cache.view.require_live()


def _check_no_alias(name: str, sizes: tuple[int, int], strides: tuple[int, int], width: int) -> None:
    """Refuses an output whose (query, head) rows share elements: two units would write the same bytes."""
    axes = [(stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1]
    reach = width
    for stride, size in sorted(axes):
        if stride < reach:
            raise StrideError(f"{name}.stride()", got=strides, expected=f"rows of {width} that do not overlap")
        reach = stride * (size - 1) + reach


def _wrong_device(name: str, tensor: torch.Tensor, device: torch.device) -> NoReturn:
    raise DeviceError(f"{name}.device", got=tensor.device, expected=device, detail="device of prepare")
