"""Audits of what other programs assume of a cache: allocators, offload paths, and peers that exchange chunks.

    allocator   blocks at 37376, views at 37440           every block after the first is elsewhere
    offload     one flat int8 cache                       uint8, and three page sizes: each mismatch listed
    chunk       3,942,656 bytes here, 15,495,168 there    planned per pool: the first is right

A layout is never derived from bytes per token: 3,942,656 / 1,024 = 3,850.25, because a C128 row stands for 128 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.errors import PageSplitError, PageStrideError
from kvbridge.layout import PageLayout, PoolKind
from kvbridge.rule import Severity
from kvbridge.rules import Finding, finding, finding_of

if TYPE_CHECKING:
    from kvbridge.manifest import Manifest

BOUNDED_POOLS = ("swa", "state")
"""Parts of pool names whose live rows stop growing with the sequence: sliding window, compressor state."""


@dataclass(frozen=True, slots=True)
class PoolChunk:
    """What one pool holds of a chunk of tokens.

    Attributes:
        pool: Pool name.
        layers: Layers.
        rows: Complete rows of each layer.
        payload_bytes: Bytes of those rows over all layers, without padding.
    """

    pool: str
    layers: int
    rows: int
    payload_bytes: int


def chunk_bytes(manifest: Manifest, *, tokens: int) -> tuple[PoolChunk, ...]:
    """Payload that a chunk of tokens adds to each pool that grows with the sequence.

    Args:
        manifest: Pools and layers.
        tokens: Tokens of the chunk; rows that it does not complete are not counted.
    """
    return tuple(
        PoolChunk(
            pool.pool,
            len(pool.layers),
            tokens // pool.tokens_per_row,
            tokens // pool.tokens_per_row * pool.row_bytes * len(pool.layers),
        )
        for pool in manifest.pools
        if pool.kind is not PoolKind.INDEX_ONLY and not any(word in pool.pool for word in BOUNDED_POOLS)
    )


def audit_chunk(manifest: Manifest, *, tokens: int, sizes: Mapping[str, int]) -> tuple[Finding, ...]:
    """Compares sizes that peers state for one chunk with each other and with the plan.

    Args:
        manifest: The plan.
        tokens: Tokens of the chunk.
        sizes: Bytes by the name of who states them.

    Returns:
        One `chunk-size` finding for each size that is not the planned one; a note where all agree on another size.
    """
    chunks = chunk_bytes(manifest, tokens=tokens)
    planned = sum(chunk.payload_bytes for chunk in chunks)
    pools = ", ".join(f"{chunk.pool} {chunk.payload_bytes}" for chunk in chunks)
    right = [name for name, size in sizes.items() if size == planned]
    found = []
    for name, size in sizes.items():
        if size == planned:
            continue
        ratio = f"{size / planned:.4g} times the plan" if planned else "the plan holds nothing"
        found.append(
            finding(
                "chunk-size",
                name,
                got=size,
                expected=planned,
                detail=f"{tokens} tokens: {pools}; {ratio}; {', '.join(right) or 'nobody'} matches the plan",
            )
        )
    return tuple(found)


def audit_allocator(
    layout: PageLayout,
    *,
    stride_bytes: int,
    budget_bytes: int | None = None,
    kernel_blocks_per_page: int = 1,
    pool: str = "",
) -> tuple[Finding, ...]:
    """Compares how an allocator lays blocks out with how views read them.

    Args:
        layout: What the views are.
        stride_bytes: Distance at which the allocator places blocks.
        budget_bytes: Bytes it divides; the page counts of both sides go into the finding.
        kernel_blocks_per_page: Kernel blocks that one of its pages is cut into.
        pool: Pool label.

    Returns:
        `page-stride` where the two differ, `page-split` where a padded or split page should be cut.
    """
    found = []
    if stride_bytes != layout.page_stride_bytes:
        detail = f"allocator stride {stride_bytes} against view stride {layout.page_stride_bytes}"
        if budget_bytes is not None and stride_bytes > 0:
            pages = budget_bytes // stride_bytes, budget_bytes // layout.page_stride_bytes
            detail += f"; {budget_bytes} bytes hold {pages[0]} and {pages[1]} pages"
        error = PageStrideError("allocator stride", got=stride_bytes, expected=layout.page_stride_bytes, detail=detail)
        found.append(finding_of(error, pool=pool))
    padded = layout.page_stride_bytes != layout.payload_bytes
    if kernel_blocks_per_page > 1 and (padded or len({r.row_stride for r in layout.regions}) > 1):
        reason = f"page of {layout.page_stride_bytes} bytes with a payload of {layout.payload_bytes}"
        if not padded:
            reason = f"split page of record {layout.record}"
        split = PageSplitError(
            "kernel_blocks_per_page",
            got=kernel_blocks_per_page,
            expected=1,
            detail=f"{reason} is no run of smaller pages",
        )
        found.append(finding_of(split, pool=pool))
    return tuple(found)


def audit_flat_cache(
    layouts: Mapping[str, PageLayout] | Iterable[PageLayout], *, dtype: str = "int8", copy_unit_bytes: int = 8
) -> tuple[Finding, ...]:
    """Compares pools with a transfer path that assumes one flat cache: one dtype, one page size, whole words.

    Args:
        layouts: Pools, by label or in order.
        dtype: Dtype that the path asserts.
        copy_unit_bytes: Bytes that it copies at once.

    Returns:
        One `uniform-cache` finding for each assumption that fails, all of them; none for those that hold.
    """
    pools = layouts if isinstance(layouts, Mapping) else {f"{n}:{entry.pool}": entry for n, entry in enumerate(layouts)}
    found = []
    wrong = {label: entry.dtype for label, entry in pools.items() if entry.dtype != dtype}
    if wrong:
        found.append(
            finding("uniform-cache", "dtype", got=sorted(set(wrong.values())), expected=dtype, detail=", ".join(wrong))
        )
    sizes = {label: entry.page_stride_bytes for label, entry in pools.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{label} {size}" for label, size in sizes.items())
        found.append(
            finding(
                "uniform-cache",
                "page_stride_bytes",
                got=sorted(set(sizes.values())),
                expected="one page size",
                detail=listed,
            )
        )
    odd = {label: size for label, size in sizes.items() if size % copy_unit_bytes}
    if odd:
        listed = ", ".join(f"{label} {size}" for label, size in odd.items())
        found.append(
            finding(
                "uniform-cache",
                "copy_unit_bytes",
                got=copy_unit_bytes,
                expected="a divisor of every page size",
                detail=listed,
            )
        )
    padded = [label for label, entry in pools.items() if entry.page_stride_bytes != entry.payload_bytes]
    if padded:
        found.append(
            finding(
                "uniform-cache",
                "padding",
                got=f"padding in {', '.join(padded)}",
                expected="pages that touch",
                detail="a flat copy moves the bytes between payloads too",
                severity=Severity.NOTE,
            )
        )
    return tuple(found)
