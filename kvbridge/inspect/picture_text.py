"""A picture as text: the same strips, a cell for so many bytes, and the table of offsets.

    page of 37,440 bytes at 181,440 (1 cell = 390 bytes)
    ████████████████████████████████████████████████████████████▒x
      █ data rows    0       36,864   98.5 %   64 x 576

A run shorter than a cell still gets one, so that nothing disappears; the table has the exact numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.inspect.picture import Picture, Role, Segment, Strip
from kvbridge.inspect.terminal import Terminal, percent, printable

CELLS = 96
"""Width of a bar."""

# Role: (glyph, ASCII glyph, colour)
_GLYPHS = {
    Role.DATA: ("\u2588", "D", "blue"),
    Role.ROPE: ("\u2593", "R", "green"),
    Role.SCALES: ("\u2592", "S", "yellow"),
    Role.UNUSED: ("\u2591", "u", "dim"),
    Role.TAIL: ("\u00d7", "x", "red"),
    Role.FOREIGN: ("\u00b7", ".", "dim"),
    Role.SLACK: (" ", " ", "dim"),
    Role.SELF: ("\u25a0", "#", "cyan"),
}


def render_text(picture: Picture, terminal: Terminal) -> str:
    """Draws a picture as lines of text."""
    return "".join(line.rstrip() + "\n" for line in _lines(picture, terminal))


def _lines(picture: Picture, terminal: Terminal) -> Iterator[str]:
    yield terminal.paint(printable(picture.title), "bold", "cyan")
    yield from map(printable, picture.facts)
    for strip in picture.strips:
        yield ""
        unit = -(-strip.length // CELLS)
        scale = "" if strip.length <= CELLS else f"  (1 cell is about {unit:,} bytes)"
        yield terminal.paint(strip.title, "bold") + terminal.paint(scale, "dim")
        yield _bar(strip, terminal)
        yield from _table(strip, terminal)


def _glyph(role: Role, terminal: Terminal) -> str:
    return _GLYPHS[role][0 if terminal.unicode else 1]


def _bar(strip: Strip, terminal: Terminal) -> str:
    edge = "\u2502" if terminal.unicode else "|"
    runs = _runs(strip)
    body = "".join(
        terminal.paint(_glyph(role, terminal) * cells, _GLYPHS[role][2])
        for (role, _), cells in zip(runs, share_cells([length for _, length in runs], CELLS), strict=True)
    )
    return f"{edge}{body}{edge}"


def _runs(strip: Strip) -> list[tuple[Role, int]]:
    """Lengths of neighbouring segments of one role; rows that cannot be told apart are drawn as their majority."""
    segments: list[Segment] = list(strip.segments)
    if len(segments) > CELLS and any(segment.row is not None for segment in segments):
        return _merge((Role.DATA if segment.row is not None else segment.role, segment.length) for segment in segments)
    return _merge((segment.role, segment.length) for segment in segments)


def _merge(parts: Iterator[tuple[Role, int]]) -> list[tuple[Role, int]]:
    runs: list[tuple[Role, int]] = []
    for role, length in parts:
        if runs and runs[-1][0] is role:
            runs[-1] = (role, runs[-1][1] + length)
        else:
            runs.append((role, length))
    return runs


def share_cells(lengths: list[int], cells: int) -> list[int]:
    """Divides cells in proportion to lengths, at least one each, the rest to those furthest below their share.

    Args:
        lengths: Positive lengths.
        cells: Cells to divide; more are given out only where there are more lengths than cells.

    Returns:
        Cells of each length; their sum is `max(cells, len(lengths))`.
    """
    total = sum(lengths)
    shares = [max(1, cells * length // total) for length in lengths]
    spare = max(cells, len(lengths)) - sum(shares)
    while spare:
        step = 1 if spare > 0 else -1
        candidates = [index for index, share in enumerate(shares) if step > 0 or share > 1]
        chosen = max(candidates, key=lambda index: step * (cells * lengths[index] - shares[index] * total))
        shares[chosen] += step
        spare -= step
    return shares


def _table(strip: Strip, terminal: Terminal) -> Iterator[str]:
    names = [printable(key.name) for key in strip.keys]
    starts = [f"{key.start:,}" for key in strip.keys]
    lengths = [f"{key.length:,}" for key in strip.keys]
    widths = [max(map(len, column), default=0) for column in (names, starts, lengths)]
    for key, name, start, length in zip(strip.keys, names, starts, lengths, strict=True):
        glyph, share = _glyph(key.role, terminal), percent(key.length, strip.length)
        yield (
            f"  {terminal.paint(glyph, _GLYPHS[key.role][2])} {name.ljust(widths[0])}  at {start.rjust(widths[1])}  "
            f"{length.rjust(widths[2])} bytes  {share.rjust(7)}  {printable(key.detail)}"
        )
