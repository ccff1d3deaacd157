"""One replica's turn: check without a lock, wait, end stale sessions, check again, run, record, release.

Guarantee: `take` returns True only while this replica holds the lock, no session of an earlier grant is left, and the
ledger has recorded that this replica's run has begun. A replica that waits holds no snapshot, so that CREATE INDEX
CONCURRENTLY does not wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType

from psycopg.conninfo import make_conninfo

from dblock._core.options import DEFAULT_PRESENCE
from dblock._runtime.target import resolve
from dblock.admin import schema as installation
from dblock.admin.install_locks import one_first_install
from dblock.admin.migration_ledger import MigrationLedger, MigrationState
from dblock.client import Client
from dblock.errors import (
    AccessDenied,
    DatabaseAhead,
    DblockError,
    InvalidArgument,
    LeaseLost,
    MigrationFailed,
    SchemaMissing,
    SessionsRemain,
    Unavailable,
)
from dblock.lease import Lease
from dblock.recipes.migrations.contract import DEFAULT_TTL, MAX_TTL, MIN_TTL

logger = logging.getLogger("dblock")

WATCH_INTERVAL = 0.5
"""Seconds between two looks for sessions that have become stale."""


@dataclass(frozen=True)
class Plan:
    """What a replica wants to run."""

    name: str
    """The lock: one for all replicas that share what is migrated."""
    version: str | None = None
    """The version to migrate to. The ledger records successes and failures under it."""
    migrator: str = "unknown"
    attempts: int = 1
    """How often this version may fail in all, over all replicas."""
    ttl: float = DEFAULT_TTL
    timeout: float | None = None
    """How long to wait for the lock; None waits without end."""
    when_ahead: str = "fail"
    ledger_decides: bool = True
    """Whether a version that has succeeded once is done. If not, `is_done` alone decides, under the lock."""

    def __post_init__(self) -> None:
        if not MIN_TTL <= self.ttl <= MAX_TTL:
            raise InvalidArgument(f"The ttl of a migration is from {MIN_TTL:g} s to a day; got {self.ttl:g} s.")
        if self.version == "":
            # An unset variable in a script would make every deployment the same version.
            raise InvalidArgument("The version of a migration is empty. Name a version, or leave it out.")
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise InvalidArgument(f"A migration takes a number of attempts from 1; got {self.attempts!r}.")
        if self.when_ahead not in ("fail", "ok"):
            raise InvalidArgument(f"when_ahead is 'fail' or 'ok'; got {self.when_ahead!r}.")


class Turn:
    """One replica's turn. Use it in a `with`, which releases the lock and closes the connections."""

    def __init__(
        self,
        dsn: str,
        plan: Plan,
        *,
        schema: str = "dblock",
        holder: str | None = None,
        listen_dsn: str | None = None,
        keep_alive: bool = True,
        presence: float | None = DEFAULT_PRESENCE,
        is_done: Callable[[], bool] = lambda: False,
        report_wait: Callable[[str], None] = logger.info,
        on_sessions_ended: Callable[[], object] = lambda: None,
    ) -> None:
        """Set what to run. Nothing is opened yet.

        `is_done` is asked before the lock and again under it, in addition to the ledger. `report_wait` gets one message
        if the lock is held. `on_sessions_ended` is called in a thread after stale sessions were ended.
        """
        self.plan = plan
        # A name of its own, whatever PGAPPNAME says: these sessions run no DDL.
        self._target = resolve(make_conninfo(dsn, application_name="dblock"))
        self._schema = schema
        self._keep_alive = keep_alive
        self._is_done = is_done
        self._report_wait = report_wait
        self._on_sessions_ended = on_sessions_ended
        self._ledger = MigrationLedger(self._target, schema)
        self._client = Client(
            self._target.conninfo(), schema=schema, holder=holder, listen_dsn=listen_dsn, presence=presence
        )
        self._lease: Lease | None = None
        self._run: int | None = None
        self._mark: str | None = None
        self.revision: str | None = None
        """Where the run begins, for the ledger. `is_done` may set it."""
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._has_warned = False

    @property
    def lease(self) -> Lease:
        """The lease, after `take` has returned True."""
        assert self._lease is not None
        return self._lease

    @property
    def has_lease(self) -> bool:
        """Whether the lock was granted."""
        return self._lease is not None

    @property
    def has_begun(self) -> bool:
        """Whether a run has begun and has not ended."""
        return self._run is not None

    @property
    def mark(self) -> str:
        """The application_name that every session of this run must carry."""
        assert self._mark is not None
        return self._mark

    @property
    def run(self) -> int:
        """The number of the run in the ledger."""
        assert self._run is not None
        return self._run

    def take(self) -> bool:
        """Wait for the turn. Return True if this replica has to run the migrator, and False if there is nothing to do.

        Raise MigrationFailed if this version has failed as often as it may, DatabaseAhead if a newer one has succeeded,
        LockTimeout if the wait took too long, and SessionsRemain if sessions of an earlier grant cannot be ended. If
        dblock is not installed, install it first.
        """
        plan, ledger = self.plan, self._ledger
        state = self._state_installed()
        if plan.ledger_decides and state.done:
            if state.newer is not None and plan.when_ahead == "fail":
                raise DatabaseAhead(plan.name, plan.version or "", state.newer)
            return False
        if plan.ledger_decides and self._is_done():
            return False
        if state.failures >= plan.attempts:
            raise MigrationFailed(plan.name, plan.version, state.failures, state.error)
        ledger.discard_restored_grant(plan.name)
        self._start_watching()
        self._lease = self._acquired()
        ledger.end_sessions(plan.name, meanwhile=self._renew_early)
        if not plan.ledger_decides and self._is_done():
            return False
        begun = ledger.begin(
            plan.name,
            self._lease.token,
            plan.version,
            migrator=plan.migrator,
            attempts=plan.attempts,
            since=state.asked_at,
            revision=self.revision,
            repeat=not plan.ledger_decides,
        )
        if begun.decision == "lost":
            raise LeaseLost(plan.name, "expired", datetime.now(timezone.utc), self._lease.token)
        if begun.decision == "failed":
            failures = max(ledger.state(plan.name, plan.version).failures, plan.attempts)
            raise MigrationFailed(plan.name, plan.version, failures, begun.error)
        if begun.decision == "done":
            return False
        self._run, self._mark = begun.run, begun.mark
        if plan.ledger_decides and self._is_done():
            self.finish("succeeded")
            return False
        return True

    def note_revision(self, revision: str) -> None:
        """Record how far the run has come. A ledger that cannot be reached does not fail the migration."""
        with contextlib.suppress(DblockError):
            self._ledger.note_revision(self.run, self.lease.token, revision)

    def finish(self, outcome: str, error: str | None = None, revision: str | None = None) -> str:
        """Record how the run ended, and return what the ledger has recorded."""
        recorded = self._ledger.end(self.run, self.lease.token, outcome, error, revision)
        self._run = None
        return recorded

    def end_own_sessions(self) -> None:
        """End the sessions of this run, and wait until they are gone. Any thread may call this."""
        with MigrationLedger(self._target, self._schema) as ledger:
            ledger.end_sessions(self.plan.name, token=self.lease.token)

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._run is not None:
            with contextlib.suppress(DblockError):
                self.finish("killed", None if error is None else f"{type(error).__name__}: {error}")
        self._ledger.close()
        self._client.close()

    def _state_installed(self) -> MigrationState:
        """Return what the ledger knows about the version, after installing dblock if it is missing."""
        with contextlib.suppress(SchemaMissing):
            return self._ledger.state(self.plan.name, self.plan.version)
        try:
            with one_first_install(self._target, self._schema, self._is_installed):
                if not self._is_installed():
                    installation.install(self._target, self._schema)
        except AccessDenied as error:
            raise AccessDenied(
                f"dblock is not installed in schema {self._schema!r} of this database, and this role may not "
                "install it. As a role that may, run: dblock install, and then for this role: dblock grant ROLE."
            ) from error
        return self._ledger.state(self.plan.name, self.plan.version)

    def _is_installed(self) -> bool:
        try:
            self._ledger.state(self.plan.name, self.plan.version)
        except SchemaMissing:
            return False
        return True

    def _acquired(self) -> Lease:
        lock = self._client.lock(
            self.plan.name,
            ttl=self.plan.ttl,
            timeout=self.plan.timeout,
            meta={"migration": self.plan.version, "migrator": self.plan.migrator},
            keep_alive=self._keep_alive,
        )
        lease = lock.try_acquire()
        if lease is not None:
            return lease
        holder = lock.holder()
        by = f", held by {holder.holder}" if holder else ""
        self._report_wait(f"waiting for migration {self.plan.name!r}{by}")
        self._ledger.close()  # a replica that waits keeps no connection that it does not need
        return lock.acquire()

    def _renew_early(self) -> None:
        """Renew a lease of which a third is over: old sessions may take longer to end than a short ttl."""
        if self.lease.remaining() < self.lease.ttl * 2 / 3:
            with contextlib.suppress(Unavailable):
                self.lease.renew()

    def _warn_of_other_roles(self, ledger: MigrationLedger) -> None:
        if self._mark is None or self._has_warned:
            return
        roles = ledger.unreachable_roles(self._mark)
        if roles:
            self._has_warned = True
            logger.warning(
                "migration %r: its sessions run as role %s, which the role of dblock may not end. If this replica "
                "dies, its statements are not ended before the next replica begins. Let dblock connect as that role.",
                *(self.plan.name, ", ".join(roles)),
            )

    def _start_watching(self) -> None:
        self._watcher = threading.Thread(target=self._watch, name="dblock-migration-watch", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        """End stale sessions until the turn is over: those of a holder that is gone, or this replica's after a loss."""
        with MigrationLedger(self._target, self._schema) as ledger:
            while not self._stop.wait(WATCH_INTERVAL):
                try:
                    self._warn_of_other_roles(ledger)
                    ended = ledger.end_sessions(self.plan.name)
                    if ended:
                        logger.warning("migration %r: ended %d sessions of a stale holder", self.plan.name, ended)
                        self._on_sessions_ended()
                except SessionsRemain as error:
                    logger.warning("%s", error)
                except DblockError as error:
                    logger.debug("migration %r: could not look for stale sessions: %s", self.plan.name, error)
