"""What a torch user writes: gather, torch's own e4m3 cast, two bf16 products. The baseline of the torch backend."""

from __future__ import annotations

import math

import torch

from kvbridge.kernels.mla import Cache


def decode(q: torch.Tensor, caches: list[Cache], sink: torch.Tensor, scale: float) -> torch.Tensor:
    """Decodes V4 pages; all slots must be live.

    Args:
        q: bf16 `[queries, heads, 512]`.
        caches: Pages and slots.
        sink: fp32 `[heads]`.
        scale: Multiplies q . k.

    Returns:
        bf16 `[queries, heads, 512]`.
    """
    keys = torch.cat([_keys(cache) for cache in caches], 1)
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * scale
    largest = torch.maximum(scores.amax(-1, keepdim=True), sink.view(1, -1, 1).clamp(min=-1e30))
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - largest)
    out = torch.bmm(weights.to(torch.bfloat16), keys).float()
    return torch.where(total > 0, out / total, math.nan).to(torch.bfloat16)


def _keys(cache: Cache) -> torch.Tensor:
    slots = cache.slots.flatten()
    page, row = slots // cache.view.page_rows, slots % cache.view.page_rows
    data, scales = cache.view.data[page, row], cache.view.scales[page, row][:, :7]
    keys = torch.empty(len(slots), 512, dtype=torch.bfloat16)
    powers = (scales.to(torch.int16) << 7).view(torch.bfloat16)
    codes = data[:, :448].view(torch.float8_e4m3fn).to(torch.bfloat16).view(-1, 7, 64)
    torch.mul(codes, powers.unsqueeze(-1), out=keys[:, :448].view(-1, 7, 64))
    keys[:, 448:] = data[:, 448:].view(torch.bfloat16)
    return keys.view(*cache.slots.shape, 512)
