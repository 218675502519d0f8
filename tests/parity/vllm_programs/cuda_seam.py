"""Runs in vLLM's interpreter: the decode of vLLM's CUDA attention layers, built for real, on CPU tensors.

python -m tests.parity.vllm_programs.cuda_seam FACTS

The layers are vLLM's own DeepseekV4FlashMLAAttention, built by vLLM's constructor through the choice of class that
kvbridge wraps. Their metadata are vLLM's own dataclasses, C4 slots come from vLLM's own kernel (interpreted). Only what
needs a GPU is left out: streams and events, DeepGEMM's recipe of the output projection, and FlashMLA itself, in
whose place stands a function that keeps the arguments of the call.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STRIDE = 93_888
OFFSETS = {1: (0, 0), 4: (0, 17_280), 128: (37_440, 92_160)}
PAGES = 50
WINDOW_PAGES, MAIN_PAGES = range(1, 40), range(40, 50)  # a block belongs to one group; their bytes overlap
LENGTHS = (700, 131, 1)  # tokens of three sequences, the last of which has one query
QUERIES = (2, 1, 1)  # of each sequence: the first verifies a draft token


def main(out: Path) -> None:
    from kvbridge.engines.vllm import decode_cuda
    from kvbridge.engines.vllm.decode_mode import KernelMode, KernelSwitch

    facts: dict[str, Any] = {}
    undo = decode_cuda.hook_selection(KernelSwitch(KernelMode.ON, None))
    facts["hooked before import"] = decode_cuda.MODULE not in sys.modules
    with tempfile.TemporaryDirectory() as folder:
        config, module, flashmla = start(Path(folder))
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        decode_cuda.log.addHandler(handler)
        decode_cuda.log.setLevel(logging.INFO)
        facts |= contracts(flashmla)
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(config):
            choose = module._select_dsv4_attn_cls
            facts["chosen without a GPU"] = choose(config).__name__  # no CUDA backend here: vLLM's own class
            facts["chosen for every layer"] = choose(config).__name__
            os.environ["KVBRIDGE_BACKEND"] = "cpu"
            chosen = choose(config)
            facts["chosen"] = [chosen.__name__, chosen.__mro__[1].__name__]
            facts |= refusals(decode_cuda, module, config)
            facts["layers"] = {ratio: decode(chosen, flashmla, config, ratio) for ratio in (1, 4, 128)}
        undo()
        facts["given back"] = module._select_dsv4_attn_cls.__module__
        facts["own function"] = not hasattr(module._select_dsv4_attn_cls, "__wrapped__")
    facts["log"] = records
    facts["log"] = records
    out.write_text(json.dumps(facts, indent=1))


def start(folder: Path) -> tuple[Any, Any, Any]:
    """vLLM's configuration of the tiny model, and its CUDA modules."""
    nothing = type("Nothing", (), {"__init__": lambda self, *a, **k: None})
    torch.cuda.Event = torch.cuda.Stream = nothing  # type: ignore[assignment, misc]
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs

    from kvbridge.engines.vllm.decode_model import write_model

    config = EngineArgs(
        model=str(write_model(folder / "tiny")),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "BLHNC"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    import vllm.models.deepseek_v4.nvidia.model as module
    from vllm.models.deepseek_v4.nvidia import flashmla

    flashmla.compute_fp8_einsum_recipe = lambda: ((1, 128, 128), True)
    return config, module, flashmla


def contracts(flashmla: Any) -> dict[str, Any]:
    """What kvbridge's override relies on, from the wheel's own source."""
    from kvbridge.engines.vllm import decode_cuda

    base = flashmla.DeepseekV4FlashMLAAttention
    ours = decode_cuda.decode_class(base)
    return {
        "signature": [list(inspect.signature(cls._forward_decode).parameters) for cls in (base, ours)],
        "overridden": sorted(name for name in vars(ours) if callable(getattr(ours, name)) and name in dir(base)),
    }


def refusals(decode_cuda: Any, module: Any, config: Any) -> dict[str, Any]:
    from kvbridge.engine import EngineError
    from kvbridge.engines.vllm.decode_mode import KernelMode

    seen: dict[str, Any] = {}
    other = module.DeepseekV4FlashInferMLAAttention
    seen["other class"] = decode_cuda.served_class(other, config, KernelMode.ON) is other
    own = module.DeepseekV4FlashMLAAttention
    seen["compare"] = decode_cuda.served_class(own, config, KernelMode.COMPARE) is own
    try:
        decode_cuda.served_class(other, config, KernelMode.FORCE)
    except EngineError as error:
        seen["forced"] = str(error)
    return {"refusals": seen}


def decode(chosen: type, flashmla: Any, config: Any, ratio: int) -> dict[str, Any]:
    """One decode step of one layer, by the override and by vLLM's own method up to FlashMLA."""
    index = {1: 0, 4: 1, 128: 2}[ratio]
    generator = torch.Generator().manual_seed(ratio)
    topk = torch.full((2048, 512), -1, dtype=torch.int32)
    layer: Any = chosen(config, f"model.layers.{index}.attn", topk_indices_buffer=topk, aux_stream_list=None)
    layer.attn_sink.data.copy_(torch.randn(layer.attn_sink.shape, generator=generator) + 2)
    bind(layer, ratio, generator)
    swa, main, positions = metadata(flashmla, layer, ratio, topk, generator)
    tokens = int(swa.num_decode_tokens)
    q = torch.randn(tokens, layer.padded_heads, 512, generator=generator).bfloat16() * 4
    out = torch.full_like(q, float("nan"))
    names = {layer.swa_cache_layer.prefix: swa, layer.prefix: main}
    from vllm.forward_context import set_forward_context

    with set_forward_context({k: v for k, v in names.items() if v is not None}, config):
        layer.forward_mqa(q, None, positions, out)
        views = layer.kvbridge_decode._views
        first = out.clone()
        out.fill_(float("nan"))
        layer.forward_mqa(q, None, positions, out)
        again = layer.kvbridge_decode._views
        call = flashmla_arguments(flashmla, layer, q, swa, main, ratio)
    return {
        "heads": [int(layer.n_local_heads), int(layer.padded_heads)],
        "difference": dataclasses.asdict(compare(call, out, views)),
        "same bits again": torch.equal(first, out),
        "bound once": all(one is two for one, two in zip(views, again, strict=True)),
        "pages": [[view.page_rows, view.page_stride_bytes, view.offset_bytes] for view in views],
        "slots": [list(call["indices"].shape), list(call["extra_indices_in_kvcache"].shape) if ratio > 1 else None],
        "flashmla arguments": sorted(name for name, value in call.items() if value is not None),
    }


def bind(layer: Any, ratio: int, generator: torch.Generator) -> None:
    """Pages in one packed storage, as vLLM's allocator lays them out (captured in tests/engines/vllm/tiny_dsv4)."""
    storage = torch.full((PAGES * STRIDE,), 0xFF, dtype=torch.uint8)
    for owner, offset, rows in (
        (layer.swa_cache_layer, OFFSETS[ratio][0], 64),
        (layer, OFFSETS[ratio][1], 256 // ratio),
    ):
        if owner is layer and ratio == 1:
            continue
        owner.kv_cache = storage.as_strided((PAGES, rows, 584), (STRIDE, 584, 1), offset)
        fill(owner.kv_cache, rows, MAIN_PAGES if owner is layer else WINDOW_PAGES, generator)


def fill(pages: torch.Tensor, rows: int, live: range, generator: torch.Generator) -> None:
    """Random rows, written through kvbridge's own codec."""
    from kvbridge.codec import quantise, scatter_rows
    from kvbridge.layout import PageLayout
    from kvbridge.view import PageView

    layout = PageLayout.for_rows("v4", page_rows=rows, policy="packed", page_stride_bytes=STRIDE)
    values = torch.randn(len(live) * rows, 512, generator=generator)
    slots = torch.arange(live.start * rows, live.stop * rows)
    scatter_rows(PageView.from_tensor(pages, layout), slots, quantise(values, "v4"))


def metadata(flashmla: Any, layer: Any, ratio: int, topk: torch.Tensor, generator: torch.Generator) -> tuple[Any, ...]:
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    requests = torch.tensor([r for r, count in enumerate(QUERIES) for _ in range(count)], dtype=torch.int32)
    positions = torch.tensor(
        [LENGTHS[r] - count + i for r, count in enumerate(QUERIES) for i in range(count)], dtype=torch.int64
    )
    tables = torch.randperm(len(WINDOW_PAGES), generator=generator)[: 3 * 11].view(3, 11).int() + WINDOW_PAGES.start
    tokens = len(requests)
    window = torch.full((tokens, 1, 128), -1, dtype=torch.int32)
    lengths = torch.minimum(positions + 1, torch.tensor(128)).int()
    for token, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        live = torch.arange(max(0, position - 127), position + 1)
        window[token, 0, : len(live)] = tables[request, live // 64] * 64 + live.int() % 64
    tables_main = torch.randperm(len(MAIN_PAGES), generator=generator)[: 3 * 3].view(3, 3).int() + MAIN_PAGES.start
    swa = DeepseekSparseSWAMetadata(
        block_table=tables,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        block_size=64,
        is_valid_token=torch.ones(tokens, dtype=torch.bool),
        token_to_req_indices=requests,
        decode_swa_indices=window,
        decode_swa_lens=lengths,
        decode_swa_width=128,
        num_decodes=len(QUERIES),
        num_decode_tokens=tokens,
        tile_sched_swaonly=SimpleNamespace(),
        tile_sched_c4a=SimpleNamespace(),
        tile_sched_c128a=SimpleNamespace(),
    )
    if ratio == 1:
        return swa, None, positions
    main = DeepseekV4FlashMLAMetadata(
        num_reqs=len(QUERIES),
        max_query_len=2,
        max_seq_len=max(LENGTHS),
        num_actual_tokens=tokens,
        query_start_loc=torch.tensor([0, 2, 3, 4], dtype=torch.int32),
        slot_mapping=swa.slot_mapping,
        block_table=tables_main,
        req_id_per_token=requests,
        block_size=256,
        topk_tokens=512,
    )
    known = ((positions + 1) // ratio).tolist()
    if ratio == 4:
        for token, count in enumerate(known):
            topk[token, :count] = torch.randperm(count, generator=generator).int()
    else:
        # As vLLM's builder gives them: a slice of a wider buffer, so rows are further apart than they are long.
        buffer = torch.full((tokens, 1, 256), -1, dtype=torch.int32)
        for token, count in enumerate(known):
            rows = torch.arange(count, dtype=torch.int32)
            buffer[token, 0, :count] = tables_main[requests[token], rows // 2] * 2 + rows % 2
        main.c128a_global_decode_topk_indices = buffer[:, :, :128]
        main.c128a_decode_topk_lens = torch.tensor(known, dtype=torch.int32)
    return swa, main, positions


class Stop(Exception):
    """FlashMLA would run now."""


def flashmla_arguments(  # noqa: PLR0917
    flashmla: Any, layer: Any, q: Any, swa: Any, main: Any, ratio: int
) -> dict[str, Any]:
    """What vLLM's own `_forward_decode` hands to FlashMLA for the same step."""
    kept: dict[str, Any] = {}

    def keep(**arguments: Any) -> Any:
        kept.update(arguments)
        raise Stop

    original = flashmla.flash_mla_with_kvcache
    flashmla.flash_mla_with_kvcache = keep
    try:
        flashmla.DeepseekV4FlashMLAAttention._forward_decode(
            layer, q, layer.kv_cache if ratio > 1 else None, swa, main, ratio == 1, torch.empty_like(q)
        )
    except Stop:
        return kept
    finally:
        flashmla.flash_mla_with_kvcache = original
    raise AssertionError("vLLM's decode did not call FlashMLA")


def compare(call: dict[str, Any], out: torch.Tensor, views: Any) -> Any:
    """kvbridge's output beside the reference on what FlashMLA would have got."""
    from kvbridge.kernels import mla
    from kvbridge.parity import difference

    slots = [call["indices"].squeeze(1)]
    lengths = [call["topk_length"]]
    if call["extra_k_cache"] is not None:
        slots.append(call["extra_indices_in_kvcache"].squeeze(1))
        lengths.append(call["extra_topk_length"])
    q = call["q"].squeeze(1)
    heads = q.shape[1]
    caps = mla.Caps(queries=len(q), heads=heads, widths=tuple(s.shape[1] for s in slots), records=("v4",) * len(slots))
    prepared = mla.prepare(mla.plan(caps), backend="reference")
    expected = torch.empty(out.shape, dtype=torch.float32)
    caches = [
        mla.Cache(view=view, slots=given, lengths=length)
        for view, given, length in zip(views, slots, lengths, strict=True)
    ]
    mla.run(prepared, q=q, caches=caches, out=expected, scale=call["softmax_scale"], sink=call["attn_sink"])
    return difference(out, expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
