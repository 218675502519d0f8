"""Options of vLLM that decide layouts, and what vLLM makes of those left to it.

    --kv-cache-dtype auto, --attention-backend auto, arch sm100     V4    -> fp8_ds_mla, rows of 584
                                                                    V4.1  -> nvfp4_ds_mla, rows of 528 (window), 288
    --block-size 0                                                  V4    -> 256, V4.1 -> 128 (64 on sm90), V3.2 -> 64

`Settings` holds the resolved values; everything behind it works from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge.engine import EngineError, EngineOption, OptionValue
from kvbridge.models import Family, ModelConfig

VERSIONS = ("0.32.0", "0.33.0")
"""Versions whose sources were read and whose allocators were run, oldest first."""

OPTIONS = (
    EngineOption("block-size", 0, "tokens of a block; 0 for vLLM's choice"),
    EngineOption(
        "kv-cache-dtype",
        "auto",
        "format of the cache",
        ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"),
    ),
    EngineOption(
        "attention-backend", "auto", "kernel family", ("auto", "flashmla", "flashmla_mega_attn", "flashinfer")
    ),
    EngineOption("indexer-kv-dtype", "fp8", "format of the indexer's cache", ("fp8", "mxfp4")),
    EngineOption("indexer-sparse-logits", False, "DeepSeek-V4.1: score candidate blocks only"),
    EngineOption(
        "arch", "sm100", "device that decides records and kernel blocks", ("sm90", "sm100", "sm120", "cpu", "cpu-amx")
    ),
    EngineOption("speculative-tokens", 0, "draft tokens of a step; above 0 adds the model's draft layers"),
    EngineOption("tensor-parallel-size", 1, "ranks of tensor parallelism; MLA caches are whole on every rank"),
    EngineOption("decode-context-parallel-size", 1, "ranks that share a sequence's cache"),
    EngineOption("pipeline-parallel-size", 1, "ranks that share the layers"),
    EngineOption("pipeline-parallel-rank", 0, "which of them to plan"),
    EngineOption("max-model-len", 0, "longest sequence; 0 for the model's"),
    EngineOption("max-num-batched-tokens", 8192, "tokens of a step; sizes what a sliding window holds in flight"),
    EngineOption("async-scheduling", True, "one more step in flight"),
    EngineOption("num-gpu-blocks-override", 0, "blocks to allocate whatever the memory; 0 for none"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved options.

    Attributes:
        version: The version whose rules apply, one of `VERSIONS`.
        kv_dtype: Cache format after vLLM resolved `auto` and aliases.
        packed_rows: Whether rows carry their scales (`*_ds_mla`); False for plain bf16 or fp8 rows.
        backend: `flashmla`, `flashmla_mega_attn`, `flashinfer`, or the arch's own for classic MLA.
        block_tokens: Tokens of a block.
        kernel_block_tokens: Largest block of the attention kernel, where it takes fixed sizes only; else 0.
        indexer_fp4: Whether indexer keys are MXFP4.
        notes: Remarks for the manifest.
    """

    version: str
    arch: str
    kv_dtype: str
    packed_rows: bool
    backend: str
    block_tokens: int
    kernel_block_tokens: int
    indexer_fp4: bool
    sparse_logits: bool
    speculative_tokens: int
    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    pipeline_rank: int
    max_model_len: int
    in_flight_tokens: int
    num_blocks: int
    notes: tuple[str, ...] = ()

    @property
    def v41_record(self) -> bool:
        """Whether V4.1 stores its own 528 and 288 byte records: FlashMLA reads them on SM100 only."""
        return self.arch == "sm100"


def nearest_version(version: str) -> tuple[str, str | None]:
    """The known version whose rules apply, and a remark where it is not the asked one.

    Raises:
        EngineError: `version` is no version.
    """
    asked = _release(version)
    if asked in {_release(known) for known in VERSIONS}:
        return next(known for known in VERSIONS if _release(known) == asked), None
    nearest = min(VERSIONS, key=lambda known: (_distance(_release(known), asked), _release(known)))
    return nearest, f"vLLM {version} is not known here; planned with the rules of {nearest}"


