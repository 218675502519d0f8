"""Runs in vLLM's interpreter: one engine after another in this process, each under another switch; facts as JSON.

python -m tests.parity.vllm_programs.switches FACTS
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CASES: Mapping[str, Mapping[str, str]] = {
    "off": {},
    "on": {"KVBRIDGE_DECODE": "on"},
    "compare": {"KVBRIDGE_DECODE": "compare"},
    "unsupported": {"KVBRIDGE_DECODE": "on", "KVBRIDGE_BACKEND": "cuda"},
    "forced": {"KVBRIDGE_DECODE": "force", "KVBRIDGE_BACKEND": "cuda"},
    "connector": {},
    "off again": {},
}


class Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def owners() -> dict[str, str]:
    """Whose object stands behind every name that the plugin may replace: the module that defined it."""
    import torch

    from kvbridge.engines.vllm.after_import import AfterImport
    from kvbridge.engines.vllm.decode_switch import PATCHED

    found = {}
    for module, name in PATCHED:
        holder = torch.ops._C if module == "torch.ops._C" else sys.modules.get(module)
        value = getattr(holder, name, None)
        if value is not None:
            found[f"{module}.{name}"] = getattr(value, "__module__", None) or type(value).__module__
    # The work-arounds of the tests' environment wait for imports as well; they are no part of the plugin.
    waiting = {finder.callback.__module__ for finder in sys.meta_path if isinstance(finder, AfterImport)}
    found["sys.meta_path"] = ", ".join(sorted(waiting - {"kvbridge.engines.vllm.workarounds"}))
    return found


def probe() -> dict[str, Any]:
    """Calls of the operator that the kernel must leave to vLLM's own, or serve: are the outputs those of vLLM's own?"""
    import torch

    from kvbridge.engines.vllm.decode import DECODER

    layer = next(layer for layer in DECODER.layers.values() if layer.kind == "c4")
    sink = layer._sink
    window, extra = layer.views
    elsewhere = window.pages.clone()
    most = layer.prepared.plan.caps.queries
    seen: dict[str, Any] = {}
    for name, queries, given, pages in (
        ("served", 2, sink, window.pages),
        ("unknown sink", 2, sink.clone(), window.pages),
        ("pages elsewhere", 2, sink, elsewhere),
        ("more queries than planned", most + 1, sink, window.pages),
    ):
        generator = torch.Generator().manual_seed(5)
        q = torch.randn(queries, 64, 512, generator=generator).bfloat16()
        slots = torch.full((queries, 128), -1)
        slots[:, :40] = torch.arange(64, 104)  # block 1, the first prompt's
        extra_slots = torch.full((queries, 512), -1)
        arguments = (q, pages, slots, 64, extra.pages, extra_slots, 64, given, 0.04)
        ours, theirs = torch.empty_like(q), torch.empty_like(q)
        calls = DECODER.calls
        torch.ops._C.flash_mla_with_kvcache_cpu(ours, *arguments)
        DECODER._original(theirs, *arguments)
        seen[name] = {
            "served": DECODER.calls - calls,
            "same bits as vLLM's": torch.equal(ours, theirs),
            "close": bool(((ours - theirs).float().norm() / theirs.float().norm()) < 5e-3),
        }
    return seen


def connector() -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="KvbridgeConnector",
            kv_connector_module_path="kvbridge.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"audit": "off", "kernel": "force"},
        )
    }


def run(model: Path, folder: Path, more: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from kvbridge.engines.vllm.decode import DECODER
    from kvbridge.engines.vllm.decode_live import skip_unread_metadata
    from kvbridge.engines.vllm.decode_model import register_loader

    skip_unread_metadata()
    before = DECODER.calls
    facts: dict[str, Any] = {"tokens": None, "error": ""}
    try:
        engine: Any = LLM(
            model=str(model),
            load_format=register_loader(),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=2,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=64 << 20,
            dtype="bfloat16",
            **more,
        )
        prompts = [{"prompt_token_ids": [(7 * i + 3) % 1000 + 2 for i in range(length)]} for length in (150, 40)]
        answers = engine.generate(
            prompts, SamplingParams(temperature=0, max_tokens=3, detokenize=False), use_tqdm=False
        )
        facts["tokens"] = [list(answer.outputs[0].token_ids) for answer in answers]
        if DECODER.installed and DECODER.observer is None:
            facts["probes"] = probe()
        del engine
    except Exception as error:
        chain: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            chain.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        facts["error"] = " <- ".join(chain)
    facts |= {"owners": owners(), "calls": DECODER.calls - before, "fallbacks": dict(DECODER.fallbacks)}
    facts["written"] = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.jsonl")}
    gc.collect()
    return facts


def has_amx() -> bool:
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def devices() -> dict[str, bool]:
    """What a CPU is called without and with AMX, and whether the plugin takes it for one."""
    import torch

    from kvbridge.engines.vllm.live import device_arch, runs_on_cpu

    supported, seen = torch.cpu._is_amx_tile_supported, {}
    for answer in (False, True):
        torch.cpu._is_amx_tile_supported = lambda answer=answer: answer
        seen[device_arch()] = runs_on_cpu()
    torch.cpu._is_amx_tile_supported = supported
    return seen


def main(out: Path) -> None:
    from kvbridge.engines.vllm import decode_switch, plugin
    from kvbridge.engines.vllm.decode_model import write_model

    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny-deepseek-v4")
        for name, variables in CASES.items():
            compared = Path(folder) / name.replace(" ", "-")
            compared.mkdir()
            keep = Keep()
            plugin.log.addHandler(keep)
            plugin.log.setLevel(logging.INFO)
            for variable in ("KVBRIDGE_DECODE", "KVBRIDGE_BACKEND"):
                os.environ.pop(variable, None)
            os.environ.update({**variables, "KVBRIDGE_COMPARE_DIR": str(compared)})
            plugin._state["registered"] = False
            plugin.register()
            facts[name] = run(model, compared, connector() if name == "connector" else {})
            facts[name]["log"] = keep.lines
            plugin.log.removeHandler(keep)
            decode_switch.switch_off()
            facts[name]["owners after"] = owners()
            out.write_text(json.dumps(facts, indent=1))
    facts |= {"devices": devices(), "amx": has_amx()}
    out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
