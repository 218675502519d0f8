"""Every layer's cache, in the order vLLM builds the layers: the order decides groups and offsets.

    V4 layer, ratio 4      indexer.k_cache, indexer.compressor.state_cache, swa_cache, attn, compressor.state_cache
    V4 layer, ratio 128    swa_cache, attn, compressor.state_cache
    V4.1 source layer      attn, indexer.k_cache, swa_cache, compressor.state_cache
    V3.2 layer             indexer.k_cache, attn

Sources: vLLM 0.32.0 and 0.33.0 models/deepseek_v4/{attention,compressor}.py,
models/deepseek_v41/{attention,compressor}.py, models/deepseek_v32/attention.py,
model_executor/layers/attention/mla_attention.py, v1/attention/backends/mla/sparse_swa.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from kvbridge.engine import EngineError
from kvbridge.engines.vllm.options import Settings
from kvbridge.engines.vllm.specs import CacheSpec, SpecKind
from kvbridge.models import Family, ModelConfig
from kvbridge.records import get_record

ALIGNMENTS = (576, 512)
"""What pages are rounded up to: FlashMLA's rows of split V4 records; FlashInfer's rows and V4.1's records."""

_V4_ALIGNMENT, _PLAIN_ALIGNMENT = ALIGNMENTS


def layer_specs(model: ModelConfig, settings: Settings) -> dict[str, CacheSpec]:
    """Every layer's cache by vLLM's name of the layer.

    Args:
        model: The model.
        settings: Resolved options.

    Raises:
        EngineError: vLLM has no cache for a layer of this model.
    """
    layers = {Family.V4: _v4_layers, Family.V41: _v41_layers}.get(model.family, _classic_layers)
    return dict(layers(model, settings))


def is_packed(model: ModelConfig, specs: dict[str, CacheSpec]) -> bool:
    """Whether blocks are outermost: a V4 or V4.1 indexer's backend asks for it.

    Source: vLLM 0.33.0 v1/attention/backends/mla/indexer.py (DeepseekV4IndexerBackend.supported_kv_cache_layouts).
    """
    return model.family in (Family.V4, Family.V41) and any(spec.pool == "indexer" for spec in specs.values())


def _num_layers(model: ModelConfig, settings: Settings) -> int:
    return model.num_layers + (model.num_draft_layers if settings.speculative_tokens else 0)


def _plain_record(settings: Settings) -> tuple[str, str]:
    return ("uniform_fp8", "float8_e4m3fn") if settings.kv_dtype == "fp8" else ("v4_bf16", "bfloat16")


def _indexer_record(settings: Settings) -> str:
    return "indexer_fp4" if settings.indexer_fp4 else "indexer_fp8"


def _v4_layers(model: ModelConfig, settings: Settings) -> Iterator[tuple[str, CacheSpec]]:
    alignment = _V4_ALIGNMENT if settings.packed_rows else _PLAIN_ALIGNMENT
    record, dtype = ("v4", "uint8") if settings.packed_rows else _plain_record(settings)
    window = CacheSpec(
        SpecKind.SLIDING, "swa", record, 64, alignment=alignment, window_tokens=model.sliding_window, dtype=dtype
    )

    def rows(pool: str, ratio: int, row_record: str, row_dtype: str) -> CacheSpec:
        return CacheSpec(
            SpecKind.MLA,
            pool,
            row_record,
            settings.block_tokens,
            tokens_per_row=ratio,
            alignment=alignment,
            kernel_block_tokens=settings.kernel_block_tokens,
            dtype=row_dtype,
        )

    def state(floats: int, ratio: int) -> CacheSpec:
        # Two partial sums and two scores overlap at ratio 4. Block sizes are fixed in vLLM's compressor.
        block, span = (4, 8) if ratio == 4 else (8, ratio)
        return CacheSpec(
            SpecKind.SLIDING,
            "compressor_state",
            f"state_fp32_{floats}",
            block,
            alignment=alignment,
            window_tokens=span,
            dtype="float32",
        )

    for index in range(_num_layers(model, settings)):
        ratio = max(1, model.compress_ratios[index]) if index < model.num_layers else 1
        if ratio not in (1, 4, 128):
            raise EngineError(f"compress_ratios[{index}]: got {ratio}, expected 0, 1, 4 or 128 in a V4 model")
        prefix = f"model.layers.{index}.attn"
        if ratio == 4:
            yield f"{prefix}.indexer.k_cache", rows("indexer", ratio, _indexer_record(settings), "uint8")
            yield f"{prefix}.indexer.compressor.state_cache", state(4 * model.index_head_dim, ratio)
        yield f"{prefix}.swa_cache", window
        if ratio > 1:
            yield prefix, rows(f"c{ratio}", ratio, record, dtype)
            yield f"{prefix}.compressor.state_cache", state((4 if ratio == 4 else 2) * model.head_dim, ratio)


