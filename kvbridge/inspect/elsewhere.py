"""Runs a command of this program in another interpreter: the one that has the engine.

    here --subprocess--> PATH -m kvbridge.inspect capture ... -o temporary file --> here

kvbridge itself is found there as it is here: installed, or on a path that is handed over. Whatever the engine prints,
to stdout too, is a remark and goes to stderr; so it does in this interpreter.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import kvbridge
from kvbridge.engine import OptionValue
from kvbridge.inspect.command import Exit, UsageError


def run_there(python: str, command: Sequence[str], options: Mapping[str, OptionValue]) -> tuple[Exit, str]:
    """Runs a command with another interpreter.

    Args:
        python: The interpreter.
        command: Command and its arguments.
        options: Engine options to hand over.

    Returns:
        Its exit code and the data it wrote.

    Raises:
        UsageError: No such interpreter, or kvbridge cannot be imported there.
    """
    assignments = [part for name, value in options.items() for part in ("-O", f"{name}={_text(value)}")]
    # The folder that holds the kvbridge imported here, behind whatever PYTHONPATH there is.
    home = str(Path(kvbridge.__file__).resolve().parent.parent)
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, home])}
    with tempfile.TemporaryDirectory(prefix="kvbridge-") as folder:
        output = Path(folder) / "output.json"
        arguments = [python, "-m", "kvbridge.inspect", *command, *assignments, "-o", str(output)]
        try:
            with prints_to_stderr():
                result = subprocess.run(arguments, env=environment, check=False)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"--python: got {python!r} ({reason}), expected a Python interpreter") from error
        text = output.read_text(encoding="utf-8") if output.exists() else ""
    if result.returncode not in set(Exit):
        raise UsageError(
            f"--python: {python} ended with {result.returncode}, expected one of {[code.value for code in Exit]}"
        )
    if not text and result.returncode in (Exit.CLEAN, Exit.FINDINGS):
        raise UsageError(f"--python: {python} ended with {result.returncode} and wrote nothing, expected data")
    return Exit(result.returncode), text


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Sends what is printed to stdout, by this process and by those it starts, to stderr: engines log there."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
