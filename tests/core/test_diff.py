"""Two layouts, two manifests: every field, the first address, the copy unit (case 44)."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.diff import CopyUnit, Relation, diff_layouts, diff_manifests, first_row
from kvbridge.engine import PlanRequest, load_engine, resolve_options
from kvbridge.layout import PageLayout
from kvbridge.manifest import Manifest, Rank, index_only_pool
from kvbridge.models import load_model
from kvbridge.repack import plan_pages
from kvbridge.spans import Placement

for_rows = PageLayout.for_rows
TIGHT = for_rows("v4", page_rows=64)


def fields(diff):
    return [difference.field for difference in diff.differences]


def test_a_layout_against_itself():
    diff = diff_layouts(TIGHT, TIGHT)
    assert (diff.relation, diff.differences, diff.first) == (Relation.SAME, (), None)
    assert diff.copy_unit == CopyUnit(64, (("payload", 37376),))


@pytest.mark.parametrize(
    "other",
    [
        for_rows("v4", page_rows=64, policy="aligned", alignment=576),
        for_rows("v4", page_rows=64, policy="packed", alignment=576, page_stride_bytes=1_002_240),
        for_rows("v4", page_rows=64, policy="packed", page_stride_bytes=37440),
    ],
)
def test_case_44_a_padding_alone_leaves_a_payload_copy(other):
    for one, two in ((TIGHT, other), (other, TIGHT)):
        diff = diff_layouts(one, two)
        assert diff.relation is Relation.COPY
        assert diff.copy_unit.total_bytes == 37376
        assert {"page_stride_bytes", "padding.policy"} <= set(fields(diff)) and "page_rows" not in fields(diff)
        assert not any(difference.breaks for difference in diff.differences)
        assert (diff.first.slot, diff.first.field) == (64, "nope")
        assert (diff.first.a, diff.first.b) == (one.page_stride_bytes, two.page_stride_bytes)


@pytest.mark.parametrize(("rows", "shared"), [(256, 64), (128, 64), (2, 2), (96, 32), (63, 1)])
def test_case_44_b_other_page_rows_need_a_repack(rows, shared):
    diff = diff_layouts(TIGHT, for_rows("v4", page_rows=rows))
    assert diff.relation is Relation.REPACK
    assert diff.copy_unit == CopyUnit(shared, (("data", shared * 576), ("scales", shared * 8)))
    assert (diff.first.slot, diff.first.field, diff.first.a, diff.first.b) == (0, "scales", 36864, rows * 576)


@pytest.mark.parametrize(
    ("a", "b", "byte", "meanings"),
    [
        ("v4", "v41", 448, ("bfloat16 (rope)", "float8_e4m3fn (values)")),
        ("v41", "v4", 448, ("float8_e4m3fn (values)", "bfloat16 (rope)")),
        ("dsa", "mla_fp8", 512, ("float32 (scales)", "float8_e4m3fn (rope)")),
        ("v41", "uniform_fp8", 32768, ("float8_e8m0fnu (scales)", "end")),
        ("v41_fp4", "v41", 0, ("float4_e2m1 (values)", "float8_e4m3fn (values)")),
    ],
)
def test_case_44_c_other_records_are_incompatible_and_the_first_byte_is_named(a, b, byte, meanings):
    diff = diff_layouts(for_rows(a, page_rows=64), for_rows(b, page_rows=64))
    assert (diff.relation, diff.copy_unit) == (Relation.INCOMPATIBLE, None)
    assert [d.field for d in diff.differences if d.breaks] == ["record"]
    assert diff.first.field == f"byte {byte} of a page" and (diff.first.a, diff.first.b) == meanings
    assert a in diff.reason and b in diff.reason


def test_split_and_interleaved_forms_of_a_record_are_repacked_row_by_row():
    diff = diff_layouts(for_rows("v41", page_rows=64), for_rows("v41_interleaved", page_rows=64))
    assert (diff.relation, diff.copy_unit) == (Relation.REPACK, CopyUnit(1, (("data", 512), ("scales", 16))))
    assert (diff.first.slot, diff.first.field, diff.first.a, diff.first.b) == (0, "scales", 32768, 512)


def test_dense_rows_lie_alike_whatever_the_page_rows():
    """64 and 128 interleaved rows without padding: the same bytes, so runs of whole pages can be copied."""
    diff = diff_layouts(for_rows("dsa", page_rows=64), for_rows("dsa", page_rows=128))
    assert (diff.relation, diff.first) == (Relation.COPY, None)
    assert diff.copy_unit == CopyUnit(64, (("rows", 64 * 656),))
    padded = for_rows("dsa", page_rows=128, policy="aligned", alignment=65536)
    assert diff_layouts(for_rows("dsa", page_rows=64), padded).relation is Relation.REPACK


@pytest.mark.parametrize(
    ("change", "relation"),
    [
        ({"tokens_per_row": 4}, Relation.INCOMPATIBLE),
        ({"num_pages": 7}, Relation.COPY),
        ({"reserved_pages": 1}, Relation.COPY),
        ({"dtype": "float8_e4m3fn"}, Relation.COPY),
        ({"pool": "swa"}, Relation.COPY),
    ],
)
def test_single_fields(change, relation):
    diff = diff_layouts(TIGHT, for_rows("v4", page_rows=64, **change))
    assert (diff.relation, fields(diff)) == (relation, list(change))
    assert all(difference.consequence for difference in diff.differences)


def test_planes_are_never_mixed():
    values, scales = (for_rows("mla_fp4", page_rows=64, plane=plane) for plane in ("values", "scales"))
    assert diff_layouts(values, scales).relation is Relation.INCOMPATIBLE
    assert diff_layouts(values, values).relation is Relation.SAME


def test_index_only_against_bytes():
    anchor = index_only_pool("full", page_rows=64).layout
    assert diff_layouts(anchor, anchor).relation is Relation.SAME
    diff = diff_layouts(anchor, TIGHT)
    assert (diff.relation, diff.copy_unit) == (Relation.INCOMPATIBLE, None)
    assert "kind" in fields(diff)


def test_the_json_form_is_plain():
    document = diff_layouts(TIGHT, for_rows("v4", page_rows=256)).document()
    assert document["relation"] == "repack"
    assert document["copy_unit"] == {
        "rows": 64,
        "bytes": 37376,
        "runs": [{"block": "data", "bytes": 36864}, {"block": "scales", "bytes": 512}],
    }
    assert document["first_difference"] == {"slot": 0, "field": "scales", "a": 36864, "b": 147456}
    assert document["differences"][0] == {
        "field": "page_rows",
        "a": 64,
        "b": 256,
        "consequence": "slots divide into other pages and rows; rows must be repacked",
        "breaks": False,
    }


@st.composite
def layouts(draw, record):
    rows, pad = draw(st.integers(1, 12)), draw(st.integers(0, 3))
    payload = for_rows(record, page_rows=rows).payload_bytes
    policy = "packed" if pad else "exact"
    return for_rows(record, page_rows=rows, policy=policy, page_stride_bytes=payload + 16 * pad)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(["v4", "v41", "dsa", "uniform_fp8", "indexer_fp8"]), st.booleans())
def test_the_first_row_agrees_with_looking_at_every_row(data, record, other_form):
    other = {"v41": "v41_interleaved"}.get(record, record) if other_form else record
    a, b = data.draw(layouts(record)), data.draw(layouts(other))
    wanted = None
    for slot in range(40):
        runs = []
        for layout in (a, b):
            page, row = divmod(slot, layout.page_rows)
            start = page * layout.page_stride_bytes
            runs.append({r.name: start + r.offset + row * r.row_stride for r in layout.regions})
        differing = [name for name in runs[0] if runs[0][name] != runs[1][name]]
        if differing:
            wanted = (slot, runs[0][differing[0]], runs[1][differing[0]])
            break
    found = first_row(a, b)
    assert (None if found is None else (found.slot, found.a, found.b)) == wanted
    assert diff_layouts(a, b).relation is not Relation.INCOMPATIBLE


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(["v4", "v41", "dsa"]), st.booleans())
def test_the_copy_unit_is_what_a_copy_plan_copies(data, record, other_form):
    """No segment of a real plan is cut more finely than the unit says."""
    other = {"v41": "v41_interleaved"}.get(record, record) if other_form else record
    a, b = data.draw(layouts(record)), data.draw(layouts(other))
    period = a.page_rows * b.page_rows
    source, target = (Placement.from_layout(layout, num_pages=period // layout.page_rows) for layout in (a, b))
    unit = diff_layouts(a, b).copy_unit
    sizes = [size for _, size in unit.runs]
    for _, _, length in plan_pages(source, target).segments():
        assert any(length % size == 0 for size in sizes)


def plan(engine: str, model: str = "deepseek-v4-flash", **options: object) -> Manifest:
    adapter = load_engine(engine)
    resolved = resolve_options(adapter, {name.replace("_", "-"): value for name, value in options.items()})
    return adapter.plan(PlanRequest(model=load_model(model), version=adapter.versions[-1], options=resolved))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v3.2"])
def test_a_manifest_against_itself(engine, model):
    manifest = plan(engine, model)
    diff = diff_manifests(manifest, manifest)
    assert diff.is_same and diff.relation is Relation.SAME and not diff.differences
    for pool in diff.pools:
        assert pool.layout.copy_unit or pool.layout.first is None


def test_both_engines_for_v4_flash():
    diff = diff_manifests(plan("vllm"), plan("sglang"))
    pools = {pool.pool: pool for pool in diff.pools}
    assert diff.relation is Relation.REPACK and not diff.is_same
    assert fields(diff) == ["engine.name"]
    assert pools["swa"].relation is Relation.REPACK
    assert str(pools["swa"].layout.copy_unit) == "64 rows, 36864 (data) + 512 (scales) bytes"
    assert pools["c4"].relation is Relation.COPY
    assert pools["c4"].layout.copy_unit.total_bytes == 37376
    assert pools["c128"].layout.copy_unit.total_bytes == 1168
    assert pools["indexer"].layout.copy_unit.total_bytes == 8448
    for pool in pools.values():
        assert pool.layout is None or pool.layout.copy_unit, "whatever is compatible states its copy unit"


def test_pools_of_several_groups_with_one_layout_are_one():
    """vLLM has two groups of sliding-window layers, 22 and 21: SGLang's 43 meet all of them."""
    diff = diff_manifests(plan("vllm"), plan("sglang"))
    assert [pool.pool for pool in diff.pools].count("swa") == 1
    assert not any(pool.differences for pool in diff.pools if pool.pool == "swa")


