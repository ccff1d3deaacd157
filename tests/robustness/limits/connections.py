"""Hold leases while other clients take all connections: leases stay held, and new clients get a clear error.

Each connection of a client is then cut too, and other clients take its slot at once, so that the client cannot
reconnect until there is a free connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg

import dblock
from tests.robustness.limits import Failure, Measured, Progress, ms
from tests.robustness.limits.clients import prepare_application
from tests.support.eventually import eventually
from tests.support.servers import private_server

ROOM = 20
LISTENER = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND pid = ANY (%s)"
KEEPALIVE = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%%renew_all%%' AND pid = ANY (%s)"


class ConnectionHog:
    """Take every connection, and each one that becomes free, until the block ends."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._taken: list[psycopg.Connection[Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.full = threading.Event()
        self._pause = 0.05

    def take_at_once(self) -> None:
        """From now on, take a free connection before any other client can."""
        # Only when it matters, because each attempt costs the server a process.
        before, self._pause = self._pause, 0.002
        time.sleep(2 * before)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._taken.append(psycopg.connect(self._dsn))
            except psycopg.OperationalError:
                self.full.set()
                self._stop.wait(self._pause)

    def __enter__(self) -> ConnectionHog:
        self._thread.start()
        assert self.full.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self._taken:
            connection.close()


def measure(ttl: float = 2.0, progress: Progress = lambda _: None) -> Measured:
    """Hold leases through a period without a single free connection."""
    found = Measured(f"No connection left (max_connections = {ROOM}), ttl {ttl:g} s")
    with ExitStack() as stack:
        server = stack.enter_context(private_server({"max_connections": str(ROOM)}, in_memory=True))
        dsn = prepare_application(server.url)
        owner = stack.enter_context(psycopg.connect(server.url, autocommit=True))
        # With a grace that is long enough for a client on a busy machine to report that it is alive.
        holder = stack.enter_context(dblock.Client(dsn, holder="holder", patience=2.0, presence=2.0))
        kept = holder.lock("kept", ttl=ttl).acquire()
        handed = holder.lock("handed", ttl=ttl).acquire()
        eventually(lambda: len(_sessions(owner)) == 3, "the holder has its connections")
        own = _sessions(owner)
        waiter = stack.enter_context(dblock.Client(dsn, holder="waiter", patience=2.0))
        with _waiting(waiter, "handed", ttl) as leases:
            eventually(holder.lock("handed").queue, "the waiter is queued")
            eventually(lambda: len(_sessions(owner)) == 5, "the waiter listens")
            with ConnectionHog(dsn) as hog:
                progress("no connection left")
                time.sleep(3 * ttl)
                found.claims["leases are still renewed"] = not kept.lost.is_set() and not handed.lost.is_set()
                found.figures["error of a new client"] = _error_of_new_client(dsn)
                found.claims["a new client's error is clear"] = "slots" in _error_of_new_client(
                    dsn
                ) or "many" in _error_of_new_client(dsn)
                began = time.monotonic()
                handed.release()
                eventually(lambda: leases, "the waiter is woken")
                found.figures["a release wakes the next waiter"] = f"after {ms(time.monotonic() - began)}"
                again = holder.lock("again", ttl=ttl).acquire(timeout=1)
                found.claims["a client with connections still acquires locks"] = again.release()
                time.sleep(2 * ttl)
                found.claims[
                    "a lease granted during that time is renewed too, although its keep-alive cannot connect"
                ] = not leases[0].lost.is_set()
                progress("the listener is cut off too")
                hog.take_at_once()
                _cut(owner, LISTENER, own)
                time.sleep(2 * ttl)
                found.claims["a client whose listener is cut off keeps its leases"] = not kept.lost.is_set()
                progress("the keep-alive is cut off too")
                _cut(owner, KEEPALIVE, own)
                time.sleep(2 * ttl)
                found.claims["a client whose keep-alive is cut off keeps its leases"] = not kept.lost.is_set()
                if kept.lost.is_set():
                    found.figures["a client whose keep-alive is cut off"] = f"loses its leases: {kept.lost.reason}"
            progress("there are free connections again")
            newcomer = stack.enter_context(dblock.Client(dsn, holder="newcomer"))
            began = time.monotonic()
            eventually(lambda: _takes(newcomer), "a new client has a lock")
            found.figures["a new client has a lock once there is room"] = f"after {ms(time.monotonic() - began)}"
            later = holder.lock("later", ttl=ttl).acquire(timeout=5)
            time.sleep(2 * ttl)
            found.claims["afterwards leases are renewed as before"] = not later.lost.is_set()
    found.failures.append(
        Failure(
            "max_connections, taken by other clients",
            "new clients get an error at once",
            f"`{found.figures['error of a new client']}`",
        )
    )
    return found


def _sessions(owner: psycopg.Connection[Any]) -> list[int]:
    return [pid for (pid,) in owner.execute("SELECT pid FROM pg_stat_activity WHERE usename = 'app'").fetchall()]


def _cut(owner: psycopg.Connection[Any], which: str, own: list[int]) -> None:
    """Terminate one session of a client. Other clients take its slot before it can reconnect."""
    rows = owner.execute(which, [own]).fetchall()
    assert len(rows) == 1, rows
    owner.execute("SELECT pg_terminate_backend(%s, 1000)", rows[0])


@contextmanager
def _waiting(client: dblock.Client, name: str, ttl: float) -> Iterator[list[dblock.Lease]]:
    """Wait for a lock in a thread; the yielded list has the lease once it is granted."""
    leases: list[dblock.Lease] = []
    thread = threading.Thread(target=lambda: leases.append(client.lock(name, ttl=ttl).acquire(timeout=120)))
    thread.start()
    try:
        yield leases
    finally:
        thread.join()


def _error_of_new_client(dsn: str) -> str:
    with dblock.Client(dsn) as client:
        return _error(lambda: client.lock("new").try_acquire())


def _takes(client: dblock.Client) -> bool:
    return not _error(lambda: client.lock("new").acquire(timeout=1).release())


def _error(act: Callable[[], object]) -> str:
    try:
        act()
    except dblock.DatabaseError as error:
        return f"{type(error).__name__}: {error}"
    return ""
