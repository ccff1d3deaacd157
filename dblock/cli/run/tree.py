"""Processes and what they have started: to find them and to signal them."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt() -> None:
    """Become the parent of what our descendants leave behind, where the system can do that."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the process that has started us is, where the system can do that."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def children() -> list[int]:
    """Return what we have started or adopted; nothing where the system does not tell."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in path.read_text().split()]
        except OSError:
            continue
    return found


def descendants(but: Collection[int] = ()) -> dict[int, int]:
    """Return all that we have started or adopted, and what those have, as far as one look can tell, with their groups.

    Leave out some, and what they have started.
    """
    below: dict[int, dict[int, int]] = defaultdict(dict)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            said = path.read_text().rpartition(")")[2].split()
            state, parent, group, threads = said[0], int(said[1]), int(said[2]), int(said[17])
        except (OSError, ValueError, IndexError):
            continue  # it has gone meanwhile
        pid = int(path.parent.name)
        # One that has ended, all of it: threads may outlive the first of them.
        if pid not in but and not (state == "Z" and threads <= 1):
            below[parent][pid] = group
    found: dict[int, int] = {}
    reached = [os.getpid()]
    while reached:
        started = below.pop(reached.pop(), {})
        found |= started
        reached += started
    return found


def readable(numbers: list[int], seconds: float | None) -> list[int]:
    """Wait until there is something to read, but not for longer; files may have any number."""
    waiting = select.poll()
    for number in numbers:
        waiting.register(number, select.POLLIN)
    return [number for number, _ in waiting.poll(None if seconds is None else seconds * 1000)]


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have gone, or may not be ours to signal."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def send_group(group: int, number: int) -> bool:
    """Send a signal to a group; False when there is nothing in it any more."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # there, and not ours to signal: it runs as another user
    return True
