"""Every path of the CPU backend against a float64 oracle: records, heads, exact decoding, sinks, LSE, dead slots."""

from __future__ import annotations

import math

import pytest
import torch

from kvbridge.kernels import cpu
from tests.kernels.cpu_support import assert_close, decode, dequantised, make_cache, oracle, round_to_bf16

LIBRARY = cpu.load(emulate_amx=True)
PATHS = [path for path in cpu.Path if path is not cpu.Path.AUTO]
RECORDS = [
    "v4",
    "v41",
    "v41_interleaved",
    "v41_fp4",
    "v41_fp4_interleaved",
    "dsa",
    "v4_bf16",
    "mla_bf16",
    "uniform_fp8",
    "mla_fp8",
]


@pytest.fixture(params=PATHS, ids=lambda path: path.name.lower())
def path(request: pytest.FixtureRequest) -> cpu.Path:
    chosen: cpu.Path = request.param
    if chosen not in LIBRARY.usable:
        pytest.skip(f"this machine cannot run the path {chosen.name} (usable: {[p.name for p in LIBRARY.usable]})")
    return chosen


def queries(count: int, heads: int, d_qk: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, heads, d_qk, generator=torch.Generator().manual_seed(seed)).bfloat16()


def slots(count: int, width: int, capacity: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, capacity, (count, width), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("record", RECORDS)
def test_records(path: cpu.Path, record: str) -> None:
    cache = make_cache(record, page_rows=53, num_pages=7, pad_bytes=24)
    d_qk = cpu.record_structure(record, 53).values + cpu.record_structure(record, 53).tail_values
    q, window = queries(3, 20, d_qk), slots(3, 301, cache.capacity)
    out, lse = decode(LIBRARY, path, q, [(cache, window, None)])
    want, want_lse = oracle(q, [(cache, window, None)], None, d_qk**-0.5)
    assert_close(out, want)
    assert ((lse - want_lse).abs() <= 1e-5 * want_lse.abs().clamp_min(1)).all()


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 9, 11, 16, 17, 32, 33, 48, 64, 66, 127, 128])
def test_heads_and_two_caches(path: cpu.Path, heads: int) -> None:
    window, extra = (
        make_cache("v41", page_rows=64, num_pages=3),
        make_cache("v41_fp4", page_rows=2, num_pages=90, pad_bytes=192, seed=1),
    )
    q, sink = queries(2, heads), torch.randn(heads)
    call = [
        (window, slots(2, 61, window.capacity), None),
        (extra, slots(2, 133, extra.capacity).int(), torch.tensor([130, 0])),
    ]
    out, lse = decode(LIBRARY, path, q, call, sink=sink)
    want, want_lse = oracle(q, call, sink, 512**-0.5)
    assert_close(out, want)
    assert ((lse - want_lse).abs() <= 1e-5 * want_lse.abs().clamp_min(1)).all()


@pytest.mark.parametrize("width", [1, 2, 3, 31, 33, 63, 64, 65, 95, 96, 97, 127, 129, 255, 256, 257, 640, 1152])
def test_widths(path: cpu.Path, width: int) -> None:
    cache = make_cache("v4", page_rows=61, num_pages=9)
    q, picked = queries(1, 16), slots(1, width, cache.capacity)
    out, lse = decode(LIBRARY, path, q, [(cache, picked, None)])
    want, want_lse = oracle(q, [(cache, picked, None)], None, 512**-0.5)
    assert_close(out, want)
    assert ((lse - want_lse).abs() <= 1e-5 * want_lse.abs().clamp_min(1)).all()


def test_peaked_and_flat_softmax(path: cpu.Path) -> None:
    cache = make_cache("v4", page_rows=64, num_pages=10)
    picked = slots(2, 600, cache.capacity)
    for factor in (8.0, 0.02, -1.0):
        q = queries(2, 16)
        out, lse = decode(LIBRARY, path, q, [(cache, picked, None)], scale=factor * 512**-0.5)
        want, want_lse = oracle(q, [(cache, picked, None)], None, factor * 512**-0.5)
        assert_close(out, want)
        assert ((lse - want_lse).abs() <= 1e-5 * want_lse.abs().clamp_min(1)).all()


