"""A command and all that it has started: to find it, to signal it, and a guard that ends it if we are killed.

All of it is the command's process group and, on Linux, every descendant too, whatever group or session it has moved
to: this process adopts what the command leaves behind. Elsewhere a process that leaves the group is out of reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


class Guard:
    """A process that outlives ours for a moment, to kill the command should ours be killed.

    Made before there are threads, for it is a fork that goes on as it is.
    """

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            _keep_watch(reading)
        os.close(reading)

    def watch(self, group: int) -> None:
        """Tell which group to kill."""
        os.write(self._writing, b"%d\n" % group)

    def dismiss(self) -> None:
        """Let it go: there is nothing left to kill."""
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self._writing, b"0\n")
        os.close(self._writing)
        os.waitpid(self.pid, 0)


def _keep_watch(reading: int) -> None:
    """Wait until the other end of the pipe is closed, by its process's end if by nothing else."""
    try:
        os.setsid()  # a terminal's signals are not for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        # Whoever reads our output must not wait for the guard's end too.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        said = b""
        while part := os.read(reading, 100):
            said += part
        group = int(said.split()[-1]) if said.split() else 0
        if group > 0:
            # The descendants first, while it can still be seen whose they are.
            for pid in descendants(group):
                send(pid, signal.SIGKILL)
            os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os._exit(0)


def adopt() -> None:
    """Become the parent of what our descendants leave behind, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """Return all that a process has started, directly or not, and that has not ended."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has gone meanwhile
        children[int(parent)].append(int(path.parent.name) if state != "Z" else -int(path.parent.name))
    found: list[int] = []
    reached = [ancestor]
    while reached:
        for pid in children.get(reached.pop(), []):
            # What has ended and was not waited for has no descendants any more.
            if pid > 0:
                found.append(pid)
                reached.append(pid)
    return found


def reap_adopted(but: int) -> None:
    """Wait for those that have ended and are ours only because their parents have gone; not for `but`."""
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            pids = [int(pid) for pid in path.read_text().split()]
        except OSError:
            continue
        for pid in pids:
            if pid != but:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have gone."""
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
        return True  # there, and out of our hands: it runs as another user
    return True
