"""What a model's config.json says about its KV caches, engine-neutral. No torch, no engine.

    config.json --ModelConfig.from_config--> family, layers, compress ratios, head sizes, indexer, sliding window
    "deepseek-v4-flash" --built-in--------^

Ratios: 0 stores only the sliding window, 1, 2, 4, 128 store one compressed row for so many tokens besides it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvbridge.errors import ManifestError


class Family(StrEnum):
    """Which KV caches a model has."""

    V4 = "deepseek_v4"  # sliding window, C4 and C128 compressed rows, C4 indexer, compressor state
    V41 = "deepseek_v41"  # sliding window everywhere, C1 / C2 rows on source layers only, shared indexers
    DSA = "dsa"  # classic MLA rows and an indexer key per token (V3.2, GLM-5.2)
    MLA = "mla"  # classic MLA rows (V3, Kimi K2)


_FAMILIES = {
    "deepseek_v4": Family.V4,
    "deepseek_v41": Family.V41,
    "deepseek_v41_text": Family.V41,
    "deepseek_v32": Family.DSA,
    "deepseek_v3": Family.MLA,
    "deepseek_v2": Family.MLA,
    "kimi_k2": Family.MLA,
    "glm_moe_dsa": Family.DSA,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's KV caches.

    Attributes:
        name: Built-in name or folder name.
        family: Kind of caches.
        num_layers: Decoder layers, without draft layers.
        num_heads: Query heads of the whole model.
        head_dim: Values of a V4 row (512), or latent values of a classic MLA row.
        rope_dim: RoPE values: inside head_dim for V4, behind the latent for classic MLA.
        max_model_len: Longest context.
        compress_ratios: One ratio per decoder layer (V4 family), draft layers behind.
        num_draft_layers: Multi-token-prediction layers.
        sliding_window: Window in tokens; 0 for none.
        index_head_dim: Values of an indexer key; 0 for no indexer.
        index_topk: Slots an indexer selects.
        kv_source_layers: Layers that store compressed rows (V4.1); others read theirs.
        index_source_layers: Layers with an indexer of their own (V4.1, shared indexers); empty for all.
        model_type: The config's own name of the architecture; empty where it does not matter.
    """

    name: str
    family: Family
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    max_model_len: int
    compress_ratios: tuple[int, ...] = ()
    num_draft_layers: int = 0
    sliding_window: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    kv_source_layers: tuple[int, ...] = ()
    index_source_layers: tuple[int, ...] = ()
    model_type: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str) -> ModelConfig:
        """Reads a Hugging Face config.json.

        V4 configs name their layers by `compress_ratios` or by Transformers' `layer_types` and `compress_rates`; V4.1
        configs nest the text model under `text_config`; sparse models share indexers by `indexer_types`,
        `index_topk_pattern` or `index_topk_freq`. Sources: Transformers 5.19.0 models/deepseek_v4, models/glm_moe_dsa;
        vLLM 0.33.0 transformers_utils/configs/deepseek_v41.py, models/deepseek_v32/attention.py.

        Args:
            config: The parsed file.
            name: Name for messages and manifests.

        Raises:
            ManifestError: A field is missing, of the wrong type, or the model type has no MLA cache known here.
        """
        model_type = config.get("model_type")
        family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise ManifestError(f"model_type: got {model_type!r}, expected one of {sorted(_FAMILIES)}")
        config = _flatten(config)
        num_layers = _integer(config, "num_hidden_layers", minimum=1)
        v4_family = family in (Family.V4, Family.V41)
        return cls(
            name=name,
            family=family,
            num_layers=num_layers,
            num_heads=_integer(config, "num_attention_heads", minimum=1),
            head_dim=_integer(config, "head_dim" if v4_family else "kv_lora_rank", default=512, minimum=1),
            rope_dim=_integer(config, "qk_rope_head_dim", default=64, minimum=1),
            max_model_len=_integer(config, "max_position_embeddings", default=4096, minimum=1),
            compress_ratios=_ratios(config, family, num_layers),
            num_draft_layers=_draft_layers(config),
            sliding_window=_integer(config, "sliding_window", default=128 if v4_family else 0),
            index_head_dim=_integer(config, "index_head_dim", default=0 if family is Family.MLA else 128),
            index_topk=_integer(config, "index_topk", default=0),
            kv_source_layers=_integers(config, "kv_source_layer_ids"),
            index_source_layers=_index_sources(config, family, num_layers),
            model_type=str(model_type),
        )


def _flash_ratios() -> tuple[int, ...]:
    return (0, 0, *(4, 128) * 20, 4)


def _shared_indexers(num_layers: int, *, frequency: int, offset: int) -> tuple[int, ...]:
    """Layers that select slots themselves where every `frequency`-th does; the others reuse their selection."""
    if frequency == 1:
        return ()
    return tuple(layer for layer in range(num_layers) if max(layer - offset + 1, 0) % frequency == 0)


