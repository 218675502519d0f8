"""Byte parity of both engines' writers and kvbridge's codec: every differing byte is put under a named cause.

    rows --SGLang's writer--> SGLang's pool --PageView--> bytes ┐
         --vLLM's writer---> vLLM's slab ---PageView--> bytes ├─ compare: equal, or one of the causes, or unexplained
         --kvbridge.codec----------------------------> bytes ┘

`python -m tests.parity.byte_parity` prints the table of the README. A cause is a prediction: applied to one side's
bytes it must give the other side's bytes, else they count as unexplained.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvbridge.codec import quantise
from tests.environments import run_in_engine
from tests.parity.parity_rows import COUNT, SEED, make_queries, make_rows

PROGRAMS = Path(__file__).resolve().parent / "programs"
SMALLEST_NORMAL = 2.0**-6
"""Smallest normal e4m3 value; vLLM's CPU writer knows no smaller code."""

FLUSH = "subnormal codes written as 0 (vLLM 0.32.0 csrc/cpu/sgl-kernels: e4m3 conversion)"
FLOOR = "scale floor 1e-4 (vLLM CPU) instead of amax floor 1e-4 (SGLang store.cuh)"
ZERO_SIGN = "sign of a zero lost in the rotation by cos 1, sin 0"
HELPER_FLOOR = "amax floor 1e-8 of SGLang's test helper instead of 1e-4"
RECIPROCAL = "product with 1 / scale (SGLang dsa_quant_k_cache.py) instead of a quotient"
NO_FLOOR = "no floor: a zero tile has scale 0 and codes of -448 (SGLang dsa_quant_k_cache.py)"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two writers' bytes of the same rows.

    Attributes:
        left, right: Who wrote.
        record: Record.
        page_rows: Rows of the pages, 0 where no pages are involved.
        rows: Rows compared.
        compared: Bytes compared.
        causes: Bytes that differ, by cause.
        unexplained: Bytes that differ otherwise.
    """

    left: str
    right: str
    record: str
    page_rows: int
    rows: int
    compared: int
    causes: dict[str, int] = field(default_factory=dict)
    unexplained: int = 0

    def line(self) -> str:
        """A row of the Markdown table."""
        causes = "; ".join(f"{count:,} {cause}" for cause, count in self.causes.items() if count) or "none"
        return (
            f"| {self.record} | {self.page_rows or '-'} | {self.left} | {self.right} | {self.rows:,} | "
            f"{self.compared:,} | {causes} | {self.unexplained} |"
        )


HEADER = (
    "| record | page rows | left | right | rows | bytes | differing bytes by cause | unexplained |\n"
    "|---|---:|---|---|---:|---:|---|---:|"
)


def make_inputs(path: Path) -> dict[str, torch.Tensor]:
    """Writes the rows, index keys with scales, and queries, from which everything follows."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = {
        "rows": make_rows(),
        "rope": torch.randn(COUNT, 64, generator=generator).bfloat16(),
        "index_keys": torch.randint(0, 256, (COUNT, 128), generator=generator, dtype=torch.uint8),
        "index_scales": torch.rand(COUNT, 1, generator=generator),
    } | make_queries()
    save_file(inputs, path)
    return inputs


