"""The chaos verbs on a real server, for the clients of one test.

Some things cannot be done to a real server, or to a thread. `PostgresChaos` does them in another way:

- The clock of a server cannot be moved. `step_clock` moves all times that dblock has stored the other way instead.
- A server refuses nothing on request, and is not slow on request. `deny` and `slow` send a statement that fails, or
  that sleeps, before each call of a client in this process. The error is the server's own.
- A thread cannot be frozen. `freeze` stops the clock of the lease's client. So the client renews nothing, and its
  trust window does not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from dblock._core.effects import Call, Row
from dblock._core.lease_state import LeaseState
from dblock._core.options import Seconds, check_name, check_seconds, quoted
from dblock._runtime import connection as connections
from dblock.client import Client
from dblock.errors import InvalidArgument
from dblock.lease import Lease
from dblock.testing.chaos_verbs import check_delay, check_sqlstate, state_of
from dblock.testing.client_clock import ClientClock
from dblock.testing.leaks import Watch, close
from dblock.testing.memory.client_clock import MemoryClientClock
from dblock.testing.private_database import PrivateDatabase
from dblock.testing.warm_client import backends_of, listening_backend

TIMES = """
SELECT c.table_name, array_agg(c.column_name::text)
FROM information_schema.columns AS c JOIN information_schema.tables AS t USING (table_schema, table_name)
WHERE c.table_schema = %s AND c.data_type = 'timestamp with time zone' AND t.table_type = 'BASE TABLE'
  AND c.table_name <> 'lock_presence'
