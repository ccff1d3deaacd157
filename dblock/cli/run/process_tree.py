"""Find this process's descendants, and signal them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import sys
from collections import defaultdict
from collections.abc import Collection

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


def children(pid: int | None = None) -> list[int]:
    """Return the processes that this process, or another one, has started or adopted.

    The list is empty where the system has no such listing, and for a process that has ended.
    """
    tasks = f"/proc/{pid or os.getpid()}/task"
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            with open(f"{tasks}/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def descendants(exclude: Collection[int] = ()) -> dict[int, int]:
    """Return all our descendants, adopted ones too, with their process groups.

    Excluded processes are left out together with their own descendants. Only our descendants are read, so that the
    time it takes does not depend on how many other processes the machine runs: before a deadline that matters. In
    return the kernel may leave out a process whose sibling ends at the same moment. Call this again, or call
    `scan_descendants`.
    """
    if not _lists_children():
        return scan_descendants(exclude)
    found: dict[int, int] = {}
    pending = [os.getpid()]
    while pending:
        for pid in children(pending.pop()):
            if pid not in exclude and pid not in found and (stat := _parent_and_group(pid)) is not None:
                found[pid] = stat[1]
                pending.append(pid)
    return found


def scan_descendants(exclude: Collection[int] = ()) -> dict[int, int]:
    """Return the same from a scan of every process of the machine, which leaves out none that ran all the time."""
    children_of: dict[int, dict[int, int]] = defaultdict(dict)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal() and int(name) not in exclude and (stat := _parent_and_group(int(name))) is not None:
            children_of[stat[0]][int(name)] = stat[1]
    found: dict[int, int] = {}
    pending = [os.getpid()]
    while pending:
        started = children_of.pop(pending.pop(), {})
        found |= started
        pending += started
    return found


def _parent_and_group(pid: int) -> tuple[int, int] | None:
    """Return the parent and the group of a process, or nothing if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        state, parent, group, threads = fields[0], int(fields[1]), int(fields[2]), int(fields[17])
    except (OSError, ValueError, IndexError):
        return None  # the process has ended since it was listed
    # A zombie has ended completely only if it has no other thread: threads may outlive the first one.
    return None if state == b"Z" and threads <= 1 else (parent, group)


@functools.cache
def _lists_children() -> bool:
    """Return whether the kernel lists the children of a process."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def has_stopped_child(pid: int) -> bool:
    """Return whether a descendant of a process has been stopped by a signal, where the system shows it (Linux)."""
    pending = children(pid)
    while pending:
        one = pending.pop()
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{one}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] in (b"T", b"t"):
                return True
        pending += children(one)
    return False


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
