"""Case 36: NaN in bytes that nobody should read. Page of 4 rows, 4 pages, 13 live rows, dead rows full of 0x7F."""

from __future__ import annotations

import math

import pytest
import torch

from kvbridge.codec import pack_pages, quantise
from kvbridge.kernels import mla
from kvbridge.layout import PageLayout
from kvbridge.view import PageView

BACKENDS = ["reference", "torch", "cpu"]


def decode(
    backend: str, dead: int, slots: torch.Tensor, lengths: torch.Tensor, record: str
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = PageLayout.for_rows(record, page_rows=4)
    values = torch.randn(16, 512, generator=torch.Generator().manual_seed(2))
    rows = quantise(values, record)
    rows[13:] = dead
    view = PageView.from_tensor(pack_pages(rows.view(4, 4, -1), layout), layout)
    q = torch.randn(3, 8, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    caps = mla.Caps(queries=3, heads=8, widths=(slots.shape[1],), records=(record,))
    out, lse = torch.empty(3, 8, 512), torch.empty(3, 8)
    cache = mla.Cache(view=view, slots=slots, lengths=lengths)
    mla.run(mla.prepare(mla.plan(caps), backend=backend), q=q, caches=[cache], out=out, lse=lse, scale=512**-0.5)
    return out, lse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("record", ["v4", "v41", "v41_fp4_interleaved", "v4_bf16"])
@pytest.mark.parametrize("dead_slots", ["past the length", "minus one"])
def test_dead_bytes_do_not_reach_the_output(backend: str, record: str, dead_slots: str) -> None:
    slots = torch.arange(16).expand(3, 16).contiguous()
    lengths = torch.tensor([13, 5, 0])
    if dead_slots == "minus one":
        slots = torch.where(torch.arange(16) < lengths[:, None], slots, -1)
        lengths = torch.full((3,), 16)
    answers = [decode(backend, dead, slots, lengths, record) for dead in (0x00, 0x7F, 0xFF)]
    for out, lse in answers:
        assert torch.equal(out, answers[0][0])
        assert torch.equal(lse, answers[0][1])
        assert out[:2].isfinite().all()
        assert not out[2].any()
        assert (lse[2] == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tile_of_128_positions_with_one_live_row(backend: str) -> None:
    slots = torch.full((3, 128), 15)
    slots[:, 0] = 0
    out, _ = decode(backend, 0x7F, slots, torch.tensor([1, 1, 1]), "v4")
    only, _ = decode(backend, 0x00, slots[:, :1], torch.tensor([1, 1, 1]), "v4")
    assert torch.equal(out, only)
