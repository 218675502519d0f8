"""Every way of merging splits gives the same bits: the last block, a second launch, one with a block for each head.

The kernel's source runs in the emulator; splits are many enough that the states of a head tile take several rounds.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from kvbridge.kernels import mla
from kvbridge.kernels.conformance import Case, build, judge
from kvbridge.kernels.cuda_arguments import Flag, Launch, Switches
from kvbridge.kernels.cuda_tiles import Variant

if shutil.which("g++") is None:
    pytest.skip("no g++: the emulator cannot be built", allow_module_level=True)

from tests.simt import emulator as simt

WAYS = {
    "last block": Switches(),
    "second launch": Switches(fused_merge=False),
    "block per head": Switches(fused_merge=False, wide_merge=True),
    "chosen by size": Switches(wide_merge=True),
}


def answer(emulator: simt.Emulator, case: Case) -> tuple[torch.Tensor, torch.Tensor, int]:
    scenario = build(case, seed=7)
    prepared = emulator.prepared(scenario.plan)
    bound = simt.bind(prepared, scenario)
    bound.run()
    judgement = judge(scenario)
    assert not judgement.failures, judgement
    assert scenario.lse is not None
    runner = bound._runner
    assert isinstance(runner, simt.EmulatedRunner)
    return scenario.out.view(torch.uint8), scenario.lse.view(torch.uint8), int(runner.arguments.splits)


@pytest.mark.parametrize(
    ("case", "tile", "multiprocessors", "splits"),
    [
        (Case(queries=2, heads=11, width=192, lengths="boundary", sink="mixed"), 16, 8, 6),
        (Case(queries=1, heads=66, width=1400, lengths="none", slots="holes", lse="with_sink"), 64, 40, 40),
        (Case(queries=1, heads=8, width=128, slots="all_dead", lse="empty_positive"), 8, 16, 4),
    ],
    ids=["16 heads", "66 heads, 40 splits: three rounds", "nothing live"],
)
def test_every_way_of_merging_gives_the_same_bits(case: Case, tile: int, multiprocessors: int, splits: int) -> None:
    plain = simt.Emulator(heads=tile, multiprocessors=multiprocessors)
    answers = {name: answer(replace(plain, switches=switches), case) for name, switches in WAYS.items()}
    out, lse, cut = answers["last block"]
    assert cut == splits
    for name, (other_out, other_lse, _) in answers.items():
        assert torch.equal(out, other_out), name
        assert torch.equal(lse, other_lse), name


def test_merge_is_chosen_by_what_one_block_would_read() -> None:
    plan = mla.plan(mla.Caps(queries=512, heads=64, widths=(128, 2048), records=("v4", "v4")))
    launch = Launch(plan, Variant(1, 16), 132, Switches(wide_merge=True))
    assert [launch.fuses(splits) for splits in (2, 6, 7, 68)] == [True, True, False, False]
    assert launch.merge_blocks == 16
    assert Launch(plan, Variant(1, 64), 132, Switches()).fuses(68)
    assert Launch(plan, Variant(1, 64), 132, Switches()).merge_blocks == 1
    assert not Launch(plan, Variant(1, 8), 132, Switches(fused_merge=False)).fuses(2)
    assert Flag.FUSED_MERGE == 16
