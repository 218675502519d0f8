"""SGLang's decode beside kvbridge's, on the calls that SGLang's own attention backend makes.

    SGLang's attention fixture -> DeepseekV4AttnBackend on the CPU -> flash_mla_with_kvcache_sm120(...)
      every call: SGLang's output, kvbridge's output and the float64 reference, on the same pool bytes

The fixture is the one of SGLang's own tests, and its own assertion on the layer's output stays in force. The backend
runs as on SM120, with SGLang's torch decode: nothing of a GPU is needed. Source: SGLang 0.5.23
test/kits/attention_unittest/attention_methods/dsv4_attention.py, kernels/ops/attention/flash_mla_sm120.py.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from kvbridge.engine import EngineError, OptionValue
from kvbridge.engines.sglang import ENGINE, workarounds
from kvbridge.engines.sglang.capture import sglang_version
from kvbridge.engines.sglang.decode import Decoder
from kvbridge.engines.sglang.triton_casts import exact_casts
from kvbridge.parity import CALL_BOUND, ROW_BOUND, CallRow, Control, ParityReport, difference

Call = dict[str, Any]
Spoil = Callable[[Call], Call]

MODES = ("swa", "swa-above-window", "target-verify", "draft-extend", "c4", "c128", "c4-target-verify")
"""What the backend is asked to do."""


def parity(*, options: Mapping[str, OptionValue]) -> Mapping[str, Any]:
    """Compares the kernels in every mode.

    Args:
        options: SGLang's options; the fixture has settings of its own, so only defaults are taken.

    Returns:
        `kvbridge.parity.ParityReport.document`.

    Raises:
        EngineMissingError: SGLang is not installed in this interpreter.
        EngineError: An option differs from its default.
    """
    sglang_version()
    defaults = {option.name: option.default for option in ENGINE.options}
    for name, value in options.items():
        if value != defaults.get(name):
            raise EngineError(
                f"option {name}: got {value!r}, expected {defaults.get(name)!r}: parity has settings of its own"
            )
    with redirect_stdout(sys.stderr):
        return report().document()


def report() -> ParityReport:
    """Every mode of SGLang's backend, and the controls."""
    runs = [compare_mode(mode) for mode in MODES]
    controls = [
        Control(name=name, rows=[row for row in compare_mode(mode, spoil=spoil).rows if row.call == mode])
        for name, (mode, spoil) in CONTROLS.items()
    ]
    notes = [f"{run.mode}: SGLang's own assertion {run.assertion}" for run in runs]
    notes += [f"{run.mode}: left to SGLang: {reason}" for run in runs for reason in run.left]
    versions = {name: version(name) for name in ("sglang", "torch", "kvbridge")}
    return ParityReport(
        engine=ENGINE.name,
        versions=versions | {"backend": next((run.backend for run in runs if run.backend), "none")},
        layouts=[layout for run in runs for layout in run.layouts],
        rows=[row for run in runs for row in run.rows],
        controls=controls,
        notes=notes,
    )


def without_sink(call: Call) -> Call:
    """The sink has no effect."""
    return call | {"attn_sink": call["attn_sink"].new_full(call["attn_sink"].shape, float("-inf"))}


def without_extra_cache(call: Call) -> Call:
    """The compressed rows are left out."""
    return call | {"extra_k_cache": None, "extra_indices_in_kvcache": None, "extra_topk_length": None}


def one_slot_shifted(call: Call) -> Call:
    """One slot of one query names the row beside it."""
    indices = call["indices"].clone()
    indices[0, 0, 0] += 1 if int(indices[0, 0, 0]) % 2 == 0 else -1
    return call | {"indices": indices}


def without_lengths(call: Call) -> Call:
    """Lanes behind the lengths count: SGLang's slots are no sentinels there."""
    return call | {"topk_length": None}


CONTROLS: dict[str, tuple[str, Spoil]] = {
    "sink dropped": ("swa", without_sink),
    "extra cache dropped": ("c4", without_extra_cache),
    "one slot shifted": ("swa", one_slot_shifted),
    "lengths ignored": ("swa", without_lengths),
}
"""Spoilt calls that the comparison must see, and the mode they are spoilt in."""


@dataclass(slots=True)
class ModeRun:
    """One mode as the fixture ran it.

    Attributes:
        mode: One of `MODES`.
        rows: Each call as often as `compare_call` compares it.
        assertion: `passed`, or what SGLang's own tolerance said.
        left: Calls that kvbridge did not serve, by reason.
        layouts: Numbers of the pages that both read.
        backend: Backend of `kvbridge.kernels.mla`.
    """

    mode: str
    rows: list[CallRow] = field(default_factory=list)
    assertion: str = "passed"
    left: dict[str, int] = field(default_factory=dict)
    layouts: list[dict[str, Any]] = field(default_factory=list)
    backend: str = ""


