"""The chaos verbs on a database in memory.

They have the names and the meaning of those on Postgres (`dblock.testing.chaos`). A memory client has no connections,
so `cut_listener` and `kill_backend` end none, and return 0.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from psycopg import errors as pg

from dblock._core.effects import Call
from dblock._core.lease_state import LeaseState
from dblock._core.options import Seconds, brief, check_name, check_seconds
from dblock._runtime.error_mapping import translate
from dblock.errors import InvalidArgument
from dblock.lease import Lease
from dblock.testing.chaos_verbs import check_delay, check_sqlstate, state_of
from dblock.testing.memory.client import MemoryClient
from dblock.testing.memory.client_clock import MemoryClientClock
from dblock.testing.memory.database import MemoryDatabase


class MemoryChaos:
    """The verbs for all clients of a database in memory. As a context manager it undoes them at the end."""

    def __init__(self, database: MemoryDatabase) -> None:
        if not isinstance(database, MemoryDatabase):
            raise InvalidArgument(
                f"MemoryChaos takes a MemoryDatabase, which is client.database; got {brief(database)}."
            )
        self._database = database
        self._frozen: dict[LeaseState, tuple[bool, Any]] = {}
        """The frozen leases: whether each was kept alive before, and the runtime of its client."""
        self._thief: MemoryClient | None = None
        self._stolen: list[Lease] = []
        self._sqlstate: str | None = None
        self._slower = 0.0

    def freeze(self, lease: Any) -> None:
        """Freeze the holder. Until `thaw`, its lease is not renewed, and it learns of no loss.

        The clock of its client stops, so the client renews no other lease either, and none of its waits times out.
        """
        state = self._state_of(lease)
        if state not in self._frozen:
            _clock(state).stop()
            self._frozen[state] = state.keep_alive, lease._runtime
            state.change_ttl(state.ttl, keep_alive=False)

    def thaw(self, lease: Any) -> None:
        """Let a frozen holder continue. It finds out at once whether it still holds the lock."""
        state = self._state_of(lease)
        if state not in self._frozen:
            return
        kept_alive, runtime = self._frozen.pop(state)
        state.change_ttl(state.ttl, keep_alive=kept_alive)
        if not any(other.now is state.now for other in self._frozen):
            _clock(state).resume()
        store = self._database.store
        row = store.tables.rows.get(state.name)
        is_ours = row is not None and row.token == state.token and row.expires_at > -math.inf
        if row is None or not is_ours or row.expires_at <= store.now():
            state.renewal_refused("expired" if is_ours else "superseded")
        runtime.check_now()
        self._database.clock.run_due()

    def expire(self, lease: Any) -> None:
        """Let the ttl of a lease pass. Its holder finds out at once, unless it is frozen."""
        state = self._state_of(lease)
        store = self._database.store
        row = store.tables.rows.get(state.name)
        if row is not None and row.token == state.token and row.expires_at > store.now():
            row.expires_at = store.now()
        if state not in self._frozen:
            state.renewal_refused("expired")
        self._database.wake(state.lock)
        self._database.clock.run_due()

    def steal(self, name: str) -> Lease:
        """Take a lock from its holder, past all waiters, and return the lease of the thief.

        The holder learns of it with its next renewal, as in production.
        """
        check_name(name)
        if self._thief is None:
            self._thief = MemoryClient(self._database, holder="chaos")
        store = self._database.store
        row = store.tables.rows.get(name)
        if row is not None:
            store.force_release(name, row.token, now=True)
        lease = self._thief.lock(name, fair=False, timeout=10).acquire()
        self._stolen.append(lease)  # it would be released if the test did not keep it
        return lease

    def cut_listener(self) -> int:
        """Return 0: there are no connections in memory."""
        return 0

    def kill_backend(self) -> int:
        """Return 0: there are no connections in memory."""
        return 0

    def deny(self, sqlstate: str) -> None:
        """Refuse every call with this SQLSTATE, until `allow`."""
        check_sqlstate(sqlstate)
        self._sqlstate = sqlstate
        self._database.intercept = self._before_each

    def slow(self, ms: float) -> None:
        """Let every call take so many milliseconds of the clock, until `slow(0)`."""
        check_delay(ms)
        self._slower = ms / 1000
        self._database.intercept = self._before_each

    def allow(self) -> None:
        """End `deny` and `slow`."""
        self._sqlstate, self._slower = None, 0.0
        self._database.intercept = None

    def step_clock(self, seconds: Seconds) -> None:
        """Move the database's clock forward, or back if negative. The clients' clock stays."""
        self._database.step += check_seconds("step of the clock", seconds)
        self._database.wake_all()
        self._database.clock.run_due()

    def undo(self) -> None:
        """Undo every verb whose effect lasts."""
        self.allow()
        self._database.step = 0.0
        for state in list(self._frozen):
            self.thaw(state)
        if self._thief is not None:
            self._thief.close()  # releases what it has stolen
            self._thief = None
            self._stolen.clear()

    def _state_of(self, lease: Any) -> LeaseState:
        state = state_of(lease)
        if not isinstance(state.now, MemoryClientClock) or state.now.clock is not self._database.clock:
            raise InvalidArgument(
                f"The lease of lock {state.lock!r} is not one of this database. Use MemoryChaos(client.database) with "
                "its own client, or the fixture chaos for a client of Postgres."
            )
        return state

    def _before_each(self, call: Call) -> None:
        self._database.clock.pass_unnoticed(self._slower)
        if self._sqlstate is not None:
            try:
                kind = pg.lookup(self._sqlstate)
            except KeyError:
                kind = pg.Error
            raise translate(kind("denied by a test"), "dblock")

    def __enter__(self) -> MemoryChaos:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _clock(state: LeaseState) -> MemoryClientClock:
    assert isinstance(state.now, MemoryClientClock)
    return state.now
