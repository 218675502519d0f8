"""Work-arounds for vLLM 0.32.0 on a CPU, applied in every process of the environment before vLLM is imported.

Why a sitecustomize: vLLM inspects models in a sub-process and may run its workers in others, so a patch made by a
test would not reach them. Each function is one entry of workarounds.toml beside this file, which says what the trap is.

    module imported by the engine          function called right after the import
    triton.backends                        triton_without_cpu_backend
    vllm.models.deepseek_v4.cpu.cpu_mla    tile_scheduler_lacks_c1a
"""

import collections
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


def triton_without_cpu_backend(module: types.ModuleType) -> None:
    """Gives triton a "cpu" backend entry, and only that, so that vLLM keeps Triton on."""

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    module.backends.clear()
    module.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)


def tile_scheduler_lacks_c1a(module: types.ModuleType) -> None:
    """Answers None for every key, which is what the CPU builder's three known keys hold."""

    def build_tile_scheduler(self: object, num_decode_tokens: int) -> dict[str, None]:
        return collections.defaultdict(lambda: None)

    module.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = build_tile_scheduler


AFTER_IMPORT: dict[str, Callable[[types.ModuleType], None]] = {
    "triton.backends": triton_without_cpu_backend,
    "vllm.models.deepseek_v4.cpu.cpu_mla": tile_scheduler_lacks_c1a,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function of AFTER_IMPORT right after its module has run, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run_module = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run_module(module)
            AFTER_IMPORT[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterImport())
