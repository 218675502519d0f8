"""`built` and `as_json` give what pydantic's own constructor and dump give; bad fields are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import LayoutError
from kvbridge.layout import Padding, PaddingPolicy, PageLayout
from kvbridge.manifest import EngineId, LayerPlacement, Manifest, MemoryPlan, Pool, Rank, Storage
from kvbridge.records import RECORDS

SINGLE_PLANE = sorted(name for name, record in RECORDS.items() if record.planes == ("",))


@given(
    record=st.sampled_from(SINGLE_PLANE),
    page_rows=st.integers(1, 300),
    alignment=st.none() | st.sampled_from([64, 512, 576]),
    pages=st.none() | st.integers(1, 10**9),
)
def test_both_ways_make_equal_models(record: str, page_rows: int, alignment: int | None, pages: int | None) -> None:
    payload = page_rows * RECORDS[record].row_bytes
    page = payload if alignment is None else -(-payload // alignment) * alignment
    policy = PaddingPolicy.EXACT if alignment is None else PaddingPolicy.ALIGNED
    fields: dict[str, Any] = {
        "record": record,
        "page_rows": page_rows,
        "payload_bytes": payload,
        "page_stride_bytes": page,
        "num_pages": pages,
        "layers": (LayerPlacement(name="a", offset_bytes=0, storage="s"), LayerPlacement(name="b", offset_bytes=64)),
        "group": "0",
    }
    checked = Pool(padding=Padding(policy=policy, alignment=alignment), **fields)
    built = Pool.built(padding=Padding.built(policy=policy, alignment=alignment), **fields)
    assert built == checked
    assert built.fingerprint == checked.fingerprint
    assert built.as_json() == checked.model_dump(mode="json")
    manifests = [
        make(
            engine=EngineId(name="e", version="1"),
            origin="planned",
            rank=Rank(tensor_parallel_size=2),
            storages=(Storage(id="s", storage_bytes=4096),),
            memory=MemoryPlan(budget_bytes=1, used_bytes=1, num_blocks=1, tokens=1, reason="r"),
            options={"a": True, "b": 3},
            pools=(checked,),
        )
        for make in (Manifest, Manifest.built)
    ]
    assert manifests[0].as_json() == manifests[1].as_json() == manifests[0].model_dump(mode="json")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"id": "s", "size": 3}, "Storage.size: got an unknown field"),
        ({"storage_bytes": 3}, "Storage.id: got nothing, expected a value"),
        ({"id": "s", "storage_bytes": 3.0}, "Storage.storage_bytes: got 3.0, expected an integer"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError) as caught:
        Storage.built(**fields)
    assert says in str(caught.value)


def test_invariants_hold_for_built_layouts() -> None:
    fields: dict[str, Any] = {"record": "v4", "page_rows": 64, "payload_bytes": 37_376, "page_stride_bytes": 37_375}
    with pytest.raises(LayoutError) as built:
        PageLayout.built(padding=Padding.built(policy=PaddingPolicy.EXACT), **fields)
    with pytest.raises(LayoutError) as checked:
        PageLayout(padding=Padding(policy=PaddingPolicy.EXACT), **fields)
    assert str(built.value) == str(checked.value)
    assert type(built.value) is type(checked.value)
