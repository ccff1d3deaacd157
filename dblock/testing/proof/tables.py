"""The user's tables: what is in them, and how to put them back as they were before a run."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

import psycopg

from dblock._core.options import quoted
from dblock.errors import DblockError, InvalidArgument

FIND = """
SELECT n.nspname, c.relname, {of_fences}
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind = '{{kind}}' AND c.relpersistence <> 't' AND n.nspname <> 'information_schema'
  AND n.nspname !~ '^(pg_|dblock_proof_)'
  AND NOT EXISTS (SELECT FROM pg_class AS o WHERE o.relnamespace = n.oid AND o.relname = 'distributed_locks')
  AND NOT (c.relname IN ('rejections', 'protections', 'installed_revision') AND {of_fences})
ORDER BY 1, 2
""".format(of_fences="EXISTS (SELECT FROM pg_class AS o WHERE o.relnamespace = n.oid AND o.relname = 'fences')")
"""All tables, without those of dblock, and without those in which fenced_store records its rejections and settings.

The kind is `r` for tables that hold rows, `p` for those that have partitions, and `S` for sequences.
"""

COLUMNS = """
SELECT attname
FROM pg_attribute
WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
ORDER BY attnum
"""

MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)?")

Rows = dict[str, list[tuple[str, str]]]
"""For each table, its rows: the number of the transaction that wrote each, and its columns."""


class Tables:
    """The user's tables in one database."""

    def __init__(
        self, connection: psycopg.Connection[Any], compared: Sequence[str] | None, ignore: Sequence[str]
    ) -> None:
        """Save the rows of all tables. `compared` are the tables to compare, all if None."""
        for option, names in (("tables", compared), ("ignore", ignore)):
            if isinstance(names, str):
                raise InvalidArgument(f"{option} is a list of names, such as {option}=[{names!r}]; got {names!r}.")
        self._connection = connection
        self._schema = f"dblock_proof_{uuid.uuid4().hex[:12]}"
        found = self._find("r")
        self._tables = [_name(one) for one in found]
        # One that has partitions holds no rows, but may be one that another table refers to.
        self._truncated = self._tables + [_name(one) for one in self._find("p")]
        # The number of a fenced write is random.
        self._ignored = {
            table: [*ignore, "write_number"] if of_fences else list(ignore)
            for table, (_, _, of_fences) in zip(self._tables, found, strict=True)
        }
        if compared is None:
            self._compared = self._tables
        else:
            self._compared = [self._known(name, found) for name in compared]
        self._all_compared = compared is None
        self._columns = {
            table: [quoted(name) for (name,) in connection.execute(COLUMNS, [table])] for table in self._tables
        }
        self._check_columns(ignore)
        self._sequences: dict[str, tuple[int, bool]] = {}
        self._bypass = self._may_bypass()
        self._save()

    def _find(self, kind: str) -> list[tuple[str, str, bool]]:
        return self._connection.execute(FIND.format(kind=kind).encode()).fetchall()

    def _known(self, name: str, found: list[tuple[str, str, bool]]) -> str:
        for schema, table, _ in found:
            if name in (table, f"{schema}.{table}"):
                return _name((schema, table))
        raise InvalidArgument(
            f"There is no table {name!r} in this database. It has: "
            f"{', '.join(f'{schema}.{table}' for schema, table, _ in found) or 'none'}."
        )

    def _check_columns(self, ignore: Sequence[str]) -> None:
        query = "SELECT DISTINCT attname FROM pg_attribute WHERE attrelid = ANY(%s::regclass[]) AND attnum > 0"
        known = {name for (name,) in self._connection.execute(query, [self._tables]).fetchall()}
        for name in ignore:
            if name not in known:
                raise InvalidArgument(f"No table has a column {name!r} to ignore. Give the name of the column alone.")

    def _may_bypass(self) -> bool:
        """Return whether this role may switch off triggers, so that no fence refuses what is put back."""
        try:
            self._connection.execute("SET session_replication_role = replica")
        except psycopg.errors.InsufficientPrivilege:
            return False
        return True

    def _save(self) -> None:
        with self._connection.transaction():
            self._run(f"CREATE SCHEMA {quoted(self._schema)}")
            for number, table in enumerate(self._tables):
                self._run(f"CREATE TABLE {quoted(self._schema)}.t{number} AS SELECT * FROM ONLY {table}")
            for sequence in map(_name, self._find("S")):
                row = self._connection.execute(f"SELECT last_value, is_called FROM {sequence}".encode()).fetchone()
                assert row is not None
                self._sequences[sequence] = row

    def check(self) -> None:
        """Raise DblockError if there is a table now that there was not at first, because it cannot be compared."""
        new = [name for name in map(_name, self._find("r")) if name not in self._tables]
        if new and self._all_compared:
            raise DblockError(f"The function creates the table {new[0]}. To compare it, create it before the proof.")

    def put_back(self) -> None:
        """Give every table the rows that it had at first."""
        if not self._tables:
            return
        with self._connection.transaction():
            self._run(f"TRUNCATE {', '.join(self._truncated)}")
            for number, table in enumerate(self._tables):
                names = ", ".join(self._columns[table])
                self._run(
                    f"INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE"
                    f" SELECT {names} FROM {quoted(self._schema)}.t{number}"
                )
            for sequence, (value, called) in self._sequences.items():
                self._connection.execute("SELECT setval(%s::regclass, %s, %s)", [sequence, value, called])

    def drop_copies(self) -> None:
        """Remove what was saved."""
        self._run(f"DROP SCHEMA IF EXISTS {quoted(self._schema)} CASCADE")
        if self._bypass:
            self._run("RESET session_replication_role")

    def read(self) -> Rows:
        """Return the rows of the tables that are compared."""
        return {
            table: self._connection.execute(
                f"SELECT t.xmin::text, (to_jsonb(t) - %s::text[])::text FROM ONLY {table} AS t ORDER BY 2, 1".encode(),
                [self._ignored[table]],
            ).fetchall()
            for table in self._compared
        }

    def now(self) -> str:
        """Return the database's time, as a row shows it."""
        row = self._connection.execute("SELECT to_jsonb(clock_timestamp()) #>> '{}'").fetchone()
        assert row is not None
        return str(row[0])

    def _run(self, statement: str) -> None:
        self._connection.execute(statement.encode())


