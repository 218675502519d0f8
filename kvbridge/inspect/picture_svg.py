"""A picture as SVG: bars to scale that zoom into each other, a table of offsets below, light and dark.

    title, facts
    block  |::::::::::::::[##]:::::::::::::::::|      every rectangle of a bar carries data-offset and data-bytes:
                         /    \\                       x = left + offset * scale, width = bytes * scale
    page   |####################|ssss|/|
    row 0  |###############|rrr|   |sss|.|
    table  colour, name, first byte, bytes, share, what it is

Text is monospaced and measured, so that no two texts can touch. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from kvbridge.inspect.picture import Picture, Role, Strip
from kvbridge.inspect.picture_style import CLASSES, STYLE
from kvbridge.inspect.terminal import percent, printable

WIDTH = 960
LEFT = 32
RIGHT = WIDTH - LEFT
CHARACTER = 0.62
"""Width of a monospaced character in units of the font size, on the wide side of the fonts asked for."""

_BAR = {"block": 46, "page": 46, "row": 40}
_BAND, _ZOOM, _ROW_GAP = 20, 34, 28


@dataclass
class _Drawing:
    """SVG elements so far, and how far down they reach."""

    elements: list[str] = field(default_factory=list)
    y: float = 0.0

    def text(self, x: float, y: float, text: str, *, size: int = 13, css: str = "", anchor: str = "start") -> None:
        style = f' class="{css}"' if css else ""
        self.elements.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}"{style}>{_escape(text)}</text>'
        )

    def add(self, element: str) -> None:
        self.elements.append(element)


def render_svg(picture: Picture, *, style: bool = True) -> str:
    """Draws a picture.

    Args:
        picture: What to draw.
        style: Whether to put the style sheet inside; a page that holds `STYLE` does not need it again.

    Returns:
        An SVG document, 960 units wide.
    """
    drawing = _Drawing(y=40)
    drawing.text(LEFT, drawing.y, _clip(picture.title, 70), size=18, css="bold")
    for fact in picture.facts:
        for line in textwrap.wrap(printable(fact), 108):
            drawing.y += 20
            drawing.text(LEFT, drawing.y, line, css="dim")
    drawing.y += 20
    _draw_bars(drawing, picture.strips)
    _draw_table(drawing, picture.strips)
    height = round(drawing.y + 20)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kv" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><title>{_escape(picture.title)}</title>'
        f"<desc>{_escape('; '.join(picture.facts))}</desc>"
    )
    styles = f"<style>{STYLE}</style>" if style else ""
    body = "\n".join(drawing.elements)
    return f'{head}{styles}\n<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n{body}\n</svg>\n'


@dataclass(frozen=True, slots=True)
class _Bar:
    """Where a strip lies on the drawing."""

    strip: Strip
    left: float
    width: float
    top: float

    @property
    def bottom(self) -> float:
        return self.top + _BAR[self.strip.kind]

    def x(self, offset: int) -> float:
        return self.left + (offset - self.strip.first) * self.width / self.strip.length


def _draw_bars(drawing: _Drawing, strips: tuple[Strip, ...]) -> None:
    bars: list[_Bar] = []
    rows = [strip for strip in strips if strip.kind == "row"]
    for strip in strips:
        first_row = strip.kind == "row" and strip is rows[0]
        if strip.kind != "row" or first_row:
            drawing.y += _BAND + (_ZOOM if bars else 0)
        left, width = float(LEFT), float(RIGHT - LEFT)
        if strip.kind == "row" and len(rows) == 2:
            left, width = _side_by_side(first=first_row)
        bar = _Bar(strip, left, width, drawing.y)
        bars.append(bar)
        if strip.parent is not None:
            _draw_zoom(drawing, bars[strip.parent], bar)
        _draw_bar(drawing, bar)
        if strip is not (rows[0] if len(rows) == 2 else None):
            drawing.y = bar.bottom
    drawing.y += 16


def _side_by_side(*, first: bool) -> tuple[float, float]:
    total = RIGHT - LEFT - _ROW_GAP
    data = total * 0.66
    return (LEFT, data) if first else (LEFT + data + _ROW_GAP, total - data)


def _draw_zoom(drawing: _Drawing, parent: _Bar, child: _Bar) -> None:
    start, length = child.strip.window
    points = (
        (parent.x(start), parent.bottom),
        (parent.x(start + length), parent.bottom),
        (child.left + child.width, child.top - _BAND),
        (child.left + child.width, child.top),
        (child.left, child.top),
        (child.left, child.top - _BAND),
    )
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    role = next((s.role for s in parent.strip.segments if s.start <= start < s.start + s.length), Role.DATA)
    drawing.add(f'<polygon class="zoom {CLASSES[role]}" points="{path}"/>')


def _draw_bar(drawing: _Drawing, bar: _Bar) -> None:
    strip = bar.strip
    height = _BAR[strip.kind]
    drawing.add(
        f'<g data-strip="{strip.kind}" data-first="{strip.first}" data-bytes="{strip.length}" '
        f'data-left="{bar.left:.6f}" data-width="{bar.width:.6f}">'
    )
    for segment in strip.segments:
        row = "" if segment.row is None else f' data-row="{segment.row}"'
        x, end = bar.x(segment.start), bar.x(segment.start + segment.length)
        drawing.add(
            f'<rect class="{CLASSES[segment.role]}" x="{x:.6f}" y="{bar.top:.2f}" width="{end - x:.6f}" '
            f'height="{height}" data-role="{segment.role.value}" data-name="{_escape(segment.name)}" '
            f'data-offset="{segment.start}" data-bytes="{segment.length}"{row}><title>{_escape(segment.name)}: '
            f"{segment.length:,} bytes at {segment.start:,}</title></rect>"
        )
    drawing.add("</g>")
    _draw_ruling(drawing, bar)
    drawing.add(f'<rect class="frame" x="{bar.left:.2f}" y="{bar.top:.2f}" width="{bar.width:.2f}" height="{height}"/>')
    _draw_band(drawing, bar, _draw_names(drawing, bar))


def _draw_ruling(drawing: _Drawing, bar: _Bar) -> None:
    """Fine lines between rows, and between the pages of a block, where they are far enough apart."""
    lines = [bar.x(segment.start) for segment in bar.strip.segments if bar.strip.kind == "block" and segment.start]
    for start, length, pitch in bar.strip.ruling:
        if pitch * bar.width / bar.strip.length >= 3 and length // pitch <= 400:
            lines += [bar.x(offset) for offset in range(start + pitch, start + length, pitch)]
    if lines:
        path = "".join(f"M{x:.2f} {bar.top:.2f}v{_BAR[bar.strip.kind]}" for x in lines)
        drawing.add(f'<path class="edge" d="{path}"/>')


def _draw_names(drawing: _Drawing, bar: _Bar) -> list[tuple[str, Role, int]]:
    """Names inside the bar, where they fit; returns those that do not, as (name, role, first byte)."""
    middle = bar.top + _BAR[bar.strip.kind] / 2
    outside = []
    for name, role, start, length in _named_runs(bar.strip):
        centre, width = bar.x(start) + length * bar.width / bar.strip.length / 2, bar.x(start + length) - bar.x(start)
        texts = (f"{name} \u00b7 {length:,}", name)
        text = next((text for text in texts if _text_width(text, 13) + 14 <= width), None)
        if text is None:
            outside.append((name, role, start))
            continue
        half = _text_width(text, 13) / 2 + 5
        drawing.add(  # covers the fine lines between rows
            f'<rect class="{CLASSES[role]}" x="{centre - half:.2f}" y="{middle - 11:.2f}" width="{2 * half:.2f}" '
            'height="22"/>'
        )
        drawing.text(centre, middle + 4.5, text, css=f"bold on-{CLASSES[role]}", anchor="middle")
    return outside


def _named_runs(strip: Strip) -> list[tuple[str, Role, int, int]]:
    if strip.kind == "block":
        runs: list[tuple[str, Role, int, int]] = []
        for segment in strip.segments:
            name = segment.name.split(" ")[0]
            if runs and runs[-1][0] == name and runs[-1][1] is segment.role:
                runs[-1] = (*runs[-1][:3], runs[-1][3] + segment.length)
            else:
                runs.append((name, segment.role, segment.start, segment.length))
        return runs
    if any(segment.row for segment in strip.segments):
        return []
    return [(segment.name, segment.role, segment.start, segment.length) for segment in strip.segments]


def _draw_band(drawing: _Drawing, bar: _Bar, outside: list[tuple[str, Role, int]]) -> None:
    """Above the bar: its title, its end, names that do not fit inside, then as many offsets as do not touch."""
    baseline = bar.top - 6
    strip = bar.strip
    title = _clip(strip.title, 60 if strip.kind != "row" else 36)
    drawing.text(bar.left, baseline, title, css="bold")
    free = (bar.left + _text_width(title, 13) + 14, bar.left + bar.width)
    right = free[1]
    last = strip.first + strip.length
    for text, role in [(f"{last:,}", None), *((f"{name} {start:,}", role) for name, role, start in reversed(outside))]:
        needed = _text_width(text, 12) + (16 if role else 0)
        if right - needed < free[0]:
            continue
        drawing.text(right, baseline, text, size=12, css="dim", anchor="end")
        if role:
            drawing.add(
                f'<rect class="{CLASSES[role]} swatch" x="{right - needed + 2:.2f}" y="{baseline - 9:.2f}" width="10" '
                'height="10" rx="2"/>'
            )
        right -= needed + 16
    for start in sorted({key.start for key in strip.keys if strip.first < key.start}, reverse=True):
        x, width = bar.x(start), _text_width(f"{start:,}", 12)
        if free[0] <= x - width and x <= right and start not in {entry[2] for entry in outside}:
            drawing.text(x, baseline, f"{start:,}", size=12, css="dim", anchor="end")
            right = x - width - 16


def _draw_table(drawing: _Drawing, strips: tuple[Strip, ...]) -> None:
    """The legend: every kind of segment of every bar, with its numbers, in columns as wide as they need to be."""
    keys = [key for strip in strips for key in strip.keys]
    if not keys:
        return
    starts = max(len(f"{key.start:,}") for key in keys)
    lengths = max(len(f"{key.length:,}") for key in keys)
    widths = [max(starts, len("first byte")), max(lengths, len("bytes")), len("100.0 %")]
    free = int((RIGHT - LEFT - 24) / (13 * CHARACTER)) - sum(widths) - 4 * 3
    longest = max(len(printable(key.name)) for key in keys)
    names = min(max(longest, 34), max(34, free - 30), free - 16)
    ends = []
    position = LEFT + 24 + names * 13 * CHARACTER
    for width in widths:
        position += (width + 3) * 13 * CHARACTER
        ends.append(position)
    rest = int((RIGHT - position) / (13 * CHARACTER)) - 3
    for strip in strips:
        drawing.y += 26
        title = int((ends[0] - LEFT) / (13 * CHARACTER)) - len("first byte") - 2
        drawing.text(LEFT, drawing.y, _clip(strip.title, title), css="bold")
        for name, end in zip(("first byte", "bytes", "share"), ends, strict=True):
            drawing.text(end, drawing.y, name, size=12, css="dim", anchor="end")
        drawing.y += 8
        drawing.add(f'<path class="line" d="M{LEFT} {drawing.y:.2f}H{RIGHT}"/>')
        for key in strip.keys:
            drawing.y += 20
            drawing.add(
                f'<rect class="{CLASSES[key.role]} swatch" x="{LEFT}" y="{drawing.y - 11:.2f}" width="14" '
                'height="14" rx="3"/>'
            )
            drawing.text(LEFT + 24, drawing.y, _clip(key.name, names))
            values = (f"{key.start:,}", f"{key.length:,}", percent(key.length, strip.length))
            for end, value in zip(ends, values, strict=True):
                drawing.text(end, drawing.y, value, anchor="end")
            drawing.text(position + 3 * 13 * CHARACTER, drawing.y, _clip(key.detail, rest), css="dim")


def _text_width(text: str, size: int) -> float:
    return len(text) * size * CHARACTER


def _clip(text: str, characters: int) -> str:
    text = printable(text)
    return text if len(text) <= characters else text[: characters - 1] + "\u2026"


def _escape(text: str) -> str:
    """Text for XML: printable, and with its four special characters replaced."""
    cleaned = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return cleaned.replace('"', "&quot;")
