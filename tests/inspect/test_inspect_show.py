"""`show`: numbers of the issue, formats, sources, remarks and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.support import call, manifest, pool, slab_pools, valid_document, write


def _pools(document: Any, engine: str) -> list[dict[str, Any]]:
    (found,) = [entry for entry in document["manifests"] if entry["engine"]["name"] == engine]
    pools: list[dict[str, Any]] = found["pools"]
    return pools


def _numbers(entry: dict[str, Any]) -> tuple[int, ...]:
    return tuple(entry[name] for name in ("page_rows", "payload_bytes", "page_bytes", "page_stride_bytes"))


def test_bare_call_has_the_known_numbers_of_both_engines() -> None:
    outcome = call("--format", "json")
    assert outcome.code == 0
    assert outcome.err == ""
    sglang = {entry["pool"]: _numbers(entry) for entry in _pools(outcome.json, "sglang")}
    assert sglang["swa"] == (256, 149_504, 149_760, 149_760)
    assert sglang["c4"] == (64, 37_376, 37_440, 37_440)
    assert sglang["c128"] == (2, 1_168, 1_728, 1_728)
    vllm = {entry["pool"]: entry for entry in _pools(outcome.json, "vllm")}
    assert _numbers(vllm["c4"]) == (64, 37_376, 37_440, 1_002_240)
    assert vllm["c4"]["layers"][0]["offset_bytes"] == 181_440
    assert _numbers(vllm["indexer"]) == (64, 8_448, 8_640, 1_002_240)


def test_v41_pages_have_no_padding_at_64_rows() -> None:
    for layout, record in (("v41", "v41"), ("v41_new", "v41_interleaved")):
        outcome = call("show", "deepseek-v4.1-flash", "--engine", "sglang", "--kv-layout", layout, "--format", "json")
        records = {entry["record"]: entry for entry in _pools(outcome.json, "sglang")}
        assert record in records
        for entry in records.values():
            if entry["record"].startswith("v41") and entry["page_rows"] >= 64:
                assert entry["waste_bytes"] == 0


def test_table_states_the_share_of_waste_and_the_verdict() -> None:
    outcome = call("show")
    assert outcome.code == 0
    c128 = next(line for line in outcome.out.splitlines() if line.startswith("c128") and "1,728 " in line)
    assert "1,168" in c128
    assert "32.4 %" in c128
    assert "Can one kernel (kvbridge.kernels.mla) read the MLA pages of sglang and vllm in place? yes" in outcome.out
    assert "43,758,400" in outcome.out  # 7,813 pages * 560 bytes * 20 layers for a million tokens of C128


def test_json_is_sorted_and_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "manifest.json", manifest(*slab_pools()))
    outcome = call("show", path, "--format", "json")
    assert outcome.code == 0
    assert outcome.out == json.dumps(outcome.json, indent=2, sort_keys=True) + "\n"
    assert outcome.out == path.read_text(encoding="utf-8")
    assert "\x1b" not in outcome.out

    def numbers(value: Any) -> list[Any]:
        if isinstance(value, dict | list):
            return [leaf for item in (value.values() if isinstance(value, dict) else value) for leaf in numbers(item)]
        return [value]

    assert not [leaf for leaf in numbers(outcome.json) if isinstance(leaf, float)]


def test_a_contradiction_is_a_finding_under_every_format(tmp_path: Path) -> None:
    document = valid_document()
    document["manifests"][0]["pools"][1]["page_stride_bytes"] = 37_375
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    for form in ("table", "json", "sarif", "github"):
        outcome = call("show", path, "--format", form)
        assert outcome.code == 1, form
        assert "37375" in outcome.err + outcome.out
        assert "page_stride_bytes" in outcome.err + outcome.out


def test_engine_selects_manifests_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    path.write_text(json.dumps(valid_document()), encoding="utf-8")
    outcome = call("show", path, "--engine", "sglang", "--format", "json")
    assert [entry["engine"]["name"] for entry in outcome.json["manifests"]] == ["sglang"]
    outcome = call("show", path, "--engine", "third")
    assert outcome.code == 2
    assert "got 'third', expected one of the engines in" in outcome.err


def test_config_json_and_its_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 4096,
    }
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    by_folder = call("show", folder, "--format", "json")
    assert by_folder.code == 0
    assert by_folder.out == call("show", folder / "config.json", "--format", "json").out
    assert {entry["model"] for entry in by_folder.json["manifests"]} == {"tiny"}
    for entry in by_folder.json["manifests"]:
        assert len(entry["pools"][0]["layers"]) == 3


def test_unknown_engine_version_uses_the_nearest_with_a_warning() -> None:
    newer = call("show", "--engine", "vllm", "--engine-version", "0.99", "--format", "json")
    assert newer.code == 0
    assert newer.json["manifests"][0]["engine"]["version"] == "0.33.0"
    assert "vllm 0.99 is not among the versions read (0.32.0, 0.33.0); using the rules of 0.33.0" in newer.err
    older = call("show", "--engine", "vllm", "--engine-version", "0.1", "--format", "json")
    assert older.json["manifests"][0]["engine"]["version"] == "0.32.0"
    known = call("show", "--engine", "vllm", "--engine-version", "0.32.0", "--format", "json")
    assert known.json["manifests"][0]["engine"]["version"] == "0.32.0"
    assert known.err == ""


def test_engine_options_in_three_spellings() -> None:
    base = ("show", "deepseek-v3.2", "--engine", "vllm", "--format", "json")
    flag = call(*base, "--kv-cache-dtype", "bfloat16")
    assert flag.code == 0
    assert "mla_bf16" in {entry["record"] for entry in _pools(flag.json, "vllm")}
    assert flag.json["manifests"][0]["options"]["kv-cache-dtype"] == "bfloat16"
    assert flag.out == call(*base, "--kv-cache-dtype=bfloat16").out
    assert flag.out == call(*base, "-O", "kv-cache-dtype=bfloat16").out
    first = ("show", "--kv-cache-dtype", "bfloat16", "deepseek-v3.2", "--engine", "vllm", "--format", "json")
    assert flag.out == call(*first).out
    other = call(*base, "--kv-cache-dtype", "fp8_ds_mla")
    assert "dsa" in {entry["record"] for entry in _pools(other.json, "vllm")}


def test_an_option_for_one_of_two_engines_is_remarked() -> None:
    outcome = call("show", "deepseek-v3", "--block-size", "128", "--format", "json")
    assert outcome.code == 0
    assert "--block-size reaches vllm only" in outcome.err


def test_memory_gives_blocks_tokens_and_a_reason() -> None:
    outcome = call("show", "--engine", "vllm", "--memory", "80GiB", "--format", "json")
    memory = outcome.json["manifests"][0]["memory"]
    assert memory["budget_bytes"] == 80 * 2**30
    assert 0 < memory["used_bytes"] <= memory["budget_bytes"]
    assert memory["num_blocks"] == memory["used_bytes"] // 1_002_240
    assert memory["reason"]
    table = call("show", "--engine", "vllm", "--memory", "80GiB").out
    assert f"{memory['num_blocks']:,} blocks" in table
    assert " ".join(memory["reason"].split()) in " ".join(table.split())


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80G", 80 * 2**30), ("1.5gb", 1_500_000_000), ("4096", 4096), ("64e9", 64 * 10**9)],
)
def test_memory_sizes(text: str, size: int) -> None:
    from kvbridge.inspect.options import parse_memory

    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "nan", "inf", "1e30", "8 parsecs", "1Gib/s"])
def test_sizes_that_are_none(text: str) -> None:
    outcome = call("show", "--engine", "vllm", f"--memory={text}")
    assert outcome.code == 2
    assert f"--memory: got {text!r}, expected a size such as 80GiB" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shwo",), "command: got 'shwo', expected one of show, map"),
        (("show", "no-such-model"), "SOURCE: got 'no-such-model' (no such file), expected a manifest"),
        (("show", "--engine", "third"), "engine: got 'third', expected one of"),
        (("show", "--engine-version", "1"), "--engine-version: got '1' for several engines"),
        (("show", "--engine", "vllm", "--engine-version", "new"), "got 'new', expected a version number"),
        (("show", "--bogus", "1"), "unrecognized arguments: --bogus"),
        (("show", "-O", "bogus=1"), "option bogus: got an option that no chosen engine has, expected one of"),
        (("show", "-O", "bogus"), "-O: got 'bogus', expected NAME=VALUE"),
        (("show", "--engine", "vllm", "--block-size", "many"), "option block-size: got 'many', expected an integer"),
        (("show", "--format", "yaml"), "invalid choice: 'yaml'"),
        (("show", "--block-size"), "--block-size: got no value, expected one"),
        (("map", "--pool", "c5"), "--pool: got 'c5', expected one of"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    outcome = call(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert message in outcome.err


def test_options_for_a_manifest_that_is_already_made_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "manifest.json", manifest(*slab_pools()))
    for extra in (("--memory", "1GiB"), ("-O", "block-size=64"), ("--engine", "vllm", "--engine-version", "0.33.0")):
        outcome = call("show", path, *extra)
        assert outcome.code == 2
        assert "expected a model to plan for" in outcome.err


def test_names_from_a_file_cannot_reach_the_terminal_unescaped(tmp_path: Path) -> None:
    page = pool("c4\x1b[31m", "v4", rows=64, policy="aligned", alignment=576)
    path = write(tmp_path / "manifest.json", manifest(page))
    for command in ("show", "map", "check"):
        outcome = call(command, path)
        assert outcome.code == 0
        assert "\x1b" not in outcome.out + outcome.err
        assert "c4\\x1b[31m" in outcome.out


def test_help_of_every_command_has_examples() -> None:
    from kvbridge.inspect.__main__ import COMMANDS

    overview = call("--help")
    assert overview.code == 0
    for command in COMMANDS:
        assert f"  {command}" in overview.out
        outcome = call(command, "--help")
        assert outcome.code == 0
        assert "examples:" in outcome.out
        assert f"python -m kvbridge.inspect {command}" in outcome.out
        assert "\x1b" not in outcome.out
