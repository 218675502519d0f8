"""The decode as a torch operator, `torch.ops.kvbridge.mla_decode`: visible to torch.compile and FakeTensor.

    handle = register(prepared)                        a number, constant under torch.compile
    torch.ops.kvbridge.mla_decode(handle, q, out, pages=[view.pages ...], page_rows=[...], slots=[...], ...)

Importing this module defines the operator. It writes `out` and `lse` in place and returns nothing; the fake checks the
shapes that decide whether the real call would be refused. Pages come as the normalised uint8 `[pages, payload_bytes]`
tensors of a PageView: their stride says how far apart pages are, the plan says what record they hold.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence

import torch

from kvbridge.kernels.caches import Cache, LseFormat
from kvbridge.kernels.errors import NotPreparedError, ShapeError
from kvbridge.kernels.mla import Prepared, bind
from kvbridge.layout import PageLayout
from kvbridge.records import get_record
from kvbridge.view import PageView

_SCHEMA = (
    "(int prepared, Tensor q, Tensor(a!) out, *, Tensor[] pages, int[] page_rows, Tensor[] slots, Tensor?[] lengths, "
    "float scale, Tensor(b!)? lse=None, Tensor? sink=None, float[] external_scales=[], "
    "str lse_base='natural', bool lse_includes_sink=False, bool lse_empty_positive=False) -> ()"
)
_NAME = "kvbridge::mla_decode"
torch.library.define(_NAME, _SCHEMA)
_prepared: weakref.WeakValueDictionary[int, Prepared] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(prepared: Prepared) -> int:
    """Gives a handle for the operator. The operator holds `prepared` weakly: keep it as long as the handle is used."""
    for handle, known in _prepared.items():
        if known is prepared:
            return handle
    handle = next(_handles)
    _prepared[handle] = prepared
    return handle


def _known(handle: int) -> Prepared:
    prepared = _prepared.get(handle)
    if prepared is None:
        raise NotPreparedError(f"prepared: got handle {handle}, expected one that register() gave and that is alive")
    return prepared


@functools.lru_cache(maxsize=4096)
def _layout(record: str, page_rows: int, page_stride_bytes: int) -> PageLayout:
    return PageLayout.for_rows(record, page_rows=page_rows, policy="packed", page_stride_bytes=page_stride_bytes)


@torch.library.impl(_NAME, ("cpu", "cuda"))
def _mla_decode(
    handle: int,
    q: torch.Tensor,
    out: torch.Tensor,
    *,
    pages: list[torch.Tensor],
    page_rows: list[int],
    slots: list[torch.Tensor],
    lengths: list[torch.Tensor | None],
    scale: float,
    lse: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    external_scales: Sequence[float] = (),
    lse_base: str = "natural",
    lse_includes_sink: bool = False,
    lse_empty_positive: bool = False,
) -> None:
    prepared = _known(handle)
    _check_counts(prepared, pages, page_rows, slots, lengths)
    caches = []
    for index, (tensor, rows) in enumerate(zip(pages, page_rows, strict=True)):
        record = prepared.plan.caps.records[index]
        # With one page or none the stride of the tensor means nothing.
        stride = max(int(tensor.stride(0)), rows * get_record(record).row_bytes)
        view = PageView.from_tensor(tensor, _layout(record, rows, stride))
        scale_outside = external_scales[index] if external_scales else None
        caches.append(
            Cache(view=view, slots=slots[index], lengths=lengths[index], external_scale=scale_outside or None)
        )
    form = LseFormat(
        base=lse_base, includes_sink=lse_includes_sink, empty=math.inf if lse_empty_positive else -math.inf
    )
    bind(prepared, q=q, caches=caches, out=out, scale=scale, sink=sink, lse=lse, lse_format=form).run()


@torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator]
def _fake(
    handle: int,
    q: torch.Tensor,
    out: torch.Tensor,
    *,
    pages: list[torch.Tensor],
    page_rows: list[int],
    slots: list[torch.Tensor],
    lengths: list[torch.Tensor | None],
    **options: object,
) -> None:
    plan = _known(handle).plan
    _check_counts(_known(handle), pages, page_rows, slots, lengths)
    if q.dim() != 3 or q.shape[2] != plan.d_qk:
        raise ShapeError("q.shape", got=list(q.shape), expected=f"[queries, heads, {plan.d_qk}]")
    if out.dim() != 3 or out.shape[2] != plan.d_v:
        raise ShapeError("out.shape", got=list(out.shape), expected=f"[queries, heads, {plan.d_v}]")


def _check_counts(prepared: Prepared, pages: list[torch.Tensor], *others: Sequence[object]) -> None:
    most = len(prepared.plan.caps.records)
    if not 1 <= len(pages) <= most:
        raise ShapeError("pages", got=len(pages), expected=f"1 to {most}", detail="caps.records")
    for name, given in zip(("page_rows", "slots", "lengths"), others, strict=True):
        if len(given) != len(pages):
            raise ShapeError(name, got=len(given), expected=len(pages), detail="one for each of pages")
