"""python -m kvbridge.kernels.conformance: holds a backend, or somebody else's kernel, to the kit.

    --backend cpu | cpu:avx2 | torch | cuda | reference      a backend of this package; several may be given
    --target package.module:NAME                             a Target
    --only CASE                                              one case by its name, as failures print it
    --seed N   --no-properties   --verbose

Exit status: 0 if everything that was run conforms, 1 otherwise, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys

from kvbridge.errors import KVBridgeError
from kvbridge.kernels.conformance.grid import Case
from kvbridge.kernels.conformance.report import run
from kvbridge.kernels.conformance.targets import Target, backend_target, load_target


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Command line without the program; that of the process by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m kvbridge.kernels.conformance", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help="a backend of this package")
    parser.add_argument("--target", action="append", default=[], metavar="MODULE:NAME", help="a Target")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="one case by its name")
    parser.add_argument("--seed", type=int, default=0, help="of the pairwise grid and the data")
    parser.add_argument("--no-properties", action="store_true", help="only the grid")
    parser.add_argument("--verbose", action="store_true", help="name each case on stderr before it runs")
    options = parser.parse_args(arguments)
    try:
        targets: list[Target] = [*map(backend_target, options.backend), *map(load_target, options.target)]
        grid = [Case.parse(text) for text in options.only] or None
    except (ImportError, AttributeError, TypeError, ValueError, KVBridgeError) as error:
        parser.error(str(error))
    if not targets:
        parser.error("nothing to test: give --backend or --target")
    progress = (lambda name: print(name, file=sys.stderr, flush=True)) if options.verbose else None
    ok = True
    for target in targets:
        properties = not options.no_properties and grid is None
        report = run(target, grid=grid, properties=properties, seed=options.seed, progress=progress)
        print(report.table())
        ok = ok and report.ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
