"""Find the database and schema for a command that was not given them as options.

The sources, in order: the option, the environment, a `.env` file, the `[tool.dblock]` table of a `pyproject.toml`.
Each file is taken from the working folder or the nearest folder above. Without any of them the command uses the
embedded Postgres. A library must not read files that happen to be there, so only the command does this: a Client
takes its DSN argument and $DBLOCK_DSN.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dblock._core.schema_version import DEFAULT_SCHEMA
from dblock.errors import DblockError

SETTINGS = ("dsn", "schema", "accept")


class Setting(NamedTuple):
    """A value and its source."""

    value: str | None
    source: str


def setting(name: str, given: str | None) -> Setting:
    """Return the value and source of this setting; `given` is the option's value, if the option was used."""
    if given is not None:
        return Setting(given, f"--{name}")
    for source, values in _sources():
        if values.get(name) is not None:
            return Setting(values[name], source)
    return Setting(DEFAULT_SCHEMA if name == "schema" else None, "default")


def _sources() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each source with its settings. A file is read only if no earlier source had the setting."""
    environment = {name: os.environ.get(_environment_variable(name)) for name in SETTINGS}
    yield "environment", {name: value for name, value in environment.items() if value is not None}
    if (path := _find_upwards(".env")) is not None:
        yield str(path), _dotenv(path)
    if (path := _find_upwards("pyproject.toml")) is not None:
        yield f"{path} [tool.dblock]", _pyproject(path)


def _environment_variable(name: str) -> str:
    return f"DBLOCK_{name.upper()}"


def _find_upwards(name: str) -> Path | None:
    try:
        here = Path.cwd()
    except OSError:
        return None  # the working folder was deleted
    return next((path for folder in (here, *here.parents) if (path := folder / name).is_file()), None)


def _dotenv(path: Path) -> dict[str, str]:
    try:
        if b"DBLOCK_" not in path.read_bytes():
            return {}
        from dotenv import dotenv_values

        found = dotenv_values(path, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DblockError(f"{path} cannot be read: {error}. Fix the file, or pass --dsn.") from error
    return {name: value for name in SETTINGS if (value := found.get(_environment_variable(name))) is not None}


def _pyproject(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
        if "dblock" not in text:
            return {}
        found: Any = _toml(text).get("tool", {}).get("dblock", {})
    except (OSError, ValueError, AttributeError) as error:
        raise DblockError(f"{path} cannot be read: {error}. Fix the file, or pass --dsn.") from error
    known = isinstance(found, dict) and all(key in SETTINGS and isinstance(value, str) for key, value in found.items())
    if not known:
        raise DblockError(
            f"[tool.dblock] in {path} may hold only {_listed(SETTINGS)}, each a string. Remove the other entries."
        )
    return dict(found)


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
