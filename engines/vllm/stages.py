"""Pipeline parallelism: groups are made for the whole model, then every rank keeps its own layers of each.

    group 2 of the model   [ L0 L1 L2 | L3 L4 L5 | L6 L7 ]
    rank 1 of 3                       [ L3 L4 L5 ]

On a rank, offsets restart at byte 0 and a block holds the rank's layers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge.engine import EngineError
from kvbridge.engines.vllm.grouping import Group
from kvbridge.engines.vllm.options import Settings
from kvbridge.models import ModelConfig


def local_groups(
    groups: Sequence[Group], model: ModelConfig, settings: Settings, pipeline_rank: int
) -> tuple[Group, ...]:
    """The groups of the whole model with the layers of one pipeline rank only; draft layers are on the last rank.

    Source: vLLM 0.33.0 distributed/utils.py (get_pp_indices), v1/core/kv_cache_planning.py
    (_project_kv_cache_groups_to_worker).

    Raises:
        EngineError: A rank has no layer of some group, or not the source of a compressed layer.
    """
    size = settings.pipeline_parallel
    if size == 1:
        return tuple(groups)
    shares = [model.num_layers // size] * size
    for back in range(2, model.num_layers % size + 2):
        shares[-back] += 1
    first = sum(shares[:pipeline_rank])
    last = first + shares[pipeline_rank] + (model.num_draft_layers if pipeline_rank == size - 1 else 0)
    local = tuple(
        Group({name: spec for name, spec in group.specs.items() if first <= int(name.split(".")[2]) < last})
        for group in groups
    )
    sources = model.kv_source_layers
    for layer in range(first, min(last, model.num_layers)):
        if sources and model.compress_ratios[layer] and not any(first <= source <= layer for source in sources):
            raise EngineError(
                f"option pipeline-parallel-size: got {size}, expected one that keeps layer {layer} with its source; "
                "vLLM refuses to split layers that share compressed rows"
            )
    if not all(group.specs for group in local):
        raise EngineError(
            f"option pipeline-parallel-size: got {size}, expected fewer: rank {pipeline_rank} has layers {first} .. "
            f"{last - 1}, and none of some group, which vLLM fails to allocate"
        )
    return local
