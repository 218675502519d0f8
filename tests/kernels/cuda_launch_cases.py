"""Run by test_cuda_launch.py in a child process whose libcuda is the mock: what reaches the driver.

mla.bind / run  ->  CudaBackend  ->  cuda.bindings  ->  mock: grid, shared bytes, parameter buffer, stream, context
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvbridge import PageLayout, PageView
from kvbridge.kernels import cuda_backend, cuda_build, cuda_tiles, mla
from kvbridge.kernels.backends import get_backend
from kvbridge.kernels.conformance import Case, build
from kvbridge.kernels.conformance.scenario import Scenario
from kvbridge.kernels.cuda_arguments import DecodeArguments, Flag, Switches
from kvbridge.kernels.cuda_driver import CudaDriverError, Kernel, ParameterBuffer
from kvbridge.kernels.cuda_tiles import Variant
from tests.kernels import mock_driver
from tests.kernels.mock_driver import STREAM, Mock, Recorded

DEVICE = torch.device("cuda", 0)
PLAIN = Case(queries=3, heads=16, caches=2, width=133, lengths="boundary", page_rows=61, stride="slab")
SEPARATE = Switches(fused_merge=False)


@pytest.fixture(scope="module")
def mock() -> Mock:
    return Mock()


@pytest.fixture(autouse=True)
def _context() -> Iterator[None]:
    with mock_driver.current():
        yield


def arguments(scenario: Scenario) -> dict[str, Any]:
    given = {name: getattr(scenario, name) for name in ("q", "caches", "out", "scale", "sink", "lse", "lse_format")}
    return {**given, "sequence_of_query": scenario.sequence_of_query}


def launched(mock: Mock, prepared: mla.Prepared, scenario: Scenario) -> list[Recorded]:
    first = mock.launches
    mla.run(prepared, **arguments(scenario))
    return mock.since(first)


def test_device_is_described_as_the_driver_says() -> None:
    device = mock_driver.backend().device(0)
    sms, limit = mock_driver.MULTIPROCESSORS[device.capability], cuda_tiles.SHARED_LIMITS[device.capability]
    assert (device.multiprocessors, device.shared_limit) == (sms, limit)
    assert device.arch in cuda_tiles.ARCHITECTURES


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("record", ["v4", "dsa"])
def test_launch_has_the_grid_shared_memory_and_stream_of_the_plan(mock: Mock, record: str, heads: int) -> None:
    scenario = build(Case(record=record, queries=3, heads=heads, caches=1, width=133))
    prepared = mock_driver.prepared(scenario.plan)
    (launch,) = launched(mock, prepared, scenario)
    variant, launch_of = prepared._state.kernel.variant, prepared._state.launch
    splits = launch_of.splits(3, 133)
    assert splits == 133 // 32 + 1 > 1
    assert launch.blocks == (3, math.ceil(heads / variant.heads), splits)
    assert tuple(launch.block) == (cuda_tiles.THREADS, 1, 1)
    assert launch.shared_bytes == variant.shared_bytes <= prepared._state.kernel.device.shared_limit
    assert launch.stream == STREAM
    assert b"decode_kernel" in launch.name
    assert launch.parameter_bytes == ctypes.sizeof(DecodeArguments)


def test_parameters_are_the_tensors_numbers(mock: Mock) -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan)
    (launch,) = launched(mock, prepared, scenario)
    got = launch.arguments
    q, out, lse = scenario.q, scenario.out, scenario.lse
    assert lse is not None
    assert scenario.sink is not None
    assert (got.q, got.out, got.lse, got.sink) == tuple(t.data_ptr() for t in (q, out, lse, scenario.sink))
    assert (got.q_query_stride, got.q_head_stride) == q.stride()[:2]
    assert (got.out_query_stride, got.out_head_stride) == out.stride()[:2]
    assert (got.lse_query_stride, got.lse_head_stride) == lse.stride()
    assert got.scale_log2 == pytest.approx(scenario.scale * math.log2(math.e), rel=1e-7)
    assert (got.queries, got.heads, got.caches) == (3, 16, 2)
    for cache, bound in zip(scenario.caches, got.cache, strict=False):
        view = cache.view
        assert (bound.base, bound.page_stride_bytes) == (view.base_address, view.page_stride_bytes)
        assert (bound.page_rows, bound.capacity) == (view.page_rows, view.num_pages * view.page_rows)
        assert (bound.slots, bound.slots_stride) == (cache.slots.data_ptr(), cache.slots.stride(0))
        assert bound.width == cache.slots.shape[1]
        assert cache.lengths is not None
        assert bound.lengths == cache.lengths.data_ptr()
        assert bound.format == cuda_tiles.FORMATS[view.layout.record]
        aligned = not (view.base_address | view.page_stride_bytes) % 16
        assert bound.piece_bytes == (16 if aligned else 8)
        for row in (0, 1, view.page_rows - 1, view.page_rows):
            page = bound.base + row // view.page_rows * bound.page_stride_bytes
            data, in_page = page + row % view.page_rows * bound.row_stride_bytes, row % view.page_rows
            scales = page + bound.scales_offset_bytes + in_page * bound.scales_stride_bytes
            runs = ((data, bound.data_bytes), (scales, bound.scales_bytes))
            assert tuple(run for run in runs if run[1]) == view.row_addresses(row)
    workspace = prepared.workspace
    assert workspace is not None
    start, end = workspace.data_ptr(), workspace.data_ptr() + workspace.numel()
    variant, blocks = prepared._state.kernel.variant, 3 * got.splits * prepared._state.launch.head_tiles
    assert got.counters == start
    assert got.partial_state >= got.counters + 4 * 3 * prepared._state.launch.head_tiles
    assert got.partial_out >= got.partial_state + 4 * 3 * variant.heads * blocks
    assert end >= got.partial_out + 4 * 512 * variant.heads * blocks


def test_flags_say_dtype_lse_and_switches(mock: Mock) -> None:
    scenario = build(Case(out="fp32", lse="two"))
    (launch,) = launched(mock, mock_driver.prepared(scenario.plan), scenario)
    assert Flag(launch.arguments.flags) == Flag.OUT_FP32 | Flag.LSE_BASE2 | Flag.FUSED_MERGE | Flag.QUERY_VECTORS
    scenario = build(Case(lse="with_sink"))
    scenario.q = torch.zeros(3 * 16 * 512 + 1, dtype=torch.bfloat16)[1:].view(3, 16, 512)  # not 16-byte aligned
    plain = mock_driver.backend(Switches(fused_merge=False, pipelined=False))
    first, _ = launched(mock, mock_driver.prepared(scenario.plan, plain), scenario)
    assert Flag(first.arguments.flags) == Flag.LSE_WITH_SINK | Flag.PLAIN_PIPELINE


def test_separate_merge_is_a_second_launch_over_queries_and_head_tiles(mock: Mock) -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan, mock_driver.backend(SEPARATE))
    decode, merge = launched(mock, prepared, scenario)
    assert b"merge_kernel" in merge.name
    assert merge.blocks == (*decode.blocks[:2], decode.arguments.merge_blocks) == (*decode.blocks[:2], 1)
    assert merge.shared_bytes == cuda_tiles.MERGE_BYTES
    assert bytes(merge.parameters) == bytes(decode.parameters)
    (fused,) = launched(mock, mock_driver.prepared(scenario.plan), scenario)
    assert fused.arguments.flags == decode.arguments.flags | Flag.FUSED_MERGE


def test_merge_is_a_second_launch_with_a_block_per_head_where_one_block_would_read_much(mock: Mock) -> None:
    default = mock_driver.backend(cuda_backend.BACKEND.switches)
    scenario = build(Case(queries=1, heads=64, caches=2, width=576))
    decode, merge = launched(mock, mock_driver.prepared(scenario.plan, default), scenario)
    heads = default.launch_of(scenario.plan, 0).variant.heads
    assert decode.blocks[2] * heads > 96
    assert not decode.arguments.flags & Flag.FUSED_MERGE
    assert merge.blocks == (1, -(-64 // heads), heads) and merge.arguments.merge_blocks == heads
    scenario = build(Case(queries=1, heads=8, caches=1, width=128))
    (fused,) = launched(mock, mock_driver.prepared(scenario.plan, default), scenario)
    assert fused.arguments.flags & Flag.FUSED_MERGE and fused.blocks[2] == 4


def test_workspace_off_sixteen_bytes_is_refused() -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan)
    assert prepared.workspace is not None
    prepared.workspace = torch.zeros(prepared.workspace.numel() + 64, dtype=torch.uint8)[8:]
    with pytest.raises(CudaDriverError, match=r"workspace.data_ptr\(\): got 0x[0-9a-f]+8, expected a multiple of 16"):
        mla.bind(prepared, **arguments(scenario))


def test_batch_invariant_never_splits_and_never_merges(mock: Mock) -> None:
    scenario = build(PLAIN, mode=mla.Mode.BATCH_INVARIANT)
    prepared = mock_driver.prepared(scenario.plan, mock_driver.backend(SEPARATE))
    (launch,) = launched(mock, prepared, scenario)
    assert launch.blocks[2] == launch.arguments.splits == 1
    assert prepared.workspace is None


def test_update_patches_tensors_and_counts_and_nothing_else(mock: Mock) -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan)
    bound = mla.bind(prepared, **arguments(scenario))
    first = mock.launches
    bound.run()
    q, out = scenario.q.clone(), scenario.out.clone()
    bound.run(q=q, out=out)
    slots = [cache.slots[:2] for cache in scenario.caches]
    lengths = [cache.lengths[:2] for cache in scenario.caches if cache.lengths is not None]
    assert scenario.lse is not None
    bound.run(q=q[:2], out=out[:2], lse=scenario.lse[:2], slots=slots, lengths=lengths)
    before, fresh, fewer = mock.since(first)
    assert changed(before.arguments, fresh.arguments) == {"q", "out"}
    assert (fresh.arguments.q, fresh.arguments.out) == (q.data_ptr(), out.data_ptr())
    assert {"queries"} <= changed(fresh.arguments, fewer.arguments) <= {"queries", "splits", "cache"}
    assert fewer.blocks[0] == fewer.arguments.queries == 2
    assert fewer.blocks[2] == fewer.arguments.splits == prepared._state.launch.splits(2, sum(s.shape[1] for s in slots))


def changed(one: DecodeArguments, other: DecodeArguments) -> set[str]:
    """Names of the fields whose bytes differ."""
    found = set()
    for name, *_ in DecodeArguments._fields_:
        field = getattr(DecodeArguments, name)
        bytes_of = [bytes(each)[field.offset : field.offset + field.size] for each in (one, other)]
        if bytes_of[0] != bytes_of[1]:
            found.add(name)
    return found


def test_seventy_thousand_queries_lie_on_grid_x(mock: Mock) -> None:
    queries, heads = 70_000, 8
    plan = mla.plan(mla.Caps(queries=queries, heads=heads, widths=(1,), records=("v4",)))
    layout = PageLayout.for_rows("v4", page_rows=64)
    view = PageView.from_tensor(torch.zeros(1, 64, 584, dtype=torch.uint8), layout)
    slots = torch.zeros(queries, 1, dtype=torch.int32)
    first = mock.launches
    mla.run(
        mock_driver.prepared(plan),
        q=torch.zeros(1, heads, 512, dtype=torch.bfloat16).expand(queries, heads, 512),
        caches=[mla.Cache(view=view, slots=slots)],
        out=torch.empty(queries, heads, 512, dtype=torch.bfloat16),
        scale=1.0,
    )
    (launch,) = mock.since(first)
    assert launch.blocks == (queries, 1, 1)
    assert launch.blocks[0] > 65_535


def test_no_query_launches_nothing(mock: Mock) -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan)
    first = mock.launches
    caches = [mla.Cache(view=cache.view, slots=cache.slots[:0]) for cache in scenario.caches]
    mla.run(prepared, q=scenario.q[:0], caches=caches, out=scenario.out[:0], scale=1.0)
    assert mock.launches == first


def test_prepare_under_capture_is_refused_and_loads_nothing(mock: Mock) -> None:
    plan = build(PLAIN).plan
    loads = mock.loads
    with mock.capturing(), pytest.raises(CudaDriverError, match="expected to be called before capture"):
        mock_driver.backend().prepare(plan, DEVICE)
    assert mock.loads == loads


def test_the_mock_refuses_module_loads_under_capture(mock: Mock) -> None:
    backend = mock_driver.backend()
    launch = backend.launch_of(build(PLAIN).plan, 0)
    device = backend.device(0)
    cubin = cuda_build.get_cubin(launch.variant, device.arch)
    text = rf"loading {launch.variant.decode_name}.*{device.arch}.*captured"
    with mock_driver.current() as driver, mock.capturing(), pytest.raises(CudaDriverError, match=text):
        Kernel(driver, device, launch.variant, cubin)


def test_bound_calls_run_under_capture(mock: Mock) -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan)
    bound = mla.bind(prepared, **arguments(scenario))
    first, loads = mock.launches, mock.loads
    with mock.capturing():
        bound.run()
        mla.run(prepared, **arguments(scenario))
    bound.run()
    assert [launch.captured for launch in mock.since(first)] == [1, 1, 0]
    assert mock.loads == loads


def test_a_variant_is_loaded_once_for_all_plans(mock: Mock) -> None:
    backend = mock_driver.backend()
    plan = build(PLAIN).plan
    backend.prepare(plan, DEVICE)
    loads = mock.loads
    backend.prepare(plan, DEVICE)
    assert mock.loads == loads


def test_launch_from_a_thread_without_a_context(mock: Mock) -> None:
    scenario = build(PLAIN)
    bound = mla.bind(mock_driver.prepared(scenario.plan), **arguments(scenario))
    first, seen = mock.launches, []

    def work() -> None:
        bound.run()
        seen.append(mock.current_device)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert mock.launches == first + 1
    assert seen == [-1], "the thread's contexts are as before"


def test_second_device_has_its_own_module_workspace_and_context(mock: Mock) -> None:
    scenario = build(PLAIN)
    backend = mock_driver.backend()
    first, second = (
        mock_driver.prepared(scenario.plan, backend),
        mock_driver.prepared(scenario.plan, backend, ordinal=1),
    )
    assert second._state.launch.multiprocessors == first._state.launch.multiprocessors + 1
    assert backend.workspace_bytes(scenario.plan, torch.device("cuda", 1)) == second.workspace_bytes
    (launch,) = launched(mock, second, scenario)  # device 0 is current
    assert (launch.device, launch.stream) == (1, STREAM + 1)
    assert mock.current_device == 0


def test_shared_memory_is_opted_into_before_launch(mock: Mock) -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan)
    kernel = prepared._state.kernel
    assert kernel.variant.shared_bytes > 48 * 1024, "such a tile needs the opt-in"
    merge_first = mock.launches
    buffer = ParameterBuffer(DecodeArguments())
    kernel.launch((1, 1, 1), STREAM, buffer, merge=True)
    kernel._merge, kernel._decode = kernel._decode, kernel._merge
    with pytest.raises(CudaDriverError, match="shared memory not opted into"):
        kernel.launch((1, 1, 1), STREAM, buffer)  # the merge kernel never asked for so much
    kernel._merge, kernel._decode = kernel._decode, kernel._merge
    assert mock.launches == merge_first + 1


def test_tile_above_the_device_limit_is_refused_before_the_driver_sees_it() -> None:
    backend = mock_driver.backend()
    device = backend.device(0)
    tall = Variant(cuda_tiles.formats_of(("mla_bf16",)), 64, stages=2)
    variant = tall if tall.shared_bytes > device.shared_limit else Variant(tall.formats, 64, tokens=64, stages=3)
    with mock_driver.current() as driver, pytest.raises(CudaDriverError) as raised:
        Kernel(driver, device, variant, None)
    assert f"got {variant.shared_bytes} bytes, expected at most {device.shared_limit}" in str(raised.value)


@pytest.mark.parametrize(
    ("grid", "why"), [((0, 1, 1), "grid"), ((1, 65_536, 1), "grid"), ((1, 1, 65_536), "grid"), ((2**31, 1, 1), "grid")]
)
def test_grid_limits_are_enforced_and_named(mock: Mock, grid: tuple[int, int, int], why: str) -> None:
    kernel = mock_driver.prepared(build(PLAIN).plan)._state.kernel
    with pytest.raises(CudaDriverError) as raised:
        kernel.launch(grid, STREAM, ParameterBuffer(DecodeArguments()))
    text = str(raised.value)
    assert f"launching {kernel.variant.decode_name} on device 0 ({kernel.device.arch}) with grid {grid}" in text
    assert "CUDA_ERROR_INVALID_VALUE" in text
    assert mock.refusal == why


def test_parameter_buffer_must_have_the_size_the_cubin_declares(mock: Mock) -> None:
    kernel = mock_driver.prepared(build(PLAIN).plan)._state.kernel

    class Longer(ctypes.Structure):
        _fields_ = [("call", DecodeArguments), ("more", ctypes.c_int64)]

    with pytest.raises(CudaDriverError, match="size of the parameter buffer"):
        kernel.launch((1, 1, 1), STREAM, ParameterBuffer(Longer()))
    kernel.launch((1, 1, 1), STREAM, ParameterBuffer(DecodeArguments()))


def test_cubin_of_another_architecture_is_refused_with_both_named() -> None:
    backend = mock_driver.backend()
    device = backend.device(0)
    other = "sm_80" if device.capability >= 90 else "sm_90a"
    variant = backend.launch_of(build(PLAIN).plan, 0).variant
    cubin = cuda_build.get_cubin(variant, other)
    with mock_driver.current() as driver, pytest.raises(CudaDriverError) as raised:
        Kernel(driver, device, variant, cubin)
    assert device.arch in str(raised.value)
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in str(raised.value)


def test_missing_device_is_translated() -> None:
    with pytest.raises(CudaDriverError, match=r"cuDeviceGet\(7\): got CUDA_ERROR_INVALID_DEVICE"):
        mock_driver.backend().device(7)


@pytest.mark.parametrize(("field", "value"), [("base_address", 4), ("page_stride_bytes", 12)])
def test_pages_off_eight_bytes_are_refused(field: str, value: int) -> None:
    scenario = build(PLAIN)
    prepared = mock_driver.prepared(scenario.plan)
    rows, payload = 64, 64 * 584
    stride, offset = (payload + 4, 0) if field == "page_stride_bytes" else (payload + 8, 4)
    storage = torch.zeros(3 * stride + 64, dtype=torch.uint8)
    shift = offset - storage.data_ptr() % 8
    layout = PageLayout.for_rows("v4", page_rows=rows, policy="packed", page_stride_bytes=stride)
    pages = storage.as_strided((2, rows, 584), (stride, 584, 1), shift % 8)
    view = PageView.from_tensor(pages, layout)
    assert getattr(view, field) % 8 == value % 8
    cache = mla.Cache(view=view, slots=scenario.caches[0].slots)
    with pytest.raises(CudaDriverError, match=rf"caches\[0\].view.{field}: got \d+, expected a multiple of 8 bytes"):
        mla.run(prepared, q=scenario.q, caches=[cache], out=scenario.out, scale=1.0)


def test_backend_is_offered_on_cuda_only_and_its_variants_have_names() -> None:
    assert cuda_backend.BACKEND.missing("cuda") is None
    assert cuda_backend.BACKEND.missing("cpu") == "runs on cuda tensors, not on cpu"
    unread = mla.plan(mla.Caps(queries=1, heads=8, widths=(1,), records=("mla_fp8",)))
    assert str(cuda_backend.BACKEND.unsupported(unread)).startswith("record mla_fp8: expected one of ['dsa'")
    for name in ("cuda:plain", "cuda:separate-merge", "cuda:fused-merge"):
        assert get_backend(name).name == name