def test_e4m3_is_exact_for_every_code_and_scale(path: cpu.Path) -> None:
    """With q = 0 and one slot the output is V itself."""
    cache = make_cache("v41", page_rows=256, num_pages=1)
    codes = torch.arange(512, dtype=torch.int64).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    cache.region("values")[:] = codes
    cache.region("scales")[0] = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    out, _ = decode(
        LIBRARY,
        path,
        torch.zeros(256, 1, 512).bfloat16(),
        [(cache, torch.arange(256)[:, None], None)],
        dtype=torch.float32,
    )
    got, want = out[:, 0].double(), dequantised(cache, torch.arange(256))
    assert torch.equal(got[10:247], want[10:247])
    assert torch.equal(torch.signbit(got[10:247]), torch.signbit(want[10:247])) or (got[10:247] == want[10:247]).all()
    low = got[:10]
    assert ((low == 0) | ((low.abs() <= want[:10].abs()) & (torch.sign(low) == torch.sign(want[:10])))).all()
    assert (got[247:].isnan() | (got[247:] == want[247:]) | got[247:].isinf()).all()


def test_e2m1_is_exact_for_every_code_and_scale(path: cpu.Path) -> None:
    cache = make_cache("v41_fp4", page_rows=256, num_pages=1)
    cache.region("values")[:] = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    scales = torch.arange(256, dtype=torch.int64)
    scales[(scales & 127) == 127] = 1
    cache.region("scales")[0] = scales.to(torch.uint8)[:, None].expand(256, 32)
    out, _ = decode(
        LIBRARY,
        path,
        torch.zeros(256, 1, 512).bfloat16(),
        [(cache, torch.arange(256)[:, None], None)],
        dtype=torch.float32,
    )
    assert torch.equal(out[:, 0].double(), dequantised(cache, torch.arange(256)))


def test_fp32_scales_round_once(path: cpu.Path) -> None:
    """Products a hair off the middle between two bf16: rounding to fp32 first would land on the middle and go wrong."""
    cache = make_cache("dsa", page_rows=64, num_pages=1)
    cache.region("nope")[:] = torch.arange(512, dtype=torch.int64).remainder(127).to(torch.uint8)
    middle = (257 + 2 * torch.arange(64, dtype=torch.float64)) / 256  # between two bf16
    awkward = torch.stack([middle / 9, middle / 11, middle / 13, middle / 15], 1).float()
    cache.region("scales")[0] = awkward.view(torch.uint8).reshape(64, 16)
    out, _ = decode(
        LIBRARY,
        path,
        torch.zeros(64, 1, 576).bfloat16(),
        [(cache, torch.arange(64)[:, None], None)],
        dtype=torch.float32,
    )
    want = dequantised(cache, torch.arange(64))[:, :512]
    assert torch.equal(out[:, 0].double(), want)
    codes = cache.region("nope")[0].contiguous().view(torch.float8_e4m3fn).float().view(64, 4, 128)
    twice = round_to_bf16((codes * awkward[..., None]).double()).flatten(1)
    assert not torch.equal(twice, want), "the case does not tell rounding once from rounding twice"


def test_nan_stays_in_its_query_and_head(path: cpu.Path) -> None:
    cache = make_cache("v4", page_rows=64, num_pages=4)
    q, picked = queries(4, 20), slots(4, 100, 128)
    clean, _ = decode(LIBRARY, path, q, [(cache, picked, None)])
    cache.region("nope")[2] = 0x7F  # slots 128..191: NaN codes
    cache.region("scales")[3] = 255  # slots 192..255: NaN scales
    spoiled = picked.clone()
    spoiled[1, 50], spoiled[2, 7] = 130, 200
    out, lse = decode(LIBRARY, path, q, [(cache, spoiled, None)])
    assert torch.equal(out[[0, 3]], clean[[0, 3]])
    assert out[1, :, :448].isnan().all() and out[2, :, :448].isnan().all() and lse[[1, 2]].isnan().all()
    after, _ = decode(LIBRARY, path, q, [(cache, picked, None)])  # the same thread's scratch has seen NaN
    assert torch.equal(after, clean)
    q2 = q.clone()
    q2[:, 5] = math.nan
    headed, _ = decode(LIBRARY, path, q2, [(cache, picked, None)])
    others = [h for h in range(20) if h != 5]
    assert torch.equal(headed[:, others], clean[:, others]) and headed[:, 5].isnan().all()


