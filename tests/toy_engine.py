"""A toy engine for the tests of tests/environments.py: its wheels and its environments are made here, without an index.

wheels/toy_engine-1.0-py3-none-any.whl ... -> pip, --no-index -> <tmp>/toy-1f0c...
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import engines_support, environments
from tests.engines_support import ENGINES, ROOT, Engine

TOY = Engine(name="toy", distribution="toy-engine", release="1.0", torch="0.1")
WORKAROUNDS = """
[[workaround]]
id = "bad-companion"
release = "1.0"
how = "pip_remove"
trap = "wheel is not needed"
distributions = ["wheel"]

[[workaround]]
id = "always"
release = "1.0"
how = "environment"
trap = "none"
variables = { TOY_ALWAYS = "1" }

[[workaround]]
id = "sometimes"
release = "1.0"
how = "environment"
on_request = true
trap = "none"
variables = { TOY_SOMETIMES = "1" }
"""


def make_wheel(folder: Path, *, name: str, version: str) -> None:
    """Writes a wheel with one empty module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def fill_wheels(folder: Path) -> None:
    folder.mkdir()
    versions = {"toy-engine": "1.0", "torch": "0.1", "pytest": "8.0", "setuptools": "77.0", "wheel": "0.1"}
    for name, version in versions.items():
        make_wheel(folder, name=name, version=version)


def toy_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    """A toy engine in an empty environments folder; variables of the caller that would interfere are gone."""
    for name in ("CI", "KVBRIDGE_REQUIRE_ENGINES", TOY.override_variable):
        monkeypatch.delenv(name, raising=False)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    shims = tmp_path / "shims"
    (shims / "toy").mkdir(parents=True)
    (shims / "toy" / "workarounds.toml").write_text(WORKAROUNDS)
    monkeypatch.setenv("KVBRIDGE_ENVIRONMENTS", str(tmp_path / "environments"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(engines_support, "SHIMS", shims)
    monkeypatch.setattr(environments, "SHIMS", shims)
    monkeypatch.setitem(ENGINES, "toy", TOY)
    engines_support.workarounds.cache_clear()
    environments.engine_python.cache_clear()
    yield TOY
    engines_support.workarounds.cache_clear()
    environments.engine_python.cache_clear()


def fake_environment(*, version: str = "1.0", **changes: Any) -> Path:
    """An environment with the toy engine's metadata, made without pip in a tenth of a second."""
    folder = environments.environment_path("toy")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    for name, release in (("toy-engine", version), ("kvbridge", "0.1.0")):
        info = packages / f"{name.replace('-', '_')}-{release}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    record = {
        "requirements_hash": engines_support.requirements_hash("toy"),
        "kvbridge_location": str(ROOT),
        "project_hash": environments.project_hash(),
    }
    (folder / environments.RECORD_NAME).write_text(json.dumps(record | changes))
    return folder
