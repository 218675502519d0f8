"""Factors of the grid, and cases that pair every value with every value of every other factor.

    record    page_rows  stride   heads  caches  width  lengths   slots        sink   ...
    v4        53         plus8    11     2       133    boundary  out_of_range mixed
    dsa       2          slab     66     1       64     beyond    duplicates   none
    ...                                                              ^ any two columns show all their pairs somewhere

The values mirror what the kernels' own projects test (FlashMLA, FlashInfer, b12x: odd pages 53, 61, 69, pages of one
and two rows, head counts that are no multiple of 16) and what broke in public (see each factor).
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, fields, replace

from kvbridge.records import RECORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination. Field names are factor names; `str` gives a stable identifier.

    Attributes:
        record: Record of the first cache; the second has it too, or its fp4 form, the third another of equal d_qk.
        page_rows: Rows in a page of the first cache; further caches take the next value of the grid.
        stride: `tight`, `padded` (aligned as engines do), `plus8` (8 bytes more), `slab` (packed, with an offset).
        heads: Query heads.
        queries: Queries.
        caches: Number of caches.
        width: Slots of a query in the first cache; further caches take the next value of the grid.
        lengths: `none`, `full`, `boundary` (0, 1, 63, 64, 65, width), `beyond` (negative and larger than the width),
            `per_sequence`.
        slots: `random`, `duplicates`, `holes` (negative numbers inside), `out_of_range` (capacity, 2**32 + 5 ...),
            `last_page`, `all_dead`.
        index_bits: 32 or 64.
        index_stride: `dense`, or `wide` for slot rows further apart than their width.
        sink: `none`, `normal`, `mixed` (+-inf, +-1e30 among them).
        lse: `none`, `natural`, `two`, `with_sink`, `empty_positive`.
        q_stride: `dense`, `head_major`, `padded` (further heads that hold NaN).
        out: `bf16`, `fp32`, `bf16_head_major`, `bf16_padded`.
        values: `normal`, `peaky` (scores up to about 100), `small` (subnormal codes among them), `offset` (a common
            part in every row), `bytes` (arbitrary codes and moderate scales).
        poison: Byte in every byte that no live row owns: 0xFF (NaN in e4m3, bf16, fp32, UE8M0) or 0x7F.
    """

    record: str = "v4"
    page_rows: int = 64
    stride: str = "tight"
    heads: int = 16
    queries: int = 3
    caches: int = 1
    width: int = 133
    lengths: str = "boundary"
    slots: str = "random"
    index_bits: int = 32
    index_stride: str = "dense"
    sink: str = "normal"
    lse: str = "natural"
    q_stride: str = "dense"
    out: str = "bf16"
    values: str = "normal"
    poison: int = 0xFF

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `str` named.

        Raises:
            ValueError: Not such a name.
        """
        parts = text.split("-")
        if len(parts) != len(fields(cls)):
            raise ValueError(f"case: got {len(parts)} parts in {text!r}, expected {len(fields(cls))} joined by '-'")
        values = {f.name: int(part) if f.type == "int" else part for f, part in zip(fields(cls), parts, strict=True)}
        return cls(**values)  # type: ignore[arg-type]


_Pair = tuple[str, str | int, str, str | int]
RECORD_NAMES = tuple(name for name, record in RECORDS.items() if record.decodable and record.d_qk)
FACTORS: dict[str, tuple[str | int, ...]] = {
    "record": RECORD_NAMES,
    "page_rows": (64, 1, 2, 16, 53, 61, 69, 256),
    "stride": ("tight", "padded", "plus8", "slab"),
    "heads": (16, 1, 8, 11, 32, 48, 64, 66, 128),
    "queries": (3, 1, 2, 5),
    "caches": (1, 2, 3),
    "width": (133, 1, 64, 65, 128, 192, 576),
    "lengths": ("boundary", "none", "full", "beyond", "per_sequence"),
    "slots": ("random", "duplicates", "holes", "out_of_range", "last_page", "all_dead"),
    "index_bits": (32, 64),
    "index_stride": ("dense", "wide"),
    "sink": ("normal", "none", "mixed"),
    "lse": ("natural", "none", "two", "with_sink", "empty_positive"),
    "q_stride": ("dense", "head_major", "padded"),
    "out": ("bf16", "fp32", "bf16_head_major", "bf16_padded"),
    "values": ("normal", "peaky", "small", "offset", "bytes"),
    "poison": (0xFF, 0x7F),
}
"""Values of each factor; the first is the plain one."""


def neighbour(name: str, value: int, step: int) -> int:
    """The value `step` places further in a factor's list; values outside the list start from its first place."""
    values = [int(known) for known in FACTORS[name]]
    return values[((values.index(value) if value in values else 0) + step) % len(values)]


