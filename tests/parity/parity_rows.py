"""K rows that both engines write: one seed, and every kind of value on which writers of scaled formats differ.

row 0 zeros | 1 negative zeros | amplitudes from 1e-38 to 3e38 | largest values at and beside 448 * 2**k and 2**k |
wide tiles: one large value among ones that round to subnormal codes | ties between codes | random rows
"""

from __future__ import annotations

import torch

WIDTH = 512
SEED = 20_261_201
COUNT = 256

QUERIES, HEADS, WINDOW, EXTRA = 8, 64, 128, 64
SPECIAL_ROWS = 96
"""Rows before this one hold values that no softmax survives; the random rows behind them are attended to."""

_TINY_AMPLITUDES = (1e-38, 1e-30, 1e-12, 9e-9, 1e-8, 1e-6, 5e-5, 9.9e-5, 1e-4, 1.02e-4, 1e-3, 0.01, 0.04, 0.044, 0.045)
_LARGE_AMPLITUDES = (0.1, 7.0, 3e4, 1e20, 3e38)


def make_rows(count: int = COUNT, *, seed: int = SEED) -> torch.Tensor:
    """bf16 `[count, 512]`: special rows first, random rows behind them."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(WIDTH, generator=generator) * scale

    rows = [torch.zeros(WIDTH), torch.full((WIDTH,), -0.0)]
    for amplitude in (*_TINY_AMPLITUDES, *_LARGE_AMPLITUDES):
        values = torch.rand(WIDTH, generator=generator) * 2 - 1
        values[::8] = 1.0
        rows.append(values * amplitude)
    for exponent in (-24, -13, -8, -1, 0, 1, 8, 20):
        for largest in (448.0, 450.0, 446.0, 1.0, 1.0078125, 256.0):
            values = (torch.rand(WIDTH, generator=generator) * 2 - 1) * largest
            values[::16] = largest
            values[8::16] = -largest
            rows.append(values * 2.0**exponent)
    for spread in range(4, 24):  # tiles in which most values round to subnormal codes, or to zero
        values = noise(2.0**-spread)
        values[::32] = 1.0
        rows.append(values)
    codes = torch.arange(WIDTH, dtype=torch.float32)
    ties = [(codes % 64) * 2.0**-10, (codes % 64) * 2.0**-9, 16 + (codes % 64), codes - 256, (codes % 48) * 0.25]
    for values in ties:  # with 448 in every tile the scale is 1, so these lie on codes and halfway between them
        values[::32] = 448.0
        rows.append(values)
    mixed = noise()
    mixed[:64] = 0
    mixed[64:128] *= 1e-6
    mixed[128:192] *= 1e4
    rows.append(mixed)
    while len(rows) < count:
        rows.append(noise(float(torch.randn(1, generator=generator).exp())))
    return torch.stack(rows[:count]).to(torch.bfloat16)


def make_slots(count: int, *, capacity: int, first: int, seed: int = SEED) -> torch.Tensor:
    """int64 `[count]`: different slots from `first` on, in random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(capacity - first, generator=generator)[:count] + first


def make_queries() -> dict[str, torch.Tensor]:
    """q, sink, and the numbers of the rows that each query attends to in the window and in the compressed cache."""
    generator = torch.Generator().manual_seed(SEED + 1)
    pick = torch.stack([torch.randperm(COUNT - SPECIAL_ROWS, generator=generator) for _ in range(2 * QUERIES)])
    return {
        "q": torch.randn(QUERIES, HEADS, 512, generator=generator).bfloat16(),
        "sink": torch.randn(HEADS, generator=generator),
        "window_rows": pick[:QUERIES, :WINDOW] + SPECIAL_ROWS,
        "extra_rows": pick[QUERIES:, :EXTRA] + SPECIAL_ROWS,
        "window_lengths": torch.tensor([WINDOW, 1, 7, 64, 65, 100, 127, WINDOW], dtype=torch.int32),
        "extra_lengths": torch.tensor([EXTRA, 1, 3, 33, EXTRA, 63, 17, 2], dtype=torch.int32),
    }


def tile_amax(rows: torch.Tensor, *, values: int, group: int) -> torch.Tensor:
    """fp32 `[count, values / group]`: largest magnitude of each tile of the first `values` values."""
    return rows[:, :values].float().view(len(rows), values // group, group).abs().amax(-1)