def written_by(engine: str, inputs: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Bytes that one engine's writers left in its own pools."""
    out = folder / f"{engine}.safetensors"
    workarounds = ("triton-interpreter",) if engine == "sglang" else ()
    run_in_engine(engine, [PROGRAMS / f"{engine}_writer.py", inputs, out], workarounds=workarounds)
    return load_file(out)


def compare(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """bool `[rows, bytes]`: where two writers differ."""
    assert left.shape == right.shape, (left.shape, right.shape)
    return left != right


def sglang_and_codec(inputs: dict[str, torch.Tensor], sglang: dict[str, torch.Tensor]) -> Iterator[Comparison]:
    """SGLang's bytes against the codec's under the same named scale rule."""
    rows, full = inputs["rows"], torch.cat([inputs["rows"], inputs["rope"]], dim=-1)
    v4 = quantise(rows, "v4", rule="amax_floor")
    for page_rows in (256, 64, 2):
        bytes_ = sglang[f"v4.{page_rows}"]
        yield _plain(("SGLang writer", "codec amax_floor"), "v4", page_rows, bytes_, v4)
    differ = compare(sglang["v4-helper.64"], v4)
    causes = {HELPER_FLOOR: _small_tiles(rows, below=1e-4)}
    yield _explained(("SGLang helper", "codec amax_floor"), 64, differ, causes)
    for record in ("v41", "v41_fp4"):
        expected = quantise(rows, record)
        for layout, title in ((record, record), (f"{record}_new", f"{record}_interleaved")):
            yield _plain(("SGLang reference", "codec"), title, 64, sglang[layout], expected)
    uniform = quantise(rows, "uniform_fp8", external_scale=1.0)
    yield _plain(("SGLang pool", "codec scale 1"), "uniform_fp8", 64, sglang["uniform_fp8"], uniform)
    yield _plain(("SGLang pool", "codec"), "mla_bf16", 64, sglang["mla_bf16"], quantise(full, "mla_bf16"))
    fp8 = quantise(full, "mla_fp8", external_scale=1.0)
    yield _plain(("SGLang pool", "codec scale 1"), "mla_fp8", 64, sglang["mla_fp8"], fp8)
    yield _sparse_attention(full, sglang["dsa"])
    keys = torch.cat([inputs["index_keys"], inputs["index_scales"].view(torch.uint8)], dim=-1)
    yield _plain(("SGLang writer", "given bytes"), "indexer_fp8", 64, sglang["indexer_fp8"], keys)


def sglang_and_vllm(
    inputs: dict[str, torch.Tensor], sglang: dict[str, torch.Tensor], vllm: dict[str, torch.Tensor]
) -> Iterator[Comparison]:
    """The same rows out of both engines' own caches."""
    for pool, page_rows in (("swa", 64), ("c4", 64), ("c128", 2)):
        bytes_ = vllm[pool]
        other = sglang[f"v4.{page_rows}"][: len(bytes_)]
        rows = inputs["rows"][: len(bytes_)]
        yield _engines(rows, other, bytes_, page_rows)


def vllm_and_codec(inputs: dict[str, torch.Tensor], vllm: dict[str, torch.Tensor]) -> Iterator[Comparison]:
    """vLLM's bytes against the codec's under the rule scale_floor."""
    for pool, page_rows in (("swa", 64), ("c4", 64), ("c128", 2)):
        rows = inputs["rows"][: len(vllm[pool])]
        expected = quantise(rows, "v4", rule="scale_floor")
        differ = compare(vllm[pool], expected)
        causes = {FLUSH: _flushed(rows, expected), ZERO_SIGN: _zero_signs(rows)}
        zeros = (vllm[pool] & 0x7F) == 0
        yield _explained(("vLLM writer", "codec scale_floor"), page_rows, differ, causes, zeros=zeros)


def _plain(sides: tuple[str, str], record: str, page_rows: int, a: torch.Tensor, b: torch.Tensor) -> Comparison:
    differ = int(compare(a, b).sum())
    return Comparison(*sides, record, page_rows, len(a), a.numel(), {}, differ)


def _explained(
    sides: tuple[str, str],
    page_rows: int,
    differ: torch.Tensor,
    causes: dict[str, torch.Tensor],
    *,
    zeros: torch.Tensor | None = None,
) -> Comparison:
    """Counts differing bytes of V4 rows by the first cause whose mask covers them.

    Args:
        sides: Who wrote.
        page_rows: Rows of a page.
        differ: Where they differ.
        causes: Masks.
        zeros: Where one side wrote zero codes; given when all causes can only do that.
    """
    counts: dict[str, int] = {}
    rest = differ.clone()
    for cause, mask in causes.items():
        hit = rest & mask if zeros is None else rest & mask & zeros
        counts[cause] = int(hit.sum())
        rest &= ~hit
    return Comparison(*sides, "v4", page_rows, len(differ), differ.numel(), counts, int(rest.sum()))


def _engines(rows: torch.Tensor, sglang: torch.Tensor, vllm: torch.Tensor, page_rows: int) -> Comparison:
    """SGLang against vLLM: a tile under another scale differs as a whole, others in flushed codes and zero signs."""
    differ = compare(sglang, vllm)
    floor = _small_tiles(rows, below=448e-4)
    # The floor is a prediction too: under it SGLang's tiles must be what the codec's scale_floor gives.
    predicted = quantise(rows, "v4", rule="scale_floor")
    flushed = _flushed(rows, predicted)
    predicted = torch.where(flushed, predicted & 0x80, predicted)
    signs = _zero_signs(rows)
    wrong = (predicted != vllm) & ~(((predicted ^ vllm) == 0x80) & (signs | flushed))
    counts = {FLOOR: int((differ & floor).sum())}
    rest = differ & ~floor
    counts[FLUSH] = int((rest & flushed).sum())
    counts[ZERO_SIGN] = int((rest & ~flushed & signs).sum())
    unexplained = int((rest & ~flushed & ~signs).sum()) + int(wrong.sum())
    return Comparison("SGLang writer", "vLLM writer", "v4", page_rows, len(rows), sglang.numel(), counts, unexplained)


def _sparse_attention(full: torch.Tensor, bytes_: torch.Tensor) -> Comparison:
    """dsa rows: scales and codes, tile by tile."""
    expected = quantise(full, "dsa", rule="no_floor")
    differ = compare(bytes_, expected)
    tiles = full[:, :512].float().view(len(full), 4, 128)
    amax = tiles.abs().amax(-1)
    scale = amax / 448.0
    inverse = (1.0 / scale).unsqueeze(-1)
    # 0 * (1 / 0) is NaN, and the kernel's clamp makes that the smallest code: the tile still decodes to zeros.
    quotients = torch.nan_to_num(tiles * inverse, nan=-448.0).clamp(-448.0, 448.0)
    codes = quotients.to(torch.float8_e4m3fn).view(torch.uint8).view(len(full), 512)
    right = bytes_ == torch.cat([codes, scale.view(torch.uint8), expected[:, 528:]], dim=-1)
    zero = torch.zeros_like(right)
    zero[:, :512] = (amax == 0).repeat_interleave(128, 1)
    zero[:, 512:528] = (amax == 0).repeat_interleave(4, 1)
    counts = {NO_FLOOR: int((differ & zero & right).sum()), RECIPROCAL: int((differ & ~zero & right).sum())}
    return Comparison(
        "SGLang pool", "codec no_floor", "dsa", 64, len(full), bytes_.numel(), counts, int((differ & ~right).sum())
    )


def _small_tiles(rows: torch.Tensor, *, below: float) -> torch.Tensor:
    """Bytes of V4 rows that belong to a tile whose largest magnitude is below a bound: its codes and its scale."""
    small = rows[:, :448].float().view(len(rows), 7, 64).abs().amax(-1) < below
    mask = torch.zeros(len(rows), 584, dtype=torch.bool)
    mask[:, :448] = small.repeat_interleave(64, 1)
    mask[:, 576:583] = small
    return mask


def _flushed(rows: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
    """Code bytes of V4 rows whose value lies below the smallest normal code under the scale that was written."""
    scale = torch.exp2(encoded[:, 576:583].float() - 127).repeat_interleave(64, 1)
    mask = torch.zeros(len(rows), 584, dtype=torch.bool)
    mask[:, :448] = rows[:, :448].float().abs() < SMALLEST_NORMAL * scale
    return mask


def _zero_signs(rows: torch.Tensor) -> torch.Tensor:
    """High bytes of RoPE values that are zero, or too small for the rotation's fp32 products to keep."""
    mask = torch.zeros(len(rows), 584, dtype=torch.bool)
    mask[:, 449:576:2] = rows[:, 448:] == 0
    return mask


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder / "rows.safetensors")
        sglang = written_by("sglang", folder / "rows.safetensors", folder)
        vllm = written_by("vllm", folder / "rows.safetensors", folder)
    print(HEADER)
    for comparison in (
        *sglang_and_codec(inputs, sglang),
        *vllm_and_codec(inputs, vllm),
        *sglang_and_vllm(inputs, sglang, vllm),
    ):
        print(comparison.line())


if __name__ == "__main__":
    main()
