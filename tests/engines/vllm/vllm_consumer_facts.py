"""Asks vLLM's own code what it takes: for test_vllm_consumers.py. Argument: OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops
from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import _packed_block_span, _pad_to_supported_q_heads
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

from tests.consumer_forms import SLAB_BYTES, Form, forms

HEADS, QUERIES, WIDTH = 16, 3, 40


def outcome(call: Any, *arguments: Any) -> str | int:
    """The result of a call where it is a number, empty otherwise; or the kind of error and its text."""
    try:
        result = call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return result if isinstance(result, int) else ""


def decode(form: Form, slots: torch.Tensor) -> torch.Tensor:
    """vLLM's CPU decode of one form; the window and the compressed cache are the same pool."""
    query = torch.randn(QUERIES, HEADS, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    out = torch.zeros(QUERIES, HEADS, 512, dtype=torch.bfloat16)
    rows = form.layout.page_rows
    sink = torch.full((HEADS,), float("-inf"))
    none = torch.full((QUERIES, 0), -1, dtype=slots.dtype)
    torch.ops._C.flash_mla_with_kvcache_cpu(
        out, query, form.pages, slots, rows, form.pages, none, rows, sink, 512**-0.5
    )
    return out


def decodes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for rows in (64, 256, 2, 61):
        slots = torch.randint(0, 4 * rows, (QUERIES, WIDTH), generator=torch.Generator().manual_seed(2))
        right = None
        for name, form in forms(page_rows=rows).items():
            out = decode(form, slots)
            right = out if right is None else right
            found[f"{rows} {name}"] = {"same": torch.equal(out, right), "finite": bool(out.isfinite().all())}
    return found


def slot_rules() -> dict[str, Any]:
    """int32 slots, slots of a wider table, and slots beyond the pool, on tight pages."""
    form = forms()["tight"]
    slots = torch.randint(0, 256, (QUERIES, WIDTH), generator=torch.Generator().manual_seed(3))
    dead = slots.clone()
    dead[:, ::2] = -1
    right = decode(form, dead)
    found: dict[str, Any] = {}
    for name, value in (("capacity", 256), ("2**32 + 5", 2**32 + 5), ("-2", -2), ("int64 min", -(2**63))):
        beyond = slots.clone()
        beyond[:, ::2] = value
        found[name] = torch.equal(decode(form, beyond), right)
    empty = decode(form, torch.full_like(slots, -1))
    found["empty row is zero"] = bool((empty == 0).all())
    found["int32"] = outcome(decode, form, slots.to(torch.int32))
    wide = torch.full((QUERIES, 2 * WIDTH), -1)
    found["wider table"] = outcome(decode, form, wide[:, :WIDTH])
    found["other width"] = outcome(decode, form._replace(pages=form.pages[:, :100]), slots)
    return found


def row_spans() -> dict[str, dict[str, str | int]]:
    """The two row-addressing readers on rows of 656 and 1,024 bytes at several page strides."""
    found: dict[str, dict[str, str | int]] = {"dsa": {}, "v4_bf16": {}}
    for stride in (64 * 656, 100 * 656, 100 * 656 + 16, 37440 * 2):
        rows = torch.zeros(4 * stride, dtype=torch.uint8).as_strided((4, 64, 656), (stride, 656, 1))
        found["dsa"][str(stride)] = outcome(lambda view=rows: flat_kv_row_view(view, 64)[1])
    for stride in (64 * 1024, 1_600_000, 1_600_512):
        rows = torch.zeros(4 * stride // 2, dtype=torch.bfloat16).as_strided((4, 64, 512), (stride // 2, 512, 1))
        found["v4_bf16"][str(stride)] = outcome(_packed_block_span, rows)
    return found


def main(out: Path) -> None:
    heads = range(1, 131)
    facts = {
        "slab": SLAB_BYTES,
        "flashmla_heads": [outcome(DeepseekV4FlashMLAAttention.get_padded_num_q_heads, count) for count in heads],
        "flashinfer_heads": [outcome(_pad_to_supported_q_heads, count) for count in heads],
        "row_spans": row_spans(),
        "decode": decodes(),
        "slots": slot_rules(),
    }
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    assert vllm._custom_ops  # registers the operators
    main(Path(sys.argv[1]))
