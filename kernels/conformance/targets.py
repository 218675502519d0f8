"""What is tested: a backend of this package, or any callable that fills a scenario's buffers.

    def decode(scenario: Scenario) -> None:
        scenario.out[:, :scenario.heads] = my_kernel(scenario.q, scenario.caches, ...)

    TARGET = Target(name="mine", decode=decode, traits=Traits(records=("v4",), lse_formats=("none",)))

Traits say what a target does not claim to do; such cases are skipped with that reason and counted, never passed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch

from kvbridge.kernels import mla
from kvbridge.kernels.caches import Cache
from kvbridge.kernels.conformance.grid import FACTORS, RECORD_NAMES, Case, cases
from kvbridge.kernels.conformance.scenario import Scenario, records_of
from kvbridge.kernels.plan import MOST_CACHES, MOST_HEADS
from kvbridge.view import PageView


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a target claims.

    Attributes:
        records: Records it decodes.
        most_caches: Caches of a call.
        heads: Head counts it takes; None: 1..128.
        lse_formats: Values of the grid's factor `lse` that it returns; only `none` for no LSE.
        batch_invariant: It has a mode in which a query's bits do not depend on its batch.
        nan_codes: What e4m3 codes 0x7F and 0xFF become: `nan` or `480`.
        plain_stride: Stride kind on which properties are looked at; `slab` unless it fails for its own reason.
    """

    records: tuple[str, ...] = RECORD_NAMES
    most_caches: int = MOST_CACHES
    heads: tuple[int, ...] | None = None
    lse_formats: tuple[str, ...] = tuple(map(str, FACTORS["lse"]))
    batch_invariant: bool = False
    nan_codes: str = "nan"
    plain_stride: str = "slab"

    def refuses(self, case: Case) -> str | None:
        """Why a case is not claimed; None if it is."""
        foreign = [record for record in records_of(case) if record not in self.records]
        if foreign:
            return f"record {foreign[0]}"
        if case.caches > self.most_caches:
            return f"{case.caches} caches"
        if (self.heads is not None and case.heads not in self.heads) or case.heads > MOST_HEADS:
            return f"{case.heads} heads"
        return f"LSE format {case.lse}" if case.lse not in self.lse_formats else None

    def grid(self, seed: int) -> tuple[Case, ...]:
        """The pairwise grid over what is claimed."""
        factors: dict[str, tuple[str | int, ...]] = {
            "record": self.records,
            "caches": tuple(range(1, self.most_caches + 1)),
            "heads": self.heads or FACTORS["heads"],
            "lse": self.lse_formats,
        }
        return cases(
            seed, tuple((name, values) for name, values in factors.items() if set(values) != set(FACTORS[name]))
        )

    def unclaimed(self) -> list[str]:
        """What the grid leaves out, in words."""
        kinds = (("record", self.records), ("LSE format", self.lse_formats))
        known = {"record": FACTORS["record"], "LSE format": FACTORS["lse"]}
        words = [f"{kind} {value}" for kind, values in kinds for value in known[kind] if value not in values]
        words += [f"{count} caches" for count in range(self.most_caches + 1, MOST_CACHES + 1)]
        return words if self.heads is None else [*words, f"heads other than {self.heads}"]


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


def masked_slots(scenario: Scenario, cache: Cache) -> torch.Tensor:
    """int64 slots `[queries, width]` with -1 past the length, for kernels that know neither lengths nor sequences.

    Numbers outside the pool stay as they are. A query whose sequence does not exist gets -1 everywhere.
    """
    slots, lengths = cache.slots.long(), cache.lengths
    if scenario.sequence_of_query is not None:
        sequences = scenario.sequence_of_query.long()
        rows = len(slots) if cache.slots_per_sequence or lengths is None else len(lengths)
        known = (sequences >= 0) & (sequences < rows)
        place = torch.where(known, sequences, 0)
        if cache.slots_per_sequence:
            slots = slots[place]
        if cache.lengths_per_sequence and lengths is not None:
            lengths = lengths[place]
        if cache.slots_per_sequence or cache.lengths_per_sequence:
            slots = torch.where(known.unsqueeze(1), slots, -1)
    if lengths is None:
        return slots.contiguous()
    past = torch.arange(slots.shape[1]) >= lengths.long().unsqueeze(1)
    return torch.where(past, -1, slots)


def backend_target(backend: str, *, device: str | None = None) -> Target:
    """A backend of this package as a target.

    Args:
        backend: `cpu`, `cpu:avx2`, `torch`, `cuda`, `reference` ...
        device: Where to run it; by default a GPU for `cuda`, the CPU otherwise.
    """
    place = torch.device(device or ("cuda" if backend.startswith("cuda") else "cpu"))

    def decode(scenario: Scenario) -> None:
        there = scenario if place.type == "cpu" else moved(scenario, place)
        prepared = mla.prepare(there.plan, device=place, backend=backend)
        mla.run(
            prepared,
            q=there.q,
            caches=there.caches,
            out=there.out,
            scale=there.scale,
            sink=there.sink,
            lse=there.lse,
            lse_format=there.lse_format,
            sequence_of_query=there.sequence_of_query,
        )
        if there is not scenario:
            scenario.out.copy_(there.out)
            if scenario.lse is not None and there.lse is not None:
                scenario.lse.copy_(there.lse)

    codes = "480" if backend.partition(":")[0] in ("torch", "cuda") else "nan"
    return Target(name=backend, decode=decode, traits=Traits(batch_invariant=True, nan_codes=codes))


def moved(scenario: Scenario, device: torch.device) -> Scenario:
    """The scenario on another device, every storage copied as a whole: strides, offsets and poison stay as they are."""
    there = copy.copy(scenario)
    there.q, there.out = _moved(scenario.q, device), _moved(scenario.out, device)
    there.lse = None if scenario.lse is None else _moved(scenario.lse, device)
    there.sink = None if scenario.sink is None else _moved(scenario.sink, device)
    if scenario.sequence_of_query is not None:
        there.sequence_of_query = _moved(scenario.sequence_of_query, device)
    there.caches = [
        replace(
            cache,
            view=PageView.from_tensor(_moved(cache.view.pages, device), cache.view.layout),
            slots=_moved(cache.slots, device),
            lengths=None if cache.lengths is None else _moved(cache.lengths, device),
        )
        for cache in scenario.caches
    ]
    return there


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0)
    there = whole.clone() if device == tensor.device else whole.to(device)
    return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


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
