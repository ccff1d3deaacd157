"""Find this process's descendants, and signal them."""

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


def become_subreaper() -> None:
    """Become the parent of every orphan among our descendants, where the system supports it (Linux)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, where the system supports it (Linux)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def children() -> list[int]:
    """Return the processes that we have started or adopted; an empty list where the system has no /proc."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in path.read_text().split()]
        except OSError:
            continue
    return found


def descendants(exclude: Collection[int] = ()) -> dict[int, int]:
    """Return all our descendants, adopted ones too, with their process groups, as far as one scan can tell.

    Excluded processes are left out together with their own descendants.
    """
    children_of: dict[int, dict[int, int]] = defaultdict(dict)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            state, parent, group, threads = fields[0], int(fields[1]), int(fields[2]), int(fields[17])
        except (OSError, ValueError, IndexError):
            continue  # the process has ended since the listing
        pid = int(path.parent.name)
        # A zombie has ended completely only if it has no other thread: threads may outlive the first one.
        if pid not in exclude and not (state == "Z" and threads <= 1):
            children_of[parent][pid] = group
    found: dict[int, int] = {}
    pending = [os.getpid()]
    while pending:
        started = children_of.pop(pending.pop(), {})
        found |= started
        pending += started
    return found


def wait_readable(fds: list[int], seconds: float | None) -> list[int]:
    """Wait until a file is readable or the time is up, and return the readable ones. Any file number works."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if seconds is None else seconds * 1000)]


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process; ignore that the process has ended or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if the group is empty."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # the group exists, but runs as another user
    return True
