"""What one layer asks vLLM for: the part of a KV cache spec that decides bytes.

    block of 256 tokens, ratio 4        page = [64 rows x 584 bytes | tail], rounded up to 576
    CacheSpec(block_tokens=256, tokens_per_row=4, row_bytes=584, alignment=576) -> page_rows 64, page_bytes 37,440

Every cached state has one head here: MLA stores one latent row per state. The rules are those of vLLM 0.32.0 and 0.33.0
`v1/kv_cache_interface.py` (AttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec, CircularBufferSpec).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import gcd

from kvbridge.records import Arrangement, get_record


class SpecKind(StrEnum):
    """vLLM's class of cache spec; layers of different classes never share a block table."""

    MLA = "MLAAttentionSpec"
    SLIDING = "SlidingWindowMLASpec"
    RING = "CircularBufferSpec"


def round_up(value: int, multiple: int | None) -> int:
    """Smallest multiple that is not below `value`; `value` itself without a multiple."""
    return -(-value // multiple) * multiple if multiple else value


def is_split(record: str) -> bool:
    """Whether a page holds all rows' data first and their scales behind: then it cannot be cut into smaller pages."""
    found = get_record(record)
    return found.arrangement is Arrangement.SPLIT and bool(found.block_bytes("scales"))


@dataclass(frozen=True)
class CacheSpec:
    """One layer's cache.

    Two layers whose specs are equal lie side by side in one placement, as in vLLM.

    Attributes:
        kind: vLLM's spec class.
        pool: Pool name in the manifest.
        record: Record name.
        block_tokens: Tokens of a block; rows of a ring.
        tokens_per_row: Tokens that one row stands for.
        alignment: Bytes that a page is rounded up to; None for no rounding.
        window_tokens: Sliding window; 0 for none.
        stride_alignment_bytes: Bytes the distance between blocks must be a multiple of, as the layer states it.
        kernel_block_tokens: Blocks of this many tokens that the distance must keep whole; 0 where the layer's backend
            takes any block. Only used where `stride_alignment_bytes` is not stated.
        leader: Whether the layer has an indexer of its own; part of vLLM's spec, so it splits placements.
        dtype: Torch's name of the tensor's dtype.
    """

    kind: SpecKind
    pool: str
    record: str
    block_tokens: int
    tokens_per_row: int = 1
    alignment: int | None = None
    window_tokens: int = 0
    stride_alignment_bytes: int = 0
    kernel_block_tokens: int = 0
    leader: bool = False
    dtype: str = "uint8"

    @cached_property
    def page_rows(self) -> int:
        """Rows in a page."""
        return self.block_tokens // self.tokens_per_row

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of a page that carry meaning."""
        return self.page_rows * get_record(self.record).row_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Payload and tail padding."""
        return round_up(self.payload_bytes, self.alignment)

    @cached_property
    def block_stride_alignment(self) -> int:
        """Bytes the distance between blocks must be a multiple of."""
        if self.stride_alignment_bytes or not self.kernel_block_tokens:
            return self.stride_alignment_bytes or 1
        kernel_block = gcd(self.kernel_block_tokens, self.block_tokens)
        return 1 if kernel_block == self.block_tokens else self.with_block(kernel_block).page_bytes

    @property
    def pages_per_packed_block(self) -> int:
        """Pages that a packed block holds of the layer: several where the kernel takes smaller blocks of split rows."""
        if not self.kernel_block_tokens or not is_split(self.record):
            return 1
        return self.block_tokens // gcd(self.kernel_block_tokens, self.block_tokens)

    @property
    def bucket(self) -> tuple[SpecKind, int, int]:
        """Layers that may share a block table have equal buckets: they need the same number of token slots."""
        return self.kind, self.block_tokens, self.window_tokens if self.kind is SpecKind.SLIDING else 0

    def with_block(self, block_tokens: int) -> CacheSpec:
        """The same layer with another block size."""
        return replace(self, block_tokens=block_tokens)
