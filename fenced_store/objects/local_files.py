"""What a folder of files needs that obstore does not do: waiting for the disk, and seeing every file."""

from __future__ import annotations

import os
import re
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix
    _FULL = None
else:
    _FULL = getattr(fcntl, "F_FULLFSYNC", None)
    """macOS has it, where fsync does not reach the disk."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def to_disk(root: Path, name: str) -> None:
    """Wait until a file, and the folders that it is found through, are on the disk."""
    path = root / name
    for one in (path, *path.parents):
        _sync(one)
        if one == root:
            break
    try:
        _sync(root.parent)  # where the folder itself may be new
    except PermissionError:
        return


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        if _FULL is not None:
            fcntl.fcntl(number, _FULL)
        else:
            os.fsync(number)
    finally:
        os.close(number)


def _unreadable(error: OSError) -> None:
    """Do not pass over a folder that cannot be read; one that is gone is no matter."""
    if not isinstance(error, FileNotFoundError):
        raise error


def files_below(root: Path, prefix: str) -> list[str]:
    """Return the names of all files, those too that were not written to their end; no link to a folder is followed."""
    found = []
    for folder, _, files in os.walk(root / prefix if prefix else root, onerror=_unreadable):
        for file in files:
            name = (Path(folder) / file).relative_to(root).as_posix()
            if not _SURROGATE.search(name):  # no name of ours
                found.append(name)
    return found
