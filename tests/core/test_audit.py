"""Audits of manifests: a folder of bad ones, exact overlap arithmetic, and the placements of real engines."""

from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.audit import audit_declared, audit_manifest, pool_labels
from kvbridge.documents import parse_manifests
from kvbridge.errors import LayoutError, ManifestError
from kvbridge.layout import PageLayout, violations
from kvbridge.manifest import (
    EngineId,
    LayerPlacement,
    Manifest,
    MemoryPlan,
    Pool,
    Storage,
    dump_manifests,
    index_only_pool,
)
from kvbridge.overlap import OPEN_PAGES, PageRun, first_overlap, floor_sum, overlapping_pairs
from kvbridge.rule import Severity

BAD = sorted((Path(__file__).parent / "bad_manifests").glob("*.json"))
SLAB = 1_002_240
BLOCKS = 7166


def expected_code(path: Path) -> str:
    return path.name.split("--")[0]


def test_the_folder_covers_every_rule_on_manifests():
    codes = {expected_code(path) for path in BAD}
    assert codes == {
        *("clean", "manifest-error", "record-missing", "record-unknown", "plane", "page-rows", "tokens-per-row"),
        *(
            "payload",
            "stride-overlap",
            "page-stride",
            "padding-policy",
            "base-alignment",
            "dtype",
            "page-count",
            "kind",
        ),
        *("derived-mismatch", "storage-missing", "storage-unknown", "storage-duplicate", "storage-unowned"),
        *("storage-size", "layer-storage-overrun", "layer-offset", "layer-stride", "layer-duplicate"),
        *("layer-outside-slab", "tail-overlap", "group-overlap", "group-alias", "pool-empty", "worker-rank"),
        "memory-budget",
    }


@pytest.mark.parametrize("path", [p for p in BAD if expected_code(p) == "manifest-error"], ids=lambda path: path.stem)
def test_off_schema_documents_are_refused(path):
    with pytest.raises(ManifestError):
        parse_manifests(path.read_bytes())


@pytest.mark.parametrize(
    "path", [p for p in BAD if expected_code(p) not in ("manifest-error", "clean")], ids=lambda path: path.stem
)
def test_bad_manifests_have_the_finding_in_their_name(path):
    findings = [finding for declared in parse_manifests(path.read_bytes()) for finding in audit_declared(declared)]
    assert expected_code(path) in {finding.code for finding in findings}
    for finding in findings:
        assert finding.field and finding.message.startswith(finding.field)
        assert "got" in finding.message and "expected" in finding.message


@pytest.mark.parametrize("path", [p for p in BAD if expected_code(p) == "clean"], ids=lambda path: path.stem)
def test_clean_manifests_have_none(path):
    (declared,) = parse_manifests(path.read_bytes())
    assert audit_declared(declared) == ()
    assert audit_manifest(declared.to_manifest()) == ()


@pytest.mark.parametrize("path", [p for p in BAD if expected_code(p) != "manifest-error"], ids=lambda path: path.stem)
def test_a_manifest_object_refuses_what_the_audit_finds_in_a_pool_itself(path):
    (declared,) = parse_manifests(path.read_bytes())
    if any(list(violations(pool)) for pool in declared.pools) or expected_code(path) == "derived-mismatch":
        with pytest.raises(LayoutError):
            declared.to_manifest()
    else:
        assert audit_manifest(declared.to_manifest()) == audit_declared(declared)


def pool(
    name: str,
    offsets: list[int],
    *,
    group: str | None = "g0",
    record: str = "v4",
    rows: int = 64,
    stride: int | None = SLAB,
    policy: str = "packed",
    alignment: int | None = 576,
    pages: int | None = BLOCKS,
    storage: str | None = "kv",
    **fields: object,
) -> Pool:
    layout = PageLayout.for_rows(
        record,
        page_rows=rows,
        policy=policy,
        alignment=alignment,
        page_stride_bytes=stride,
        num_pages=pages,
        pool=name,
        **fields,
    )
    layers = tuple(LayerPlacement(name=f"{name}.{n}", offset_bytes=offset) for n, offset in enumerate(offsets))
    return Pool(**layout.model_dump(), group=group, storage=storage, layers=layers)


