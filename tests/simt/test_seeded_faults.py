"""Faults put into the kernel's source, one at a time: a check must see each. Without a fault every check is clean."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest

from kvbridge.kernels.cuda_tiles import Variant
from tests.simt.emulator import Patch, build

V4 = Variant(1, 16)
PLAIN = ("-O1",)
ADDRESS = ("-O1", "-fsanitize=address")
UNDEFINED = ("-O1", "-fsanitize=undefined,alignment", "-fno-sanitize-recover=all")
RACES = ("-O1", "-fsanitize=thread", "-Wno-tsan")
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:use_sigaltstack=0",
    "TSAN_OPTIONS": "halt_on_error=1:handle_segv=0",
}


@dataclass(frozen=True)
class Fault:
    """What is broken, and which check has to say so.

    Attributes:
        patch: The fault.
        flags: Build that must see it.
        says: Pattern that its output must contain.
    """

    patch: Patch
    flags: tuple[str, ...]
    says: str


FAULTS = {
    "barrier between keys and scores is missing": Fault(
        Patch("decode.cuh", "    barrier();  // keys are complete", "    // keys are complete"),
        RACES,
        "data race|source .* is misaligned",
    ),
    "barrier between scores and softmax is missing": Fault(
        Patch("decode.cuh", "compute_scores<Layout>(shared);\n    barrier();", "compute_scores<Layout>(shared);"),
        RACES,
        "data race",
    ),
    "barrier between softmax and values is missing": Fault(
        Patch(
            "decode.cuh",
            "call.scale_log2);\n    barrier();",
            "call.scale_log2);",
        ),
        RACES,
        "data race",
    ),
    "barrier behind the wait is missing": Fault(
        Patch("decode.cuh", "    barrier();  // the rows of every thread", "    // the rows of every thread"),
        RACES,
        "data race",
    ),
    "wait for the copies is missing": Fault(
        Patch("decode.cuh", "copy_wait<Stages - 1>();", "copy_wait<Stages>();"), PLAIN, "failures"
    ),
    "copy is issued before its buffer is free": Fault(
        Patch(
            "decode.cuh",
            "    decode_tile<Formats",
            "    if (!plain) issue(tile + Stages);\n    decode_tile<Formats",
        ),
        RACES,
        "data race|source .* is misaligned",
    ),
    "page number is off by one": Fault(
        Patch("slots.cuh", "page * cache.page_stride_bytes", "(page + 1) * cache.page_stride_bytes"),
        ADDRESS,
        "AddressSanitizer",
    ),
    "row runs past its bytes into the pad": Fault(
        Patch("gather.cuh", "const int pieces = bytes / Piece;", "const int pieces = bytes / Piece + 1;"),
        ADDRESS,
        "AddressSanitizer",
    ),
    "first block merges instead of the last": Fault(
        Patch(
            "decode.cuh",
            "static_cast<unsigned>(call.splits - 1)) == static_cast<unsigned>(call.splits - 1)",
            "static_cast<unsigned>(call.splits - 1)) == 0u",
        ),
        PLAIN,
        "not finite",
    ),
    "partial sums are published without a fence": Fault(
        Patch("decode.cuh", "  fence();  // this thread's partial sums", "  // this thread's partial sums"),
        RACES,
        "data race",
    ),
    "a lane leaves a warp operation out": Fault(
        Patch(
            "attend.cuh",
            "for (int mask = 16; mask; mask >>= 1) highest",
            "if (lane < 31) for (int mask = 16; mask; mask >>= 1) highest",
        ),
        PLAIN,
        "operation",
    ),
    "a vector is read off its alignment": Fault(
        Patch("gather.cuh", "load_vector(raw + code_bytes", "*reinterpret_cast<const uint4*>(raw + 8 + code_bytes"),
        UNDEFINED,
        "misaligned",
    ),
}


def outcome(flags: tuple[str, ...], patches: tuple[Patch, ...] = ()) -> tuple[int, str]:
    """Runs the small program under a build."""
    command = [str(build(V4, patches=patches, flags=flags))]
    if "-fsanitize=thread" in flags and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # the race checker wants its usual address layout
    environment = {**os.environ, **ENVIRONMENT}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("flags", [PLAIN, ADDRESS, UNDEFINED, RACES], ids=["plain", "address", "undefined", "races"])
def test_the_kernel_is_clean(flags: tuple[str, ...]) -> None:
    code, text = outcome(flags)
    assert (code, text) == (0, "0 failures\n")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    fault = FAULTS[name]
    code, text = outcome(fault.flags, (fault.patch,))
    assert code != 0, f"{name}: nothing was noticed"
    assert re.search(fault.says, text), text[:600]
