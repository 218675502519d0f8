"""Lets the SGLang tests import their shared modules, and runs SGLang's interpreter once for all of them.

Importing SGLang takes half a minute: what needs it is gathered into few programs (programs/), each run once a session.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.environments import run_in_engine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import sglang_models  # noqa: E402


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a folder for every model."""
    folder = tmp_path_factory.mktemp("sglang-models")
    sglang_models.write_models(folder)
    return folder


@pytest.fixture(scope="session")
def captured(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything capture_cases.py captured from SGLang's own pools, by case."""
    folder = tmp_path_factory.mktemp("sglang-captured")
    cases, out = folder / "cases.json", folder / "captured.json"
    cases.write_text(json.dumps(sglang_models.all_cases()))
    run_in_engine("sglang", [HERE / "programs" / "capture_cases.py", models, cases, out])
    results: dict[str, Any] = json.loads(out.read_text())
    return results
