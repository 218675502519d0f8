"""A parity report for people: a text table, and an HTML page that holds the same and needs nothing else.

    {"engine", "parity": {"summary", "controls", "tokens", "times", "versions", "layouts", ...}}  ->  table | page

Both take the document that `inspect parity` writes as JSON, so a report can be rendered again later.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
Section = tuple[str, list[dict[str, Any]]]

_COLUMNS = (
    *("name", "engine", "record", "pair", "call", "control", "request", "figure", "part", "layer", "pool", "calls"),
    *(
        "found",
        "tokens",
        "compared",
        "equal",
        "shape",
        "median_relative_rms",
        "relative_rms",
        "worst_row_rms",
        "max_abs",
    ),
    *("call_bound", "page_rows", "payload_bytes", "page_stride_bytes", "offset_bytes", "gap_there", "ok"),
)
"""Order of columns; others stand in the middle."""
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1c2430;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:1.8rem 0 .4rem}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}
th,td{padding:.3rem .7rem;text-align:left;border-bottom:1px solid #dde3ea;white-space:nowrap}
th{font-weight:600;color:#5a6675}td.number{text-align:right;font-variant-numeric:tabular-nums}
.ok{color:#17693a;font-weight:600}.not-ok{color:#a8202b;font-weight:600}
@media(prefers-color-scheme:dark){body{color:#dbe2ea;background:#12161c}th,td{border-color:#2b333d}th{color:#95a1af}
.ok{color:#62c98a}.not-ok{color:#ff8087}}
"""


def sections(document: Document) -> list[Section]:
    """The report's tables: title and rows of equal keys; empty ones are left out."""
    figures: Mapping[str, Any] = document["parity"]
    times = [{"figure": name.replace("_", " "), "value": value} for name, value in figures.get("times", {}).items()]
    versions = [{"part": name, "version": value} for name, value in figures.get("versions", {}).items()]
    parts: list[Section] = [
        ("Calls compared", _only(figures.get("summary", ()), drop=("engine",))),
        ("Spoilt on purpose, must be found", _only(figures.get("controls", ()))),
        ("Tokens", _only(figures.get("tokens", ()))),
        ("Figures", times),
        ("Layouts", _only(figures.get("layouts", ()))),
        ("Versions", versions),
    ]
    known = {"summary", "controls", "tokens", "times", "layouts", "versions", "calls", "notes", "ok"}
    extra = [(name.replace("_", " ").capitalize(), _only(rows)) for name, rows in figures.items() if name not in known]
    return [(title, rows) for title, rows in (*parts[:4], *extra, *parts[4:]) if rows]


def render_table(document: Document) -> str:
    """The report as aligned text."""
    figures = document["parity"]
    lines = [f"{document['engine']}: {_verdict(figures.get('ok'))}"]
    lines += [f"  {note}" for note in figures.get("notes", ())]
    for title, rows in sections(document):
        names = list(rows[0])
        cells = [[_text(row.get(name)) for name in names] for row in rows]
        heads = [name.replace("_", " ") for name in names]
        widths = [max(len(line[index]) for line in (heads, *cells)) for index in range(len(names))]
        right = [_numeric(rows, name) for name in names]
        lines += ["", title]
        for line in (heads, *cells):
            padded = (
                text.rjust(width) if numeric else text.ljust(width)
                for text, width, numeric in zip(line, widths, right, strict=True)
            )
            lines.append(("  " + "  ".join(padded)).rstrip())
    return "\n".join(lines) + "\n"


def render_html(document: Document) -> str:
    """The report as one HTML page."""
    figures = document["parity"]
    ok = figures.get("ok")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{_escape(document['engine'])} and kvbridge: parity</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_escape(document['engine'])} and kvbridge: {_mark(ok, _verdict(ok))}</h1>",
    ]
    parts += [f"<p>{_escape(note)}</p>" for note in figures.get("notes", ())]
    for title, rows in sections(document):
        names = list(rows[0])
        heads = "".join(f"<th>{_escape(name.replace('_', ' '))}</th>" for name in names)
        parts.append(f"<h2>{_escape(title)}</h2><table><tr>{heads}</tr>")
        for row in rows:
            parts.append("<tr>" + "".join(_cell(rows, row, name) for name in names) + "</tr>")
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>", ""])


def _only(rows: object, drop: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows with equal columns in a fixed order, whatever order a JSON file had; named rows get their name first."""
    if isinstance(rows, Mapping) and all(isinstance(row, Mapping) for row in rows.values()):
        rows = [{"name": name, **row} for name, row in rows.items()]
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
        return []
    names = dict.fromkeys(name for row in rows for name in row if name not in drop)
    middle = len(_COLUMNS) // 2
    ordered = sorted(names, key=lambda name: (_COLUMNS.index(name) if name in _COLUMNS else middle, name))
    return [{name: row.get(name) for name in ordered} for row in rows]


def _verdict(ok: object) -> str:
    return "the kernels agree" if ok is True else "the kernels differ" if ok is False else "no verdict"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)


def _numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(isinstance(row.get(name), (int, float)) and not isinstance(row.get(name), bool) for row in rows)


def _cell(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if isinstance(value, bool):
        return f"<td>{_mark(value, _text(value))}</td>"
    kind = ' class="number"' if _numeric(rows, name) else ""
    return f"<td{kind}>{_escape(_text(value))}</td>"


def _mark(ok: object, text: str) -> str:
    return f'<span class="{"ok" if ok else "not-ok"}">{_escape(text)}</span>'


def _escape(text: object) -> str:
    return html.escape(str(text))
