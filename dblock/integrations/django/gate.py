"""The gate around Django's migrations.

Django's executor asks for its plan once the command line is understood. If the plan has steps, the executor enters the
gate, loads again what is applied, and plans again: another replica may have done the work in between.

While the gate is open, every session of the migrated database carries the session contract, and every transaction
proves the lease before its first statement. Django records a migration outside the transaction of its DDL whenever SQL
was deferred. Behind the gate both commit together, so that no replica finds DDL without its record.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, transaction
from django.db.backends.signals import connection_created
from django.db.migrations.executor import MigrationExecutor

from dblock.admin.schema import install
from dblock.recipes.migrations.contract import DEFAULT_TTL, LOCK_TIMEOUT, session_settings
from dblock.recipes.migrations.gate import Gate
from dblock.recipes.migrations.turn import Plan

logger = logging.getLogger("dblock")

OPTIONS: dict[str, Any] = {
    "enabled": True,
    "name": None,
    "dsn": None,
    "listen_dsn": None,
    "schema": "dblock",
    "ttl": DEFAULT_TTL,
    "timeout": None,
    "attempts": 1,
    "lock_timeout": LOCK_TIMEOUT,
    "retries": 10,
}
"""The setting DBLOCK_MIGRATE, with its defaults."""

RETRIED = ("55P03", "40P01")
"""lock_not_available and deadlock_detected: another transaction was in the way, and the migration is rolled back."""

_active: ContextVar[MigrationGate | None] = ContextVar("dblock_migration_gate", default=None)


def gate_for(alias: str) -> MigrationGate | None:
    """Return the gate for a database; None if it is not Postgres, is a test database, or the gate is switched off."""
    connection: Any = connections[alias]
    given = getattr(settings, "DBLOCK_MIGRATE", {})
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise ImproperlyConfigured(
            f"DBLOCK_MIGRATE has no setting {', '.join(map(repr, unknown))}. It takes: {', '.join(OPTIONS)}."
        )
    options = OPTIONS | given
    if not options["enabled"] or connection.vendor != "postgresql" or _in_tests():
        return None
    return MigrationGate(connection, options)


class MigrationGate:
    """One run of `migrate` on one database."""

    def __init__(self, connection: Any, options: dict[str, Any]) -> None:
        self._connection = connection
        self._options = options
        self._gate: Gate | None = None
        self._looked = False

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
            self._leave("failed" if isinstance(error, Exception) else "killed", f"{type(error).__name__}: {error}")
            raise
        else:
            self._leave("succeeded")
        finally:
            _active.reset(before)

    def enter(self, version: str | None = None, is_done: Callable[[], bool] = lambda: False) -> None:
        """Wait for the turn, and put the contract on the connection."""
        if self._looked:
            return
        self._looked = True
        options = self._options
        dsn = options["dsn"] or _conninfo(self._connection)
        install(dsn, options["schema"])
        plan = Plan(
            options["name"] or f"django:{self._schema()}",
            version,
            migrator="django",
            attempts=options["attempts"],
            ttl=options["ttl"],
            timeout=options["timeout"],
            ledger_decides=False,
        )
        gate = Gate(
            dsn,
            plan,
            schema=options["schema"],
            listen_dsn=options["listen_dsn"],
            look=lambda: (is_done(), None),
        )
        if gate.enter():
            self._gate = gate
            connection_created.connect(self._contract_on_new_session, dispatch_uid=self)
            self._connection.execute_wrappers.append(self._prove_first)
            self._put_contract()

    def note(self, revision: str) -> None:
        """Record how far the run has come."""
        if self._gate is not None:
            self._gate.note_revision(revision)

    def retrying(self, apply: Callable[[], Any]) -> Any:
        """Apply one migration in a transaction. Retry it if another transaction was in the way."""
        tries = 0
        while True:
            try:
                with transaction.atomic(using=self._connection.alias):
                    return apply()
            except OperationalError as error:
                tries += 1
                state = getattr(error.__cause__, "sqlstate", None) or getattr(error.__cause__, "pgcode", None)
                if state not in RETRIED or tries >= self._options["retries"] or self._connection.in_atomic_block:
                    raise
                pause = min(2.0**tries, 60.0)
                logger.warning("migration was in the way of other work; trying again in %g s: %s", pause, error)
                time.sleep(pause)

    def _leave(self, outcome: str, error: str | None = None) -> None:
        gate, self._gate = self._gate, None
        if gate is None:
            return
        connection_created.disconnect(self._contract_on_new_session, dispatch_uid=self)
        self._connection.execute_wrappers.remove(self._prove_first)
        try:
            gate.leave(outcome, error)
        finally:
            with contextlib.suppress(Exception):
                self._take_contract_off(gate)

    def _prove_first(self, execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Prove the lease before the first statement of a transaction, and before each one outside of transactions."""
        gate = self._gate
        raw = self._connection.connection
        if gate is not None and raw is not None and raw.info.transaction_status == 0:
            in_transaction = not self._connection.get_autocommit()
            with raw.cursor() as cursor:
                if in_transaction:
                    cursor.execute(f"SET LOCAL lock_timeout = '{int(self._options['lock_timeout'] * 1000)}ms'")
                is_local = str(in_transaction).lower()
                cursor.execute(f"SELECT {gate.proof}, set_config('fenced_store.token', '{gate.token}', {is_local})")
                if cursor.fetchone()[0] is not True:
                    raise gate.lost()
        return execute(sql, params, many, context)

    def _contract_on_new_session(self, sender: Any, connection: Any, **rest: Any) -> None:
        if connection is self._connection:
            self._put_contract()

    def _put_contract(self) -> None:
        assert self._gate is not None
        self._connection.ensure_connection()
        with self._connection.connection.cursor() as cursor:
            for name, value in session_settings(self._gate.mark, self._gate.plan.ttl).items():
                cursor.execute(f"SET {name} = '{value}'")

    def _take_contract_off(self, gate: Gate) -> None:
        raw = self._connection.connection
        if raw is not None and raw.info.transaction_status == 0:
            with raw.cursor() as cursor:
                for name in (*session_settings(gate.mark, gate.plan.ttl), "fenced_store.token"):
                    cursor.execute(f"RESET {name}")

    def _schema(self) -> str:
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT current_schema()")
            return str(cursor.fetchone()[0])


