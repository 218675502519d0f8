"""The CUDA source, executed on the CPU: conformance, schedules, switches, replays, counters, guards, 64-bit offsets."""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import replace

import pytest
import torch

from kvbridge.codec import scatter_rows
from kvbridge.kernels import cuda_tiles, mla
from kvbridge.kernels.conformance import grid as kit
from kvbridge.kernels.conformance.report import run as run_kit
from kvbridge.kernels.conformance.scenario import Scenario, build
from kvbridge.kernels.cuda_arguments import Switches
from kvbridge.layout import PageLayout
from kvbridge.records import get_record
from kvbridge.view import PageView
from tests.simt.emulator import EmulatedRunner, EmulationError, Emulator, Patch, bind, run, target, with_options

SEPARATE = Switches(fused_merge=False)
PLAIN = Switches(fused_merge=False, pipelined=False)
SHUFFLED = {"seed": 11, "blocks_alive": 5}
OFF_BY_ONE_PAGE = Patch("slots.cuh", "page * cache.page_stride_bytes", "(page + 1) * cache.page_stride_bytes")
NARROW_OFFSET = Patch("slots.cuh", "page * cache.page_stride_bytes", "static_cast<int>(page * cache.page_stride_bytes)")
NEAR = PageLayout.for_rows("v4", page_rows=64)
SPLIT_CASE = kit.Case(record="v4", heads=24, queries=2, width=300, lengths="none", slots="holes")


def outputs(emulator: Emulator, case: kit.Case, seed: int = 3) -> tuple[Scenario, torch.Tensor, torch.Tensor]:
    """Runs a case; gives its outputs as bits."""
    scenario = build(case, seed=seed)
    run(emulator.prepared(scenario.plan), scenario)
    assert scenario.lse is not None
    return scenario, scenario.out.view(torch.uint8), scenario.lse.view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "emulator", "seed", "step"),
    [
        ("sm_90: tiles as chosen, split, fused merge", Emulator(), 0, 1),
        ("sm_89: 99 KB, shuffled, blocks interleaved", with_options(Emulator(capability=89), **SHUFFLED), 1, 3),
        ("separate merge, copies at issue", with_options(Emulator(switches=SEPARATE), copies_at_issue=1), 2, 4),
        ("plain pipeline, truncating sums", with_options(Emulator(switches=PLAIN), truncate=1), 3, 4),
        ("tile of 8 heads everywhere", Emulator(heads=8, multiprocessors=40), 4, 5),
        ("tile of 64 heads everywhere, one stage", Emulator(heads=64, stages=1), 5, 6),
    ],
)
def test_conformance(name: str, emulator: Emulator, seed: int, step: int) -> None:
    cases = (*kit.cases(seed), *kit.flashmla_cases())[::step]
    report = run_kit(target(emulator, name=name), grid=list(cases), properties=step == 1, seed=seed)
    print(report.table())
    assert report.ok, report.table()


@pytest.mark.parametrize("splits", [1, 5])
def test_no_schedule_changes_a_bit(splits: int) -> None:
    multiprocessors = 1 if splits == 1 else 2 * splits
    base = Emulator(multiprocessors=multiprocessors)
    scenario, expected, expected_lse = outputs(base, SPLIT_CASE)
    launch = base.launch_of(scenario.plan)
    count = cuda_tiles.splits(launch.plan, launch.variant, multiprocessors=multiprocessors, queries=2, width=300)
    assert (count > 1) == (splits > 1)
    for switches in (Switches(), SEPARATE, PLAIN, replace(PLAIN, fused_merge=True)):
        for options in ({}, SHUFFLED, {"seed": 4, "blocks_alive": 2, "copies_at_issue": 1}):
            emulator = with_options(replace(base, switches=switches), **options)
            _, out, lse = outputs(emulator, SPLIT_CASE)
            assert torch.equal(out, expected), (switches, options)
            assert torch.equal(lse, expected_lse), (switches, options)


def test_replay_with_other_lengths_and_slots_is_as_good_as_a_fresh_call() -> None:
    emulator = Emulator(multiprocessors=12)
    case = replace(SPLIT_CASE, lengths="full", queries=3)
    scenario = build(case, seed=5)
    prepared = emulator.prepared(scenario.plan)
    bound = bind(prepared, scenario)
    bound.run()
    (cache,) = scenario.caches
    assert cache.lengths is not None
    for lengths in ([0, 1, 300], [33, 32, 31], [300, 0, 0], [-5, 10**6, 299]):
        cache.lengths.copy_(torch.tensor(lengths))
        cache.slots.copy_(cache.slots.roll(7, dims=1))
        scenario.clear()
        bound.run()
        replayed = scenario.out.clone()
        scenario.clear()
        run(emulator.prepared(scenario.plan), scenario)
        assert torch.equal(replayed.view(torch.uint8), scenario.out.view(torch.uint8)), lengths
        assert not torch.isnan(replayed).any()


