"""ruff and strict mypy over the code, and the habits a linter does not know."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _run(*arguments: str) -> None:
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_check() -> None:
    _run("ruff", "check", ".")


def test_ruff_format() -> None:
    _run("ruff", "format", "--check", ".")


def test_mypy_strict() -> None:
    _run("mypy")


def _tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / line for line in listing.splitlines() if not (ROOT / line).is_symlink()]


def test_no_machine_paths() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:" + "|".join(("tm" + "p", "wor" + "k", "roo" + "t", "hom" + "e")) + r")/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _tracked("*.py", "*.md", "*.toml", "*.cpp", "*.h", "*.cuh", "*.cu", "*.json", ".ci/run")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_format_constants_live_in_records_only() -> None:
    constants = re.compile(r"(?<![\w.])(?:584|37_?376|37_?440|149_?504|149_?760)(?![\w.])")
    found = []
    for path in _tracked("kvbridge/*.py", "engines/*.py", "kernels/*.py"):
        if path.name == "records.py":
            continue
        code = re.sub(r'""".*?"""|#.*|"[^"\n]*"', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        if constants.search(code):
            found.append(path.relative_to(ROOT).as_posix())
    assert found == []
