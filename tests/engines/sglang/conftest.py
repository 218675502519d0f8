"""Fixtures of the SGLang tests: what the programs in SGLang's interpreter left, see sglang_session.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.sglang_session import Session, run_all


@pytest.fixture(scope="session")
def sglang_session() -> Session:
    """Outputs of every program that runs in SGLang's interpreter."""
    return run_all()


@pytest.fixture(scope="session")
def models(sglang_session: Session) -> Path:
    """Folder with a folder for every model."""
    return sglang_session.folder / "models"


@pytest.fixture(scope="session")
def captured(sglang_session: Session) -> dict[str, Any]:
    """Everything capture_cases.py captured from SGLang's own pools, by case."""
    results: dict[str, Any] = json.loads(sglang_session.output("capture_cases").read_text())
    return results
