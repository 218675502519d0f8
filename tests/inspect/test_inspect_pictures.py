"""Pictures: rectangles compared with the layout's regions, texts that never touch, rows that add up, light and dark."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.inspect.picture import MAX_DRAWN_ROWS, Role, make_picture
from kvbridge.inspect.picture_svg import CHARACTER, WIDTH, render_svg
from kvbridge.inspect.picture_text import CELLS, render_text, share_cells
from kvbridge.inspect.terminal import Terminal
from kvbridge.manifest import Pool, index_only_pool
from kvbridge.records import RECORDS, Encoding
from tests.inspect.support import call, manifest, pool, slab_pools, write

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Rectangle:
    strip: str
    first: int
    strip_bytes: int
    left: float
    width: float
    x: float
    bar_width: float
    offset: int
    bytes: int
    role: str
    name: str
    row: int | None


def _rectangles(svg: str) -> list[Rectangle]:
    found = []
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        for element in group.iter(f"{SVG}rect"):
            row = element.get("data-row")
            found.append(
                Rectangle(
                    strip=group.attrib["data-strip"],
                    first=int(group.attrib["data-first"]),
                    strip_bytes=int(group.attrib["data-bytes"]),
                    left=float(group.attrib["data-left"]),
                    width=float(group.attrib["data-width"]),
                    x=float(element.attrib["x"]),
                    bar_width=float(element.attrib["width"]),
                    offset=int(element.attrib["data-offset"]),
                    bytes=int(element.attrib["data-bytes"]),
                    role=element.attrib["data-role"],
                    name=element.attrib["data-name"],
                    row=None if row is None else int(row),
                )
            )
    return found


def _check_scale(rectangles: list[Rectangle]) -> None:
    """Every rectangle is where its bytes are, and the rectangles of a bar tile it."""
    bars: dict[tuple[str, int], list[Rectangle]] = {}
    for entry in rectangles:
        unit = entry.width / entry.strip_bytes
        assert entry.x == pytest.approx(entry.left + (entry.offset - entry.first) * unit, abs=1e-5)
        assert entry.bar_width == pytest.approx(entry.bytes * unit, abs=1e-5)
        bars.setdefault((entry.strip, entry.first), []).append(entry)
    for entries in bars.values():
        position = entries[0].first
        for entry in entries:
            assert entry.offset == position
            position += entry.bytes
        assert position == entries[0].first + entries[0].strip_bytes


def _check_regions(page: Pool, rectangles: list[Rectangle]) -> None:
    """The page and row bars show exactly the layout's regions and tail pad."""
    rows = [entry for entry in rectangles if entry.strip == "row"]
    for region in page.regions:
        (first,) = [entry for entry in rows if entry.name == region.name]
        assert (first.offset, first.bytes) == (region.offset, region.row_bytes)
    drawn = [entry for entry in rectangles if entry.strip == "page"]
    assert {entry.strip_bytes for entry in drawn} == {page.page_bytes}
    tail = [(entry.offset, entry.bytes) for entry in drawn if entry.role == Role.TAIL]
    assert tail == ([(page.payload_bytes, page.tail_pad_bytes)] if page.tail_pad_bytes else [])
    by_row = {(entry.name, entry.row): (entry.offset, entry.bytes) for entry in drawn if entry.row is not None}
    for region in page.regions:
        if by_row:
            for row in range(region.rows):
                start = region.offset + row * region.row_stride
                assert by_row[region.name, row] == (start, region.row_bytes)
        else:
            last = region.offset + (region.rows - 1) * region.row_stride + region.row_bytes
            assert [entry for entry in drawn if entry.offset <= region.offset and last <= entry.offset + entry.bytes], (
                region
            )
    if not by_row:
        starts = [region.offset for region in page.regions if region.block == "scales"]
        scales = [entry.offset for entry in drawn if entry.role == Role.SCALES]
        assert scales in ([], [min(starts, default=0)])


@dataclass(frozen=True)
class Box:
    left: float
    right: float
    top: float
    bottom: float
    text: str


def _boxes(svg: str) -> Iterator[Box]:
    for element in ET.fromstring(svg).iter(f"{SVG}text"):
        text = element.text or ""
        size = float(element.attrib["font-size"])
        width = len(text) * size * CHARACTER
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        left = {"start": x, "middle": x - width / 2, "end": x - width}[element.attrib["text-anchor"]]
        yield Box(left, left + width, y - 0.8 * size, y + 0.22 * size, text)


