"""What both engines' writers left of the same rows: each engine is started once a session."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.sglang.sglang_session import run_all
from tests.parity import byte_parity


@pytest.fixture(scope="session")
def parity_inputs() -> dict[str, torch.Tensor]:
    """Rows, queries and index keys."""
    return load_file(run_all().folder / "rows.safetensors")


@pytest.fixture(scope="session")
def sglang_rows() -> dict[str, torch.Tensor]:
    """Bytes and decode of SGLang."""
    return load_file(run_all().output("sglang_writer"))


@pytest.fixture(scope="session")
def vllm_rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Bytes and decode of vLLM."""
    return byte_parity.written_by("vllm", run_all().folder / "rows.safetensors", tmp_path_factory.mktemp("vllm-rows"))
