"""Decode across engines: the same K rows and queries through each engine's writer, cache and decode, and through ours.

                      SGLang's padded pages            vLLM's packed slab
    its own decode    torch, as on SM120               flash_mla_with_kvcache_cpu
    kvbridge          in place, same call              in place, same call
    float64           the oracle of these bytes        the oracle of these bytes

A pair's bound is derived, not tuned: bf16 output and bf16 probabilities for a kernel against the oracle of its own
bytes, and the distance of the two oracles, which is what the writers' scale floors and flushed subnormals amount to.
`python -m tests.parity.decode_parity` prints the table.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbridge.codec import dequantise, pack_pages
from kvbridge.kernels import mla
from kvbridge.layout import PageLayout
from kvbridge.view import PageView
from tests.parity import byte_parity
from tests.parity.parity_rows import EXTRA, HEADS, QUERIES, WINDOW

SCALE = 512**-0.5
KERNEL_RMS = 2.5e-3
"""design.md section 6: bf16 output and bf16 probabilities against float64 on the same bytes."""

SGLANG_PAGES = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576)
VLLM_PAGES = PageLayout.for_rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=93_888)


def decode(
    rows: torch.Tensor, layout: PageLayout, queries: dict[str, torch.Tensor], *, backend: str | None
) -> torch.Tensor:
    """kvbridge's decode from pages of rows in order.

    Args:
        rows: uint8 `[COUNT, 584]`.
        layout: What the pages are.
        queries: What `make_queries` returns.
        backend: Backend of `kvbridge.kernels.mla`; `reference` gives fp32 from float64.
    """
    pages = pack_pages(rows.view(-1, layout.page_rows, layout.row_bytes), layout, fill=0xFF)
    view = PageView.from_tensor(pages[:, : layout.payload_bytes], layout)
    caps = mla.Caps(queries=QUERIES, heads=HEADS, widths=(WINDOW, EXTRA), records=("v4", "v4"))
    prepared = mla.prepare(mla.plan(caps), backend=backend)
    dtype = torch.float32 if backend == "reference" else torch.bfloat16
    out = torch.empty(QUERIES, HEADS, 512, dtype=dtype)
    caches = [
        mla.Cache(view=view, slots=queries["window_rows"], lengths=queries["window_lengths"]),
        mla.Cache(view=view, slots=queries["extra_rows"], lengths=queries["extra_lengths"]),
    ]
    mla.bind(prepared, q=queries["q"], caches=caches, out=out, scale=SCALE, sink=queries["sink"]).run()
    return out


@dataclass(frozen=True, slots=True)
class Pair:
    """Two outputs of the same queries.

    Attributes:
        left, right: Who decoded what.
        relative_rms: RMS of the difference over the RMS of the right side.
        largest: Largest absolute difference.
        bound: Bound of relative_rms.
        source: What the difference comes from.
    """

    left: str
    right: str
    relative_rms: float
    largest: float
    bound: float
    source: str

    def line(self) -> str:
        """A row of the Markdown table."""
        return (
            f"| {self.left} | {self.right} | {self.relative_rms:.2e} | {self.bound:.2e} | {self.largest:.2e} | "
            f"{self.source} |"
        )


HEADER = "| left | right | relative RMS | bound | largest | source of the difference |\n|---|---|---:|---:|---:|---|"


def pairs(
    queries: dict[str, torch.Tensor], sglang: dict[str, torch.Tensor], vllm: dict[str, torch.Tensor]
) -> Iterator[Pair]:
    """Every pair that says something.

    Args:
        queries: What `make_queries` returns.
        sglang: What SGLang's program left: rows `v4.64` and its decode `decode`.
        vllm: What vLLM's program left: rows `c4` and its decode `decode`.
    """
    sides = {"SGLang's pages": (sglang["v4.64"], SGLANG_PAGES), "vLLM's slab": (vllm["c4"], VLLM_PAGES)}
    oracles = {side: decode(*pages, queries, backend="reference") for side, pages in sides.items()}
    ours = {side: decode(*pages, queries, backend=None) for side, pages in sides.items()}
    engines = {"SGLang's pages": ("SGLang", sglang["decode"]), "vLLM's slab": ("vLLM", vllm["decode"])}
    writers = relative_rms(oracles["SGLang's pages"], oracles["vLLM's slab"])
    rounding = "bf16 output and probabilities"
    floors = "scale floor, flushed subnormals"
    for side, (engine, out) in engines.items():
        yield _pair((f"{engine} on {side}", f"float64 on {side}"), out, oracles[side], KERNEL_RMS, rounding)
        yield _pair((f"kvbridge on {side}", f"float64 on {side}"), ours[side], oracles[side], KERNEL_RMS, rounding)
        yield _pair((f"kvbridge on {side}", f"{engine} on {side}"), ours[side], out, 2 * KERNEL_RMS, rounding)
    left, right = sides
    derived = writers_bound(queries, sglang["v4.64"], vllm["c4"]) / rms(oracles[right])
    yield _pair((f"float64 on {left}", f"float64 on {right}"), oracles[left], oracles[right], derived, floors)
    both = f"{rounding}; {floors}"
    yield _pair(("SGLang", "vLLM"), engines[left][1], engines[right][1], 2 * KERNEL_RMS + writers, both)
    names = (f"kvbridge on {left}", f"kvbridge on {right}")
    yield _pair(names, ours[left], ours[right], 2 * KERNEL_RMS + writers, both)


def writers_bound(queries: dict[str, torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> float:
    """How far two exact outputs can lie apart, given how far the two writers' rows lie apart.

    With K' = K + d every score moves by at most s = max |q . d| * scale, so every probability by a factor within
    exp(-2 s) .. exp(2 s), and the output by at most max |d| + (exp(2 s) - 1) * max |V|.
    """
    keys, others = (dequantise(rows, "v4", dtype=torch.float64) for rows in (left, right))
    change = keys - others
    worst = 0.0
    for query in range(QUERIES):
        window = queries["window_rows"][query, : int(queries["window_lengths"][query])]
        extra = queries["extra_rows"][query, : int(queries["extra_lengths"][query])]
        rows = torch.cat([window, extra])
        score = float((queries["q"][query].double() @ change[rows].T).abs().max()) * SCALE
        values = float(torch.maximum(keys[rows].abs().max(), others[rows].abs().max()))
        worst = max(worst, float(change[rows].abs().max()) + math.expm1(2 * score) * values)
    return worst


def rms(values: torch.Tensor) -> float:
    """Root of the mean square."""
    return math.sqrt(float(values.double().pow(2).mean()))


def relative_rms(left: torch.Tensor, right: torch.Tensor) -> float:
    """RMS of the difference over the RMS of the right side."""
    return rms(left.double() - right.double()) / rms(right)


def _pair(names: tuple[str, str], left: torch.Tensor, right: torch.Tensor, bound: float, source: str) -> Pair:
    largest = float((left.double() - right.double()).abs().max())
    return Pair(*names, relative_rms(left, right), largest, bound, source)


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = byte_parity.make_inputs(folder / "rows.safetensors")
        sglang = byte_parity.written_by("sglang", folder / "rows.safetensors", folder)
        vllm = byte_parity.written_by("vllm", folder / "rows.safetensors", folder)
    print(HEADER)
    for pair in pairs(inputs, sglang, vllm):
        print(pair.line())


if __name__ == "__main__":
    main()
