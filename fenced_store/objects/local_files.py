"""What a folder of files needs beyond obstore: flushing to disk, and listing every file."""

from __future__ import annotations

import os
import re
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix
    _FULL_SYNC = None
else:
    _FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
    """Only macOS has F_FULLFSYNC; there, fsync does not flush to the disk."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def to_disk(root: Path, name: str) -> None:
    """Flush a file, and the folders from it up to the root, to disk."""
    path = root / name
    for entry in (path, *path.parents):
        _sync(entry)
        if entry == root:
            break
    try:
        _sync(root.parent)  # the root itself may be new
    except PermissionError:
        return


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        if _FULL_SYNC is not None:
            fcntl.fcntl(number, _FULL_SYNC)
        else:
            os.fsync(number)
    finally:
        os.close(number)


def _raise_unreadable(error: OSError) -> None:
    """Raise for a folder that cannot be read, instead of skipping it. Skip a folder that has disappeared."""
    if not isinstance(error, FileNotFoundError):
        raise error


def files_below(root: Path, prefix: str) -> list[str]:
    """Return the names of all files, incomplete ones included. Links to folders are not followed."""
    found = []
    for folder, _, files in os.walk(root / prefix if prefix else root, onerror=_raise_unreadable):
        for file in files:
            name = (Path(folder) / file).relative_to(root).as_posix()
            if not _SURROGATE.search(name):  # not written by fenced_store
                found.append(name)
    return found
