"""Quantise and dequantise records in torch: the readable reference of every decodable format.

    values [N, 512] fp32  --quantise-->  rows [N, 584] uint8 = |448 codes|64 bf16|7 scales|unused|   fields in order
                          <-dequantise-
    rows  --scatter_rows-->  pages, split or interleaved       each field goes to its own region of the page
          <-gather_rows---

A row here is one record with its fields in the record's order, whatever the page's arrangement: for an interleaved
record that is the row itself, for a split one the data block followed by the scale block.

Writers agree on codes but not on scales, so a scale rule has a name (`WriterRule`); readers never need it. Rules were
read in: SGLang 0.5.23 kernels/jit/csrc/deepseek_v4/store.cuh and include/sgl_kernel/deepseek_v4/kv_layout.cuh, vLLM
0.33.0 models/deepseek_v4/common/ops/cache_utils.py, FlashMLA tests/quant.py, b12x compressed_reference.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbridge.codes import (
    WriterRule,
    ceil_power_of_two,
    decode_e2m1,
    decode_scales,
    encode_e2m1,
    raw_scale,
)
from kvbridge.errors import CodecError, RecordWidthError
from kvbridge.records import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_NAN,
    E4M3_SCALE_MIN,
    UE8M0_NAN,
    Encoding,
    Field,
    Record,
    ScaleRule,
    get_record,
)

if TYPE_CHECKING:
    import torch

    from kvbridge.layout import PageLayout
    from kvbridge.view import PageView

__all__ = [
    "WriterRule",
    "decode_e2m1",
    "dequantise",
    "encode_e2m1",
    "gather_rows",
    "pack_pages",
    "quantise",
    "row_values",
    "scatter_rows",
    "unpack_pages",
]

_DEFAULT_RULES = {
    "v4": WriterRule.AMAX_FLOOR,
    "v41": WriterRule.SCALE_FLOOR,
    "v41_interleaved": WriterRule.SCALE_FLOOR,
    "dsa": WriterRule.TINY_FLOOR,
    "indexer_fp8": WriterRule.AMAX_FLOOR,
    "indexer_fp4": WriterRule.SCALE_FLOOR,
}


def row_values(record: Record | str) -> int:
    """Values that a row decodes to: d_qk for MLA records, 128 for indexer keys.

    Raises:
        CodecError: The record's encoding is not known.
    """
    return sum(field.values for field in _data_fields(_decodable(record)))


def quantise(
    values: torch.Tensor,
    record: Record | str,
    *,
    rule: WriterRule | str | None = None,
    external_scale: float | None = None,
    power_of_two: bool = False,
    unused_byte: int = 0,
) -> torch.Tensor:
    """Encodes values as rows.

    Args:
        values: `[..., row_values(record)]`, any floating dtype; computed in fp32.
        record: Record or its name.
        rule: Scale rule; by default the one of the engine that defined the record (V4: `amax_floor`, V4.1 fp8:
            `scale_floor`). Records with e4m3 scales have one rule only: e4m3(clamp(amax / 6, 2**-9, 448)).
        external_scale: The layer's scale, required for `uniform_fp8` and `mla_fp8`.
        power_of_two: Round fp32 scales up to a power of two, as indexers for block-scaled products do.
        unused_byte: What unused bytes get.

    Returns:
        uint8 `[..., row_bytes]`. Quotients beyond the largest code saturate. A tile with a NaN or an infinity becomes
        NaN as a whole: NaN scale where the record has scales, NaN codes otherwise.

    Raises:
        CodecError: Encoding unknown, external scale missing, not positive or not wanted.
        RecordWidthError: Rows of another width.
    """
    import torch

    form = _decodable(record)
    scale = _check_external(form, external_scale)
    width = row_values(form)
    if values.shape[-1] != width:
        raise RecordWidthError("values.shape[-1]", got=values.shape[-1], expected=width, detail=f"record {form.name}")
    x = values.float()
    chosen = WriterRule(rule) if rule is not None else _DEFAULT_RULES.get(form.name, WriterRule.AMAX_FLOOR)
    parts: dict[str, torch.Tensor] = {}
    start = 0
    for field in _data_fields(form):
        piece = x[..., start : start + field.values]
        start += field.values
        if field.encoding in (Encoding.BF16, Encoding.FP32):
            parts[field.name] = piece.to(getattr(torch, field.encoding.value)).contiguous().view(torch.uint8)
        elif form.scale_rule is ScaleRule.EXTERNAL:
            codes = (piece / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            parts[field.name] = codes.view(torch.uint8)
        else:
            parts[field.name], parts["scales"] = _quantise_tiles(piece, form, field, chosen, power_of_two)
    for field in form.fields:
        if field.encoding is Encoding.UNUSED:
            parts[field.name] = torch.full((*x.shape[:-1], field.row_bytes), unused_byte, dtype=torch.uint8)
    return torch.cat([parts[field.name].to(x.device) for field in form.fields], dim=-1)


def dequantise(
    rows: torch.Tensor,
    record: Record | str,
    *,
    external_scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Decodes rows.

    Every product code * scale is exact in fp64, and exact in bf16 for e4m3 under UE8M0 bytes 10..246 and for e2m1
    under e4m3. Under smaller UE8M0 bytes bf16 may lose bits below 2**-126; under bytes 247..254 it may be inf; byte
    255 and codes 0x7F, 0xFF are NaN. fp32 and external scales are multiplied in fp32 when `dtype` is not fp64.

    Args:
        rows: uint8 `[..., row_bytes]`.
        record: Record or its name.
        external_scale: The layer's scale, required for `uniform_fp8` and `mla_fp8`.
        dtype: torch.float64 (exact), torch.float32 (default) or torch.bfloat16 (fp32 rounded once).

    Returns:
        `[..., row_values(record)]`.

    Raises:
        CodecError: Encoding unknown, external scale missing, not positive or not wanted.
        RecordWidthError: Rows of another width.
    """
    import torch

    form = _decodable(record)
    scale = _check_external(form, external_scale)
    if rows.shape[-1] != form.row_bytes:
        raise RecordWidthError("rows.shape[-1]", got=rows.shape[-1], expected=form.row_bytes, detail=f"{form.name}")
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    pieces = _split_fields(rows, form)
    values: list[torch.Tensor] = []
    for field in _data_fields(form):
        raw = pieces[field.name].contiguous()
        if field.encoding in (Encoding.BF16, Encoding.FP32):
            values.append(raw.view(getattr(torch, field.encoding.value)).to(wide))
            continue
        codes = decode_e2m1(raw, wide) if field.encoding is Encoding.E2M1 else raw.view(torch.float8_e4m3fn).to(wide)
        if form.scale_rule is ScaleRule.EXTERNAL:
            values.append(codes * torch.tensor(scale, dtype=torch.float32).to(wide))
        else:
            tiles = codes.view(*codes.shape[:-1], codes.shape[-1] // form.scale_group, form.scale_group)
            values.append((tiles * decode_scales(pieces["scales"], form, wide).unsqueeze(-1)).flatten(-2))
    return torch.cat(values, dim=-1).to(dtype or torch.float32)


def gather_rows(view: PageView, slots: torch.Tensor) -> torch.Tensor:
    """Reads rows out of pages.

    Args:
        view: The pages.
        slots: Any integer dtype, any shape; all within 0 <= slot < view.capacity_rows.

    Returns:
        uint8 `[*slots.shape, row_bytes]`, fields in the record's order.
    """
    import torch

    page, row = _page_and_row(view, slots)
    regions = [view.region(field.name) for field in view.layout.record_format.plane_fields(view.layout.plane)]
    return torch.cat([region[page, row] for region in regions], dim=-1)


def scatter_rows(view: PageView, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows into pages, each field into its region; touches no other byte.

    Args:
        view: The pages.
        slots: Integer `[N]`, all within 0 <= slot < view.capacity_rows.
        rows: uint8 `[N, row_bytes]`, fields in the record's order.
    """
    page, row = _page_and_row(view, slots)
    pieces = _split_fields(rows, view.layout.record_format)
    for field in view.layout.record_format.plane_fields(view.layout.plane):
        view.region(field.name)[page, row] = pieces[field.name]


def pack_pages(rows: torch.Tensor, layout: PageLayout, *, fill: int = 0) -> torch.Tensor:
    """Builds pages from rows.

    Args:
        rows: uint8 `[pages, page_rows, row_bytes]`, fields in the record's order.
        layout: What the pages are.
        fill: What tail padding and foreign bytes get.

    Returns:
        uint8 `[pages, page_stride_bytes]`, contiguous; its first `payload_bytes` columns are the pages.
    """
    import torch

    from kvbridge.view import PageView

    pages = rows.shape[0]
    slab = torch.full((pages, layout.page_stride_bytes), fill, dtype=torch.uint8, device=rows.device)
    view = PageView.from_tensor(slab[:, : layout.payload_bytes], layout)
    scatter_rows(view, torch.arange(pages * layout.page_rows, device=rows.device), rows.flatten(0, 1))
    return slab


def unpack_pages(view: PageView) -> torch.Tensor:
    """All rows of all pages, uint8 `[pages, page_rows, row_bytes]`, fields in the record's order."""
    import torch

    return gather_rows(view, torch.arange(view.capacity_rows).view(view.num_pages, view.page_rows))


def _decodable(record: Record | str) -> Record:
    form = get_record(record) if isinstance(record, str) else record
    if not form.decodable:
        raise CodecError("record", got=form.name, expected="a record with a known encoding", detail=form.source)
    return form


def _data_fields(record: Record) -> tuple[Field, ...]:
    return tuple(field for field in record.fields if field.block == "data")


def _check_external(record: Record, external_scale: float | None) -> float:
    wanted = record.scale_rule is ScaleRule.EXTERNAL
    if not wanted and external_scale is not None:
        raise CodecError("external_scale", got=external_scale, expected="none", detail=f"record {record.name}")
    if wanted and (external_scale is None or not external_scale > 0):
        raise CodecError("external_scale", got=external_scale, expected="a positive number", detail=record.name)
    return 1.0 if external_scale is None else external_scale


def _split_fields(rows: torch.Tensor, record: Record) -> dict[str, torch.Tensor]:
    import torch

    pieces = torch.split(rows, [field.row_bytes for field in record.fields], dim=-1)
    return {field.name: piece for field, piece in zip(record.fields, pieces, strict=True)}


def _page_and_row(view: PageView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = slots.long()
    return wide // view.page_rows, wide % view.page_rows


def _quantise_tiles(
    values: torch.Tensor, record: Record, field: Field, rule: WriterRule, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of one field whose tiles of `scale_group` values share a scale."""
    import torch

    tiles = values.reshape(*values.shape[:-1], values.shape[-1] // record.scale_group, record.scale_group)
    amax = tiles.abs().amax(dim=-1)
    finite = torch.isfinite(amax)
    largest = E2M1_MAX if field.encoding is Encoding.E2M1 else E4M3_MAX
    nan = torch.tensor(float("nan"), device=values.device)
    if record.scale_rule is ScaleRule.E4M3:
        codes8 = (amax / largest).clamp(E4M3_SCALE_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
        scale_bytes = torch.where(finite, codes8.view(torch.uint8), E4M3_NAN)
        scale = codes8.float()
    else:
        scale = raw_scale(torch.where(finite, amax, 1.0), rule, largest)
        if record.scale_rule is ScaleRule.UE8M0 or power_of_two:
            scale = ceil_power_of_two(scale)
        if record.scale_rule is ScaleRule.UE8M0:
            exponents = scale.view(torch.int32) >> 23
            scale_bytes = torch.where(finite, exponents, UE8M0_NAN).to(torch.uint8)
        else:
            flat = torch.where(finite, scale, nan).flatten().view(torch.uint8)
            scale_bytes = flat.view(*amax.shape[:-1], 4 * amax.shape[-1])
    quotient = torch.where(finite.unsqueeze(-1), tiles / scale.unsqueeze(-1), nan).flatten(-2)
    if field.encoding is Encoding.E2M1:
        return encode_e2m1(quotient), scale_bytes
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8), scale_bytes
