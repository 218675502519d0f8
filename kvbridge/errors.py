"""Typed errors. Each carries its numbers: which field, what was got, what was expected, and what breaks otherwise.

    stride-overlap: page_stride_bytes: got 37375, expected at least 37376 (payload_bytes); neighbouring pages share ...
    ^ code          ^ field                ^ got           ^ expected                      ^ consequence

The codes are stable: an audit reports the same fault under the same code as a finding (see `audit.py`), so a rule can
be looked up by what an exception printed. None of these derive from `ValueError`: pydantic wraps that family, and a
caller should catch one type, whether the fault came from a constructor, a JSON file or a live tensor.
"""

from __future__ import annotations

from typing import ClassVar


class KVBridgeError(Exception):
    """Root of everything kvbridge raises on purpose."""


class LayoutError(KVBridgeError):
    """A layout, a tensor or a request that contradicts itself or its layout.

    Attributes:
        code: Stable identifier of the rule, shared with the audit's findings.
        field: Name of the offending field or argument.
        got: The value found.
        expected: The value, or a phrase that names the values, that would have been right.
        consequence: What goes wrong when the fault is ignored.
    """

    code: ClassVar[str] = "layout"
    consequence: ClassVar[str] = "bytes are read or written that do not belong to the page"

    def __init__(self, field: str, *, got: object, expected: object, detail: str = "") -> None:
        self.field = field
        self.got = got
        self.expected = expected
        self.detail = detail
        super().__init__(field, got, expected, detail)

    def __reduce__(self) -> tuple[object, ...]:
        # Engines send the errors of their workers between processes; keyword arguments need help for that.
        return _rebuild, (type(self), self.field, self.got, self.expected, self.detail)

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.code}: {self.field}: got {self.got}, expected {self.expected}{detail}; {self.consequence}"


def _rebuild(error: type[LayoutError], field: str, got: object, expected: object, detail: str) -> LayoutError:
    return error(field, got=got, expected=expected, detail=detail)


class RecordMissingError(LayoutError):
    """No record named: 656, 584 and 528-byte records travel under one dtype name, so nothing can be inferred."""

    code = "record-missing"
    consequence = "the same bytes fit several records and would be decoded as the wrong one"


class RecordUnknownError(LayoutError):
    """A record name that `records.py` does not define."""

    code = "record-unknown"
    consequence = "the bytes of a row have no meaning"


class RecordWidthError(LayoutError):
    """A tensor row, or page, whose width is not the record's."""

    code = "record-width"
    consequence = "every row after the first is read from the wrong byte"


class RecordMismatchError(LayoutError):
    """Two layouts whose records do not hold the same bytes for a row: no copy turns one into the other."""

    code = "record-mismatch"
    consequence = "bytes of one record are decoded as another"


class PlaneError(LayoutError):
    """A plane missing, unknown, or named for a record that has only one."""

    code = "plane"
    consequence = "values are read as scales, or scales as values"


class PageRowsError(LayoutError):
    """`page_rows` that is not positive, or that does not match the tensor."""

    code = "page-rows"
    consequence = "slot numbers divide into the wrong page and row"


class PageSplitError(LayoutError):
    """A page cut into smaller pages, or several joined, where the arrangement makes that impossible without a copy."""

    code = "page-split"
    consequence = "scales are read from inside the data rows"


class TokensPerRowError(LayoutError):
    """`tokens_per_row` that is not positive."""

    code = "tokens-per-row"
    consequence = "token positions map to the wrong row"


class PayloadError(LayoutError):
    """`payload_bytes` that is not page_rows times the record's bytes."""

    code = "payload"
    consequence = "a page ends before, or after, its last row"


class OverlapError(LayoutError):
    """A page stride shorter than what the page holds."""

    code = "stride-overlap"
    consequence = "neighbouring pages share bytes, and writing one corrupts the other"


class PageStrideError(LayoutError):
    """A page stride that is not the declared one."""

    code = "page-stride"
    consequence = "every page after the first is read from the wrong byte"


class PaddingError(LayoutError):
    """Payload, page and stride that do not follow from the padding policy."""

    code = "padding-policy"
    consequence = "padding is taken for payload, or other layers' bytes for padding"


class DensityError(LayoutError):
    """Gaps, or permuted dimensions, inside a page."""

    code = "page-not-dense"
    consequence = "the bytes of a page are not one run, so no view of it exists"


class StorageOverrunError(LayoutError):
    """The last byte a layout needs lies beyond the storage."""

    code = "storage-overrun"
    consequence = "the last pages lie outside the allocation"


class AlignmentError(LayoutError):
    """A base address or page stride that the record's widest element cannot be loaded from."""

    code = "base-alignment"
    consequence = "loads of bf16 or fp32 elements fault or are split"


class DtypeError(LayoutError):
    """A tensor dtype that cannot hold the record."""

    code = "dtype"
    consequence = "values would be converted instead of reinterpreted"


class RankError(LayoutError):
    """A tensor with too few or too many dimensions, or an axis that fits no role."""

    code = "rank"
    consequence = "it is unknown which axis counts pages and which counts rows"


class AxesError(LayoutError):
    """A shape that fits two readings, with no axis names to decide."""

    code = "axes-ambiguous"
    consequence = "an axis of size 2 may be a K/V split or a page of two rows"


class PageCountError(LayoutError):
    """A page count that contradicts the tensor, the storage or the reserved pages."""

    code = "page-count"
    consequence = "slots of the missing pages are dereferenced, or live pages are never used"


class KindError(LayoutError):
    """An index-only pool that claims bytes, or a paged pool that has none."""

    code = "kind"
    consequence = "an audit counts memory that does not exist, or misses memory that does"


class DerivedFieldError(LayoutError):
    """A stored derived figure that contradicts the fields it is derived from."""

    code = "derived-mismatch"
    consequence = "readers that trust the figure disagree with readers that compute it"


class BoundViewError(LayoutError):
    """A tensor as bound to a layer's kernel, where the allocator's own view of the layer is needed.

    vLLM binds DeepSeek-V4.1 layers to smaller kernel blocks; that view looks dense but spans other layers' pages.
    """

    code = "bound-view"
    consequence = "a scan, clear or copy of the whole view touches the pages of other layers"


class StaleViewError(LayoutError):
    """A view whose memory was moved, resized or freed since it was made."""

    code = "view-stale"
    consequence = "the address may belong to something else by now"


class SlotError(LayoutError):
    """Slots, lengths or page numbers outside what a pool holds."""

    code = "slot-bounds"
    consequence = "an index reaches address arithmetic beyond the pool"


class SpanError(LayoutError):
    """A byte range that leaves its page, its storage or what its group owns."""

    code = "span"
    consequence = "a clear or a copy touches bytes of another layer"


class CodecError(LayoutError):
    """A record that cannot be encoded or decoded as asked."""

    code = "codec"
    consequence = "values would be made up"


class ManifestError(KVBridgeError):
    """Input that is not parseable or not on schema: the command exits with 2."""
