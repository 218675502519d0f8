"""What config.json files say about KV caches: every spelling the engines' config classes accept, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbridge.errors import ManifestError
from kvbridge.models import Family, ModelConfig, load_model, model_names

V4: dict[str, Any] = {"model_type": "deepseek_v4", "num_hidden_layers": 6, "num_attention_heads": 64}
GLM: dict[str, Any] = {"model_type": "glm_moe_dsa", "num_hidden_layers": 10, "num_attention_heads": 64}


def read(config: dict[str, Any], **fields: Any) -> ModelConfig:
    return ModelConfig.from_config(config | fields, name="model")


def test_built_in_models() -> None:
    assert model_names() == (
        "deepseek-v3",
        "deepseek-v3.2",
        "deepseek-v4-flash",
        "deepseek-v4-pro",
        "deepseek-v4.1-flash",
        "glm-5.2",
        "kimi-k2",
    )
    flash, pro = load_model("deepseek-v4-flash"), load_model("DeepSeek-V4-Pro")
    assert [flash.compress_ratios[:43].count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert [pro.compress_ratios[:61].count(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]


def test_v4_ratios_by_number_by_layer_type_and_by_default() -> None:
    ratios = [0, 128, 4, 128, 4, 0]
    types = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    by_number = read(V4, compress_ratios=[*ratios, 0])
    by_type = read(V4, layer_types=[types[ratio] for ratio in ratios])
    assert by_number.compress_ratios == (*ratios, 0)
    assert by_type.compress_ratios == tuple(ratios)
    assert read(V4).compress_ratios == (128, 128, 128, 4, 128, 4)


def test_v4_rates_of_layer_types_can_differ() -> None:
    config = read(
        V4, layer_types=["heavily_compressed_attention"] * 6, compress_rates={"heavily_compressed_attention": 64}
    )
    assert config.compress_ratios == (64,) * 6


def test_v41_text_config_is_nested() -> None:
    text = {
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "compress_ratios": [0, 2, 2, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 2, 3],
        "dspark_target_layer_ids": [1],
        "n_mtp_layers": 3,
    }
    config = ModelConfig.from_config({"model_type": "deepseek_v41", "text_config": text}, name="model")
    assert (config.family, config.num_layers, config.num_draft_layers) == (Family.V41, 4, 3)
    assert (config.kv_source_layers, config.index_source_layers) == ((1, 3), (1, 2, 3))


@pytest.mark.parametrize(
    ("fields", "sources"),
    [
        ({}, ()),
        ({"index_topk_freq": 4}, (0, 1, 5, 9)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6)),
        ({"index_topk_pattern": "FFSSFSSFSS"}, (0, 1, 4, 7)),
        ({"indexer_types": ["full", "shared"] * 5}, (0, 2, 4, 6, 8)),
    ],
)
def test_shared_indexers(fields: dict[str, Any], sources: tuple[int, ...]) -> None:
    assert read(GLM, **fields).index_source_layers == sources


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type: got None, expected one of"),
        ({"model_type": "llama"}, "model_type: got 'llama'"),
        ({"model_type": ["deepseek_v4"]}, "model_type: got"),
        (V4 | {"num_hidden_layers": 0}, "num_hidden_layers: got 0, expected an integer of at least 1"),
        (V4 | {"num_hidden_layers": True}, "num_hidden_layers: got True"),
        (V4 | {"compress_ratios": [4]}, "compress_ratios: got 1 entries, expected at least 6"),
        (V4 | {"compress_ratios": "4"}, "compress_ratios: got '4', expected a list of integers"),
        (V4 | {"layer_types": ["full_attention"] * 6}, "layer_types: got 'full_attention', expected one of"),
        (V4 | {"layer_types": 3}, "layer_types: got 3, expected a list"),
        (V4 | {"layer_types": [["a"]] * 6}, "layer_types: got"),
        (V4 | {"compress_rates": 3, "layer_types": ["sliding_attention"] * 6}, "compress_rates: got 3"),
        (V4 | {"text_config": 3}, "text_config: got 3, expected an object"),
        (GLM | {"index_topk_freq": 0}, "index_topk_freq: got 0, expected an integer of at least 1"),
        (GLM | {"indexer_types": 7}, "indexer_types: got 7, expected a list of full and shared"),
        (GLM | {"indexer_types": [["S"]]}, "indexer_types: got"),
    ],
)
def test_refusals_name_field_got_and_expected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError) as refused:
        ModelConfig.from_config(config, name="model")
    assert message in str(refused.value)


def test_a_folder_a_file_and_neither(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V4))
    assert load_model(tmp_path) == load_model(tmp_path / "config.json")
    assert load_model(tmp_path).name == tmp_path.name
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ManifestError, match="model: got a JSON list"):
        load_model(tmp_path)
    with pytest.raises(ManifestError, match=r"expected a config\.json, its folder, or one of"):
        load_model(tmp_path / "missing")