def manifest(*pools: Pool, storage_bytes: int | None = SLAB * BLOCKS) -> Manifest:
    return Manifest(
        engine=EngineId(name="vllm", version="0.33.0"),
        origin="planned",
        storages=(Storage(id="kv", storage_bytes=storage_bytes),),
        pools=pools,
    )


def flash() -> Manifest:
    """vLLM's DeepSeek-V4-Flash slab: 21 indexers, 21 C4 and 20 C128 layers; two sliding-window groups over it."""
    return manifest(
        pool("swa", [37440 * n for n in range(22)], group="0"),
        pool("swa", [37440 * n for n in range(21)], group="1"),
        pool("indexer", [8640 * n for n in range(21)], group="2", record="indexer_fp8"),
        pool("c4", [181440 + 37440 * n for n in range(21)], group="2"),
        pool("c128", [967680 + 1728 * n for n in range(20)], group="2", rows=2),
    )


def test_a_packed_slab_is_clean_and_its_groups_are_one_note():
    (note,) = audit_manifest(flash())
    assert (note.code, note.severity) == ("group-alias", Severity.NOTE)
    assert note.got == "groups 0, 1, 2 over the same bytes"


def test_pool_labels_are_unique():
    assert pool_labels(flash()) == ("swa@0", "swa@1", "indexer", "c4", "c128")
    states = manifest(
        pool("state", [0], record="state_fp32_512", rows=4, group="3"),
        pool("state", [8640], record="state_fp32_2048", rows=4, group="3"),
        pool("state", [50000], record="state_fp32_2048", rows=4, group="3"),
    )
    assert len(set(pool_labels(states))) == 3
    assert pool_labels(states)[0] == "state@3/state_fp32_512"


@pytest.mark.parametrize("shift", [-37439, -37376, -37375, -64, -2, 2, 64, 37374, 37376, 37440])
def test_in_group_overlap_is_exact(shift):
    """Two 37,376-byte payloads overlap when their starts are closer than that; their tail pads within 37,440."""
    shifted = manifest(pool("c4", [181440], group="2"), pool("c4b", [181440 + shift], group="2"))
    codes = [finding.code for finding in audit_manifest(shifted)]
    distance = abs(shift)
    wanted = [] if distance >= 37440 else ["group-overlap"] if distance < 37376 else ["tail-overlap"]
    assert [code for code in codes if code != "base-alignment"] == wanted


def test_case_6_group_overlap_message_names_the_bytes():
    (found,) = audit_manifest(manifest(pool("a", [0]), pool("b", [37374])))
    assert found.code == "group-overlap"
    assert found.message == (
        "layers[0].offset_bytes: got 37374, expected no byte of layer a.0 (storage kv: page 0 of a.0 is 0 .. 37376, "
        "page 0 of b.0 starts at 37374)"
    )


def test_layers_of_one_group_in_different_storages_never_overlap():
    layers = tuple(LayerPlacement(name=f"l{n}", offset_bytes=0, storage=f"s{n}") for n in range(3))
    layout = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576, num_pages=5, pool="c4")
    own = Manifest(
        engine=EngineId(name="sglang", version="0.5.23"),
        origin="captured",
        storages=tuple(Storage(id=f"s{n}", storage_bytes=5 * 37440) for n in range(3)),
        pools=(Pool(**layout.model_dump(), group="full", layers=layers),),
    )
    assert audit_manifest(own) == ()
    assert own.total_bytes == 3 * 5 * 37440


def test_case_2_layer_bounds_count_payloads_not_strides():
    """7,166 blocks of 1,039,680 at offset 181,440: the last payload ends 824,320 bytes before the storage does."""
    tight = 181440 + 7165 * 1039680 + 37376
    assert tight == 7_449_526_016
    layer = pool("c4", [181440], stride=1039680)
    assert audit_manifest(manifest(layer, storage_bytes=7_450_346_880)) == ()
    assert audit_manifest(manifest(layer, storage_bytes=tight)) == ()
    (found,) = audit_manifest(manifest(layer, storage_bytes=tight - 1))
    assert found.code == "layer-storage-overrun"
    assert "excess 1" in found.message and found.expected == "at most 181439"


def test_storage_shared_by_many_tensors_is_counted_once():
    assert flash().total_bytes == SLAB * BLOCKS


