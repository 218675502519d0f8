"""A case made into tensors: poisoned pages, slots with garbage, and buffers that show what was not written.

    storage  |offset| page 0: row row POISON row ..|pad POISON| foreign POISON | page 1 ...
                             ^ only rows that a live slot names hold values; every other byte is 0xFF or 0x7F

A kernel that reads a dead row, a pad byte, a foreign byte or V4's unused byte meets NaN there, and slots past the
length name rows that exist, so that reading them is a wrong number and not a crash.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvbridge.codec import scatter_rows
from kvbridge.kernels.caches import Cache, LseFormat
from kvbridge.kernels.conformance.grid import Case, neighbour
from kvbridge.kernels.conformance.values import row_bytes_of
from kvbridge.kernels.plan import Caps, Mode, Plan, plan
from kvbridge.layout import PageLayout
from kvbridge.records import RECORDS, ScaleRule, get_record
from kvbridge.view import PageView

EXTERNAL_SCALE = 0.37
_FILL = 12345.0
"""What outputs hold before a call where nothing may be written."""
_SECOND = {"v41": "v41_fp4", "v41_interleaved": "v41_fp4_interleaved", "mla_bf16": "dsa"}
_THIRD = {"v4": "v41", "v41_fp4": "v4_bf16", "dsa": "mla_fp8"}


@dataclass(slots=True, kw_only=True, eq=False)
class Scenario:
    """Everything a call needs. A target reads it and fills `out` and `lse`.

    Attributes:
        case: What it was built from.
        plan: Plan with caps equal to the call.
        q: bf16 `[queries, >= heads, d_qk]`.
        caches: The caches.
        scale: Multiplies q . k.
        sink: fp32 `[heads]` or None.
        lse_format: How the LSE is wanted.
        sequence_of_query: int map or None.
        out: `[queries, >= heads, d_v]`, filled with NaN where it has to be written.
        lse: fp32 `[queries, heads]` filled with NaN, or None.
        storages: The memory of each cache, to be changed between calls.
    """

    case: Case
    plan: Plan
    q: torch.Tensor
    caches: list[Cache]
    scale: float
    sink: torch.Tensor | None
    lse_format: LseFormat
    sequence_of_query: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    storages: list[torch.Tensor] = field(default_factory=list)

    @property
    def heads(self) -> int:
        """Heads that count."""
        return self.case.heads

    def clear(self) -> None:
        """Puts the buffers back to what a call must not leave."""
        self.out.fill_(_FILL)
        self.out[:, : self.heads] = math.nan
        if self.lse is not None:
            self.lse.fill_(math.nan)

    def overrun(self) -> bool:
        """Whether heads beyond the real ones were written."""
        return bool((self.out[:, self.heads :] != torch.tensor(_FILL).to(self.out.dtype)).any())


def build(case: Case, *, seed: int = 0, mode: Mode = Mode.DEFAULT) -> Scenario:
    """Builds the tensors of a case.

    Args:
        case: Factor values.
        seed: Of all random numbers.
        mode: Mode of the plan.
    """
    generator = torch.Generator().manual_seed(seed)
    records, widths = records_of(case), _widths(case)
    sequences = _sequence_map(case)
    caches: list[Cache] = []
    storages: list[torch.Tensor] = []
    for index, (record, width) in enumerate(zip(records, widths, strict=True)):
        cache, storage = _cache(case, index, record=record, width=width, sequences=sequences, generator=generator)
        caches.append(cache)
        storages.append(storage)
    form = get_record(case.record)
    caps = Caps(queries=case.queries, heads=case.heads, widths=tuple(widths), records=tuple(records), mode=mode)
    scenario = Scenario(
        case=case,
        plan=plan(caps),
        q=_query(case, form.d_qk, generator),
        caches=caches,
        scale=form.d_qk**-0.5,
        sink=_sink(case, generator),
        lse_format=_lse_format(case),
        sequence_of_query=sequences,
        out=_out(case, form.d_v),
        lse=None if case.lse == "none" else torch.empty(case.queries, case.heads),
        storages=storages,
    )
    scenario.clear()
    return scenario


def records_of(case: Case) -> list[str]:
    """Record of each cache of a case."""
    second, third = _SECOND.get(case.record, case.record), _THIRD.get(case.record, case.record)
    return [case.record, second, third][: case.caches]


def _widths(case: Case) -> list[int]:
    return [case.width, neighbour("width", case.width, 1), neighbour("width", case.width, 2)][: case.caches]


def _sequence_map(case: Case) -> torch.Tensor | None:
    if case.lengths != "per_sequence":
        return None
    sequences = torch.arange(case.queries) % max(1, case.queries - 1)
    if case.queries > 2:
        sequences[1] = (7, -3)[case.heads % 2]  # a query whose sequence does not exist has no live slot
    return sequences.to(_index_dtype(case))


def _index_dtype(case: Case) -> torch.dtype:
    return torch.int32 if case.index_bits == 32 else torch.int64


def layout_of(case: Case, record: str, page_rows: int) -> tuple[PageLayout, int]:
    """Layout of a stride kind, and where the first page starts in its storage."""
    payload = page_rows * get_record(record).row_bytes
    if case.stride == "tight":
        return PageLayout.for_rows(record, page_rows=page_rows), 0
    if case.stride == "padded":
        alignment = 576 if record == "v4" else 512
        return PageLayout.for_rows(record, page_rows=page_rows, policy="aligned", alignment=alignment), 0
    stride, offset = (payload + 8, 8) if case.stride == "plus8" else (3 * payload + 1000, 2 * payload + 24)
    return PageLayout.for_rows(record, page_rows=page_rows, policy="packed", page_stride_bytes=stride), offset


def _cache(
    case: Case,
    index: int,
    *,
    record: str,
    width: int,
    sequences: torch.Tensor | None,
    generator: torch.Generator,
) -> tuple[Cache, torch.Tensor]:
    page_rows = neighbour("page_rows", case.page_rows, index) if index else case.page_rows
    pages = max(3, -(-3 * width // (2 * page_rows)) + 1)
    layout, offset = layout_of(case, record, page_rows)
    # Engines that pad pages allocate the last one's pad as well; otherwise memory ends with the last payload byte.
    tail = layout.page_bytes if case.stride == "padded" else layout.payload_bytes
    size = offset + (pages - 1) * layout.page_stride_bytes + tail
    storage = torch.full((size,), case.poison, dtype=torch.uint8)
    tensor = storage.as_strided((pages, layout.payload_bytes), (layout.page_stride_bytes, 1), offset)
    view = PageView.from_tensor(tensor, layout)
    per_sequence = sequences is not None
    slots_per_sequence = per_sequence and index != 1
    rows = max(1, case.queries - 1) if slots_per_sequence else case.queries
    capacity = view.capacity_rows
    slots = _slots(case, index, rows=rows, width=width, view=view, generator=generator)
    lengths = _lengths(case, max(1, case.queries - 1) if per_sequence else case.queries, width)
    live = _live_slots(slots, lengths, capacity, per_sequence and not slots_per_sequence)
    rows_bytes = row_bytes_of(record, len(live), case.values, EXTERNAL_SCALE, generator, unused_byte=case.poison)
    scatter_rows(view, live, rows_bytes)
    slots = _with_garbage(slots, lengths, capacity, live, generator, shared=per_sequence and not slots_per_sequence)
    return (
        Cache(
            view=view,
            slots=_strided(slots.to(_index_dtype(case)), case),
            lengths=None if lengths is None else lengths.to(_index_dtype(case)),
            external_scale=EXTERNAL_SCALE if RECORDS[record].scale_rule is ScaleRule.EXTERNAL else None,
            slots_per_sequence=slots_per_sequence,
            lengths_per_sequence=per_sequence and lengths is not None,
        ),
        storage,
    )


def _evil(case_bits: int, capacity: int) -> list[int]:
    """Numbers that must be dead under every reading; the last ones only fit 64 bits."""
    narrow = [-1, capacity, -2, 2**31 - 1, -(2**31), capacity + 1, -123456]
    return narrow if case_bits == 32 else [*narrow, 2**32 + 5, 2**40, 2**63 - 1, -(2**63), 2**32]


def _slots(
    case: Case, index: int, *, rows: int, width: int, view: PageView, generator: torch.Generator
) -> torch.Tensor:
    capacity = view.capacity_rows
    slots = torch.randint(0, capacity, (rows, width), generator=generator)
    evil = torch.tensor(_evil(case.index_bits, capacity))
    if case.slots == "duplicates":
        slots = slots[:, torch.randint(0, max(1, width // 8), (width,), generator=generator)]
    elif case.slots == "holes":
        slots[:, 1::3] = -1
        slots[:, ::7] = -(2**31)
    elif case.slots == "out_of_range":
        picked = evil[torch.randint(0, len(evil), (rows, width), generator=generator)]
        slots = torch.where(torch.rand(rows, width, generator=generator) < 0.3, picked, slots)
    elif case.slots == "last_page":
        slots = capacity - 1 - torch.randint(0, view.page_rows, (rows, width), generator=generator)
        slots[:, -1] = capacity - 1
    elif case.slots == "all_dead":
        dead = evil[torch.randint(0, len(evil), (rows, width), generator=generator)]
        slots = dead if index == 0 else torch.cat([dead[:1], slots[1:]])
    return slots


def _lengths(case: Case, rows: int, width: int) -> torch.Tensor | None:
    if case.lengths == "none":
        return None
    if case.lengths == "full":
        return torch.full((rows,), width)
    if case.lengths == "beyond":
        pool = [width + 7, -1, 2**31 - 1, width, -(2**31)]
    else:
        pool = [min(width, length) for length in (width, 1, 63, 0, 64, 65)]
    return torch.tensor([pool[row % len(pool)] for row in range(rows)])


def _live_slots(slots: torch.Tensor, lengths: torch.Tensor | None, capacity: int, shared: bool) -> torch.Tensor:
    """Slots that some query reads. Where lengths are shared by queries with slots of their own, all rows count."""
    live = (slots >= 0) & (slots < capacity)
    if lengths is not None:
        limit = lengths.clamp(0, slots.shape[1])
        bound = limit.max().expand(len(slots)) if shared else limit
        live &= torch.arange(slots.shape[1]) < bound.unsqueeze(1)
    found: torch.Tensor = torch.unique(slots[live])
    return found


def _with_garbage(
    slots: torch.Tensor,
    lengths: torch.Tensor | None,
    capacity: int,
    live: torch.Tensor,
    generator: torch.Generator,
    *,
    shared: bool,
) -> torch.Tensor:
    """Positions past the length get rows that hold poison, or numbers far outside."""
    if lengths is None or shared:
        return slots
    poisoned = torch.ones(capacity, dtype=torch.bool)
    poisoned[live] = False
    garbage = torch.cat([poisoned.nonzero().flatten(), torch.tensor([2**31 - 1, -1, capacity])])
    picked = garbage[torch.randint(0, len(garbage), slots.shape, generator=generator)]
    past = torch.arange(slots.shape[1]) >= lengths.clamp(0, slots.shape[1]).unsqueeze(1)
    return torch.where(past, picked, slots)


def _strided(slots: torch.Tensor, case: Case) -> torch.Tensor:
    if case.index_stride == "dense":
        return slots.contiguous()
    rows, width = slots.shape
    wide = torch.full((rows, width + 13), 3, dtype=slots.dtype)
    wide[:, :width] = slots
    return wide[:, :width]


def _query(case: Case, d_qk: int, generator: torch.Generator) -> torch.Tensor:
    q = torch.randn(case.queries, case.heads, d_qk, generator=generator)
    if case.values == "flashmla":
        q = (q / 10).clamp(-1, 1)
    q = (q * (8 if case.values == "peaky" else 1)).bfloat16()
    if case.q_stride == "head_major":
        return q.transpose(0, 1).contiguous().transpose(0, 1)
    if case.q_stride == "padded":
        padded = torch.full((case.queries, case.heads + 5, d_qk), math.nan, dtype=torch.bfloat16)
        padded[:, : case.heads] = q
        return padded
    return q


def _sink(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.sink == "none":
        return None
    sink = torch.randn(case.heads, generator=generator) * 2
    if case.sink == "mixed":
        for head, value in enumerate((math.inf, -math.inf, 1e30, -1e30)):
            sink[head::7] = value
    return sink


def _lse_format(case: Case) -> LseFormat:
    empty = math.inf if case.lse == "empty_positive" else -math.inf
    return LseFormat(base="2" if case.lse == "two" else "natural", includes_sink=case.lse == "with_sink", empty=empty)


def _out(case: Case, d_v: int) -> torch.Tensor:
    dtype = torch.float32 if case.out == "fp32" else torch.bfloat16
    if case.out == "bf16_head_major":
        return torch.empty(case.heads, case.queries, d_v, dtype=dtype).transpose(0, 1)
    return torch.empty(case.queries, case.heads + (7 if case.out == "bf16_padded" else 0), d_v, dtype=dtype)


__all__ = ["EXTERNAL_SCALE", "Scenario", "build", "layout_of"]
