"""SGLang's torch decoder under the conformance kit: `_sm120_sparse_decode_fwd`.

    python -m kvbridge.kernels.conformance --target kvbridge.engines.sglang.conformance:TARGET   in SGLang's interpreter

The decoder takes one or two caches of the V4 record, lengths of each query, a sink, and returns the natural LSE without
the sink (SGLang 0.5.23 kernels/ops/attention/flash_mla_sm120.py). Caches go in as `[pages, rows, 1, 584]` views, as
DeepseekV4AttnBackend passes them. What it does beyond its contract is in docs/conformance.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kvbridge.kernels.caches import Cache
from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.conformance.targets import Target, Traits, masked_slots
from kvbridge.records import get_record


@functools.cache
def kernel() -> Callable[..., Any]:
    """SGLang's decoder.

    Raises:
        ImportError: No SGLang here, or one without it.
    """
    from sglang.kernels.ops.attention import flash_mla_sm120

    return flash_mla_sm120._sm120_sparse_decode_fwd  # type: ignore[no-any-return]


def nominal(cache: Cache) -> torch.Tensor:
    """`[pages, page_rows, 1, 584]` e4m3, the shape SGLang gives a cache; only page stride and base mean something."""
    view, row_bytes = cache.view, get_record("v4").row_bytes
    shaped = view.pages.view(torch.float8_e4m3fn)
    strides = (view.page_stride_bytes, row_bytes, row_bytes, 1)
    return shaped.as_strided((view.num_pages, view.page_rows, 1, row_bytes), strides, shaped.storage_offset())


def decode(scenario: Scenario) -> None:
    """Runs one scenario."""
    heads = scenario.heads
    extra: dict[str, Any] = {}
    if len(scenario.caches) > 1:
        extra = {
            "extra_k_cache": nominal(scenario.caches[1]),
            "extra_indices": masked_slots(scenario, scenario.caches[1]).unsqueeze(1),
            "extra_topk_length": None,
        }
    out, lse = kernel()(
        q=scenario.q[:, :heads].unsqueeze(1),
        k_cache=nominal(scenario.caches[0]),
        indices=masked_slots(scenario, scenario.caches[0]).unsqueeze(1),
        topk_length=None,
        attn_sink=scenario.sink,
        head_dim_v=512,
        softmax_scale=scenario.scale,
        **extra,
    )
    scenario.out[:, :heads] = out.squeeze(1)
    if scenario.lse is not None:
        scenario.lse[:, :heads] = lse.squeeze(-1)


TARGET = Target(
    name="SGLang torch decoder (SM120)",
    decode=decode,
    traits=Traits(records=("v4",), most_caches=2, lse_formats=("none", "natural"), plain_stride="padded"),
)
