"""Rows of a page to fp32 keys in plain torch, several times faster than torch's own e4m3 cast.

    int32 word   |code 3|code 2|code 1|code 0|        e4m3 code: s eeee mmm
    lane j       (word << (24 - 8 j)) >> 4 & 0x87F00000  =  s 0000 eeee mmm 0...  as fp32: value * 2**-120, exactly

Shift, shift, mask and one multiplication by 2**120 * scale decode a whole tile of rows; subnormal codes come out right
because fp32 subnormals do. Codes 0x7F and 0xFF become +-480. The lanes stay where they fall: keys come out with their
columns permuted (all code 0, all code 1, ...), so the query is permuted the same way and the output permuted back.
e2m1 works alike with eight codes in a word and a factor of 2**126.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvbridge.records import UE8M0_BIAS, UE8M0_NAN, Encoding, Region, ScaleRule

if TYPE_CHECKING:
    from kvbridge.kernels.arguments import CallCache


@dataclass(frozen=True, slots=True)
class _Lanes:
    """How codes lie in an int32 word and where they go in an fp32."""

    count: int
    shifts: tuple[int, ...]
    right: int
    mask: int
    exponent: int  # the bits read as fp32 are the value times 2**-exponent


_E4M3 = _Lanes(4, (24, 16, 8, 0), 4, 0x87F00000 - (1 << 32), 120)
_E2M1 = _Lanes(8, (28, 24, 20, 16, 12, 8, 4, 0), 6, 0x81C00000 - (1 << 32), 126)
_LANES = {Encoding.E4M3: _E4M3, Encoding.E2M1: _E2M1}
_LARGEST_SINGLE = 134
"""The largest UE8M0 byte whose scale times 2**120 is a finite fp32."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Regions whose rows lie together: one gather fetches them."""

    words: torch.Tensor  # [pages, page_rows, row bytes / word bytes]
    offset: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A data field: its block, its bytes in the block's row, its columns in the key."""

    block: int
    offset: int
    row_bytes: int
    encoding: Encoding
    first: int
    values: int


class RowDecoder:
    """Decodes rows of one cache.

    Attributes:
        d_qk: Values of a key.
    """

    def __init__(self, cache: CallCache) -> None:
        record = cache.view.layout.record_format
        self.d_qk = record.d_qk
        self._page_rows = cache.view.page_rows
        self._rule = record.scale_rule
        self._group = record.scale_group
        self._external = cache.external_scale
        self._blocks = _blocks(cache)
        self._pieces: list[_Piece] = []
        self._scales = (0, 0, 0)
        first = 0
        for region in cache.view.layout.regions:
            index, offset = self._locate(region)
            if region.block == "data":
                values = 8 * region.row_bytes // region.dtype.value_bits
                self._pieces.append(_Piece(index, offset, region.row_bytes, region.dtype, first, values))
                first += values
            elif region.name == "scales":
                self._scales = (index, offset, region.row_bytes)

    @property
    def order(self) -> tuple[tuple[int, int, Encoding], ...]:
        """What decides the order of columns: equal for caches whose keys can be joined as they are."""
        return tuple((piece.first, piece.values, piece.encoding) for piece in self._pieces)

    def permute_query(self, q: torch.Tensor) -> torch.Tensor:
        """fp32 `[..., d_qk]` with columns in the order of `keys`."""
        parts = []
        for piece in self._pieces:
            part = q[..., piece.first : piece.first + piece.values].float()
            lanes = _LANES.get(piece.encoding)
            if lanes is not None:
                part = part.reshape(*part.shape[:-1], -1, lanes.count).transpose(-1, -2).flatten(-2)
            parts.append(part)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0].contiguous()

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Puts columns of `[..., d_v]` in the order of `keys` back into the record's order."""
        parts = []
        for piece in self._pieces:
            if piece.first >= out.shape[-1]:
                continue
            part = out[..., piece.first : piece.first + piece.values]
            lanes = _LANES.get(piece.encoding)
            if lanes is not None:
                part = part.unflatten(-1, (lanes.count, -1)).transpose(-1, -2).flatten(-2)  # type: ignore[no-untyped-call]
            parts.append(part)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def keys(self, slots: torch.Tensor) -> torch.Tensor:
        """Decodes rows.

        Args:
            slots: int64 `[rows]`, all below the capacity.

        Returns:
            fp32 `[rows, d_qk]`, columns permuted.
        """
        page = torch.div(slots, self._page_rows, rounding_mode="floor")
        row = slots - page * self._page_rows
        raw = [block.words[page, row].view(torch.uint8) for block in self._blocks]
        keys = torch.empty(len(slots), self.d_qk, dtype=torch.float32, device=slots.device)
        for piece in self._pieces:
            columns = keys[:, piece.first : piece.first + piece.values]
            source = raw[piece.block][:, piece.offset : piece.offset + piece.row_bytes]
            lanes = _LANES.get(piece.encoding)
            if lanes is None:
                columns.copy_(source.view(getattr(torch, piece.encoding.value)))
                continue
            _spread(source.view(torch.int32), columns, lanes)
            self._scale(columns, raw, lanes)
        return keys

    def _scale(self, columns: torch.Tensor, raw: list[torch.Tensor], lanes: _Lanes) -> None:
        words = columns.shape[1] // lanes.count
        shaped = columns.view(len(columns), lanes.count, words)
        if self._rule is ScaleRule.EXTERNAL:
            factor = torch.tensor(2.0**lanes.exponent, dtype=torch.float32) * torch.tensor(self._external)
            if not torch.isfinite(factor):
                columns.mul_(2.0**lanes.exponent)
                factor = torch.tensor(self._external)
            columns.mul_(factor.item())
            columns.copy_(columns.bfloat16())
            return
        index, offset, size = self._scales
        scales = raw[index][:, offset : offset + size].contiguous()
        repeat = self._group // lanes.count
        if self._rule is ScaleRule.UE8M0:
            for factor in _ue8m0_factors(scales):
                shaped.mul_(factor.repeat_interleave(repeat, 1).unsqueeze(1))
            return
        columns.mul_(2.0**lanes.exponent)
        if self._rule is ScaleRule.E4M3:
            shaped.mul_(scales.view(torch.float8_e4m3fn).float().repeat_interleave(repeat, 1).unsqueeze(1))
            return
        shaped.mul_(scales.view(torch.float32).repeat_interleave(repeat, 1).unsqueeze(1))
        columns.copy_(columns.bfloat16())

    def _locate(self, region: Region) -> tuple[int, int]:
        for index, block in enumerate(self._blocks):
            if block.offset <= region.offset < block.offset + block.row_bytes:
                return index, region.offset - block.offset
        raise AssertionError(f"region {region.name} lies in no block")