def _check_texts(svg: str) -> None:
    boxes = list(_boxes(svg))
    height = float(ET.fromstring(svg).attrib["height"])
    for box in boxes:
        assert box.left >= 0 and box.right <= WIDTH and box.top >= 0 and box.bottom <= height, box
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            apart = (
                box.right <= other.left or other.right <= box.left or box.bottom <= other.top or other.bottom <= box.top
            )
            assert apart, (box, other)


def _svg(page: Pool, *neighbours: Pool) -> str:
    return render_svg(make_picture(page, title=f"engine \u00b7 {page.pool}", neighbours=neighbours))


def test_packed_vllm_slab() -> None:
    pools = slab_pools()
    indexer, c4, c128 = pools
    svg = _svg(c4, *pools)
    rectangles = _rectangles(svg)
    _check_scale(rectangles)
    _check_regions(c4, rectangles)
    _check_texts(svg)
    block = [entry for entry in rectangles if entry.strip == "block"]
    assert {entry.strip_bytes for entry in block} == {1_002_240}
    assert [(entry.offset, entry.bytes) for entry in block if entry.role == Role.SELF] == [(181_440, 37_440)]
    expected = sorted((layer.offset_bytes, entry.page_bytes) for entry in (indexer, c4, c128) for layer in entry.layers)
    assert [(entry.offset, entry.bytes) for entry in block] == expected
    assert sum(entry.bytes for entry in block) == 1_002_240


def test_padded_sglang_pages() -> None:
    for rows, payload, page_bytes in ((256, 149_504, 149_760), (64, 37_376, 37_440), (2, 1_168, 1_728)):
        page = pool("c", "v4", rows=rows, policy="aligned", alignment=576)
        svg = _svg(page)
        rectangles = _rectangles(svg)
        _check_scale(rectangles)
        _check_regions(page, rectangles)
        _check_texts(svg)
        assert not [entry for entry in rectangles if entry.strip == "block"]
        (tail,) = [entry for entry in rectangles if entry.role == Role.TAIL]
        assert (tail.offset, tail.bytes) == (payload, page_bytes - payload)
        (scales,) = [entry for entry in rectangles if entry.strip == "page" and entry.role == Role.SCALES]
        assert (scales.offset, scales.bytes) == (rows * 576, rows * 8)


def test_v41_interleaved_page() -> None:
    page = pool("c2", "v41_interleaved", rows=64, tokens_per_row=2)
    svg = _svg(page)
    rectangles = _rectangles(svg)
    _check_scale(rectangles)
    _check_regions(page, rectangles)
    _check_texts(svg)
    scales = [entry for entry in rectangles if entry.strip == "page" and entry.role == Role.SCALES]
    assert [(entry.offset, entry.bytes, entry.row) for entry in scales] == [
        (row * 528 + 512, 16, row) for row in range(64)
    ]


_PLANES = [(record.name, plane) for record in RECORDS.values() for plane in record.planes]


@given(
    st.sampled_from(_PLANES),
    st.one_of(st.integers(1, 300), st.sampled_from([10**6, 2**40])),
    st.sampled_from(["exact", "aligned", "packed"]),
    st.sampled_from([16, 512, 576]),
    st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_every_record_policy_and_row_count(
    record: tuple[str, str], rows: int, policy: str, alignment: int, foreign: int
) -> None:
    name, plane = record
    fields: dict[str, Any] = {"plane": plane or None}
    if policy != "exact":
        fields["alignment"] = alignment
    if policy == "packed":
        page = -(-rows * RECORDS[name].plane_bytes(plane) // alignment) * alignment
        fields["page_stride_bytes"] = page + foreign * alignment
    entry = pool("p", name, rows=rows, policy=policy, **fields)
    svg = _svg(entry, entry)
    rectangles = _rectangles(svg)
    _check_scale(rectangles)
    _check_regions(entry, rectangles)
    _check_texts(svg)
    text = render_text(make_picture(entry, title="p"), Terminal(unicode=True))
    for line in text.splitlines():
        if line.startswith("\u2502"):
            assert len(line) == CELLS + 2


def test_names_of_any_length_and_kind_stay_inside() -> None:
    long = "layer<&\"'>\x00" * 40
    page = pool(long, "v4", rows=64, policy="packed", alignment=576, page_stride_bytes=100_000, group=long)
    svg = _svg(page, page)
    _check_texts(svg)
    assert "\x00" not in svg


def test_pages_that_claim_the_same_bytes_are_drawn_once() -> None:
    packed: dict[str, Any] = {"policy": "packed", "alignment": 576, "page_stride_bytes": 149_760, "group": "0"}
    page = pool("a", "v4", rows=64, offset=37_000, **packed)
    other = pool("b", "v4", rows=64, offset=20_000, layers=4, step=30_000, **packed)
    rectangles = _rectangles(_svg(page, page, other))
    _check_scale(rectangles)
    assert [(entry.offset, entry.bytes) for entry in rectangles if entry.role == Role.SELF] == [(37_000, 37_440)]


def test_a_page_across_the_end_of_its_block_starts_the_bar() -> None:
    page = pool(
        "a", "v4", rows=64, offset=149_000, policy="packed", alignment=576, page_stride_bytes=149_760, group="0"
    )
    rectangles = _rectangles(_svg(page, page))
    _check_scale(rectangles)
    assert [entry.offset for entry in rectangles if entry.role == Role.SELF] == [0]


def test_many_rows_are_one_rectangle() -> None:
    page = pool("c", "dsa", rows=MAX_DRAWN_ROWS + 1)
    drawn = [entry for entry in _rectangles(_svg(page)) if entry.strip == "page"]
    assert [(entry.offset, entry.bytes) for entry in drawn] == [(0, page.payload_bytes)]


def test_index_only_pools_have_no_bars() -> None:
    picture = make_picture(index_only_pool("full", page_rows=256), title="full")
    assert picture.strips == ()
    assert "owns no bytes" in render_text(picture, Terminal())


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=200))
@settings(max_examples=300, deadline=None)
def test_cells_are_shared_out_in_proportion(lengths: list[int]) -> None:
    shares = share_cells(lengths, CELLS)
    assert sum(shares) == max(CELLS, len(lengths))
    assert min(shares) >= 1
    if len(lengths) == 1:
        assert shares == [CELLS]