def test_an_open_page_count_still_shows_overlap_in_the_slab():
    open_slab = manifest(pool("a", [0], pages=None), pool("b", [576], pages=None), storage_bytes=None)
    assert [finding.code for finding in audit_manifest(open_slab)] == ["group-overlap"]
    apart = manifest(pool("a", [0], pages=None), pool("b", [37440], pages=None), storage_bytes=None)
    assert audit_manifest(apart) == ()


def test_case_29_index_only_pools_are_skipped():
    with_anchor = manifest(pool("c4", [0]), index_only_pool("full", page_rows=256))
    assert audit_manifest(with_anchor) == ()
    (declared,) = parse_manifests(dump_manifests([with_anchor]))
    assert audit_declared(declared) == ()


@pytest.mark.parametrize(("field", "value"), [("payload_bytes", 1), ("page_bytes", 37440), ("page_stride_bytes", 576)])
def test_case_29_index_only_with_bytes_is_refused(field, value):
    (declared,) = parse_manifests(dump_manifests([manifest(index_only_pool("full", page_rows=256))]))
    claimed = declared.pools[0].model_copy(update={field: value})
    findings = audit_declared(declared.model_copy(update={"pools": (claimed,), "storages": ()}))
    assert [(finding.code, finding.field, finding.got) for finding in findings] == [("kind", field, value)]


def test_twenty_thousand_layers_are_audited_without_pairing_them():
    many = manifest(
        pool("c4", [37440 * n for n in range(20_000)], stride=37440 * 20_000, pages=2**20), storage_bytes=None
    )
    assert audit_manifest(many) == ()


RUNS = st.builds(PageRun, st.integers(-4, 60), st.integers(1, 15), st.integers(0, 7), st.integers(1, 9))


def bytes_of(run: PageRun, page: int) -> set[int]:
    start = run.offset + page * run.stride
    return set(range(start, start + run.extent))


def by_bytes(a: PageRun, b: PageRun) -> tuple[int, int] | None:
    pairs = ((i, j) for i in range(a.pages) for j in range(b.pages) if bytes_of(a, i) & bytes_of(b, j))
    return next(pairs, None)


@settings(max_examples=2000, deadline=None)
@given(RUNS, RUNS)
def test_first_overlap_agrees_with_marking_bytes(a, b):
    assert first_overlap(a, b) == by_bytes(a, b)


@settings(max_examples=500, deadline=None)
@given(st.lists(RUNS, max_size=5), st.booleans())
def test_overlapping_pairs_agrees_with_marking_bytes(runs, one_stride):
    if one_stride:
        runs = [PageRun(run.offset, 12, run.pages, run.extent) for run in runs]
    wanted = {(i, j) for i in range(len(runs)) for j in range(i + 1, len(runs)) if by_bytes(runs[i], runs[j])}
    assert {(one, other) for one, other, _, _ in overlapping_pairs(runs)} == wanted


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 60), st.integers(-90, 90))
def test_floor_sum(count, divisor, factor, start):
    assert floor_sum(count, divisor, factor, start) == sum((factor * i + start) // divisor for i in range(count))


def test_overlap_of_slabs_of_terabytes_is_immediate():
    """Coprime strides meet late: the first common byte is found without walking 2**40 pages."""
    a = PageRun(0, 1_002_241, OPEN_PAGES, 1)
    b = PageRun(1, 1_002_240, OPEN_PAGES, 1)
    page, other = first_overlap(a, b)
    assert a.offset + page * a.stride == b.offset + other * b.stride
    assert page == 1 and astuple(a)[2] == OPEN_PAGES
    assert first_overlap(PageRun(0, 2, OPEN_PAGES, 1), PageRun(1, 2, OPEN_PAGES, 1)) is None


@pytest.mark.parametrize(("excess", "severity"), [(0, None), (1, "note"), (SLAB, "note"), (SLAB + 1, "error")])
def test_reserved_pages_may_come_on_top_of_a_budget(excess, severity):
    """SGLang's pools hold one page more than the budget was divided into."""
    memory = MemoryPlan(budget_bytes=10**9, used_bytes=10**9 + excess, num_blocks=1, tokens=64, reason="")
    planned = manifest(pool("c4", [0], reserved_pages=1)).model_copy(update={"memory": memory})
    findings = audit_manifest(planned)
    assert [finding.severity.value for finding in findings] == ([severity] if severity else [])
    assert all(f"excess {excess}, of which reserved pages explain {min(excess, SLAB)}" in f.message for f in findings)
