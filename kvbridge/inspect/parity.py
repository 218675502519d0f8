"""`parity`: compares an engine's kernel with kvbridge's on the engine's own calls.

    parity --engine sglang --python VENV/bin/python --format table --html parity.html --json parity.json
    {"engine", "parity": {"ok", "summary", "calls", "controls", "tokens", "times", ...}, "schema_version"}

Exit code 1 where the comparison says `"ok": false`, 3 where the engine is not installed.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from kvbridge.inspect.capture import parse_run, write_output
from kvbridge.inspect.command import Exit, Parser
from kvbridge.inspect.terminal import Terminal
from kvbridge.manifest import SCHEMA_VERSION

SUMMARY = "Compare an engine's kernel with kvbridge's on the engine's own calls."
EXAMPLES = (
    "parity --engine vllm --format table",
    "parity --engine sglang --python venv/bin/python -o parity.json --html parity.html",
)


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `parity`."""
    parser = Parser("parity", "--engine NAME [OPTIONS]", SUMMARY, EXAMPLES)
    formats = ("json", "table", "html")
    parser.add_argument("--format", choices=formats, default="json", help="what to write (default: json)")
    parser.add_argument("--html", metavar="FILE", help="write an HTML page there as well")
    parser.add_argument("--json", metavar="FILE", help="write the JSON there as well")
    return parse_run(parser, tokens)


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    from kvbridge.inspect.elsewhere import prints_to_stderr, run_there
    from kvbridge.parity_pages import render_html, render_table

    if arguments.python is not None:
        code, text = run_there(arguments.python, ["parity", "--engine", arguments.engine], arguments.given_options)
        if code not in (Exit.CLEAN, Exit.FINDINGS):
            return code
        document = _read(text, arguments.python)
    else:
        from kvbridge.engine import load_engine, resolve_options

        engine = load_engine(arguments.engine)
        options = resolve_options(engine, arguments.given_options)
        with prints_to_stderr():
            figures = dict(engine.parity(options=options))
        document = {"schema_version": SCHEMA_VERSION, "engine": engine.name, "parity": figures}
        code = Exit.FINDINGS if figures.get("ok") is False else Exit.CLEAN
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    renderers = {"json": lambda _: text, "table": render_table, "html": render_html}
    for name, path in (("html", arguments.html), ("json", arguments.json)):
        if path is not None:
            write_output(renderers[name](document), path)
    write_output(renderers[arguments.format](document), arguments.output)
    return code


def _read(text: str, python: str) -> dict[str, Any]:
    """What the other interpreter wrote."""
    from kvbridge.engine import EngineError

    try:
        document = json.loads(text)
    except ValueError as error:
        raise EngineError(
            f"--python {python}: got output that is not JSON ({error}), expected a parity report"
        ) from error
    if not isinstance(document, dict) or "parity" not in document:
        raise EngineError(f"--python {python}: got {text[:80]!r}, expected a parity report")
    return document
