"""Find the processes of a given Postgres: those whose working directory is its data folder.

Postgres and all its children change into the data folder and stay there. That distinguishes them from an unrelated
process that got the number in an old pid file, which happens quickly in a container.

If the kernel does not show the working directory (root in a container may not inspect other accounts' processes), a
postmaster is recognised by its command line, and its children by their parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

PROGRAMS = ("postgres", "initdb")


def pids_working_in(folder: Path) -> set[int]:
    """Return the Postgres processes whose working directory is this folder. Other programs there do not count."""
    where = os.path.realpath(folder)
    if sys.platform != "linux":
        return {pid for pid, directory in _working_directories() if directory == where}
    found: set[int] = set()
    hidden: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/cwd") == where and _program(entry) in PROGRAMS:
                    found.add(int(entry))
            except PermissionError:
                hidden[int(entry)] = _parent(entry)
            except OSError:
                continue  # the process has ended, or is a zombie
    postmasters = {pid for pid in hidden if _is_postmaster(pid, {where, str(folder)})}
    return found | postmasters | {pid for pid, parent in hidden.items() if parent in postmasters}


def _program(entry: str) -> str:
    # The kernel appends this to the name of a program that was replaced on disk.
    return os.path.basename(os.readlink(f"/proc/{entry}/exe").removesuffix(" (deleted)"))


def _is_postmaster(pid: int, folders: set[str]) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return words[0].endswith("/postgres") and any(pair[0] == "-D" and pair[1] in folders for pair in pairwise(words))


def _parent(entry: str) -> int:
    try:
        return int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _working_directories() -> list[tuple[int, str]]:
    listing = subprocess.run(["lsof", "-a", "-d", "cwd", "-Fpn"], capture_output=True, text=True, check=False).stdout
    found: list[tuple[int, str]] = []
    pid = 0
    for line in listing.splitlines():
        if line.startswith("p"):
            pid = int(line[1:])
        elif line.startswith("n"):
            found.append((pid, line[1:]))
    return found
