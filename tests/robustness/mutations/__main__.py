"""Insert every bug and print which checker found it.

Usage: python -m tests.robustness.mutations [NAME …] [--control] [--at-once N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from tests.robustness.mutations import Bug, all_bugs
from tests.robustness.mutations.hunting import Caught, hunt_and_control

HEADER = "| bug | what it does | scenario | caught by | after operations | seconds |\n|---|---|---|---|---:|---:|"


def row(bug: Bug, caught: Caught | None) -> str:
    """Return the table row of a bug."""
    found = (
        f"{', '.join(caught.checkers)} | {caught.operations} | {caught.seconds:.1f}" if caught else "**nothing** | | "
    )
    return f"| {bug.name} | {bug.what} | {bug.workload} / {bug.fault} | {found} |"


def main() -> int:
    """Hunt the named bugs, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.mutations")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--control", action="store_true", help="also play each scenario without the bug")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="bugs in parallel (default: 1)")
    args = parser.parse_args()
    bugs = all_bugs()
    if unknown := [name for name in args.names if name not in bugs]:
        parser.error(f"there is no bug {unknown[0]!r}. The bugs are: {', '.join(bugs)}")
    names = args.names or list(bugs)
    failed = False
    print(HEADER, flush=True)
    # In processes of their own, so that the checkers of one run do not slow down the faults of another.
    with ProcessPoolExecutor(args.at_once, multiprocessing.get_context("spawn")) as processes:
        for name, (caught, found) in zip(
            names, processes.map(hunt_and_control, names, repeat(args.control)), strict=True
        ):
            print(row(bugs[name], caught), flush=True)
            failed |= caught is None or bool(found)
            for what in found:
                print(f"{name}: found without the bug: {what}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
