"""A plan made ready on one device: which backend serves it, built and loaded, with its workspace.

plan  ->  choose backend  ->  build, load  ->  zeroed workspace for the worst call  =  Prepared
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvbridge.kernels.backends import Choice, choose, get_backend
from kvbridge.kernels.errors import DeviceError, ShapeError, WorkspaceError

if TYPE_CHECKING:
    from kvbridge.kernels.backends import Backend
    from kvbridge.kernels.plan import Plan


class Prepared:
    """A plan made ready on one device by one backend.

    Attributes:
        plan: The plan.
        device: Where all tensors must be.
        choice: Which backend, and why.
        workspace_bytes: Bytes of the workspace: the backend's need, for every call at or below the caps.
        workspace: uint8, or None where none is needed. Calls that share it must not overlap.
    """

    __slots__ = ("__weakref__", "_state", "backend", "choice", "device", "plan", "workspace", "workspace_bytes")

    def __init__(
        self,
        *,
        plan: Plan,
        device: torch.device,
        choice: Choice,
        backend: Backend,
        state: Any,
        workspace: torch.Tensor | None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.choice = choice
        self.backend = backend
        self.workspace = workspace
        self.workspace_bytes = 0 if workspace is None else workspace.numel()
        self._state = state

    def __repr__(self) -> str:
        return f"Prepared({self.device}, backend {self.choice})"


def explain(plan: Plan, *, device: torch.device | str = "cpu", backend: str | None = None) -> Choice:
    """Which backend `prepare` would choose, and why; prepares nothing.

    Args:
        plan: The plan.
        device: Where it would run.
        backend: A name that must be used; the environment variable KVBRIDGE_BACKEND likewise.

    Raises:
        BackendError: The one asked for cannot serve the plan.
    """
    return choose(plan, torch.device(device).type, backend=backend)


def prepare(
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    workspace: torch.Tensor | None = None,
) -> Prepared:
    """Chooses a backend, builds and loads it, and provides a zeroed workspace.

    Args:
        plan: The plan.
        device: Where the tensors of all calls are.
        backend: `cuda`, `cpu`, `torch` or `reference`; by default KVBRIDGE_BACKEND, else the best that is present.
        workspace: uint8, dense, on the device, zeroed; allocated here by default.

    Raises:
        BackendError: The one asked for cannot serve the plan.
        WorkspaceError: The workspace is smaller than the worst call needs.
        DeviceError: The workspace is elsewhere.
    """
    place = torch.device(device)
    if place == torch.device("cuda"):
        place = torch.device("cuda", torch.cuda.current_device())
    choice = choose(plan, place.type, backend=backend)
    chosen = get_backend(choice.backend)
    state = chosen.prepare(plan, place)
    needed = chosen.workspace_bytes(plan, place)
    if workspace is None:
        workspace = torch.zeros(needed, dtype=torch.uint8, device=place) if needed else None
    else:
        workspace = _check_workspace(workspace, needed, place)
    return Prepared(plan=plan, device=place, choice=choice, backend=chosen, state=state, workspace=workspace)


def _check_workspace(workspace: torch.Tensor, needed: int, device: torch.device) -> torch.Tensor:
    if workspace.device != device:
        raise DeviceError("workspace.device", got=workspace.device, expected=device)
    if not workspace.is_contiguous() or workspace.dtype is not torch.uint8:
        raise ShapeError("workspace", got=f"{workspace.dtype}, stride {workspace.stride()}", expected="dense uint8")
    if workspace.numel() < needed:
        raise WorkspaceError("workspace bytes", got=workspace.numel(), expected=f"at least {needed}")
    return workspace.flatten()
