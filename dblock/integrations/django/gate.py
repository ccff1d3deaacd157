"""The gate around Django's migrations of one database: wait, guard the connection, run, record, release.

While the gate is open, every session of the migrated database carries the session contract, and every transaction
proves the lease before its first statement. See `session` for the connection, and `executor` for what is applied.

What is needed only for a migration is imported when it begins, so that a `migrate` with nothing to do does not pay for
it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError, connections, transaction

from dblock.errors import DblockError, InvalidArgument, LeaseLost, MigrationBlocked

if TYPE_CHECKING:
    from dblock.integrations.django.session import Session
    from dblock.recipes.migrations.blockers import Blockers
    from dblock.recipes.migrations.gate import Gate

logger = logging.getLogger("dblock")

OPTIONS: dict[str, Any] = {
    "enabled": True,
    "name": None,
    "dsn": None,
    "listen_dsn": None,
    "schema": "dblock",
    "ttl": 15.0,
    "timeout": None,
    "attempts": 1,
    "lock_timeout": 5.0,
    "retries": 10,
    "fence": None,
    "drop_invalid": True,
}
"""The setting DBLOCK_MIGRATE, with its defaults. A dict stands for one value per database alias."""

TABLE = "django_migrations"
LOCK_NOT_AVAILABLE = "55P03"
LOOKS_PER_TIMEOUT = 4
LONGEST_LOOK = 1.0

_active: ContextVar[MigrationGate | None] = ContextVar("dblock_migration_gate", default=None)


def options_for(alias: str) -> dict[str, Any]:
    """Return the settings for a database. Raise ImproperlyConfigured if they cannot be used."""
    given = getattr(settings, "DBLOCK_MIGRATE", {})
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise ImproperlyConfigured(
            f"DBLOCK_MIGRATE has no setting {', '.join(map(repr, unknown))}. It takes: {', '.join(OPTIONS)}."
        )
    chosen = {name: value.get(alias) if isinstance(value, dict) else value for name, value in given.items()}
    options = OPTIONS | {name: value for name, value in chosen.items() if value is not None}
    if not options["lock_timeout"] > 0:
        raise ImproperlyConfigured(f"lock_timeout of DBLOCK_MIGRATE is above 0; got {options['lock_timeout']!r}.")
    if isinstance(options["retries"], bool) or not isinstance(options["retries"], int) or options["retries"] < 0:
        raise ImproperlyConfigured(f"retries of DBLOCK_MIGRATE is a whole number; got {options['retries']!r}.")
    return options


def gate_for(alias: str) -> MigrationGate | None:
    """Return the gate for a database; None if it is not Postgres, is a test database, or the gate is switched off."""
    connection: Any = connections[alias]
    options = options_for(alias)
    if not options["enabled"] or connection.vendor != "postgresql" or _in_tests():
        return None
    return MigrationGate(connection, options)


def active_gate(connection: Any) -> MigrationGate | None:
    """Return the gate of the `migrate` that runs now, if it migrates over this connection."""
    gate = _active.get()
    return gate if gate is not None and gate.connection is connection else None


class MigrationGate:
    """One run of `migrate` on one database."""

    def __init__(self, connection: Any, options: dict[str, Any]) -> None:
        self.connection = connection
        self._options = options
        self._gate: Gate | None = None
        self._session: Session | None = None
        self._blockers: Blockers | None = None
        self._revision: str | None = None
        self._has_looked = False

    @property
    def is_open(self) -> bool:
        """Whether this process has the turn."""
        return self._gate is not None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the executor find this gate in the body; record at the end how the run went."""
        before = _active.set(self)
        try:
            yield
        except BaseException as error:
            try:
                self._leave(self._outcome(error), _described(error))
            except DblockError as problem:
                logger.warning("migration: its failure was not recorded: %s", problem)
            raise
        else:
            self._leave("succeeded")
        finally:
            _active.reset(before)

    def enter(
        self,
        targets: Sequence[str] = (),
        look: Callable[[], tuple[bool, str | None]] = lambda: (False, None),
    ) -> None:
        """Wait for the turn, and guard the connection. `look` is called under the lock, as for `Gate`."""
        if self._has_looked:
            return
        self._has_looked = True
        if self.connection.in_atomic_block:
            raise InvalidArgument(
                "Nothing was migrated: `migrate` was called in a transaction, which would stay open while this replica "
                "waits for the others. Call it outside of transaction.atomic()."
            )
        from dblock.integrations.django.conninfo import conninfo_of
        from dblock.recipes.migrations.gate import Gate
        from dblock.recipes.migrations.turn import Plan
        from dblock.recipes.migrations.versions import version_of

        options = self._options
        dsn = options["dsn"] or conninfo_of(self.connection)
        plan = Plan(
            options["name"] or f"django:{self._schema()}",
            version_of(targets) if targets else None,
            migrator="django",
            attempts=options["attempts"],
            ttl=options["ttl"],
            timeout=options["timeout"],
            ledger_decides=False,
        )
        gate = Gate(dsn, plan, schema=options["schema"], listen_dsn=options["listen_dsn"], look=look)
        if gate.enter():
            self._gate = gate
            try:
                self._guard(gate, dsn)
            except BaseException as error:
                # No migration has failed: another replica, or this one with other settings, may run the version.
                self._leave("killed", _described(error))
                raise

    def note(self, revision: str) -> None:
        """Record how far the run has come."""
        self._revision = revision
        if self._gate is not None:
            self._gate.note_revision(revision)

    def run_in_transaction(self, apply: Callable[[], Any]) -> Any:
        """Apply one migration in a transaction. Run it again if it could not lock a table in time, or deadlocked."""
        from dblock.recipes.migrations.retry import REPEATED, Retries

        assert self._gate is not None
        assert self._session is not None
        assert self._blockers is not None
        retries = Retries(self._gate.plan.name, self._blockers, self._options["retries"])
        while True:
            try:
                with transaction.atomic(using=self.connection.alias):
                    self._session.prove()
                    return apply()
            except Exception as error:
                state = _sqlstate(error)
                if state not in REPEATED:
                    raise
                pause = retries.pause_after(state, error)
            time.sleep(pause)

    @contextlib.contextmanager
    def outside_transactions(self) -> Iterator[None]:
        """Apply in the body a migration that is not atomic. If it could not lock a table, log the sessions in the way.

        Such a migration does not run again: a part of it has taken effect.
        """
        from dblock.recipes.migrations.retry import REPEATED

        assert self._gate is not None
        assert self._session is not None
        assert self._blockers is not None
        try:
            with self._session.outside_transactions():
                yield
        except Exception as error:
            state = _sqlstate(error)
            if state in REPEATED:
                logger.warning(
                    "migration %r %s, and is not run again, because it is not atomic. %s",
                    *(self._gate.plan.name, REPEATED[state], self._blockers.described()),
                )
            raise

    def drop_invalid(self, indexes: Sequence[str]) -> None:
        """Drop those of the indexes that a cut CONCURRENTLY has left: building them again would fail."""
        if not indexes or not self._options["drop_invalid"] or self._gate is None or self._session is None:
            return
        from dblock.recipes.migrations.invalid_indexes import drop_named

        self._session.prove()
        plan, schema = self._gate.plan, self._options["schema"]
        names = " ".join(indexes)
        drop_named(self.connection.connection, names, lock=plan.name, token=self._gate.token, schema=schema)

    def _guard(self, gate: Gate, dsn: str) -> None:
        from dblock._runtime.target import resolve
        from dblock.integrations.django.session import Session
        from dblock.recipes.migrations.blockers import Blockers

        lock_timeout = self._options["lock_timeout"]
        self._blockers = Blockers(resolve(dsn), gate.mark, min(lock_timeout / LOOKS_PER_TIMEOUT, LONGEST_LOOK))
        self._blockers.start()
        self._session = Session(self.connection, gate, lock_timeout=lock_timeout)
        self._session.open()
        self._protect()

    def _protect(self) -> None:
        """Protect the table of applied migrations, in a transaction of its own, so that it is locked only briefly."""
        from django.db.migrations.recorder import MigrationRecorder

        from dblock.recipes.migrations.version_fence import protect

        wanted, table = self._options["fence"], self.connection.ops.quote_name(TABLE)
        try:
            with transaction.atomic(using=self.connection.alias):
                if not protect(self._ask, table, wanted):
                    MigrationRecorder(self.connection).ensure_schema()
                    protect(self._ask, table, wanted)
        except OperationalError as error:
            if wanted or _sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            logger.warning("migration: the table %s has no fence yet, because it was in use: %s", table, error)

    def _leave(self, outcome: str, error: str | None = None) -> None:
        # First the session: when the lock is released, a session that still has the mark counts as stale.
        session, self._session = self._session, None
        if session is not None:
            session.close()
        blockers, self._blockers = self._blockers, None
        if blockers is not None:
            blockers.stop()
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.leave(outcome, error, self._revision)

    def _outcome(self, error: BaseException) -> str:
        if isinstance(error, LeaseLost):
            return "lost"
        if isinstance(error, MigrationBlocked):
            return "blocked"
        raw = self.connection.connection
        is_cut = isinstance(error, (OperationalError, InterfaceError)) and (raw is None or raw.closed)
        # A migrator that was interrupted, or whose connection broke, has not failed: another replica may run it.
        return "killed" if is_cut or not isinstance(error, Exception) else "failed"

    def _schema(self) -> str:
        (schema,) = self._ask("SELECT current_schema()")
        if schema is None:
            raise InvalidArgument(
                "Nothing was migrated: no schema of the search_path exists. Create the schema, or change search_path "
                f"in the OPTIONS of database {self.connection.alias!r}."
            )
        return str(schema)

    def _ask(self, statement: str) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()


def _sqlstate(error: BaseException | None) -> str:
    """Return the SQLSTATE of the driver's error that has led to this one, or an empty text."""
    while error is not None:
        state = getattr(error, "sqlstate", None)
        if isinstance(state, str):
            return state
        error = error.__cause__
    return ""


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"


def _in_tests() -> bool:
    """Return whether Django's test environment is set up: it migrates a database of its own for each process."""
    # Not imported here: Django's test tools take longer to import than everything else at the head.
    tools = sys.modules.get("django.test.utils")
    return tools is not None and hasattr(tools._TestState, "saved_data")
