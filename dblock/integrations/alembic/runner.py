"""Run Alembic's migrations again if a statement could not lock a table in time, or deadlocked.

A transaction that fails so is rolled back as a whole, and run again from the revisions that the database has then. This
stands in for `run_migrations` of the MigrationContext while the gate is open. A statement outside transactions is never
repeated, nor a step of which a part has been committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dblock.errors import MigrationBlocked
from dblock.integrations.alembic.drivers import sqlstate

if TYPE_CHECKING:
    from dblock.integrations.alembic.blockers import Blockers
    from dblock.integrations.alembic.session import Session
    from dblock.recipes.migrations.gate import Gate

logger = logging.getLogger("dblock")

REPEATED = {"55P03": "could not lock a table in time", "40P01": "deadlocked"}

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 45.0
"""Seconds between two tries: doubled each time. Ten of them and ten lock timeouts take about five minutes."""


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
        tries = 0
        while True:
            tries += 1
            try:
                self._prepare()
                self._run(**arguments)
                return
            except Exception as error:
                state = sqlstate(error)
                if state not in REPEATED or session.in_autocommit:
                    raise
                blockers = self._blockers.take()
                if tries > self._retries or session.part_committed or self._migrations._in_external_transaction:
                    raise MigrationBlocked(self._gate.plan.name, REPEATED[state], tries, blockers) from error
                pause = min(FIRST_PAUSE * 2 ** (tries - 1), LONGEST_PAUSE)
                logger.warning(
                    "migration %r %s (try %d of %d), and is run again in %g s. %s",
                    *(self._gate.plan.name, REPEATED[state], tries, self._retries + 1, pause),
                    f"Blocked by {'; '.join(blockers)}" if blockers else "No blocker was seen.",
                )
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