class GatedExecutor(MigrationExecutor):
    """Django's executor, which enters the gate of the running `migrate` before it applies anything."""

    def migration_plan(self, targets: Any, clean_start: bool = False) -> Any:
        """Return the plan. If it has steps, wait for the turn first and plan again."""
        plan = super().migration_plan(targets, clean_start)
        gate = _active.get()
        if gate is None or clean_start or not plan:
            return plan

        def is_done() -> bool:
            nonlocal plan
            self.loader.build_graph()
            plan = MigrationExecutor.migration_plan(self, targets, clean_start)
            return not plan

        gate.enter(_version(self), is_done)
        return plan

    def apply_migration(self, state: Any, migration: Any, fake: bool = False, fake_initial: bool = False) -> Any:
        """Apply a migration and record it in one transaction, and retry it if it was in the way."""
        gate = _active.get()
        if gate is None or not gate.is_open:
            return super().apply_migration(state, migration, fake, fake_initial)
        gate.note(f"{migration.app_label}.{migration.name}")
        if not migration.atomic:
            return super().apply_migration(state, migration, fake, fake_initial)
        apply = super().apply_migration
        return gate.retrying(lambda: apply(state.clone(), migration, fake, fake_initial))

    def unapply_migration(self, state: Any, migration: Any, fake: bool = False) -> Any:
        """Unapply a migration and remove its record in one transaction, and retry it if it was in the way."""
        gate = _active.get()
        if gate is None or not gate.is_open:
            return super().unapply_migration(state, migration, fake)
        gate.note(f"{migration.app_label}.{migration.name}, backwards")
        if not migration.atomic:
            return super().unapply_migration(state, migration, fake)
        unapply = super().unapply_migration
        return gate.retrying(lambda: unapply(state.clone(), migration, fake))


def _version(executor: MigrationExecutor) -> str:
    """Name what the code wants: the newest migration of each app, as a short hash."""
    leaves = ",".join(f"{app}.{name}" for app, name in sorted(executor.loader.graph.leaf_nodes()))
    return hashlib.sha256(leaves.encode()).hexdigest()[:16]


def _conninfo(connection: Any) -> str:
    """Return libpq's connection string for the database of a Django connection."""
    from psycopg.conninfo import make_conninfo

    given = dict(connection.get_connection_params())
    names = ("dbname", "user", "password", "host", "port", "service", "passfile", "options")
    wanted = {name: given[name] for name in names if given.get(name)}
    wanted |= {name: value for name, value in given.items() if name.startswith("ssl") and isinstance(value, str)}
    return make_conninfo("", **wanted)


def _in_tests() -> bool:
    """Return whether Django's test environment is set up: it migrates a database of its own for each process."""
    from django.test.utils import _TestState

    return hasattr(_TestState, "saved_data")
