"""The CUDA backend as a target of the conformance kit: every tensor moves to the GPU with its storage, and back.

    python -m kvbridge.kernels.conformance --target benchmarks.gpu_target:TARGET

Strides, offsets, padding and poison stay as they are: whole storages move, and views are made anew over them.
"""

from __future__ import annotations

import torch

from kvbridge import PageView
from kvbridge.kernels import mla
from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.conformance.targets import Target, Traits
from kvbridge.kernels.cuda_tiles import FORMATS


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same view over a copy of the whole storage."""
    return whole(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Everything the storage holds, in the tensor's dtype."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def device_target(backend: str, *, device: str = "cuda") -> Target:
    """A backend on a device, fed from the kit's CPU tensors.

    Args:
        backend: `cuda`, `cuda:plain`, `cuda:separate-merge` ...
        device: Where it runs.
    """

    def decode(scenario: Scenario) -> None:
        prepared = mla.prepare(scenario.plan, device=device, backend=backend)
        caches = [
            mla.Cache(
                view=PageView.from_tensor(moved(cache.view.pages, prepared.device), cache.view.layout),
                slots=moved(cache.slots, prepared.device),
                lengths=None if cache.lengths is None else moved(cache.lengths, prepared.device),
                external_scale=cache.external_scale,
                slots_per_sequence=cache.slots_per_sequence,
                lengths_per_sequence=cache.lengths_per_sequence,
            )
            for cache in scenario.caches
        ]
        out, lse = moved(scenario.out, prepared.device), scenario.lse
        placed_lse = None if lse is None else moved(lse, prepared.device)
        sequences, sink = scenario.sequence_of_query, scenario.sink
        mla.run(
            prepared,
            q=moved(scenario.q, prepared.device),
            caches=caches,
            out=out,
            scale=scenario.scale,
            sink=None if sink is None else moved(sink, prepared.device),
            lse=placed_lse,
            lse_format=scenario.lse_format,
            sequence_of_query=None if sequences is None else moved(sequences, prepared.device),
        )
        whole(scenario.out).copy_(whole(out))
        if lse is not None and placed_lse is not None:
            whole(lse).copy_(whole(placed_lse))

    traits = Traits(records=tuple(FORMATS), batch_invariant=True, nan_codes="480")
    return Target(name=f"{backend} on {device}", decode=decode, traits=traits)


TARGET = device_target("cuda")
PLAIN = device_target("cuda:plain")
SEPARATE = device_target("cuda:separate-merge")
