"""`check`: verdicts, exit codes, SARIF 2.1.0, GitHub workflow commands, `--raw`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvbridge.inspect.findings import github_data, github_property, render_github, render_sarif
from kvbridge.rule import Severity
from kvbridge.rules import all_rules, finding
from tests.inspect.support import Outcome, call, manifest, pool, slab_pools, valid_document, write


def _bad(path: Path, **changes: Any) -> Path:
    document = valid_document()
    document["manifests"][0]["pools"][1].update(changes)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_json_of_check(tmp_path: Path) -> None:
    path = write(tmp_path / "slab.json", manifest(*slab_pools()))
    outcome = call("check", path, "--consumer", "kvbridge", "flashmla-sm100", "--format", "json")
    assert outcome.code == 0
    assert set(outcome.json) == {"schema_version", "ok", "findings", "verdicts"}
    assert outcome.json["ok"] is True
    verdicts = {(entry["pool"], entry["consumer"]): entry for entry in outcome.json["verdicts"]}
    assert len(verdicts) == 6
    for name in ("c4", "c128"):
        for consumer in ("kvbridge", "flashmla-sm100"):
            assert verdicts[name, consumer]["verdict"] == "in_place"
    for entry in outcome.json["verdicts"]:
        assert set(entry) == {"pool", "consumer", "verdict", "needs_stride_bytes"}
    for entry in outcome.json["findings"]:
        expected = {"code", "severity", "pool", "consumer", "field", "expected", "got", "message", "consequence"}
        assert set(entry) == expected


def test_tight_page_for_flashmla_needs_another_stride(tmp_path: Path) -> None:
    path = write(tmp_path / "tight.json", manifest(pool("c4", "v4", rows=64, tokens_per_row=4)))
    outcome = call("check", path, "--consumer", "kvbridge,flashmla-sm100", "--format", "json")
    assert outcome.code == 1
    verdicts = {entry["consumer"]: entry for entry in outcome.json["verdicts"]}
    assert verdicts["kvbridge"]["verdict"] == "in_place"
    assert verdicts["flashmla-sm100"]["verdict"] == "needs_stride"
    assert verdicts["flashmla-sm100"]["needs_stride_bytes"] == 37_440
    table = call("check", path, "--consumer", "kvbridge,flashmla-sm100")
    assert table.code == 1
    assert "needs_stride (to 37,440)" in table.out
    assert "not ok: 1 error" in table.out


@pytest.mark.parametrize("form", ["table", "json", "sarif", "github"])
def test_exit_code_is_the_same_under_every_format(tmp_path: Path, form: str) -> None:
    assert call("check", _bad(tmp_path / "bad.json", page_stride_bytes=37_375), "--format", form).code == 1
    good = write(tmp_path / "good.json", manifest(*slab_pools()))
    assert call("check", good, "--format", form).code == 0
    assert call("check", good, "--format", form, "--fail-on", "note").code == 1  # the indexer is no MLA cache
    assert call("check", good, "--format", form, "--fail-on", "warning").code == 0


def test_waste_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "slab.json", manifest(*slab_pools()))
    strict = call("check", path, "--fail-on", "waste=5%", "--format", "json")
    assert strict.code == 1
    (found,) = [entry for entry in strict.json["findings"] if entry["code"] == "waste"]
    assert (found["pool"], found["got"], found["expected"]) == ("c128", 560, "at most 86")
    assert call("check", path, "--fail-on", "waste=33%").code == 0
    assert call("check", path, "--fail-on", "waste=32.4").code == 1  # 560 of 1,728 bytes are 32.407 percent
    assert call("check", path, "--fail-on", "waste=32.41").code == 0


@pytest.mark.parametrize("text", ["waste", "waste=", "waste=x", "waste=-1%", "waste=101%", "waste=1/0", "fatal", ""])
def test_limits_that_are_none(text: str) -> None:
    outcome = call("check", f"--fail-on={text}")
    assert outcome.code == 2
    assert f"--fail-on: got {text!r}, expected" in outcome.err


def test_unknown_consumer() -> None:
    outcome = call("check", "--consumer", "flashmla")
    assert outcome.code == 2
    assert "--consumer: got 'flashmla', expected all or one of kvbridge" in outcome.err


def test_pools_of_two_engines_keep_apart() -> None:
    outcome = call("check", "--format", "json")
    assert outcome.code == 0
    names = {entry["pool"] for entry in outcome.json["verdicts"]}
    assert {"sglang:c4", "vllm:c4"} <= names
    assert all(re.match(r"(sglang|vllm):", entry["pool"]) for entry in outcome.json["findings"] if entry["pool"])


def _check_sarif(document: Any) -> None:
    """The fields SARIF 2.1.0 requires, and the values it allows, of everything that is written."""
    assert document["version"] == "2.1.0"
    assert document["$schema"].startswith("https://")
    assert set(document) == {"$schema", "version", "runs"}
    for run in document["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"]
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        rules = driver["rules"]
        identifiers = [rule["id"] for rule in rules]
        assert len(set(identifiers)) == len(identifiers)
        for rule in rules:
            assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
            for text in ("shortDescription", "fullDescription", "help"):
                assert rule[text]["text"]
        for result in run["results"]:
            assert result["message"]["text"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert identifiers[result["ruleIndex"]] == result["ruleId"]
            for location in result["locations"]:
                for place in location["logicalLocations"]:
                    assert place["fullyQualifiedName"]
                if "physicalLocation" in location:
                    assert re.fullmatch(r"[\w%./~-]+", location["physicalLocation"]["artifactLocation"]["uri"])


def test_sarif_of_a_file(tmp_path: Path) -> None:
    path = _bad(tmp_path / "bad name \u00e9.json", page_stride_bytes=37_375)
    outcome = call("check", path, "--format", "sarif")
    assert outcome.code == 1
    _check_sarif(outcome.json)
    results = outcome.json["runs"][0]["results"]
    (overlap,) = [entry for entry in results if entry["ruleId"] == "stride-overlap"]
    assert overlap["level"] == "error"
    assert "page_stride_bytes: got 37375, expected at least 37376" in overlap["message"]["text"]
    assert overlap["properties"]["got"] == 37_375
    uri = overlap["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri.endswith("bad%20name%20%C3%A9.json")


def test_sarif_of_every_rule() -> None:
    findings = [finding(rule.code, "field", got=1, expected=2, severity=Severity.NOTE) for rule in all_rules()]
    document = json.loads(render_sarif(findings, source=None))
    _check_sarif(document)
    assert len(document["runs"][0]["results"]) == len(all_rules())
    _check_sarif(json.loads(render_sarif([], source="x.json")))


def test_github_annotations_escape() -> None:
    entry = finding("waste", "f", got="100%\r\n::error::x", expected="a,b:c", pool="p,q:r%")
    (line,) = render_github([entry], source="a,b:c%.json").splitlines()
    head, message = line[2:].split("::", 1)
    assert head == "warning title=waste,file=a%2Cb%3Ac%25.json"
    assert "\r" not in message
    assert "%25" in message
    assert github_data("50%\n") == "50%25%0A"
    assert github_property("a:b,c") == "a%3Ab%2Cc"


def test_github_of_a_file(tmp_path: Path) -> None:
    path = _bad(tmp_path / "bad.json", page_stride_bytes=37_375)
    lines = call("check", path, "--format", "github").out.splitlines()
    assert lines
    for line in lines:
        assert re.match(r"::(error|warning|notice) title=[\w-]+,file=[^:,]+::", line)


RAW = {
    "storage_bytes": 7_450_346_880,
    "offset_bytes": 181_440,
    "shape": [7166, 64, 584],
    "stride_bytes": [1_039_680, 584, 1],
    "dtype": "uint8",
    "record": "v4",
    "page_rows": 64,
}


def _raw(tmp_path: Path, command: str = "show", *options: str, **changes: Any) -> Outcome:
    path = tmp_path / "raw.json"
    path.write_text(json.dumps(RAW | changes), encoding="utf-8")
    return call(command, "--raw", path, *options)


def test_raw_narrow_view_fits(tmp_path: Path) -> None:
    outcome = _raw(tmp_path, "show", "--format", "json")
    assert outcome.code == 0
    assert outcome.json["needed_bytes"] == 7_449_526_016
    assert outcome.json["layout"]["num_pages"] == 7166
    assert outcome.json["ok"] is True
    table = _raw(tmp_path)
    assert "byte 7,449,526,016 of 7,450,346,880" in table.out


def test_raw_full_width_view_overruns(tmp_path: Path) -> None:
    for form in ("table", "json", "sarif", "github"):
        outcome = _raw(tmp_path, "show", "--format", form, shape=[7166, 1_039_680], stride_bytes=[1_039_680, 1])
        assert outcome.code == 1
        assert "excess 181440" in outcome.out


def test_raw_without_a_record_is_a_finding(tmp_path: Path) -> None:
    outcome = _raw(tmp_path, "show", "--format", "json", record=None)
    assert outcome.code == 1
    assert "record-missing" in {entry["code"] for entry in outcome.json["findings"]}


def test_raw_slots_and_lengths(tmp_path: Path) -> None:
    beyond = _raw(tmp_path, "check", "--format", "json", slots=[[0, 458_624, -1]], lengths=[2])
    assert beyond.code == 1
    (found,) = [entry for entry in beyond.json["findings"] if entry["code"] == "slot-bounds" and not entry["consumer"]]
    assert (found["field"], found["got"]) == ("slots[0][1]", 458_624)
    assert _raw(tmp_path, "check", slots=[[0, 458_623, -1]], lengths=[2]).code == 0


def test_raw_off_schema_or_beside_a_source(tmp_path: Path) -> None:
    missing = _raw(tmp_path, shape="64")
    assert missing.code == 2
    assert "shape: got '64'" in missing.err
    both = call("show", "deepseek-v3", "--raw", tmp_path / "raw.json")
    assert both.code == 2
    assert "expected one of the two" in both.err
    beside = call("check", "--raw", tmp_path / "raw.json", "--engine", "vllm")
    assert beside.code == 2
    assert "--raw: got --engine beside it" in beside.err
