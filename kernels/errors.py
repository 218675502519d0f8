"""Typed errors of the kernel API: which argument, what was got, what was expected.

q.shape[1]: got 12, expected 16 (heads of the plan)
^ argument  ^ got    ^ expected  ^ detail
"""

from __future__ import annotations

from kvbridge.errors import KVBridgeError


class KernelError(KVBridgeError):
    """Root of what the kernel API raises on purpose."""


class ArgumentError(KernelError):
    """An argument that does not fit the call.

    Attributes:
        argument: Name of the argument, with the index or attribute at fault: `caches[1].slots.dtype`.
        got: The value found.
        expected: The value, or a phrase that names the values, that would have been right.
        detail: Where the expectation comes from.
    """

    def __init__(self, argument: str, *, got: object, expected: object, detail: str = "") -> None:
        self.argument = argument
        self.got = got
        self.expected = expected
        self.detail = detail
        super().__init__(argument, got, expected, detail)

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.argument}: got {self.got}, expected {self.expected}{detail}"


class ShapeError(ArgumentError):
    """A tensor of the wrong rank or size."""


class StrideError(ArgumentError):
    """A tensor whose last axis is not dense, or whose strides alias what is written."""


class ArgumentDtypeError(ArgumentError):
    """A tensor of the wrong dtype."""


class DeviceError(ArgumentError):
    """A tensor on another device than the call was prepared for."""


class ValueRangeError(ArgumentError):
    """A number or an option outside what is allowed."""


class CapacityError(ArgumentError):
    """A call above the caps that its plan was made for."""


class WorkspaceError(ArgumentError):
    """A workspace, or somebody's reserve, smaller than the worst call at or below the caps."""


class MergeError(ArgumentError):
    """Partial results that cannot be joined: a base missing, or the sink counted more than once."""


class NotPreparedError(KernelError):
    """A call without `prepare`: nothing may be compiled, loaded or allocated while it runs."""


class BackendError(KernelError):
    """A backend that is unknown, is not available here, or cannot serve the plan.

    Attributes:
        backend: Its name.
        reason: Why.
    """

    def __init__(self, backend: str, reason: str) -> None:
        self.backend = backend
        self.reason = reason
        super().__init__(backend, reason)

    def __str__(self) -> str:
        return f"backend {self.backend!r}: {self.reason}"


class BackendFallbackWarning(UserWarning):
    """A faster backend exists for this device but could not be used; the message says why."""