@functools.cache
def cases(seed: int = 0, restricted: tuple[tuple[str, tuple[str | int, ...]], ...] = ()) -> tuple[Case, ...]:
    """Cases in which every two values of two factors meet at least once.

    Args:
        seed: Which of the many such sets.
        restricted: Factors of which only some values are wanted, as (name, values).
    """
    factors = {**FACTORS, **dict(restricted)}
    names = sorted(factors, key=lambda name: -len(factors[name]))
    generator = random.Random(seed)
    missing: set[_Pair] = set()
    for first, second in itertools.combinations(names, 2):
        missing |= {(first, a, second, b) for a, b in itertools.product(factors[first], factors[second])}
    chosen: list[Case] = []
    while missing:
        candidates = [_candidate(names, factors, missing, generator) for _ in range(12)]
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        chosen.append(Case(**best))  # type: ignore[arg-type]
    return tuple(chosen)


def flashmla_cases() -> tuple[Case, ...]:
    """FlashMLA's own sparse decode grid, at batch sizes that fit a CPU; judged by its own bounds as well.

    Source: FlashMLA 9241ae3 tests/test_flash_mla_sparse_decoding.py (widths 64, 576, 2048; odd pages and 2, 576).
    """
    plain = Case(queries=4, values="flashmla", lse="natural", lengths="boundary", poison=0xFF, stride="padded")
    grid = [(64, 2), (64, 64), (64, 69), (576, 2), (576, 61), (2048, 64), (2048, 576), (64, 61), (576, 53)]
    chosen = []
    for index, (width, page_rows) in enumerate(grid):
        for record, caches in (("v4", 1 + index % 2), ("dsa", 1)):
            heads, sink = (64, 128)[index % 2], ("mixed", "none")[index % 2]
            chosen.append(
                replace(plain, record=record, caches=caches, width=width, page_rows=page_rows, heads=heads, sink=sink)
            )
    return tuple(chosen)


def _pairs(row: dict[str, str | int]) -> set[_Pair]:
    return {(first, row[first], second, row[second]) for first, second in itertools.combinations(row, 2)}


def _candidate(
    names: list[str], factors: dict[str, tuple[str | int, ...]], missing: set[_Pair], generator: random.Random
) -> dict[str, str | int]:
    """A row that starts from a missing pair and takes, factor by factor, the value that meets most missing pairs."""
    first, a, second, b = generator.choice(sorted(missing, key=repr))
    given = {first: a, second: b}
    row: dict[str, str | int] = {}
    for name in names:
        if name in given:
            row[name] = given[name]
            continue
        values = list(factors[name])
        generator.shuffle(values)
        row[name] = max(values, key=lambda value: _gain(name, value, {**given, **row}, missing, names))
    return {name: row[name] for name in names}


def _gain(
    name: str,
    value: str | int,
    row: dict[str, str | int],
    missing: set[_Pair],
    names: list[str],
) -> int:
    place = names.index(name)
    gain = 0
    for other, held in row.items():
        pair = (name, value, other, held) if place < names.index(other) else (other, held, name, value)
        gain += pair in missing
    return gain
