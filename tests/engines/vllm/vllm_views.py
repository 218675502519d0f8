"""Runs in vLLM's interpreter: adapters over real allocations; prints what happened as JSON.

allocation view [B, 1, N, C] --views_of--> PageView on the same storage
bound view of smaller kernel blocks --> refused   altered stride --> finding   asleep, replaced --> told apart
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker import utils as worker
from vllm.v1.worker.gpu_worker import Worker

from kvbridge.engines.vllm import lifetime, plugin
from kvbridge.engines.vllm.declared import declared_caches
from kvbridge.engines.vllm.layouts import bind_cache, installed_version, view_of_layer, views_of
from kvbridge.engines.vllm.tensors import captured_manifest
from kvbridge.errors import LayoutError, StaleViewError
from kvbridge.startup import StartupAuditError
from tests.engines.vllm import vllm_cases as cases
from tests.engines.vllm.vllm_allocator import Allocated, allocate, pretend_device

TINY = cases.Case("tiny", cases.v4(cases.TINY), {"arch": "cpu"})
KERNEL_BLOCKS = cases.Case("v41-256", cases.v41([2, 1, 2, 0], [0, 1]), {"block-size": 256})
CLASSIC = cases.Case("v32", cases.classic(3, sparse=True), {"kv-cache-dtype": "fp8_ds_mla"})


def zero_copy(case: cases.Case) -> dict[str, Any]:
    """Views share storage and address with the tensors, and a page written through one changes no other page."""
    allocated = allocate(case)
    views = views_of(allocated.kv_caches, allocated.config)
    again = views_of(allocated.kv_caches, allocated.config)
    first = next(iter(views.values()))
    groups = allocated.config.kv_cache_groups
    layers_of_group = {name: index for index, group in enumerate(groups) for name in group.layer_names}
    group_of = {name: layers_of_group[name.split("#")[0]] for name in views}
    untouched = True
    for name, view in views.items():
        view.pages[1].fill_(0x5A)
        for other, neighbour in views.items():
            if other != name and group_of[other] == group_of[name]:
                untouched &= int(neighbour.pages.count_nonzero()) == 0
        outside = int(first.pages.untyped_storage().nbytes()) - view.layout.payload_bytes
        whole = torch.empty(0, dtype=torch.uint8).set_(view.pages.untyped_storage())
        untouched &= int((whole == 0).sum()) == outside
        view.pages[1].fill_(0)
    return {
        "layers": len(views),
        "same_storage": all(
            view.pages.untyped_storage().data_ptr()
            == allocated.kv_caches[name.split("#")[0]].untyped_storage().data_ptr()
            for name, view in views.items()
        ),
        "same_address": all(
            view.pages.data_ptr() == allocated.kv_caches[name].data_ptr()
            for name, view in views.items()
            if "#" not in name
        ),
        "same_objects": all(again[name] is view for name, view in views.items() if "#" not in name),
        "neighbours_untouched": untouched,
    }


def bound_layers(allocated: Allocated) -> dict[str, Any]:
    """Binds real layers as a model runner does and reads them back."""
    same = {}
    for name, layer in allocated.layers.items():
        if not hasattr(layer.module, "bind_kv_cache"):
            continue
        layer.module.bind_kv_cache(allocated.kv_caches[name])
        with set_current_vllm_config(allocated.vllm_config, check_compile=False):
            allocated.vllm_config.cache_config.kv_cache_layout = allocated.layout.name
            view = view_of_layer(layer.module, allocated.vllm_config)
        same[name] = view.pages.data_ptr() == allocated.kv_caches[name].data_ptr()
    return {"layers": len(same), "same_address": all(same.values())}


def kernel_views() -> dict[str, Any]:
    """The view that vLLM binds to a V4.1 layer whose kernel block is smaller than the block."""
    allocated = allocate(KERNEL_BLOCKS)
    name = "model.layers.0.attn"
    pages = [cache for cache in declared_caches(allocated.config, version=installed_version()) if cache.tensor == name]
    layer = allocated.layers[name]
    group = worker.AttentionGroup(layer.backend, [name], layer.spec, pages[0].group)
    group.kernel_block_size = 128
    bound = group.map_kv_cache_to_kernel_blocks(allocated.kv_caches[name])
    try:
        bind_cache(pages[0], bound)
        refusal = ""
    except LayoutError as fault:
        refusal = f"{type(fault).__name__}: {fault}"
    _, findings = captured_manifest({**allocated.kv_caches, name: bound}, allocated.config, version=installed_version())
    # A kernel's page of the bound view is one of the pages that the allocation's view was divided into.
    views = views_of(allocated.kv_caches, allocated.config)
    starts = [
        bound.data_ptr() + block * allocated.kv_caches[name].stride(0) + page * bound.stride(0)
        for page in range(len(pages))
        for block in range(cases.NUM_BLOCKS)
    ]
    return {
        "refusal": refusal,
        "findings": [entry.document() for entry in findings],
        "bound_shape": list(bound.shape),
        "allocated_shape": list(allocated.kv_caches[name].shape),
        "pages": [cache.name for cache in pages],
        "page_starts_agree": starts
        == [views[cache.name].pages[block].data_ptr() for cache in pages for block in range(cases.NUM_BLOCKS)],
    }


def other_attention() -> dict[str, Any]:
    """A model without MLA: pages of 256 keys and 256 values are as wide as a row of 512 bf16, and are none."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=256, dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.attn"
    page = spec.page_size_bytes
    placed = KVCacheTensor(size=4 * page, layers=[name], layer_stride=4 * page, block_stride=page)
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[placed], kv_cache_groups=[KVCacheGroupSpec([name], spec)])
    kv_caches = worker.allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, [16])
    manifest, findings = captured_manifest(kv_caches, config, version=installed_version())
    return {"pools": len(manifest.pools), "findings": [str(entry) for entry in findings]}


