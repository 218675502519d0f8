"""Runs in SGLang's interpreter: every mode of SGLang's attention backend, its decode beside kvbridge's, and controls.

    decode_cases.py OUT.json      OUT.json: {"modes": {mode: figures}, "controls": {what was spoiled: figures}}

A control spoils kvbridge's call in one way that must show in the figures: without it a comparison proves nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvbridge.engines.sglang.decode import Decoder
from kvbridge.engines.sglang.parity import MODES, compare_mode


def without_sink(call: dict[str, Any]) -> dict[str, Any]:
    """The sink has no effect."""
    return call | {"attn_sink": torch.full_like(call["attn_sink"], float("-inf"))}


def without_extra_cache(call: dict[str, Any]) -> dict[str, Any]:
    """The compressed rows are left out."""
    return call | {"extra_k_cache": None, "extra_indices_in_kvcache": None, "extra_topk_length": None}


def shifted_slot(call: dict[str, Any]) -> dict[str, Any]:
    """One slot of one query names the row beside it."""
    indices = call["indices"].clone()
    indices[0, 0, 0] += 1 if int(indices[0, 0, 0]) % 2 == 0 else -1
    return call | {"indices": indices}


def longer(call: dict[str, Any]) -> dict[str, Any]:
    """Lengths are ignored: lanes behind them count."""
    return call | {"topk_length": None}


def spoiled(mode: str, spoil: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Figures of a mode when kvbridge, but not the reference, gets a spoiled call."""
    decode = Decoder.decode

    def wrong(self: Decoder, **call: Any) -> Any:
        return decode(self, **(call if self.backend == "reference" else spoil(call)))

    Decoder.decode = wrong  # type: ignore[method-assign]
    try:
        return compare_mode(mode)
    finally:
        Decoder.decode = decode  # type: ignore[method-assign]


def main() -> None:
    results = {
        "modes": {mode: compare_mode(mode) for mode in MODES},
        "controls": {
            "sink": spoiled("swa", without_sink),
            "extra cache": spoiled("c4", without_extra_cache),
            "slot": spoiled("swa", shifted_slot),
            "lengths": spoiled("swa", longer),
        },
    }
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