GROUP BY 1
"""
"""The columns that hold times. Those of a presence stay, because they tell one start of the server from another."""

SESSIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND application_name LIKE 'dblock%%' AND (%s OR pid = ANY(%s))"
)


STOLEN_WITHIN = 10.0


class PostgresChaos:
    """The verbs on a real server, for the clients of one test."""

    def __init__(self, database: PrivateDatabase, watch: Watch) -> None:
        self._database, self._watch = database, watch
        self._schema = quoted(database.schema)
        self._frozen: dict[LeaseState, bool] = {}
        """The frozen leases, and whether each was kept alive before."""
        self._before_each: list[bytes] = []
        self._originals: Any = None
        self._thief: Client | None = None
        self._stolen: list[Lease] = []
        watch.at_end.append(self.undo)
        watch.disturbed = True

    def freeze(self, lease: Any) -> None:
        """Freeze the holder. Until `thaw`, its lease is not renewed, and it learns of no loss.

        The clock of its client stops, so the client renews no other lease either, and none of its calls times out. The
        lease expires in the database at its deadline. Call `expire` to let it expire at once.
        """
        state = state_of(lease)
        if state not in self._frozen:
            _clock(state)
            self._frozen[state] = state.keep_alive
            state.change_ttl(state.ttl, keep_alive=False)
            _clock(state).stop()

    def thaw(self, lease: Any) -> None:
        """Let a frozen holder continue. It finds out at once whether it still holds the lock."""
        state = state_of(lease)
        if state not in self._frozen:
            return
        state.change_ttl(state.ttl, keep_alive=self._frozen.pop(state))
        row = self._execute(
            "SELECT token = %s, extract(epoch FROM expires_at - clock_timestamp())::float8"
            " FROM {schema}.distributed_locks WHERE name = %s AND expires_at > '-infinity'",
            [state.token, state.name],
        )
        is_ours, left = row[0] if row else (False, 0.0)
        if not any(_clock(other) is _clock(state) for other in self._frozen):
            _clock(state).resume()
        if not is_ours or left <= 0:
            state.renewal_refused("expired" if is_ours else "superseded")

    def expire(self, lease: Any) -> None:
        """Let the ttl of a lease pass. Its holder finds out at once, unless it is frozen."""
        state = state_of(lease)
        _check_real(state)
        self._execute(
            "UPDATE {schema}.distributed_locks SET expires_at = clock_timestamp()"
            " WHERE name = %s AND token = %s AND expires_at > clock_timestamp() RETURNING 1",
            [state.name, state.token],
        )
        if state not in self._frozen:
            state.renewal_refused("expired")
        self._execute("SELECT {schema}.wake_queue(%s)", [state.name])

    def steal(self, name: str) -> Lease:
        """Take a lock from its holder, past all waiters, and return the lease of the thief.

        The holder learns of it with its next renewal, as in production.
        """
        check_name(name)
        if self._thief is None:
            self._thief = Client(self._database.dsn, schema=self._database.schema, holder="chaos")
        thief = self._thief.lock(name, fair=False)
        thief.queue()  # to connect before the lock is free
        until = time.monotonic() + STOLEN_WITHIN
        lease = None
        while lease is None:
            # This wakes the first waiter. If the waiter is faster than the thief, it loses the lock too.
            self._execute(
                "SELECT {schema}.force_release(name, token, 'chaos', 'stolen by a test', true)"
                " FROM {schema}.distributed_locks WHERE name = %s AND expires_at > clock_timestamp()",
                [name],
            )
            lease = thief.try_acquire() if time.monotonic() < until else thief.acquire(timeout=0)
        self._stolen.append(lease)  # it would be released if the test did not keep it
        return lease

    def cut_listener(self) -> int:
        """End the connections over which clients are woken; return how many."""
        return self._end_sessions(False, listening_backend)

    def kill_backend(self) -> int:
        """End all connections of the clients; return how many.

        In a database that others use too, these are the connections that no call uses at this moment.
        """
        return self._end_sessions(self._database.exclusive, backends_of)

    def deny(self, sqlstate: str) -> None:
        """Refuse every call with this SQLSTATE, until `allow`."""
        check_sqlstate(sqlstate)
        refusal = f"DO $$ BEGIN RAISE EXCEPTION 'denied by a test' USING ERRCODE = '{sqlstate}'; END $$"
        self._send_before_each("RAISE", refusal)

    def slow(self, ms: float) -> None:
        """Let every call take so many milliseconds longer, until `slow(0)`."""
        check_delay(ms)
        self._send_before_each("pg_sleep", f"SELECT pg_sleep({ms / 1000:f})" if ms else "")

    def allow(self) -> None:
        """End `deny` and `slow`."""
        if self._originals is not None:
            connections.RawConnection.exchange, connections.RawConnection.call = self._originals  # type: ignore[method-assign]
            self._originals = None
        self._before_each.clear()

    def step_clock(self, seconds: Seconds) -> None:
        """Move the database's clock forward, or back if negative.

        The clock of a real server stays. All times that dblock has stored are moved the other way instead.
        """
        by = check_seconds("step of the clock", seconds)
        parts = []
        for number, (table, columns) in enumerate(self._execute(TIMES, [self._database.schema])):
            moved = ", ".join(f"{quoted(one)} = {quoted(one)} - make_interval(secs => %(by)s)" for one in columns)
            parts.append(f"t{number} AS (UPDATE {{schema}}.{quoted(table)} SET {moved})")
        self._execute(f"WITH {', '.join(parts)} SELECT", {"by": by})
        for (name,) in self._execute("SELECT name FROM {schema}.distributed_locks WHERE waiting", []):
            self._execute("SELECT {schema}.wake_queue(%s)", [name])

    def undo(self) -> None:
        """Undo every verb whose effect lasts."""
        self.allow()
        for state in list(self._frozen):
            self.thaw(state)
        if self._thief is not None:
            close(self._thief)  # releases what it has stolen
            self._thief = None
            self._stolen.clear()

    def _send_before_each(self, kind: str, statement: str) -> None:
        """Send a statement before each call of every client in this process, instead of an earlier one of this kind."""
        self._before_each = [one for one in self._before_each if kind.encode() not in one]
        if statement:
            # Sorted so that pg_sleep comes before the refusal: a call that is denied is slow too.
            self._before_each = sorted([*self._before_each, statement.encode()], reverse=True)
        if self._originals is None:
            original = connections.RawConnection.exchange
            self._originals = original, connections.RawConnection.call

            def exchange(raw: Any, call: Call, within: float) -> Generator[Any, Any, Row | None]:
                until = time.monotonic() + within
                for statement in list(self._before_each):
                    raw._pgconn.send_query(statement)
                    replies = connections._bounded(raw._execute(raw._pgconn), until)
                    connections._checked((yield from replies))
                return (yield from original(raw, call, max(until - time.monotonic(), 0.0)))

            def call(raw: Any, call: Call, within: float) -> Row | None:
                row: Row | None = raw.connection.wait(exchange(raw, call, within), connections.poll_interval(within))
                return row

            connections.RawConnection.exchange = exchange  # type: ignore[method-assign,assignment]
            connections.RawConnection.call = call  # type: ignore[method-assign,assignment]

    def _clients(self) -> list[Any]:
        return [*self._watch.lent, *(client for client, _ in self._watch.clients)]

    def _end_sessions(self, all_of_them: bool, backends: Callable[[Any], list[int]]) -> int:
        pids = [pid for client in self._clients() for pid in backends(client)]
        return len(self._execute(SESSIONS, [all_of_them, pids]))

    def _execute(self, statement: str, parameters: Any) -> list[tuple[Any, ...]]:
        named = statement.replace("{schema}", self._schema.replace("%", "%%"))
        cursor = self._database.connection.execute(named.encode(), parameters)
        return cursor.fetchall() if cursor.description is not None else []


def _clock(state: LeaseState) -> ClientClock:
    _check_real(state)
    if not isinstance(state.now, ClientClock):
        raise InvalidArgument(
            f"The lease of lock {state.lock!r} belongs to a client that was made before the test. Make the client in "
            "the test, or use dblock_client."
        )
    return state.now


def _check_real(state: LeaseState) -> None:
    if isinstance(state.now, MemoryClientClock):
        raise InvalidArgument(
            f"The lease of lock {state.lock!r} is one of a memory client. Use MemoryChaos(client.database) for it."
        )