def test_text_picture_names_every_offset() -> None:
    pools = slab_pools()
    text = render_text(make_picture(pools[1], title="c4", neighbours=pools), Terminal(unicode=True))
    for number in ("181,440", "37,440", "1,002,240", "36,864", "37,376", "967,680", "786,240"):
        assert number in text
    plain = render_text(make_picture(pools[1], title="c4", neighbours=pools), Terminal(unicode=False))
    assert "|" + "." * 17 + "####" in plain
    assert "\u2588" not in plain


def test_colours_follow_the_scheme_and_every_role_has_one() -> None:
    svg = _svg(slab_pools()[1])
    style = ET.fromstring(svg).findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for role in ("data", "rope", "scales", "unused", "tail", "foreign", "slack", "self", "paper", "dim"):
        (day,), (night,) = (re.findall(rf"\.kv \.{role}{{fill:(#\w+)}}", text) for text in (light, dark))
        assert day != night


@pytest.mark.parametrize("scheme", [0, 1])
def test_names_on_bars_have_contrast(scheme: int) -> None:
    from kvbridge.inspect.picture_style import COLOURS

    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name, colours in COLOURS.items():
        fill, ink = luminance(colours[scheme]), luminance(colours[2 + scheme])
        assert (max(fill, ink) + 0.05) / (min(fill, ink) + 0.05) >= 4.5, name


def test_map_command(tmp_path: Path) -> None:
    path = write(tmp_path / "slab.json", manifest(*slab_pools()))
    text = call("map", path, "--pool", "c4")
    assert text.code == 0
    assert "page of 37,440 bytes at 181,440" in text.out
    svg = call("map", path, "--pool", "c4", "--format", "svg")
    assert svg.code == 0
    _check_texts(svg.out)
    assert len(_rectangles(svg.out)) == 62 + 3 + 4
    several = call("map", path, "--format", "svg")
    assert several.code == 2
    assert "got 3 pools of vllm, expected one" in several.err
    page = call("map", path, "--format", "html")
    assert page.code == 0
    assert page.out.count("<svg") == 3
    assert "43,758,400" in page.out
    assert "<script" not in page.out


def test_encodings_of_a_row_are_named() -> None:
    picture = make_picture(pool("c", "v4", rows=64), title="c")
    details = {key.name: key.detail for strip in picture.strips if strip.kind == "row" for key in strip.keys}
    assert details == {
        "nope": f"448 {Encoding.E4M3.value}",
        "rope": f"64 {Encoding.BF16.value}",
        "scales": f"7 {Encoding.UE8M0.value}",
        "unused": "unused",
    }


def test_the_picture_in_docs_is_current() -> None:
    command = ("map", "deepseek-v4-flash", "--engine", "vllm", "--pool", "c4", "--format", "svg")
    published = Path(__file__).resolve().parents[2] / "docs" / "page.svg"
    assert call(*command).out == published.read_text(encoding="utf-8"), f"run: {' '.join(command)} > docs/page.svg"
