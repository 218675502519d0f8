"""`compare`: both kernels compute every call, vLLM keeps its own output, the differences are written down.

    call --> vLLM's kernel --> out (kept)                    DIR/vllm-pp0-tp0-calls.jsonl, a line for each call:
         '-> kvbridge's    --> scratch --> difference        {"call": "prefill c4", "relative_rms": 0.0016, ...}

Which kernel goes first changes from call to call, so that neither finds the pages in the caches more often.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvbridge.engines.vllm.decode import Call
from kvbridge.parity import CallRow, difference

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.kvbridge")


class Comparison:
    """Observer of calls; see `kvbridge.engines.vllm.decode.Observer`.

    Attributes:
        rows: Compared calls so far.
        alter: Changes kvbridge's call before it is made: how negative controls are run.
        clock: What each kernel is timed by.
        repeats: Times each kernel computes a call; the least time counts.
        keep: Whether rows are kept; a serving engine only writes them.
    """

    def __init__(self, path: Path | None = None, *, keep: bool = False, repeats: int = 1) -> None:
        self.rows: list[CallRow] = []
        self.alter: Callable[[Call], Call] | None = None
        self.repeats = repeats
        self.clock: Callable[[], float] = time.perf_counter
        self.keep = keep
        self._path = path
        self._count = 0
        self._failed = 0
        self._worst = 0.0
        self._next_report = 1

    def __call__(self, call: Call, out: torch.Tensor, compute_theirs: Callable[[], None]) -> None:
        """Compares one call."""
        import torch

        ours = call if self.alter is None else self.alter(call)
        scratch = torch.empty_like(out)

        def compute_ours() -> None:
            ours.layer.run(scratch, ours.q, ours.slots, ours.sink, ours.scale)

        kernels = [("vllm", compute_theirs), ("kvbridge", compute_ours)]
        seconds = {name: float("inf") for name, _ in kernels}
        for turn in range(self.repeats):
            for name, compute in kernels if (self._count + turn) % 2 else reversed(kernels):
                start = self.clock()
                compute()
                seconds[name] = min(seconds[name], self.clock() - start)
        self._count += 1
        widths = [slots.shape[1] for slots in call.slots]
        # One query for each sequence is what decoding looks like; this platform makes no difference between the two.
        phase = "decode" if out.shape[0] <= MOST_DECODE_QUERIES else "prefill"
        self._take(
            CallRow(
                engine="vllm",
                call=f"{phase} {call.layer.kind}",
                layer=call.layer.name,
                shape={
                    "queries": out.shape[0],
                    "heads": out.shape[1],
                    "window": widths[0],
                    "extra": widths[1] if len(widths) > 1 else 0,
                },
                difference=difference(scratch, out),
                seconds=seconds,
            )
        )

    def _take(self, row: CallRow) -> None:
        if self.keep:
            self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.document(), sort_keys=True) + "\n")
        self._worst = max(self._worst, row.difference.relative_rms)
        if not row.ok:
            self._failed += 1
            if self._failed == 1:
                log.warning("kvbridge: kernel compare: a call differs by more than its bounds: %s", row.document())
        if self._count >= self._next_report:
            self._next_report *= 10
            log.info(
                "kvbridge: kernel compare: %d calls, %d beyond their bounds, largest relative RMS %.2e",
                self._count,
                self._failed,
                self._worst,
            )


MOST_DECODE_QUERIES = 16
"""Calls with no more queries than this are named decode."""
