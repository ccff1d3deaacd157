"""Measure all limits, or the named ones: python -m tests.robustness.limits [names snapshots …] [--small]."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

from tests.robustness.limits import Failure, Measured, Progress, clients, connections, names, queues, snapshots, table

LIMITS: dict[str, tuple[Callable[..., Measured], Callable[..., Measured]]] = {
    "names": (names.measure, functools.partial(names.measure, 20_000, 1_000, 500)),
    "snapshots": (snapshots.measure, functools.partial(snapshots.measure, 3_000)),
    "clients": (clients.measure, functools.partial(clients.measure, 2, 10)),
    "connection-limit": (clients.measure_beyond_limit, functools.partial(clients.measure_beyond_limit, 2, 6, 20)),
    "connections": (connections.measure, connections.measure),
    "queues": (queues.measure, functools.partial(queues.measure, (10, 100))),
}
"""Each limit, at full size and at a small size."""


def main() -> int:
    """Print Markdown, and the progress on standard error."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.limits")
    parser.add_argument("limits", nargs="*", choices=[[], *LIMITS], default=[])
    parser.add_argument("--small", action="store_true", help="use small numbers, which takes a minute")
    args = parser.parse_args()
    failures: list[Failure] = []
    well = True
    for name in args.limits or LIMITS:
        began = time.monotonic()
        found = LIMITS[name][args.small](progress=_progress(name, began))
        print(found.markdown(), flush=True)
        failures += found.failures
        well = well and all(found.claims.values())
    print(table(failures))
    return 0 if well else 1


def _progress(name: str, began: float) -> Progress:
    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {name}: {what}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
