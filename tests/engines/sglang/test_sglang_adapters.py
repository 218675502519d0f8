"""Adapters over every pool class of SGLang that a CPU can build: see programs/*_checks.py for what is checked."""

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

PROGRAMS = Path(__file__).resolve().parent / "programs"


def checks_of(program: str) -> list[str]:
    """Names of the checks that a program registers."""
    tree = ast.parse((PROGRAMS / f"{program}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [
        node.name for node in functions if any(getattr(entry, "id", "") == "check" for entry in node.decorator_list)
    ]


CHECKS = [
    (program, check) for program in ("adapter_checks", "host_checks", "decode_checks") for check in checks_of(program)
]


@pytest.fixture(scope="module")
def results(sglang_session: Session) -> dict[str, dict[str, str]]:
    programs = dict(CHECKS)
    return {program: json.loads(sglang_session.output(program).read_text()) for program in programs}


def test_all_checks_ran(results: dict[str, dict[str, str]]) -> None:
    ran = [(program, check) for program, found in results.items() for check in found]
    assert sorted(ran) == sorted(CHECKS)
    assert len(CHECKS) >= 24


@pytest.mark.parametrize(("program", "check"), CHECKS)
def test_adapter(program: str, check: str, results: dict[str, dict[str, str]]) -> None:
    assert results[program][check] == ""


def test_capture_without_sglang_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineMissingError, match=r"sglang: got no distribution .* expected sglang 0\.5\.23"):
        ENGINE.capture(model=tmp_path, options={})
