"""Answer against the float64 reference.

    relative RMS       sqrt(mean (out - ref)^2) / sqrt(mean ref^2)      whole tensor, and each (query, head)
    LSE                |lse - ref| / max(1, |ref|, largest |score|)
    exact zeros        where the reference is exactly 0 (empty query, sink +inf, huge sink) so is the output
    untouched          heads beyond the real ones keep what they held

The bounds leave room for bf16 outputs and weights: rounding the output alone gives 1.66e-3, an exact-maximum bf16
weight up to 2.8e-3 on one head. FlashMLA's bounds are those of its tests/test_flash_mla_sparse_decoding.py (9241ae3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvbridge.kernels import mla, reference
from kvbridge.kernels.conformance.scenario import Scenario

MOST_RMS = 2.5e-3
MOST_HEAD_RMS = 4.5e-3
MOST_LSE = 1e-5
FLASHMLA_ABSOLUTE = 1e-3
FLASHMLA_RELATIVE = 2.01 / 128
FLASHMLA_COSINE_GAP = 5e-6
_TINY = 2.0**-126
"""Below this a bf16 output may be flushed."""


@dataclass(slots=True)
class Judgement:
    """What came out of one comparison.

    Attributes:
        failures: One line for each bound that was missed; empty if the answer conforms.
        rms: Relative RMS of the tensor.
        head_rms: Worst relative RMS of a (query, head).
        lse: Worst LSE error in units of max(1, |LSE|, largest score); 0 if no LSE was asked for.
    """

    failures: list[str] = field(default_factory=list)
    rms: float = 0.0
    head_rms: float = 0.0
    lse: float = 0.0


def expected(scenario: Scenario) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference's out, LSE in the format asked for, and the largest |score|; float64."""
    prepared = mla.prepare(scenario.plan, backend="reference")
    call = mla.bind(
        prepared,
        q=scenario.q,
        caches=scenario.caches,
        out=torch.empty_like(scenario.out),
        scale=scenario.scale,
        sink=scenario.sink,
        sequence_of_query=scenario.sequence_of_query,
    ).call
    out, lse, largest = reference.decode(call)
    return out, reference.format_lse(lse, scenario.sink, scenario.lse_format), largest


def judge(scenario: Scenario) -> Judgement:
    """Compares what a target left in a scenario's buffers with the reference.

    Args:
        scenario: With `out` and `lse` filled.
    """
    reference_out, reference_lse, largest = expected(scenario)
    judgement = Judgement()
    _judge_out(judgement, scenario.out[:, : scenario.heads].double(), reference_out, scenario.case.values)
    if scenario.lse is not None:
        _judge_lse(judgement, scenario.lse[:, : scenario.heads].double(), reference_lse, largest)
    if scenario.overrun():
        judgement.failures.append("out: heads beyond the real ones were written")
    return judgement


def _judge_out(judgement: Judgement, out: torch.Tensor, expected_out: torch.Tensor, values: str) -> None:
    if not out.isfinite().all():
        where = (~out.isfinite()).nonzero()[0].tolist()
        judgement.failures.append(f"out: {int((~out.isfinite()).sum())} values not finite, first at {where}")
        return
    zero = (expected_out == 0).all(-1)
    if bool(out[zero].any()):
        judgement.failures.append(f"out: {int((out[zero] != 0).any(-1).sum())} rows not 0 where the reference is 0")
    error, size = (out - expected_out).square(), expected_out.square()
    judgement.rms = _ratio(error.mean(), size.mean())
    heads = torch.where(zero, 0.0, (error.mean(-1).sqrt() - _TINY).clamp_min(0) / size.mean(-1).sqrt().clamp_min(_TINY))
    judgement.head_rms = float(heads.max()) if heads.numel() else 0.0
    if judgement.rms > MOST_RMS:
        judgement.failures.append(f"out: relative RMS {judgement.rms:.2e}, expected at most {MOST_RMS:.1e}")
    if judgement.head_rms > MOST_HEAD_RMS:
        worst = divmod(int(heads.argmax()), heads.shape[1])
        judgement.failures.append(
            f"out: relative RMS {judgement.head_rms:.2e} at (query, head) {worst}, expected at most {MOST_HEAD_RMS:.1e}"
        )
    if values == "flashmla":
        _judge_flashmla(judgement, out, expected_out)


def _judge_flashmla(judgement: Judgement, out: torch.Tensor, expected_out: torch.Tensor) -> None:
    error = (out - expected_out).abs()
    bad = (error > FLASHMLA_ABSOLUTE) & (error > FLASHMLA_RELATIVE * expected_out.abs())
    if bool(bad.any()):
        judgement.failures.append(f"out: {int(bad.sum())} values outside abs 1e-3 and rel 2.01/128")
    norm = (out.square().sum() + expected_out.square().sum()).clamp_min(_TINY)
    gap = 1 - 2 * float((out * expected_out).sum() / norm)
    if float(expected_out.abs().max()) > 0 and gap > FLASHMLA_COSINE_GAP:
        judgement.failures.append(f"out: cosine gap {gap:.1e}, expected at most {FLASHMLA_COSINE_GAP:.0e}")


def _judge_lse(judgement: Judgement, lse: torch.Tensor, expected_lse: torch.Tensor, largest: torch.Tensor) -> None:
    infinite = expected_lse.isinf()
    if bool((lse[infinite] != expected_lse[infinite]).any()):
        got, wanted = lse[infinite], expected_lse[infinite]
        first = int((got != wanted).nonzero()[0])
        judgement.failures.append(f"lse: got {got[first]:.4g}, expected {wanted[first]:.4g}")
    if bool(lse[~infinite].isnan().any()):
        judgement.failures.append("lse: NaN")
        return
    unit = torch.maximum(expected_lse.abs(), largest).clamp_min(1)
    error = torch.where(infinite, 0.0, (lse - expected_lse).abs() / unit)
    judgement.lse = float(error.max()) if error.numel() else 0.0
    if judgement.lse > MOST_LSE:
        judgement.failures.append(f"lse: error {judgement.lse:.1e} of its unit, expected at most {MOST_LSE:.0e}")


def _ratio(error: torch.Tensor, size: torch.Tensor) -> float:
    return float(max(0.0, float(error.sqrt()) - _TINY) / max(float(size.sqrt()), _TINY))
