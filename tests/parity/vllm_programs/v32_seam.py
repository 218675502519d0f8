"""Runs in vLLM's interpreter: V3.2's sparse backend through vLLM's registry, its fp8 kernel on CPU tensors.

python -m tests.parity.vllm_programs.v32_seam FACTS

FlashMLA cannot run here; in its place stands a function that keeps the arguments of vLLM's own call. The implementation
object is vLLM's class without its constructor, which reserves GPU workspace.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PAGES, ROWS, WIDTH, STRIDE = 24, 64, 256, 41_984
HEADS, SCALE = 16, 192**-0.5


def main(out: Path) -> None:
    from vllm.v1.attention.backends.mla import flashmla_sparse
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvbridge.engines.vllm import decode_v32
    from kvbridge.engines.vllm.decode_mode import KernelMode, KernelSwitch

    own = AttentionBackendEnum.FLASHMLA_SPARSE.get_class()
    undo = decode_v32.register(KernelSwitch(KernelMode.ON, None))
    backend = AttentionBackendEnum.FLASHMLA_SPARSE.get_class()
    impl_class = backend.get_impl_cls()
    facts: dict[str, Any] = {
        "backend": [backend.__name__, backend.__mro__[1] is own, backend.get_name() == own.get_name()],
        "impl": [impl_class.__name__, impl_class.__mro__[1] is own.get_impl_cls()],
        "signature": [
            list(inspect.signature(cls._fp8_flash_mla_kernel).parameters)
            for cls in (flashmla_sparse.FlashMLASparseImpl, impl_class)
        ],
    }
    undo()
    facts["given back"] = AttentionBackendEnum.FLASHMLA_SPARSE.get_class() is own
    facts["refused"] = refused(decode_v32)
    os.environ["KVBRIDGE_BACKEND"] = "cpu"
    facts["decodes"] = {
        name: decode(flashmla_sparse, decode_v32, stride, shape)
        for name, stride, shape in (
            ("exact", STRIDE, (3, 1)),
            ("strided, two queries each, gathered heads", STRIDE + 656 * 64, (2, 2)),
        )
    }
    out.write_text(json.dumps(facts, indent=1))


def refused(decode_v32: Any) -> list[str]:
    """Cache formats whose kernel stays vLLM's, and what is said when it is forced."""
    from kvbridge.engine import EngineError
    from kvbridge.engines.vllm.decode_mode import KernelMode

    said = []
    for dtype in ("auto", "nvfp4_ds_mla"):
        assert decode_v32.make_decode(SimpleNamespace(kv_cache_dtype=dtype), KernelMode.ON) is None
        try:
            decode_v32.make_decode(SimpleNamespace(kv_cache_dtype=dtype), KernelMode.FORCE)
        except EngineError as error:
            said.append(str(error))
    return said


def decode(flashmla_sparse: Any, decode_v32: Any, stride: int, shape: tuple[int, int]) -> dict[str, Any]:
    from kvbridge.codec import quantise, scatter_rows
    from kvbridge.kernels import mla
    from kvbridge.layout import PageLayout
    from kvbridge.parity import difference
    from kvbridge.view import PageView

    generator = torch.Generator().manual_seed(32)
    batch, queries = shape
    storage = torch.full((PAGES * stride,), 0xFF, dtype=torch.uint8)
    pages = storage.as_strided((PAGES, ROWS, 656), (stride, 656, 1))
    layout = PageLayout.for_rows("dsa", page_rows=ROWS, policy="packed", page_stride_bytes=stride)
    view = PageView.from_tensor(pages, layout)
    values = torch.randn(PAGES * ROWS, 576, generator=generator)
    scatter_rows(view, torch.arange(PAGES * ROWS), quantise(values, "dsa"))
    q = torch.randn(batch, queries, HEADS, 576, generator=generator).bfloat16()
    slots = torch.randint(0, PAGES * ROWS, (batch, queries, WIDTH), generator=generator, dtype=torch.int32)
    slots[:, :, 100:120] = -1
    slots[-1, -1] = -1  # a query whose rank owns none of its tokens
    call = flashmla_arguments(flashmla_sparse, q, pages, slots)
    flat = call["indices"].reshape(batch * queries, -1)
    caps = mla.Caps(queries=64, heads=HEADS, widths=(WIDTH,), records=("dsa",))
    planned = dataclasses.replace(caps, heads=HEADS if queries == 1 else HEADS // 2)  # gathered under DCP
    out, lse = decode_v32.SparseDecode(planned, call["softmax_scale"]).run(q, pages, slots)
    expected = torch.empty(batch * queries, HEADS, 512)
    expected_lse = torch.empty(batch * queries, HEADS)
    mla.run(
        mla.prepare(mla.plan(caps), backend="reference"),
        q=call["q"][:, :, :HEADS].reshape(batch * queries, HEADS, 576),
        caches=[mla.Cache(view=view, slots=flat)],
        out=expected,
        lse=expected_lse,
        lse_format=mla.LseFormat(empty=float("inf")),
        scale=call["softmax_scale"],
    )
    gap = (lse.transpose(1, 2).reshape(batch * queries, HEADS) - expected_lse)[:-1]
    return {
        "difference": dataclasses.asdict(difference(out.flatten(0, 1), expected)),
        "lse": float(gap.abs().max()),
        "empty": [bool((out[-1, -1] == 0).all()), bool((lse[-1, :, -1] == float("inf")).all())],
        "shapes": [list(out.shape), list(lse.shape)],
        "arguments": sorted(name for name, value in call.items() if value is not None),
        "pages are one": call["k_cache"].data_ptr() == pages.data_ptr(),
    }


class Stop(Exception):
    """FlashMLA would run now."""


def flashmla_arguments(flashmla_sparse: Any, q: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> Any:
    """What vLLM's own method hands to FlashMLA."""
    kept: dict[str, Any] = {}

    def keep(**arguments: Any) -> Any:
        kept.update(arguments)
        raise Stop

    impl = object.__new__(flashmla_sparse.FlashMLASparseImpl)
    impl.fp8_decode_padded_heads, impl.softmax_scale = 64, SCALE
    metadata = SimpleNamespace(dummy_block_table=None, cache_lens=None, scheduler_metadata=SimpleNamespace())
    original, flashmla_sparse.flash_mla_with_kvcache = flashmla_sparse.flash_mla_with_kvcache, keep
    try:
        flashmla_sparse.FlashMLASparseImpl._fp8_flash_mla_kernel(impl, q, pages, slots, metadata)
    except Stop:
        return kept
    finally:
        flashmla_sparse.flash_mla_with_kvcache = original
    raise AssertionError("vLLM's method did not call FlashMLA")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
