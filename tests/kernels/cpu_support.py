"""Caches with random bytes and a float64 oracle for the CPU backend's tests.

    page (page_stride_bytes) = | payload: regions of the record, random | pad: NaN patterns |

Nothing here quantises: random codes and scales are written straight into the pages, so subnormal codes, every scale
byte and odd strides occur; the oracle reads the same bytes through the record's regions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvbridge.kernels import cpu
from kvbridge.records import Encoding, ScaleRule, get_record

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass
class Cache:
    """A paged cache: `storage` holds it, `view` is [num_pages, page_stride_bytes] of it as far as bytes exist."""

    record: str
    page_rows: int
    num_pages: int
    page_stride_bytes: int
    offset_bytes: int
    storage: torch.Tensor
    external_scale: float = 1.0

    @property
    def capacity(self) -> int:
        return self.num_pages * self.page_rows

    def region(self, name: str) -> torch.Tensor:
        """[num_pages, page_rows, row_bytes] of one field, sharing the storage."""
        region = next(r for r in get_record(self.record).regions(self.page_rows) if r.name == name)
        shape = (self.num_pages, self.page_rows, region.row_bytes)
        return torch.as_strided(
            self.storage, shape, (self.page_stride_bytes, region.row_stride, 1), self.offset_bytes + region.offset
        )

    def arguments(
        self, slots: torch.Tensor, lengths: torch.Tensor | None = None, row_of_query: torch.Tensor | None = None
    ) -> cpu.CacheArguments:
        return cpu.CacheArguments(
            base=self.storage.data_ptr() + self.offset_bytes,
            num_pages=self.num_pages,
            page_rows=self.page_rows,
            page_stride_bytes=self.page_stride_bytes,
            record=self.record,
            slots=slots,
            lengths=lengths,
            row_of_query=row_of_query,
            external_scale=self.external_scale,
        )


def random_bytes(encoding: Encoding, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random bytes of one field: [pages, rows, row_bytes]."""
    if encoding is Encoding.BF16:
        values = torch.randn(*shape[:2], shape[2] // 2, generator=generator)
        return values.to(torch.bfloat16).view(torch.uint8)
    if encoding is Encoding.FP32:
        scales = torch.rand(*shape[:2], shape[2] // 4, generator=generator) * 0.02 + 1e-3
        return scales.view(torch.uint8)
    if encoding is Encoding.UE8M0:
        return torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8)
    if encoding is Encoding.UNUSED:
        return torch.full(shape, 0xFF, dtype=torch.uint8)
    if encoding is Encoding.E2M1:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    values = torch.randn(shape, generator=generator) * 24  # e4m3: normal, so that a few codes are subnormal or large
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def make_cache(
    record: str,
    *,
    page_rows: int,
    num_pages: int,
    pad_bytes: int = 0,
    offset_bytes: int = 0,
    tail_bytes: int = 64,
    seed: int = 0,
) -> Cache:
    """A cache of random rows; pad bytes and everything outside the payload hold 0xFF, a NaN in every encoding."""
    generator = torch.Generator().manual_seed(seed)
    found = get_record(record)
    payload = page_rows * found.row_bytes
    stride = payload + pad_bytes
    storage = torch.full((offset_bytes + (num_pages - 1) * stride + payload + tail_bytes,), 0xFF, dtype=torch.uint8)
    cache = Cache(record, page_rows, num_pages, stride, offset_bytes, storage)
    for region in found.regions(page_rows):
        field = cache.region(region.name)
        field.copy_(random_bytes(region.dtype, tuple(field.shape), generator))
        if region.block == "scales" and region.dtype is Encoding.E4M3:
            field.copy_(
                (torch.rand(field.shape, generator=generator) * 0.4 + 0.05).to(torch.float8_e4m3fn).view(torch.uint8)
            )
    if found.scale_rule is ScaleRule.EXTERNAL:
        cache.external_scale = 0.0371
    return cache


def scales_of(cache: Cache, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor | None:
    """float64 [rows, groups], or None for records without scales in the page."""
    rule = get_record(cache.record).scale_rule
    if rule is ScaleRule.EXTERNAL:
        return torch.full((len(page), 1), cache.external_scale).double()
    if rule is ScaleRule.NONE:
        return None
    raw = cache.region("scales")[page, row]
    if rule is ScaleRule.UE8M0:
        scales = torch.ldexp(torch.ones(raw.shape, dtype=torch.float64), raw.int() - 127)
        return scales.masked_fill(raw == 255, math.nan)
    return raw.view(torch.float8_e4m3fn if rule is ScaleRule.E4M3 else torch.float32).double()


def dequantised(cache: Cache, slots: torch.Tensor) -> torch.Tensor:
    """float64 [slots, d_qk] of valid slots; records with arbitrary scales are rounded once to bf16."""
    found = get_record(cache.record)
    page, row = slots // cache.page_rows, slots % cache.page_rows
    scales = scales_of(cache, page, row)
    parts = []
    for region in found.regions(cache.page_rows):
        if region.block == "scales":
            continue
        raw = cache.region(region.name)[page, row].contiguous()
        if region.dtype is Encoding.BF16:
            parts.append(raw.view(torch.bfloat16).double())
            continue
        if region.dtype is Encoding.E2M1:
            codes = E2M1[torch.stack([raw & 15, raw >> 4], -1).flatten(1).long()]
        else:
            codes = raw.view(torch.float8_e4m3fn).double()
        assert scales is not None
        values = (codes.view(len(slots), scales.shape[1], -1) * scales[..., None]).flatten(1)
        if found.scale_rule in (ScaleRule.FP32, ScaleRule.EXTERNAL):
            values = round_to_bf16(values)
        parts.append(values)
    return torch.cat(parts, 1)


def round_to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Rounds float64 to the nearest bf16, ties to even, once."""
    _, exponent = torch.frexp(values)
    step = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent - 8)
    return torch.where(values.isfinite() & (values != 0), torch.round(values / step) * step, values)


def oracle(
    q: torch.Tensor,
    caches: list[tuple[Cache, torch.Tensor, torch.Tensor | None]],
    sink: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (out [queries, heads, 512], lse [queries, heads] without sink)."""
    queries, heads, _ = q.shape
    out = torch.zeros(queries, heads, 512, dtype=torch.float64)
    lse = torch.full((queries, heads), -math.inf, dtype=torch.float64)
    for i in range(queries):
        keys = []
        for cache, slots, lengths in caches:
            row = slots[i] if lengths is None else slots[i][: max(0, int(lengths[i]))]
            row = row[(row >= 0) & (row < cache.capacity)].long()
            if len(row):
                keys.append(dequantised(cache, row))
        if not keys:
            continue
        k = torch.cat(keys)
        scores = q[i].double() @ k.T * scale
        lse[i] = torch.logsumexp(scores, -1)
        total = lse[i] if sink is None else torch.logaddexp(lse[i], sink.double())
        out[i] = torch.exp(scores - total[:, None]) @ k[:, :512]
    return out, lse


def assert_close(out: torch.Tensor, want: torch.Tensor) -> None:
    """The bounds of a decode: 2.5e-3 relative RMS of the tensor, 4.5e-3 of every (query, head), exact zeros exact."""
    error = out.double() - want
    assert torch.equal(out[want == 0].double(), want[want == 0])
    rms = want.pow(2).mean(-1).sqrt()
    assert not out.isnan().any()
    whole = error.pow(2).mean().sqrt() / want.pow(2).mean().sqrt().clamp_min(1e-300)
    assert whole <= 2.5e-3, f"relative RMS {whole:.2e} of the tensor"
    single = (error.pow(2).mean(-1).sqrt() / rms.clamp_min(1e-300)).nan_to_num(0)
    assert single.max() <= 4.5e-3, f"relative RMS {single.max():.2e} of one (query, head)"


def decode(
    library: cpu.Library,
    path: cpu.Path,
    q: torch.Tensor,
    caches: list[tuple[Cache, torch.Tensor, torch.Tensor | None]],
    *,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    threads: int = 1,
    flags: cpu.Flag = cpu.Flag.OWN_THREADS,
    workspace: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one call into `out`, or into fresh outputs filled with NaN: (out, lse)."""
    queries, heads, d_qk = q.shape
    if out is None:
        out = torch.full((queries, heads, 512), math.nan, dtype=dtype)
    lse = torch.full((queries, heads), math.nan)
    space = None
    if workspace:
        space = torch.full((library.workspace_bytes(heads=heads, threads=threads),), 0xFF, dtype=torch.uint8)
    cpu.bind(
        library=library,
        q=q,
        caches=[cache.arguments(slots, lengths) for cache, slots, lengths in caches],
        out=out,
        lse=lse,
        scale=d_qk**-0.5 if scale is None else scale,
        sink=sink,
        threads=threads,
        path=path,
        flags=flags,
        workspace=space,
    ).run()
    return out, lse
