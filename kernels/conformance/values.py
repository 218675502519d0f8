"""Rows of test data for every record: quantised values of several kinds, or arbitrary codes under moderate scales.

small    one value of 1 in each tile, the others so small that their codes are subnormal
bytes    any code that is not NaN, scales so that values stay below about 4
"""

from __future__ import annotations

import torch

from kvbridge.codec import quantise, row_values
from kvbridge.records import E4M3_NAN, Encoding, Field, ScaleRule, get_record


def row_bytes_of(
    record: str, rows: int, values: str, external_scale: float, generator: torch.Generator, *, unused_byte: int
) -> torch.Tensor:
    """Rows of a record.

    Args:
        record: Record name.
        rows: How many.
        values: `normal`, `peaky`, `small`, `offset`, `bytes` or `flashmla`, as in `Case.values`.
        external_scale: For records whose scale lies outside the page.
        generator: Of the random numbers.
        unused_byte: What unused bytes hold.

    Returns:
        uint8 `[rows, row_bytes]`, fields in the record's order.
    """
    form = get_record(record)
    if values == "bytes":
        parts = [_any_bytes(field, form.scale_rule, rows, generator, unused_byte) for field in form.fields]
        return torch.cat(parts, -1)
    x = torch.randn(rows, row_values(form), generator=generator)
    if values == "small":
        x *= 0.002
        x[:, ::64] = 1.0
    elif values == "offset":
        x = 0.3 * x + torch.randn(x.shape[1], generator=generator)
    elif values == "flashmla":
        x = (x / 10).clamp(-1, 1)
    outside = external_scale if form.scale_rule is ScaleRule.EXTERNAL else None
    return quantise(x, form, external_scale=outside, unused_byte=unused_byte)


def _any_bytes(field: Field, rule: ScaleRule, rows: int, generator: torch.Generator, unused_byte: int) -> torch.Tensor:
    size = (rows, field.row_bytes)
    if field.encoding is Encoding.UNUSED:
        return torch.full(size, unused_byte, dtype=torch.uint8)
    if field.block == "scales":
        return _moderate_scales(field, rows, generator)
    if field.encoding in (Encoding.BF16, Encoding.FP32):
        dtype = torch.bfloat16 if field.encoding is Encoding.BF16 else torch.float32
        return torch.randn(rows, field.values, generator=generator).to(dtype).view(torch.uint8)
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if field.encoding is not Encoding.E4M3:
        return codes
    largest = E4M3_NAN - 1 if rule is not ScaleRule.EXTERNAL else 0x48  # keeps values under an outside scale small
    return (codes & 0x80) | (codes & E4M3_NAN).clamp(max=largest)


def _moderate_scales(field: Field, rows: int, generator: torch.Generator) -> torch.Tensor:
    if field.encoding is Encoding.FP32:
        return (torch.rand(rows, field.values, generator=generator) * 0.01).view(torch.uint8)
    low, high = (112, 121) if field.encoding is Encoding.UE8M0 else (0x08, 0x38)
    return torch.randint(low, high, (rows, field.row_bytes), dtype=torch.uint8, generator=generator)
