"""Runs in SGLang's interpreter: which calls the decoder serves, and for which pools.

decode_checks.py MODELS OUT.json      OUT.json: {check: "" or the traceback}
"""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

from kvbridge.codec import quantise, scatter_rows
from kvbridge.engine import resolve_options
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.build import built_pool
from kvbridge.engines.sglang.decode import Decoder, NotServedError
from kvbridge.engines.sglang.options import resolve_settings
from kvbridge.models import load_model
from tests.engines.sglang.programs.checks_support import check, run_checks

MODELS = Path(sys.argv[1])
TOKENS, HEADS = 3, 16
OWN = "SGLang's own answer"


def pool_of(model: str, **given: Any) -> Any:
    """The context of SGLang's owner pool for a tiny model."""
    options = resolve_options(ENGINE, {"max-running-requests": 2, "max-total-tokens": 8192} | given)
    settings = resolve_settings(load_model(MODELS / model), options)
    return built_pool(MODELS / model, settings=settings, options=options, budget_bytes=1 << 50)


def call_of(window: Any, extra: Any | None = None, *, width: int = 64) -> dict[str, Any]:
    """A call as DeepseekV4AttnBackend makes it: fresh fp8 views of the pools' pages, slots, lengths, sink."""
    generator = torch.Generator().manual_seed(7)

    def pages(pool: Any) -> torch.Tensor:
        buffer = pool.kv_buffer[0].view(torch.float8_e4m3fn)
        row_bytes = pool.get_bytes_per_token()
        return buffer[:, : pool.page_size * row_bytes].view(buffer.shape[0], pool.page_size, 1, row_bytes)

    call = {
        "q": torch.randn(TOKENS, 1, HEADS, 512, generator=generator).bfloat16(),
        "k_cache": pages(window),
        "head_dim_v": 512,
        "softmax_scale": 512**-0.5,
        "indices": torch.randint(window.page_size, 500, (TOKENS, 1, width), generator=generator, dtype=torch.int32),
        "topk_length": torch.tensor([width, 1, 17], dtype=torch.int32),
        "attn_sink": torch.zeros(HEADS),
    }
    if extra is not None:
        slots = torch.randint(extra.page_size, 400, (TOKENS, 1, width), generator=generator, dtype=torch.int32)
        slots[1] = -1  # an empty compressed cache comes as length 1 with slot -1
        call |= {
            "extra_k_cache": pages(extra),
            "extra_indices_in_kvcache": slots,
            "extra_topk_length": torch.tensor([width, 1, 5], dtype=torch.int32),
        }
    return call


def fill(decoder: Decoder) -> None:
    """Writes random rows of each registered record into its pages."""
    generator = torch.Generator().manual_seed(3)
    for view in decoder._views.values():
        slots = torch.arange(min(view.capacity_rows, 512))
        values = torch.randn(len(slots), 512, generator=generator)
        scatter_rows(view, slots, quantise(values, view.layout.record))


def serve(decoder: Decoder, call: dict[str, Any]) -> Any:
    """The decoder as the hook around SGLang's function."""
    return decoder(lambda **_: OWN, **call)


@check
def records_of_one_width_are_told_apart_by_their_pool() -> None:
    """528-byte rows, split and interleaved: one call shape, two pools, each right against float64."""
    for layout in ("v41", "v41_new"):
        with pool_of("v41", **{"kv-layout": layout}) as pool:
            decoder = Decoder()
            decoder.register(pool)
            fill(decoder)
            call = call_of(pool.swa_kv_pool, pool.kv_pools[2])
            assert call["k_cache"].shape[-1] == 528
            assert call["extra_k_cache"].shape[-1] == 288
            oracle, oracle_lse = decoder.twin(backend="reference", out_dtype=torch.float32).decode(**call)
            out, lse = serve(decoder, call)
            assert out.shape == (TOKENS, 1, HEADS, 512)
            assert lse.shape == (TOKENS, HEADS, 1)
            gap = float((out.double() - oracle.double()).pow(2).mean() / oracle.double().pow(2).mean()) ** 0.5
            assert gap <= 2.5e-3, (layout, gap)
            assert torch.allclose(lse, oracle_lse, rtol=1e-5, atol=1e-5)
            assert (decoder.served, decoder.left) == (1, {})


@check
def fresh_views_of_the_same_pages_are_bound_once() -> None:
    """SGLang makes new views, slots and lengths for every call; the plan and the binding stay."""
    with pool_of("v4") as pool:
        decoder = Decoder()
        decoder.register(pool)
        fill(decoder)
        first = call_of(pool.swa_kv_pool, pool.kv_pools[4])
        once, _ = serve(decoder, first)
        again, _ = serve(decoder, call_of(pool.swa_kv_pool, pool.kv_pools[4]) | {"attn_sink": first["attn_sink"]})
        assert torch.equal(once, again)
        assert (len(decoder._prepared), len(decoder._bindings)) == (1, 1)
        other, _ = serve(decoder, first | {"attn_sink": torch.full((HEADS,), 3.0)})
        assert not torch.equal(once, other)  # another sink is another binding, not the old one


@check
def calls_that_cannot_be_served_reach_sglang() -> None:
    """Unknown pages, another shape, dense decode, several queries of one token: one line of reason each."""
    with pool_of("v4") as pool:
        decoder = Decoder()
        decoder.register(pool)
        fill(decoder)
        call = call_of(pool.swa_kv_pool)
        copies = {
            "k_cache: got pages at an address of no registered pool": {"k_cache": call["k_cache"].clone()},
            "k_cache: got pages, rows, heads, row bytes, page stride": {"k_cache": call["k_cache"][:1]},
            "q: got shape (1, 3, 16, 512)": {"q": call["q"].view(1, TOKENS, HEADS, 512)},
            "block_table, cache_seqlens: got dense decode": {"cache_seqlens": torch.ones(1)},
            "head_dim_v, q width: got 256, 512": {"head_dim_v": 256},
            "extra_indices_in_kvcache: got None": {"extra_k_cache": call["k_cache"]},
        }
        for reason, change in copies.items():
            assert serve(decoder, call | change) == OWN, reason
            assert any(text.startswith(reason) for text in decoder.left), (reason, decoder.left)
        assert decoder.served == 0
        assert serve(decoder, call)[0].shape == (TOKENS, 1, HEADS, 512)
        assert sum(decoder.left.values()) == len(copies)


@check
def a_pool_of_other_rows_is_refused() -> None:
    """Uniform fp8 rows have their scale outside SGLang's pages."""
    with pool_of("v4", **{"dsv4-attn-backend": "trtllm"}) as pool:
        try:
            Decoder().register(pool)
        except NotServedError as reason:
            assert str(reason).startswith("layers.0.swa: got record uniform_fp8, expected one of")
        else:
            raise AssertionError("registered")


@check
def a_pool_that_goes_is_forgotten() -> None:
    """Its memory is not kept by the views, and an address that comes back is no registered one."""
    decoder = Decoder()
    with pool_of("v4") as pool:
        decoder.register(pool)
        fill(decoder)
        serve(decoder, call_of(pool.swa_kv_pool))
        storage = weakref.ref(pool.swa_kv_pool.kv_buffer[0])
        assert decoder._views
        assert decoder._bindings
        del pool
    gc.collect()
    assert (decoder._views, decoder._bindings) == ({}, {})
    assert storage() is None


if __name__ == "__main__":
    run_checks(Path(sys.argv[2]))
