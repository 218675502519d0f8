"""Runs in SGLang's interpreter: several programs, each in a fork that has SGLang imported already.

    driver.py SPEC.json      SPEC.json: [{"name", "program", "arguments"}]

Importing SGLang takes half a minute and a fork takes none of it. A fork's output goes to NAME.log beside SPEC.json, its
exit status to NAME.status; one program's failure is not another's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch


def start(entry: dict[str, str | list[str]], folder: Path) -> int:
    """Forks one program and returns the child's process id."""
    process = os.fork()
    if process:
        return process
    with (folder / f"{entry['name']}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        status = 0
        program = str(entry["program"])
        sys.argv = [program, *entry["arguments"]]
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        (folder / f"{entry['name']}.status").write_text(str(status))
    os._exit(status)


def main() -> None:
    """Runs all programs at once and waits for them."""
    torch.set_num_threads(1)
    spec = Path(sys.argv[1])
    for process in [start(entry, spec.parent) for entry in json.loads(spec.read_text())]:
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
