"""Indexes that a failed CONCURRENTLY has left, and that the next migration would stumble over.

A CREATE INDEX CONCURRENTLY that was cut off leaves an index that costs every write, serves no query and keeps its name.
The same statement then fails, because the name is taken. So a holder may drop such an index before its migration.

Guarantee: an index is dropped only if the text of the migration names it, the server calls it invalid, no session is
building it, and the caller holds the lock. A session that drops an index carries the mark of its grant: the next holder
ends the session before its first statement.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import make_conninfo

from dblock._core.options import quoted
from dblock._runtime.error_mapping import translated
from dblock.errors import LeaseLost
from dblock.recipes.migrations.contract import session_settings

logger = logging.getLogger("dblock")

MAX_NAME = 63
"""Postgres cuts a longer name to this many bytes."""


def named_in(
    text: str, indexes: Iterable[tuple[str, str]], path: Collection[str] = ("public",)
) -> list[tuple[str, str]]:
    """Return those of the indexes that a text names as a whole word.

    `indexes` are pairs of a qualified name and a table, as `MigrationLedger.invalid_indexes` returns them. The text
    must name the schema of an index too, unless that schema is in `path`.
    """
    found = []
    for index, table in indexes:
        schema, name = _parts(index)
        if _has_word(text, name) and (schema in path or _has_word(text, schema)):
            found.append((index, table))
    return found


def drop_named(
    connection: psycopg.Connection[Any], text: str, *, lock: str, token: int, schema: str = "dblock"
) -> list[tuple[str, str]]:
    """Drop the invalid indexes that a text names; return them with their tables, and log each.

    `connection` is in autocommit mode and has the mark of the run, see `marked_session`. Raise LeaseLost as soon as the
    token does not hold the lock any more. An index that this role may not drop stays, which is logged.
    """
    dropped = []
    with translated(schema):
        (path,) = _row(connection, "SELECT current_schemas(false)::text[]")
        for index, table in named_in(text, _invalid(connection, schema), path):
            (held,) = _row(connection, f"SELECT {quoted(schema)}.assert_held(%s, %s)", lock, token)
            if not held:
                raise LeaseLost(lock, "superseded", datetime.now(timezone.utc), token)
            # Asked again: another session may have begun to rebuild the index while an earlier one was dropped.
            if (index, table) not in _invalid(connection, schema):
                continue
            try:
                connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}".encode())
            except (pg.InsufficientPrivilege, pg.DependentObjectsStillExist) as error:
                said = error.diag.message_primary
                # A text of its own for each index: the command line repeats the same text only after a while.
                logger.warning(f"migration {lock!r}: could not drop the invalid index {index} on {table}: {said}")
                continue
            logger.warning(f"migration {lock!r}: dropped the invalid index {index} on {table}, which it names")
            dropped.append((index, table))
    return dropped


@contextlib.contextmanager
def marked_session(dsn: str, mark: str, ttl: float) -> Iterator[psycopg.Connection[Any]]:
    """Open a session under the contract of a run, for statements outside transactions."""
    given = make_conninfo(dsn, application_name=mark)
    with translated("dblock"):
        connection = psycopg.connect(given, autocommit=True, prepare_threshold=None)
    with connection:
        (backend,) = _row(connection, "SELECT pg_backend_pid()")
        # Behind a pooler the settings of a session reach other clients. A pooler keeps each client's application_name.
        if backend == connection.info.backend_pid:
            settings = session_settings(mark, ttl) | {"lock_timeout": "0"}
            for name, value in settings.items():
                connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        yield connection


def _invalid(connection: psycopg.Connection[Any], schema: str) -> list[tuple[str, str]]:
    """Return the invalid indexes that no session is building."""
    rows = connection.execute(f"SELECT index_name, table_name FROM {quoted(schema)}.invalid_indexes()".encode())
    return [(index, table) for index, table in rows.fetchall()]


def _row(connection: psycopg.Connection[Any], statement: str, *arguments: object) -> Any:
    row = connection.execute(statement.encode(), arguments or None).fetchone()
    assert row is not None
    return row


def _parts(qualified: str) -> tuple[str, str]:
    """Return the schema and the name of an index that is written as SQL writes it."""
    schema, name = re.findall(r'"(?:[^"]|"")*"|[^".]+', qualified)
    return _unquoted(schema), _unquoted(name)


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _has_word(text: str, word: str) -> bool:
    # SQL reads a name without quotes as one in lower case, cuts a long one, and writes a quote in a name twice.
    flags = re.IGNORECASE if word == word.lower() else 0
    rest = r"[\w$]*" if len(word.encode()) == MAX_NAME else ""
    return re.search(rf"(?<![\w$]){re.escape(word)}{rest}(?![\w$])", text.replace('""', '"'), flags) is not None
