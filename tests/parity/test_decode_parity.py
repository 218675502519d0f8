"""Decode across engines: SGLang's and vLLM's writers, caches and decodes, and kvbridge in place on both."""

from __future__ import annotations

import math

import pytest
import torch

from tests.parity import decode_parity
from tests.parity.decode_parity import KERNEL_RMS, SGLANG_PAGES, VLLM_PAGES, decode, relative_rms

pytestmark = pytest.mark.timeout(1500)  # the first test waits for every program in SGLang's interpreter

Tensors = dict[str, torch.Tensor]


def test_every_pair_is_within_its_bound(parity_inputs: Tensors, sglang_rows: Tensors, vllm_rows: Tensors) -> None:
    pairs = list(decode_parity.pairs(parity_inputs, sglang_rows, vllm_rows))
    assert len(pairs) == 9
    assert [pair.line() for pair in pairs if not pair.relative_rms <= pair.bound] == []
    assert all(pair.relative_rms > 0 for pair in pairs)  # nothing was compared with itself


@pytest.mark.parametrize("layout", [SGLANG_PAGES, VLLM_PAGES], ids=["SGLang's pages", "vLLM's slab"])
def test_the_layout_changes_no_bit(layout: object, parity_inputs: Tensors, sglang_rows: Tensors) -> None:
    exact = decode(sglang_rows["v4.64"], SGLANG_PAGES, parity_inputs, backend=None)
    assert torch.equal(decode(sglang_rows["v4.64"], layout, parity_inputs, backend=None), exact)  # type: ignore[arg-type]


@pytest.mark.parametrize("control", ["sink", "extra cache", "slot", "lengths"])
def test_a_spoiled_call_leaves_the_bound(control: str, parity_inputs: Tensors, sglang_rows: Tensors) -> None:
    spoiled = dict(parity_inputs)
    if control == "sink":
        spoiled["sink"] = torch.full_like(parity_inputs["sink"], -math.inf)
    elif control == "extra cache":
        spoiled["extra_lengths"] = torch.zeros_like(parity_inputs["extra_lengths"])
    elif control == "slot":
        spoiled["window_rows"] = parity_inputs["window_rows"].clone()
        spoiled["window_rows"][1, 0] = (parity_inputs["window_rows"][1, 0] + 1) % 256
    else:
        spoiled["window_lengths"] = torch.full_like(parity_inputs["window_lengths"], decode_parity.WINDOW)
    right = decode(sglang_rows["v4.64"], SGLANG_PAGES, parity_inputs, backend="reference")
    wrong = decode(sglang_rows["v4.64"], SGLANG_PAGES, spoiled, backend=None)
    assert relative_rms(wrong, right) > 2 * KERNEL_RMS
