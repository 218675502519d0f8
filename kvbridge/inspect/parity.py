"""`parity`: compares an engine's kernel with kvbridge's on the engine's own calls; writes the figures as JSON.

    parity --engine sglang --python VENV/bin/python
    {"engine", "parity": {...}, "schema_version"}

Exit code 1 where the comparison says `"ok": false`, 3 where the engine is not installed.
"""

from __future__ import annotations

import json
from argparse import Namespace

from kvbridge.inspect.capture import parse_run, write_output
from kvbridge.inspect.command import Exit, Parser
from kvbridge.inspect.terminal import Terminal
from kvbridge.manifest import SCHEMA_VERSION

SUMMARY = "Compare an engine's kernel with kvbridge's on the engine's own calls."
EXAMPLES = ("parity --engine vllm", "parity --engine sglang --python venv/bin/python -o parity.json")


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `parity`."""
    return parse_run(Parser("parity", "--engine NAME [OPTIONS]", SUMMARY, EXAMPLES), tokens)


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    from kvbridge.inspect.elsewhere import prints_to_stderr, run_there

    code = Exit.CLEAN
    if arguments.python is not None:
        code, text = run_there(arguments.python, ["parity", "--engine", arguments.engine], arguments.given_options)
        if code not in (Exit.CLEAN, Exit.FINDINGS):
            return code
    else:
        from kvbridge.engine import load_engine, resolve_options

        engine = load_engine(arguments.engine)
        options = resolve_options(engine, arguments.given_options)
        with prints_to_stderr():
            figures = dict(engine.parity(options=options))
        document = {"schema_version": SCHEMA_VERSION, "engine": engine.name, "parity": figures}
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        code = Exit.FINDINGS if figures.get("ok") is False else Exit.CLEAN
    write_output(text, arguments.output)
    return code
