"""Bytes that hold nothing: the tail pad of pages, and the slack of blocks.

    page   [payload                |tail]        waste of a pool: tail pad * layers, per page and per million tokens
    block  [page][page]...[page]..slack..]       slack of a group: block - what its layers occupy

All figures are integers: pages for a million tokens are counted whole, and bytes are never a quotient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvbridge.inspect.terminal import Cell, percent
from kvbridge.layout import PaddingPolicy
from kvbridge.manifest import Pool

MILLION_TOKENS = 1_000_000
"""Sequence length that waste is stated for."""

_BOUNDED_POOLS = ("swa", "state")


@dataclass(frozen=True, slots=True)
class Waste:
    """Unused bytes of one pool, or of one group's blocks.

    Attributes:
        name: Pool's label, or `group NAME`.
        unit_bytes: Bytes of one page, or one block.
        wasted_bytes: Bytes of it that hold nothing.
        layers: Layers with such a page; 1 for a block.
        million_tokens_bytes: Waste of all layers for a million tokens; None for pools that do not grow with the
            sequence (sliding window, compressor state).
    """

    name: str
    unit_bytes: int
    wasted_bytes: int
    layers: int
    million_tokens_bytes: int | None


def is_bounded(pool: Pool) -> bool:
    """Whether a pool's live pages stop growing with the sequence: a sliding window, or a compressor's state."""
    return any(word in pool.pool for word in _BOUNDED_POOLS)


def pool_waste(pool: Pool, label: str) -> Waste:
    """Tail pad of one pool."""
    layers = len(pool.layers) or 1
    pages = -(-MILLION_TOKENS // pool.page_tokens)
    per_million = None if is_bounded(pool) else pages * pool.waste_bytes * layers
    return Waste(label, pool.page_bytes, pool.waste_bytes, layers, per_million)


def group_waste(pools: Iterable[Pool]) -> Iterator[Waste]:
    """Slack of every packed group: bytes of a block that none of the group's layers owns.

    Args:
        pools: All pools of a manifest.
    """
    groups: dict[str, list[Pool]] = {}
    for pool in pools:
        if pool.padding.policy is PaddingPolicy.PACKED and pool.group is not None and pool.layers:
            groups.setdefault(pool.group, []).append(pool)
    for name, members in groups.items():
        strides = {pool.page_stride_bytes for pool in members}
        if len(strides) != 1:
            continue
        stride = strides.pop()
        used = sum(pool.page_bytes * len(pool.layers) for pool in members)
        slack = max(stride - used, 0)
        growing = [pool for pool in members if not is_bounded(pool)]
        blocks = -(-MILLION_TOKENS // growing[0].page_tokens) if growing else None
        yield Waste(f"group {name}", stride, slack, 1, None if blocks is None else blocks * slack)


def waste_header() -> tuple[str, ...]:
    """Column names of a table of waste."""
    return ("waste of", "page or block", "unused", "share", "layers", "unused, 1M tokens")


def waste_cells(pools: Mapping[str, Pool]) -> list[tuple[Cell, ...]]:
    """Rows of a table of waste: every pool with bytes, then every packed group.

    Args:
        pools: Pools by label.
    """
    owners = {label: pool for label, pool in pools.items() if pool.payload_bytes}
    entries = [pool_waste(pool, label) for label, pool in owners.items()]
    return [
        (
            *(waste.name, waste.unit_bytes, waste.wasted_bytes, percent(waste.wasted_bytes, waste.unit_bytes)),
            *(waste.layers, waste.million_tokens_bytes),
        )
        for waste in (*entries, *group_waste(owners.values()))
    ]
