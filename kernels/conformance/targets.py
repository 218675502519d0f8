"""What is tested: a backend of this package, or any callable that fills a scenario's buffers.

    def decode(scenario: Scenario) -> None:
        scenario.out[:, :scenario.heads] = my_kernel(scenario.q, scenario.caches, ...)

    TARGET = Target(name="mine", decode=decode, traits=Traits(records=("v4",), lse=False))

Traits say what a target does not claim to do; such cases are skipped with that reason and counted, never passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from kvbridge.kernels import mla
from kvbridge.kernels.conformance.grid import RECORD_NAMES, Case
from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.plan import MOST_CACHES, MOST_HEADS


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a target claims.

    Attributes:
        records: Records it decodes.
        most_caches: Caches of a call.
        heads: Head counts it takes; None: 1..128.
        lse: It returns the LSE.
        batch_invariant: It has a mode in which a query's bits do not depend on its batch.
        nan_codes: What e4m3 codes 0x7F and 0xFF become: `nan` or `480`.
        other_cases: Asked last: why a case is not claimed, or None.
    """

    records: tuple[str, ...] = RECORD_NAMES
    most_caches: int = MOST_CACHES
    heads: tuple[int, ...] | None = None
    lse: bool = True
    batch_invariant: bool = False
    nan_codes: str = "nan"
    other_cases: Callable[[Case], str | None] | None = None

    def refuses(self, case: Case) -> str | None:
        """Why a case is not claimed; None if it is."""
        if case.record not in self.records:
            return f"record {case.record}"
        if case.caches > self.most_caches:
            return f"{case.caches} caches"
        if (self.heads is not None and case.heads not in self.heads) or case.heads > MOST_HEADS:
            return f"{case.heads} heads"
        return self.other_cases(case) if self.other_cases else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something to test.

    Attributes:
        name: For the table.
        decode: Fills `scenario.out` and `scenario.lse`.
        traits: What it claims.
    """

    name: str
    decode: Callable[[Scenario], None]
    traits: Traits = field(default_factory=Traits)


def backend_target(backend: str) -> Target:
    """A backend of this package as a target.

    Args:
        backend: `cpu`, `cpu:avx2`, `torch`, `cuda`, `reference` ...
    """

    def decode(scenario: Scenario) -> None:
        device = "cuda" if backend.startswith("cuda") else "cpu"
        prepared = mla.prepare(scenario.plan, device=device, backend=backend)
        mla.run(
            prepared,
            q=scenario.q,
            caches=scenario.caches,
            out=scenario.out,
            scale=scenario.scale,
            sink=scenario.sink,
            lse=scenario.lse,
            lse_format=scenario.lse_format,
            sequence_of_query=scenario.sequence_of_query,
        )

    codes = "nan" if backend == "reference" else "480" if backend == "torch" else "nan"
    return Target(name=backend, decode=decode, traits=Traits(batch_invariant=True, nan_codes=codes))


def load_target(text: str) -> Target:
    """Loads `package.module:NAME`.

    Raises:
        TypeError: What was found is no `Target`.
    """
    module, _, name = text.partition(":")
    found = getattr(import_module(module), name or "TARGET")
    if not isinstance(found, Target):
        raise TypeError(f"--target: got {type(found).__name__} at {text}, expected a Target")
    return found
