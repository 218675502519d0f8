"""What a picture of a page shows, in bytes: strips that zoom from the block into the page and into one row.

    block   |indexer x21|c4 ...[this page]...|c128 x20|         page_stride_bytes, packed pages only
                              /           \\
    page    |data rows ..................|scale rows|tail|      page_bytes
            /  \\
    row 0   |nope 448 ........|rope 128|                        one row of each run of rows

Nothing here knows how it is drawn: `picture_text`, `picture_svg` and `picture_html` do, from the same strips.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvbridge.layout import PoolKind
from kvbridge.manifest import LayerPlacement, Pool
from kvbridge.records import Encoding, Region

MAX_DRAWN_ROWS = 128
"""Rows of an interleaved page that are drawn one by one; above, the page is drawn as one run of rows."""


class Role(StrEnum):
    """What bytes are; a colour and a glyph each."""

    DATA = "data"
    ROPE = "rope"
    SCALES = "scales"
    UNUSED = "unused"
    TAIL = "tail pad"
    FOREIGN = "other layers"
    SLACK = "unowned"
    SELF = "this page"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes in a strip.

    Attributes:
        start: First byte, in the strip's own offsets.
        length: Bytes.
        role: What they are.
        name: Field, region or layer.
        row: Row of the page, where the segment belongs to one.
    """

    start: int
    length: int
    role: Role
    name: str
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A line below a strip: what a kind of segment is, where it starts, how many bytes it has."""

    role: Role
    name: str
    start: int
    length: int
    detail: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One bar, to scale.

    Attributes:
        kind: `block`, `page` or `row`.
        title: What the bar is.
        first: Offset of the bar's first byte; for `block` in the block, otherwise in the page.
        length: Bytes.
        segments: What they are, in order, without gaps.
        keys: Lines that explain them.
        parent: Index of the strip this one zooms into, or None.
        window: The part of the parent that this strip shows, as (start, length) in the parent's offsets.
        ruling: Bytes between the fine lines that separate rows, as (start, length, pitch); None for none.
    """

    kind: str
    title: str
    first: int
    length: int
    segments: tuple[Segment, ...]
    keys: tuple[Key, ...]
    parent: int | None = None
    window: tuple[int, int] = (0, 0)
    ruling: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything a drawing of one pool's page needs.

    Attributes:
        title: Engine, model and pool.
        facts: Lines of numbers under it.
        strips: Bars from the widest view to the closest.
    """

    title: str
    facts: tuple[str, ...]
    strips: tuple[Strip, ...]


def make_picture(pool: Pool, *, title: str, neighbours: Iterable[Pool] = ()) -> Picture:
    """Draws up the strips of a pool's page.

    Args:
        pool: The pool; its first layer is pictured.
        title: Heading.
        neighbours: All pools of the manifest; those of the same group and stride fill the rest of a packed block.
    """
    layer = pool.layers[0] if pool.layers else None
    facts = tuple(_facts(pool, layer))
    if pool.kind is PoolKind.INDEX_ONLY:
        return Picture(title, facts, ())
    strips: list[Strip] = []
    parent = None
    window = (0, pool.page_bytes)
    if pool.foreign_bytes:
        block, start = _block(pool, layer, tuple(neighbours))
        strips.append(block)
        parent, window = 0, (start, pool.page_bytes)
    strips.append(_page(pool, parent, window))
    page = len(strips) - 1
    strips += [_row(pool, regions, page) for regions in _row_groups(pool)]
    return Picture(title, facts, tuple(strips))


def _facts(pool: Pool, layer: LayerPlacement | None) -> Iterator[str]:
    if pool.kind is PoolKind.INDEX_ONLY:
        yield f"{pool.page_rows:,} slots a page; this pool hands out slots and owns no bytes"
        return
    record = pool.record_format
    yield record.title + (f" (plane {pool.plane})" if pool.plane else "")
    tokens = "1 token" if pool.tokens_per_row == 1 else f"{pool.tokens_per_row:,} tokens"
    yield (
        f"{pool.page_rows:,} rows x {pool.row_bytes:,} = payload {pool.payload_bytes:,} \u00b7 page "
        f"{pool.page_bytes:,} \u00b7 stride {pool.page_stride_bytes:,} \u00b7 a row stands for {tokens}"
    )
    alignment = "" if pool.padding.alignment is None else f", alignment {pool.padding.alignment:,}"
    where = "" if layer is None else f" \u00b7 {layer.name} at offset {layer.offset_bytes:,}"
    yield f"padding {pool.padding.policy.value}{alignment} \u00b7 {record.arrangement.value} rows{where}"


def _block(pool: Pool, layer: LayerPlacement | None, neighbours: tuple[Pool, ...]) -> tuple[Strip, int]:
    """The block that a packed page shares with other layers, and where the page starts in it."""
    stride = pool.page_stride_bytes
    offset = layer.offset_bytes % stride if layer else 0
    wraps = offset + pool.page_bytes > stride  # then the bar starts at the page itself
    base = offset if wraps else 0
    own = (0 if wraps else offset, pool.page_bytes, pool, layer.name if layer else pool.pool)
    pages = [own, *_other_pages(pool, layer, neighbours, base)]
    segments = tuple(_fill(sorted(pages, key=lambda page: (page[0], page is not own)), own, stride))
    title = f"block of {stride:,} bytes" + (f", group {pool.group}" if pool.group is not None else "")
    return Strip("block", title, 0, stride, segments, tuple(_block_keys(segments, pool))), own[0]


def _other_pages(
    pool: Pool, layer: LayerPlacement | None, neighbours: tuple[Pool, ...], base: int
) -> Iterator[tuple[int, int, Pool, str]]:
    stride = pool.page_stride_bytes
    if pool.group is None or layer is None:
        return
    for other in neighbours:
        if other.group != pool.group or other.page_stride_bytes != stride or not other.page_bytes:
            continue
        for place in other.layers:
            if place == layer and other.storage_of(place) == pool.storage_of(layer):
                continue
            if other.storage_of(place) == pool.storage_of(layer):
                yield (place.offset_bytes - base) % stride, other.page_bytes, other, place.name


def _fill(pages: list[tuple[int, int, Pool, str]], own: tuple[int, int, Pool, str], stride: int) -> Iterator[Segment]:
    """Segments without gap or overlap: where declared pages overlap, the pictured one wins, then the earlier."""
    position = 0
    for page in pages:
        start, length, pool, name = page
        end = min(start + length, stride)
        if page is not own and start < own[0]:
            end = min(end, own[0])
        elif page is not own:
            start = max(start, own[0] + own[1])
        start = max(start, position)
        if end <= start:
            continue
        if start > position:
            yield Segment(position, start - position, Role.SLACK, "unowned")
        yield Segment(start, end - start, Role.SELF if page is own else Role.FOREIGN, f"{pool.pool} {name}")
        position = end
    if position < stride:
        yield Segment(position, stride - position, Role.SLACK, "unowned")


def _block_keys(segments: tuple[Segment, ...], pool: Pool) -> Iterator[Key]:
    """One line per run of segments of one pool; the pictured page is named on its own."""
    for segment in segments:
        if segment.role is Role.SELF:
            yield Key(Role.SELF, segment.name, segment.start, segment.length, "the page below")
    runs: list[list[Segment]] = []
    for segment in segments:
        label = segment.name.split(" ")[0]
        if runs and runs[-1][0].name.split(" ")[0] == label:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    for run in runs:
        first = run[0]
        others = [segment for segment in run if segment.role is Role.FOREIGN]
        if first.role is Role.SLACK:
            detail = "no layer of this group" if pool.group is not None else "other layers or slack; none is named"
            yield Key(Role.SLACK, "unowned", first.start, first.length, detail)
        elif others:
            count = f"{len(run)} layer" + ("s" if len(run) != 1 else "")
            detail = f"{count}, this one included" if len(others) != len(run) else count
            length = sum(segment.length for segment in run)
            yield Key(Role.FOREIGN, first.name.split(" ")[0], first.start, length, detail)


def _page(pool: Pool, parent: int | None, window: tuple[int, int]) -> Strip:
    segments: list[Segment] = []
    keys: list[Key] = []
    ruling: list[tuple[int, int, int]] = []
    rows = pool.page_rows
    for group in _row_groups(pool):
        start, pitch = group[0].offset, group[0].row_stride
        blocks = {region.block for region in group}
        if len(blocks) == 1:
            role, name = (Role.SCALES, "scale rows") if blocks == {"scales"} else (Role.DATA, "data rows")
            segments.append(Segment(start, rows * pitch, role, name))
            keys.append(Key(role, name, start, rows * pitch, f"{rows:,} x {pitch:,}"))
            ruling.append((start, rows * pitch, pitch))
            continue
        drawn = rows <= MAX_DRAWN_ROWS
        one = Segment(start, rows * pitch, Role.DATA, f"{rows:,} rows of {pitch:,}")
        segments += _drawn_rows(group, rows) if drawn else [one]
        for region in group:
            detail = f"{rows:,} x {region.row_bytes:,}, every {pitch:,}"
            keys.append(Key(region_role(region), region.name, region.offset, rows * region.row_bytes, detail))
    if pool.tail_pad_bytes:
        segments.append(Segment(pool.payload_bytes, pool.tail_pad_bytes, Role.TAIL, "tail pad"))
        keys.append(Key(Role.TAIL, "tail pad", pool.payload_bytes, pool.tail_pad_bytes, "never read or written"))
    title = f"page of {pool.page_bytes:,} bytes"
    if parent is not None:
        title += f" at {window[0]:,}"
    return Strip("page", title, 0, pool.page_bytes, tuple(segments), tuple(keys), parent, window, tuple(ruling))


def _drawn_rows(group: tuple[Region, ...], rows: int) -> Iterator[Segment]:
    for row in range(rows):
        for region in group:
            start = region.offset + row * region.row_stride
            yield Segment(start, region.row_bytes, region_role(region), region.name, row)


def _row_groups(pool: Pool) -> tuple[tuple[Region, ...], ...]:
    """Regions whose rows lie together: data and scale rows of a split page, everything of an interleaved one."""
    groups: dict[int, list[Region]] = {}
    for region in pool.regions:
        first = next((start for start, found in groups.items() if _same_run(found[0], region)), region.offset)
        groups.setdefault(first, []).append(region)
    return tuple(tuple(group) for group in groups.values())


def _same_run(first: Region, region: Region) -> bool:
    return first.row_stride == region.row_stride and region.offset < first.offset + first.row_stride


def _row(pool: Pool, group: tuple[Region, ...], page: int) -> Strip:
    first, pitch = group[0].offset, group[0].row_stride
    segments = tuple(Segment(region.offset, region.row_bytes, region_role(region), region.name, 0) for region in group)
    keys = tuple(
        Key(region_role(region), region.name, region.offset, region.row_bytes, _encoding(region)) for region in group
    )
    blocks = {region.block for region in group}
    what = "scales of row 0" if blocks == {"scales"} else "row 0" if len(blocks) > 1 else "data of row 0"
    return Strip("row", f"{what}, {pitch:,} bytes", first, pitch, segments, keys, page, (first, pitch))


def region_role(region: Region) -> Role:
    """What a region's bytes are."""
    if region.dtype is Encoding.UNUSED:
        return Role.UNUSED
    if region.block == "scales":
        return Role.SCALES
    return Role.ROPE if region.name == "rope" else Role.DATA


def _encoding(region: Region) -> str:
    values = 8 * region.row_bytes // region.dtype.value_bits
    if region.dtype is Encoding.UNUSED:
        return "unused"
    if region.dtype is Encoding.UNKNOWN:
        return "encoding not known"
    return f"{values:,} {region.dtype.value}"
