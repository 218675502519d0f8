"""How the kernel is switched on in vLLM: a variable of the environment that every worker reads at its start.

    KVBRIDGE_DECODE=off       nothing of vLLM is touched (the default)
                    compare   both kernels run, vLLM's output is kept, the differences are recorded
                    on        kvbridge's kernel serves what it can; the rest stays with vLLM, one line says why
                    force     as `on`, but vLLM does not start where the kernel cannot serve
    KVBRIDGE_COMPARE_DIR=DIR       `compare` writes DIR/vllm-pp0-tp0-calls.jsonl, a line for each call

A KV connector's own config may say the same: kv_connector_extra_config={"kernel": "on", "compare_dir": DIR}.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

KERNEL_VARIABLE = "KVBRIDGE_DECODE"
COMPARE_VARIABLE = "KVBRIDGE_COMPARE_DIR"


class KernelMode(StrEnum):
    """Which kernel serves."""

    OFF = "off"
    COMPARE = "compare"
    ON = "on"
    FORCE = "force"


@dataclass(frozen=True, slots=True)
class KernelSwitch:
    """What is asked for.

    Attributes:
        mode: Which kernel serves.
        directory: Where `compare` writes; None only logs.
    """

    mode: KernelMode
    directory: Path | None

    @classmethod
    def read(cls, log: logging.Logger, variables: Mapping[str, str] | None = None) -> KernelSwitch:
        """Reads the variables; a value that is none of the modes is reported and taken as `off`.

        Args:
            log: Where an unknown value is reported.
            variables: The environment by default.
        """
        given = os.environ if variables is None else variables
        text = given.get(KERNEL_VARIABLE, "").strip().lower()
        folder = given.get(COMPARE_VARIABLE, "").strip()
        mode = {mode.value: mode for mode in KernelMode}.get(text, KernelMode.OFF)
        if text and text != mode:
            names = ", ".join(mode.value for mode in KernelMode)
            log.error("kvbridge: %s: got %r, expected one of %s; taken as off", KERNEL_VARIABLE, text, names)
        return cls(mode, Path(folder) if folder else None)
