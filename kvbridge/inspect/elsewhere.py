"""Runs a command of this program in another interpreter: the one that has the engine.

    here --subprocess--> PATH -m kvbridge.inspect capture ... --stdout--> here

kvbridge itself is found there as it is here: installed, or on a path that is handed over. stderr passes through.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
        Its exit code and stdout.

    Raises:
        UsageError: No such interpreter, or kvbridge cannot be imported there.
    """
    assignments = [part for name, value in options.items() for part in ("-O", f"{name}={_text(value)}")]
    arguments = [python, "-m", "kvbridge.inspect", *command, *assignments]
    # The folder that holds the kvbridge imported here, behind whatever PYTHONPATH there is.
    home = str(Path(kvbridge.__file__).resolve().parent.parent)
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, home])}
    sys.stderr.flush()
    try:
        result = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, check=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--python: got {python!r} ({reason}), expected a Python interpreter") from error
    if result.returncode not in set(Exit):
        raise UsageError(
            f"--python: {python} ended with {result.returncode}, expected one of {[code.value for code in Exit]}"
        )
    return Exit(result.returncode), result.stdout.decode("utf-8", "replace")


def _text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
