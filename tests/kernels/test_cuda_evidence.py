"""Static gates: what the compiled kernel looks like on five architectures, and that each gate can fail."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings and nvidia-cuda-nvrtc are not installed")

from kvbridge.kernels import cuda_build, cuda_tiles, static_evidence
from kvbridge.kernels.cuda_tiles import ARCHITECTURES, Variant
from kvbridge.kernels.static_evidence import Evidence, EvidenceError, Function, collect, violations

V4, DSA = cuda_tiles.formats_of(("v4",)), cuda_tiles.formats_of(("dsa",))


def gated(arch: str) -> list[Variant]:
    """The 16-head V4 tile, the tallest V4 tile and the dsa tile that the table shows for an architecture."""
    shown = list(static_evidence.table_variants(arch))
    tall = max((variant for variant in shown if variant.formats == V4), key=lambda variant: variant.heads)
    dsa = min((variant for variant in shown if variant.formats == DSA), key=lambda variant: variant.heads)
    sixteen = Variant(V4, 16)
    assert sixteen in shown
    return list(dict.fromkeys((sixteen, tall, dsa)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gates_and_the_committed_table(arch: str) -> None:
    table = static_evidence.DOCUMENT.read_text()
    for variant in gated(arch):
        evidence = collect(variant, arch)
        assert violations(evidence) == []
        if (
            evidence.compiler == "NVRTC 13.0"
        ):  # registers differ between versions; the table names the one it was made with
            row = "| " + " | ".join(evidence.cells()) + " |"
            assert row in table, "stale: run python -m kvbridge.kernels.static_evidence --write"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvcc_compiles_without_warnings_or_spills(arch: str) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no CUDA toolkit on PATH; NVRTC is gated above")
    assert violations(collect(Variant(V4, 16), arch, compiler="nvcc")) == []


def test_every_architecture_and_every_record_is_in_the_table() -> None:
    text = static_evidence.DOCUMENT.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| sm_")]
    assert {row[0].removeprefix("| ") for row in rows} == set(ARCHITECTURES)
    records = {record for row in rows for record in row[1].split("+")}
    assert records == {name.removesuffix("_interleaved") for name in cuda_tiles.FORMATS}
    assert "Nothing here ran on a GPU" in text


def test_too_few_registers_make_the_spill_gate_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = cuda_build.sources()
    bounds = "__launch_bounds__(kThreads, 1) decode_kernel"
    assert bounds in sources["decode.cuh"]
    sources["decode.cuh"] = sources["decode.cuh"].replace(bounds, "__launch_bounds__(kThreads, 6) decode_kernel")
    monkeypatch.setattr(cuda_build, "sources", lambda: sources)
    found = violations(collect(Variant(V4, 16), "sm_90a"))
    assert any(text.startswith("compiler said: ") and "spill" in text for text in found)
    assert any(text.startswith("decode: STL: got ") for text in found)
    assert any(text.startswith("decode: local bytes: got ") or text.startswith("decode: stack") for text in found)


def test_partial_results_read_through_the_read_only_path_fail_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = cuda_build.sources()
    assert "ld.global.cg" in sources["prim.cuh"]
    sources["prim.cuh"] = sources["prim.cuh"].replace("ld.global.cg", "ld.global.nc")
    monkeypatch.setattr(cuda_build, "sources", lambda: sources)
    found = violations(collect(Variant(V4, 16), "sm_80"))
    for kernel in ("decode", "merge"):
        assert any(text.startswith(f"{kernel}: LDG.CONSTANT: got ") for text in found)
        assert f"{kernel}: got no LDG.STRONG, expected the merge to read partial results at L2" in found


def test_each_gate_fails_alone() -> None:
    counts = Counter({"HMMA.16816.F32.BF16": 8, "LDSM.16.M88.4": 4, "LDGSTS.E.64": 2, "LDG.E.STRONG.GPU": 3})
    good = Function(registers=80, stack_bytes=0, local_bytes=0, instructions=counts)
    evidence = Evidence("sm_89", Variant(V4, 16), "NVRTC 13.0", good, good, "")
    assert violations(evidence) == []
    for opcode in ("HMMA", "LDSM", "LDGSTS"):
        fewer = Counter({name: number for name, number in counts.items() if not name.startswith(f"{opcode}.")})
        assert violations(replace(evidence, decode=replace(good, instructions=fewer))) == [f"decode: got no {opcode}"]
    tall = Variant(V4, 64)
    assert violations(replace(evidence, variant=tall)) == [
        f"shared memory: got {tall.shared_bytes}, expected at most 101376"
    ]
    assert violations(replace(evidence, merge=replace(good, stack_bytes=8))) == [
        "merge: stack bytes: got 8, expected at most 0"
    ]
    assert violations(replace(evidence, log="warning: v")) == ["compiler said: warning: v"]


def test_missing_disassembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EvidenceError, match="nvprune: got nothing in the packages nvidia and triton or on PATH"):
        static_evidence.find_tool("nvprune")
