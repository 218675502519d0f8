"""`diff`: the pairs of case 44, plans against plans, files against files, formats and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbridge.manifest import Manifest
from tests.inspect.support import call, manifest, pool, write


def _c4(**fields: Any) -> Manifest:
    options: dict[str, Any] = {"policy": "aligned", "alignment": 576, "rows": 64} | fields
    record = options.pop("record", "v4")
    return manifest(pool("c4", record, tokens_per_row=4, **options))


def _pair(tmp_path: Path, a: Manifest, b: Manifest, *options: str) -> Any:
    outcome = call("diff", write(tmp_path / "a.json", a), write(tmp_path / "b.json", b), "--format", "json", *options)
    return outcome.code, outcome.json


def test_equal_files(tmp_path: Path) -> None:
    code, document = _pair(tmp_path, _c4(), _c4())
    assert code == 0
    assert document["same"] is True
    assert document["relation"] == "same"
    assert document["differences"] == []


def test_padding_only_is_a_copy_of_the_payload(tmp_path: Path) -> None:
    code, document = _pair(tmp_path, _c4(policy="exact", alignment=None), _c4())
    assert code == 1
    assert document["relation"] == "copy"
    (found,) = document["pools"]
    assert found["copy_unit"]["bytes"] == 37_376
    fields = {entry["field"]: (entry["a"], entry["b"]) for entry in found["differences"]}
    assert fields["page_stride_bytes"] == (37_376, 37_440)
    assert found["first_difference"] == {"slot": 64, "field": "nope", "a": 37_376, "b": 37_440}


def test_other_rows_a_page_need_a_repack(tmp_path: Path) -> None:
    code, document = _pair(tmp_path, _c4(), _c4(rows=256))
    assert code == 1
    assert document["relation"] == "repack"
    assert document["pools"][0]["copy_unit"]["runs"] == [
        {"block": "data", "bytes": 36_864},
        {"block": "scales", "bytes": 512},
    ]


def test_another_record_is_incompatible(tmp_path: Path) -> None:
    code, document = _pair(tmp_path, _c4(), _c4(record="v41", alignment=512))
    assert code == 1
    assert document["relation"] == "incompatible"
    assert document["pools"][0]["copy_unit"] is None
    assert {"record", "payload_bytes"} <= {entry["field"] for entry in document["pools"][0]["differences"]}


@pytest.mark.parametrize("option", ["speculative-tokens", "revision"])
def test_depth_and_revision_are_named(tmp_path: Path, option: str) -> None:
    values: tuple[Any, Any] = (1, 3) if option == "speculative-tokens" else ("main", "2f1a")
    a, b = (_c4().model_copy(update={"options": {option: value}}) for value in values)
    code, document = _pair(tmp_path, a, b)
    assert code == 1
    assert document["relation"] == "incompatible"
    (found,) = [entry for entry in document["differences"] if entry["breaks"]]
    assert (found["field"], found["a"], found["b"]) == (f"options.{option}", *values)


def test_two_engines_of_one_model() -> None:
    outcome = call("diff", "vllm:deepseek-v4-flash", "sglang:deepseek-v4-flash")
    assert outcome.code == 1
    assert "relation: repack" in outcome.out
    assert "c4: copy, copy unit 64 rows, 37376 (payload) bytes" in outcome.out
    assert "first difference: slot 64, nope: 1,002,240 in a, 37,440 in b" in outcome.out


def test_two_versions_of_one_engine() -> None:
    outcome = call("diff", "vllm@0.32.0:deepseek-v4-flash", "vllm@0.33.0:deepseek-v4-flash", "--format", "json")
    assert outcome.code == 1
    assert outcome.json["a"]["engine"]["version"] == "0.32.0"
    assert outcome.json["relation"] == "same"


def test_options_reach_the_sides_that_have_them() -> None:
    outcome = call("diff", "vllm:deepseek-v3.2", "sglang:deepseek-v3.2", "--block-size", "64", "--format", "json")
    assert outcome.code in (0, 1)
    assert outcome.err == ""
    unknown = call("diff", "vllm:deepseek-v3.2", "sglang:deepseek-v3.2", "-O", "bogus=1")
    assert unknown.code == 2
    assert "option bogus: got an option that no planned side has" in unknown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("deepseek-v3", "vllm:deepseek-v3"), "A: got 2 manifests in 'deepseek-v3' (sglang, vllm), expected ENGINE:"),
        (("vllm:", "vllm:deepseek-v3"), "A: got 'vllm:', expected a SOURCE behind vllm:"),
        (("vllm:deepseek-v3",), "the following arguments are required: B"),
        (("-", "-"), "B: got '-' twice"),
        (("vllm:no-model", "vllm:deepseek-v3"), "SOURCE: got 'no-model' (no such file)"),
    ],
)
def test_wrong_sides(arguments: tuple[str, ...], message: str) -> None:
    outcome = call("diff", *arguments)
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize("form", ["table", "json", "sarif", "github"])
def test_exit_code_is_the_same_under_every_format(tmp_path: Path, form: str) -> None:
    a, b = write(tmp_path / "a.json", _c4()), write(tmp_path / "b.json", _c4(rows=256))
    assert call("diff", a, b, "--format", form).code == 1
    assert call("diff", a, a, "--format", form).code == 0
    document = json.loads(a.read_text(encoding="utf-8"))
    document["manifests"][0]["pools"][0]["page_stride_bytes"] = 1
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document), encoding="utf-8")
    outcome = call("diff", a, bad, "--format", form)
    assert outcome.code == 1
    assert "page_stride_bytes: got 1, expected at least 37376" in outcome.out


def test_sarif_levels(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", _c4()), write(tmp_path / "b.json", _c4(record="v41", alignment=512))
    results = call("diff", a, b, "--format", "sarif").json["runs"][0]["results"]
    assert {entry["ruleId"] for entry in results} == {"peer-mismatch"}
    assert "error" in {entry["level"] for entry in results}


CAPTURED = Path(__file__).resolve().parents[1] / "engines" / "vllm" / "tiny_dsv4" / "captured.json"


def test_a_plan_takes_version_and_options_from_the_captured_manifest_beside_it() -> None:
    """A live vLLM engine's manifest against the plan of its own config.json: no difference, in either order."""
    for sides in ((CAPTURED, CAPTURED.parent), (CAPTURED.parent, CAPTURED)):
        outcome = call("diff", *map(str, sides), "--format", "json")
        assert outcome.code == 0, outcome.out
        document = outcome.json
        assert document["same"] is True
        assert {document[side]["origin"] for side in "ab"} == {"captured", "planned"}
        assert {document[side]["engine"]["version"] for side in "ab"} == {"0.32.0"}


def test_a_given_option_wins_over_the_captured_one() -> None:
    outcome = call("diff", str(CAPTURED), str(CAPTURED.parent), "--num-gpu-blocks-override", "700", "--format", "json")
    assert outcome.code == 1
    assert "num-gpu-blocks-override" in outcome.out
