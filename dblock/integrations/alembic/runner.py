"""Run Alembic's migrations again if a statement could not lock a table in time, or deadlocked.

A transaction that fails so is rolled back as a whole, and run again from the revisions that the database has then. This
stands in for `run_migrations` of the MigrationContext while the gate is open. A statement outside transactions is never
repeated, nor a step of which a part has been committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dblock.integrations.alembic.drivers import sqlstate
from dblock.recipes.migrations.retry import REPEATED, Retries

if TYPE_CHECKING:
    from dblock.integrations.alembic.session import Session
    from dblock.recipes.migrations.blockers import Blockers
    from dblock.recipes.migrations.gate import Gate


class Runner:
    """Stands in for `run_migrations` of one MigrationContext."""

    def __init__(
        self,
        migrations: Any,
        gate: Gate,
        session: Session,
        blockers: Blockers,
        *,
        retries: int,
        prepare: Callable[[], None],
    ) -> None:
        """`prepare` is called at the begin of each try, in Alembic's transaction if there is one."""
        self._migrations = migrations
        self._gate = gate
        self._session = session
        self._blockers = blockers
        self._retries = retries
        self._prepare = prepare
        self._run = migrations.run_migrations
        self._steps_of = migrations._migrations_fn
        self._callbacks = migrations.on_version_apply_callbacks
        self.revision: str | None = None
        """The revisions after the last step."""

    def install(self) -> None:
        """Take the place of `run_migrations`."""
        self._migrations.run_migrations = self.run
        self._migrations._migrations_fn = self._steps
        self._migrations.on_version_apply_callbacks = (*self._callbacks, self._applied)

    def remove(self) -> None:
        """Give the place back."""
        del self._migrations.run_migrations
        self._migrations._migrations_fn = self._steps_of
        self._migrations.on_version_apply_callbacks = self._callbacks

    def run(self, **arguments: Any) -> None:
        """Run the migrations, and run them again after a lock timeout or a deadlock."""
        session = self._session
        before = list(session.statements)
        session.records = session.has_committed = False
        retries = Retries(self._gate.plan.name, self._blockers, self._retries)
        while True:
            try:
                self._prepare()
                self._run(**arguments)
                return
            except Exception as error:
                state = sqlstate(error)
                if state not in REPEATED or session.in_autocommit:
                    raise
                may_repeat = not session.part_committed and not self._migrations._in_external_transaction
                pause = retries.pause_after(state, error, may_repeat=may_repeat)
            self._begin_again(pause, before)

    def _begin_again(self, pause: float, before: list[tuple[str, Any]]) -> None:
        migrations, connection = self._migrations, self._migrations.connection
        # As autocommit_block() does it: the `with context.begin_transaction()` of env.py ends the newest one.
        transaction, migrations._transaction = migrations._transaction, None
        if transaction is not None:
            transaction.rollback()
        elif connection.in_transaction():
            connection.rollback()
        time.sleep(pause)
        if transaction is not None:
            migrations._transaction = connection.begin()
        if not self._session.has_committed:
            # What env.py had executed in the transaction was rolled back too.
            for statement, parameters in before:
                connection.exec_driver_sql(statement, parameters or None)

    def _steps(self, heads: Any, migrations: Any) -> Any:
        steps = self._steps_of(heads, migrations)
        self._session.step_begins()
        return steps

    def _applied(self, *, heads: Any, **_: Any) -> None:
        self._session.step_begins()
        self.revision = ",".join(sorted(heads)) or "base"
        self._gate.note_revision(self.revision)
