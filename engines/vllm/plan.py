"""The planned manifest: the tensors vLLM would allocate, computed from a model's config and options.

    ModelConfig + options -> Settings -> one CacheSpec a layer -> groups -> placements -> pools
                                                     memory budget -> blocks, tokens, and why

Neither vLLM nor torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, lcm

from kvbridge.engine import EngineError, PlanRequest
from kvbridge.engines.vllm.grouping import Group, Placement, block_bytes, make_groups, place
from kvbridge.engines.vllm.layers import is_packed, layer_specs
from kvbridge.engines.vllm.options import Settings, resolve
from kvbridge.engines.vllm.specs import CacheSpec, SpecKind
from kvbridge.engines.vllm.stages import local_groups
from kvbridge.layout import Padding, PaddingPolicy
from kvbridge.manifest import EngineId, LayerPlacement, Manifest, MemoryPlan, Pool, Rank, Storage

STORAGE = "kv"
"""Id of the one allocation that holds every layer."""


def plan_manifest(request: PlanRequest, options: dict[str, str | int | bool]) -> Manifest:
    """Computes the manifest.

    Args:
        request: Model, version and memory budget.
        options: All of the request's options, resolved.

    Raises:
        EngineError: vLLM refuses the combination.
    """
    settings = resolve(request.model, options, version=request.version)
    specs = layer_specs(request.model, settings)
    packed = is_packed(request.model, specs)
    all_groups = make_groups(specs, packed=packed)
    ranks = [local_groups(all_groups, request.model, settings, rank) for rank in range(settings.pipeline_parallel)]
    groups = ranks[settings.pipeline_rank]
    slab_bytes = block_bytes(groups, packed=packed)
    notes = list(settings.notes)
    # All ranks allocate as many blocks as the one with the largest blocks can.
    largest_bytes = max(block_bytes(rank, packed=packed) for rank in ranks)
    num_blocks, memory = _blocks(request, settings, all_groups, (slab_bytes, largest_bytes), notes)
    if num_blocks is None and not packed:
        num_blocks = blocks_per_request(all_groups, settings, settings.max_model_len) + 1
        notes.append(
            f"offsets depend on the number of blocks; planned with {num_blocks}, the fewest that hold one sequence of "
            f"{settings.max_model_len} tokens"
        )
    placements = place(groups, packed=packed, num_blocks=num_blocks or 1)
    return Manifest.built(
        engine=EngineId.built(name="vllm", version=request.version),
        model=request.model.name,
        origin="planned",
        rank=Rank.built(
            tensor_parallel_size=settings.tensor_parallel,
            pipeline_parallel_rank=settings.pipeline_rank,
            pipeline_parallel_size=settings.pipeline_parallel,
            decode_context_parallel_size=settings.context_parallel,
        ),
        options=dict(options),
        storages=(Storage.built(id=STORAGE, storage_bytes=None if num_blocks is None else num_blocks * slab_bytes),),
        memory=memory,
        notes=tuple(notes),
        pools=tuple(
            pool
            for placement in placements
            for pool in make_pools(placement, groups[placement.group], packed=packed, num_blocks=num_blocks)
        ),
    )


def page_tokens(group: Group) -> int:
    """Tokens of a page where layers are outermost: a block is split into the blocks that all kernels take.

    Source: vLLM 0.33.0 v1/worker/utils.py (prepare_kernel_block_sizes, select_common_block_size).
    """
    return min(gcd(spec.kernel_block_tokens, spec.block_tokens) for spec in group.specs.values())


def make_pools(placement: Placement, group: Group, *, packed: bool, num_blocks: int | None) -> Iterator[Pool]:
    """A placement as pools of the manifest: one, or one for each page of a packed block that holds several.

    Args:
        placement: Where the layers lie.
        group: The placement's group.
        packed: Whether blocks are outermost.
        num_blocks: Blocks; None to leave page counts open.
    """
    if not packed:
        yield make_pool(placement, num_blocks=num_blocks, page_tokens=page_tokens(group))
        return
    pages = placement.spec.pages_per_packed_block
    spec = placement.spec
    if pages > 1:
        # Pages of one block follow each other; only the last one is padded.
        spec = replace(spec, block_tokens=spec.block_tokens // pages, alignment=None)
    for page in range(pages):
        shifted = replace(
            placement,
            spec=spec,
            layers=placement.layers if pages == 1 else tuple(f"{name}#{page}" for name in placement.layers),
            offset_bytes=placement.offset_bytes + page * spec.payload_bytes,
        )
        yield make_pool(shifted, num_blocks=num_blocks)


def make_pool(placement: Placement, *, num_blocks: int | None, page_tokens: int = 0) -> Pool:
    """One pool. Block 0 is vLLM's null block: it never holds live rows.

    Args:
        placement: Where the layers lie.
        num_blocks: Blocks; None to leave page counts open.
        page_tokens: Tokens of a page where layers are outermost; 0 for packed blocks.
    """
    packed = not page_tokens
    pages_per_block = 1 if packed else placement.spec.block_tokens // page_tokens
    spec = placement.spec if packed else placement.spec.with_block(page_tokens)
    if pages_per_block > 1 and placement.block_stride_bytes != placement.spec.payload_bytes:
        raise EngineError(
            f"option block-size: got {placement.spec.block_tokens}, expected {page_tokens}: vLLM refuses to split "
            f"blocks {placement.block_stride_bytes} bytes apart that hold {placement.spec.payload_bytes}"
        )
    stride = placement.block_stride_bytes // pages_per_block
    alignment = spec.alignment
    if packed:
        policy = PaddingPolicy.PACKED
    else:
        if stride != spec.page_bytes:
            alignment = lcm(alignment or 1, placement.spec.block_stride_alignment)
        elif spec.page_bytes == spec.payload_bytes:
            alignment = None  # vLLM's merged spec of a group keeps an alignment only where it pads
        policy = PaddingPolicy.EXACT if alignment is None else PaddingPolicy.ALIGNED
    return Pool.built(
        record=spec.record,
        pool=spec.pool,
        page_rows=spec.page_rows,
        tokens_per_row=spec.tokens_per_row,
        payload_bytes=spec.payload_bytes,
        page_stride_bytes=stride,
        padding=Padding.built(policy=policy, alignment=alignment),
        num_pages=None if num_blocks is None else num_blocks * pages_per_block,
        reserved_pages=pages_per_block,
        dtype=spec.dtype,
        group=str(placement.group),
        storage=STORAGE,
        layer_stride_bytes=placement.layer_stride_bytes,
        layers=tuple(
            LayerPlacement.built(name=name, offset_bytes=placement.offset_bytes + index * placement.layer_stride_bytes)
            for index, name in enumerate(placement.layers)
        ),
    )


def blocks_per_request(groups: Sequence[Group], settings: Settings, tokens: int) -> int:
    """Blocks that one sequence takes: every group has a block table of its own, all draw from one pool.

    Source: vLLM 0.33.0 v1/core/kv_cache_utils.py (get_max_concurrency_for_kv_cache_config).
    """
    return sum(max(_blocks_of_layer(spec, settings, tokens) for spec in group.specs.values()) for group in groups)


def _blocks_of_layer(spec: CacheSpec, settings: Settings, tokens: int) -> int:
    if spec.kind is SpecKind.RING:
        return 1
    if spec.kind is SpecKind.SLIDING:
        held = min(spec.window_tokens - 1 + settings.in_flight_tokens, tokens)
        return -(-held // spec.block_tokens) + 1  # a window may start inside a block
    local_tokens = -(-tokens // settings.context_parallel)
    return -(-local_tokens // spec.block_tokens)


def _blocks(
    request: PlanRequest, settings: Settings, groups: Sequence[Group], sizes: tuple[int, int], notes: list[str]
) -> tuple[int | None, MemoryPlan | None]:
    slab_bytes, largest_bytes = sizes
    if request.memory_bytes is None and not settings.num_blocks:
        return None, None
    budget = settings.num_blocks * slab_bytes if request.memory_bytes is None else request.memory_bytes
    num_blocks = settings.num_blocks or budget // largest_bytes
    if num_blocks < 1:
        raise EngineError(f"memory: got {budget} bytes, expected at least {largest_bytes}: one block of all layers")
    length = settings.max_model_len
    needed = blocks_per_request(groups, settings, length)
    tokens = int(num_blocks / needed * length)
    how = "num-gpu-blocks-override" if settings.num_blocks else f"{budget} // {largest_bytes} bytes a block"
    if largest_bytes != slab_bytes and not settings.num_blocks:
        how += f" on the rank with most; {slab_bytes} here"
    reason = (
        f"{num_blocks} blocks ({how}); a sequence of {length} tokens takes {needed} of them "
        f"({_shares(groups, settings, length)}); {num_blocks} / {needed} * {length} = {tokens} tokens"
    )
    if needed + 1 > num_blocks:
        notes.append(
            f"vLLM refuses to start: one sequence of {length} tokens needs {needed} blocks besides the null block, "
            f"{num_blocks} fit; the longest max-model-len that fits is {_longest(groups, settings, num_blocks)}"
        )
    return num_blocks, MemoryPlan.built(
        budget_bytes=budget,
        used_bytes=num_blocks * slab_bytes,
        num_blocks=num_blocks,
        tokens=tokens,
        reason=reason,
    )


def _shares(groups: Sequence[Group], settings: Settings, tokens: int) -> str:
    shares = []
    for index, group in enumerate(groups):
        pools = "+".join(dict.fromkeys(spec.pool for spec in group.specs.values()))
        shares.append(f"group {index} {pools} {blocks_per_request([group], settings, tokens)}")
    return ", ".join(shares)


def _longest(groups: Sequence[Group], settings: Settings, num_blocks: int) -> int:
    low, high = 0, settings.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_request(groups, settings, middle) + 1 <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