def test_dead_slots_leave_no_trace(path: cpu.Path) -> None:
    """A list with dead slots gives the bits of the list without them."""
    cache = make_cache("v4", page_rows=53, num_pages=5, pad_bytes=40)
    q, live = queries(1, 16), slots(1, 120, cache.capacity)
    want, want_lse = decode(LIBRARY, path, q, [(cache, live, None)])
    dead = torch.tensor([-1, cache.capacity, 2**32 + 5, -(2**63), 2**63 - 1, 2**40, -7])
    mixed = torch.cat(
        [torch.cat([live[0, i : i + 3], dead[i % 7 : i % 7 + 1]]) for i in range(0, 120, 3)]
        + [slots(1, 9, cache.capacity)[0]]
    )
    out, lse = decode(LIBRARY, path, q, [(cache, mixed[None], torch.tensor([160]))])
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    narrow = torch.where((live < 0) | (live % 5 == 0), -(2**31), live).int()
    out32, _ = decode(LIBRARY, path, q, [(cache, narrow, None)])
    out64, _ = decode(LIBRARY, path, q, [(cache, narrow.long(), None)])
    assert torch.equal(out32, out64)


def test_empty_queries(path: cpu.Path) -> None:
    cache = make_cache("v4", page_rows=64, num_pages=2)
    q, picked, lengths = queries(4, 9), slots(4, 40, 128), torch.tensor([40, 0, -3, 7])
    picked[3] = -1
    for flags, empty in ((cpu.Flag(0), -math.inf), (cpu.Flag.LSE_EMPTY_POSITIVE, math.inf)):
        out, lse = decode(
            LIBRARY, path, q, [(cache, picked, lengths)], sink=torch.randn(9), flags=flags | cpu.Flag.OWN_THREADS
        )
        assert (out[1:] == 0).all() and (lse[1:] == empty).all() and lse[0].isfinite().all()


def test_sinks(path: cpu.Path) -> None:
    cache = make_cache("v4", page_rows=64, num_pages=2)
    q, picked = queries(2, 8), slots(2, 90, 128)
    plain, lse = decode(LIBRARY, path, q, [(cache, picked, None)])
    sink = torch.tensor([-math.inf, -1e30, 1e30, math.inf, 3e38, 60.0, 0.5, -3.0])
    out, sunk_lse = decode(LIBRARY, path, q, [(cache, picked, None)], sink=sink)
    assert torch.equal(out[:, :2], plain[:, :2]) and (out[:, 2:5] == 0).all() and torch.equal(lse, sunk_lse)
    want, _ = oracle(q, [(cache, picked, None)], torch.where(sink.abs() > 1e29, -math.inf, sink), 512**-0.5)
    assert_close(out[:, 5:], want[:, 5:])


def test_lse_options(path: cpu.Path) -> None:
    cache = make_cache("v4", page_rows=64, num_pages=2)
    q, picked, sink = queries(2, 8), slots(2, 90, 128), torch.linspace(-2, 4, 8)
    _, natural = oracle(q, [(cache, picked, None)], None, 512**-0.5)
    with_sink = torch.logaddexp(natural, sink.double())
    for flags, want in (
        (cpu.Flag.LSE_BASE2, natural / math.log(2)),
        (cpu.Flag.LSE_WITH_SINK, with_sink),
        (cpu.Flag.LSE_WITH_SINK | cpu.Flag.LSE_BASE2, with_sink / math.log(2)),
    ):
        _, lse = decode(LIBRARY, path, q, [(cache, picked, None)], sink=sink, flags=flags | cpu.Flag.OWN_THREADS)
        assert ((lse - want).abs() <= 1e-5 * want.abs().clamp_min(1)).all()
    empty = torch.full_like(picked, -1)
    _, lse = decode(
        LIBRARY, path, q, [(cache, empty, None)], sink=sink, flags=cpu.Flag.LSE_WITH_SINK | cpu.Flag.OWN_THREADS
    )
    assert torch.equal(lse, sink.expand(2, 8))


def test_flushing_of_denormals_changes_nothing(path: cpu.Path) -> None:
    """An engine may flush denormals in its own thread; the bits must stay those of the other threads."""
    cache = make_cache("v41", page_rows=64, num_pages=1)
    cache.region("scales")[:] = 6  # values around 2**-121: many below the smallest normal fp32 and bf16
    q, picked = queries(1, 8), torch.tensor([[5, 9]])
    plain, lse = decode(LIBRARY, path, q, [(cache, picked, None)], dtype=torch.float32)
    assert torch.set_flush_denormal(True), "this processor cannot flush denormals"
    try:
        flushed, flushed_lse = decode(LIBRARY, path, q, [(cache, picked, None)], dtype=torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain.view(torch.int32), flushed.view(torch.int32)) and torch.equal(lse, flushed_lse)


