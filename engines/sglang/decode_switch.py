"""Switches kvbridge's kernel on in SGLang: a variable of the environment that every worker reads at its start.

KVBRIDGE_DECODE=off       nothing of SGLang is touched (the default)
                compare   both kernels run, SGLang's output is kept, the differences are recorded
                on        kvbridge's kernel serves what it can; the rest stays with SGLang, one line says why
                force     as `on`, but SGLang does not start where the kernel cannot serve
KVBRIDGE_COMPARE_DIR=DIR  `compare` writes DIR/sglang-pp0-tp0-calls.jsonl, a line for each call

  DeepSeekV4TokenToKVPool.__init__                          after: its pages are bound
  flash_mla_with_kvcache, flash_mla_with_kvcache_sm120      around: the call is served, target and draft alike
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.engines.sglang.decode import Decoder, NotServedError
from kvbridge.errors import KVBridgeError
from kvbridge.parity import CALL_BOUND, CallRow, difference

OWNER_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool.__init__"
DECODE_FUNCTIONS = (
    "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache",
    "sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120",
)
"""Where SGLang's backend looks its decode up: FlashMLA in __init__, SM120 at every call."""

DECODE_VARIABLE = "KVBRIDGE_DECODE"
COMPARE_VARIABLE = "KVBRIDGE_COMPARE_DIR"
MODES = ("off", "compare", "on", "force")

log = logging.getLogger("kvbridge.sglang")


@dataclass(frozen=True, slots=True)
class DecodeSwitch:
    """What is asked for.

    Attributes:
        mode: One of `MODES`.
        directory: Where `compare` writes; None only logs.
    """

    mode: str
    directory: Path | None

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> DecodeSwitch:
        """Reads the variables; a value that is none of the modes is reported and taken as `off`.

        Args:
            variables: The environment by default.
        """
        given = os.environ if variables is None else variables
        text = given.get(DECODE_VARIABLE, "").strip().lower()
        folder = given.get(COMPARE_VARIABLE, "").strip()
        if text and text not in MODES:
            log.error("kvbridge: %s: got %r, expected one of %s; taken as off", DECODE_VARIABLE, text, ", ".join(MODES))
        return cls(text if text in MODES else "off", Path(folder) if folder else None)


class Comparison(Decoder):
    """Both kernels compute every call and SGLang keeps its own output.

    Attributes:
        compared: Calls compared.
        failed: Calls beyond their bounds.
        worst: Largest relative RMS.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Makes a comparison without pools.

        Args:
            path: JSON lines file for the calls; None only logs.
        """
        super().__init__()
        self.compared = self.failed = 0
        self.worst = 0.0
        self._path = path
        self._next_report = 1

    def __call__(self, original: Callable[..., Any], *arguments: Any, **call: Any) -> Any:
        """SGLang's answer, after a comparison; nothing that goes wrong in that reaches SGLang."""
        import torch

        result = original(*arguments, **call)
        if call["q"].is_cuda and torch.cuda.is_current_stream_capturing():
            return result  # a comparison reads device memory on the host
        try:
            self._take(call, self.decode(**call)[0], result[0])
        except Exception as error:
            self._leave(str(error) if isinstance(error, KVBridgeError) else f"{type(error).__name__}: {error}")
        return result

    def _take(self, call: Mapping[str, Any], ours: Any, theirs: Any) -> None:
        extra = call.get("extra_indices_in_kvcache")
        shape = {"queries": call["q"].shape[0], "heads": call["q"].shape[2], "window": call["indices"].shape[-1]}
        shape["extra"] = 0 if extra is None else extra.shape[-1]
        row = CallRow(
            engine="sglang",
            call="decode with extra cache" if shape["extra"] else "decode",
            layer=f"pages at {call['k_cache'].data_ptr():#x}",
            shape=shape,
            difference=difference(ours.squeeze(1), theirs.squeeze(1)),
            call_bound=2 * CALL_BOUND,  # each kernel may be one bound from float64
        )
        self.compared += 1
        self.worst = max(self.worst, row.difference.relative_rms)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.document(), sort_keys=True) + "\n")
        if not row.ok:
            self.failed += 1
            if self.failed == 1:
                log.warning("kvbridge: kernel compare: a call differs by more than its bounds: %s", row.document())
        if self.compared >= self._next_report:
            self._next_report *= 10
            log.info(
                "kvbridge: kernel compare: %d calls, %d beyond their bounds, largest relative RMS %.2e",
                self.compared,
                self.failed,
                self.worst,
            )


def register_decode(switch: DecodeSwitch, *, worker: str) -> None:
    """Registers the hooks.

    Args:
        switch: What is asked for; `off` does nothing.
        worker: Name of this worker, for the file of `compare`.
    """
    if switch.mode == "off":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    path = switch.directory / f"{worker}-calls.jsonl" if switch.directory else None
    decoder = Comparison(path) if switch.mode == "compare" else Decoder()

    def after_owner_pool(_: None, pool: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            known = len(decoder.layouts())
            decoder.register(pool)
            strides = sorted({entry["page_stride_bytes"] for entry in decoder.layouts()[known:]})
            backend = decoder.explain()
        except NotServedError as reason:
            if switch.mode == "force":
                raise
            log.warning("kvbridge: kernel %s: SGLang's own kernel serves: %s", switch.mode, reason)
        except Exception:
            log.exception("kvbridge: the plugin failed by its own fault; SGLang's own kernel serves")
        else:
            pages = len(decoder.layouts()) - known
            log.info(
                "kvbridge: kernel %s: %d caches of %s, page strides %s, backend %s",
                switch.mode,
                pages,
                type(pool).__name__,
                strides,
                backend,
            )

    HookRegistry.register(OWNER_POOL, after_owner_pool, HookType.AFTER)
    for target in DECODE_FUNCTIONS:
        HookRegistry.register(target, decoder, HookType.AROUND)
