"""SGLang's decode beside kvbridge's, on the calls that SGLang's own attention backend makes.

    SGLang's attention fixture -> DeepseekV4AttnBackend on the CPU -> flash_mla_with_kvcache_sm120(...)
      every call: SGLang's output, kvbridge's output and the float64 reference, on the same pool bytes

The fixture is the one of SGLang's own tests, and its own assertion on the layer's output stays in force. The backend
runs as on SM120, with SGLang's torch decode: nothing of a GPU is needed. Source: SGLang 0.5.23
test/kits/attention_unittest/attention_methods/dsv4_attention.py, kernels/ops/attention/flash_mla_sm120.py.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from kvbridge.engine import OptionValue, resolve_options
from kvbridge.engines.sglang import ENGINE, workarounds
from kvbridge.engines.sglang.capture import sglang_version
from kvbridge.engines.sglang.decode import Decoder

if TYPE_CHECKING:
    import torch

MODES = ("swa", "swa-above-window", "target-verify", "draft-extend", "c4", "c128", "c4-target-verify")
"""What the backend is asked to do."""


def parity(*, options: Mapping[str, OptionValue]) -> Mapping[str, Any]:
    """Compares the kernels in every mode.

    Args:
        options: SGLang's options; none changes what the fixture does.

    Returns:
        Version, backend and figures of each mode.

    Raises:
        EngineMissingError: SGLang is not installed in this interpreter.
    """
    release = sglang_version()
    resolve_options(ENGINE, options)
    with redirect_stdout(sys.stderr):
        modes = {mode: compare_mode(mode) for mode in MODES}
    return {"version": release, "modes": modes}


def compare_mode(mode: str, *, backend: str | None = None) -> dict[str, Any]:
    """Runs one mode of SGLang's fixture and compares every decode call.

    Args:
        mode: One of `MODES`.
        backend: Backend of `kvbridge.kernels.mla`; the best present by default.

    Returns:
        calls, served, left (reasons), sglang_assertion (passed, or what its own tolerance said), and the largest
        relative RMS and absolute errors against float64 of SGLang's and of kvbridge's outputs.
    """
    with attention_fixture() as fixture:
        decoder = Decoder(backend=backend)
        calls: list[dict[str, Any]] = []
        with spied_decode(fixture, decoder, calls):
            try:
                _run(fixture, mode)
                assertion = "passed"
            except AssertionError as error:
                assertion = " ".join(str(error).split())[:200]
    return {"sglang_assertion": assertion, "calls": len(calls), "left": dict(decoder.left), **_worst(calls)}


def _worst(calls: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for side in ("sglang", "kvbridge"):
        for figure in ("relative_rms", "largest_error"):
            values = [call[f"{side}_{figure}"] for call in calls if f"{side}_{figure}" in call]
            figures[f"{side}_{figure}"] = max(values) if values else None
    figures["served"] = sum("kvbridge_relative_rms" in call for call in calls)
    figures["queries"] = sum(call["queries"] for call in calls)
    return figures


@contextmanager
def attention_fixture() -> Iterator[Any]:
    """SGLang's attention test kit on the CPU, as on SM120."""
    settings = {
        "TRITON_INTERPRET": "1",
        "SGLANG_SM120_FLASHMLA_BACKEND": "torch",
        "SGLANG_OPT_SM120_DIRECT_SWA_KV": "0",
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
        "SGLANG_OPT_USE_TOPK_V2": "0",
    }
    os.environ.update(settings)  # SGLang and Triton read them when they are imported, and once for all
    from sglang.srt.runtime_context import override_platform

    with ExitStack() as stack:
        stack.enter_context(override_platform(is_sm120=True))
        from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention

        stack.enter_context(workarounds.attention_fixture_without_gpu())
        yield dsv4_attention


@contextmanager
def spied_decode(fixture: Any, decoder: Decoder, calls: list[dict[str, Any]]) -> Iterator[None]:
    """Registers the pools that the fixture builds and records every decode call beside kvbridge's answer."""
    from sglang.kernels.ops.attention import flash_mla_sm120

    pool_class, original = fixture.DeepSeekV4TokenToKVPool, flash_mla_sm120.flash_mla_with_kvcache_sm120
    kept: list[Any] = []

    def build(**arguments: Any) -> Any:
        pool = pool_class(**arguments)
        decoder.register(pool)
        kept.append(pool)
        return pool

    def decode(**call: Any) -> Any:
        result = original(**call)
        calls.append(_compare(decoder, call, result[0]))
        return result

    fixture.DeepSeekV4TokenToKVPool = build
    flash_mla_sm120.flash_mla_with_kvcache_sm120 = decode
    try:
        yield
    finally:
        fixture.DeepSeekV4TokenToKVPool = pool_class
        flash_mla_sm120.flash_mla_with_kvcache_sm120 = original


def _compare(decoder: Decoder, call: dict[str, Any], sglang: torch.Tensor) -> dict[str, Any]:
    import torch

    reference, _ = decoder.twin(backend="reference", out_dtype=torch.float32).decode(**call)
    figures: dict[str, Any] = {"queries": int(call["q"].shape[0])}
    figures |= _errors("sglang", sglang, reference)
    ours = decoder(lambda **_: None, **call)
    if ours is not None:
        figures |= _errors("kvbridge", ours[0], reference)
    return figures


def _errors(side: str, got: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    difference = got.double() - expected.double()
    norm = math.sqrt(float(expected.double().pow(2).mean()))
    rms = math.sqrt(float(difference.pow(2).mean()))
    return {
        f"{side}_relative_rms": rms / norm if norm else rms,
        f"{side}_largest_error": float(difference.abs().max()),
    }


def _run(fixture: Any, mode: str) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    cases = {case.name: case for case in fixture.make_dsv4_cases("dsv4")}
    name = (
        "dsv4_swa_decode_above_window" if mode == "swa-above-window" else "dsv4_swa_decode_multi_request_within_window"
    )
    case = dataclasses.replace(cases[name], attn_sink_value=0.0)
    test = unittest.TestCase()
    verify = {"name": mode, "extend_lens": (4, 4)}
    runs: dict[str, Callable[[], Any]] = {
        "swa": lambda: fixture.run_dsv4_attention_case(test, case, device="cpu"),
        "swa-above-window": lambda: fixture.run_dsv4_attention_case(test, case, device="cpu"),
        "target-verify": lambda: fixture.run_dsv4_target_verify_attention_case(
            test, dataclasses.replace(case, forward_mode=ForwardMode.TARGET_VERIFY, **verify), device="cpu"
        ),
        "c4-target-verify": lambda: fixture.run_dsv4_target_verify_attention_case(
            test,
            dataclasses.replace(case, forward_mode=ForwardMode.TARGET_VERIFY, compress_ratio=4, **verify),
            device="cpu",
        ),
        "draft-extend": lambda: fixture.run_dsv4_draft_extend_attention_case(
            test, dataclasses.replace(case, forward_mode=ForwardMode.DRAFT_EXTEND_V2, **verify), device="cpu"
        ),
        "c4": lambda: fixture.run_dsv4_compress_attention_case(
            test, dataclasses.replace(case, compress_ratio=4), device="cpu"
        ),
        "c128": lambda: fixture.run_dsv4_compress_attention_case(
            test, dataclasses.replace(case, compress_ratio=128), device="cpu"
        ),
    }
    runs[mode]()
