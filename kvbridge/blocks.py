"""What an operation on whole blocks covers: everything that one group's layers own, once per storage.

    slab   |A payload|tail|B payload|tail|C payload|tail|slack|A payload|tail|B ...
    read   [=========]    [=========]    [=========]          [=========]
    clear  [============================================]     [==============...   one span a block, no slack

Layers of one group share a block table and never bytes. Groups may alias each other's bytes on purpose (vLLM's packed
slab): which group owns a block is known to the block table alone, so the caller must own the blocks it names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvbridge.errors import SpanError
from kvbridge.layout import PoolKind
from kvbridge.overlap import overlapping_pairs
from kvbridge.runs import SpanBuilder, Spans, as_numbers, join_spans, progressions
from kvbridge.spans import Operation, Placement

if TYPE_CHECKING:
    from kvbridge.manifest import Manifest


def group_placements(manifest: Manifest, group: str) -> dict[str, list[Placement]]:
    """Where a group's layers lie.

    Args:
        manifest: Pools with their groups and placements.
        group: Group name.

    Returns:
        Placements by storage id, ascending by start.

    Raises:
        SpanError: No layer of that group owns bytes, or two of its layers overlap.
        PageCountError: A pool's page count is open.
    """
    places: dict[str, list[Placement]] = {}
    for pool in manifest.pools:
        if pool.group == group and pool.kind is not PoolKind.INDEX_ONLY:
            for layer in pool.layers:
                place = Placement.from_layer(manifest, pool, layer)
                places.setdefault(pool.storage_of(layer) or "", []).append(place)
    if not places:
        groups = sorted({pool.group for pool in manifest.pools if pool.group is not None})
        raise SpanError("group", got=group, expected=f"one of {groups} with layers that own bytes")
    for storage in places.values():
        storage.sort(key=lambda place: place.start)
        require_disjoint(storage)
    return places


def block_spans(
    manifest: Manifest, *, group: str, blocks: Iterable[int], operation: Operation = Operation.CLEAR
) -> dict[str, Spans]:
    """Spans of whole blocks: all layers of a group, each byte once.

    Args:
        manifest: Pools with their groups and placements.
        group: Group that owns the blocks.
        blocks: Block ids: a range, a list, or an integer tensor.
        operation: `clear` covers tail pads, so that a slab without slack is one span a block; `read` and `write` only
            payloads.

    Returns:
        Ascending spans by storage id, as offsets. Bytes that no layer of the group owns are never in them.

    Raises:
        SpanError: No layer of that group owns bytes, or two of its layers overlap.
        SlotError: A block id is outside one of the group's pools.
    """
    numbers = as_numbers(blocks)
    return {
        storage: _storage_spans(places, numbers, operation)
        for storage, places in group_placements(manifest, group).items()
    }


def require_disjoint(places: list[Placement]) -> None:
    """Refuses layers of one group and storage that share bytes, tail pads included.

    Args:
        places: Placements in one storage.

    Raises:
        SpanError: Two of them overlap; both are named.
    """
    for one, other, _, _ in overlapping_pairs([place.run(Operation.CLEAR).page_run for place in places]):
        first, second = places[one], places[other]
        raise SpanError(
            "layers",
            got=f"{first.name} at {first.start} and {second.name} at {second.start} overlap",
            expected="layers of one group that share no byte",
            detail=f"pages of {first.layout.page_bytes} and {second.layout.page_bytes} bytes",
        )


def _storage_spans(places: list[Placement], numbers: range | list[int], operation: Operation) -> Spans:
    for place in places:
        place.require_inside("blocks", numbers, place.num_pages)
    builder = SpanBuilder()
    if not _is_one_slab(places) or _ends_early(places, operation):
        for place in places:
            for run in place.pages(numbers, operation=operation).runs:
                builder.add(run.start, run.length, run.stride, run.count)
        return builder.finish().ordered()
    block = list(join_spans((place.start, place.extent(operation)) for place in places))
    stride = places[0].layout.page_stride_bytes
    ascending = numbers if isinstance(numbers, range) and numbers.step > 0 else sorted(set(numbers))
    for first, step, count in progressions(ascending):
        if len(block) == 1:
            builder.add(block[0].start + first * stride, block[0].length, step * stride, count)
        else:
            for number in range(first, first + step * count, step):
                for start, length in block:
                    builder.add(start + number * stride, length)
    return builder.finish()


def _is_one_slab(places: list[Placement]) -> bool:
    """Whether all layers lie inside one stride, so that a block is one run of bytes."""
    first, last = places[0], max(places, key=lambda place: place.start + place.layout.page_bytes)
    stride = first.layout.page_stride_bytes
    same = all(place.layout.page_stride_bytes == stride for place in places)
    return same and last.start + last.layout.page_bytes - first.start <= stride


def _ends_early(places: list[Placement], operation: Operation) -> bool:
    """Whether the storage ends inside the tail pad of a last page."""
    return any(
        place.storage_end is not None
        and place.start + (place.num_pages - 1) * place.layout.page_stride_bytes + place.extent(operation)
        > place.storage_end
        for place in places
    )
