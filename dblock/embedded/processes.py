"""Which processes are a given Postgres's: those that work in its data folder.

Postgres and all its children change into the data folder and stay there. That tells them from a stranger that
was given the number in an old pid file, as happens at once in a container.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def pids_working_in(folder: Path) -> set[int]:
    """Return the processes whose working directory is this folder."""
    where = os.path.realpath(folder)
    return {pid for pid, directory in _working_directories() if directory == where}


def _working_directories() -> list[tuple[int, str]]:
    if sys.platform == "linux":
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    found.append((int(entry), os.readlink(f"/proc/{entry}/cwd")))
                except OSError:
                    continue  # gone, a zombie, or another user's
        return found
    listing = subprocess.run(["lsof", "-a", "-d", "cwd", "-Fpn"], capture_output=True, text=True, check=False).stdout
    found, pid = [], 0
    for line in listing.splitlines():
        if line.startswith("p"):
            pid = int(line[1:])
        elif line.startswith("n"):
            found.append((pid, line[1:]))
    return found
