"""docs/conformance.md says what the kit finds in vLLM's CPU kernel and SGLang's torch decoder; here it is found again.

Each engine's interpreter runs `python -m kvbridge.kernels.conformance --target ...` once.
"""

from __future__ import annotations

import functools
import re

import pytest

from tests.environments import run_in_engine

ROW = re.compile(r"^(.+?)  +(\d+) +(\d+) +(\d+) +(\d+)")


@functools.cache
def report(engine: str) -> tuple[int, str]:
    """Exit status and standard output of the kit over the engine's kernel."""
    arguments = ["-m", "kvbridge.kernels.conformance", "--target", f"kvbridge.engines.{engine}.conformance:TARGET"]
    done = run_in_engine(engine, arguments, environment={"OMP_NUM_THREADS": "1"}, check=False)
    return done.returncode, done.stdout


def rows(engine: str) -> dict[str, tuple[int, int]]:
    """Passed and failed of each line of the table."""
    found = [ROW.match(line) for line in report(engine)[1].splitlines()[1:]]
    return {match[1]: (int(match[3]), int(match[4])) for match in found if match}


def test_vllm_cpu_kernel_deviates_as_documented() -> None:
    status, text = report("vllm")
    found = rows("vllm")
    assert status == 1, text
    passed, failed = found["record v4"]
    assert passed > 60 and not failed, text
    assert found["FlashMLA grid"] == (9, 0), text
    deviating = {name.removeprefix("property ") for name, (_, failed) in found.items() if failed}
    assert deviating <= {"scale_bytes", "nan_stays"}, text
    assert "scale_bytes" in deviating, text
    assert "scale byte 10: 576 values not exact" in text


def test_sglang_torch_decoder_deviates_as_documented() -> None:
    status, text = report("sglang")
    found = rows("sglang")
    assert status == 1, text
    assert found["FlashMLA grid"] == (9, 0), text
    assert {name.removeprefix("property ") for name, (_, failed) in found.items() if failed} == {
        "record v4",
        "strides",
        "fuzz",
    }
    kinds = [line for line in text.splitlines() if "FAILED" in line and "property" not in line]
    assert all("IndexError" in line or "RuntimeError: setStorage" in line for line in kinds), text
    assert len(kinds) == 2, text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_a_kernel_does_not_claim_is_named(engine: str) -> None:
    assert "not claimed: record v41" in report(engine)[1]
