"""The least time a decode call can take: bytes against bandwidth, FLOP against peak.

    max( (rows * record + q + out) / bytes per second,  queries * slots * heads * 2 (d_qk + d_v) / FLOP per second )

Every row is read once and the work is spread perfectly: no kernel beats it, and few queries come nowhere near it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.records import get_record


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU in numbers.

    Attributes:
        name: Of the GPU.
        capability: Compute capability times ten.
        multiprocessors: Streaming multiprocessors (SM).
        clock_hz: Under load.
        bytes_per_second: Of its memory.
        flop_per_second: Dense bf16 with fp32 sums.
        shared_bytes: Shared memory of an SM.
        registers: Of an SM.
        shared_bytes_per_cycle: Of an SM.
        issues_per_cycle: Warp instructions that an SM issues.
    """

    name: str
    capability: int
    multiprocessors: int
    clock_hz: float
    bytes_per_second: float
    flop_per_second: float
    shared_bytes: int = 233_472
    registers: int = 65_536
    shared_bytes_per_cycle: int = 128
    issues_per_cycle: int = 4

    @property
    def flop_per_cycle(self) -> float:
        """Of one SM."""
        return self.flop_per_second / self.multiprocessors / self.clock_hz


H200 = Machine("H200", 90, 132, 1.83e9, 4.3e12, 790e12)


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a call must move and compute, and the least time for that.

    Attributes:
        kv_bytes: Rows that are read.
        query_bytes: q and out, bf16.
        flop: Both products.
        memory_ns: At the machine's bandwidth.
        matrix_ns: At the machine's peak.
    """

    kv_bytes: int
    query_bytes: int
    flop: int
    memory_ns: float
    matrix_ns: float

    @property
    def ns(self) -> float:
        """The longer of the two."""
        return max(self.memory_ns, self.matrix_ns)

    @property
    def bound(self) -> str:
        """`memory` or `matrix`."""
        return "memory" if self.memory_ns >= self.matrix_ns else "matrix"


def roofline(*, heads: int, slots: int, queries: int = 1, record: str = "v4", machine: Machine = H200) -> Roofline:
    """Least time, with the work spread perfectly and every row read once.

    Args:
        heads: Query heads.
        slots: Live slots of a query.
        queries: Queries.
        record: Of all slots.
        machine: The GPU.
    """
    form = get_record(record)
    kv_bytes = queries * slots * form.row_bytes
    query_bytes = queries * heads * 2 * (form.d_qk + form.d_v)
    flop = queries * slots * heads * 2 * (form.d_qk + form.d_v)
    memory = (kv_bytes + query_bytes) / machine.bytes_per_second * 1e9
    return Roofline(kv_bytes, query_bytes, flop, memory, flop / machine.flop_per_second * 1e9)
