"""Runs in vLLM's interpreter: a sequence's pages leave vLLM's cache, come back in SGLang's layout; decoding goes on.

python -m tests.parity.vllm_programs.hand_over FOLDER SGLANG.json

    1  one request answered undisturbed                                        the tokens and log-probabilities to reach
    2  the same; after its prefill the rows of all its pages are wiped         control: the answer must be another one
    3  the same; rows -> file -> SGLang's writer and pool -> file -> repack into vLLM's live packed cache -> go on

SGLANG.json holds the command line and the environment of SGLang's interpreter. What compressors have not yet made into
a row stays in vLLM: that state has no page in common.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvbridge.codec import gather_rows
from kvbridge.layout import PageLayout
from kvbridge.repack import copy_rows
from kvbridge.view import PageView

PROMPT = 421  # no multiple of 4: the last group of each compressor is unfinished
NEW_TOKENS = 24
Slots = dict[str, torch.Tensor]


def main(folder: Path, sglang: Mapping[str, Any]) -> None:
    from kvbridge.engines.vllm.capture import require_vllm, single_process

    with single_process(require_vllm()):
        from kvbridge.engines.vllm.decode_live import LiveEngine

        engine = LiveEngine(folder / "model")
        engine.observe(True)
        (prompt,) = engine.prompts((PROMPT,))
        facts: dict[str, Any] = {"undisturbed": said(engine.start(prompt, NEW_TOKENS).finish())}

        request, views, slots = prefilled(engine, prompt)
        wipe(views, slots)
        facts["wiped"] = said(request.finish())
        engine.comparison.rows.clear()  # NaN codes are ±480 in one kernel and NaN in the other

        request, views, slots = prefilled(engine, prompt)
        rows = {name: gather_rows(views[name], slots[name]) for name in slots}
        save_file(rows, folder / "rows.safetensors")
        files = [str(folder / "model"), str(folder / "rows.safetensors"), str(folder / "pages.safetensors")]
        subprocess.run([*sglang["command"], *files], env=sglang["environment"], check=True, stdout=sys.stderr)
        wipe(views, slots)
        facts["copies"] = take_over_pages(folder / "pages.safetensors", views, slots)
        facts["rows restored"] = all(torch.equal(gather_rows(views[n], slots[n]), rows[n]) for n in slots)
        facts["rows"] = {name: len(entry) for name, entry in slots.items()}
        facts["handed over"] = said(request.finish())
        facts["calls compared"] = len(engine.comparison.rows)
        facts["calls beyond bounds"] = sum(not row.ok for row in engine.comparison.rows)
        engine.close()
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))


def said(answer: Any) -> dict[str, Any]:
    return {"tokens": answer.tokens, "logprobs": answer.logprobs}


def prefilled(engine: Any, prompt: list[int]) -> tuple[Any, dict[str, PageView], Slots]:
    """A request whose prompt is in the cache, the views of its layers, and the slots of its rows."""
    from kvbridge.engines.vllm.layouts import views_of

    request = engine.start(prompt, NEW_TOKENS)
    while request.answer is None:
        request.step()
    allocation = engine.allocation
    views = views_of(allocation.kv_caches, allocation.kv_cache_config)
    scheduler = engine.core.scheduler
    (running,) = scheduler.running
    tables = scheduler.kv_cache_manager.get_block_ids(running.request_id)
    named: dict[str, PageView] = {}
    slots: Slots = {}
    for group, table in zip(allocation.kv_cache_config.kv_cache_groups, tables, strict=True):
        for layer in group.layer_names:
            if layer.endswith("state_cache"):
                continue
            layout = views[layer].layout
            index = layer.split(".")[2]
            kind = "swa" if layer.endswith("swa_cache") else f"c{layout.tokens_per_row}"
            name = f"{index}.{kind}" + ("_indexer" if layer.endswith("k_cache") else "")
            rows = torch.arange(PROMPT // layout.tokens_per_row)
            blocks = torch.tensor(table)[rows // layout.page_rows]
            live = blocks != 0  # a block that fell out of the sliding window would be vLLM's null block
            rows, blocks = rows[live], blocks[live]
            named[name] = views[layer]
            slots[name] = blocks * layout.page_rows + rows % layout.page_rows
    return request, named, slots


def wipe(views: Mapping[str, PageView], slots: Slots) -> None:
    """Every byte of the sequence's rows becomes 0xFF: NaN codes, NaN scales."""
    from kvbridge.codec import scatter_rows

    for name, entry in slots.items():
        rows = gather_rows(views[name], entry)
        scatter_rows(views[name], entry, torch.full_like(rows, 0xFF))


def take_over_pages(file: Path, views: Mapping[str, PageView], slots: Slots) -> dict[str, int]:
    """Copies the rows from SGLang's pages into vLLM's live ones; gives the number of copies of each plan."""
    copies = {}
    with safe_open(file, framework="pt") as pages:
        layouts = json.loads(pages.metadata()["layouts"])
        for name, entry in slots.items():
            fields = dict(layouts[name])
            first = fields.pop("first_slot")
            source = PageView.from_tensor(pages.get_tensor(name), PageLayout.for_rows(fields.pop("record"), **fields))
            plan = copy_rows(
                source,
                views[name],
                source_slots=range(first, first + len(entry)),
                target_slots=entry.tolist(),
            )
            copies[name] = len(plan.copies)
    return copies


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
