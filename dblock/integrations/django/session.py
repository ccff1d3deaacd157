"""Django's connection while its migrations run: each transaction proves the lease first, and the session is marked.

A wrapper around every statement does it, so that no transaction of its own is opened. In a transaction every setting is
local, so that it ends with the transaction, also behind a pooler. Statements outside transactions need settings of the
session, which `close` restores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import ProgrammingError
from psycopg.pq import TransactionStatus

from dblock._core.options import literal
from dblock.errors import DblockError, InvalidArgument
from dblock.recipes.migrations.contract import session_settings

if TYPE_CHECKING:
    from dblock.recipes.migrations.gate import Gate

TOKEN = "fenced_store.token"  # noqa: S105 (the name of a setting)
MISSING = ("3F000", "42883")
"""The SQLSTATEs for a schema and a function that do not exist."""


class Session:
    """The session contract on one connection of Django."""

    def __init__(self, connection: Any, gate: Gate, *, lock_timeout: float) -> None:
        self._connection = connection
        self._gate = gate
        settings = session_settings(gate.mark, gate.plan.ttl) | {TOKEN: str(gate.token)}
        self._local = settings | {"lock_timeout": f"{max(int(lock_timeout * 1000), 1)}ms"}
        # A lock_timeout of the role would cut CREATE INDEX CONCURRENTLY and leave an invalid index.
        self._lasting = settings | {"lock_timeout": "0"}
        self._is_known = False
        self._is_pooled = False
        self._has_ddl = False
        self._marked: Any = None
        self._found: dict[str, str] = {}

    def open(self) -> None:
        """Guard the connection from here on."""
        self._connection.execute_wrappers.append(self._before)

    def close(self) -> None:
        """Stop guarding the connection, and restore its settings."""
        self._connection.execute_wrappers.remove(self._before)
        self._restore()

    @contextlib.contextmanager
    def outside_transactions(self) -> Iterator[None]:
        """Mark the session in the body also behind a pooler, for DDL outside of transactions."""
        self._has_ddl = True
        try:
            yield
        finally:
            self._has_ddl = False
            if self._is_pooled:
                self._restore()

    def _restore(self) -> None:
        raw = self._connection.connection
        if raw is not None and raw is self._marked and _is_idle(raw) and self._connection.get_autocommit():
            restored = (_set(name, value, is_local=False) for name, value in self._found.items())
            with contextlib.suppress(psycopg.Error):
                raw.execute(f"SELECT {', '.join(restored)}")
        self._marked = None

    def prove(self) -> None:
        """Raise LeaseLost unless this process holds the lock. In a transaction nothing passes it until its end."""
        self._connection.ensure_connection()
        raw = self._connection.connection
        if not self._connection.get_autocommit():
            self._ask(raw, *(_set(name, value, is_local=True) for name, value in self._local.items()))
        elif not self._mark(raw):
            self._ask(raw)
            return
        else:
            self._ask(raw)
        if not self._is_known:
            self._check_is_known(raw)

    def _before(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Prove the lease before the first statement of a transaction, and before each one outside of transactions."""
        raw = self._connection.connection
        if raw is not None and _is_idle(raw):
            self.prove()
        return execute(sql, params, many, context)

    def _mark(self, raw: Any) -> bool:
        """Put the contract on a session, and return whether it is there. Django may have opened another one.

        A pooler has no session for a client. It gives the application_name of a client to each session that it lends
        out, where it stays until the next client comes: other replicas would end these sessions later. So behind a
        pooler the mark is set only where DDL runs outside of transactions.
        """
        if raw is self._marked:
            return True
        if self._is_pooled and not self._has_ddl:
            return False
        names = list(self._lasting)
        asked = ", ".join(f"current_setting({literal(name)}, true)" for name in names)
        backend, *found = self._row(raw, f"SELECT pg_backend_pid(), {asked}")
        self._is_pooled = raw.info.backend_pid != backend
        if self._is_pooled and not self._has_ddl:
            return False
        # Behind a pooler the settings of a session reach other clients.
        kept = ["application_name"] if self._is_pooled else names
        self._found = {name: value or "" for name, value in zip(names, found, strict=True) if name in kept}
        self._marked = raw
        self._ask(raw, *(_set(name, self._lasting[name], is_local=False) for name in kept))
        return True

    def _ask(self, raw: Any, *settings: str) -> None:
        try:
            row = self._row(raw, f"SELECT {', '.join([*settings, self._gate.proof])}")
        except ProgrammingError as error:
            if getattr(error.__cause__, "sqlstate", None) not in MISSING:
                raise
            raise InvalidArgument(
                "dblock is not installed in the database that Django migrates. Let the dsn of DBLOCK_MIGRATE name that "
                "database, or leave it out."
            ) from error
        if not row[-1]:
            raise self._gate.lost()

    def _row(self, raw: Any, statement: str) -> Any:
        with self._connection.wrap_database_errors:
            return raw.execute(statement).fetchone()

    def _check_is_known(self, raw: Any) -> None:
        """Raise if other replicas could not find this session, and therefore not end it."""
        if not self._row(raw, self._gate.recognition)[0]:
            raise DblockError(
                f"Migration {self._gate.plan.name!r} was not run: other replicas would not find the session of Django "
                "by its application_name. Let the dsn of DBLOCK_MIGRATE and Django use the same role, and a pooler "
                "pass application_name on."
            )
        self._is_known = True


def _is_idle(raw: Any) -> bool:
    return bool(raw.info.transaction_status == TransactionStatus.IDLE)


def _set(name: str, value: str, *, is_local: bool) -> str:
    return f"set_config({literal(name)}, {literal(value)}, {str(is_local).lower()})"
