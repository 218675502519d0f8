"""What a person sees: colours where they are wanted, aligned tables, remarks on stderr.

    pool   record   rows   payload       header    bold
    ────  ───────  ─────  ────────       numbers   right-aligned, thousands separated
    c4         v4     64    37,376       anything from a file is made printable first

Colours are used on a terminal only, and never with NO_COLOR, TERM=dumb or `--no-color`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
"""ANSI codes by name."""

Cell = str | int | None


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where output goes.

    Attributes:
        color: Whether to write ANSI colours to stdout.
        unicode: Whether stdout can carry box and block characters.
    """

    color: bool = False
    unicode: bool = True

    @classmethod
    def detect(cls, *, no_color: bool = False) -> Terminal:
        """Reads the environment and stdout."""
        wanted = not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        return cls(
            color=wanted and sys.stdout.isatty(),
            unicode=encoding.lower().replace("-", "") in ("utf8", "utf16", "utf32", "gb18030"),
        )

    def paint(self, text: str, *styles: str) -> str:
        """Puts colours around a text, if there are to be any."""
        codes = ";".join(STYLES[style] for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color and codes else text

    def table(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        left: Sequence[str] = (),
        styles: Mapping[str, str] | None = None,
    ) -> str:
        """Lays out a table; columns are as wide as their widest cell, nothing is cut off.

        Args:
            header: Column names.
            rows: Cells: integers get thousands separators, None becomes a dash.
            left: Columns to align left; the others are aligned right.
            styles: Style of cells by their first word.

        Returns:
            Lines, each with a final newline.
        """
        cells = [[cell_text(cell) for cell in row] for row in rows]
        widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
        rule = "\u2500" if self.unicode else "-"
        lines = [self.paint("  ".join(_pad(header, widths, header, left)), "bold")]
        lines.append("  ".join(rule * width for width in widths))
        for row in cells:
            padded = _pad(row, widths, header, left)
            if styles and self.color:
                found = [styles.get(cell.split(" ")[0], "") for cell in row]
                padded = [self.paint(cell, style) if style else cell for cell, style in zip(padded, found, strict=True)]
            lines.append("  ".join(padded))
        return "".join(line.rstrip() + "\n" for line in lines)


def _pad(cells: Sequence[str], widths: Sequence[int], header: Sequence[str], left: Sequence[str]) -> list[str]:
    return [
        cell.ljust(width) if name in left else cell.rjust(width)
        for cell, width, name in zip(cells, widths, header, strict=True)
    ]


def cell_text(cell: Cell) -> str:
    """One cell of a table."""
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else printable(cell)


def printable(text: object) -> str:
    """Text without control characters, lone surrogates or other characters a terminal or XML cannot carry."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in str(text)
    )


def percent(part: int, whole: int) -> str:
    """A share with one or two decimals, for people; never used in arithmetic."""
    if not whole or not part:
        return "0 %"
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 1 else f"{share:.2f} %"


def emit(text: str) -> None:
    """Writes data to stdout."""
    sys.stdout.write(text)


def remark(text: object) -> None:
    """Writes a remark to stderr, one line per line of text."""
    for line in str(text).splitlines():
        sys.stderr.write(printable(line) + "\n")
