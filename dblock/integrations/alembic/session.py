"""Alembic's connection while its migrations run: each transaction proves the lease first, and the session is marked.

The gate opens no transaction of its own here. It listens to SQLAlchemy's events. In a transaction every setting is
local, so that it ends with the transaction, also behind a pooler. Statements outside transactions need settings of the
session, which `close` restores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, text
from sqlalchemy.exc import SQLAlchemyError

from dblock._core.options import literal
from dblock.errors import DblockError, InvalidArgument
from dblock.integrations.alembic.drivers import has_pooler, is_autocommit, sqlstate
from dblock.recipes.migrations.contract import session_settings

if TYPE_CHECKING:
    from dblock.recipes.migrations.gate import Gate

TOKEN = "fenced_store.token"  # noqa: S105 (the name of a setting)
MISSING = ("3F000", "42883")
"""The SQLSTATEs for a schema and a function that do not exist."""


class Session:
    """The session contract on one connection of SQLAlchemy."""

    def __init__(self, connection: Any, gate: Gate, *, schema: str, lock_timeout: float) -> None:
        self._connection = connection
        self._gate = gate
        self._schema = schema
        self._settings = session_settings(gate.mark, gate.plan.ttl) | {TOKEN: str(gate.token)}
        self._local = self._settings | {"lock_timeout": f"{max(int(lock_timeout * 1000), 1)}ms"}
        # A lock_timeout of the role would cut CREATE INDEX CONCURRENTLY and leave an invalid index.
        self._lasting = self._settings | {"lock_timeout": "0"}
        self._listeners: dict[str, Callable[..., Any]] = {
            "begin": self._begin,
            "commit": self._commit,
            "rollback": self._rollback,
            "before_cursor_execute": self._before,
        }
        self._is_ours = False
        self._is_known = False
        self._found: dict[str, str | None] = {}
        self.in_autocommit = False
        """Whether the last statement ran outside transactions."""
        self.records = True
        """Whether to record the statements of the transaction in `statements`."""
        self.statements: list[tuple[str, Any]] = []
        self.part_committed = False
        """Whether a part of the current step has been committed, so that the step cannot run again."""
        self.has_committed = False
        """Whether a transaction has been committed since this was last set to False."""
        self._between_steps = True

    def open(self) -> None:
        """Guard the connection from here on."""
        for name, listener in self._listeners.items():
            event.listen(self._connection, name, listener)
        if self._connection.in_transaction():
            self._begin(self._connection)

    def close(self) -> None:
        """Stop guarding the connection, and restore its settings."""
        for name, listener in self._listeners.items():
            event.remove(self._connection, name, listener)
        with contextlib.suppress(SQLAlchemyError):
            self._restore()

    def step_begins(self) -> None:
        """Note that the next statement belongs to a new step."""
        self._between_steps, self.part_committed = True, False

    def _begin(self, connection: Any) -> None:
        self.statements.clear()
        if is_autocommit(connection):
            self._mark_session()
            return
        try:
            self._prove(*(self._set(name, value, is_local=True) for name, value in self._local.items()))
        except BaseException:
            with contextlib.suppress(SQLAlchemyError):
                connection.connection.rollback()
            raise

    def _commit(self, connection: Any) -> None:
        self.statements.clear()
        self.has_committed = True
        self.part_committed |= not self._between_steps

    def _rollback(self, connection: Any) -> None:
        self.statements.clear()

    def _before(
        self, connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        if self._is_ours:
            return
        self.in_autocommit = is_autocommit(connection)
        if self.in_autocommit:
            self._mark_session()
            self._prove()
            self.part_committed = True
        elif self.records:
            self.statements.append((statement, parameters))
        self._between_steps = False

    def _prove(self, *expressions: str) -> None:
        """Raise LeaseLost unless this process holds the lock. A transaction keeps it until its end."""
        try:
            row = self._ask(f"SELECT {', '.join([*expressions, self._gate.proof])}")
        except SQLAlchemyError as error:
            if sqlstate(error) in MISSING:
                raise InvalidArgument(
                    f"There is no dblock in schema {self._schema!r} of the database that Alembic migrates. Let dsn "
                    "name that database, or leave it out."
                ) from error
            raise
        if not row[-1]:
            raise self._gate.lost()
        if not self._is_known:
            self._check_is_known()

    def _check_is_known(self) -> None:
        """Raise if other replicas could not find this session, and therefore not end it."""
        (known,) = self._ask(self._gate.recognition)
        if not known:
            raise DblockError(
                f"Migration {self._gate.plan.name!r} was not run: other replicas would not find the session of Alembic "
                "by its application_name. Let dsn and Alembic's engine use the same role, and a pooler pass "
                "application_name on."
            )
        self._is_known = True

    def _mark_session(self) -> None:
        if self._found:
            return
        names = list(self._lasting)
        backend, *found = self._ask(
            f"SELECT pg_backend_pid(), {', '.join(f'current_setting({literal(name)}, true)' for name in names)}"
        )
        # Behind a pooler the settings of a session reach other clients. A pooler keeps each client's application_name.
        kept = ["application_name"] if has_pooler(self._connection, backend) else names
        self._found = {name: value for name, value in zip(names, found, strict=True) if name in kept}
        self._prove(*(self._set(name, self._lasting[name], is_local=False) for name in kept))

    def _restore(self) -> None:
        connection = self._connection
        if connection.closed or connection.invalidated:
            return
        restored = [self._set(name, value or "", is_local=False) for name, value in self._found.items()]
        if connection.in_transaction() and not is_autocommit(connection):
            # env.py has begun this transaction and commits it. Until then the proof keeps other replicas out, and
            # without its mark the session does not count as stale when the lock is released.
            self._ask(f"SELECT {self._set('application_name', 'dblock', is_local=True)}")
        elif restored:
            with contextlib.nullcontext() if connection.in_transaction() else connection.begin():
                self._ask(f"SELECT {', '.join(restored)}")

    def _set(self, name: str, value: str, *, is_local: bool) -> str:
        return f"set_config({literal(name)}, {literal(value)}, {str(is_local).lower()})"

    def _ask(self, statement: str) -> Any:
        self._is_ours = True
        try:
            # SQLAlchemy would read a colon as the begin of a parameter.
            return self._connection.execute(text(statement.replace(":", "\\:"))).one()
        finally:
            self._is_ours = False
