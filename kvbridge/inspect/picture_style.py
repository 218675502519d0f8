"""Colours of pictures, light and dark: plain rules without variables, which every SVG reader understands.

.kv .data{fill:#3b6fc4}   @media (prefers-color-scheme:dark){.kv .data{fill:#5a91e8}}
"""

from __future__ import annotations

from kvbridge.inspect.picture import Role

CLASSES = {
    Role.DATA: "data",
    Role.ROPE: "rope",
    Role.SCALES: "scales",
    Role.UNUSED: "unused",
    Role.TAIL: "tail",
    Role.FOREIGN: "foreign",
    Role.SLACK: "slack",
    Role.SELF: "self",
}
"""CSS class of each role."""

COLOURS = {
    "data": ("#3b6fc4", "#5a91e8", "#ffffff", "#0b1220"),
    "rope": ("#17776b", "#43bfae", "#ffffff", "#06201c"),
    "scales": ("#e3a008", "#f2bd42", "#2b1f00", "#2b1f00"),
    "unused": ("#b9c0ca", "#5b6572", "#1f2328", "#e6edf3"),
    "tail": ("#cf3f55", "#f2707f", "#ffffff", "#2a060b"),
    "foreign": ("#c3ccd9", "#3d4757", "#1f2328", "#e6edf3"),
    "slack": ("#eef1f5", "#1b222c", "#59636e", "#9198a1"),
    "self": ("#7046c9", "#ab8df2", "#ffffff", "#160a33"),
}
"""Class: (light fill, dark fill, light ink on it, dark ink on it)."""


def _style() -> str:
    def rules(theme: int) -> str:
        page, ink, dim, line = (
            ("#ffffff", "#1f2328", "#59636e", "#d1d9e0") if theme == 0 else ("#0d1117", "#e6edf3", "#9198a1", "#30363d")
        )
        fills = "".join(
            f".kv .{name}{{fill:{colours[theme]}}}.kv .on-{name}{{fill:{colours[2 + theme]}}}"
            for name, colours in COLOURS.items()
        )
        return (
            f".kv .paper{{fill:{page}}}.kv text{{fill:{ink}}}.kv .dim{{fill:{dim}}}.kv .edge{{stroke:{page}}}"
            f".kv .line{{stroke:{line}}}.kv .frame{{stroke:{dim}}}{fills}"
        )

    return (
        '.kv text{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}'
        ".kv .bold{font-weight:700}.kv .edge,.kv .line,.kv .frame{fill:none}.kv .edge{stroke-opacity:.55}"
        ".kv .zoom{opacity:.16}"
        f"{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}"
    )


STYLE = _style()
"""Rules for every picture; a page with several needs them once."""
