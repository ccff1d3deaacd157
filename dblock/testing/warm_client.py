"""A client that stays open between tests, because opening a client takes longer than most tests.

Each test gets the client without leases, and with all its rows deleted. If a test leaves something behind, closes the
client or uses chaos, the next test gets a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from dblock.client import Client
from dblock.observability import ObservedHold, ObservedWait, Observer
from dblock.testing import leaks
from dblock.testing.client_clock import ClientClock
from dblock.testing.private_database import WARM_NAME, PrivateDatabase


class ForwardingObserver(Observer):
    """Reports to the watch of the current test."""

    def wait_began(self, wait: ObservedWait) -> None:
        if leaks.current is not None:
            leaks.current.wait_began(wait)

    def wait_ended(self, wait: ObservedWait) -> None:
        if leaks.current is not None:
            leaks.current.wait_ended(wait)

    def hold_began(self, hold: ObservedHold) -> None:
        if leaks.current is not None:
            leaks.current.hold_began(hold)

    def hold_ended(self, hold: ObservedHold) -> None:
        if leaks.current is not None:
            leaks.current.hold_ended(hold)


class WarmClient:
    """Keeps one client of a database open."""

    def __init__(self, database: PrivateDatabase) -> None:
        self._database = database
        self._client: Client | None = None

    def lend(self, watch: leaks.Watch) -> Client:
        """Return an open client, and let the watch know of it."""
        from psycopg.conninfo import make_conninfo

        if self._client is None:
            # Under a name of its own, so that its sessions are not taken for those of a client that a test has left.
            dsn = make_conninfo(self._database.dsn, application_name=WARM_NAME)
            with leaks.unwatched():
                self._client = Client(dsn, schema=self._database.schema, observers=[ForwardingObserver()])
            self._client._runtime.flows.clock = ClientClock()
        watch.lent.append(self._client)
        return self._client

    def take_back(self, watch: leaks.Watch) -> None:
        """Keep the client for the next test, or close it if this one has disturbed it."""
        client = self._client
        if client is not None and (watch.left or watch.disturbed or client._runtime.closed):
            self.close()

    def close(self) -> list[int]:
        """Close the client, and return the backends of its sessions."""
        client, self._client = self._client, None
        if client is None:
            return []
        backends = backends_of(client)
        leaks.close(client)
        return backends


def listening_backend(client: Any) -> list[int]:
    """Return the backend of the connection over which a client is woken, if there is one."""
    listener = getattr(client._runtime, "listener", None)
    raw = listener.flow.connection if listener is not None else None
    return [] if raw is None else [raw.connection.info.backend_pid]


def backends_of(client: Any) -> list[int]:
    """Return the backends of a client's connections, without those that a call uses at this moment."""
    runtime = client._runtime
    found = listening_backend(client)
    for runner in (runtime.runner, getattr(runtime.listener, "_keepalive_runner", None)):
        pool = getattr(runner, "_pool", None)
        if pool is not None:
            found += [raw.connection.info.backend_pid for raw in pool._idle]
    return found


def threads_of(clients: Sequence[Any]) -> set[threading.Thread]:
    """Return the threads that these clients keep."""
    found = set()
    for client in clients:
        for part in ("keepalive", "listener", "callbacks"):
            thread = getattr(getattr(client._runtime, part, None), "_thread", None)
            if thread is not None:
                found.add(thread)
    return found
