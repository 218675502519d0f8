"""The recorded decode step of vLLM through the CUDA source: tight, padded and original pages give the same bits."""

from __future__ import annotations

import functools

import pytest
import torch

from kvbridge.kernels import mla
from kvbridge.kernels.conformance.bounds import MOST_HEAD_RMS, MOST_RMS
from tests.kernels.test_decode_step import ARRANGEMENTS, LAYERS, cache, record, relative_rms, truth
from tests.simt.emulator import Emulator


@functools.cache
def decoded(layer: str, arrangement: str) -> torch.Tensor:
    tensors, metadata = record(layer)
    sources = ["window"] + (["compressed"] if "compressed_pages" in tensors else [])
    caches = [cache(layer, source, arrangement) for source in sources]
    q = tensors["q"].as_strided(tensors["q"].shape, metadata["q_stride"])
    caps = mla.Caps(
        queries=len(q),
        heads=q.shape[1],
        widths=tuple(entry.slots.shape[1] for entry in caches),
        records=("v4",) * len(caches),
    )
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    prepared = Emulator(multiprocessors=20).prepared(mla.plan(caps))
    mla.run(prepared, q=q, caches=caches, out=out, scale=metadata["scale"], sink=tensors["sink"])
    return out


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_within_the_bounds_of_float64(layer: str, arrangement: str) -> None:
    whole, worst = relative_rms(decoded(layer, arrangement).double(), truth(layer))
    assert whole <= MOST_RMS
    assert worst <= MOST_HEAD_RMS


@pytest.mark.parametrize("layer", LAYERS)
def test_the_arrangement_of_pages_changes_no_bit(layer: str) -> None:
    first, *others = (decoded(layer, arrangement).view(torch.int16) for arrangement in ARRANGEMENTS)
    for other in others:
        assert torch.equal(first, other)