def compare_mode(mode: str, *, spoil: Spoil | None = None) -> ModeRun:
    """Runs one mode of SGLang's fixture and compares every decode call.

    Args:
        mode: One of `MODES`.
        spoil: Spoils kvbridge's calls, for a control.
    """
    run = ModeRun(mode)
    decoder = Decoder()
    with attention_fixture() as fixture, spied_decode(fixture, decoder, run, spoil):
        try:
            _run(fixture, mode)
        except AssertionError as error:
            run.assertion = "failed: " + " ".join(str(error).split())[:160]
    run.left = dict(decoder.left)
    run.backend = decoder.backend_name
    return run


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
        stack.enter_context(exact_casts())
        yield dsv4_attention


@contextmanager
def spied_decode(fixture: Any, decoder: Decoder, run: ModeRun, spoil: Spoil | None) -> Iterator[None]:
    """Registers the pools that the fixture builds and records every decode call beside kvbridge's answer."""
    from sglang.kernels.ops.attention import flash_mla_sm120

    pool_class, original = fixture.DeepSeekV4TokenToKVPool, flash_mla_sm120.flash_mla_with_kvcache_sm120
    kept: list[Any] = []

    def build(**arguments: Any) -> Any:
        pool = pool_class(**arguments)
        decoder.register(pool)
        run.layouts.extend({"call": run.mode, **numbers} for numbers in decoder.layouts())
        kept.append(pool)
        return pool

    def decode(**call: Any) -> Any:
        result = original(**call)
        run.rows.extend(compare_call(decoder, run.mode, call, result[0], spoil))
        return result

    fixture.DeepSeekV4TokenToKVPool = build
    flash_mla_sm120.flash_mla_with_kvcache_sm120 = decode
    try:
        yield
    finally:
        fixture.DeepSeekV4TokenToKVPool = pool_class
        flash_mla_sm120.flash_mla_with_kvcache_sm120 = original


def compare_call(decoder: Decoder, mode: str, call: Call, sglang: Any, spoil: Spoil | None) -> Iterator[CallRow]:
    """Compares one call: kvbridge against SGLang under the mode's name, and under longer ones both against float64.

    A bf16 output above 0.5 may lie 2e-3 from float64 by its own rounding. So kvbridge's answer is compared before that
    rounding too (`kvbridge in fp32`), and shown to be nothing but that answer rounded (`bf16 against fp32 rounded`).
    """
    import torch

    oracle, _ = decoder.twin(backend="reference", out_dtype=torch.float32).decode(**call)
    asked = spoil(call) if spoil else call
    answer = decoder(lambda **_: None, **asked)
    shape = {"queries": call["q"].shape[0], "heads": call["q"].shape[2], "slots": call["indices"].shape[-1]}
    if call.get("extra_k_cache") is not None:
        shape["extra"] = call["extra_indices_in_kvcache"].shape[-1]
    outputs = {f"{mode}, SGLang against float64": (sglang, oracle)}
    if answer is not None:
        ours = answer[0]
        wide, _ = decoder.twin(backend=decoder.backend, out_dtype=torch.float32).decode(**asked)
        outputs |= {
            mode: (ours, sglang),
            f"{mode}, kvbridge against float64": (ours, oracle),
            f"{mode}, kvbridge in fp32 against float64": (wide, oracle),
            f"{mode}, kvbridge in bf16 against fp32 rounded": (ours, wide.bfloat16()),
        }
    # SGLang's torch decode keeps probabilities in fp32, so the two kernels share less of their rounding than two that
    # both round to bf16: each may be one bound from float64, so they may be two bounds apart.
    shares = {mode: 2, f"{mode}, kvbridge in bf16 against fp32 rounded": 0}
    for name, (left, right) in outputs.items():
        apart = difference(left.squeeze(1), right.squeeze(1))
        share = shares.get(name, 1)
        yield CallRow(
            engine=ENGINE.name,
            call=name,
            layer="layers.0",
            shape=shape,
            difference=apart,
            call_bound=share * CALL_BOUND,
            row_bound=share * ROW_BOUND / 2,
        )


def _run(fixture: Any, mode: str) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    cases = {case.name: case for case in fixture.make_dsv4_cases("dsv4")}
    window = "above_window" if mode == "swa-above-window" else "multi_request_within_window"
    case = dataclasses.replace(cases[f"dsv4_swa_decode_{window}"], attn_sink_value=0.0)
    test = unittest.TestCase()
    if mode in ("swa", "swa-above-window"):
        fixture.run_dsv4_attention_case(test, case, device="cpu")
    elif mode in ("c4", "c128"):
        case = dataclasses.replace(case, compress_ratio=int(mode[1:]))
        fixture.run_dsv4_compress_attention_case(test, case, device="cpu")
    elif mode == "draft-extend":
        case = dataclasses.replace(case, name=mode, forward_mode=ForwardMode.DRAFT_EXTEND_V2, extend_lens=(4, 4))
        fixture.run_dsv4_draft_extend_attention_case(test, case, device="cpu")
    else:
        ratio = 4 if mode == "c4-target-verify" else 0
        case = dataclasses.replace(case, name=mode, extend_lens=(4, 4), compress_ratio=ratio)
        case = dataclasses.replace(case, forward_mode=ForwardMode.TARGET_VERIFY)
        fixture.run_dsv4_target_verify_attention_case(test, case, device="cpu")
