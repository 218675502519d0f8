"""Codes and scales of quantised values: e2m1 packing, UE8M0 powers, and the writers' scale rules by name.

    e2m1   |odd value s ee m|even value s ee m|      two codes a byte, the even value in the low nibble
    UE8M0  one byte b: 2**(b - 127), 255 is NaN      written by rounding the exponent bits of an fp32 up

`codec` puts them together into rows.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbridge.records import E2M1_MAGNITUDES, E2M1_MAX, UE8M0_BIAS, UE8M0_NAN, Record, ScaleRule

if TYPE_CHECKING:
    import torch


class WriterRule(StrEnum):
    """How a writer turns a tile's largest magnitude into its scale. M is the largest code, 448 or 6.

    UE8M0 scales are rounded up to a power of two by exponent bits, exactly; vLLM 0.33.0 rounds log2 in floating point
    instead, which may differ where amax / M is a power of two. The byte of an all-zero e4m3 tile is given for UE8M0.
    """

    AMAX_FLOOR = "amax_floor"  # max(amax, 1e-4) / M: zero tile 105. SGLang V4, vLLM V4 (CUDA, Triton)
    AMAX_FLOOR_RECIPROCAL = "amax_floor_reciprocal"  # max(amax, 1e-4) * fp32(1 / M): zero tile 105. vLLM V4.1
    SCALE_FLOOR = "scale_floor"  # max(amax / M, 1e-4): zero tile 114. FlashMLA tests, vLLM CPU, SGLang V4.1
    TINY_FLOOR = "tiny_floor"  # max(amax / M, 2**-126): zero tile 1. vLLM dsa and fp4 indexer
    NO_FLOOR = "no_floor"  # amax / M, a zero tile has scale 1: zero tile 127. b12x V4


_AMAX_FLOOR = 1e-4
_TINY = 2.0**-126


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to e2m1 codes, ties to even, saturating at 6; a small negative keeps its sign, NaN becomes 0.

    Args:
        values: fp32 `[..., even]`.

    Returns:
        uint8 `[..., half]`, the even value in the low nibble.
    """
    import torch

    magnitude = torch.nan_to_num(values.abs(), nan=0.0, posinf=E2M1_MAX)
    code = torch.zeros_like(values, dtype=torch.uint8)
    for index, (low, high) in enumerate(pairwise(E2M1_MAGNITUDES)):
        middle = (low + high) / 2
        # A tie goes to the even code: up from an odd one, down to an even one.
        code += (magnitude >= middle if index % 2 else magnitude > middle).to(torch.uint8)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of packed e2m1 codes: uint8 `[..., half]` to `[..., half * 2]`, the low nibble first."""
    import torch

    table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=dtype, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[codes.long()]


def raw_scale(amax: torch.Tensor, rule: WriterRule, largest: float) -> torch.Tensor:
    """fp32 scale of tiles before it is rounded to the record's scale format.

    Args:
        amax: fp32 largest magnitude of each tile, finite.
        rule: Floor and division.
        largest: The largest code.
    """
    import torch

    if rule is WriterRule.AMAX_FLOOR:
        return amax.clamp_min(_AMAX_FLOOR) / largest
    if rule is WriterRule.AMAX_FLOOR_RECIPROCAL:
        return amax.clamp_min(_AMAX_FLOOR) * torch.tensor(1.0 / largest, dtype=torch.float32, device=amax.device)
    if rule is WriterRule.SCALE_FLOOR:
        return (amax / largest).clamp_min(_AMAX_FLOOR)
    if rule is WriterRule.TINY_FLOOR:
        return (amax / largest).clamp_min(_TINY)
    return torch.where(amax == 0, 1.0, amax / largest)


def ceil_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below a positive finite fp32, by its exponent bits."""
    import torch

    bits = scale.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def decode_scales(raw: torch.Tensor, record: Record, dtype: torch.dtype) -> torch.Tensor:
    """Scales of a record's scale bytes: uint8 `[..., scale bytes]` to `[..., tiles]`."""
    import torch

    raw = raw.contiguous()
    if record.scale_rule is ScaleRule.E4M3:
        return raw.view(torch.float8_e4m3fn).to(dtype)
    if record.scale_rule is ScaleRule.FP32:
        return raw.view(torch.float32).to(dtype)
    powers = torch.ldexp(torch.ones_like(raw, dtype=dtype), raw.int() - UE8M0_BIAS)
    return torch.where(raw == UE8M0_NAN, float("nan"), powers)
