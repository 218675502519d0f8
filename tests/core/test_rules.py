"""The catalogue covers every code, and findings have the JSON form that other tools read."""

import json
import subprocess
import sys

import pytest

import kvbridge.copies
import kvbridge.spans  # noqa: F401
from kvbridge import errors
from kvbridge.error_advice import ADVICE
from kvbridge.errors import KVBridgeError, LayoutError, OverlapError, StorageOverrunError
from kvbridge.rule import Severity
from kvbridge.rule_data import RULES
from kvbridge.rules import Finding, all_rules, failing, finding, finding_of, get_rule

ERROR_CLASSES = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, LayoutError)]


@pytest.mark.parametrize("error", ERROR_CLASSES, ids=lambda error: error.code)
def test_every_layout_error_is_a_rule_with_advice(error):
    rule = get_rule(error.code)
    assert rule.consequence == error.consequence
    assert rule.severity is Severity.ERROR
    assert error.code in ADVICE, "write what is checked, and the fix, in error_advice.ADVICE"
    assert rule.fix == ADVICE[error.code][1]


def test_advice_is_for_known_codes_only():
    assert set(ADVICE) <= {error.code for error in ERROR_CLASSES}


def test_codes_are_unique_sorted_and_complete():
    rules = all_rules()
    codes = [rule.code for rule in rules]
    assert codes == sorted(set(codes))
    assert set(RULES) <= set(codes)
    for rule in rules:
        assert all((rule.title, rule.explanation, rule.consequence, rule.fix)), rule.code
        assert rule.code == rule.code.lower().strip()
        assert set(rule.document()) == {"code", "severity", "title", "explanation", "consequence", "fix"}


def test_an_error_class_defined_later_is_a_rule_at_once():
    class LaterError(LayoutError):
        """Something that another package checks."""

        code = "later"
        consequence = "later bytes are wrong"

    assert get_rule("later").title == "Something that another package checks"
    assert get_rule("later").consequence == "later bytes are wrong"


def test_an_unknown_code_is_refused_with_the_known_ones():
    with pytest.raises(KVBridgeError, match=r"rule: got 'nonsense', expected one of .*'stride-overlap'"):
        get_rule("nonsense")
    with pytest.raises(KVBridgeError, match="nonsense"):
        finding("nonsense", "field", got=1, expected=2)


def test_finding_of_an_error_keeps_code_numbers_and_place():
    error = OverlapError("page_stride_bytes", got=37375, expected="at least 37376 (payload_bytes)")
    entry = finding_of(error, pool="c4", consumer="kvbridge", place="layers[2]")
    assert entry.document() == {
        "code": "stride-overlap",
        "severity": "error",
        "pool": "c4",
        "consumer": "kvbridge",
        "field": "layers[2].page_stride_bytes",
        "expected": "at least 37376 (payload_bytes)",
        "got": 37375,
        "message": "layers[2].page_stride_bytes: got 37375, expected at least 37376 (payload_bytes)",
        "consequence": "neighbouring pages share bytes, and writing one corrupts the other",
    }


def test_finding_of_an_error_names_the_arithmetic():
    error = StorageOverrunError("storage_bytes", got=10, expected="at least 12", detail="excess 2")
    assert finding_of(error).message == "storage_bytes: got 10, expected at least 12 (excess 2)"
    assert str(finding_of(error, pool="mla")) == (
        "error storage-overrun: pool mla: storage_bytes: got 10, expected at least 12 (excess 2); "
        "the last pages lie outside the allocation"
    )


@pytest.mark.parametrize(
    ("value", "stored"), [(3, 3), (None, None), ("x", "x"), ((1, 2), [1, 2]), (1.5, "1.5"), ({"a"}, "{'a'}")]
)
def test_finding_values_are_json(value, stored):
    entry = finding("waste", "waste_bytes", got=value, expected=value)
    assert entry.got == stored
    assert json.loads(json.dumps(entry.document()))["got"] == stored
    assert entry.document()["pool"] is None


def test_severity_and_consequence_can_be_overruled():
    entry = finding("waste", "f", got=1, expected=2, severity=Severity.NOTE, consequence="none")
    assert (entry.severity, entry.consequence) == (Severity.NOTE, "none")


@pytest.mark.parametrize(("limit", "count"), [(Severity.ERROR, 1), (Severity.WARNING, 2), (Severity.NOTE, 3)])
def test_failing_takes_the_limit_and_worse(limit, count):
    entries = [
        Finding("waste", severity, "f", "m", "c") for severity in (Severity.NOTE, Severity.WARNING, Severity.ERROR)
    ]
    assert len(failing(entries, limit)) == count


@pytest.mark.parametrize(
    "module", ["rules", "audit", "consumers", "diff", "raw", "peers", "slots", "dead_rows", "dtype_names"]
)
def test_importing_an_audit_imports_neither_torch_nor_an_engine(module):
    program = (
        f"import sys, kvbridge.{module}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'vllm', 'sglang', 'numpy', 'typer'}))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
