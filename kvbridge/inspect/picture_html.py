"""Pictures as one HTML page: every pool of a source, with its facts and waste. No script, nothing loaded.

<h1>engine, model</h1>  <table>waste</table>  <svg>pool</svg> <svg>pool</svg> ...
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvbridge.inspect.picture import Picture
from kvbridge.inspect.picture_style import STYLE
from kvbridge.inspect.picture_svg import render_svg
from kvbridge.inspect.terminal import Cell, cell_text, printable

_PAGE_STYLE = (
    ":root{color-scheme:light dark}"
    "body{margin:0 auto;max-width:960px;padding:24px;background:#f6f8fa;color:#1f2328;"
    "font:15px/1.5 system-ui,sans-serif}"
    "h1{font-size:22px;margin:32px 0 8px}svg{max-width:100%;height:auto;margin:12px 0;display:block}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:12px 0}"
    "th,td{padding:4px 14px 4px 0;text-align:right;border-bottom:1px solid #d1d9e0}"
    "th:first-child,td:first-child{text-align:left}"
    "@media (prefers-color-scheme:dark){body{background:#010409;color:#e6edf3}th,td{border-color:#30363d}}"
)


class Section:
    """One manifest of the page.

    Attributes:
        title: Heading.
        header: Column names of the waste table.
        rows: Its rows.
        pictures: Pictures of the pools.
    """

    def __init__(
        self, *, title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], pictures: Sequence[Picture]
    ) -> None:
        self.title = title
        self.header = header
        self.rows = rows
        self.pictures = pictures


def render_html(sections: Sequence[Section]) -> str:
    """Lays sections out as one page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        "<title>KV-cache pages</title>",
        f"<style>{_PAGE_STYLE}{STYLE}</style></head><body>",
    ]
    for section in sections:
        parts.append(f"<h1>{_safe(section.title)}</h1>")
        parts.append(_table(section.header, section.rows))
        parts += [render_svg(picture, style=False) for picture in section.pictures]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    head = "".join(f"<th>{_safe(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _safe(text: str) -> str:
    return escape(printable(text))
