"""One passage through the gate: look, wait, guard Alembic's connection, run, record, release."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from dblock.errors import DatabaseAhead, DblockError, InvalidArgument, LeaseLost, MigrationBlocked, Unavailable
from dblock.integrations.alembic.drivers import forget
from dblock.integrations.alembic.style import check_style

if TYPE_CHECKING:
    from dblock.integrations.alembic.command import Command, Found
    from dblock.recipes.migrations.gate import Gate

logger = logging.getLogger("dblock")

LOOKS_PER_TIMEOUT = 4
LONGEST_LOOK = 1.0
MOST_LISTED = 5


@dataclass(frozen=True)
class Options:
    """The arguments of migration_gate."""

    name: str | None
    dsn: str | None
    listen_dsn: str | None
    ttl: float
    timeout: float | None
    attempts: int
    when_ahead: str
    lock_timeout: float
    retries: int
    schema: str
    fence: bool | None
    drop_invalid: bool

    def __post_init__(self) -> None:
        if self.when_ahead not in ("fail", "ok"):
            raise InvalidArgument(f"when_ahead is 'fail' or 'ok'; got {self.when_ahead!r}.")
        if not self.lock_timeout > 0:
            raise InvalidArgument(f"lock_timeout is a number of seconds above 0; got {self.lock_timeout!r}.")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise InvalidArgument(f"retries is a whole number from 0; got {self.retries!r}.")


class Passage:
    """A `with` around the migrations of one command."""

    def __init__(self, migrations: Any, command: Command, options: Options) -> None:
        self._migrations = migrations
        self._command = command
        self._options = options
        self._gate: Gate | None = None
        self._cleanup = contextlib.ExitStack()
        self._revision: Callable[[], str | None] = lambda: None

    def __enter__(self) -> None:
        check_style(self._migrations)
        found = self._command.look()
        if found.has_steps:
            found = self._wait(found)
        if found.unknown is not None:
            self._accept_ahead(found)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First the session: when the lock is released, a session that still has the mark counts as stale.
        self._cleanup.close()
        if error is not None:
            self._leave(_outcome(error), error)
        elif self._gate is not None:
            self._gate.leave("succeeded", revision=self._revision())

    def _leave(self, outcome: str, error: BaseException) -> None:
        gate = self._gate
        if gate is None:
            return
        try:
            was_lost = gate.leave(outcome, _described(error))
        except DblockError as problem:
            logger.warning("migration %r: its failure was not recorded: %s", gate.plan.name, problem)
            return
        if was_lost and isinstance(error, Exception):
            raise gate.lost() from error

    def _wait(self, found: Found) -> Found:
        """Wait for the turn. Return what there is to do then."""
        # Imported here, so that a command without work does not pay for it.
        from dblock.recipes.migrations.gate import Gate
        from dblock.recipes.migrations.turn import Plan

        options = self._options
        plan = Plan(
            self._lock_name(),
            found.version,
            migrator="alembic",
            attempts=options.attempts,
            ttl=options.ttl,
            timeout=options.timeout,
            ledger_decides=False,
        )
        seen = found

        def look() -> tuple[bool, str | None]:
            nonlocal seen
            seen = self._command.look()
            return not seen.has_steps, seen.revision

        dsn = self._dsn()
        gate = Gate(dsn, plan, schema=options.schema, listen_dsn=options.listen_dsn, look=look)
        if gate.enter():
            self._gate = gate
            try:
                self._clear_invalid_indexes(gate, dsn, seen)
                self._guard(gate, dsn)
            except BaseException as error:
                # No step was run, so the version has not failed: a replica with other settings may run it.
                self._cleanup.close()
                self._leave("killed", error)
                raise
        return seen

    def _clear_invalid_indexes(self, gate: Gate, dsn: str, found: Found) -> None:
        """Report the indexes that a failed CONCURRENTLY has left, and drop before those that a revision names."""
        from dblock._runtime.target import resolve
        from dblock.admin.migration_ledger import MigrationLedger
        from dblock.recipes.migrations.invalid_indexes import drop_named, marked_session

        schema, name = self._options.schema, gate.plan.name
        if self._options.drop_invalid and found.scripts:
            named = "\n".join(Path(script).read_text(encoding="utf-8", errors="replace") for script in found.scripts)
            with marked_session(dsn, gate.mark, gate.plan.ttl) as connection:
                drop_named(connection, named, lock=name, token=gate.token, schema=schema)
        with contextlib.suppress(DblockError), MigrationLedger(resolve(dsn), schema) as ledger:
            if left := ledger.invalid_indexes():
                listed = ", ".join(f"{index} on {table}" for index, table in left[:MOST_LISTED])
                more = f" and {len(left) - MOST_LISTED} more" if len(left) > MOST_LISTED else ""
                logger.warning(
                    "migration %r: a failed CONCURRENTLY has left invalid indexes: %s%s. Drop or reindex them.",
                    *(name, listed, more),
                )

    def _guard(self, gate: Gate, dsn: str) -> None:
        from dblock._runtime.target import resolve
        from dblock.integrations.alembic.fence import Fence
        from dblock.integrations.alembic.runner import Runner
        from dblock.integrations.alembic.session import Session
        from dblock.recipes.migrations.blockers import Blockers

        migrations, options = self._migrations, self._options
        interval = min(options.lock_timeout / LOOKS_PER_TIMEOUT, LONGEST_LOOK)
        blockers = Blockers(resolve(dsn), gate.mark, interval)
        blockers.start()
        self._cleanup.callback(blockers.stop)
        session = Session(migrations.connection, gate, schema=options.schema, lock_timeout=options.lock_timeout)
        self._cleanup.callback(session.close)
        session.open()
        fence = Fence(migrations, options.fence)
        fence.protect_existing()
        runner = Runner(migrations, gate, session, blockers, retries=options.retries, prepare=fence.protect_new)
        runner.install()
        self._cleanup.callback(runner.remove)
        self._revision = lambda: runner.revision

    def _accept_ahead(self, found: Found) -> None:
        """Run nothing on a database that is ahead of these scripts, or raise DatabaseAhead."""
        migrations = self._migrations
        if self._options.when_ahead == "fail":
            raise DatabaseAhead(self._lock_name(), found.version, found.unknown or "")
        logger.warning(
            "migration %r: the database is at %s, which these scripts do not have. Nothing is run.",
            *(self._lock_name(), found.unknown),
        )
        migrations.run_migrations = lambda **_: None
        self._cleanup.callback(lambda: delattr(migrations, "run_migrations"))

    def _lock_name(self) -> str:
        if self._options.name is not None:
            return self._options.name
        migrations = self._migrations
        schema = migrations.version_table_schema
        if schema is None:
            try:
                schema = migrations.connection.execute(text("SELECT current_schema()")).scalar_one()
            finally:
                forget(migrations.connection, external=migrations._in_external_transaction)
        return f"alembic:{schema}.{migrations.version_table}"

    def _dsn(self) -> str:
        from dblock._runtime.target import resolve

        if self._options.dsn is not None:
            return self._options.dsn
        try:
            return resolve(self._migrations.connection.engine).conninfo()
        except InvalidArgument as error:
            raise InvalidArgument(
                "dblock cannot connect as Alembic's engine does, because the engine connects in a way of its own (a "
                "creator, connect_args, a do_connect event). Pass dsn= to migration_gate."
            ) from error


def _outcome(error: BaseException) -> str:
    if isinstance(error, LeaseLost):
        return "lost"
    if isinstance(error, MigrationBlocked):
        return "blocked"
    # A migrator that was interrupted, or whose connection broke, has not failed: another replica may run the version.
    is_cut_off = isinstance(error, Unavailable) or getattr(error, "connection_invalidated", False)
    if not isinstance(error, Exception) or is_cut_off:
        return "killed"
    return "failed"


def _described(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    return f"{type(cause).__name__}: {str(cause).strip()}"
