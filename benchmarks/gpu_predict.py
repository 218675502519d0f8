"""Writes what the cost model predicts for an H200 into docs/cuda.md and benchmarks/predicted_h200.json.

    python benchmarks/gpu_predict.py            needs NVRTC and the disassemblers, no GPU
    python benchmarks/gpu_predict.py --check    exit 1 if the files say something else

gpu_run.py puts the predictions beside what it measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvbridge.kernels import cost_model  # noqa: E402
from kvbridge.kernels.cuda_tiles import choose_variant  # noqa: E402
from kvbridge.kernels.roofline import H200, roofline  # noqa: E402

DOCUMENT, FIGURES = ROOT / "docs" / "cuda.md", ROOT / "benchmarks" / "predicted_h200.json"
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"
HEADS, SLOTS, QUERIES = (8, 16, 64, 128), (640, 1152, 2176), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def predictions() -> Iterator[dict[str, object]]:
    """One entry for each shape."""
    for heads in HEADS:
        variant = choose_variant(cost_model.served_plan(heads, 640, 1), H200.capability)
        instructions = cost_model.disassembled(variant, "v4", "sm_90a")
        for slots in SLOTS:
            for queries in QUERIES:
                found = cost_model.predict(
                    cost_model.served_plan(heads, slots, queries), variant, instructions, queries=queries
                )
                floor = roofline(heads=heads, slots=slots, queries=queries)
                yield {
                    "heads": heads,
                    "slots": slots,
                    "queries": queries,
                    "tile": variant.heads,
                    "splits": found.splits,
                    "blocks": found.blocks,
                    "predicted_us": round(found.ns / 1000, 1),
                    "limit": found.limit,
                    "roofline_us": round(floor.ns / 1000, 2),
                    "roofline_bound": floor.bound,
                    "tile_cycles": round(found.tile_cycles),
                }


def table(rows: list[dict[str, object]]) -> str:
    """Markdown, one line for each shape."""
    columns = ("heads", "slots", "queries", "tile", "splits", "blocks", "roofline us", "bound", "predicted us", "limit")
    measured = ("roofline_us", "roofline_bound", "predicted_us", "limit")
    keys = (*columns[:6], *measured)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[key]) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Predicted times of the CUDA kernel on an H200")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    rows = list(predictions())
    before, after = DOCUMENT.read_text().split(BEGIN)[0], DOCUMENT.read_text().split(END)[1]
    document = f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"
    figures = json.dumps(rows, indent=1) + "\n"
    if check:
        stale = [
            str(file.name) for file, text in ((DOCUMENT, document), (FIGURES, figures)) if file.read_text() != text
        ]
        print("stale: " + ", ".join(stale) if stale else "up to date")
        return 1 if stale else 0
    DOCUMENT.write_text(document)
    FIGURES.write_text(figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
