"""The frame of every command: exit codes, usage errors, help with examples, common options.

main -> command module: add_arguments(parser), run(arguments, terminal) -> Exit
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NoReturn

from kvbridge.errors import KVBridgeError

PROGRAM = "python -m kvbridge.inspect"
"""How the command is called."""


class Exit(IntEnum):
    """Exit codes of the command."""

    CLEAN = 0
    FINDINGS = 1  # findings at or above --fail-on, or a difference
    INPUT = 2  # not parseable, off schema, or wrong usage
    ENGINE_MISSING = 3
    INTERNAL = 70  # a fault of the command itself, with its traceback


class UsageError(KVBridgeError):
    """The command was called the wrong way: exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse with whole words only, examples kept as written, and errors as `UsageError`."""

    def __init__(self, command: str, arguments: str, summary: str, examples: Sequence[str] = ()) -> None:
        lines = "".join(f"  {PROGRAM} {example}\n" for example in examples)
        options: dict[str, Any] = {"color": False} if sys.version_info >= (3, 14) else {}
        super().__init__(
            prog=f"{PROGRAM} {command}",
            usage=f"{PROGRAM} {command} {arguments}",
            description=summary,
            epilog=f"examples:\n{lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Raises instead of exiting, so that one place prints all errors."""
        raise UsageError(f"{message}\nsee: {self.prog} --help")

    def explain(self, text: str) -> None:
        """Puts a paragraph in front of the examples."""
        self.epilog = f"{text}\n\n{self.epilog}"

    def option_names(self) -> frozenset[str]:
        """Option strings this parser knows itself."""
        return frozenset(self._option_string_actions)


def add_format(parser: Parser, *formats: str) -> None:
    """Adds `--format`; the first format is the default."""
    parser.add_argument("--format", choices=formats, default=formats[0], help=f"output format (default: {formats[0]})")


def add_no_color(parser: Parser) -> None:
    """Adds `--no-color`."""
    parser.add_argument("--no-color", action="store_true", help="no ANSI colours (NO_COLOR does the same)")
