"""PageView: zero copy, sub-views, identity, staleness, and what the memo keeps (nothing)."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvbridge import PageLayout, PageView, view
from kvbridge.errors import LayoutError, PlaneError, SlotError, StaleViewError, StorageOverrunError
from kvbridge.view import Liveness

V4 = PageLayout.for_rows("v4", page_rows=64)


def pool(pages: int = 3, rows: int = 64, row: int = 584, *, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(pages, rows, row, dtype=torch.uint8, device=device)


def packed(layout: PageLayout, pages: int, offset: int) -> torch.Tensor:
    storage = torch.randint(0, 256, (pages * layout.page_stride_bytes,), dtype=torch.uint8)
    shape = (pages, layout.page_rows, layout.row_bytes)
    return storage.as_strided(shape, (layout.page_stride_bytes, layout.row_bytes, 1), offset)


# Zero copy ------------------------------------------------------------------------------------------------------------


def test_view_shares_the_storage() -> None:
    layout = PageLayout.for_rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=149760)
    tensor = packed(layout, 3, 37440)
    bound = PageView.from_tensor(tensor, layout)
    base = tensor.untyped_storage().data_ptr()
    for part in (bound.pages, bound.payload, bound.data, bound.scales, bound.region("rope")):
        assert part.untyped_storage().data_ptr() == base
    assert bound.base_address == tensor.data_ptr() == base + 37440
    assert (bound.pages.shape, bound.pages.stride()) == ((3, 37376), (149760, 1))
    assert (bound.data.shape, bound.data.stride()) == ((3, 64, 576), (149760, 576, 1))
    assert (bound.scales.shape, bound.scales.stride()) == ((3, 64, 8), (149760, 8, 1))
    assert bound.scales.data_ptr() == bound.base_address + 36864
    bound.region("scales")[2, 63, 6] = 77
    assert int(tensor.untyped_storage()[37440 + 2 * 149760 + 36864 + 63 * 8 + 6]) == 77


def test_binding_allocates_no_cache_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = pool()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a copy was made")

    for name in ("reshape", "contiguous", "clone", "copy_", "to", "flatten"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    assert PageView.from_tensor(tensor, V4).data.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_byte_dtypes(dtype: torch.dtype) -> None:
    tensor = pool().view(dtype)
    bound = PageView.from_tensor(tensor, V4)
    assert bound.pages.dtype is torch.uint8
    assert bound.pages.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("record", "dtype", "width"),
    [
        ("v4_bf16", torch.bfloat16, 512),
        ("mla_bf16", torch.bfloat16, 576),
        ("state_fp32_2048", torch.float32, 2048),
        ("state_fp32_512", torch.float32, 512),
    ],
)
def test_rows_in_the_records_own_dtype(record: str, dtype: torch.dtype, width: int) -> None:
    layout = PageLayout.for_rows(record, page_rows=4, dtype=str(dtype).removeprefix("torch."))
    tensor = torch.arange(2 * 4 * width, dtype=torch.float32).to(dtype).view(2, 4, width)
    bound = PageView.from_tensor(tensor, layout)
    assert bound.pages.shape == (2, 4 * width * dtype.itemsize)
    assert torch.equal(bound.data.contiguous().view(dtype), tensor)
    with pytest.raises(LayoutError, match="one-byte dtype"):
        PageView.from_tensor(tensor, PageLayout.for_rows("v4", page_rows=4))


@pytest.mark.parametrize("shape", [(3, 37376), (3, 64, 584), (3, 1, 64, 584), (3, 64, 1, 584)])
def test_ranks(shape: tuple[int, ...]) -> None:
    bound = PageView.from_tensor(torch.zeros(shape, dtype=torch.uint8), V4)
    assert bound.pages.shape == (3, 37376)


def test_token_granular_tensors() -> None:
    layout = PageLayout.for_rows("mla_bf16", page_rows=16, kind="token_granular", dtype="bfloat16")
    tensor = torch.randn(64, 1, 576).to(torch.bfloat16)
    bound = PageView.from_tensor(tensor, layout)
    assert (bound.num_pages, bound.capacity_rows) == (4, 64)
    assert torch.equal(bound.data[2, 5].view(torch.bfloat16), tensor[2 * 16 + 5, 0])


def test_two_planes() -> None:
    values = PageLayout.for_rows("mla_fp4", page_rows=16, plane="values", kind="token_granular")
    scales = PageLayout.for_rows("mla_fp4", page_rows=16, plane="scales", kind="token_granular")
    assert PageView.from_tensor(torch.zeros(64, 288, dtype=torch.uint8), values).data.shape == (4, 16, 288)
    bound = PageView.from_tensor(torch.zeros(64, 36, dtype=torch.uint8), scales)
    assert bound.scales.shape == (4, 16, 36)
    with pytest.raises(PlaneError, match=r"data: got no such fields, expected a record with data in its pages"):
        _ = bound.data


def test_data_of_a_record_that_is_not_one_run_is_refused() -> None:
    bound = PageView.from_tensor(pool(2, 64, 656), PageLayout.for_rows("dsa", page_rows=64))
    assert bound.scales.stride() == (41984, 656, 1)
    assert bound.region("rope").data_ptr() == bound.base_address + 528
    with pytest.raises(PlaneError, match=r"data: got rope at byte 528, expected byte 512; use region\(name\)"):
        _ = bound.data
    with pytest.raises(PlaneError, match=r"region: got values, expected one of \['nope', 'scales', 'rope'\]"):
        bound.region("values")


def test_row_addresses() -> None:
    layout = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576)
    bound = PageView.from_tensor(packed(layout, 3, 0), layout)
    start = bound.base_address + 37440
    assert bound.row_addresses(65) == ((start + 576, 576), (start + 36864 + 8, 8))
    for slot in (-1, 192, 1 << 40):
        with pytest.raises(SlotError, match=f"slot: got {slot}, expected 0 <= slot < "):
            bound.row_addresses(slot)


def test_pools_without_pages() -> None:
    bound = PageView.from_tensor(pool(0), V4)
    assert (bound.num_pages, bound.capacity_rows) == (0, 0)
    assert bound.pages.shape == (0, 37376)
    assert bound.data.shape == (0, 64, 576)


@pytest.mark.parametrize("value", [None, [1], b"pages"])
def test_no_tensor(value: object) -> None:
    with pytest.raises(TypeError, match=r"tensor: got \w+, expected a strided torch.Tensor"):
        PageView.from_tensor(value, V4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strided"):
        PageView.from_tensor(pool().to_sparse(), V4)


def test_inference_mode_and_parameters() -> None:
    with torch.inference_mode():
        tensor = pool()
        bound = PageView.from_tensor(tensor, V4)
        assert PageView.from_tensor(tensor, V4) is bound
    parameter = torch.nn.Parameter(pool(), requires_grad=False)
    assert PageView.from_tensor(parameter, V4).base_address == parameter.data_ptr()


# Identity -------------------------------------------------------------------------------------------------------------


def test_same_objects_same_view() -> None:
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    assert PageView.from_tensor(tensor, V4) is bound
    assert PageView.from_tensor(tensor.view(3, 64, 584), V4) is not bound
    assert PageView.from_tensor(tensor, PageLayout.for_rows("v4", page_rows=64)) is not bound


def test_memo_keeps_nothing_alive() -> None:
    gc.collect()
    entries = len(view._memo)
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    assert len(view._memo) == entries + 1
    tensor_gone, view_gone = weakref.ref(tensor), weakref.ref(bound)
    del bound
    gc.collect()
    assert view_gone() is None
    assert len(view._memo) == entries
    del tensor
    gc.collect()
    assert tensor_gone() is None


def test_memory_goes_with_the_last_of_tensor_and_view() -> None:
    tensor = pool()
    tensor_gone = weakref.ref(tensor)
    bound = PageView.from_tensor(tensor, V4)
    del tensor
    gc.collect()
    assert bound.liveness is Liveness.LIVE
    assert int(bound.pages.sum()) == 0
    gone = weakref.ref(bound)
    del bound
    gc.collect()
    assert gone() is None
    assert tensor_gone() is None


def test_an_entry_that_was_replaced_leaves_its_successor() -> None:
    tensor = pool()
    old = PageView.from_tensor(tensor, V4)
    tensor.resize_(2, 64, 584)
    new = PageView.from_tensor(tensor, V4)
    del old
    gc.collect()
    assert PageView.from_tensor(tensor, V4) is new


def test_reused_identities_give_new_views() -> None:
    """Allocators hand out the same address again, and Python the same identity."""
    identities = []
    for number in range(300):
        tensor = pool(1 + number % 3)
        bound = PageView.from_tensor(tensor, V4)
        identities.append(id(tensor))
        assert bound.num_pages == 1 + number % 3
        assert bound._tensor() is tensor
        del tensor, bound
    assert len(set(identities)) < len(identities), "no identity was reused, so this showed nothing"


def test_meta_tensors_share_address_zero() -> None:
    first, second = pool(3, device="meta"), pool(7166, device="meta")
    one, two = PageView.from_tensor(first, V4), PageView.from_tensor(second, V4)
    assert one is not two
    assert (one.num_pages, two.num_pages) == (3, 7166)
    assert one.base_address == two.base_address == 0
    assert one.liveness is two.liveness is Liveness.LIVE


def test_slabs_of_many_gigabytes_need_no_memory() -> None:
    """Case 2: 7,166 blocks of 1,039,680 bytes, layer offset 181,440."""
    layout = PageLayout.for_rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=1039680)
    slab = torch.empty(7450346880, dtype=torch.uint8, device="meta")
    bound = PageView.from_tensor(slab.as_strided((7166, 64, 584), (1039680, 584, 1), 181440), layout)
    assert (bound.pages.shape, bound.pages.stride()) == ((7166, 37376), (1039680, 1))
    assert bound.offset_bytes + layout.span_bytes(bound.num_pages) == 7449526016


def test_threads_bind_the_same_tensor() -> None:
    tensors = [pool(pages) for pages in range(1, 9)]
    kept = [PageView.from_tensor(tensor, V4) for tensor in tensors]

    def bind(number: int) -> bool:
        place = number % len(tensors)
        fresh = PageView.from_tensor(pool(1 + number % 3), V4)
        return PageView.from_tensor(tensors[place], V4) is kept[place] and fresh.num_pages == 1 + number % 3

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(bind, range(4000)))


# Staleness ------------------------------------------------------------------------------------------------------------


def test_data_assignment_moves() -> None:
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    tensor.data = pool(5)
    assert bound.liveness is Liveness.MOVED
    again = PageView.from_tensor(tensor, V4)
    assert again is not bound
    assert again.num_pages == 5
    with pytest.raises(
        StaleViewError, match=r"view-stale: storage: got moved \(112128 bytes at 0x\w+\), expected 112128"
    ):
        bound.require_live()


def test_a_tensor_of_the_same_shape_elsewhere_is_bound_anew() -> None:
    tensor, other = pool(), pool()
    bound = PageView.from_tensor(tensor, V4)
    tensor.data = other
    again = PageView.from_tensor(tensor, V4)
    assert again is not bound
    assert again.base_address == other.data_ptr()
    assert bound.liveness is Liveness.MOVED


def test_a_shrunk_storage_without_an_address() -> None:
    """Every meta storage is at address 0, whatever happens to it: only its size tells."""
    tensor = pool(device="meta")
    bound = PageView.from_tensor(tensor, V4)
    tensor.untyped_storage().resize_(2 * 37376)
    assert bound.liveness is Liveness.RESIZED
    with pytest.raises(StorageOverrunError, match="excess 37376"):
        PageView.from_tensor(tensor, V4)


def test_set_moves() -> None:
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    tensor.set_(pool(2))  # type: ignore[call-overload]
    assert bound.liveness is Liveness.MOVED
    assert PageView.from_tensor(tensor, V4).num_pages == 2


def test_a_freed_storage_is_told_apart() -> None:
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    tensor.untyped_storage().resize_(0)  # what sleep modes do
    assert bound.liveness is Liveness.FREED
    with pytest.raises(StaleViewError, match="got freed"):
        bound.require_live()
    with pytest.raises(StorageOverrunError):
        PageView.from_tensor(tensor, V4)


def test_a_resized_storage_is_told_apart() -> None:
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    tensor.untyped_storage().resize_(2 * 37376)
    assert bound.liveness is Liveness.RESIZED
    with pytest.raises(StorageOverrunError, match="needed 112128, available 74752, excess 37376"):
        PageView.from_tensor(tensor, V4)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.resize_(2, 64, 584),
        lambda tensor: tensor.unsqueeze_(1),
        lambda tensor: tensor.as_strided_((1, 64, 584), (37376, 584, 1)),
    ],
)
def test_a_tensor_object_reshaped_in_place_is_bound_anew(change: object) -> None:
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    change(tensor)  # type: ignore[operator]
    again = PageView.from_tensor(tensor, V4)
    assert again is not bound
    assert again.num_pages == tensor.shape[0]
    assert PageView.from_tensor(tensor, V4) is again


def test_a_tensor_object_permuted_in_place_is_refused() -> None:
    tensor = pool()
    bound = PageView.from_tensor(tensor, V4)
    tensor.transpose_(1, 2)
    with pytest.raises(LayoutError):
        PageView.from_tensor(tensor, V4)
    tensor.transpose_(1, 2)
    assert PageView.from_tensor(tensor, V4) is bound
