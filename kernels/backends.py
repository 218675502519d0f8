"""Which backend serves a plan on a device, and why.

    explicit name  >  KVBRIDGE_BACKEND  >  the first of the device's list that can serve the plan
                                            cuda: cuda, torch      cpu: cpu, torch      other: torch

A name that was asked for is used or refused with the reason, never replaced. Where the choice is free, a backend that
could not serve leaves its reason in the `Choice`. A backend module is imported only when it is looked at.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvbridge.kernels.errors import BackendError, BackendFallbackWarning

if TYPE_CHECKING:
    import torch

    from kvbridge.kernels.arguments import Call
    from kvbridge.kernels.plan import Plan

ENVIRONMENT_VARIABLE = "KVBRIDGE_BACKEND"
_MODULES = {
    "cuda": "kvbridge.kernels.cuda_backend",
    "cpu": "kvbridge.kernels.cpu_backend",
    "torch": "kvbridge.kernels.torch_backend",
    "reference": "kvbridge.kernels.reference",
}
_PREFERRED = {"cuda": ("cuda", "torch"), "cpu": ("cpu", "torch")}


class Runner(Protocol):
    """One bound call of one backend."""

    def update(self, call: Call) -> None:
        """Takes over tensors that changed since the last launch; they were checked."""

    def launch(self) -> None:
        """Computes out and lse: no allocation, no synchronisation, no look at device data on the host.

        The torch backends allocate, and read slots on the host where the tensors are on the CPU.
        """


class Backend(Protocol):
    """A way to run a plan. Modules named in this file hold one as `BACKEND`."""

    name: str

    def missing(self, device_type: str) -> str | None:
        """Why the backend cannot run on such a device here; None if it can."""

    def unsupported(self, plan: Plan) -> str | None:
        """Why the backend cannot serve the plan; None if it can."""

    def workspace_bytes(self, plan: Plan, device: torch.device) -> int:
        """Workspace on a device for every call at or below the plan's caps."""

    def prepare(self, plan: Plan, device: torch.device) -> Any:
        """Compiles, loads and sets attributes; the result is handed to `bind`."""

    def bind(self, prepared: Any, call: Call, workspace: torch.Tensor | None) -> Runner:
        """Makes a runner for a checked call."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about one backend.

    Attributes:
        backend: Name.
        reason: Why it cannot serve; None if it can.
    """

    backend: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend was chosen and why.

    Attributes:
        backend: The chosen one's name.
        by: `argument`, the environment variable's name, or `preference`.
        verdicts: Every backend that was looked at, in order; the last one is the chosen.
    """

    backend: str
    by: str
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        passed = "".join(f"; {v.backend}: {v.reason}" for v in self.verdicts if v.reason)
        return f"{self.backend} (by {self.by}{passed})"


def get_backend(name: str) -> Backend:
    """Loads a backend.

    Args:
        name: `cuda`, `cpu`, `torch` or `reference`; `cpu:avx2` and the like force a variant.

    Raises:
        BackendError: Unknown, or not part of this installation.
    """
    family, _, variant = name.partition(":")
    path = _MODULES.get(family)
    if path is None:
        raise BackendError(name, f"unknown, expected one of {sorted(_MODULES)}")
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        raise BackendError(name, f"not part of this installation ({error})") from error
    chosen = getattr(module, "variant", lambda _: None)(variant) if variant else module.BACKEND
    if chosen is None:
        raise BackendError(name, f"{family} has no variant {variant!r}")
    return cast("Backend", chosen)


def choose(plan: Plan, device_type: str, *, backend: str | None = None) -> Choice:
    """Chooses a backend.

    Args:
        plan: What has to be served.
        device_type: `cpu`, `cuda`, ...
        backend: A name that must be used.

    Raises:
        BackendError: The one asked for cannot serve, or none can.
    """
    asked = backend or os.environ.get(ENVIRONMENT_VARIABLE)
    if asked:
        reason = _reason(asked, plan, device_type)
        if reason:
            raise BackendError(asked, reason)
        by = "argument" if backend else f"{ENVIRONMENT_VARIABLE}={asked}"
        return Choice(asked, by, (Verdict(asked, None),))
    verdicts: list[Verdict] = []
    for name in _PREFERRED.get(device_type, ("torch",)):
        try:
            verdicts.append(Verdict(name, _reason(name, plan, device_type)))
        except BackendError as error:
            verdicts.append(Verdict(name, error.reason))
        if verdicts[-1].reason is None:
            _warn(verdicts[:-1])
            return Choice(name, "preference", tuple(verdicts))
    raise BackendError(verdicts[-1].backend, "; ".join(f"{v.backend}: {v.reason}" for v in verdicts))


def _reason(name: str, plan: Plan, device_type: str) -> str | None:
    chosen = get_backend(name)
    return chosen.missing(device_type) or chosen.unsupported(plan)


_warned: set[tuple[str, str]] = set()


def _warn(passed_over: list[Verdict]) -> None:
    for verdict in passed_over:
        key = (verdict.backend, verdict.reason or "")
        if key not in _warned:
            _warned.add(key)
            warnings.warn(f"backend {verdict.backend}: {verdict.reason}", BackendFallbackWarning, stacklevel=4)
