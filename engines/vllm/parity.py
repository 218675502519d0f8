"""`parity`: vLLM's decode kernel beside kvbridge's, on vLLM's own calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbridge.engine import EngineError, OptionValue
from kvbridge.engines.vllm.capture import require_vllm


def compare_decode(options: Mapping[str, OptionValue]) -> Mapping[str, Any]:
    """Compares the kernels.

    Raises:
        EngineMissingError: vLLM is not installed here.
        EngineError: Always, so far: the comparison comes with the kernel's integration into the engines.
    """
    release = require_vllm()
    raise EngineError(
        f"parity: got vLLM {release}, expected a release whose decode calls kvbridge compares: none so far"
    )
