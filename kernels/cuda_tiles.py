"""Which compiled variant serves a plan on an architecture, and what it needs. Pure arithmetic, no device.

Variant(formats, heads, tokens, stages)  ->  decode_kernel<formats, heads, tokens, stages>   one cubin each
   |                                          shared memory as in src/cuda/shared.cuh, mirrored below
   v
grid = (queries, ceil(plan heads / heads), splits)      splits * queries * head tiles <= 2 * multiprocessors
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbridge.kernels.plan import MOST_SPLITS, Caps, Mode, Plan
from kvbridge.kernels.plan import plan as make_plan
from kvbridge.records import get_record

THREADS = 256
STATE_FLOATS = 3  # maximum, rounded sum, exact sum of one head
MERGE_BYTES = 1024 * STATE_FLOATS * 4  # shared memory of the separate merge: kMergeStates of src/cuda/finish.cuh
_FLOAT_BYTES = 4
_WARPS = THREADS // 32
_HEAD_TILES = (8, 16, 32, 64)
_TILE_COST = 24  # gathering and decoding a tile of tokens costs about as much as 24 heads of products

FORMATS = {
    "v4": 0,
    "v41": 1,
    "v41_interleaved": 1,
    "v41_fp4": 2,
    "v41_fp4_interleaved": 2,
    "dsa": 3,
    "v4_bf16": 4,
    "mla_bf16": 5,
}
"""RecordFormat of src/cuda/records.cuh for each record the kernel reads; the arrangement is no part of it."""

SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
"""Shared memory a block may opt into, by compute capability times ten (CUDA C++ Programming Guide, table of limits)."""

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""What the ahead-of-time command builds by default."""


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """Template arguments of the kernel.

    Attributes:
        formats: Bit mask of record formats.
        heads: Heads of a tile: 8, 16, 32 or 64.
        tokens: Slots of a tile.
        stages: Tiles whose rows are in flight.
    """

    formats: int
    heads: int
    tokens: int = 32
    stages: int = 2

    @property
    def decode_name(self) -> str:
        """C++ name of the decode kernel."""
        return f"decode_kernel<{self.formats}, {self.heads}, {self.tokens}, {self.stages}>"

    @property
    def merge_name(self) -> str:
        """C++ name of the merge kernel."""
        return f"merge_kernel<{self.heads}>"

    @property
    def d_qk(self) -> int:
        """Values of K that a query is multiplied with."""
        return max(get_record(name).d_qk for name, number in FORMATS.items() if self.formats >> number & 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: sizeof(Tile<...>::Shared), field by field."""
        d_qk, heads, tokens = self.d_qk, self.heads, self.tokens
        raw = max(get_record(name).row_bytes for name, number in FORMATS.items() if self.formats >> number & 1)
        pairs = tokens // 16 * (heads // 8)
        parts = 1 if pairs >= _WARPS else _WARPS // pairs
        size = 2 * heads * (d_qk + 8) + 2 * tokens * (d_qk + 8)
        size += self.stages * tokens * _round_up(raw, 16)
        size += 2 * heads * (tokens + 8) + _FLOAT_BYTES * parts * heads * (tokens + 4) + 4 * _FLOAT_BYTES * heads
        size = _round_up(size, 8) + 2 * 8 * (self.stages + 1) * tokens + 4
        return _round_up(size, 8)


def formats_of(records: tuple[str, ...]) -> int:
    """Bit mask of the formats of some records.

    Raises:
        KeyError: A record the kernel does not read.
    """
    mask = 0
    for record in records:
        mask |= 1 << FORMATS[record]
    return mask


def choose_variant(plan: Plan, capability: int) -> Variant:
    """Picks the head tile that does the least work, with as many tiles in flight as fit.

    Args:
        plan: What has to be served.
        capability: Compute capability times ten: 80, 90, 120 ...

    Returns:
        The variant; the plain one with a tile of 8 heads always fits.
    """
    limit = shared_limit(capability)
    formats = formats_of(plan.caps.records)
    best: tuple[int, Variant] | None = None
    for heads in _HEAD_TILES:
        for stages in (2, 1):
            variant = Variant(formats, heads, stages=stages)
            if variant.shared_bytes > limit:
                continue
            tiles = -(-plan.caps.heads // heads)
            # A single stage exposes the whole latency of the gather: it is taken only where two do not fit.
            cost = tiles * (_TILE_COST + heads) * (1 if stages == 2 else 2)
            if best is None or cost <= best[0]:
                best = (cost, variant)
            break
    if best is None:
        raise KeyError(f"no tile of formats {formats:#x} fits {limit} bytes")
    return best[1]


def caps_on(caps: Caps, *, capability: int, multiprocessors: int) -> Caps:
    """The same caps with a GPU's numbers: the plan's workspace bound is then the CUDA backend's own.

    Args:
        caps: What has to be served.
        capability: Compute capability times ten.
        multiprocessors: Of the device.
    """
    variant = choose_variant(make_plan(caps), capability)
    return replace(caps, units=multiprocessors, head_tile=variant.heads)


def shared_limit(capability: int) -> int:
    """Shared memory a block may opt into; unknown capabilities get the smallest of their generation's kin."""
    return SHARED_LIMITS.get(capability, min(SHARED_LIMITS.values()))


def splits(plan: Plan, variant: Variant, *, multiprocessors: int, queries: int, width: int) -> int:
    """Runs that each query's slots are cut into: enough blocks for two on every multiprocessor, no run without a tile.

    Args:
        plan: For the mode and the heads.
        variant: For the tile sizes.
        multiprocessors: Of the device.
        queries: Of the call.
        width: Slots of a query over all caches.
    """
    if plan.caps.mode == Mode.BATCH_INVARIANT or queries < 1:
        return 1
    groups = -(-plan.caps.heads // variant.heads)
    return max(1, min(2 * multiprocessors // (queries * groups), MOST_SPLITS, -(-width // variant.tokens)))


def workspace_bytes(plan: Plan, variant: Variant, *, multiprocessors: int) -> int:
    """Workspace for every call at or below the caps: counters, then partial states, then partial outputs.

    Split calls have at most 2 * multiprocessors blocks, whatever their query count, so the bound needs no search.
    """
    groups = -(-plan.caps.heads // variant.heads)
    if plan.caps.mode == Mode.BATCH_INVARIANT or multiprocessors < groups or sum(plan.caps.widths) <= variant.tokens:
        return 0
    return counters_bytes(multiprocessors) + most_blocks(plan, variant, multiprocessors) * block_bytes(variant)


def most_blocks(plan: Plan, variant: Variant, multiprocessors: int) -> int:
    """Most blocks of a split call: the maximum of queries * head tiles * splits over all query counts that split."""
    groups = -(-plan.caps.heads // variant.heads)
    most = 0
    for queries in range(1, min(plan.caps.queries, multiprocessors // groups) + 1):
        width = sum(plan.caps.widths)
        count = splits(plan, variant, multiprocessors=multiprocessors, queries=queries, width=width)
        if count > 1:
            most = max(most, queries * groups * count)
    return most


def block_bytes(variant: Variant) -> int:
    """Partial results of one block of a split call."""
    return variant.heads * (get_d_v() + STATE_FLOATS) * _FLOAT_BYTES


def counters_bytes(multiprocessors: int) -> int:
    """Counters of the fused merge: one for each (query, head tile) of a split call, rounded to a cache line."""
    return _round_up(_FLOAT_BYTES * multiprocessors, 128)


def get_d_v() -> int:
    """Values of the output: the same for every record the kernel reads."""
    return max(get_record(name).d_v for name in FORMATS)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
