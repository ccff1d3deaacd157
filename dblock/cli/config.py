"""Find the database and schema for a command that was not given them as options.

The sources, in order: the option, the environment, a `.env` file, the `[tool.dblock]` table of a `pyproject.toml`.
Each file is taken from the working folder or the nearest folder above. A library must not read files that happen to be
there, so only the command does this: a Client takes its DSN argument and $DBLOCK_DSN.

Only files that cannot come from another user count: a file in a shared folder must not choose another user's database.
The search ends at the home folder and where another file system begins.

The embedded Postgres is used only if a source asks for it. On two hosts it is two databases, so a missing DSN must not
select it silently.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dblock._core.schema_version import DEFAULT_SCHEMA
from dblock._runtime.target import is_on
from dblock.errors import ConfigurationError

KINDS = {"dsn": str, "schema": str, "accept": str, "embedded": bool}
"""Each setting, and its type in a `pyproject.toml`."""


class Setting(NamedTuple):
    """A value and its source."""

    value: str | None
    source: str


class Database(NamedTuple):
    """The database that a source names."""

    dsn: str | None
    """None for the embedded Postgres."""
    source: str


class Sources:
    """The environment and the files, each read once and only if needed."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        """The files that were ignored, each with the reason."""
        self._read: list[tuple[str, dict[str, str]]] = []
        self._rest = self._sources()

    def setting(self, name: str, given: str | None = None) -> Setting:
        """Return the value and source of this setting; `given` is the option's value, if the option was used."""
        if given is not None:
            return Setting(given, f"--{name}")
        for source, values in self._all():
            if name in values:
                return Setting(values[name], source)
        return Setting(None, "default")

    def schema(self, given: str | None) -> str:
        """Return the name of dblock's schema."""
        value = self.setting("schema", given).value
        return DEFAULT_SCHEMA if value is None else value

    def database(self, dsn: str | None, embedded: bool, else_embedded: bool = False) -> Database:
        """Return the database that the options or the first source with a DSN name.

        If there is none, raise, or with `else_embedded` return the embedded Postgres.
        """
        if embedded:
            return Database(None, "--embedded")
        found = self.setting("dsn", dsn)
        if found.value is not None:
            return Database(found.value, found.source)
        flag = self.setting("embedded")
        if flag.value is not None and is_on(flag.value, flag.source):
            return Database(None, flag.source)
        if else_embedded:
            return Database(None, "default")
        raise ConfigurationError(
            "No database is named. Set DBLOCK_DSN or pass --dsn, such as postgresql://user@host/database. For a "
            "Postgres of your own on this machine alone, pass --embedded or set DBLOCK_EMBEDDED=1."
            + "".join(f" ({ignored})" for ignored in self.ignored)
        )

    def _all(self) -> Iterator[tuple[str, dict[str, str]]]:
        yield from self._read
        for one in self._rest:
            self._read.append(one)
            yield one

    def _sources(self) -> Iterator[tuple[str, dict[str, str]]]:
        environment = {name: os.environ.get(_environment_variable(name)) for name in KINDS}
        yield "environment", {name: value for name, value in environment.items() if value is not None}
        if (path := self._find_upwards(".env")) is not None:
            yield str(path), _dotenv(path)
        if (path := self._find_upwards("pyproject.toml")) is not None:
            yield f"{path} [tool.dblock]", _pyproject(path)

    def _find_upwards(self, name: str) -> Path | None:
        """Return the nearest file of this name that is safe to read."""
        for folder in _folders():
            path = folder / name
            if not path.is_file():
                continue
            why = _unsafe(path, in_working_folder=folder == Path.cwd())
            if why is None:
                return path
            if _mentions_dblock(path):
                self.ignored.append(f"{path} is ignored: {why}")
        return None


def _environment_variable(name: str) -> str:
    return f"DBLOCK_{name.upper()}"


def _folders() -> Iterator[Path]:
    """Yield the working folder and those above, up to the home folder or the root of the file system."""
    try:
        here = Path.cwd()
        home, device = Path.home(), here.stat().st_dev
    except (OSError, RuntimeError):
        return  # the working folder was deleted, or there is no home folder
    for folder in (here, *here.parents):
        try:
            if folder.stat().st_dev != device:
                return
        except OSError:
            return
        yield folder
        if folder == home:
            return


def _unsafe(path: Path, in_working_folder: bool) -> str | None:
    """Return why a file could come from a user that we need not trust; None if it could not.

    In the working folder we also trust the owner of the folder, as when we run a program there. A container often runs
    as another user than the one who owns the folder that is mounted into it.
    """
    trusted = {os.geteuid(), 0}
    try:
        if in_working_folder:
            trusted.add(path.parent.stat().st_uid)
        found, link = path.stat(), path.lstat()
    except OSError as error:
        return str(error.strerror)
    if not {found.st_uid, link.st_uid} <= trusted:
        return "it belongs to another user"
    if found.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    return None


def _mentions_dblock(path: Path) -> bool:
    try:
        return b"dblock" in path.read_bytes().lower()
    except OSError:
        return False


def _dotenv(path: Path) -> dict[str, str]:
    try:
        if b"DBLOCK_" not in path.read_bytes():
            return {}
        from dotenv import dotenv_values

        found = dotenv_values(path, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Fix the file, or pass --dsn.") from error
    return {name: value for name in KINDS if (value := found.get(_environment_variable(name))) is not None}


def _pyproject(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
        if "dblock" not in text:
            return {}
        found: Any = _toml(text).get("tool", {}).get("dblock", {})
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Fix the file, or pass --dsn.") from error
    known = isinstance(found, dict) and all(isinstance(value, KINDS.get(key, ())) for key, value in found.items())
    if not known:
        raise ConfigurationError(
            f"[tool.dblock] in {path} may hold only dsn, schema and accept, each a string, and embedded, true or "
            "false. Remove the other entries."
        )
    return {key: str(value) for key, value in found.items()}


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
