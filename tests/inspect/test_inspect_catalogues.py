"""Catalogues, the published schema, capture and parity through another interpreter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jsonschema
import pytest

from kvbridge.consumers import CONSUMERS
from kvbridge.documents import manifest_schema
from kvbridge.engine import engine_names, installed_version, load_engine
from kvbridge.rules import all_rules
from tests.inspect.support import call, valid_document

SCHEMA = Path(__file__).resolve().parents[2] / "kvbridge" / "schema" / "manifest.schema.json"


def test_the_published_schema_is_the_one_in_force() -> None:
    outcome = call("schema")
    assert outcome.code == 0
    assert outcome.out == SCHEMA.read_text(encoding="utf-8"), "run: python -m kvbridge.inspect schema > " + SCHEMA.name
    assert outcome.json == manifest_schema()


def test_plans_and_files_validate_against_the_schema() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(valid_document())
    for model in ("deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v3.2", "deepseek-v3"):
        validator.validate(call("show", model, "--format", "json").json)
    broken = valid_document()
    broken["manifests"][0]["pools"][0]["page_rows"] = "64"
    assert not validator.is_valid(broken)


def test_rules() -> None:
    outcome = call("rules", "--format", "json")
    assert [entry["code"] for entry in outcome.json["rules"]] == [rule.code for rule in all_rules()]
    one = call("rules", "stride-overlap")
    assert "neighbouring pages share bytes" in one.out
    assert "Allocate pages at least payload_bytes apart." in one.out
    table = call("rules").out
    assert all(rule.code in table for rule in all_rules())
    unknown = call("rules", "nothing")
    assert unknown.code == 2
    assert "NAME: got 'nothing', expected one of" in unknown.err


def test_consumers() -> None:
    outcome = call("consumers", "--format", "json")
    assert [entry["name"] for entry in outcome.json["consumers"]] == list(CONSUMERS)
    one = call("consumers", "flashmla-sm100")
    assert one.code == 0
    assert "576" in one.out
    assert "source" in one.out


def test_engines() -> None:
    outcome = call("engines", "--format", "json")
    assert [entry["name"] for entry in outcome.json["engines"]] == list(engine_names())
    for entry in outcome.json["engines"]:
        engine = load_engine(entry["name"])
        assert entry["versions"] == list(engine.versions)
        assert [option["name"] for option in entry["options"]] == [option.name for option in engine.options]
    assert "block-size" in call("engines", "vllm").out


@pytest.mark.parametrize("command", ["capture", "parity"])
def test_an_engine_that_is_not_installed(command: str, tmp_path: Path) -> None:
    missing = [name for name in engine_names() if installed_version(load_engine(name)) is None]
    assert missing, "both engines are installed in the interpreter of the tests"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}), encoding="utf-8")
    extra = ("--model", tmp_path) if command == "capture" else ()
    for there in ((), ("--python", sys.executable)):
        outcome = call(command, "--engine", missing[0], *extra, *there)
        assert outcome.code == 3
        assert outcome.out == ""


def test_capture_usage(tmp_path: Path) -> None:
    assert "the following arguments are required: --engine" in call("capture", "--model", tmp_path).err
    wrong = call("capture", "--engine", "vllm", "--model", tmp_path, "--python", tmp_path / "no" / "python")
    assert wrong.code == 2
    assert "--python: got" in wrong.err
    assert "expected a Python interpreter" in wrong.err
    version = call("capture", "--engine", "vllm", "--model", tmp_path, "--engine-version", "0.33.0")
    assert version.code == 2
    third = call("capture", "--engine", "third", "--model", tmp_path)
    assert third.code == 2
    assert "engine: got 'third', expected one of" in third.err


@pytest.mark.skipif(os.name != "posix", reason="the stand-in interpreter is a shell script")
def test_another_interpreter_gets_options_and_its_output_comes_back(tmp_path: Path) -> None:
    from kvbridge.inspect.elsewhere import run_there

    stand_in = tmp_path / "python"
    # Its stdout is the engine's chatter; the data are in the file behind -o, the last argument.
    script = '#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\necho "chatter"\nexit 1\n'
    stand_in.write_text(script, encoding="utf-8")
    stand_in.chmod(0o755)
    code, text = run_there(str(stand_in), ["parity", "--engine", "vllm"], {"block-size": 64, "flag": True})
    assert code == 1
    assert text.startswith("-m kvbridge.inspect parity --engine vllm -O block-size=64 -O flag=true -o ")
    outcome = call("parity", "--engine", "vllm", "--python", stand_in)
    assert outcome.code == 2
    assert "got output that is not JSON" in outcome.err
    report = '{"engine": "vllm", "parity": {"ok": false}, "schema_version": 1}'
    stand_in.write_text(script.replace('"$@"', f"'{report}'"), encoding="utf-8")
    outcome = call("parity", "--engine", "vllm", "--python", stand_in)
    assert outcome.code == 1
    assert "chatter" not in outcome.out
    assert outcome.json["parity"] == {"ok": False}
    stand_in.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    assert "ended with 0 and wrote nothing" in call("parity", "--engine", "vllm", "--python", stand_in).err
    stand_in.write_text("#!/bin/sh\nexit 44\n", encoding="utf-8")
    outcome = call("parity", "--engine", "vllm", "--python", stand_in)
    assert outcome.code == 2
    assert "ended with 44, expected one of" in outcome.err
