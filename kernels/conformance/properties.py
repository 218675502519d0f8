"""What one answer cannot show: equal bits over runs, batches, strides and dead bytes, and NaN that stays where it is.

property          compares
run_to_run        the same call five times
dead_bytes        dead and padded bytes 0x00, 0x7F, 0xFF
strides           tight, padded and packed pages
solo_query        a batch against each of its queries alone (batch-invariant mode)
permutation       a batch against the same queries in another order (batch-invariant mode)
nan_stays         a live NaN row in one query: no other query changes, a short neighbour in the same tile included
scale_bytes       every UE8M0 byte: exact over 10..246, harmless below, inf or NaN in one query above
nan_codes         codes 0x7F and 0xFF: NaN, or the declared +-480
fuzz              arbitrary 64-bit slots and lengths
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvbridge.codec import dequantise, gather_rows, scatter_rows
from kvbridge.kernels.caches import Cache
from kvbridge.kernels.conformance.bounds import judge
from kvbridge.kernels.conformance.grid import Case
from kvbridge.kernels.conformance.scenario import Scenario, build
from kvbridge.kernels.plan import Mode
from kvbridge.records import UE8M0_EXACT

if TYPE_CHECKING:
    from kvbridge.kernels.conformance.targets import Target

_TINY = 2.0**-126
_PLAIN = Case(queries=5, heads=16, caches=2, width=192, page_rows=53, stride="slab", lengths="full", index_bits=64)


def bits(scenario: Scenario) -> torch.Tensor:
    """The bits of the output, copied."""
    out = scenario.out[:, : scenario.heads].contiguous()
    return out.view(torch.int16 if out.dtype is torch.bfloat16 else torch.int32).clone()


def _answer(target: Target, scenario: Scenario) -> torch.Tensor:
    scenario.clear()
    target.decode(scenario)
    return bits(scenario)


def _plain(target: Target, **changes: object) -> tuple[Case, str | None]:
    traits = target.traits
    lse = "natural" if "natural" in traits.lse_formats else "none"
    case = replace(_PLAIN, **{"stride": traits.plain_stride, "lse": lse, **changes})  # type: ignore[arg-type]
    if traits.refuses(case) and case.caches > 1:
        case = replace(case, caches=1)
    if "v4" not in traits.records and traits.records:
        case = replace(case, record=traits.records[0])
    return case, traits.refuses(case)


def _differing(name: str, first: torch.Tensor, second: torch.Tensor) -> list[str]:
    if torch.equal(first, second):
        return []
    queries = sorted({int(index[0]) for index in (first != second).nonzero()})
    return [f"{name}: {int((first != second).sum())} values differ, in queries {queries}"]


def run_to_run(target: Target) -> tuple[list[str], str | None]:
    """Same inputs, same bits, in the split and in the unsplit regime."""
    failures: list[str] = []
    for queries, heads in ((1, 16), (1, 8), (5, 64)):
        case, refusal = _plain(target, queries=queries, heads=heads, width=576)
        if refusal:
            return [], f"run_to_run: {refusal}"
        scenario = build(case)
        first = _answer(target, scenario)
        for _ in range(4):
            failures += _differing(f"{queries} queries, {heads} heads", first, _answer(target, scenario))
    return failures, None


def dead_bytes(target: Target) -> tuple[list[str], str | None]:
    """Bytes that no live row owns do not reach the output."""
    failures: list[str] = []
    for changes in ({}, {"slots": "holes", "lengths": "boundary"}, {"record": "dsa", "caches": 1}):
        case, refusal = _plain(target, **changes)
        if refusal:
            if not changes:
                return [], f"dead_bytes: {refusal}"
            continue
        answers = {poison: _answer(target, build(replace(case, poison=poison))) for poison in (0x00, 0x7F, 0xFF)}
        for poison in (0x7F, 0xFF):
            failures += _differing(f"dead bytes {poison:#x} against 0x00", answers[0], answers[poison])
    return failures, None


def strides(target: Target) -> tuple[list[str], str | None]:
    """Where pages lie does not change a bit."""
    case, refusal = _plain(target)
    if refusal:
        return [], f"strides: {refusal}"
    answers = {stride: _answer(target, build(replace(case, stride=stride))) for stride in ("tight", "padded", "slab")}
    failures = _differing("padded against tight", answers["tight"], answers["padded"])
    return failures + _differing("packed against tight", answers["tight"], answers["slab"]), None


def _invariant(target: Target, **changes: object) -> tuple[Scenario | None, str | None]:
    if not target.traits.batch_invariant:
        return None, "no batch-invariant mode"
    case, refusal = _plain(target, lengths="boundary", slots="holes", **changes)
    if refusal:
        return None, refusal
    return build(case, mode=Mode.BATCH_INVARIANT), None


def pick(scenario: Scenario, order: list[int]) -> Scenario:
    """The scenario of some of the queries, under the same plan."""
    chosen = copy.copy(scenario)
    chosen.q = scenario.q[order]
    chosen.caches = [
        Cache(
            view=cache.view,
            slots=cache.slots[order],
            lengths=None if cache.lengths is None else cache.lengths[order],
            external_scale=cache.external_scale,
        )
        for cache in scenario.caches
    ]
    chosen.out = torch.empty_like(scenario.out[order])
    chosen.lse = None if scenario.lse is None else torch.empty_like(scenario.lse[order])
    return chosen


def solo_query(target: Target) -> tuple[list[str], str | None]:
    """A query alone has the bits it has in its batch."""
    failures: list[str] = []
    for heads in (8, 11, 64):
        scenario, refusal = _invariant(target, heads=heads)
        if scenario is None:
            return [], f"solo_query: {refusal}"
        whole = _answer(target, scenario)
        for query in range(scenario.case.queries):
            alone = _answer(target, pick(scenario, [query]))
            failures += _differing(f"{heads} heads, query {query} alone", whole[query : query + 1], alone)
    return failures, None


def permutation(target: Target) -> tuple[list[str], str | None]:
    """The order of queries does not change a bit."""
    scenario, refusal = _invariant(target)
    if scenario is None:
        return [], f"permutation: {refusal}"
    order = [3, 0, 4, 1, 2]
    return _differing("permuted", _answer(target, scenario)[order], _answer(target, pick(scenario, order))), None


def nan_stays(target: Target) -> tuple[list[str], str | None]:
    """NaN in a live row of query 0 leaves the others alone, whatever their lengths."""
    failures: list[str] = []
    for last_length in (5, 17, 33):
        case, refusal = _plain(target, queries=3, lengths="full")
        if refusal:
            return [], f"nan_stays: {refusal}"
        scenario = build(case)
        first = scenario.caches[0]
        # Query 1: nothing in the first cache, a short run in the last: its tile has rows left over from query 0.
        lengths = torch.tensor([case.width, 0, case.width])
        others = [torch.tensor([cache.slots.shape[1], last_length, 1]) for cache in scenario.caches[1:]]
        scenario.caches = [
            replace(cache, lengths=given) for cache, given in zip(scenario.caches, [lengths, *others], strict=True)
        ]
        clean = _answer(target, scenario)
        for cache in scenario.caches:
            shared = set(cache.slots[1:].flatten().tolist())
            own = torch.tensor([slot for slot in cache.slots[0].tolist() if slot not in shared])
            rows = gather_rows(cache.view, own)
            scatter_rows(cache.view, own, torch.full_like(rows, 0xFF))
        poisoned = _answer(target, scenario)
        failures += _differing(f"length {last_length}", clean[1:], poisoned[1:])
        if first.view.layout.record == "v4" and not scenario.out[0].isnan().any():
            failures.append("a live row of NaN gives no NaN in its own query")
    return failures, None


def scale_bytes(target: Target) -> tuple[list[str], str | None]:
    """Queries 1..4 have one live row each, so their output is that row: every code under every UE8M0 byte."""
    failures: list[str] = []
    seen = False
    for record, scales_at in (("v4", 576), ("v41", 512), ("v41_interleaved", 512)):
        if record not in target.traits.records:
            continue
        case, refusal = _plain(target, record=record, caches=1, queries=6, sink="none", lse="none", values="bytes")
        if refusal:
            continue
        seen = True
        failures += _every_scale_byte(target, case, scales_at)
    return failures, None if seen else "scale_bytes: no record with UE8M0 scales"


def _every_scale_byte(target: Target, case: Case, scales_at: int) -> list[str]:
    scenario = build(case)
    cache = scenario.caches[0]
    taken = set(cache.slots[[0, 5]].flatten().tolist())
    own = torch.tensor([slot for slot in range(cache.view.capacity_rows) if slot not in taken][:4])
    cache.slots[1:5] = -1
    cache.slots[1:5, 7] = own
    rows = gather_rows(cache.view, cache.slots[0, :4]).clone()
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    group = scenario.plan.d_qk // 16 if case.record != "v4" else 64
    rows[:, :group], rows[:, group : 2 * group] = codes.view(4, 64)[:, :group], codes.view(4, 64)[:, -group:]
    scenario.q[1:5, :, : 2 * group] = 0
    failures: list[str] = []
    clean: torch.Tensor | None = None
    for byte in range(256):
        rows[:, scales_at : scales_at + 2] = byte
        scatter_rows(cache.view, own, rows)
        answer = _answer(target, scenario)
        clean = answer if clean is None else clean
        failures += _differing(f"{case.record}, scale byte {byte}, other queries", clean[[0, 5]], answer[[0, 5]])
        want = dequantise(rows, case.record, dtype=torch.float64)[:, None, : 2 * group]
        got = scenario.out[1:5, : scenario.heads, : 2 * group].double()
        if byte in UE8M0_EXACT and bool((got != want).any()):
            first = (got != want).nonzero()[0].tolist()
            failures.append(
                f"{case.record}, scale byte {byte}: {int((got != want).sum())} values not exact, at {first}"
            )
        small = (got - want).abs() <= _TINY
        if byte < UE8M0_EXACT.start and not bool((small & (got * want >= 0)).all()):
            failures.append(f"{case.record}, scale byte {byte}: not within 2**-126, or of the wrong sign")
        if len(failures) > 8:
            break
    return failures


def nan_codes(target: Target) -> tuple[list[str], str | None]:
    """Codes 0x7F and 0xFF are NaN, or +-480 where the target says so."""
    case, refusal = _plain(target, record="v4", caches=1, queries=2, width=64, lse="none")
    if refusal or "v4" not in target.traits.records:
        return [], f"nan_codes: {refusal or 'record v4'}"
    scenario = build(case)
    cache = scenario.caches[0]
    shared = set(cache.slots[1].tolist())
    slot = next(slot for slot in cache.slots[0].tolist() if slot not in shared)
    rows = gather_rows(cache.view, torch.tensor([slot]))
    clean = _answer(target, scenario)
    failures: list[str] = []
    for code in (0x7F, 0xFF):
        rows[:, 5] = code
        scatter_rows(cache.view, torch.tensor([slot]), rows)
        failures += _differing(f"code {code:#x}, other query", clean[1:], _answer(target, scenario)[1:])
        got_nan = bool(scenario.out[0, : scenario.heads].isnan().all())
        if target.traits.nan_codes == "nan" and not got_nan:
            failures.append(f"code {code:#x}: output is not NaN; declare nan_codes='480' if it is meant to be +-480")
        if target.traits.nan_codes == "480":
            # +-480 is not a code, so the reference takes 240 under twice the scale in a tile that is otherwise 0.
            failures += _judge_480(target, scenario, slot, code)
    return failures, None


def _judge_480(target: Target, scenario: Scenario, slot: int, code: int) -> list[str]:
    view, place = scenario.caches[0].view, torch.tensor([slot])
    rows = gather_rows(view, place)
    rows[:, :64] = 0
    rows[:, 5] = code
    scatter_rows(view, place, rows)
    _answer(target, scenario)
    rows[:, 5] = 0x77 | (code & 0x80)  # 240
    rows[:, 576] += 1
    scatter_rows(view, place, rows)
    failures = [f"code {code:#x} as +-480: {text}" for text in judge(scenario).failures]
    rows[:, 576] -= 1
    scatter_rows(view, place, rows)
    return failures


def fuzz(target: Target) -> tuple[list[str], str | None]:
    """Arbitrary 64-bit slots and lengths: no crash, and the live ones decide."""
    failures: list[str] = []
    generator = torch.Generator().manual_seed(11)
    for attempt in range(6):
        case, refusal = _plain(target, queries=5, heads=8, width=133, lengths="full")
        if refusal:
            return [], f"fuzz: {refusal}"
        scenario = build(case, seed=attempt)
        for index, cache in enumerate(scenario.caches):
            wild = torch.randint(-(2**63), 2**63 - 1, cache.slots.shape, generator=generator)
            wild >>= torch.randint(0, 64, cache.slots.shape, generator=generator)
            keep = torch.rand(cache.slots.shape, generator=generator) < 0.5
            dead = (wild < 0) | (wild >= cache.view.capacity_rows)
            lengths = torch.randint(-(2**63), 2**63 - 1, (case.queries,), generator=generator)
            lengths >>= torch.randint(0, 64, (case.queries,), generator=generator)
            slots = torch.where(keep | ~dead, cache.slots, wild)
            scenario.caches[index] = replace(cache, slots=slots, lengths=lengths)
        _answer(target, scenario)
        failures += [f"attempt {attempt}: {text}" for text in judge(scenario).failures]
    return failures, None


PROPERTIES: dict[str, Callable[[Target], tuple[list[str], str | None]]] = {
    check.__name__: check
    for check in (
        run_to_run,
        dead_bytes,
        strides,
        solo_query,
        permutation,
        nan_stays,
        scale_bytes,
        nan_codes,
        fuzz,
    )
}
"""Checks by name. Each gives the failures, and a reason if the target does not claim it."""
