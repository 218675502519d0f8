"""The kit: green for every backend, and red for each of the faults that kernels really had."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kvbridge.kernels.conformance import (
    Case,
    Report,
    Scenario,
    Target,
    Traits,
    backend_target,
    build,
    cases,
    judge,
    run,
)
from kvbridge.kernels.conformance.__main__ import main
from kvbridge.kernels.conformance.grid import FACTORS
from kvbridge.kernels.conformance.properties import PROPERTIES
from kvbridge.kernels.conformance.targets import moved
from kvbridge.layout import PageLayout
from kvbridge.view import PageView

pytestmark = pytest.mark.usefixtures("one_thread")
TORCH = backend_target("torch")
SMALL = tuple(case for case in cases() if case.record in ("v4", "v41", "v4_bf16"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's many small parallel sections cost minutes of spinning on a contended machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["torch", "cpu", "cpu:amx_emulated"])
def test_backend_conforms(backend: str) -> None:
    report = run(backend_target(backend))
    assert report.ok, report.table()
    assert not report.skips


@pytest.mark.parametrize("name", ["run_to_run", "strides", "solo_query", "permutation", "nan_stays"])
def test_equal_bits_hold_on_several_threads(name: str) -> None:
    torch.set_num_threads(2)
    assert PROPERTIES[name](backend_target("cpu")) == ([], None)


def test_reference_conforms_to_its_own_rounding() -> None:
    report = run(backend_target("reference"), grid=SMALL, properties=False)
    assert report.ok, report.table()


@pytest.mark.parametrize("path", ["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def test_every_cpu_path_conforms(path: str) -> None:
    from kvbridge.kernels import cpu

    if path.upper() not in [usable.name for usable in cpu.load().usable]:
        pytest.skip(f"this machine cannot run {path}")
    report = run(backend_target(f"cpu:{path}"), properties=False, seed=1)
    assert report.ok, report.table()


def test_a_moved_scenario_keeps_strides_and_poison_and_shares_no_memory() -> None:
    for case in SMALL:
        scenario = build(case)
        there = moved(scenario, torch.device("cpu"))
        assert there.q.stride() == scenario.q.stride()
        assert there.out.stride() == scenario.out.stride()
        scenario.q.zero_()
        for cache, copied in zip(scenario.caches, there.caches, strict=True):
            assert copied.view.pages.data_ptr() != cache.view.pages.data_ptr()
            assert copied.view.offset_bytes == cache.view.offset_bytes
            assert copied.slots.stride() == cache.slots.stride()
            cache.view.pages.fill_(0xFF)
            cache.slots.fill_(-1)
        TORCH.decode(there)
        assert not judge(there).failures


def test_every_two_values_of_two_factors_meet() -> None:
    grid = cases()
    assert len(set(grid)) == len(grid) < 150
    for first, second in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, first), getattr(case, second)) for case in grid}
        assert met == set(itertools.product(FACTORS[first], FACTORS[second])), (first, second)


def test_cases_have_names_that_give_them_back() -> None:
    assert all(Case.parse(str(case)) == case for case in cases())
    with pytest.raises(ValueError, match="case: got 2 parts in 'v4-64', expected 17"):
        Case.parse("v4-64")


def changed(change: Callable[[Scenario], None]) -> Callable[[Scenario], None]:
    """A target that computes something slightly else: the torch backend on a changed scenario."""

    def decode(scenario: Scenario) -> None:
        other = copy.copy(scenario)
        other.caches = list(scenario.caches)
        change(other)
        TORCH.decode(other)

    return decode


def each_cache(scenario: Scenario, **make: Callable[..., object]) -> None:
    scenario.caches = [
        replace(cache, **{name: function(cache) for name, function in make.items()}) for cache in scenario.caches
    ]


def narrowed(slots: torch.Tensor) -> torch.Tensor:
    return slots.to(torch.int32).to(slots.dtype)


def flat(view: PageView) -> PageView:
    """Pages taken to follow each other without padding, as a kernel that ignores stride(0) reads them."""
    layout = PageLayout.for_rows(view.layout.record, page_rows=view.page_rows)
    pages = view.pages.as_strided((view.num_pages, layout.payload_bytes), (layout.payload_bytes, 1))
    return PageView.from_tensor(pages, layout)


def no_lengths(scenario: Scenario) -> None:
    each_cache(scenario, lengths=lambda cache: None, lengths_per_sequence=lambda cache: False)


def clamped_slots(scenario: Scenario) -> None:
    def clamp(cache: object) -> torch.Tensor:
        slots = cache.slots  # type: ignore[attr-defined]
        return torch.where(slots >= cache.view.capacity_rows, 0, slots)  # type: ignore[attr-defined]

    each_cache(scenario, slots=clamp)


def sink_in_lse(scenario: Scenario) -> None:
    scenario.lse_format = replace(scenario.lse_format, includes_sink=True)


def base_two(scenario: Scenario) -> None:
    scenario.lse_format = replace(scenario.lse_format, base="2")


def without_sink(scenario: Scenario) -> None:
    scenario.sink = None


def base_2_sink(scenario: Scenario) -> None:
    scenario.sink = None if scenario.sink is None else scenario.sink / math.log(2)


def other_scale(scenario: Scenario) -> None:
    scenario.scale *= 1.01


FAULTS: dict[str, Callable[[Scenario], None]] = {
    "lengths ignored": changed(no_lengths),
    "slots beyond the capacity read row 0": changed(clamped_slots),
    "slots narrowed to 32 bits": changed(lambda s: each_cache(s, slots=lambda cache: narrowed(cache.slots))),
    "page stride ignored": changed(lambda s: each_cache(s, view=lambda cache: flat(cache.view))),
    "last cache left out": changed(lambda s: s.caches.pop() if len(s.caches) > 1 else None),
    "LSE holds the sink": changed(sink_in_lse),
    "LSE in base 2": changed(base_two),
    "sink ignored": changed(without_sink),
    "sink taken as base 2": changed(base_2_sink),
    "scale off by one percent": changed(other_scale),
}


def after(change: Callable[[Scenario], None]) -> Callable[[Scenario], None]:
    """A target that spoils a right answer."""

    def decode(scenario: Scenario) -> None:
        TORCH.decode(scenario)
        change(scenario)

    return decode


def spoil_empty(scenario: Scenario) -> None:
    out = scenario.out[:, : scenario.heads]
    out[(out == 0).all(-1)] = 1e-20


def write_padding(scenario: Scenario) -> None:
    scenario.out[:, scenario.heads :] = 0


FAULTS |= {
    "empty query not exactly 0": after(spoil_empty),
    "padded heads written": after(write_padding),
    "one head slightly off": after(lambda s: s.out[0, :1].mul_(1.01)),
    "output left unwritten": after(lambda s: s.out[:, -1:, 511:].fill_(math.nan)),
    "LSE slightly off": after(lambda s: s.lse.mul_(1.0001) if s.lse is not None else None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str) -> None:
    report = run(Target(name=fault, decode=FAULTS[fault]), grid=SMALL, properties=False)
    assert not report.ok
    assert f"FAILED  {report.failures[0][0]}" in report.table()


def drifting() -> Callable[[Scenario], None]:
    count = itertools.count()

    def decode(scenario: Scenario) -> None:
        TORCH.decode(scenario)
        scenario.out.mul_(1 + 2.0**-7 * (next(count) % 2))

    return decode


def batch_dependent(scenario: Scenario) -> None:
    TORCH.decode(scenario)
    scenario.out.mul_(1 + 2.0**-7 * (len(scenario.q) > 1))


def neighbour_leak(scenario: Scenario) -> None:
    TORCH.decode(scenario)
    if scenario.out[0].isnan().any() and len(scenario.out) > 1:
        scenario.out[1] = math.nan


def flushed_subnormals(scenario: Scenario) -> None:
    """Codes 1..7 and -1..-7 read as 0: one of the deviations of public kernels."""
    kept = [cache.view.pages.clone() for cache in scenario.caches]
    for cache in scenario.caches:
        data = cache.view.region("nope" if cache.view.layout.record == "v4" else "values")
        data[(data & 0x78) == 0] = 0
    TORCH.decode(scenario)
    for cache, pages in zip(scenario.caches, kept, strict=True):
        cache.view.pages.copy_(pages)


@pytest.mark.parametrize(
    ("name", "decode", "traits"),
    [
        ("run_to_run", drifting(), {}),
        ("solo_query", batch_dependent, {"batch_invariant": True}),
        ("nan_stays", neighbour_leak, {}),
        ("nan_codes", TORCH.decode, {"nan_codes": "nan"}),
        ("scale_bytes", flushed_subnormals, {"records": ("v4",)}),
    ],
)
def test_a_property_finds_its_fault(name: str, decode: Callable[[Scenario], None], traits: dict[str, object]) -> None:
    failures, skipped = PROPERTIES[name](Target(name=name, decode=decode, traits=Traits(**traits)))  # type: ignore[arg-type]
    assert failures
    assert skipped is None


def test_what_a_target_does_not_claim_is_skipped_and_counted() -> None:
    traits = Traits(records=("v4",), most_caches=2, heads=(16, 64), lse_formats=("none",))
    report = run(Target(name="narrow", decode=TORCH.decode, traits=traits), grid=SMALL, properties=False)
    assert report.ok
    assert sum(row.skipped for row in report.rows.values()) == sum(report.skips.values()) > 0
    assert "record v41" in report.skips
    failures, reason = PROPERTIES["solo_query"](Target(name="narrow", decode=TORCH.decode, traits=traits))
    assert (failures, reason) == ([], "solo_query: no batch-invariant mode")


def test_a_target_that_raises_does_not_conform() -> None:
    def decode(scenario: Scenario) -> None:
        raise RuntimeError("no kernel for 11 heads")

    report: Report = run(Target(name="raises", decode=decode), grid=SMALL[:2], properties=False)
    assert [text for _, text in report.failures] == ["raised RuntimeError: no kernel for 11 heads"] * 2


def test_command_prints_the_table_and_exits_by_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    case = str(SMALL[0])
    assert main(["--backend", "torch", "--only", case]) == 0
    assert "failed" in capsys.readouterr().out
    for wrong in ([], ["--backend", "torch", "--only", "v4"], ["--target", "no.such.module:X"]):
        with pytest.raises(SystemExit) as raised:
            main(wrong)
        assert raised.value.code == 2


def broken(scenario: Scenario) -> None:
    scenario.out.zero_()


BROKEN = Target(name="broken", decode=broken)


def test_command_takes_any_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", f"{__name__}:BROKEN", "--only", str(Case())]) == 1
    assert "broken" in capsys.readouterr().out
