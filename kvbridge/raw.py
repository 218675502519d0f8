"""Audit of one tensor that was declared in numbers: nothing is allocated, whatever its size.

    {"storage_bytes": 7450346880, "offset_bytes": 181440, "shape": [7166, 64, 584], "stride_bytes": [1039680, 584, 1],
     "dtype": "uint8", "record": "v4", "page_rows": 64}
       7165 * 1039680 + 37376 + 181440 = 7449526016 <= 7450346880: fits
     the same with shape [7166, 1039680], stride [1039680, 1]: needs 7450528320, excess 181440 = the offset

A record is never guessed, nor is an axis of size 2 between pages and rows: it may be a K/V split or a page of two rows
(name the axes). A stride above the payload without a declared policy is taken as packed: the bytes between belong to
somebody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from kvbridge.axes import axis_order
from kvbridge.documents import describe_validation
from kvbridge.errors import (
    KindError,
    LayoutError,
    ManifestError,
    PageStrideError,
    RankError,
    RecordWidthError,
    StorageOverrunError,
)
from kvbridge.geometry import Geometry, TensorShape, check_geometry
from kvbridge.layout import DTYPE_BYTES, DeclaredLayout, Padding, PaddingPolicy, PageLayout, PoolKind, violations
from kvbridge.records import get_record, records_of_width
from kvbridge.rules import Finding, finding, finding_of

_Integer64 = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]


class RawTensor(BaseModel):
    """One tensor as somebody declared it.

    Attributes:
        storage_bytes: Size of the storage.
        offset_bytes: First element, from the start of the storage.
        shape: Sizes.
        stride_bytes: Strides in bytes, as many as sizes.
        dtype: Torch's name of the dtype.
        record: Record name; without one the tensor is refused.
        page_rows: Rows in a page.
        axes: Name of each axis: pages, heads, rows, row, slots (or B, H, N, C).
        plane: Plane, for records spread over several tensors.
        kind: Paged or token-granular.
        tokens_per_row: Tokens that one row stands for.
        policy: Padding policy; None where nobody said.
        alignment: Bytes that a page is rounded up to.
        page_bytes: Payload and tail pad.
        num_pages: Pages the pool should have.
        reserved_pages: Pages at the start that hold no live rows.
        pool: What the pool holds.
        slots: Rows of slots to check.
        lengths: Live slots of each row.
        slots_dtype: int32 or int64, where the program's slots have one; JSON has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    storage_bytes: StrictInt
    offset_bytes: StrictInt
    shape: tuple[StrictInt, ...]
    stride_bytes: tuple[StrictInt, ...]
    dtype: StrictStr
    record: StrictStr | None = None
    page_rows: StrictInt
    axes: tuple[StrictStr, ...] | None = None
    plane: StrictStr | None = None
    kind: PoolKind = PoolKind.PAGED
    tokens_per_row: StrictInt = 1
    policy: PaddingPolicy | None = None
    alignment: StrictInt | None = None
    page_bytes: StrictInt | None = None
    num_pages: StrictInt | None = None
    reserved_pages: StrictInt = 0
    pool: Annotated[StrictStr, Field(min_length=1)] = "kv"
    slots: tuple[tuple[_Integer64, ...], ...] | None = None
    lengths: tuple[_Integer64, ...] | None = None
    slots_dtype: Literal["int32", "int64"] | None = None


@dataclass(frozen=True, slots=True)
class RawAudit:
    """What an audit of a declared tensor found.

    Attributes:
        findings: Every fault and remark.
        layout: The layout that follows; None where it contradicts itself.
        geometry: The pages; None where the tensor does not fit the layout.
    """

    findings: tuple[Finding, ...]
    layout: PageLayout | None = None
    geometry: Geometry | None = None


