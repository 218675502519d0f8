"""Time of the decode beside FlashMLA and a plain torch version, under CUDA graphs, with the answers checked.

    python benchmarks/gpu_bench.py --out bench.json [--heads 64] [--slots 640] [--queries 1 512]

V4 rows in 64-row pages aligned to 576 bytes, as FlashMLA wants them: a window of 128 slots and the rest from a second
pool. A graph holds several calls with slots of their own, so that rows come from memory and not from L2. FlashMLA takes
64 or 128 heads only and is given padded queries; once with its schedule kept and once with the schedule computed in the
graph. The torch version gathers rows that were dequantised to bf16 beforehand.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvbridge import PageLayout, PageView  # noqa: E402
from kvbridge.codec import dequantise, gather_rows  # noqa: E402
from kvbridge.kernels import mla  # noqa: E402
from kvbridge.kernels.roofline import roofline  # noqa: E402

HEADS, SLOTS, QUERIES = (8, 16, 64, 128), (640, 1152, 2176), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WINDOW, PAGE_ROWS, SCALE = 128, 64, 512**-0.5
CHECKED_QUERIES = 4
RMS_LIMIT = 2.5e-3


@dataclass(frozen=True)
class Shape:
    """One cell of the benchmark."""

    heads: int
    slots: int
    queries: int


@dataclass
class Data:
    """Tensors of a shape; `sets` lists of slots, one for each call of a graph."""

    q: torch.Tensor
    views: list[PageView]
    sets: list[list[torch.Tensor]]
    sink: torch.Tensor
    out: torch.Tensor


def random_pages(pages: int, device: torch.device, generator: torch.Generator) -> PageView:
    """A pool of V4 rows with finite codes, scales around 2^-6 and normal RoPE values."""
    layout = PageLayout.for_rows("v4", page_rows=PAGE_ROWS, policy="aligned", alignment=576)
    storage = torch.zeros(pages, layout.page_stride_bytes, dtype=torch.uint8, device=device)
    data = storage[:, : PAGE_ROWS * 576].view(pages, PAGE_ROWS, 576)
    codes = torch.randint(0, 0x78, (pages, PAGE_ROWS, 448), device=device, generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, codes.shape, device=device, generator=generator, dtype=torch.uint8)
    data[:, :, :448] = codes | signs << 7
    rope = torch.randn(pages, PAGE_ROWS, 64, device=device, generator=generator).to(torch.bfloat16)
    data[:, :, 448:] = rope.view(torch.uint8)
    scales = storage[:, PAGE_ROWS * 576 : PAGE_ROWS * 584]
    scales[:] = torch.randint(119, 123, scales.shape, device=device, generator=generator, dtype=torch.uint8)
    return PageView.from_tensor(storage[:, : PAGE_ROWS * 584], layout)


def make(shape: Shape, views: list[PageView], sets: int, generator: torch.Generator) -> Data:
    """Random queries and slots over the pools."""
    device = views[0].pages.device
    widths = (WINDOW, shape.slots - WINDOW)

    def slots(view: PageView, width: int) -> torch.Tensor:
        shape_of = (shape.queries, width)
        return torch.randint(0, view.capacity_rows, shape_of, device=device, generator=generator, dtype=torch.int32)

    return Data(
        q=torch.randn(shape.queries, shape.heads, 512, device=device, generator=generator).to(torch.bfloat16),
        views=views,
        sets=[[slots(view, width) for view, width in zip(views, widths, strict=True)] for _ in range(sets)],
        sink=torch.randn(shape.heads, device=device, generator=generator),
        out=torch.empty(shape.queries, shape.heads, 512, dtype=torch.bfloat16, device=device),
    )


def ours(shape: Shape, data: Data, backend: str | None) -> list[Callable[[], object]]:
    """The shared kernel, bound once for each set."""
    caps = mla.Caps(
        queries=shape.queries, heads=shape.heads, widths=(WINDOW, shape.slots - WINDOW), records=("v4", "v4")
    )
    prepared = mla.prepare(mla.plan(caps), device=data.q.device, backend=backend)
    calls: list[Callable[[], object]] = []
    for slots in data.sets:
        caches = [mla.Cache(view=view, slots=each) for view, each in zip(data.views, slots, strict=True)]
        calls.append(mla.bind(prepared, q=data.q, caches=caches, out=data.out, scale=SCALE, sink=data.sink).run)
    return calls


def plain_torch(data: Data, rows: list[torch.Tensor]) -> list[Callable[[], object]]:
    """Gather from bf16 pools, two batched products, softmax with the sink as one more column."""

    def call(slots: list[torch.Tensor]) -> None:
        keys = torch.cat([pool[each.long()] for pool, each in zip(rows, slots, strict=True)], dim=1)
        scores = torch.matmul(data.q, keys.transpose(1, 2)).float() * SCALE
        column = data.sink[None, :, None].expand(scores.shape[0], -1, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        data.out.copy_(torch.matmul(weights.to(torch.bfloat16), keys))

    return [partial(call, slots) for slots in data.sets]


def load_flashmla() -> tuple[str, Any, dict[str, object]] | str:
    """FlashMLA from whichever package loads: (name, module, extra arguments), or why none does."""
    reasons = []
    for name, extra in (("flash_mla", {"use_legacy": True}), ("vllm.third_party.flashmla.flash_mla_interface", {})):
        try:
            if name.startswith("vllm"):
                import_module("vllm._flashmla_C")
            return name, import_module(name), dict(extra)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            reasons.append(f"{name}: {type(error).__name__}: {error}")
    return "; ".join(reasons)


def flashmla(data: Data, module: Any, extra: dict[str, object], *, keep_schedule: bool) -> list[Callable[[], object]]:
    """FlashMLA's sparse decode on the same bytes; queries padded to 64 or 128 heads."""
    queries, heads, _ = data.q.shape
    padded = 64 if heads <= 64 else 128
    q = torch.zeros(queries, 1, padded, 512, dtype=torch.bfloat16, device=data.q.device)
    q[:, 0, :heads] = data.q
    sink = torch.full((padded,), float("-inf"), device=q.device)
    sink[:heads] = data.sink
    pools = [
        view.pages.as_strided(
            (view.num_pages, PAGE_ROWS, 1, 584), (view.page_stride_bytes, 584, 584, 1), view.pages.storage_offset()
        )
        for view in data.views
    ]
    kept = module.get_mla_metadata()[0]

    def call(slots: list[torch.Tensor]) -> None:
        schedule = kept if keep_schedule else module.get_mla_metadata()[0]
        out, _ = module.flash_mla_with_kvcache(
            q=q,
            k_cache=pools[0],
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=schedule,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=slots[0].unsqueeze(1),
            attn_sink=sink,
            extra_k_cache=pools[1],
            extra_indices_in_kvcache=slots[1].unsqueeze(1),
            **extra,
        )
        data.out.copy_(out[:, 0, :heads])

    return [partial(call, slots) for slots in data.sets]


