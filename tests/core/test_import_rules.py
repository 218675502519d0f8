"""Who may import whom, read from the syntax trees of all modules, and what an import costs.

errors <- records <- layout <- geometry <- view <- spans <- copies <- repack      each only from its left
core imports no engine and no kernel; an engine is imported in its own folder, and never when a module loads
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAIN = ("errors", "records", "layout", "geometry", "view", "spans", "copies", "repack")
ENGINES = {"vllm": "vllm", "sglang": "sglang"}
TORCH_FREE = (
    "kvbridge",
    "kvbridge.manifest",
    "kvbridge.audit",
    "kvbridge.diff",
    "kvbridge.consumers",
    "kvbridge.repack",
)


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


CORE = [path for path in modules("kvbridge") if not {"engines", "kernels"} & set(path.relative_to(ROOT).parts)]


def imported(tree: ast.AST, *, loading: bool = False) -> Iterator[str]:
    """Dotted names that a module imports; with `loading` only those that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide what is imported"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif loading and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif loading and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for part in node.orelse for name in imported(ast.Module([part], []), loading=True))
        else:
            yield from imported(node, loading=loading)


def names(path: Path, *, loading: bool = False) -> set[str]:
    return set(imported(ast.parse(path.read_text(encoding="utf-8")), loading=loading))


def tops(path: Path, *, loading: bool = False) -> set[str]:
    return {name.partition(".")[0] for name in names(path, loading=loading)}


def title(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_reader_of_imports_sees_what_it_should() -> None:
    tree = ast.parse(
        "import a\nfrom b import c\nif TYPE_CHECKING:\n    import d\nelse:\n    import e\n"
        "def f():\n    import g\nclass H:\n    import i\ntry:\n    import j\nexcept ImportError:\n    import k\n"
    )
    assert set(imported(tree, loading=True)) == {"a", "b", "b.c", "e", "i", "j", "k"}
    assert set(imported(tree)) == {"a", "b", "b.c", "d", "e", "g", "i", "j", "k"}


@pytest.mark.parametrize("path", CORE, ids=title)
def test_core_imports_no_engine_and_no_kernel(path: Path) -> None:
    wrong = {
        name
        for name in names(path)
        if name.split(".")[0] in (*ENGINES, "engines", "kernels")
        or name.startswith(("kvbridge.engines", "kvbridge.kernels"))
    }
    assert wrong == set()


@pytest.mark.parametrize("path", CORE, ids=title)
def test_core_loads_no_torch(path: Path) -> None:
    assert "torch" not in tops(path, loading=True)


@pytest.mark.parametrize("place", range(len(CHAIN)), ids=CHAIN)
def test_the_chain(place: int) -> None:
    mine = {name.removeprefix("kvbridge.") for name in names(ROOT / "kvbridge" / f"{CHAIN[place]}.py", loading=True)}
    assert not mine & {*CHAIN[place:], "manifest", "audit", "diff", "consumers", "inspect"}


@pytest.mark.parametrize("path", [path for path in CORE if "inspect" not in path.parts], ids=title)
def test_nothing_but_the_command_imports_the_command(path: Path) -> None:
    assert not {name for name in names(path) if name.startswith("kvbridge.inspect")}


def test_no_cycle_while_loading() -> None:
    known = {
        f"kvbridge.{path.stem}": path for path in CORE if path.parent.name == "kvbridge" and path.stem != "__init__"
    }
    graph = {name: names(path, loading=True) & set(known) for name, path in known.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("path", modules("engines", "kernels"), ids=title)
def test_engines_and_kernels(path: Path) -> None:
    folder = path.relative_to(ROOT).parts
    foreign = {package for package, home in ENGINES.items() if folder[:2] != ("engines", home)}
    assert not tops(path) & foreign, "an engine is imported outside its own folder"
    assert not tops(path, loading=True) & set(ENGINES), "an engine is imported when the module loads"
    assert not tops(path) & {"engines", "kernels"}, "import as kvbridge.engines and kvbridge.kernels"
    if folder[0] == "kernels":
        assert not {name for name in names(path) if name.startswith(("kvbridge.engines", "kvbridge.inspect"))}


def test_the_two_folders_are_no_packages() -> None:
    for name in ("engines", "kernels"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "kvbridge" / name).is_symlink()


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


HEAVY = "import sys; print(sorted({'torch', 'vllm', 'sglang', 'numpy', 'jax'} & set(sys.modules)))"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_importing_loads_nothing_heavy(name: str) -> None:
    assert run(f"import {name}; {HEAVY}") == "[]\n"


def test_planning_loads_nothing_heavy() -> None:
    code = """
from kvbridge.engine import PlanRequest, engine_names, load_engine, resolve_options
from kvbridge.models import load_model
assert {'vllm', 'sglang'} <= set(engine_names())
for name in ('vllm', 'sglang'):
    engine = load_engine(name)
    request = PlanRequest(load_model('deepseek-v4-flash'), engine.versions[-1], resolve_options(engine, {}))
    assert engine.plan(request).pools
"""
    assert run(code + HEAVY) == "[]\n"


def test_layouts_and_plans_load_nothing_heavy() -> None:
    code = """
from kvbridge import PageLayout, get_record
from kvbridge.repack import plan_pages
from kvbridge.spans import Placement
place = Placement.from_layout(PageLayout.for_rows('v4', page_rows=64), num_pages=9)
assert plan_pages(place, place, source_pages=[1], target_pages=[2]).total_bytes == 64 * get_record('v4').row_bytes
"""
    assert run(code + HEAVY) == "[]\n"
