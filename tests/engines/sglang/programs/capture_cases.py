"""Runs in SGLang's interpreter: captures every case from SGLang's own pools and sizes many budgets.

    capture_cases.py MODELS CASES.json OUT.json      one process: importing SGLang takes half a minute

OUT.json: {case: {"manifest", "findings", "views"}}, {"sizes"} for cases that are only sized, {"error"} for failures
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from kvbridge.engine import resolve_options
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.build import built_pool, configured, memory_config
from kvbridge.engines.sglang.capture import capture_pool
from kvbridge.engines.sglang.layouts import read_pool
from kvbridge.engines.sglang.live import live_findings
from kvbridge.engines.sglang.options import resolve_settings
from kvbridge.models import load_model


def capture_budget(folder: Path, given: dict[str, Any], budget: int) -> dict[str, Any]:
    """Builds one pool for a budget and returns its captured manifest."""
    model = load_model(folder)
    options = resolve_options(ENGINE, given)
    with built_pool(folder, settings=resolve_settings(model, options), options=options, budget_bytes=budget) as pool:
        caches = read_pool(pool)
        findings = [entry.message for entry in live_findings(caches)]
        views = [(cache, cache.view()) for cache in caches if cache.tensor is not None]
        for cache, view in views:
            # Zero copy: the view lies in the pool's own storage, at the pool's own address, and a byte written
            # through it is seen through the pool's tensor.
            assert view.pages.untyped_storage().data_ptr() == cache.tensor.untyped_storage().data_ptr(), cache.name
            assert view.pages.data_ptr() == cache.tensor.data_ptr() == view.base_address, cache.name
            assert tuple(view.pages.shape) == (cache.layout.num_pages, cache.layout.payload_bytes), cache.name
        manifest = capture_pool(pool, model=model.name, options=given).to_manifest()
        return {"manifest": manifest.document(), "findings": findings, "views": len(views)}


def size_budget(folder: Path, given: dict[str, Any], budget: int) -> dict[str, Any]:
    """What SGLang's formula makes of a budget that no CPU could allocate."""
    model = load_model(folder)
    options = resolve_options(ENGINE, given)
    settings = resolve_settings(model, options)
    with configured(folder, settings=settings, options=options) as configurator:
        return {"sizes": dataclasses.asdict(memory_config(configurator, budget))}


def main() -> None:
    """Captures everything; a case that fails is reported with its traceback."""
    models, cases, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    results = {}
    for name, case in cases.items():
        started = time.monotonic()
        try:
            work = size_budget if case["sized"] else capture_budget
            results[name] = work(models / case["model"], case["options"], case["budget"])
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
