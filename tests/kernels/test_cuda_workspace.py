"""Workspace of the CUDA backend: the split rule, its bound over every call, and agreement with the plan's own bound.

splits = max(1, floor(2 * multiprocessors / (queries * head tiles))), never more than there are tiles of slots.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.kernels import cuda_tiles
from kvbridge.kernels.cuda_arguments import Launch
from kvbridge.kernels.cuda_tiles import Variant, choose_variant, workspace_bytes
from kvbridge.kernels.plan import Caps, Mode, Plan, plan

MULTIPROCESSORS = (82, 108, 132, 148, 188)
TILES = (8, 16, 32, 64)
HEADS = (1, 8, 11, 16, 32, 48, 64, 66, 128)
V4 = cuda_tiles.formats_of(("v4",))


def make(
    *, queries: int = 4096, heads: int = 64, widths: tuple[int, ...] = (128, 2048), mode: Mode = Mode.DEFAULT
) -> Plan:
    return plan(Caps(queries=queries, heads=heads, widths=widths, records=("v4",) * len(widths), mode=mode))


def needed(launch: Launch, queries: int, width: int) -> int:
    """Workspace that one call touches: counters, then what every block of a split call leaves."""
    splits = launch.splits(queries, width)
    if splits == 1:
        return 0
    blocks = queries * launch.head_tiles * splits
    return cuda_tiles.counters_bytes(launch.multiprocessors) + blocks * cuda_tiles.block_bytes(launch.variant)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS)
def test_split_rule_and_bound_for_every_query_count(
    multiprocessors: int, tile: int, heads: int, mode: Mode, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(heads=heads, mode=mode)
    launch = Launch(made, Variant(V4, tile), multiprocessors)
    bound, groups = launch.workspace_bytes, -(-heads // tile)
    peak = 0
    for queries in range(1, 4097):
        splits = launch.splits(queries, 2176)
        rule = max(1, 2 * multiprocessors // (queries * groups)) if mode is Mode.DEFAULT else 1
        assert splits == min(rule, 2176 // 32)
        peak = max(peak, needed(launch, queries, 2176))
    with capsys.disabled():
        print(
            f"\n{multiprocessors:4} multiprocessors, {heads:3} heads, tile {tile:2}, {mode}: {bound:12,} bytes", end=""
        )
    assert peak == bound
    # Two blocks on every multiprocessor, each with a tile of fp32 sums and three numbers a head.
    assert bound <= 2 * multiprocessors * tile * 515 * 4 + 128 * -(-4 * multiprocessors // 128)
    assert (bound == 0) == (mode is Mode.BATCH_INVARIANT)


def test_64_heads_on_132_multiprocessors_stay_below_35_mb_for_every_batch() -> None:
    for capability in (80, 89, 90, 100, 120):
        for queries in range(1, 600):
            made = make(queries=queries)
            assert workspace_bytes(made, choose_variant(made, capability), multiprocessors=132) <= 35_000_000
    assert workspace_bytes(make(), Variant(V4, 64), multiprocessors=132) == 640 + 264 * 64 * 515 * 4 == 34_806_400


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 20])
def test_bound_holds_for_every_query_count_and_width_of_small_machines(multiprocessors: int, tile: int) -> None:
    for heads in (1, 16, 66):
        for most_queries, widths in ((1, (70,)), (9, (33, 64)), (45, (1, 32, 130))):
            made = make(queries=most_queries, heads=heads, widths=widths)
            launch = Launch(made, Variant(V4, tile), multiprocessors)
            needs = [
                needed(launch, queries, width)
                for queries in range(most_queries + 1)
                for width in range(sum(widths) + 1)
            ]
            assert max(needs) == launch.workspace_bytes


@settings(max_examples=300, deadline=None)
@given(
    queries=st.integers(1, 5000),
    heads=st.integers(1, 128),
    widths=st.lists(st.integers(0, 5000), min_size=1, max_size=3),
    machine=st.tuples(st.integers(1, 250), st.sampled_from(TILES), st.sampled_from(list(Mode))),
    data=st.data(),
)
def test_no_call_below_the_caps_needs_more(
    queries: int, heads: int, widths: list[int], machine: tuple[int, int, Mode], data: st.DataObject
) -> None:
    multiprocessors, tile, mode = machine
    made = make(queries=queries, heads=heads, widths=tuple(widths), mode=mode)
    launch = Launch(made, Variant(V4, tile), multiprocessors)
    bound = launch.workspace_bytes
    for _ in range(20):
        count = data.draw(st.integers(0, queries))
        width = data.draw(st.integers(0, sum(widths)))
        assert needed(launch, count, width) <= bound
        assert launch.splits(count, width) == cuda_tiles.splits(
            made, launch.variant, multiprocessors=multiprocessors, queries=count, width=width
        )


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS)
def test_plan_asked_before_any_memory_is_sized_gives_the_backends_own_bound(
    multiprocessors: int, capability: int, mode: Mode
) -> None:
    for heads in HEADS:
        for records in (("v4", "v4"), ("dsa", "dsa"), ("v4_bf16", "v4")):
            for queries in (1, 7, 131, 132, 133, 4096):
                caps = Caps(queries=queries, heads=heads, widths=(128, 512), records=records, mode=mode)
                caps = cuda_tiles.caps_on(caps, capability=capability, multiprocessors=multiprocessors)
                made = plan(caps)
                variant = choose_variant(made, capability)
                assert caps.head_tile == variant.heads
                own = workspace_bytes(made, variant, multiprocessors=multiprocessors)
                assert own == made.workspace_bytes
                launch = Launch(made, variant, multiprocessors)
                for count in {1, queries, max(1, queries // 2)}:
                    assert launch.splits(count, 640) == made.splits(count, 640)
                    assert needed(launch, count, 640) == made.call_workspace_bytes(count, 640)


def test_default_caps_reserve_nothing_and_verify_queries_stay_inside() -> None:
    assert make().workspace_bytes == 0, "units 0: the machine is not known, nothing is split"
    caps = Caps.for_verify(sequences=256, speculative_tokens=3, heads=64, widths=(128, 512), records=("v4", "v4"))
    made = plan(cuda_tiles.caps_on(caps, capability=90, multiprocessors=132))
    assert made.caps.queries == 1024
    assert made.workspace_bytes == 34_806_400


def test_parts_of_the_workspace_do_not_overlap() -> None:
    for multiprocessors in MULTIPROCESSORS:
        for tile in TILES:
            launch = Launch(make(heads=128), Variant(V4, tile), multiprocessors)
            counters, states, outs = launch.offsets
            blocks = cuda_tiles.most_blocks(launch.plan, launch.variant, multiprocessors)
            assert counters == 0 and states >= 4 * multiprocessors
            assert outs == states + blocks * tile * 3 * 4
            assert launch.workspace_bytes == outs + blocks * tile * 512 * 4
            assert states % 128 == 0 and outs % 4 == 0