@pytest.mark.parametrize("record", sorted(cuda_tiles.FORMATS))
def test_ldmatrix_has_no_bank_conflicts_and_only_the_rows_are_read(record: str) -> None:
    width, queries = 96, 2
    layout = PageLayout.for_rows(record, page_rows=64)
    storage = torch.full((4 * layout.page_stride_bytes,), 0x30, dtype=torch.uint8)
    view = PageView.from_tensor(storage.view(4, -1), layout)
    slots = torch.arange(width).repeat(queries, 1)
    form = get_record(record)
    caps = mla.Caps(queries=queries, heads=16, widths=(width,), records=(record,))
    emulator = with_options(Emulator(), count=1)
    prepared = emulator.prepared(mla.plan(caps))
    bound = mla.bind(
        prepared,
        q=torch.randn(queries, 16, form.d_qk).bfloat16(),
        caches=[mla.Cache(view=view, slots=slots)],
        out=torch.empty(queries, 16, 512),
        scale=0.05,
    )
    bound.run()
    runner = bound._runner
    assert isinstance(runner, EmulatedRunner)
    counters = runner.counters
    assert counters.bank_conflicts == 0
    assert counters.copied_bytes == queries * width * form.row_bytes
    # A sector is 32 bytes: rows that start between sectors, and 8-byte scale rows, touch a little more than they use.
    assert counters.sectors * 32 <= 1.15 * counters.copied_bytes + 64 * width


class Guarded:
    """Memory whose last byte is followed by `guard` inaccessible bytes, rounded up to pages."""

    def __init__(self, size: int, *, guard: int) -> None:
        page = mmap.PAGESIZE
        self.body = (size + page - 1) // page * page
        guard = (guard + page - 1) // page * page
        self.mapping = mmap.mmap(-1, self.body + guard)
        self.buffer = (ctypes.c_uint8 * (self.body + guard)).from_buffer(self.mapping)
        address = ctypes.addressof(self.buffer)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + self.body), guard, 0) == 0
        whole = torch.frombuffer(memoryview(self.buffer)[: self.body], dtype=torch.uint8)
        self.bytes = whole[self.body - size :]


@pytest.mark.parametrize("record", ["v4", "v41", "v41_fp4_interleaved", "dsa", "v4_bf16"])
@pytest.mark.parametrize("stride", ["tight", "padded", "slab"])
def test_nothing_behind_the_last_payload_byte_is_read(record: str, stride: str) -> None:
    rows, pages = 6, 3
    payload = rows * get_record(record).row_bytes
    page_stride = {"tight": payload, "padded": -(-payload // 576) * 576 + 576, "slab": 3 * payload + 64}[stride]
    policy = "exact" if page_stride == payload else "packed"
    layout = PageLayout.for_rows(record, page_rows=rows, policy=policy, page_stride_bytes=page_stride)
    size = (pages - 1) * page_stride + payload
    storage = Guarded(size, guard=page_stride).bytes
    storage.fill_(0xFF)
    view = PageView.from_tensor(
        storage.as_strided((pages, payload), (page_stride, 1), storage.storage_offset()), layout
    )
    slots = torch.arange(rows * pages).repeat(2, 1)
    values = torch.randint(0, 0x38, (rows * pages, get_record(record).row_bytes), dtype=torch.uint8)
    scatter_rows(view, slots[0], values)
    out = run_view(Emulator(), view, slots)
    assert torch.isfinite(out).all()
    with pytest.raises(EmulationError, match="invalid access"):
        run_view(Emulator(patches=(OFF_BY_ONE_PAGE,)), view, slots)


def run_view(emulator: Emulator, view: PageView, slots: torch.Tensor) -> torch.Tensor:
    """Two queries of 16 heads over one view."""
    form = get_record(view.layout.record)
    caps = mla.Caps(queries=2, heads=16, widths=(slots.shape[1],), records=(view.layout.record,))
    q = torch.linspace(-1, 1, 2 * 16 * form.d_qk).bfloat16().view(2, 16, form.d_qk)
    out = torch.full((2, 16, 512), math.nan)
    mla.run(
        emulator.prepared(mla.plan(caps)),
        q=q,
        caches=[mla.Cache(view=view, slots=slots)],
        out=out,
        scale=form.d_qk**-0.5,
    )
    return out


@pytest.mark.parametrize("narrow", [False, True], ids=["64-bit", "seeded 32-bit offset"])
def test_pages_beyond_four_gigabytes(narrow: bool) -> None:
    """The slab stride of case 2: page 7,165 starts beyond 7 GB. Only touched pages become resident."""
    layout = PageLayout.for_rows("v4", page_rows=64, policy="packed", page_stride_bytes=1_039_680)
    pages, offset = 7_166, 181_440
    size = offset + (pages - 1) * layout.page_stride_bytes + layout.payload_bytes
    storage = torch.empty(size, dtype=torch.uint8)
    view = PageView.from_tensor(
        storage.as_strided((pages, layout.payload_bytes), (layout.page_stride_bytes, 1), offset), layout
    )
    near = PageView.from_tensor(torch.zeros(2, layout.payload_bytes, dtype=torch.uint8), NEAR)
    far_slots = torch.tensor([[0, 63, 2_065 * 64, 2_066 * 64 + 1, 4_131 * 64, 7_165 * 64 + 63]]).repeat(2, 1)
    near_slots = torch.arange(6).repeat(2, 1)
    rows = torch.randint(0, 0x38, (6, 584), dtype=torch.uint8)
    scatter_rows(view, far_slots[0], rows)
    scatter_rows(near, near_slots[0], rows)
    expected = run_view(Emulator(), near, near_slots)
    if narrow:
        try:
            got = run_view(Emulator(patches=(NARROW_OFFSET,)), view, far_slots)
        except EmulationError:
            return
        assert not torch.equal(got, expected)
    else:
        assert torch.equal(run_view(Emulator(), view, far_slots), expected)