def _v41_layers(model: ModelConfig, settings: Settings) -> Iterator[tuple[str, CacheSpec]]:
    own_record = settings.packed_rows and settings.v41_record
    alignment = _V4_ALIGNMENT if settings.packed_rows and not own_record else _PLAIN_ALIGNMENT
    if not settings.packed_rows:
        (window_record, dtype), compressed_record = _plain_record(settings), _plain_record(settings)[0]
    else:
        dtype = "uint8"
        window_record, compressed_record = _v41_records(settings)
    # From 0.33 on the records are interleaved and read as rows of the whole cache: a block holds whole rows of both.
    whole_rows = own_record and settings.version != "0.32.0"
    window = CacheSpec(
        SpecKind.SLIDING,
        "swa",
        window_record,
        32,
        alignment=alignment,
        window_tokens=model.sliding_window,
        stride_alignment_bytes=(
            lcm(get_record(window_record).row_bytes, get_record(compressed_record).row_bytes) if whole_rows else 0
        ),
        dtype=dtype,
    )
    ring_rows = max(8, 1 << (settings.speculative_tokens + 1).bit_length())
    for index in range(_num_layers(model, settings)):
        ratio = model.compress_ratios[index] if index < model.num_layers else 0
        prefix = f"model.layers.{index}.attn"
        source = index < model.num_layers and index in model.kv_source_layers
        if source:
            if ratio < 1:
                raise EngineError(f"compress_ratios[{index}]: got {ratio}, expected at least 1 in a source layer")
            row = CacheSpec(
                SpecKind.MLA,
                f"c{ratio}",
                compressed_record,
                settings.block_tokens,
                tokens_per_row=ratio,
                alignment=alignment,
                kernel_block_tokens=settings.kernel_block_tokens,
                dtype=dtype,
            )
            yield prefix, row
            if not model.index_source_layers or index in model.index_source_layers:
                yield f"{prefix}.indexer.k_cache", _v41_indexer(settings, ratio, alignment, own_record=own_record)
        yield f"{prefix}.swa_cache", window
        if source and ratio > 1:
            yield (
                f"{prefix}.compressor.state_cache",
                CacheSpec(
                    SpecKind.RING, "compressor_state", f"state_fp32_{2 * model.head_dim}", ring_rows, dtype="float32"
                ),
            )


def _v41_records(settings: Settings) -> tuple[str, str]:
    """Records of the window and of the compressed rows."""
    if not settings.v41_record:
        return "v4", "v4"
    suffix = "" if settings.version == "0.32.0" else "_interleaved"
    compressed = "v41_fp4" if settings.kv_dtype == "nvfp4_ds_mla" else "v41"
    return f"v41{suffix}", f"{compressed}{suffix}"


def _v41_indexer(settings: Settings, ratio: int, alignment: int, *, own_record: bool) -> CacheSpec:
    stride_alignment = 0
    if settings.sparse_logits:
        # DeepGEMM's paged sparse logits want the distance between blocks aligned.
        stride_alignment = (
            lcm(512, alignment) if settings.version == "0.32.0" else lcm(256, 1 if own_record else alignment)
        )
    return CacheSpec(
        SpecKind.MLA,
        "indexer",
        _indexer_record(settings),
        settings.block_tokens,
        tokens_per_row=ratio,
        alignment=alignment,
        stride_alignment_bytes=stride_alignment,
        kernel_block_tokens=settings.kernel_block_tokens,
    )


def _classic_layers(model: ModelConfig, settings: Settings) -> Iterator[tuple[str, CacheSpec]]:
    sparse = model.family is Family.DSA
    record, dtype = {
        "bfloat16": ("mla_bf16", "bfloat16"),
        "fp8": ("mla_fp8", "uint8"),
        "fp8_ds_mla": ("dsa", "uint8"),
        "nvfp4_ds_mla": ("nvfp4_352", "uint8"),
    }[settings.kv_dtype]
    pages_of_64 = settings.arch != "sm100" and settings.backend == "flashmla" and settings.kv_dtype != "bfloat16"
    aligned_rows = 0 if not sparse or pages_of_64 else 32 if settings.backend == "flashinfer" else 1
    indexer = CacheSpec(SpecKind.MLA, "indexer", "indexer_fp8", settings.block_tokens, kernel_block_tokens=64)
    for index in range(_num_layers(model, settings)):
        prefix = f"model.layers.{index}.self_attn"
        owns_indexer = sparse and (
            index >= model.num_layers or not model.index_source_layers or index in model.index_source_layers
        )
        if owns_indexer:
            yield f"{prefix}.indexer.k_cache", indexer
        yield (
            f"{prefix}.attn",
            CacheSpec(
                SpecKind.MLA,
                "dsa" if sparse else "mla",
                record,
                settings.block_tokens,
                stride_alignment_bytes=aligned_rows * get_record(record).row_bytes,
                kernel_block_tokens=64 if pages_of_64 else 0 if sparse else settings.kernel_block_tokens,
                leader=owns_indexer,
                dtype=dtype,
            ),
        )
