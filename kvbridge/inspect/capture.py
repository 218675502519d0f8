"""`capture`: runs an engine's own allocator and writes the manifest of its real tensors.

    capture --engine vllm --model DIR -o captured.json                  in this interpreter
    capture --engine sglang --model DIR --python VENV/bin/python        in that one: the same command runs there

Exit code 3 where the engine is not installed in the interpreter that was named.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from kvbridge.inspect.command import Exit, Parser, UsageError, add_no_color
from kvbridge.inspect.options import ENGINE_OPTION, parse_assignments, split_engine_options
from kvbridge.inspect.terminal import Terminal, emit

SUMMARY = "Run an engine's own allocator and write the manifest of the real tensors."
EXAMPLES = (
    "capture --engine vllm --model path/to/model -o captured.json",
    "capture --engine sglang --model path/to/model --python venv/bin/python -o captured.json",
)


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `capture`."""
    parser = Parser("capture", "--engine NAME --model DIR [OPTIONS]", SUMMARY, EXAMPLES)
    parser.add_argument("--model", metavar="DIR", required=True, help="folder with the model's config.json")
    return parse_run(parser, tokens)


def parse_run(parser: Parser, tokens: list[str]) -> Namespace:
    """Parses a command line that runs an engine; adds what such commands share."""
    parser.add_argument("--engine", metavar="NAME", required=True, help="engine to run; `engines` lists them")
    parser.add_argument("-O", **ENGINE_OPTION)
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the result (default: stdout)")
    parser.add_argument("--python", metavar="PATH", help="interpreter that has the engine (default: this one)")
    add_no_color(parser)
    rest, options = split_engine_options(tokens, parser)
    arguments = parser.parse_args(rest)
    arguments.given_options = parse_assignments(arguments.engine_options) | options
    return arguments


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    from kvbridge.inspect.elsewhere import prints_to_stderr, run_there

    if arguments.python is not None:
        command = ["capture", "--engine", arguments.engine, "--model", str(Path(arguments.model).resolve())]
        code, text = run_there(arguments.python, command, arguments.given_options)
        if code is not Exit.CLEAN:
            return code
    else:
        from kvbridge.engine import load_engine, resolve_options
        from kvbridge.manifest import dump_manifests

        engine = load_engine(arguments.engine)
        options = resolve_options(engine, arguments.given_options)
        with prints_to_stderr():
            manifest = engine.capture(model=Path(arguments.model), options=options)
        text = dump_manifests([manifest])
    write_output(text, arguments.output)
    return Exit.CLEAN


def write_output(text: str, output: str | None) -> None:
    """Writes data to a file, or to stdout.

    Raises:
        UsageError: The file cannot be written.
    """
    if output is None:
        emit(text)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--output: got {output!r} ({reason}), expected a file that can be written") from error