@pytest.mark.parametrize("depth", [1, 7])
def test_case_44_d_speculative_depth_is_a_named_field(depth):
    diff = diff_manifests(plan("vllm"), plan("vllm", speculative_tokens=depth))
    assert diff.relation is Relation.INCOMPATIBLE
    assert [d.field for d in diff.differences if d.breaks] == ["options.speculative-tokens"]
    two = diff_manifests(plan("vllm"), plan("sglang", speculative_num_draft_tokens=depth))
    named = "options.speculative-tokens | speculative-num-draft-tokens"
    assert [d.field for d in two.differences if d.breaks] == [named]


def with_options(manifest: Manifest, **options: object) -> Manifest:
    return manifest.model_copy(update={"options": dict(manifest.options) | options})


@pytest.mark.parametrize(("one", "other"), [("abc", "def"), (None, "def")])
def test_case_44_e_model_revision_is_a_named_field(one, other):
    a, b = (with_options(plan("sglang"), revision=value) for value in (one, other))
    diff = diff_manifests(a, b)
    (difference,) = diff.differences
    assert (difference.field, difference.a, difference.b, difference.breaks) == ("options.revision", one, other, True)
    assert diff.relation is Relation.INCOMPATIBLE


def test_case_44_a_one_sided_option_breaks_nothing_by_itself():
    diff = diff_manifests(plan("vllm"), with_options(plan("vllm"), seed=3))
    assert [(d.field, d.a, d.b, d.breaks) for d in diff.differences] == [("options.seed", None, 3, False)]
    assert diff.relation is Relation.SAME and not diff.is_same


