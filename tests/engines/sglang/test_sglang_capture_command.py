"""`inspect capture` runs SGLang's allocator; `inspect diff` finds nothing between it and the plan but their origin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engines.sglang.sglang_session import Session

pytestmark = pytest.mark.timeout(1500)  # the first test waits for every program in SGLang's interpreter

INSPECT = [sys.executable, "-m", "kvbridge.inspect"]


def test_captured_by_the_command_equals_the_plan(sglang_session: Session, tmp_path: Path) -> None:
    captured = sglang_session.output("inspect_capture")
    (manifest,) = json.loads(captured.read_text())["manifests"]
    assert (manifest["origin"], manifest["model"]) == ("captured", "v4")
    planned = tmp_path / "planned.json"
    options = ["--max-total-tokens", "8192", "--max-running-requests", "4"]
    model = sglang_session.folder / "models" / "v4"
    show = [*INSPECT, "show", str(model), "--engine", "sglang", *options, "--format", "json"]
    planned.write_text(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    diff = [*INSPECT, "diff", str(planned), str(captured), "--format", "json"]
    done = subprocess.run(diff, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    text = subprocess.run([*INSPECT, "diff", str(planned), str(captured)], capture_output=True, text=True, check=False)
    assert "relation: same" in text.stdout
    assert json.loads(planned.read_text())["manifests"][0]["pools"] == manifest["pools"]
    assert json.loads(planned.read_text())["manifests"][0]["options"] == manifest["options"]
