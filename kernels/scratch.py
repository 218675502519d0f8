"""Somebody else's scratch formula, checked: is a reserve enough for every call below the caps?

    rows <= 256   splits = ceil(width / 64)        256 rows, width 4224: 66 splits, 16,896 partial rows   <- the peak
    rows  > 256   splits = ceil(width / 1024)     2048 rows, width 4224:  5 splits, 10,240 partial rows   <- reserved
    bytes = partial rows * heads * (512 * 2 + 4) + most rows * heads * 4 + 3072

The rule is b12x's compressed sparse MLA as vLLM forks used it (local-inference-lab/vllm issue 224, pulls 227 and 229);
it reproduces all seven published reserves. A reserve taken at the most rows misses the peak, and a scratch that is
locked for graph capture must not grow later.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.kernels.errors import CapacityError, ValueRangeError, WorkspaceError

_VALUES = 512
_MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplitScratch:
    """Scratch of a kernel that splits more while it has few rows.

    Attributes:
        heads: Query heads.
        decode_rows: Rows up to which the fine chunk is used: its decode row capacity, at least 256.
        decode_chunk: Slots of a split at or below that.
        prefill_chunk: Slots of a split above.
        fixed_bytes: Bytes beside the partial results.
    """

    heads: int
    decode_rows: int = 256
    decode_chunk: int = 64
    prefill_chunk: int = 1024
    fixed_bytes: int = 3072

    def chunk(self, rows: int) -> int:
        """Slots of a split when there are `rows` rows."""
        return self.decode_chunk if rows <= self.decode_rows else self.prefill_chunk

    def splits(self, rows: int, width: int) -> int:
        """Splits of a row with `width` slots."""
        return -(-width // self.chunk(rows))

    def peak_rows(self, most_rows: int, width: int) -> int:
        """The row count at or below `most_rows` that needs the most partial rows.

        Partial rows grow with rows while the chunk stays, so only the ends of the two stretches can be it.
        """
        ends = {min(most_rows, self.decode_rows), most_rows}
        return max(ends, key=lambda rows: (rows * self.splits(rows, width), -rows))

    def call_bytes(self, rows: int, width: int, *, most_rows: int) -> int:
        """Scratch of one call.

        Args:
            rows: Rows of the call.
            width: Slots of a row.
            most_rows: Rows that the final LSE is sized for.
        """
        partial = rows * self.splits(rows, width)
        return partial * self.heads * (2 * _VALUES + 4) + most_rows * self.heads * 4 + self.fixed_bytes

    def reserve_bytes(self, most_rows: int, width: int) -> int:
        """Scratch that is enough for every call of at most `most_rows` rows and `width` slots."""
        return self.call_bytes(self.peak_rows(most_rows, width), width, most_rows=most_rows)

    def check_reserve(self, reserved_bytes: int, *, most_rows: int, width: int) -> None:
        """Refuses a reserve that some call at or below the caps overruns.

        Raises:
            WorkspaceError: Names the peak.
        """
        needed = self.reserve_bytes(most_rows, width)
        if reserved_bytes < needed:
            rows = self.peak_rows(most_rows, width)
            raise WorkspaceError(
                "reserved bytes",
                got=f"{reserved_bytes} ({reserved_bytes / _MEBIBYTE:.2f} MiB)",
                expected=f"at least {needed} ({needed / _MEBIBYTE:.2f} MiB)",
                detail=f"peak at {rows} rows, {self.splits(rows, width)} splits, {self.heads} heads, width {width}",
            )

    def check_locked(self, locked_bytes: int, *, rows: int, width: int, most_rows: int) -> None:
        """Refuses a call that would grow a scratch locked for graph capture.

        Raises:
            WorkspaceError: Names both sizes.
        """
        needed = self.call_bytes(rows, width, most_rows=most_rows)
        if needed > locked_bytes:
            raise WorkspaceError(
                "locked bytes",
                got=f"{locked_bytes} ({locked_bytes / _MEBIBYTE:.2f} MiB)",
                expected=f"at least {needed} ({needed / _MEBIBYTE:.2f} MiB)",
                detail=f"{rows} rows, {self.splits(rows, width)} splits; captured graphs hold the old addresses",
            )


def check_decode_rows(declared: int, *, sequences: int, speculative_tokens: int, floor: int = 256) -> int:
    """Checks a declared decode row capacity against the verify queries of speculative decoding.

    Args:
        declared: What the configuration says; smaller values than `floor` act as the floor.
        sequences: Most sequences of a batch.
        speculative_tokens: Draft tokens of a sequence.
        floor: The kernel's least capacity.

    Returns:
        The capacity in effect.

    Raises:
        ValueRangeError: `declared` is not positive.
        CapacityError: More verify queries than the capacity.
    """
    if declared < 1:
        raise ValueRangeError("decode row capacity", got=declared, expected="at least 1")
    capacity, needed = max(declared, floor), sequences * (1 + speculative_tokens)
    if needed > capacity:
        raise CapacityError(
            "decode row capacity",
            got=capacity,
            expected=f"at least {needed}",
            detail=f"{sequences} sequences * (1 + {speculative_tokens} speculative tokens)",
        )
    return capacity
