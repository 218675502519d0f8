"""Predicted time of every shape before any GPU ran it: bytes, FLOP and instructions against an H200.

    tile       decode | scores | softmax | values   cycles of a block      counts from source constants and disassembly
               one SM: max(sums of matrix, shared memory and issue cycles, serial chain / resident blocks)
    call       launch + waves of tiles + merge of splits

Counts are facts: of bytes and FLOP by arithmetic, of matrix instructions and copies equal to what the emulator counts,
of decode and softmax instructions by disassembly. Latencies and the share of the peak that mma.sync reaches are
estimates, marked below; nothing was measured. benchmarks/gpu_predict.py writes the table into docs/cuda.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.kernels import cuda_build, cuda_tiles, nvrtc, static_evidence
from kvbridge.kernels.cuda_arguments import Launch, Switches
from kvbridge.kernels.cuda_tiles import THREADS, Variant
from kvbridge.kernels.plan import Caps, Mode, Plan, plan
from kvbridge.kernels.roofline import H200, Machine, roofline
from kvbridge.records import get_record

_WARPS = THREADS // 32
_MMA_FLOP = 2 * 16 * 8 * 16

# Estimates, in cycles unless said otherwise; to be replaced by what benchmarks/gpu_probe.py measures.
MMA_SYNC_SHARE = 0.62  # of the peak that wgmma reaches (facts on H100-class parts: 60 to 65 %)
_MMA_LATENCY = 33  # from one m16n8k16 to the next that needs its sums
_SHUFFLE_LATENCY = 23
_SHARED_LATENCY = 30
_BARRIER = 30
_SOFTMAX_SHUFFLES = 15
_COPY_INSTRUCTIONS = 14  # index arithmetic around one cp.async of a thread
_LOOP_INSTRUCTIONS = 10  # index arithmetic around one chunk of 16 values
_PROLOGUE = 2200  # lengths, slots and the first rows: three dependent trips to memory
_EPILOGUE = 900
_LAUNCH_NS = 2500.0
_SECOND_LAUNCH_NS = 1500.0
_L2_BYTES_PER_CYCLE = 64  # of one SM
_L2_LATENCY = 270


@dataclass(frozen=True, slots=True)
class TileCounts:
    """What one block does for one tile of tokens; warp instructions, unless bytes are named.

    Attributes:
        copies: cp.async of threads.
        copied_bytes: From memory to the raw ring.
        chunks: Runs of 16 values that threads decode.
        matrix_loads: ldmatrix.
        multiplies: mma.m16n8k16.
        shared_bytes: Read and written in shared memory.
    """

    copies: int
    copied_bytes: int
    chunks: int
    matrix_loads: int
    multiplies: int
    shared_bytes: int

    @property
    def flop(self) -> int:
        """Of the matrix instructions."""
        return self.multiplies * _MMA_FLOP


def tile_counts(variant: Variant, record: str) -> TileCounts:
    """Counts from the constants of src/cuda/shared.cuh and the loops of gather.cuh and attend.cuh."""
    form, heads, tokens, d_qk = get_record(record), variant.heads, variant.tokens, variant.d_qk
    head_tiles, token_tiles, value_tiles = heads // 8, tokens // 16, 512 // 16 // _WARPS
    pairs = token_tiles * head_tiles
    parts = 1 if pairs >= _WARPS else _WARPS // pairs
    heads_each = pairs // _WARPS if pairs > _WARPS else 1
    steps = d_qk // 16 // parts
    scales = 0 if form.arrangement == "interleaved" else form.block_bytes("scales")
    data = form.row_bytes - scales
    copies = tokens * (data // 16 + scales // 8)
    scores_loads, scores_mma = _WARPS * steps * (1 + heads_each), _WARPS * steps * heads_each
    values_loads = _WARPS * token_tiles * (value_tiles + head_tiles)
    values_mma = _WARPS * token_tiles * value_tiles * head_tiles
    raw, keys = tokens * form.row_bytes, tokens * d_qk * 2
    loaded = _WARPS * steps * (512 + 256 * heads_each) + _WARPS * token_tiles * (512 * value_tiles + 256 * head_tiles)
    scores = 2 * parts * heads * tokens * 4 + heads * tokens * 2
    return TileCounts(
        copies=copies,
        copied_bytes=raw,
        chunks=tokens * d_qk // 16,
        matrix_loads=scores_loads + values_loads,
        multiplies=scores_mma + values_mma,
        shared_bytes=2 * raw + keys + loaded + scores,
    )


@dataclass(frozen=True, slots=True)
class Instructions:
    """What only the disassembly says, for one architecture.

    Attributes:
        chunk: Instructions of a thread that decodes 16 values and stores them.
        softmax: Instructions of a warp for one head of a tile.
        registers: Of a thread of the decode kernel.
    """

    chunk: int
    softmax: int
    registers: int


_PROBES = """
#include "finish.cuh"
#include "gather.cuh"
template <int Format> __global__ void decode_probe(int chunk) {
  KVB_DYNAMIC_SHARED(memory);
  uint32_t values[8];
  decode_chunk<Format>(memory + thread_index() * 1152, RecordTraits<Format>::codes ? chunk & 15 : chunk, values);
  store_values(reinterpret_cast<uint16_t*>(memory + 65536) + thread_index() * 16, values);
}
template <int Formats> __global__ void softmax_probe(float scale) {
  KVB_DYNAMIC_SHARED(memory);
  using Layout = Tile<Formats, 8, 32, 2>;
  typename Layout::Shared& shared = *reinterpret_cast<typename Layout::Shared*>(memory);
  update_softmax<Layout, 32>(shared, shared.data, scale);
}
"""


def disassembled(variant: Variant, record: str, arch: str) -> Instructions:
    """Compiles the decode of one chunk and the softmax of one head alone, and counts.

    Counts include rare branches (scale bytes outside 3..134), so they are bounds from above.

    Raises:
        CudaBuildError: It does not compile.
        EvidenceError: It cannot be disassembled.
    """
    names = (f"decode_probe<{cuda_tiles.FORMATS[record]}>", f"softmax_probe<{variant.formats}>")
    options = (f"-arch={arch}", *cuda_build.OPTIONS)
    what = f"cost probes for {arch}"
    program = nvrtc.compile_program(_PROBES, headers=cuda_build.sources(), names=names, options=options, what=what)
    functions = static_evidence.disassemble(program.content)
    chunk, softmax = (functions[symbol] for symbol in program.symbols)
    # A loop unrolled or split by the compiler shows as a multiple of the shuffles that one head takes.
    copies = max(1, round(softmax.count("SHFL") / _SOFTMAX_SHUFFLES))
    registers = static_evidence.collect(variant, arch).decode.registers
    return Instructions(_executed(chunk), _executed(softmax) // copies, registers)


def _executed(function: static_evidence.Function) -> int:
    return function.instructions.total() - function.count("NOP") - function.count("BRA")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted call.

    Attributes:
        ns: Of the call, launch included.
        limit: What bounds the tiles: `serial chain`, `matrix`, `shared memory`, `issue` or `memory`; or `launch` or
            `merge` where these take longer than the tiles.
        splits: Runs of a query's slots.
        blocks: Of the launch.
        tile_cycles: Of one tile on one SM.
    """

    ns: float
    limit: str
    splits: int
    blocks: int
    tile_cycles: float