def error_of(data: Data, call: Callable[[], object]) -> float:
    """Relative RMS of some queries of the first set against float64 on the dequantised rows."""
    data.out.fill_(float("nan"))
    call()
    picked = sorted(set(torch.linspace(0, len(data.q) - 1, CHECKED_QUERIES).long().tolist()))
    wrong = size = 0.0
    for query in picked:
        rows = [gather_rows(view, each[query].long()) for view, each in zip(data.views, data.sets[0], strict=True)]
        keys = torch.cat([dequantise(row, "v4", dtype=torch.float64) for row in rows])
        scores = torch.cat([data.q[query].double() @ keys.T * SCALE, data.sink.double()[:, None]], dim=-1)
        expected = torch.softmax(scores, dim=-1)[:, :-1] @ keys
        wrong += (data.out[query].double() - expected).square().sum().item()
        size += expected.square().sum().item()
    return math.sqrt(wrong / size) if size else math.inf


def microseconds(calls: list[Callable[[], object]], device: torch.device, *, replays: int) -> float:
    """Median time of one call: on CUDA of a replayed graph that holds all of them."""
    for call in calls:
        call()
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken: list[float] = []
    for _ in range(replays + 3):
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        taken.append(events[0].elapsed_time(events[1]) * 1000 / len(calls))
    return sorted(taken[3:])[replays // 2]


def cell(
    shape: Shape, data: Data, kernels: dict[str, Callable[[], list[Callable[[], object]]]], replays: int
) -> dict[str, Any]:
    """Times every kernel on one shape and checks each answer; a kernel that fails leaves its reason."""
    floor = roofline(heads=shape.heads, slots=shape.slots, queries=shape.queries).ns / 1000
    row: dict[str, Any] = {"heads": shape.heads, "slots": shape.slots, "queries": shape.queries, "roofline_us": floor}
    for name, make_calls in kernels.items():
        try:
            calls = make_calls()
            rms = error_of(data, calls[0])
            taken = microseconds(calls, data.q.device, replays=replays)
            row[name] = {"us": taken, "rms": rms, "correct": rms <= RMS_LIMIT}
        except Exception as error:  # one kernel that fails must not cost the others theirs
            row[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    return row


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="gpu_bench.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--slots", type=int, nargs="+", default=SLOTS, help=f"each above {WINDOW}")
    parser.add_argument("--queries", type=int, nargs="+", default=QUERIES)
    parser.add_argument("--device", default="cuda", help="cpu: the CPU backend beside torch, to try the script")
    parser.add_argument("--pages", type=int, default=8192, help="of each pool; rows must not fit in L2")
    parser.add_argument("--sets", type=int, default=8, help="calls of a graph, each with slots of its own")
    parser.add_argument("--replays", type=int, default=20)
    chosen = parser.parse_args(arguments)
    if min(chosen.slots) <= WINDOW:
        parser.error(f"--slots: got {min(chosen.slots)}, expected more than the window of {WINDOW}")
    device = torch.device(chosen.device)
    on_gpu = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(0)
    views = [random_pages(chosen.pages, device, generator) for _ in range(2)]
    rows = [dequantise(gather_rows(view, torch.arange(view.capacity_rows, device=device)), "v4") for view in views]
    rows = [pool.to(torch.bfloat16) for pool in rows]
    flash = load_flashmla() if on_gpu else "not on a CPU"
    results = []
    for heads in chosen.heads:
        for slots in chosen.slots:
            for queries in chosen.queries:
                shape = Shape(heads, slots, queries)
                data = make(shape, views, chosen.sets, generator)
                kernels = _kernels(shape, data, rows, flash, on_gpu)
                results.append(cell(shape, data, kernels, chosen.replays))
                print(json.dumps(results[-1]), flush=True)
    report = {
        "schema_version": 1,
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "torch": torch.__version__,
        "flashmla": flash if isinstance(flash, str) else flash[0],
        "rows": results,
    }
    chosen.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return 0


def _kernels(
    shape: Shape, data: Data, rows: list[torch.Tensor], flash: tuple[str, Any, dict[str, object]] | str, on_gpu: bool
) -> dict[str, Callable[[], list[Callable[[], object]]]]:
    kernels: dict[str, Callable[[], list[Callable[[], object]]]] = {
        "kvbridge": lambda: ours(shape, data, "cuda" if on_gpu else None),
        "torch": lambda: plain_torch(data, rows),
    }
    if on_gpu:
        kernels["kvbridge_separate"] = lambda: ours(shape, data, "cuda:separate-merge")
    if not isinstance(flash, str):
        _, module, extra = flash
        kernels["flashmla"] = lambda: flashmla(data, module, extra, keep_schedule=True)
        kernels["flashmla_scheduled"] = lambda: flashmla(data, module, extra, keep_schedule=False)
    return kernels


if __name__ == "__main__":
    raise SystemExit(main())
