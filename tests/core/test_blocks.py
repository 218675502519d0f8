"""Spans of whole blocks: what one group's layers own, once per storage."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from kvbridge import PageLayout
from kvbridge.blocks import block_spans, group_placements
from kvbridge.errors import SlotError, SpanError
from kvbridge.manifest import EngineId, LayerPlacement, Manifest, Pool, Storage, index_only_pool
from kvbridge.spans import Operation
from tests import strategies

ALIGNED = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576, num_pages=100)


def slab_pool(name: str, group: str, offsets: list[int], *, storage: str = "slab", rows: int = 64) -> Pool:
    return Pool(
        **PageLayout.for_rows(
            "v4", page_rows=rows, policy="packed", alignment=576, page_stride_bytes=149760, num_pages=100, pool=name
        ).model_dump(),
        group=group,
        storage=storage,
        layers=tuple(LayerPlacement(name=f"{name}.{offset}", offset_bytes=offset) for offset in offsets),
    )


def manifest(*pools: Pool, storage_bytes: int | None = 14976000) -> Manifest:
    return Manifest(
        engine=EngineId(name="vllm", version="0.33.0"),
        origin="planned",
        storages=(Storage(id="slab", storage_bytes=storage_bytes), Storage(id="other", storage_bytes=storage_bytes)),
        pools=pools,
    )


def test_a_block_is_cleared_once_per_storage() -> None:
    """Case 6: 149,760 bytes from the block's start are one group's, once, not once per layer."""
    whole = manifest(slab_pool("swa", "g0", [0, 37440, 74880, 112320]))
    assert {name: list(spans) for name, spans in block_spans(whole, group="g0", blocks=[0, 98, 99]).items()} == {
        "slab": [(0, 149760), (98 * 149760, 2 * 149760)]
    }
    read = block_spans(whole, group="g0", blocks=[1], operation=Operation.READ)["slab"]
    assert list(read) == [(149760 + offset, 37376) for offset in (0, 37440, 74880, 112320)]


def test_a_group_clears_what_it_owns_and_no_slack() -> None:
    narrow = manifest(slab_pool("c4", "g1", [0, 37440]), slab_pool("c128", "g1", [112320], rows=2))
    spans = block_spans(narrow, group="g1", blocks=range(2))["slab"]
    assert list(spans) == [(0, 74880), (112320, 1728), (149760, 74880), (149760 + 112320, 1728)]


def test_aliasing_groups_are_separate() -> None:
    """Groups share bytes on purpose: the same block id means other layers in each."""
    both = manifest(slab_pool("swa", "g0", [0, 37440]), slab_pool("c4", "g1", [0, 37440, 74880]))
    assert list(block_spans(both, group="g0", blocks=[3])["slab"]) == [(3 * 149760, 74880)]
    assert list(block_spans(both, group="g1", blocks=[3])["slab"]) == [(3 * 149760, 112320)]


def test_two_storages_are_two_plans() -> None:
    two = manifest(slab_pool("a", "g0", [0]), slab_pool("b", "g0", [37440], storage="other"))
    assert {name: list(spans) for name, spans in block_spans(two, group="g0", blocks=[1]).items()} == {
        "slab": [(149760, 37440)],
        "other": [(149760 + 37440, 37440)],
    }


def test_layers_behind_each_other() -> None:
    """Layer-compact allocation: every layer has its own run of pages in the storage."""
    pool = Pool(
        **ALIGNED.model_dump(),
        group="g0",
        storage="slab",
        layers=tuple(LayerPlacement(name=f"L{n}", offset_bytes=n * 100 * 37440) for n in range(3)),
    )
    spans = block_spans(manifest(pool), group="g0", blocks=[99, 0])["slab"]
    assert list(spans) == [
        (0, 37440),
        (99 * 37440, 2 * 37440),
        (199 * 37440, 2 * 37440),
        (299 * 37440, 37440),
    ]


def test_overlapping_layers_of_one_group_are_refused() -> None:
    for offsets in ([0, 37439], [0, 0], [112320, 112320 + 149760 - 37439]):
        with pytest.raises(
            SpanError, match=r"layers: got swa.\d+ at \d+ and swa.\d+ at \d+ overlap, expected layers of"
        ):
            block_spans(manifest(slab_pool("swa", "g0", offsets), storage_bytes=None), group="g0", blocks=[0])


def test_a_foreign_plan_names_the_layers_it_touches() -> None:
    whole = manifest(slab_pool("swa", "g0", [0, 37440, 74880]))
    places = group_placements(whole, "g0")["slab"]
    with pytest.raises(SpanError, match=r"layer swa.37440, payload .*; touches swa.0, swa.74880\)"):
        places[1].check([(0, 149760)], neighbours=places)
    places[1].check([(37440, 37440)], neighbours=places)


def test_blocks_and_groups_that_do_not_exist() -> None:
    one = manifest(slab_pool("swa", "g0", [0]), index_only_pool("anchor", page_rows=64))
    with pytest.raises(SpanError, match=r"group: got g1, expected one of \['g0'\] with layers that own bytes"):
        block_spans(one, group="g1", blocks=[0])
    with pytest.raises(SlotError, match="blocks: got 100, expected 0 <= number < 100"):
        block_spans(one, group="g0", blocks=[100])
    assert list(group_placements(one, "g0")) == ["slab"]


@pytest.fixture(autouse=True)
def _tiny_records() -> Iterator[None]:
    with strategies.tiny_records():
        yield


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_random_blocks_against_marked_bytes(first: int) -> None:
    """Layers of random records in random slabs: every byte of a block plan is the group's, and none is missing."""
    for seed in range(first, first + 300):
        rng = Random(seed)
        stride, blocks = 4 * rng.randint(20, 40), rng.randint(1, 5)
        owners: dict[int, str] = {}
        pools, place, number = [], 4 * rng.randint(0, 2), 0
        while True:
            record = rng.choice(strategies.TINY)
            plane = rng.choice(record.planes) or None
            layout = PageLayout.for_rows(
                record.name,
                page_rows=rng.randint(1, 2),
                plane=plane,
                policy="packed",
                alignment=rng.choice((None, 4)),
                page_stride_bytes=stride,
                num_pages=blocks,
                pool=f"p{number}",
            )
            place += -place % 4
            if place + layout.page_bytes > stride:
                break
            layer = LayerPlacement(name=f"L{number}", offset_bytes=place)
            pools.append(Pool(**layout.model_dump(), group="g", storage="slab", layers=(layer,)))
            place, number = place + layout.page_bytes + 4 * rng.choice((0, 0, 1)), number + 1
        if not pools:
            continue
        whole = manifest(*pools, storage_bytes=stride * blocks)
        ids = strategies.random_pages(rng, blocks)
        for operation in Operation:
            owners = {}
            for pool in pools:
                extent = pool.page_bytes if operation is Operation.CLEAR else pool.payload_bytes
                for block in set(ids):
                    start = pool.layers[0].offset_bytes + block * stride
                    owners |= dict.fromkeys(range(start, start + extent), pool.pool)
            spans = block_spans(whole, group="g", blocks=ids, operation=operation)["slab"]
            found = [byte for start, length in spans for byte in range(start, start + length)]
            assert found == sorted(owners), seed