def tile_cycles(
    variant: Variant, record: str, instructions: Instructions, *, resident: int, machine: Machine = H200
) -> dict[str, float]:
    """Cycles of one tile on one SM, by what could bound it; the longest does."""
    counts = tile_counts(variant, record)
    chunk_issue = counts.chunks / 32 * (instructions.chunk + _LOOP_INSTRUCTIONS)
    copy_issue = counts.copies / 32 * (1 + _COPY_INSTRUCTIONS)
    softmax_issue = variant.heads * instructions.softmax
    rescale = _WARPS * variant.heads // 8 * 4 * 4
    issue = (chunk_issue + copy_issue + softmax_issue + rescale + 1.3 * (counts.matrix_loads + counts.multiplies)) / (
        machine.issues_per_cycle
    )
    matrix = counts.flop / (machine.flop_per_cycle * MMA_SYNC_SHARE)
    shared = counts.shared_bytes / machine.shared_bytes_per_cycle
    chains = phase_cycles(variant, counts, instructions, machine)
    return {
        "serial chain": sum(chains.values()) / resident,
        "matrix": matrix,
        "shared memory": shared,
        "issue": issue,
        "memory": counts.copied_bytes / _L2_BYTES_PER_CYCLE,
    }


def phase_cycles(
    variant: Variant, counts: TileCounts, instructions: Instructions, machine: Machine = H200
) -> dict[str, float]:
    """Cycles of each phase of a block that is alone on its SM: barriers keep phases apart."""
    pairs = variant.tokens // 16 * (variant.heads // 8)
    parts = 1 if pairs >= _WARPS else _WARPS // pairs
    steps, scores_each = variant.d_qk // 16 // parts, max(1, pairs // _WARPS)
    matrix = counts.flop / (machine.flop_per_cycle * MMA_SYNC_SHARE) / 2
    chunk = counts.chunks / 32 * (instructions.chunk + _LOOP_INSTRUCTIONS) / machine.issues_per_cycle
    copy = counts.copies / 32 * (1 + _COPY_INSTRUCTIONS) / machine.issues_per_cycle
    head = _SOFTMAX_SHUFFLES * _SHUFFLE_LATENCY + 4 * _SHARED_LATENCY
    together = min(4, variant.heads // _WARPS)  # heads of a warp whose shuffles overlap
    issue = together * instructions.softmax * _WARPS / machine.issues_per_cycle
    softmax = variant.heads // _WARPS // together * max(head, issue)
    return {
        "decode": chunk + 2 * _SHARED_LATENCY + _BARRIER,
        "issue of copies": copy + _BARRIER,
        "scores": max(matrix, steps * (_MMA_LATENCY + 2 * (scores_each - 1))) + _SHARED_LATENCY + _BARRIER,
        "softmax": softmax + _BARRIER,
        "values": max(matrix, variant.tokens // 16 * (_MMA_LATENCY + 2 * _SHARED_LATENCY)) + _BARRIER,
    }


def resident_blocks(variant: Variant, registers: int, machine: Machine = H200) -> int:
    """Blocks that fit on one SM: registers in units of eight a thread, 1 KiB of shared memory for the system."""
    by_registers = machine.registers // (-(-registers // 8) * 8 * THREADS)
    return max(1, min(by_registers, machine.shared_bytes // (variant.shared_bytes + 1024), 2048 // THREADS))


def merge_ns(launch: Launch, *, queries: int, splits: int, machine: Machine = H200) -> float:
    """Merging the splits of a call: one block for each (query, head tile), or a launch with a block for each head.

    Args:
        launch: Variant and switches.
        queries: Of the call.
        splits: Of the call.
        machine: The GPU.
    """
    if splits == 1:
        return 0.0
    row_bytes = 515 * 4 * splits
    trips = 2 + -(-splits // 4)  # states, then four splits at a time, then the sink
    if launch.fuses(splits):
        rounds = -(-launch.variant.heads // 2)  # 256 threads take two heads at a time
        cycles = max(launch.variant.heads * row_bytes / _L2_BYTES_PER_CYCLE, rounds * trips * _L2_LATENCY / 4)
        return (cycles + 2 * _L2_LATENCY) / machine.clock_hz * 1e9
    blocks = queries * launch.head_tiles * launch.variant.heads
    each = -(-blocks // machine.multiprocessors)
    cycles = max(each * row_bytes / _L2_BYTES_PER_CYCLE, -(-each // 4) * trips * _L2_LATENCY)
    return _SECOND_LAUNCH_NS + cycles / machine.clock_hz * 1e9


def predict(
    served: Plan, variant: Variant, instructions: Instructions, *, queries: int, machine: Machine = H200
) -> Prediction:
    """Predicted time of a call at its plan's widths.

    Args:
        served: The plan; all slots are live.
        variant: Compiled template arguments.
        instructions: From the disassembly.
        queries: Of the call.
        machine: The GPU.
    """
    record, widths = served.caps.records[0], served.caps.widths
    groups = -(-served.caps.heads // variant.heads)
    tiles = sum(-(-width // variant.tokens) for width in widths)
    cut = cuda_tiles.splits(
        served, variant, multiprocessors=machine.multiprocessors, queries=queries, width=sum(widths)
    )
    blocks = queries * groups * cut
    busiest = -(-blocks // machine.multiprocessors)
    resident = min(busiest, resident_blocks(variant, instructions.registers, machine))
    cycles = tile_cycles(variant, record, instructions, resident=resident, machine=machine)
    limit = max(cycles, key=lambda name: cycles[name])
    each = -(-tiles // cut)
    waves = -(-busiest // resident)
    work = busiest * each * cycles[limit] / machine.clock_hz * 1e9
    floor = roofline(heads=served.caps.heads, slots=sum(widths), queries=queries, record=record, machine=machine)
    partial = 2 * blocks * cuda_tiles.block_bytes(variant) if cut > 1 else 0
    memory = floor.memory_ns + partial / machine.bytes_per_second * 1e9
    if memory > work:
        work, limit = memory, "memory"
    ends = waves * (_PROLOGUE + _EPILOGUE) / machine.clock_hz * 1e9
    launch = Launch(served, variant, machine.multiprocessors, Switches(wide_merge=True))
    merged = merge_ns(launch, queries=queries, splits=cut, machine=machine)
    limit = max(((work, limit), (merged, "merge"), (_LAUNCH_NS + ends, "launch")))[1]
    return Prediction(_LAUNCH_NS + ends + work + merged, limit, cut, blocks, max(cycles.values()))


def served_plan(heads: int, slots: int, queries: int, mode: Mode = Mode.DEFAULT) -> Plan:
    """DeepSeek-V4's call: a window of 128 slots and the rest from the compressed cache."""
    return plan(Caps(queries=queries, heads=heads, widths=(128, slots - 128), records=("v4", "v4"), mode=mode))
