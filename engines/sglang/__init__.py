"""SGLang's side of kvbridge: what SGLang would allocate, what it has allocated, and its start-up audit.

    plan     config.json + options -> planned manifest        pure arithmetic, neither SGLang nor torch
    layouts  one live pool -> PageLayout, PageView            zero copy
    capture  a model folder -> SGLang's own pool -> manifest  needs SGLang in this interpreter
    plugin   entry point `sglang.srt.plugins`                 audit in every worker

Importing this package loads none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbridge.engine import EngineOption, OptionValue, PlanRequest

if TYPE_CHECKING:
    from kvbridge.manifest import Manifest


@dataclass(frozen=True, slots=True)
class SGLangEngine:
    """SGLang behind the entry-point group `kvbridge.engines`; every part is imported when it is asked for."""

    name: str = "sglang"
    packages: tuple[str, ...] = ("sglang",)
    versions: tuple[str, ...] = ("0.5.23",)

    @property
    def options(self) -> tuple[EngineOption, ...]:
        """Options of SGLang, and facts of the machine, that decide its layouts."""
        from kvbridge.engines.sglang.options import OPTIONS

        return OPTIONS

    def plan(self, request: PlanRequest) -> Manifest:
        """Computes the manifest SGLang would allocate. Imports neither SGLang nor torch.

        Raises:
            EngineError: The model or an option is not supported.
        """
        from kvbridge.engines.sglang.plan import plan

        return plan(request)

    def capture(self, *, model: Path, options: Mapping[str, OptionValue]) -> Manifest:
        """Builds SGLang's own pool for a model folder on the CPU and reads its tensors.

        Raises:
            EngineMissingError: SGLang is not installed in this interpreter.
            EngineError: The model or an option is not supported.
        """
        from kvbridge.engines.sglang.capture import capture

        return capture(model=model, options=options)

    def parity(self, *, options: Mapping[str, OptionValue]) -> Mapping[str, Any]:
        """Compares SGLang's decode with kvbridge's on SGLang's own calls.

        Raises:
            EngineMissingError: SGLang is not installed in this interpreter.
        """
        from kvbridge.engines.sglang.parity import parity

        return parity(options=options)


ENGINE = SGLangEngine()
"""What the entry point `kvbridge.engines: sglang` names."""
