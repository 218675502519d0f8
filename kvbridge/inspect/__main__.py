"""Entry of `python -m kvbridge.inspect` and `kvbridge-inspect`: finds the command, prints errors, returns exit codes.

argv -> command name -> its module, and only that -> run -> exit code
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kvbridge.errors import KVBridgeError
from kvbridge.inspect.command import PROGRAM, Exit, UsageError
from kvbridge.inspect.terminal import Terminal, emit, remark

COMMANDS = {
    "show": "page table of a manifest, a model or both engines; what fits in memory; one declared tensor",
    "map": "picture of a page: data rows, scale rows, tail pad, foreign bytes; as text, SVG or HTML",
    "diff": "every field in which two manifests differ, and what breaks",
    "check": "findings, and each consumer's verdict on each pool",
    "capture": "run an engine's own allocator and write the manifest of the real tensors",
    "parity": "compare an engine's kernel with kvbridge's on the engine's own calls",
    "rules": "catalogue of finding codes",
    "consumers": "catalogue of kernels that read or write pages, and their demands",
    "engines": "engines registered here, installed versions, options",
    "schema": "JSON Schema of the manifest",
}
"""Commands in the order of the overview."""

_CATALOGUES = ("rules", "consumers", "engines", "schema")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: Arguments behind the program's name; those of the process by default.

    Returns:
        Exit code.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(tokens)
        sys.stdout.flush()
        return int(code)
    except KVBridgeError as error:
        return int(_report(error))
    except BrokenPipeError:
        # The reader of a pipe left early (`... | head`); nothing more can be written, nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.CLEAN)
    except SystemExit as error:  # argparse's --help
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 130
    except Exception:
        import traceback

        traceback.print_exc()
        remark("internal error: please report it with the command line and the traceback above")
        return int(Exit.INTERNAL)


def _dispatch(tokens: list[str]) -> Exit:
    no_color = False
    while tokens and tokens[0] == "--no-color":
        tokens.pop(0)
        no_color = True
    if tokens and tokens[0] in ("-h", "--help", "help"):
        emit(overview())
        return Exit.CLEAN
    if tokens and tokens[0] == "--version":
        from kvbridge import __version__

        emit(f"kvbridge {__version__}\n")
        return Exit.CLEAN
    name = "show" if not tokens or tokens[0].startswith("-") else tokens.pop(0)
    if name not in COMMANDS:
        raise UsageError(
            f"command: got {name!r}, expected one of {', '.join(COMMANDS)}; a SOURCE follows its command, "
            f"as in `{PROGRAM} show {name}`"
        )
    module = import_module(f"kvbridge.inspect.{'catalogues' if name in _CATALOGUES else name}")
    arguments = module.parse(name, tokens) if name in _CATALOGUES else module.parse(tokens)
    code: Exit = module.run(arguments, Terminal.detect(no_color=no_color or arguments.no_color))
    return code


def overview() -> str:
    """Help of the program as a whole."""
    width = max(map(len, COMMANDS))
    commands = "".join(f"  {name.ljust(width)}  {summary}\n" for name, summary in COMMANDS.items())
    return (
        f"usage: {PROGRAM} [COMMAND] [OPTIONS]\n\n"
        "What a KV-cache page is, for SGLang, vLLM and MLA kernels. Without a command: what is installed here, the\n"
        "page tables of all engines for DeepSeek-V4, and whether one kernel can read them.\n\n"
        f"commands:\n{commands}\n"
        f"`{PROGRAM} COMMAND --help` explains a command and gives examples.\n\n"
        "exit codes: 0 clean, 1 findings or a difference, 2 input or usage, 3 engine not installed\n"
    )


def _report(error: KVBridgeError) -> Exit:
    from kvbridge.engine import EngineMissingError

    remark(f"error: {error}")
    return Exit.ENGINE_MISSING if isinstance(error, EngineMissingError) else Exit.INPUT


def run() -> None:
    """Runs the process's command line and ends the process."""
    gc.disable()  # a short process: collecting costs more than it frees
    code = main()
    sys.stderr.flush()
    if "torch" not in sys.modules:
        os._exit(code)  # both streams are flushed; taking modules apart would cost a tenth of the run
    sys.exit(code)


if __name__ == "__main__":
    run()
