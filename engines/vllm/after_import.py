"""Calls a function right after a module has been imported, by whoever imports it.

    after_import("vllm.models.deepseek_v4.nvidia.model", wrap)       now, where the module is there already

An engine's modules are not imported for the sake of a patch: they cost seconds, and some may not be imported before the
engine has chosen its device.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Waits for one module.

    Attributes:
        name: Full name of the module.
        callback: What gets it.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module as others would, and has its loader call back."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # so that the search below goes past this finder, and the callback runs once
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run_module = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            self.callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Calls back with a module: at once where it was imported, else when somebody imports it.

    Args:
        name: Full name of the module.
        callback: Gets the module; what it raises is raised by the import.

    Returns:
        A function that drops a callback that was not called yet.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return lambda: None
    finder = AfterImport(name, callback)
    sys.meta_path.insert(0, finder)

    def forget() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return forget
