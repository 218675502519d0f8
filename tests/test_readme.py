"""The README keeps its promises: its example runs, its commands exist, its files are there."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from tests.inspect.support import call

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _block(marker: str) -> str:
    _, _, rest = README.partition(f"<!-- {marker} -->")
    return rest.split("```")[1].partition("\n")[2]


def test_the_example_prints_that_both_outputs_are_equal() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(_block("example"), "README.md", "exec"), {})
    assert printed.getvalue().startswith("True ")


def test_the_example_is_short() -> None:
    lines = [line for line in _block("example").splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 15


def test_ci_runs_the_test_command() -> None:
    assert "pytest" in _block("tests")
    assert "tests.environments" in _block("tests")


def test_every_command_shown_is_accepted() -> None:
    shown = re.findall(r"^python -m kvbridge\.inspect (.+?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(shown) >= 4
    for line in shown:
        words = shlex.split(line)
        if words[0] == "capture" or any(word.endswith(".json") for word in words):
            continue  # an engine, or a file of the reader's
        assert call(*words).code in (0, 1), line


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_variables_named_are_variables_read() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("kvbridge", "engines", "kernels", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if "test_readme" not in path.name
    )
    for variable in set(re.findall(r"KVBRIDGE_[A-Z_]+", README)):
        assert variable in sources, variable