def test_duplicates_count_twice(path: cpu.Path) -> None:
    cache = make_cache("v4", page_rows=64, num_pages=2)
    q, picked = queries(1, 8), slots(1, 50, 128)
    once, lse = decode(LIBRARY, path, q, [(cache, picked, None)])
    twice, lse2 = decode(LIBRARY, path, q, [(cache, picked.repeat(1, 2), None)])
    assert ((lse2 - lse - math.log(2)).abs() < 1e-5).all()
    assert (twice.float() - once.float()).abs().max() < 0.02 * once.float().abs().max()


def test_outputs_in_place_between_others(path: cpu.Path) -> None:
    """Any query and head stride of q, out and lse; nothing outside the outputs is written."""
    cache = make_cache("v4", page_rows=64, num_pages=2)
    q, picked = queries(3, 12), slots(3, 70, 128)
    want, want_lse = decode(LIBRARY, path, q, [(cache, picked, None)])
    wide_q = torch.full((12, 3, 520), math.nan).bfloat16()
    wide_q[:, :, 4:516] = q.transpose(0, 1)
    buffer = torch.full((3, 64, 512), 7.0).bfloat16()
    lses = torch.full((12, 6), 7.0)
    cpu.bind(
        library=LIBRARY,
        q=wide_q.transpose(0, 1)[:, :, 4:516],
        caches=[cache.arguments(picked)],
        out=buffer[:, 20:32],
        lse=lses.t()[::2],
        scale=512**-0.5,
        threads=1,
        path=path,
    ).run()
    assert torch.equal(buffer[:, 20:32], want) and torch.equal(lses.t()[::2], want_lse)
    assert (buffer[:, :20] == 7).all() and (buffer[:, 32:] == 7).all() and (lses.t()[1::2] == 7).all()


def test_queries_of_one_sequence_share_slots(path: cpu.Path) -> None:
    cache = make_cache("v41", page_rows=64, num_pages=2)
    q, picked, rows = queries(6, 8), slots(2, 70, 128), torch.tensor([0, 1, 1, 0, 9, -1], dtype=torch.int32)
    lengths = torch.tensor([70, 33])
    out = torch.full((6, 8, 512), math.nan).bfloat16()
    arguments = cache.arguments(picked, lengths, rows)
    cpu.bind(library=LIBRARY, q=q, caches=[arguments], out=out, scale=512**-0.5, threads=1, path=path).run()
    index = torch.tensor([0, 1, 1, 0])
    want, _ = decode(LIBRARY, path, q[:4], [(cache, picked[index], lengths[index])])
    assert torch.equal(out[:4], want) and (out[4:] == 0).all()


@pytest.mark.parametrize("heads", [8, 16, 40, 64])
def test_batch_does_not_change_bits(path: cpu.Path, heads: int) -> None:
    """batch_invariant: alone, permuted, in any batch and with any threads a query has the same bits."""
    cache = make_cache("v4", page_rows=64, num_pages=6)
    q, picked, lengths = queries(7, heads), slots(7, 333, cache.capacity), torch.tensor([333, 1, 200, 0, 97, 260, 96])
    flags = cpu.Flag.BATCH_INVARIANT | cpu.Flag.OWN_THREADS
    want, want_lse = decode(LIBRARY, path, q, [(cache, picked, lengths)], flags=flags)
    order = torch.tensor([3, 6, 0, 5, 1, 4, 2])
    out, lse = decode(
        LIBRARY, path, q[order], [(cache, picked[order], lengths[order])], threads=5, flags=flags, workspace=True
    )
    assert torch.equal(out, want[order]) and torch.equal(lse, want_lse[order])
    for i in range(7):
        one, one_lse = decode(
            LIBRARY,
            path,
            q[i : i + 1],
            [(cache, picked[i : i + 1], lengths[i : i + 1])],
            threads=8,
            flags=flags,
            workspace=True,
        )
        assert torch.equal(one, want[i : i + 1]) and torch.equal(one_lse, want_lse[i : i + 1])