def _name(found: Sequence[Any]) -> str:
    return f"{quoted(found[0])}.{quoted(found[1])}"


def values(rows: Rows, tokens: Sequence[int], since: str) -> dict[str, list[str]]:
    """Return the rows without what differs from run to run: tokens become their rank, and times of the run become now.

    `tokens` are those of the run in the order of their grants, and `since` is when the run began.
    """

    first = MOMENT.match(since)
    assert first is not None
    began = _padded(first)

    def plain(text: str) -> str:
        for rank, token in enumerate(tokens, 1):
            text = re.sub(rf"\b{token}\b", f"<token {rank}>", text)
        return MOMENT.sub(lambda match: "<now>" if _padded(match) >= began else match[0], text)

    return {table: sorted(plain(text) for _, text in found) for table, found in rows.items()}


def _padded(moment: re.Match[str]) -> str:
    """Return a moment in a form in which the order of texts is that of the moments."""
    return f"{moment[1]} {moment[2]}{(moment[3] or '.'):0<7}"


def difference(before: dict[str, list[str]], after: dict[str, list[str]], names: tuple[str, str]) -> str:
    """Return a readable list of the rows that are in only one of two states."""
    lines = []
    for table, first in before.items():
        second = list(after[table])
        gone = []
        for row in first:
            if row in second:
                second.remove(row)
            else:
                gone.append(row)
        if gone or second:
            lines.append(
                f"{table}: {names[0]} {', '.join(gone) or 'no row'}; {names[1]} {', '.join(second) or 'no row'}"
            )
    return "; ".join(lines)
