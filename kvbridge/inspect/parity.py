"""`parity`: compares an engine's kernel with kvbridge's on the engine's own calls; writes the figures as JSON.

    parity --engine sglang --python VENV/bin/python
    {"engine", "parity": {...}, "schema_version"}

Exit code 1 where the comparison says `"ok": false`, 3 where the engine is not installed.
"""

from __future__ import annotations

import json
from argparse import Namespace

from kvbridge.inspect.capture import write_output
from kvbridge.inspect.command import Exit, Parser, UsageError, add_no_color
from kvbridge.inspect.options import add_engine_arguments, parse_assignments, split_engine_options
from kvbridge.inspect.terminal import Terminal
from kvbridge.manifest import SCHEMA_VERSION

SUMMARY = "Compare an engine's kernel with kvbridge's on the engine's own calls."
EXAMPLES = ("parity --engine vllm", "parity --engine sglang --python venv/bin/python -o parity.json")


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `parity`."""
    parser = Parser("parity", SUMMARY, EXAMPLES)
    add_engine_arguments(parser, memory=False)
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the figures (default: stdout)")
    parser.add_argument("--python", metavar="PATH", help="interpreter that has the engine (default: this one)")
    add_no_color(parser)
    rest, options = split_engine_options(tokens, parser)
    arguments = parser.parse_args(rest)
    if arguments.engine is None:
        raise UsageError(f"--engine: got none, expected the engine to compare with\nsee: {parser.prog} --help")
    if arguments.engine_version is not None:
        raise UsageError(f"--engine-version: got {arguments.engine_version!r}, expected none: the installed one runs")
    arguments.given_options = parse_assignments(arguments.engine_options) | options
    return arguments


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    code = Exit.CLEAN
    if arguments.python is not None:
        from kvbridge.inspect.elsewhere import run_there

        code, text = run_there(arguments.python, ["parity", "--engine", arguments.engine], arguments.given_options)
        if code not in (Exit.CLEAN, Exit.FINDINGS):
            return code
    else:
        from kvbridge.engine import load_engine, resolve_options

        engine = load_engine(arguments.engine)
        figures = dict(engine.parity(options=resolve_options(engine, arguments.given_options)))
        document = {"schema_version": SCHEMA_VERSION, "engine": engine.name, "parity": figures}
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        code = Exit.FINDINGS if figures.get("ok") is False else Exit.CLEAN
    write_output(text, arguments.output)
    return code
