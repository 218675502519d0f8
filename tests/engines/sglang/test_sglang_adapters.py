"""Adapters over every pool class of SGLang that a CPU can build: see programs/adapter_checks.py for what is checked."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvbridge.engine import EngineMissingError
from kvbridge.engines.sglang import ENGINE

if TYPE_CHECKING:
    from tests.engines.sglang.sglang_session import Session

pytestmark = pytest.mark.timeout(1500)  # the first test waits for every program in SGLang's interpreter

PROGRAM = Path(__file__).resolve().parent / "programs" / "adapter_checks.py"
CHECKS = [
    node.name
    for node in ast.parse(PROGRAM.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(entry, "id", "") == "check" for entry in node.decorator_list)
]


@pytest.fixture(scope="module")
def results(sglang_session: Session) -> dict[str, str]:
    found: dict[str, str] = json.loads(sglang_session.output("adapter_checks").read_text())
    return found


def test_all_checks_ran(results: dict[str, str]) -> None:
    assert len(CHECKS) >= 17
    assert sorted(results) == sorted(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_adapter(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""


def test_capture_without_sglang_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineMissingError, match=r"sglang: got no distribution .* expected sglang 0\.5\.23"):
        ENGINE.capture(model=tmp_path, options={})