@pytest.mark.parametrize(
    ("rank", "breaks"),
    [
        ({"tensor_parallel_rank": 1, "tensor_parallel_size": 2}, False),
        ({"decode_context_parallel_rank": 1, "decode_context_parallel_size": 2}, True),
        ({"pipeline_parallel_rank": 1, "pipeline_parallel_size": 2}, False),
    ],
)
def test_ranks(rank, breaks):
    manifest = plan("sglang")
    diff = diff_manifests(manifest, manifest.model_copy(update={"rank": Rank(**rank)}))
    assert sorted(fields(diff)) == sorted(f"rank.{name}" for name in rank)
    assert diff.relation is (Relation.INCOMPATIBLE if breaks else Relation.SAME)


def test_models_and_missing_pools_are_incompatible():
    diff = diff_manifests(plan("vllm"), plan("vllm", "deepseek-v3.2"))
    assert diff.relation is Relation.INCOMPATIBLE
    assert "model" in [d.field for d in diff.differences if d.breaks]
    alone = {pool.pool: pool for pool in diff.pools if pool.layout is None}
    assert alone["swa"].differences[0].a == "37376 bytes a page" and alone["swa"].differences[0].b is None


def test_fewer_layers_have_no_peer():
    manifest = plan("sglang")
    pools = [pool.model_copy(update={"layers": pool.layers[:-1]}) for pool in manifest.pools]
    diff = diff_manifests(manifest, manifest.model_copy(update={"pools": tuple(pools)}))
    assert diff.relation is Relation.INCOMPATIBLE
    swa = next(pool for pool in diff.pools if pool.pool == "swa")
    assert [(d.field, d.a, d.b) for d in swa.differences] == [("layers", 43, 42)]


def test_the_json_form_of_a_manifest_diff_has_every_pool():
    document = diff_manifests(plan("vllm"), plan("sglang")).document()
    assert set(document) == {"relation", "differences", "pools"}
    assert {frozenset(pool) for pool in document["pools"]} == {
        frozenset({"pool", "relation", "differences", "copy_unit", "first_difference", "reason"})
    }


def test_relations_are_ordered():
    assert all(one.rank < two.rank for one, two in pairwise(Relation))
