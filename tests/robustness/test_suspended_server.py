"""A server that is suspended: it is stopped for a while, all its sessions are dropped, and then it is back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core import clock
from dblock.embedded import Server
from tests.support.eventually import eventually
from tests.support.machine import measured, soon
from tests.support.timings import timings_with

pytestmark = [pytest.mark.timeout(240), pytest.mark.second_stage]

MOST_LINES = 24
"""Lines of the log for an outage of any length: each kind of message once at its begin, some once more at its end."""


class Sampled:
    """Reads a lease until it is lost, and remembers when it was last believed."""

    def __init__(self, lease: Any) -> None:
        self._lease = lease
        self.believed_at = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            asked_at = clock.now()  # before the reply, so that it is no later than what the reply is about
            if self._lease.remaining() <= 0:
                break
            self.believed_at = asked_at
            time.sleep(0.005)


def waiter(client: dblock.Client, stop: threading.Event, granted: list[float]) -> threading.Thread:
    """Wait for the lock as an application does: again after each outage."""

    def wait() -> None:
        while not stop.is_set():
            try:
                with client.lock("a", timeout=60):
                    granted.append(time.monotonic())
                    return
            except dblock.Unavailable:
                continue

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("presence", [0.15, None])
@pytest.mark.parametrize("seconds", [4, *(pytest.param(long, marks=pytest.mark.nightly) for long in (12, 60))])
def test_suspended_server_is_survived(
    own_server: Server, seconds: int, presence: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    ttl, threads = 3.0, set(threading.enumerate())
    with (
        dblock.Client(own_server.url, presence=presence) as holder,
        dblock.Client(own_server.url, presence=presence) as other,
        contextlib.ExitStack() as ending,
    ):
        short, long = holder.lock("short", ttl=ttl).acquire(), holder.lock("a", ttl=300, keep_alive=False).acquire()
        stop, granted = threading.Event(), list[float]()
        waiting = waiter(other, stop, granted)
        eventually(holder.lock("a").queue, "a waiter")
        caplog.set_level(logging.INFO, "dblock")
        caplog.clear()
        sampled = Sampled(short)
        own_server.stop()
        stopped = clock.now()
        time.sleep(seconds)
        assert sampled.believed_at < stopped + ttl, "the lease was believed for longer than its ttl"
        assert short.lost.is_set()
        lateness = ending.enter_context(measured())
        own_server.start()
        back = time.monotonic()
        while True:
            try:
                with psycopg.connect(own_server.url) as owner:
                    if owner.execute("SELECT 1 FROM dblock.lock_tickets").fetchone():
                        break
            except psycopg.OperationalError:
                back = time.monotonic()
            assert time.monotonic() < back + 10
            time.sleep(0.01)
        assert time.monotonic() - back < 1 + lateness(), "the waiter was slow to queue again"
        if not long.release():
            assert presence is not None
            with psycopg.connect(own_server.url, autocommit=True) as owner:
                owner.execute("UPDATE dblock.distributed_locks SET expires_at = '-infinity', released_at = now()")
        waiting.join(10)
        assert granted
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) <= MOST_LINES, lines
    eventually(lambda: not set(threading.enumerate()) - threads, "the end of all threads")
    with psycopg.connect(own_server.url, autocommit=True) as owner:
        sessions = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'dblock'"
        eventually(lambda: not owner.execute(sessions).fetchone(), "the end of all sessions")


def test_idle_client_without_presence_sends_nothing(dsn: str, owner: psycopg.Connection) -> None:
    """A server that suspends itself when it is idle can do so. The listener has no connection until it is needed."""
    timings = timings_with(listen_for=0.5, ping_interval=0.2)

    def sessions() -> list[Any]:
        return owner.execute(
            "SELECT pid, query_start FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            " ORDER BY pid"
        ).fetchall()

    def connection() -> Any:
        listener = client._runtime.listener
        return listener and listener.flow.connection

    with (
        dblock.Client(dsn, presence=None, timings=timings) as client,
        dblock.Client(dsn, presence=None, timings=timings) as other,
    ):
        for _ in range(2):
            held = other.lock("a").acquire()
            waiting = threading.Thread(target=lambda: client.lock("a").acquire(timeout=60).release())
            waiting.start()
            session = eventually(connection, "the listener's connection").connection.info.backend_pid
            held.release()
            waiting.join()
            with soon(5):
                eventually(lambda: not connection(), "the end of the listener's connection")
            eventually(lambda session=session: session not in dict(sessions()), "the end of its session")  # type: ignore[misc]
            before = sessions()
            time.sleep(1)
            assert sessions() == before
