"""Read processor time and memory of processes from /proc, for a process together with all its descendants.

The time of a tree never goes down: what a process has used moves into its parent's count of reaped children when it
ends. So the difference of two readings is what the tree used in between, including sessions that have come and gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def _fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on, because the second may contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def tree(*roots: int) -> set[int]:
    """Return these processes and all their descendants."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _fields(int(entry))):
            parents[int(entry)] = int(fields[1])
    found, added = set(roots), True
    while added:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        added = bool(more)
        found |= more
    return found


def _run_time(pid: int) -> float:
    """Return the seconds for which the live threads of a process ran, to the nanosecond where the kernel counts so."""
    try:
        total = 0
        for task in os.listdir(f"/proc/{pid}/task"):
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
        return total / 1e9
    except (OSError, ValueError, IndexError):
        return -1.0


def cpu(*roots: int) -> float:
    """Return the processor seconds that these processes and their descendants have used so far."""
    total = 0.0
    for pid in tree(*roots):
        if not (fields := _fields(pid)):
            continue
        own, children = (int(fields[11]) + int(fields[12])) * TICK, (int(fields[13]) + int(fields[14])) * TICK
        exact = _run_time(pid)
        # A thread that has ended is only in the coarse count.
        total += (exact if abs(exact - own) < 2 * TICK else own) + children
    return total


def memory(pids: Iterable[int]) -> int:
    """Return the memory in bytes that these processes have for themselves, without pages that they share."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Private_Clean:", "Private_Dirty:")):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def connections(pid: int) -> int:
    """Return the number of connected sockets of a process."""
    sockets = set()
    try:
        for file in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{file}")
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    except OSError:
        return 0
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01" and fields[9] in sockets:
                found.add(fields[9])
    return len(found)
