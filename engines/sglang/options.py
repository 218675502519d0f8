"""What decides SGLang's layouts: its command-line options, its environment variables, and the GPU.

    --page-size, --kv-cache-dtype ...            options, by their own names
    SGLANG_DSV4_KV_LAYOUT=v41                    kv-layout
    SGLANG_OPT_SM120_DIRECT_SWA_KV=1             sm120-direct-swa-kv
    the GPU                                      gpu: SGLang's defaults follow it

`Settings` is those options with SGLang's own defaults put in for one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge.engine import EngineError, EngineOption, OptionValue
from kvbridge.models import Family, ModelConfig

_V4_FAMILIES = (Family.V4, Family.V41)
_DSA_BACKENDS = ("auto", "flashmla_sparse", "flashmla_kv", "flashinfer_sparse_mla", "fa3", "tilelang", "trtllm")
_KV_DTYPES = ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp4_mx_block16")

OPTIONS = (
    EngineOption("page-size", 0, "tokens of a page; 0: 256 for V4, 64 for DSA, else what the attention backend takes"),
    EngineOption(
        "kv-cache-dtype", "auto", "dtype of the rows", ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp4_mx_block16")
    ),
    EngineOption("gpu", "sm100", "GPU that SGLang's defaults follow", ("sm90", "sm100", "sm120")),
    EngineOption("kv-layout", "auto", "SGLANG_DSV4_KV_LAYOUT", ("auto", "v4", "v41", "v41_new")),
    EngineOption("compressed-kv-layout", "auto", "SGLANG_DSV4_COMPRESSED_KV_LAYOUT", ("auto", "fp8", "fp4")),
    EngineOption(
        "dsv4-attn-backend",
        "auto",
        "V4 attention; trtllm keeps uniform fp8 rows",
        ("auto", "flashmla", "flashmla_mega", "trtllm"),
    ),
    EngineOption("swa-page-size", 0, "rows of a sliding-window page; 0: the page size"),
    EngineOption("sm120-direct-swa-kv", False, "SGLANG_OPT_SM120_DIRECT_SWA_KV: 64-row sliding-window pages on sm120"),
    EngineOption("enable-deepseek-v4-fp4-indexer", False, "C4 indexer keys in fp4"),
    EngineOption("compress-state-dtype", "float32", "SGLANG_DSV4_COMPRESS_STATE_DTYPE", ("float32", "bfloat16")),
    EngineOption("deepgemm-sparse-logits", False, "128-row index pages for ratios 1 and 2 (DeepGEMM sparse logits)"),
    EngineOption("dsa-prefill-backend", "auto", "sparse attention in prefill", _DSA_BACKENDS),
    EngineOption("dsa-decode-backend", "auto", "sparse attention in decode", _DSA_BACKENDS),
    EngineOption("speculative-num-draft-tokens", 0, "draft tokens of speculative decoding; 0: off"),
    EngineOption("enable-hisparse", False, "C4 rows on the host, a smaller pool on the device"),
    EngineOption("hisparse-host-to-device-ratio", 2, "host_to_device_ratio of --hisparse-config"),
    EngineOption("max-running-requests", 0, "requests at once; 0: 256 for V4, else from the capacity"),
    EngineOption("max-total-tokens", 0, "upper limit of the token capacity; 0: none"),
    EngineOption(
        "swa-full-tokens-ratio", "", "sliding-window slots per token; empty: 0.1 for V4, request cap for V4.1"
    ),
    EngineOption(
        "chunked-prefill-size", 8192, "tokens of a prefill chunk; counts where the request cap sizes the pool"
    ),
    EngineOption("disable-radix-cache", False, "keep no prefixes; counts where the request cap sizes the pool"),
)
"""In the order `--help` lists them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved options for one model.

    Attributes:
        page_rows: Tokens of a logical page.
        swa_page_rows: Tokens of a logical sliding-window page.
        swa_physical_rows: Rows of a sliding-window page in memory; smaller only for the SM120 direct layout.
        kv_layout: SGLang's KVLayout of the sliding-window cache.
        compressed_option: auto, fp8 or fp4.
        indexer_fp4: C4 indexer keys in fp4.
        state_dtype: Dtype of C4 and C128 compressor state; C2 state is always float32.
        index_page_rows: Rows of an index page of ratios 1 and 2.
        classic_record: Record of classic MLA and DSA rows; empty for the V4 family.
        draft_tokens: Draft tokens of speculative decoding, 0 for none.
        hisparse_ratio: How many times smaller the C4 pool on the device is; 0 without HiSparse.
        max_running_requests: Limit of requests; 0 for SGLang's estimate from the capacity.
        max_total_tokens: Limit of the capacity; 0 for none.
        swa_ratio: Sliding-window slots per token; None where the request cap sizes the pool.
        chunked_prefill_rows: Tokens of a prefill chunk.
        radix_cache: Whether prefixes are kept.
    """

    page_rows: int
    swa_page_rows: int
    swa_physical_rows: int
    kv_layout: str
    compressed_option: str
    indexer_fp4: bool
    state_dtype: str
    index_page_rows: int
    classic_record: str
    draft_tokens: int
    hisparse_ratio: int
    max_running_requests: int
    max_total_tokens: int
    swa_ratio: float | None
    chunked_prefill_rows: int
    radix_cache: bool


def resolve_settings(model: ModelConfig, options: Mapping[str, OptionValue]) -> Settings:
    """Puts SGLang's defaults for a model into resolved options.

    Args:
        model: The model's KV caches.
        options: All options, as `kvbridge.engine.resolve_options` returns them.

    Raises:
        EngineError: A combination SGLang refuses, with what it would take.
    """
    v4 = model.family in _V4_FAMILIES
    check_model(model)
    for name in ("page-size", "swa-page-size", "speculative-num-draft-tokens", "max-running-requests"):
        if int(options[name]) < 0:
            raise EngineError(f"option {name}: got {options[name]}, expected at least 0")
    classic_record = "" if v4 else _classic_record(model, options)
    page_rows = _page_rows(model, options)
    swa_page_rows = int(options["swa-page-size"]) or page_rows
    if page_rows % swa_page_rows:
        raise EngineError(f"option swa-page-size: got {swa_page_rows}, expected a divisor of page-size {page_rows}")
    direct = bool(options["sm120-direct-swa-kv"]) and options["gpu"] == "sm120"
    if direct and swa_page_rows % 64:
        raise EngineError(f"option swa-page-size: got {swa_page_rows}, expected a multiple of 64 (sm120-direct-swa-kv)")
    hisparse = bool(options["enable-hisparse"])
    ratio = int(options["hisparse-host-to-device-ratio"])
    if hisparse and ratio < 1:
        raise EngineError(f"option hisparse-host-to-device-ratio: got {ratio}, expected at least 1")
    kv_layout, compressed = _kv_layout(model, options) if v4 else ("", "auto")
    if hisparse and v4 and kv_layout != "v4":  # HiSparseC4DevicePool: its transfer kernels know V4 pages only
        raise EngineError(f"option enable-hisparse: got true, expected false with the {kv_layout} layout")
    return Settings(
        page_rows=page_rows,
        swa_page_rows=swa_page_rows,
        swa_physical_rows=64 if direct else swa_page_rows,
        kv_layout=kv_layout,
        compressed_option=compressed,
        indexer_fp4=bool(options["enable-deepseek-v4-fp4-indexer"]),
        state_dtype=str(options["compress-state-dtype"]),
        index_page_rows=128 if options["deepgemm-sparse-logits"] else 64,
        classic_record=classic_record,
        draft_tokens=int(options["speculative-num-draft-tokens"]),
        hisparse_ratio=ratio if hisparse else 0,
        max_running_requests=int(options["max-running-requests"]) or (256 if v4 else 0),
        max_total_tokens=int(options["max-total-tokens"]),
        swa_ratio=_swa_ratio(model, options),
        chunked_prefill_rows=int(options["chunked-prefill-size"]),
        radix_cache=not options["disable-radix-cache"],
    )


def check_model(model: ModelConfig) -> None:
    """Refuses models whose caches SGLang does not build, or builds from rows that no record describes.

    Raises:
        EngineError: Names the config's field, got and expected.
    """
    rows = {"head_dim" if model.family in _V4_FAMILIES else "kv_lora_rank": (model.head_dim, 512)}
    rows["qk_rope_head_dim"] = (model.rope_dim, 64)
    ratios = model.compress_ratios[: model.num_layers]
    if model.family is Family.DSA or set(ratios) & {1, 2, 4}:
        rows["index_head_dim"] = (model.index_head_dim, 128)
    for field, (got, expected) in rows.items():
        if got != expected:
            raise EngineError(f"{field}: got {got}, expected {expected}")
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2, 4, 128):
            raise EngineError(f"compress_ratios[{layer}]: got {ratio}, expected one of [0, 1, 2, 4, 128]")
        sources = [source for source in model.kv_source_layers if source <= layer and ratios[source] == ratio]
        if ratio in (1, 2) and not sources:
            raise EngineError(
                f"kv_source_layer_ids: got {list(model.kv_source_layers)}, expected a layer of ratio {ratio} at or "
                f"before layer {layer}, whose rows that layer reads"
            )


def _page_rows(model: ModelConfig, options: Mapping[str, OptionValue]) -> int:
    given = int(options["page-size"])
    if model.family in _V4_FAMILIES:
        # kv_cache_configurator.py, _build_dsv4_kv_pool: "In paged swa mode, page_size must be 256."
        if given not in (0, 256):
            raise EngineError(f"option page-size: got {given}, expected 256 (SGLang takes no other for DeepSeek-V4)")
        return 256
    if model.family is Family.DSA:
        # memory_pool.py, DSATokenToKVPool: "DSA requires 64-token physical pages"
        if given not in (0, 64):
            raise EngineError(
                f"option page-size: got {given}, expected 64 (SGLang takes no other for sparse attention)"
            )
        return 64
    # overrides.py: trtllm_mla, the default on sm100, takes 32 or 64; elsewhere the default is 1.
    return given or (64 if options["gpu"] == "sm100" else 1)


def _kv_layout(model: ModelConfig, options: Mapping[str, OptionValue]) -> tuple[str, str]:
    """Follows select_dsv4_kv_layout and _default_dsv4_attention_backend (arg_groups/deepseek_v4_hook.py)."""
    mode, compressed = str(options["kv-layout"]), str(options["compressed-kv-layout"])
    backend = str(options["dsv4-attn-backend"])
    if options["kv-cache-dtype"] not in ("auto", "fp8_e4m3"):
        raise EngineError(f"option kv-cache-dtype: got {options['kv-cache-dtype']}, expected fp8_e4m3 for DeepSeek-V4")
    if backend == "trtllm":
        if mode not in ("auto", "v4") or compressed == "fp4":
            raise EngineError(f"option kv-layout: got {mode}, expected auto or v4 (trtllm keeps uniform fp8 pages)")
        return "uniform_fp8", "auto"
    if mode == "auto":
        v41 = model.family is Family.V41 and options["gpu"] == "sm100"
        mode = "v41" if v41 or backend == "flashmla_mega" else "v4"
    if mode != "v4" and options["gpu"] != "sm100":
        raise EngineError(f"option kv-layout: got {mode}, expected v4 on {options['gpu']} (V4.1 layouts need sm100)")
    if mode == "v4" and compressed == "fp4":
        raise EngineError("option compressed-kv-layout: got fp4, expected auto or fp8 (V4 pairs with V4 caches only)")
    return mode, compressed


def _classic_record(model: ModelConfig, options: Mapping[str, OptionValue]) -> str:
    """Follows _dsa_kv_cache_dtype_default (arg_groups/overrides.py) and calculate_mla_kv_cache_dim."""
    dtype = str(options["kv-cache-dtype"])
    if dtype == "auto":
        dtype = "fp8_e4m3" if model.family is Family.DSA and options["gpu"] != "sm90" else "bfloat16"
    if dtype in ("bfloat16", "bf16"):
        return "mla_bf16"
    prefill, decode = options["dsa-prefill-backend"], options["dsa-decode-backend"]
    if model.family is Family.DSA:
        if dtype == "fp4_mx_block16":
            raise EngineError(
                "option kv-cache-dtype: got fp4_mx_block16, expected bfloat16 or fp8_e4m3 for sparse attention"
            )
        raw = "trtllm" in (prefill, decode) or prefill == decode == "tilelang"
        return "mla_fp8" if raw else "dsa"
    return "mla_fp4" if dtype == "fp4_mx_block16" else "mla_fp8"


def _swa_ratio(model: ModelConfig, options: Mapping[str, OptionValue]) -> float | None:
    text = str(options["swa-full-tokens-ratio"])
    if not text:
        # model_overrides/deepseek_v4.py sets 0.1 for V4; left unset for V4.1, the request cap sizes the pool.
        return 0.1 if model.family is Family.V4 else None
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise EngineError(f"option swa-full-tokens-ratio: got {text!r}, expected a number above 0, at most 1")
    return ratio
