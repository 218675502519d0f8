"""Whatever a file holds, the command says what is wrong and exits with 2; it never crashes and never hangs.

Random bytes, random JSON, thousands of mutations of a valid manifest and a valid config.json, and a list of attacks.
`HYPOTHESIS_EXAMPLES=20000 pytest tests/inspect/test_hostile_input.py` runs more of them.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbridge.inspect.reading import MAX_DEPTH, MAX_INTEGER
from tests.inspect.support import Outcome, call, valid_document

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "1000"))
_MANY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 4096,
    "compress_ratios": [0, 4, 128, 4, 0],
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_topk": 512,
}

_COMMANDS = (
    ("show", "--format", "json"),
    ("show",),
    ("check", "--consumer", "all", "--format", "sarif"),
    ("check", "--fail-on", "waste=1%"),
    ("map",),
    ("map", "--format", "html"),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "input.json"


def _explained(outcome: Outcome) -> None:
    assert outcome.code in (0, 1, 2), outcome.err
    assert "Traceback" not in outcome.err
    if outcome.code == 2:
        assert outcome.out == ""
        assert outcome.err.startswith("error: ")
        assert "got" in outcome.err
        assert "expected" in outcome.err


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31, 2**63 - 1, 2**63, 10**40, 1.5, 1e400, -0.0]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "v4", "dsa", "mla_fp4", "packed", "exact", "aligned", "index_only", "token_granular", "kv"]),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, item in items for below in _paths(item, (*path, key)))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _mutate(document: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    if not path:
        return value
    result = copy.deepcopy(document)
    parent = result
    for key in path[:-1]:
        parent = parent[key]
    if how == "delete":
        del parent[path[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent[f"{path[-1]}_"] = value
    elif how == "double" and isinstance(parent, list):
        parent.append(parent[path[-1]])
    elif how == "scale" and type(parent[path[-1]]) is int:
        parent[path[-1]] *= value if type(value) is int else -1
    else:
        parent[path[-1]] = value
    return result


_DOCUMENT = valid_document()
_DOCUMENT_PATHS = _paths(_DOCUMENT["manifests"][0]["pools"][1], ("manifests", 0, "pools", 1)) + _paths(
    _DOCUMENT["manifests"][1], ("manifests", 1)
)
_how = st.sampled_from(["replace", "delete", "add", "double", "scale"])


@given(st.binary(max_size=200), st.sampled_from(_COMMANDS))
@_MANY
def test_random_bytes(file: Path, content: bytes, command: tuple[str, ...]) -> None:
    file.write_bytes(content)
    outcome = call(command[0], file, *command[1:])
    _explained(outcome)
    assert outcome.code == 2


@given(_values, st.sampled_from(_COMMANDS))
@_MANY
def test_random_json(file: Path, value: Any, command: tuple[str, ...]) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
    outcome = call(command[0], file, *command[1:])
    _explained(outcome)
    assert outcome.code == 2


@given(
    st.lists(st.tuples(st.sampled_from(_DOCUMENT_PATHS), _how, _values), min_size=1, max_size=3),
    st.sampled_from(_COMMANDS),
)
@_MANY
def test_mutated_manifests(
    file: Path, mutations: list[tuple[tuple[Any, ...], str, Any]], command: tuple[str, ...]
) -> None:
    document = _DOCUMENT
    for path, how, value in mutations:
        if path in _paths(document):
            document = _mutate(document, path, how, value)
    file.write_text(json.dumps(document), encoding="utf-8")
    _explained(call(command[0], file, *command[1:]))


_INTEGERS = [path for path in _DOCUMENT_PATHS if type(_at(_DOCUMENT, path)) is int]
_ODD = st.sampled_from([0, 1, -1, 2, 575, 576, 584, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63) + 1])


@given(
    st.lists(st.tuples(st.sampled_from(_INTEGERS), st.one_of(_ODD, st.integers(-3, 200_000))), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(_INTEGERS), st.integers(-1, 1)), max_size=2),
    st.sampled_from(_COMMANDS),
)
@_MANY
def test_contradictory_manifests(
    file: Path, changes: list[tuple[Any, int]], shifts: list[tuple[Any, int]], command: tuple[str, ...]
) -> None:
    document = copy.deepcopy(_DOCUMENT)
    for path, value in changes:
        _at(document, path[:-1])[path[-1]] = value
    for path, shift in shifts:
        _at(document, path[:-1])[path[-1]] += shift if abs(_at(document, path)) < 2**62 else 0
    file.write_text(json.dumps(document), encoding="utf-8")
    outcome = call(command[0], file, *command[1:])
    _explained(outcome)
    assert outcome.code in (0, 1), outcome.err  # on schema: what is wrong in it is a finding
    assert call("diff", file, file).code in (0, 1, 2)


_RAW: dict[str, Any] = {
    "storage_bytes": 112_320,
    "offset_bytes": 0,
    "shape": [3, 64, 584],
    "stride_bytes": [37_440, 584, 1],
    "dtype": "uint8",
    "record": "v4",
    "page_rows": 64,
    "axes": ["pages", "rows", "row"],
    "num_pages": 3,
    "reserved_pages": 1,
    "slots": [[64, 65, -1], [128, 191, -1]],
    "lengths": [2, 2],
}
_RAW_COMMANDS = (
    ("show", "--format", "json"),
    ("show",),
    ("check", "--consumer", "all", "--format", "json"),
    ("check",),
)


@given(
    st.lists(st.tuples(st.sampled_from(_paths(_RAW)), _how, st.one_of(_values, _ODD)), max_size=3),
    st.sampled_from(_RAW_COMMANDS),
)
@_MANY
def test_mutated_tensors(
    file: Path, mutations: list[tuple[tuple[Any, ...], str, Any]], command: tuple[str, ...]
) -> None:
    document: Any = _RAW
    for path, how, value in mutations:
        if path in _paths(document):
            document = _mutate(document, path, how, value)
    file.write_text(json.dumps(document), encoding="utf-8")
    _explained(call(command[0], "--raw", file, *command[1:]))


@given(
    st.lists(st.tuples(st.sampled_from(_paths(_CONFIG)), _how, _values), min_size=1, max_size=3),
    st.sampled_from(_COMMANDS),
    st.sampled_from(["deepseek_v4", "deepseek_v41", "deepseek_v32", "deepseek_v3", "kimi_k2", "glm_moe_dsa"]),
)
@_MANY
def test_mutated_configs(
    file: Path, mutations: list[tuple[tuple[Any, ...], str, Any]], command: tuple[str, ...], model_type: str
) -> None:
    document: Any = _CONFIG | {"model_type": model_type}
    for path, how, value in mutations:
        if path in _paths(document):
            document = _mutate(document, path, how, value)
    file.write_text(json.dumps(document), encoding="utf-8")
    _explained(call(command[0], file, *command[1:]))


_VALID = json.dumps(_DOCUMENT)
_ATTACKS: list[tuple[bytes, str]] = [
    (b"", "text that is not usable JSON"),
    (b"\xff\xfe{}", "got byte 0xff at position 0, expected UTF-8 text"),
    (b"\xef\xbb\xbf{}", "text that is not usable JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * (MAX_DEPTH + 2) + b"1" + b"}" * (MAX_DEPTH + 2), f"at most {MAX_DEPTH} levels"),
    (b'{"schema_version": 1, "schema_version": 1, "manifests": []}', "key 'schema_version' twice in one object"),
    (b'{"schema_version": NaN}', "NaN is no JSON number"),
    (b'{"schema_version": -Infinity}', "-Infinity is no JSON number"),
    (b'{"schema_version": 1%s}' % (b"0" * 5000), "is beyond 64 bits"),
    (b'{"schema_version": %d}' % (MAX_INTEGER + 1), "is beyond 64 bits"),
    (b'{"schema_version": 2, "manifests": []}', "schema_version: got 2, expected 1"),
    (b'{"schema_version": true, "manifests": []}', "schema_version: got true, expected 1"),
    (b'{"schema_version": 1, "manifests": []}', "manifests: got an empty list"),
    (b'{"schema_version": 1, "manifests": {}}', "manifests: got {}"),
    (b"[1, 2]", "got a JSON list, expected an object"),
    (b'"text"', "got a JSON str, expected an object"),
    (b"{}", "got an object with no keys, expected `manifests`"),
    (b'{"model_type": "llama"}', "model_type: got 'llama', expected one of"),
    (b'{"model_type": ["deepseek_v3"]}', "model_type: got ['deepseek_v3']"),
    (_VALID.replace('"page_rows": 64', '"page_rows": "64"', 1).encode(), "page_rows: got '64'"),
    (_VALID.replace('"page_rows": 64', '"page_rows": 64.0', 1).encode(), "page_rows: got 64.0"),
    (_VALID.replace('"page_rows": 64', '"page_rows": true', 1).encode(), "page_rows: got True"),
    (_VALID.replace('"page_rows": 64', '"page_row": 64', 1).encode(), "page_row: got 64"),
    (_VALID[:-40].encode(), "text that is not usable JSON"),
]


@pytest.mark.parametrize(("content", "message"), _ATTACKS, ids=range(len(_ATTACKS)))
def test_attacks(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    for command in _COMMANDS:
        outcome = call(command[0], file, *command[1:])
        _explained(outcome)
        assert outcome.code == 2
        assert message in outcome.err


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "missing.json", "\x00", "a" * 5000, "-x/y"):
        outcome = call("show", source) if not str(source).startswith("-") else call("show", "--", source)
        _explained(outcome)
        assert outcome.code == 2


def test_a_model_of_many_layers_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 10**15, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    outcome = call("show", tmp_path)
    assert outcome.code == 2
    assert "num_hidden_layers: got 1000000000000000" in outcome.err


@pytest.mark.parametrize("content", [b"\x00\x01\xff", b'{"schema_version": 1, "manifests": [{}]}', b"[" * 50_000])
def test_in_a_process_of_its_own(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "input.json"
    path.write_bytes(content)
    for source, given_input in ((str(path), None), ("-", content)):
        result = subprocess.run(
            [sys.executable, "-m", "kvbridge.inspect", "show", source, "--format", "json"],
            input=given_input,
            capture_output=True,
            check=False,
        )
        assert result.returncode == 2
        assert result.stdout == b""
        assert result.stderr.startswith(b"error: ")
        assert b"Traceback" not in result.stderr