def parse_raw(text: str | bytes) -> RawTensor:
    """Reads the JSON of one declared tensor.

    Raises:
        ManifestError: Not JSON, or not on schema; the message names the place.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"raw: got text that is not JSON ({error}), expected a JSON object") from error
    return validate_raw(data)


def validate_raw(data: object) -> RawTensor:
    """Validates an already parsed declaration.

    Raises:
        ManifestError: Not on schema.
    """
    if not isinstance(data, dict):
        raise ManifestError(f"raw: got a JSON {type(data).__name__}, expected an object")
    try:
        return RawTensor.model_validate(data)
    except ValidationError as error:
        raise ManifestError(describe_validation(error)) from error


def audit_raw(raw: RawTensor) -> RawAudit:
    """Audits one declared tensor: record, axes, geometry, storage, slots and lengths.

    Args:
        raw: The declaration.

    Returns:
        Findings, and what could be made of the declaration.
    """
    try:
        tensor = _ordered(raw)
    except LayoutError as error:
        return RawAudit((finding_of(error, pool=raw.pool),))
    findings: list[Finding] = []
    if _claims_tight(raw, tensor):
        refused = _tight_claim(raw, tensor)
        if refused is not None:
            return RawAudit((refused,))
        tensor = TensorShape(
            tensor.shape,
            (raw.page_rows * _row_bytes(raw), *tensor.stride_bytes[1:]),
            tensor.offset_bytes,
            tensor.storage_bytes,
            tensor.dtype,
        )
    declared = _declared(raw, tensor)
    if raw.policy is None and declared.padding.policy is PaddingPolicy.PACKED and declared.payload_bytes > 0:
        findings.append(
            finding(
                "policy-undeclared",
                "policy",
                got=None,
                expected="exact, aligned or packed",
                detail=f"stride {declared.page_stride_bytes}, payload {declared.payload_bytes}",
                pool=raw.pool,
            )
        )
    faults = list(violations(declared))
    if faults:
        faults = _told_once(raw, tensor, faults)
    layout = None if faults else PageLayout(**_layout_fields(declared))
    geometry = None
    if layout is not None:
        try:
            geometry = check_geometry(tensor, layout)
        except LayoutError as error:
            faults.append(error)
    if not any(isinstance(fault, StorageOverrunError) for fault in faults):
        faults += _extent_faults(tensor)
    findings += [finding_of(fault, pool=raw.pool) for fault in faults]
    return RawAudit((*findings, *_slot_findings(raw, geometry)), layout, geometry)


def _ordered(raw: RawTensor) -> TensorShape:
    """The tensor with its axes in the order pages, heads, rows, row."""
    if len(raw.stride_bytes) != len(raw.shape):
        raise RankError(
            "stride_bytes", got=f"{len(raw.stride_bytes)} strides", expected=f"{len(raw.shape)}, as many as sizes"
        )
    if any(size < 0 for size in raw.shape):
        raise RankError("shape", got=list(raw.shape), expected="sizes of at least 0")
    if raw.offset_bytes < 0 or raw.storage_bytes < 0:
        raise StorageOverrunError(
            "offset_bytes" if raw.offset_bytes < 0 else "storage_bytes",
            got=min(raw.offset_bytes, raw.storage_bytes),
            expected="at least 0",
        )
    order = axis_order(raw.axes, shape=raw.shape, token_granular=raw.kind is PoolKind.TOKEN_GRANULAR)
    return TensorShape(
        shape=tuple(raw.shape[axis] for axis in order),
        stride_bytes=tuple(raw.stride_bytes[axis] for axis in order),
        offset_bytes=raw.offset_bytes,
        storage_bytes=raw.storage_bytes,
        dtype=raw.dtype,
    )


def _claims_tight(raw: RawTensor, tensor: TensorShape) -> bool:
    return raw.kind is PoolKind.PAGED and len(tensor.shape) > 1 and tensor.shape[0] > 1 and tensor.stride_bytes[0] == 0


def _tight_claim(raw: RawTensor, tensor: TensorShape) -> Finding | None:
    """A block stride of 0 stands for tight pages; the storage must agree."""
    payload, pages = raw.page_rows * _row_bytes(raw), tensor.shape[0]
    available = raw.storage_bytes - raw.offset_bytes
    if payload > 0 and available == pages * payload:
        return None
    stride, rest = divmod(available, pages)
    return finding(
        "tight-claim",
        "stride_bytes[0]",
        got=0,
        expected=f"{stride}: what the storage says" if rest == 0 else "the tensor's stride(0)",
        detail=f"declared tight: {pages} * {payload} = {pages * payload}, storage has {available}",
        pool=raw.pool,
    )


def _declared(raw: RawTensor, tensor: TensorShape) -> DeclaredLayout:
    payload = raw.page_rows * _row_bytes(raw)
    stride = _page_stride(raw, tensor, payload)
    policy = raw.policy
    if policy is None:
        if raw.alignment is not None:
            policy = PaddingPolicy.ALIGNED
        else:
            policy = PaddingPolicy.PACKED if stride > payload else PaddingPolicy.EXACT
    return DeclaredLayout(
        record=raw.record,
        page_rows=raw.page_rows,
        tokens_per_row=raw.tokens_per_row,
        payload_bytes=payload,
        page_stride_bytes=stride,
        padding=Padding(policy=policy, alignment=raw.alignment),
        page_bytes=raw.page_bytes,
        num_pages=raw.num_pages,
        reserved_pages=raw.reserved_pages,
        dtype=raw.dtype,
        kind=raw.kind,
        plane=raw.plane,
        pool=raw.pool,
    )


def _page_stride(raw: RawTensor, tensor: TensorShape, payload: int) -> int:
    if raw.kind is PoolKind.TOKEN_GRANULAR:
        return payload
    if len(tensor.shape) > 1 and tensor.shape[0] > 1:
        return tensor.stride_bytes[0]
    return max(raw.page_bytes or 0, payload)  # one page has no stride


def _told_once(raw: RawTensor, tensor: TensorShape, faults: list[LayoutError]) -> list[LayoutError]:
    """Leaves out what follows from an unknown row, and adds the width that the stride's faults hide."""
    if raw.kind is PoolKind.INDEX_ONLY:
        return faults
    row_bytes = _row_bytes(raw)
    if row_bytes == 0 or raw.page_rows <= 0:
        return [fault for fault in faults if not isinstance(fault, KindError)]
    size = DTYPE_BYTES.get(tensor.dtype, 1)
    if raw.kind is PoolKind.PAGED and len(tensor.shape) > 1:
        rows = raw.page_rows if len(tensor.shape) == 2 else 1
        width = tensor.shape[-1] * size
        if width != rows * row_bytes and width % rows == 0:
            names = records_of_width(width // rows)
            detail = f"record {raw.record}" + (f"; {width // rows} looks like {' or '.join(names)}" if names else "")
            faults.append(RecordWidthError("row bytes", got=width // rows, expected=row_bytes, detail=detail))
    return faults


def _row_bytes(raw: RawTensor) -> int:
    try:
        return get_record(raw.record).plane_bytes(raw.plane)
    except LayoutError:
        return 0


def _layout_fields(declared: DeclaredLayout) -> dict[str, Any]:
    fields = {name: getattr(declared, name) for name in DeclaredLayout.model_fields}
    return fields | {"record": declared.record or ""}


def _extent_faults(tensor: TensorShape) -> Iterator[LayoutError]:
    """The bytes the tensor itself exposes, whatever its layout, against the storage."""
    size = DTYPE_BYTES.get(tensor.dtype)
    if size is None or 0 in tensor.shape or tensor.storage_bytes is None:
        return
    for axis, stride in enumerate(tensor.stride_bytes):
        if stride < 0:
            yield PageStrideError(f"stride_bytes[{axis}]", got=stride, expected="at least 0")
            return
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride_bytes, strict=True))
    needed = tensor.offset_bytes + last + size
    if needed > tensor.storage_bytes:
        yield StorageOverrunError(
            "storage_bytes",
            got=tensor.storage_bytes,
            expected=f"at least {needed}",
            detail=f"needed {needed}, available {tensor.storage_bytes}, excess {needed - tensor.storage_bytes}",
        )


def _slot_findings(raw: RawTensor, geometry: Geometry | None) -> tuple[Finding, ...]:
    if raw.slots is None:
        return ()
    widths = {len(row) for row in raw.slots}
    if len(widths) > 1:
        expected = "rows of one width"
        return (finding("slot-shape", "slots", got=sorted(widths), expected=expected, pool=raw.pool),)
    import torch

    from kvbridge.slots import check_slots

    slots = torch.tensor(raw.slots, dtype=torch.int64).reshape(len(raw.slots), widths.pop() if widths else 0)
    lengths = None if raw.lengths is None else torch.tensor(raw.lengths, dtype=torch.int64)
    pages = geometry.num_pages if geometry is not None else raw.num_pages
    return check_slots(
        slots,
        lengths,
        capacity_rows=2**63 - 1 if pages is None else max(pages, 0) * max(raw.page_rows, 0),
        page_rows=raw.page_rows,
        reserved_pages=raw.reserved_pages,
        pool=raw.pool,
    ).findings
