"""Insert every bug and print which checker found it.

Usage: python -m tests.robustness.mutations [NAME …] [--control]
"""

from __future__ import annotations

import argparse
import sys

from tests.robustness.mutations import Bug, all_bugs
from tests.robustness.mutations.hunting import Caught, control, hunt

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
    args = parser.parse_args()
    bugs = all_bugs()
    if unknown := [name for name in args.names if name not in bugs]:
        parser.error(f"there is no bug {unknown[0]!r}. The bugs are: {', '.join(bugs)}")
    failed = False
    print(HEADER, flush=True)
    for name in args.names or bugs:
        caught = hunt(bugs[name])
        print(row(bugs[name], caught), flush=True)
        failed |= caught is None
        if args.control:
            outcome = control(bugs[name])
            for what in [*outcome.violations, *map(str, outcome.trouble)]:
                failed = True
                print(f"{name}: found without the bug: {what}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