def altered_stride() -> dict[str, Any]:
    """One layer's pages lie 576 bytes closer than vLLM declares."""
    allocated = allocate(TINY)
    name = "model.layers.1.attn"
    tensor = allocated.kv_caches[name]
    narrow = tensor.as_strided(tensor.shape, (tensor.stride(0) - 576, *tensor.stride()[1:]))
    manifest, findings = captured_manifest(
        {**allocated.kv_caches, name: narrow}, allocated.config, version=installed_version()
    )
    return {
        "findings": [str(entry) for entry in findings],
        "strides": sorted({pool.page_stride_bytes for pool in manifest.pools}),
    }


def states() -> dict[str, Any]:
    """Sleep, wake-up, another allocation, a freed storage. Sleep needs a GPU's allocator; here it only returns."""
    Worker.sleep = lambda self, level=1: None
    Worker.wake_up = lambda self, tags=None: None
    worker_object = object.__new__(Worker)
    lifetime.watch()
    name = "model.layers.1.attn"
    seen: dict[str, Any] = {}
    allocated = allocate(TINY)
    caches = lifetime.bind(allocated.kv_caches, allocated.config)
    seen["bound"] = (caches.state(name), caches.contents_kept)
    worker_object.sleep(level=1)
    seen["asleep"] = (caches.state(name), caches.contents_kept)
    try:
        caches.require_live(name)
    except StaleViewError as fault:
        seen["message"] = str(fault)
    worker_object.wake_up(tags=["weights"])
    seen["weights_only"] = (caches.state(name), caches.contents_kept)
    worker_object.wake_up()
    seen["awake"] = (caches.state(name), caches.contents_kept)
    second = allocate(TINY)
    seen["replaced"] = (caches.state(name), caches.contents_kept)
    newer = lifetime.bind(second.kv_caches, second.config)
    seen["newer"] = (newer.state(name), newer.contents_kept)
    next(iter(second.kv_caches.values())).untyped_storage().resize_(0)
    seen["freed"] = (newer.state(name), newer.contents_kept)
    lifetime.unwatch()
    return seen


def plugin_faults(folder: Path) -> dict[str, Any]:
    """The plugin's own faults leave the engine alone; findings stop it under `error` only."""
    original = worker.allocate_kv_cache
    plugin.register()
    seen: dict[str, Any] = {"off_touches_nothing": worker.allocate_kv_cache is original}
    blocked = folder / "a-file"
    blocked.write_text("")
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    plugin.log.addHandler(Keep())
    os.environ.update(KVBRIDGE_AUDIT="error", KVBRIDGE_MANIFEST_DIR=str(blocked))
    plugin.register()
    seen["on_wraps"] = worker.allocate_kv_cache is not original
    seen["layers_in_spite_of_fault"] = len(allocate(TINY).kv_caches)
    seen["log"] = records
    worker.create_kv_cache_views = _closer(worker.create_kv_cache_views)
    os.environ["KVBRIDGE_MANIFEST_DIR"] = str(folder)
    plugin._state["registered"] = False
    worker.allocate_kv_cache = original
    plugin.register()
    try:
        allocate(TINY)
        seen["stopped"] = ""
    except StartupAuditError as stop:
        seen["stopped"] = str(stop)
    seen["written"] = sorted(path.name for path in folder.glob("*.json"))
    return seen


def _closer(original: Any) -> Any:
    def create_kv_cache_views(raw: Any, spec: Any, num_blocks: int, layout: Any, tensor: Any, **rest: Any) -> Any:
        views = original(raw, spec, num_blocks, layout, tensor, **rest)
        if "model.layers.1.attn" in tensor.layers:
            first = views[0]
            views[0] = first.as_strided(first.shape, (first.stride(0) - 576, *first.stride()[1:]))
        return views

    return create_kv_cache_views


def main() -> None:
    out = Path(sys.argv[1])
    pretend_device()
    facts = {
        "tiny": zero_copy(TINY),
        "v41": zero_copy(cases.Case("v41", cases.v41([2, 1, 2, 0], [0, 1]))),
        "v41_several_pages": zero_copy(KERNEL_BLOCKS),
        "classic": zero_copy(CLASSIC),
        "bound": {case.name: bound_layers(allocate(case)) for case in (TINY, CLASSIC)},
        "kernel_views": kernel_views(),
        "other_attention": other_attention(),
        "altered": altered_stride(),
        "states": states(),
        "plugin": plugin_faults(out.parent),
    }
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