@pytest.mark.parametrize(("heads", "extra_record", "threads"), [
    (8, "v4", 1), (16, "v41", 2), (33, "v4", 2), (48, "v41_fp4", 1), (64, "v4", 1), (128, "v4", 3), (128, "v41", 1)
])  # fmt: skip
def test_neighbours_with_any_number_of_rows(path: cpu.Path, heads: int, extra_record: str, threads: int) -> None:
    """One thread's queries follow each other without a gap: the next one's rows are decoded while this one's multiply.

    So every count of rows must meet every other: growing ones as in a prefill, random ones, none at all.
    """
    window = make_cache("v4", page_rows=64, num_pages=4)
    extra = make_cache(extra_record, page_rows=64, num_pages=6, pad_bytes=64, seed=1)
    window.region("scales")[2, 5:9] = 3  # needs the slow way
    generator = torch.Generator().manual_seed(heads)
    near = torch.cat([torch.arange(66), torch.randint(0, 129, (15,), generator=generator)])
    far = torch.cat([torch.arange(66) // 4, torch.randint(0, 400, (15,), generator=generator)])
    near[70], far[70], far[71], near[72] = 0, 0, 0, 0
    count = len(near)
    q, sink = queries(count, heads, seed=3), torch.randn(heads, generator=generator)
    far_slots = slots(count, 400, extra.capacity, seed=1)
    far_slots[torch.arange(400) >= far[:, None]] = -1
    caches = [(window, slots(count, 128, window.capacity), near), (extra, far_slots, None)]
    out, lse = decode(LIBRARY, path, q, caches, sink=sink, threads=threads, flags=cpu.Flag.OWN_THREADS)
    want, want_lse = oracle(q, caches, sink, 512**-0.5)
    assert_close(out, want)
    live = want_lse.isfinite()
    assert torch.equal(live, lse.isfinite()) and (out[70] == 0).all()
    assert ((lse - want_lse)[live].abs() <= 1e-5 * want_lse[live].abs().clamp_min(1)).all()


@pytest.mark.parametrize(("offset", "row", "dtype"), [
    (0, 512, torch.bfloat16), (32, 544, torch.bfloat16), (1, 512, torch.bfloat16), (0, 520, torch.bfloat16),
    (0, 512, torch.float32)
])  # fmt: skip
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_more_outputs_than_caches_keep(path: cpu.Path, heads: int, offset: int, row: int, dtype: torch.dtype) -> None:
    """Such outputs may go past the caches, where their places allow it: the same bits, and nothing beside them."""
    cache = make_cache("v4", page_rows=64, num_pages=3)
    count = 5 * 2**20 // (heads * 1024)
    q, picked = queries(9, heads), slots(9, 3, cache.capacity)
    some, _ = decode(LIBRARY, path, q, [(cache, picked, None)], dtype=dtype)
    flat = torch.full((offset + count * heads * row,), math.inf, dtype=dtype)
    out = flat[offset:].view(count, heads, row)[..., :512]
    index = torch.arange(count) % 9
    decode(LIBRARY, path, q[index], [(cache, picked[index], None)], threads=2, out=out)
    assert torch.equal(out, some[index])
    assert flat.isfinite().sum() == out.numel()


@pytest.mark.parametrize("threads", [3, 8, 24])
def test_slots_split_over_threads(path: cpu.Path, threads: int) -> None:
    cache = make_cache("v4", page_rows=64, num_pages=8)
    q, picked, sink = queries(2, 24), slots(2, 512, cache.capacity), torch.randn(24)
    lengths = torch.tensor([512, 20])
    out, lse = decode(LIBRARY, path, q, [(cache, picked, lengths)], sink=sink, threads=threads, workspace=True)
    want, want_lse = oracle(q, [(cache, picked, lengths)], sink, 512**-0.5)
    assert_close(out, want)
    assert ((lse - want_lse).abs() <= 1e-5 * want_lse.abs().clamp_min(1)).all()
    again, again_lse = decode(LIBRARY, path, q, [(cache, picked, lengths)], sink=sink, threads=threads, workspace=True)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)
    empty, empty_lse = decode(
        LIBRARY, path, q, [(cache, picked, torch.zeros(2).long())], sink=sink, threads=threads, workspace=True
    )
    assert (empty == 0).all() and (empty_lse == -math.inf).all()
