"""Run the first stage on a machine that is busy, stands still or has a slow disk, and in random orders.

    python -m tests.robustness.stress_gate [--times 5] [--only stalls] [--out stress-gate-report]

No variant may have a red run: the first stage shows its claims without the clock of the machine. Put the table of the
report into CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.harness.servers import slow_disk

ROOT = Path(__file__).parents[2]
BUSY_LOOPS = 4
COMMIT_TAKES = 0.05
"""Seconds for the log. With checkpoints as slow, each end of a database would take a minute."""
STALLS = (0.2, 3.0)
"""The shortest and the longest time for which a process is stopped, in seconds."""
SHARE = 1 / 3
"""The part of the processes that is stopped at a time."""


class Run(NamedTuple):
    """One run of the first stage."""

    green: bool
    tests: int
    seconds: float
    failed: list[str]


class Variant(NamedTuple):
    """What is different from a plain run."""

    options: tuple[str, ...] = ()
    slow_disk: Path | None = None
    """A library that the servers of tests/support/servers.py load."""
    beside: Callable[[int], AbstractContextManager[None]] = lambda pid: contextlib.nullcontext()
    """What happens beside a run, given the process of pytest."""


@contextmanager
def busy_loops(pid: int) -> Iterator[None]:
    """Keep the processors busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def stalls(pid: int) -> Iterator[None]:
    """Stop a random part of the processes of a run for a while, again and again."""
    over = threading.Event()

    def stop_and_continue() -> None:
        while not over.is_set():
            running = descendants(pid)
            stopped = random.sample(running, round(len(running) * SHARE))
            send(stopped, signal.SIGSTOP)
            over.wait(random.uniform(*STALLS))
            send(stopped, signal.SIGCONT)
            over.wait(random.uniform(0, 0.5))

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def descendants(pid: int) -> list[int]:
    """Return the processes below this one, those of the servers too: a server is a child of a test's process."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to the processes that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def variants(folder: Path) -> dict[str, Variant]:
    """Return the variants by name."""
    return {
        "busy": Variant(beside=busy_loops),
        "stalls": Variant(beside=stalls),
        "slow-disk": Variant(slow_disk=slow_disk(folder, round(COMMIT_TAKES * 1e6), ["fdatasync"])),
        **{f"order-{seed}": Variant(options=("--order", str(seed))) for seed in (1, 2, 3)},
    }


def run(variant: Variant, log: Path) -> Run:
    """Run the first stage once."""
    began = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *variant.options],
            cwd=ROOT,
            env=os.environ | ({"SLOW_DISK": str(variant.slow_disk)} if variant.slow_disk else {}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        with variant.beside(process.pid):
            code = process.wait()
    text = log.read_text()
    passed = re.search(r"(\d+) passed", text)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return Run(code == 0, int(passed[1]) if passed else 0, time.monotonic() - began, failed)


def table(results: dict[str, list[Run]]) -> str:
    """Return the results as Markdown."""
    lines = ["| variant | runs | red | tests | median, s | slowest, s |", "|---|---:|---:|---:|---:|---:|"]
    for name, runs in results.items():
        if runs:
            seconds = [one.seconds for one in runs]
            lines.append(
                f"| {name} | {len(runs)} | {sum(not one.green for one in runs)} | {max(one.tests for one in runs)}"
                f" | {statistics.median(seconds):.0f} | {max(seconds):.0f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="how often each variant runs")
    parser.add_argument("--only", action="append", help="a variant to run; may be given again")
    parser.add_argument("--out", type=Path, default=Path("stress-gate-report"), help="a folder for logs and the table")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # the account of the servers loads a library from it
        chosen = variants(Path(folder))
        if unknown := {*(given.only or [])} - {*chosen}:
            parser.error(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
        results: dict[str, list[Run]] = {name: [] for name in given.only or chosen}
        # Each variant once, then each variant again: a run that is interrupted has seen all of them.
        for number in range(1, given.times + 1):
            for name, runs in results.items():
                done = run(chosen[name], given.out / f"{name}-{number}.log")
                runs.append(done)
                verdict = "green" if done.green else f"RED: {', '.join(done.failed) or 'see the log'}"
                print(f"{name}, run {number}: {done.tests} passed in {done.seconds:.0f} s, {verdict}", flush=True)
                (given.out / "table.md").write_text(table(results) + "\n")
    print(table(results))
    return int(any(not one.green for runs in results.values() for one in runs))


if __name__ == "__main__":
    sys.exit(main())