_BUILT_IN = {
    config.name: config
    for config in (
        ModelConfig(
            "deepseek-v4-flash", Family.V4, 43, 64, 512, 64, 1_048_576, (*_flash_ratios(), 0), 1, 128, 128, 512
        ),
        ModelConfig(
            "deepseek-v4-pro", Family.V4, 61, 128, 512, 64, 1_048_576, (128, *(128, 4) * 30, 0), 1, 128, 128, 1024
        ),
        ModelConfig(
            "deepseek-v4.1-flash",
            Family.V41,
            40,
            64,
            512,
            64,
            1_048_576,
            (0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0),
            3,
            128,
            128,
            512,
            (2, 8, 14, 20),
            (2, 8, 14, 20, 24, 28, 32, 36),
        ),
        ModelConfig("deepseek-v3.2", Family.DSA, 61, 128, 512, 64, 163_840, (), 1, 0, 128, 2048),
        ModelConfig("deepseek-v3", Family.MLA, 61, 128, 512, 64, 163_840, (), 1),
        ModelConfig("kimi-k2", Family.MLA, 61, 64, 512, 64, 131_072),
        ModelConfig(
            "glm-5.2",
            Family.DSA,
            78,
            64,
            512,
            64,
            202_752,
            (),
            1,
            0,
            128,
            2048,
            index_source_layers=_shared_indexers(78, frequency=4, offset=2),
            model_type="glm_moe_dsa",
        ),
    )
}


def model_names() -> tuple[str, ...]:
    """Names of the built-in models, sorted."""
    return tuple(sorted(_BUILT_IN))


def load_model(source: str | Path) -> ModelConfig:
    """Finds a model.

    Args:
        source: A built-in name, a config.json, or the folder that holds one.

    Raises:
        ManifestError: No such name or file, or a file that is no usable config.
    """
    built_in = _BUILT_IN.get(str(source).lower())
    if built_in is not None:
        return built_in
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ManifestError(
            f"model: got {str(source)!r} ({reason}), expected a config.json, its folder, or one of "
            f"{list(model_names())}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"model: got {str(source)!r}, which is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ManifestError(f"model: got a JSON {type(config).__name__} in {str(source)!r}, expected an object")
    return ModelConfig.from_config(config, name=path.parent.name or str(path))


def _flatten(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's fields on top, where a config nests them."""
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise ManifestError(f"text_config: got {nested!r}, expected an object")
    return {**nested, **config}


_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def _ratios(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    if family not in (Family.V4, Family.V41):
        return ()
    ratios = _integers(config, "compress_ratios")
    if family is Family.V4 and not ratios:
        ratios = _ratios_by_type(config, num_layers)
    if len(ratios) < num_layers:
        raise ManifestError(
            f"compress_ratios: got {len(ratios)} entries, expected at least {num_layers} (num_hidden_layers)"
        )
    return ratios


def _ratios_by_type(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    types = config.get("layer_types")
    if types is None:
        # Transformers' default: two layers at 128, then 128 and 4 in turn.
        return tuple(4 if layer >= 2 and layer % 2 else 128 for layer in range(num_layers))
    if not isinstance(types, list):
        raise ManifestError(f"layer_types: got {types!r}, expected a list")
    given = config.get("compress_rates") or {}
    if not isinstance(given, Mapping):
        raise ManifestError(f"compress_rates: got {given!r}, expected an object")
    rates = {**_LAYER_TYPES, **given}
    unknown = [name for name in types if not isinstance(name, str) or name not in _LAYER_TYPES]
    if unknown:
        raise ManifestError(f"layer_types: got {unknown[0]!r}, expected one of {sorted(_LAYER_TYPES)}")
    return _integers({"compress_rates": [rates[name] for name in types]}, "compress_rates")


def _draft_layers(config: Mapping[str, Any]) -> int:
    """Draft layers: DSpark's where the config has them, else the multi-token-prediction ones."""
    if config.get("dspark_target_layer_ids") is not None:
        return _integer(config, "n_mtp_layers", default=3)
    return _integer(config, "num_nextn_predict_layers", default=0)


def _index_sources(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    if family is not Family.DSA:
        return _integers(config, "index_source_layer_ids")
    modes = config.get("indexer_types") or config.get("index_topk_pattern")
    if modes is None:
        return _shared_indexers(
            num_layers,
            frequency=_integer(config, "index_topk_freq", default=1, minimum=1),
            offset=_integer(config, "index_skip_topk_offset", default=2, minimum=1),
        )
    known = ("F", "S", "full", "shared")
    if not isinstance(modes, str | list) or any(mode not in known for mode in modes):
        raise ManifestError(f"indexer_types: got {modes!r}, expected a list of full and shared, or a text of F and S")
    shared = {layer for layer, mode in enumerate(modes) if mode in ("S", "shared")}
    return tuple(layer for layer in range(num_layers) if layer not in shared) if shared else ()


def _integer(config: Mapping[str, Any], field: str, *, default: int | None = None, minimum: int = 0) -> int:
    value = config.get(field, default)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ManifestError(f"{field}: got {value!r}, expected an integer of at least {minimum}")
    return value


def _integers(config: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = config.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ManifestError(f"{field}: got {value!r}, expected a list of integers of at least 0")
    return tuple(value)