def _spread(words: torch.Tensor, columns: torch.Tensor, lanes: _Lanes) -> None:
    """Writes each code of int32 `[rows, words]` into its own fp32 of `[rows, lanes * words]`, lane by lane."""
    bits = columns.view(torch.int32).view(len(columns), lanes.count, words.shape[1])
    for lane, shift in enumerate(lanes.shifts):
        target = bits[:, lane]
        if shift:
            torch.bitwise_left_shift(words, shift, out=target)
            target.bitwise_right_shift_(lanes.right)
        else:
            torch.bitwise_right_shift(words, lanes.right, out=target)
    bits.bitwise_and_(lanes.mask)


def _ue8m0_factors(scales: torch.Tensor) -> list[torch.Tensor]:
    """fp32 factors whose product is 2**120 * scale; a second one only where one would overflow."""
    exponent = scales.int()
    first = torch.clamp(exponent, max=_LARGEST_SINGLE)
    one = torch.ones((), dtype=torch.float32, device=scales.device)
    factors = [torch.ldexp(one.expand(scales.shape), first + (_E4M3.exponent - UE8M0_BIAS))]
    if scales.device.type != "cpu" or bool((scales > _LARGEST_SINGLE).any()):
        second = torch.ldexp(one.expand(scales.shape), exponent - first)
        factors.append(torch.where(exponent == UE8M0_NAN, float("nan"), second))
    return factors


def _blocks(cache: CallCache) -> list[_Block]:
    """The record's regions as int64 words where every address allows it, as bytes otherwise."""
    layout, pages = cache.view.layout, cache.view.pages
    runs: list[list[int]] = []
    for region in layout.regions:
        if runs and runs[-1][2] == region.row_stride and runs[-1][0] + runs[-1][1] == region.offset:
            runs[-1][1] += region.row_bytes
        else:
            runs.append([region.offset, region.row_bytes, region.row_stride])
    stride, start, storage = cache.view.page_stride_bytes, int(pages.storage_offset()), pages.untyped_storage()
    numbers = [stride, start, storage.data_ptr(), *(number for run in runs for number in run)]
    word, dtype = (8, torch.int64) if not any(number % 8 for number in numbers) else (1, torch.uint8)
    blocks = []
    for offset, row_bytes, row_stride in runs:
        words = torch.empty(0, dtype=dtype, device=pages.device)
        size = (cache.view.num_pages, cache.view.page_rows, row_bytes // word)
        words.set_(storage, (start + offset) // word, size, (stride // word, row_stride // word, 1))
        blocks.append(_Block(words, offset, row_bytes))
    return blocks
