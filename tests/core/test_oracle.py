"""Layouts, tensors, views and spans against the oracle, which marks the owner of every byte.

pytest tests/core/test_oracle.py                        20,000 random cases
pytest tests/core/test_oracle.py --layouts 200000       thorough
pytest tests/core/test_oracle.py --first-layout 81234 --layouts 1     one case again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings

from kvbridge.errors import LayoutError, SpanError
from kvbridge.geometry import Geometry, TensorShape, check_geometry
from kvbridge.layout import DeclaredLayout, PageLayout, PoolKind, violations
from kvbridge.spans import Operation, Placement
from kvbridge.view import PageView
from tests import oracle, strategies


@pytest.fixture(autouse=True)
def _tiny_records() -> Iterator[None]:
    with strategies.tiny_records():
        yield


def check_case(case: strategies.Case, rng: Random) -> str:
    """Compares the library with the oracle on one case; gives what kind of case it was."""
    layout = check_layout(case.layout)
    if layout is None:
        return "wrong layout"
    geometry = check_tensor(case.tensor, layout)
    check_live(case.tensor, layout, geometry)
    if geometry is None:
        return "wrong tensor"
    check_owners(case.tensor, layout, geometry)
    check_spans(case.tensor, layout, geometry, rng)
    return f"valid, rank {len(case.tensor.shape)}, {layout.kind.value}"


def check_layout(declared: DeclaredLayout) -> PageLayout | None:
    faults = list(violations(declared))
    assert oracle.layout_is_valid(declared) == (not faults), faults
    fields = dict(declared)
    if not faults:
        layout = PageLayout(**{**fields, "record": declared.record or ""})
        return None if layout.kind is PoolKind.INDEX_ONLY else layout
    with pytest.raises(LayoutError) as caught:
        PageLayout(**{**fields, "record": declared.record or ""})
    assert type(caught.value) is type(faults[0])
    return None


def check_tensor(tensor: TensorShape, layout: PageLayout) -> Geometry | None:
    expected = oracle.tensor_is_valid(tensor, layout)
    try:
        geometry = check_geometry(tensor, layout)
    except LayoutError as error:
        assert not expected, error
        return None
    assert expected, geometry
    return geometry


def check_owners(tensor: TensorShape, layout: PageLayout, geometry: Geometry) -> None:
    owners = oracle.pool_owners(layout, geometry.num_pages, tensor.offset_bytes)
    mine = {
        geometry.offset_bytes + page * geometry.page_stride_bytes + region.offset + row * region.row_stride + byte: (
            page,
            row,
            region.name,
            byte,
        )
        for page in range(geometry.num_pages)
        for region in layout.regions
        for row in range(region.rows)
        for byte in range(region.row_bytes)
    }
    assert mine == owners
    for slot in range(geometry.num_pages * layout.page_rows):
        found = [
            tensor.offset_bytes + start + byte for start, length in layout.row_runs(slot) for byte in range(length)
        ]
        expected = sorted(byte for byte, (page, row, *_) in owners.items() if page * layout.page_rows + row == slot)
        assert found == expected


def check_live(tensor: TensorShape, layout: PageLayout, geometry: Geometry | None) -> None:
    live = live_tensor(tensor)
    if live is None:
        return
    if geometry is None:
        with pytest.raises(LayoutError):
            PageView.from_tensor(live, layout)
        return
    view = PageView.from_tensor(live, layout)
    assert PageView.from_tensor(live, layout) is view
    assert view.pages.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
    assert tuple(view.pages.shape) == (geometry.num_pages, layout.payload_bytes)
    assert view.num_pages < 2 or view.pages.stride() == (layout.page_stride_bytes, 1)
    stored = bytes(torch.empty(0, dtype=torch.uint8).set_(live.untyped_storage()).tolist())
    for byte, (page, row, field, place) in oracle.pool_owners(layout, view.num_pages, tensor.offset_bytes).items():
        assert int(view.region(field)[page, row, place]) == stored[byte]
        assert byte + live.untyped_storage().data_ptr() in range(
            view.base_address, view.base_address + layout.span_bytes(view.num_pages)
        )


def live_tensor(tensor: TensorShape) -> torch.Tensor | None:
    """The tensor in memory, with random bytes; None where torch makes none, or only by growing the storage."""
    dtype = getattr(torch, tensor.dtype)
    size = dtype.itemsize
    numbers = (tensor.offset_bytes, *tensor.stride_bytes)
    if tensor.storage_bytes is None or any(number % size or number < 0 for number in numbers) or min(tensor.shape) < 0:
        return None
    steps = zip(tensor.shape, tensor.stride_bytes, strict=True)
    last = sum((count - 1) * step for count, step in steps) + size if all(tensor.shape) else 0
    if tensor.offset_bytes + last > tensor.storage_bytes:
        return None
    storage = torch.randint(0, 256, (tensor.storage_bytes,), dtype=torch.uint8).untyped_storage()
    strides = [stride // size for stride in tensor.stride_bytes]
    return torch.empty(0, dtype=dtype).set_(storage, tensor.offset_bytes // size, tensor.shape, strides)


def check_spans(tensor: TensorShape, layout: PageLayout, geometry: Geometry, rng: Random) -> None:
    place = Placement.from_layout(
        layout,
        offset_bytes=tensor.offset_bytes,
        num_pages=geometry.num_pages,
        storage_bytes=tensor.storage_bytes,
    )
    end = tensor.storage_bytes or 0
    pages = strategies.random_pages(rng, geometry.num_pages)
    for operation in Operation:
        spans = place.pages(pages, operation=operation)
        expected = oracle.bytes_of_pages(layout, list(pages), tensor.offset_bytes, operation)
        assert [byte for start, length in spans for byte in range(start, start + length)] == [
            byte for byte in expected if byte < end
        ]
        assert len(spans) == len(list(spans)) and spans.total_bytes == sum(length for _, length in spans)
        place.check(spans, operation=operation, pages=pages)
    slots = strategies.random_pages(rng, geometry.num_pages * layout.page_rows)
    owners = oracle.pool_owners(layout, geometry.num_pages, tensor.offset_bytes)
    rows = [byte for start, length in place.rows(slots) for byte in range(start, start + length)]
    slot_of = {byte: page * layout.page_rows + row for byte, (page, row, *_) in owners.items()}
    assert Counter(slot_of[byte] for byte in rows) == Counter(
        {slot: times * layout.row_bytes for slot, times in Counter(slots).items()}
    )
    check_plan(place, tensor, pages, rng)


def check_plan(place: Placement, tensor: TensorShape, pages: range | list[int], rng: Random) -> None:
    """A random plan is refused exactly when one of its bytes is nobody's, somebody else's, or outside."""
    layout, end = place.layout, tensor.storage_bytes or 0
    start = rng.randint(tensor.offset_bytes - 2, tensor.offset_bytes + layout.span_bytes(place.num_pages) + 2)
    if place.num_pages and rng.random() < 0.7:
        start = tensor.offset_bytes + rng.randrange(place.num_pages) * layout.page_stride_bytes
    length = rng.choice((1, layout.row_bytes, layout.payload_bytes, layout.page_bytes, layout.page_stride_bytes))
    length *= rng.randint(1, 2)
    owned = pages if rng.random() < 0.3 else range(place.num_pages)
    operation = rng.choice(tuple(Operation))
    allowed = set(oracle.bytes_of_pages(layout, list(owned), tensor.offset_bytes, operation))
    expected = all(0 <= byte < end and byte in allowed for byte in range(start, start + length))
    try:
        place.check([(start, length)], pages=owned, operation=operation)
    except SpanError as error:
        assert not expected, error
    else:
        assert expected, (start, length, operation)


@pytest.mark.timeout(3600)  # the thorough run takes minutes
def test_random_cases(layouts: range) -> None:
    kinds: Counter[str] = Counter()
    for seed in layouts:
        rng = Random(seed)
        case = strategies.random_case(rng)
        try:
            kinds[check_case(case, rng)] += 1
        except BaseException as error:
            error.add_note(f"--first-layout {seed} --layouts 1: {case}")
            raise
    if len(layouts) >= 1000:  # right and wrong ones, of each rank and kind, must all be frequent
        shares = {kind: count / len(layouts) for kind, count in kinds.items()}
        assert min(shares["wrong layout"], shares["wrong tensor"]) > 0.1, shares
        assert sum(share for kind, share in shares.items() if kind.startswith("valid")) > 0.3, shares
        for kind in ("rank 2, paged", "rank 3, paged", "rank 4, paged", "rank 2, token", "rank 3, token"):
            assert any(kind in name and share > 0.01 for name, share in shares.items()), (kind, shares)


@settings(deadline=None)
@given(strategies.cases())
def test_shrinking_cases(case: strategies.Case) -> None:
    with strategies.tiny_records():
        check_case(case, Random(0))
