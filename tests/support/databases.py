"""Give each test a database of its own, with both schemas installed: a clone of a template, which takes some 20 ms."""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import conninfo, sql

import fenced_store
from dblock._runtime import target
from dblock.admin import schema
from tests.support.eventually import eventually

SESSIONS_END_WITHIN = 60.0
"""Seconds. The server ends a session some time after its client has closed the connection."""

_REPLACE = "DO $$ BEGIN EXECUTE replace(pg_get_functiondef('dblock.{}'::regproc), $a${}$a$, $a${}$a$); END $$"
KEEP_WAITERS = _REPLACE.format("touch_client", "3 seconds", "5 minutes")
"""Makes a waiter count as alive for longer than a machine stands still."""
LET_WAITERS_DIE = _REPLACE.format("touch_client", "5 minutes", "3 seconds")
"""Undoes this, for tests that move the clock themselves."""
WAIT_LONGER = [_REPLACE.format("catch_up_tokens", "'2s'", "'60s'"), _REPLACE.format("claim_slot", "'1s'", "'60s'")]
"""Makes a grant and a host wait for a session that stands still."""

_numbers = itertools.count()


class Databases:
    """The databases of one server."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._admin: psycopg.Connection | None = None
        self._templates: dict[bool, str] = {}

    def dsn(self, name: str) -> str:
        return conninfo.make_conninfo(self.server, dbname=name)

    @contextmanager
    def taken(self, waiters_stay: bool) -> Iterator[str]:
        """Yield the DSN of a database with both schemas, for the body alone.

        With `waiters_stay`, a waiter counts as dead after 5 minutes instead of 3 s: a machine may stand still. Fail if
        the body leaves a session that does not end by itself.
        """
        if waiters_stay not in self._templates:
            self._templates[waiters_stay] = self._make_template(waiters_stay)
        name = self.create(self._templates[waiters_stay])
        yield self.dsn(name)
        with suppress(AssertionError):
            eventually(lambda: not self.sessions(name), within=min(1.0, SESSIONS_END_WITHIN))
        if self.sessions(name):
            gc.collect()  # the garbage of a cycle may keep one open, such as a request that was cut off
        try:
            eventually(lambda: not self.sessions(name), "the end of the sessions of a test", SESSIONS_END_WITHIN)
        except AssertionError:
            left = self.sessions(name)
            raise AssertionError(f"The test left sessions open (pid, application, state, statement): {left}") from None
        finally:
            self.drop(name)

    def create(self, template: str | None = None) -> str:
        """Return the name of a new database."""
        name = f"dblock_test_{os.getpid()}_{next(_numbers)}"
        statement = "CREATE DATABASE {}" + (" TEMPLATE {}" if template else "")
        if template and self._copies_files:
            statement += " STRATEGY file_copy"
        self._run(statement, name, *([template] if template else []))
        return name

    def drop(self, name: str) -> None:
        self._run("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def sessions(self, name: str) -> list[tuple[Any, ...]]:
        """Return the sessions of a database: pid, application, state and last statement."""
        query = (
            "SELECT pid, application_name, state, left(query, 80) FROM pg_stat_activity"
            " WHERE datname = %s AND backend_type = 'client backend'"
        )
        return self._execute(sql.SQL(query), [name]).fetchall()

    def close(self) -> None:
        for name in self._templates.values():
            self.drop(name)
        if self._admin is not None:
            self._admin.close()

    def _make_template(self, waiters_stay: bool) -> str:
        template = self.create()
        schema.install(target.resolve(self.dsn(template)))
        fenced_store.install(self.dsn(template))
        if waiters_stay:
            with psycopg.connect(self.dsn(template)) as connection:
                for statement in (KEEP_WAITERS, *WAIT_LONGER):
                    connection.execute(statement.encode())
        return template

    def _run(self, statement: str, *names: str) -> None:
        """Execute a statement. Repeat it while a session that it has to end stands still."""

        def done() -> bool:
            with suppress(psycopg.errors.ObjectInUse):
                self._execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
                return True
            return False

        eventually(done, statement, SESSIONS_END_WITHIN)

    def _execute(self, composed: Any, args: list[Any] | None = None) -> psycopg.Cursor[Any]:
        """Execute a statement over a connection that stays open, and open it again if a test has ended it."""
        if self._admin is not None:
            try:
                return self._admin.execute(composed, args)
            except psycopg.OperationalError:
                if not self._admin.closed:
                    raise
        from tests.support import isolation  # a plugin, which pytest imports after tests/conftest.py

        with isolation.kept():
            self._admin = psycopg.connect(self.server, autocommit=True)
        return self._admin.execute(composed, args)

    @functools.cached_property
    def _copies_files(self) -> bool:
        """Whether a copy of the files is the cheapest way to clone a database: if the server waits for no disk."""
        row = self._execute(sql.SQL("SELECT current_setting('fsync')")).fetchone()
        assert self._admin is not None
        return self._admin.info.server_version >= 150_000 and row == ("off",)