def _release(version: str) -> tuple[int, int]:
    parts = version.split("+", maxsplit=1)[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise EngineError(f"engine version: got {version!r}, expected digits such as {VERSIONS[-1]}") from None


def _distance(left: tuple[int, int], right: tuple[int, int]) -> int:
    return abs((left[0] - right[0]) * 1000 + left[1] - right[1])


def resolve(model: ModelConfig, options: Mapping[str, OptionValue], *, version: str) -> Settings:
    """Fills in what vLLM would choose.

    Args:
        model: The model.
        options: All options of `OPTIONS`, of the right types.
        version: Any version; see `nearest_version`.

    Raises:
        EngineError: A combination that vLLM refuses.
    """
    known, remark = nearest_version(version)
    notes = [remark] if remark else []
    arch = str(options["arch"])
    backend, kv_dtype = _formats(model, arch, str(options["attention-backend"]), str(options["kv-cache-dtype"]))
    preferred, multiple, kernel_block = _blocks(model, arch, backend)
    block_tokens = _positive(options, "block-size") or preferred
    if arch.startswith("cpu") and kernel_block == preferred != block_tokens:
        notes.append(f"vLLM on a CPU takes blocks of {preferred} tokens; block-size {block_tokens} is overridden")
        block_tokens = preferred
    elif block_tokens % multiple:
        raise EngineError(f"option block-size: got {block_tokens}, expected a multiple of {multiple} for {backend}")
    if options["indexer-kv-dtype"] == "mxfp4" and model.family is Family.DSA:
        notes.append("vLLM keeps this model's indexer keys in fp8 whatever indexer-kv-dtype says")
    context_parallel = _positive(options, "decode-context-parallel-size", least=1)
    if context_parallel > 1 and model.family in (Family.V4, Family.V41):
        raise EngineError(
            f"option decode-context-parallel-size: got {context_parallel}, expected 1: vLLM refuses to split a sliding "
            "window over ranks"
        )
    pipeline_parallel = _positive(options, "pipeline-parallel-size", least=1)
    pipeline_rank = _positive(options, "pipeline-parallel-rank")
    if pipeline_parallel > model.num_layers or pipeline_rank >= pipeline_parallel:
        raise EngineError(
            f"option pipeline-parallel-rank: got rank {pipeline_rank} of {pipeline_parallel}, expected rank < size <= "
            f"{model.num_layers} layers"
        )
    steps = pipeline_parallel + bool(options["async-scheduling"])
    return Settings(
        version=known,
        arch=arch,
        kv_dtype=kv_dtype,
        packed_rows=kv_dtype.endswith("_ds_mla"),
        backend=backend,
        block_tokens=block_tokens,
        kernel_block_tokens=kernel_block,
        indexer_fp4=options["indexer-kv-dtype"] == "mxfp4",
        sparse_logits=bool(options["indexer-sparse-logits"]),
        speculative_tokens=_positive(options, "speculative-tokens"),
        tensor_parallel=_positive(options, "tensor-parallel-size", least=1),
        context_parallel=context_parallel,
        pipeline_parallel=pipeline_parallel,
        pipeline_rank=pipeline_rank,
        max_model_len=_positive(options, "max-model-len") or model.max_model_len,
        in_flight_tokens=steps * _positive(options, "max-num-batched-tokens", least=1),
        num_blocks=_positive(options, "num-gpu-blocks-override"),
        notes=tuple(notes),
    )


def _positive(options: Mapping[str, OptionValue], name: str, *, least: int = 0) -> int:
    value = options[name]
    if not isinstance(value, int) or value < least:
        raise EngineError(f"option {name}: got {value!r}, expected an integer of at least {least}")
    return value


def _formats(model: ModelConfig, arch: str, backend: str, kv_dtype: str) -> tuple[str, str]:
    """Backend and cache format that vLLM settles on.

    Sources: vLLM 0.33.0 models/deepseek_v4/attention.py and models/deepseek_v41/attention.py
    (_resolve_dsv4_kv_cache_dtype), models/deepseek_v41/nvidia/model.py (_select_dsv4_attn_cls),
    model_executor/layers/attention/mla_attention.py (_canonicalize_sparse_mla_kv_cache_dtype), platforms/cuda.py.
    """
    if model.family in (Family.V4, Family.V41):
        return _v4_formats(model, arch, backend, kv_dtype)
    if model.family is Family.DSA:
        return _sparse_formats(model, arch, backend, kv_dtype)
    if kv_dtype.endswith("_ds_mla"):
        raise EngineError(f"option kv-cache-dtype: got {kv_dtype}, expected auto, bfloat16 or fp8 for dense attention")
    chosen = {"sm100": "flashinfer", "sm120": "triton", "cpu": "cpu", "cpu-amx": "amx"}.get(arch, "flash_attn")
    return (chosen if backend == "auto" else backend), ("fp8" if kv_dtype.startswith("fp8") else "bfloat16")


def _v4_formats(model: ModelConfig, arch: str, backend: str, kv_dtype: str) -> tuple[str, str]:
    v41 = model.family is Family.V41
    if v41 and arch.startswith("cpu"):
        raise EngineError(f"option arch: got {arch}, expected a CUDA device: vLLM has no DeepSeek-V4.1 for CPUs")
    if backend == "auto":
        plain = kv_dtype in ("bfloat16", "fp8_e4m3") and arch == "sm100"
        backend = (
            "flashinfer"
            if plain or arch == "sm120"
            else "flashmla_mega_attn"
            if v41 and arch == "sm100"
            else "flashmla"
        )
    if backend == "flashmla_mega_attn" and not (v41 and arch == "sm100"):
        raise EngineError(
            "option attention-backend: got flashmla_mega_attn, expected flashmla: it serves V4.1 on sm100"
        )
    if backend == "flashinfer" and arch != "sm120":
        if kv_dtype.endswith("_ds_mla"):
            raise EngineError(
                f"option kv-cache-dtype: got {kv_dtype}, expected auto, bfloat16 or fp8: FlashInfer stores plain rows"
            )
        return backend, "fp8" if kv_dtype.startswith("fp8") else "bfloat16"
    if kv_dtype == "auto" or (v41 and kv_dtype == "fp8"):
        return backend, "nvfp4_ds_mla" if backend == "flashmla_mega_attn" else "fp8_ds_mla"
    if kv_dtype == "nvfp4_ds_mla":
        if not (v41 and arch == "sm100"):
            raise EngineError("option kv-cache-dtype: got nvfp4_ds_mla, expected fp8: only V4.1 on sm100 stores it")
        return backend, kv_dtype
    if not kv_dtype.startswith("fp8") or (v41 and kv_dtype == "fp8_e4m3"):
        raise EngineError(
            f"option kv-cache-dtype: got {kv_dtype}, expected fp8: {backend} on {arch} reads packed rows only"
        )
    return backend, "fp8_ds_mla"


def _sparse_formats(model: ModelConfig, arch: str, backend: str, kv_dtype: str) -> tuple[str, str]:
    if arch.startswith("cpu"):
        raise EngineError(f"option arch: got {arch}, expected a CUDA device: vLLM has no sparse MLA for CPUs")
    if kv_dtype == "auto" and arch == "sm100" and model.model_type == "glm_moe_dsa":
        kv_dtype = "fp8_e4m3"
    quantised = kv_dtype.startswith(("fp8", "nvfp4"))
    if backend == "auto":
        packed = kv_dtype.endswith("_ds_mla")
        backend = "flashinfer" if arch == "sm120" or (arch == "sm100" and quantised and not packed) else "flashmla"
    if kv_dtype == "nvfp4_ds_mla" and (backend != "flashmla" or arch != "sm100"):
        raise EngineError("option kv-cache-dtype: got nvfp4_ds_mla, expected fp8: FlashMLA on sm100 alone reads it")
    if backend == "flashinfer" and arch != "sm120":
        if kv_dtype == "fp8_ds_mla":
            raise EngineError("option kv-cache-dtype: got fp8_ds_mla, expected fp8: FlashInfer stores plain rows")
        return backend, "fp8" if quantised else "bfloat16"
    if kv_dtype == "nvfp4_ds_mla":
        return backend, kv_dtype
    packs = quantised or (arch == "sm120" and kv_dtype == "auto")
    return backend, "fp8_ds_mla" if packs else "bfloat16"


def _blocks(model: ModelConfig, arch: str, backend: str) -> tuple[int, int, int]:
    """Block size that vLLM prefers, what it must be a multiple of, and the kernel's largest where sizes are fixed.

    Sources: vLLM 0.33.0 platforms/interface.py (_preferred_block_size_for_backends), platforms/cpu.py, and
    get_supported_kernel_block_sizes of each backend.
    """
    if model.family is Family.V4:
        return 256, 256, 256
    if model.family is Family.V41:
        return (64, 64, 64) if arch == "sm90" else (128, 128, 128)
    if model.family is Family.DSA:
        return 64, 64, 64
    sizes = {"flashinfer": (32, 32, 64), "flashmla": (64, 64, 64), "cpu": (16, 16, 16), "amx": (128, 32, 0)}
    return sizes.get(backend, (16, 16, 0))
