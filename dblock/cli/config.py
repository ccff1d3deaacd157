"""Which database the command line is about, if the command does not say.

Asked in this order: the option, the environment, a `.env` file, the `[tool.dblock]` table of a `pyproject.toml`; the
files in the working folder or the nearest one above. With none of them it is the embedded Postgres. A library must
not read files that happen to lie about, so only the command does this; a Client knows its DSN and $DBLOCK_DSN.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dblock._core.schema_version import DEFAULT_SCHEMA
from dblock.errors import DblockError

SETTINGS = ("dsn", "schema")


class Setting(NamedTuple):
    """A value, and where it comes from."""

    value: str | None
    source: str


def setting(name: str, given: str | None) -> Setting:
    """Return the setting of this name, and where it was found."""
    if given is not None:
        return Setting(given, f"--{name}")
    for source, values in _sources():
        if values.get(name) is not None:
            return Setting(values[name], source)
    return Setting(DEFAULT_SCHEMA if name == "schema" else None, "default")


def _sources() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what is set where; a file is read only when nothing before it has said enough."""
    yield "environment", {name: value for name in SETTINGS if (value := os.environ.get(_variable(name))) is not None}
    if (path := _nearest(".env")) is not None:
        yield str(path), _dotenv(path)
    if (path := _nearest("pyproject.toml")) is not None:
        yield f"{path} [tool.dblock]", _table(path)


def _variable(name: str) -> str:
    return f"DBLOCK_{name.upper()}"


def _nearest(name: str) -> Path | None:
    try:
        here = Path.cwd()
    except OSError:
        return None  # the folder was deleted
    return next((path for folder in (here, *here.parents) if (path := folder / name).is_file()), None)


def _dotenv(path: Path) -> dict[str, str]:
    try:
        if b"DBLOCK_" not in path.read_bytes():
            return {}
        from dotenv import dotenv_values

        found = dotenv_values(path, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DblockError(f"{path} cannot be read: {error}. Mend it, or give --dsn.") from error
    return {name: value for name in SETTINGS if (value := found.get(_variable(name))) is not None}


def _table(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
        if "dblock" not in text:
            return {}
        found: Any = _toml(text).get("tool", {}).get("dblock", {})
    except (OSError, ValueError, AttributeError) as error:
        raise DblockError(f"{path} cannot be read: {error}. Mend it, or give --dsn.") from error
    known = isinstance(found, dict) and all(key in SETTINGS and isinstance(value, str) for key, value in found.items())
    if not known:
        raise DblockError(f"[tool.dblock] in {path} takes {' and '.join(SETTINGS)}, each a text; mend the others.")
    return dict(found)


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
