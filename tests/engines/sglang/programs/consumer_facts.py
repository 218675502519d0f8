"""Asks SGLang's, FlashInfer's and b12x's own code what it takes: for test_sglang_consumers.py. Argument: OUT."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flashinfer.mla
import sglang
import torch
from b12x.attention._shared.mla.compressed_api import _validate_compressed_cache_layout
from flashinfer.mla._core import _check_dsv4_sparse_mla_inputs
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout, is_valid_kv_layout_pair
from sglang.kernels.ops.attention.flash_mla_sm120 import _sm120_sparse_decode_fwd
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack, SetKAndS

from tests.consumer_forms import SLAB_BYTES, forms

KERNELS = Path(sglang.__file__).parent / "kernels" / "jit"


def outcome(call: Any, *arguments: Any, **named: Any) -> str:
    """Empty when a call went well, else the kind of error and its text."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def kv_layouts() -> dict[str, Any]:
    return {
        layout.name: {
            "align": layout.page_align,
            "row": layout.bytes_per_token,
            "interleaved": layout.is_interleaved,
            "pages": {rows: layout.page_bytes(rows) for rows in (1, 2, 64, 128, 256)},
            "addresses": layout.row_addressing(64),
            "extra": [other.name for other in KVLayout if is_valid_kv_layout_pair(layout, other)],
        }
        for layout in KVLayout
    }


def flashinfer_heads() -> list[int]:
    """Head counts that the sm_100 entry takes."""

    def call(heads: int) -> None:
        pages = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
        query = torch.zeros(1, 1, heads, 512, dtype=torch.bfloat16)
        check(query, pages, width=128)

    return [heads for heads in range(1, 131) if not outcome(call, heads)]


def flashinfer_widths() -> list[int]:
    """Widths of a row of slots that it takes."""
    query = torch.zeros(1, 1, 16, 512, dtype=torch.bfloat16)
    pages = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
    return [width for width in range(120, 141) if not outcome(check, query, pages, width=width)]


def check(query: torch.Tensor, pages: torch.Tensor, *, width: int) -> None:
    slots = torch.zeros(1, width, dtype=torch.int32)
    lengths = torch.full((1,), 128, dtype=torch.int32)
    _check_dsv4_sparse_mla_inputs(query, pages, slots, pages, lengths, None, None, "HND", None, None)


def b12x_pages() -> dict[str, str]:
    """What its check of V4 and V4.1 pages says of widths, bases and strides."""
    found = {}
    for name, form in forms().items():
        found[f"v4 {name}"] = outcome(_validate_compressed_cache_layout, form.pages, page_size=64, name="c")
    found["v4 short"] = outcome(_validate_compressed_cache_layout, form.pages[:, :-1], page_size=64, name="c")
    storage = torch.zeros(10**6, dtype=torch.uint8)
    shift = (16 - storage.data_ptr() % 16) % 16
    for kind, row in (("swa", 528), ("indexed", 288)):
        for base, stride in ((0, 64 * row), (8, 64 * row), (0, 64 * row + 16), (0, 64 * row + 8)):
            pages = storage.as_strided((3, 64 * row), (stride, 1), shift + base)
            found[f"v41 {kind} base {base} stride {stride - 64 * row}"] = outcome(
                _validate_compressed_cache_layout,
                pages,
                page_size=64,
                name="c",
                cache_format="deepseek_v41",
                cache_kind=kind,
            )
        other = 288 if row == 528 else 528
        found[f"v41 {kind} of the other record"] = outcome(
            _validate_compressed_cache_layout,
            storage[shift:].as_strided((3, 64 * other), (64 * other, 1)),
            page_size=64,
            name="c",
            cache_format="deepseek_v41",
            cache_kind=kind,
        )
    return found


def decode() -> dict[str, dict[str, Any]]:
    """The torch decode of sm_120 on every form: its error, or how far it is from the tight form."""
    found: dict[str, dict[str, Any]] = {}
    for rows in (64, 256, 2):
        query = torch.randn(3, 1, 8, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        slots = torch.randint(0, 4 * rows, (3, 1, 64), generator=torch.Generator().manual_seed(2))
        right = None
        for name, form in forms(page_rows=rows).items():
            result: dict[str, Any] = {"error": "", "same": False}
            try:
                out, _ = _sm120_sparse_decode_fwd(
                    query, form.rows.view(torch.float8_e4m3fn), slots, None, None, 512, 512**-0.5
                )
            except RuntimeError as error:
                result["error"] = str(error)[:200]
            else:
                right = out if right is None else right
                result["same"] = torch.equal(out, right)
            found[f"{rows} {name}"] = result
    return found


def writer() -> dict[str, str]:
    """SGLang's Triton writer on every form, as SGLang itself would hand the buffer over."""
    rows = NopeFp8RopeBf16Pack(
        torch.zeros(2, 448, dtype=torch.float8_e4m3fn),
        torch.zeros(2, 64, dtype=torch.bfloat16),
        torch.full((2, 7), 127, dtype=torch.uint8),
    )
    found = {}
    for name, form in forms().items():
        width = form.layout.page_bytes if name == "padded" else form.layout.payload_bytes
        buffer = form.storage.as_strided((4, width), (form.layout.page_stride_bytes, 1), form.offset)
        slots = torch.tensor([5, 70])
        found[name] = outcome(SetKAndS.execute, SimpleNamespace(page_size=64), buffer, slots, rows)
    return found


def main(out: Path) -> None:
    transfer = (KERNELS / "include/sgl_kernel/deepseek_v4/kvcacheio.cuh").read_text()
    store = (KERNELS / "csrc/deepseek_v4/store.cuh").read_text()
    sm120 = flashinfer.mla.supported_sparse_mla_sm120_configs()
    facts = {
        "kv_layouts": kv_layouts(),
        "slab": SLAB_BYTES,
        "hisparse_rows": int(re.findall(r"kPageSize = (\d+)", transfer)[0]),
        "hisparse_alignment": int(re.findall(r"div_ceil\(kItemBytes \* kPageSize, \d+\) \* (\d+)", transfer)[0]),
        "writer_checks_stride": ".with_strides({kPageBytes, 1})" in store,
        "writer_powers_of_two": "has_single_bit" in store,
        "flashinfer_heads": flashinfer_heads(),
        "flashinfer_widths": flashinfer_widths(),
        "flashinfer_sm120": {
            name: [config.bytes_per_token, config.min_topk, config.page_block_size_is_runtime, config.max_num_heads]
            for name, config in sm120.items()
        },
        "b12x": b12x_pages(),
        "decode": decode(),
        "writer": writer(),
    }
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
