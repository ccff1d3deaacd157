"""Connections that the plugin's AsyncClients take over from each other.

An AsyncClient belongs to one event loop, and most tests have their own loop, so each test needs a new client. A
connection belongs to no loop. Without this module, a short test would spend most of its time on opening connections,
and on the first call over each, for which the server reads its catalog and compiles dblock's functions.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from dblock._runtime.forks import call_after_fork
from dblock._runtime.target import Target
from dblock.testing.private_database import WARM_NAME

MOST = 4
"""How many idle connections of each kind are kept."""

KEEPALIVE_ENDS_WITHIN = 0.5

FORGET = "DEALLOCATE ALL"
"""Forgets what the last client has prepared, and keeps what the server has compiled."""


class WarmConnections(Target):
    """A database whose idle connections outlive their client."""

    closes_with_loop = False

    def __init__(self, dsn: str) -> None:
        # Under a name of its own, so that its sessions are not taken for those of a client that a test has left.
        super().__init__(make_conninfo(dsn, application_name=WARM_NAME))
        self._for_threads: list[psycopg.Connection[Any]] = []
        self._for_tasks: list[psycopg.AsyncConnection[Any]] = []
        call_after_fork(self)

    def connect(self) -> psycopg.Connection[Any]:
        """Return a connection of an earlier client, or open one."""
        while self._for_threads:
            connection = self._for_threads.pop()
            try:
                connection.execute(FORGET, prepare=False)
                return connection
            except psycopg.Error:  # the server has ended its session
                connection.close()
        return super().connect()

    async def connect_async(self) -> psycopg.AsyncConnection[Any]:
        """Return an asynchronous connection of an earlier client, or open one."""
        while self._for_tasks:
            connection = self._for_tasks.pop()
            try:
                await connection.execute(FORGET, prepare=False)
                return connection
            except psycopg.Error:
                await connection.close()
        return await super().connect_async()

    def take_back(self, client: Any) -> None:
        """Take the idle connections of a client that is about to be closed."""
        runtime = client._runtime
        if runtime.runner is None:
            return  # never used, or closed by the test
        # The keep-alive may be opening a connection, or about to.
        runtime.keepalive.close()
        if runtime.keepalive.running:
            runtime.keepalive._thread.join(KEEPALIVE_ENDS_WITHIN)
        for raw in runtime.runner._pool._drain():
            _keep(self._for_tasks, raw)
        pool = runtime._parts.keepalive_runner._pool
        with pool._lock:
            idle = pool._drain()
        for raw in idle:
            _keep(self._for_threads, raw)

    def close(self) -> list[int]:
        """Close the connections that no client uses, and return the backends of their sessions."""
        backends = []
        for connection in (*self._for_threads, *self._for_tasks):
            backends.append(connection.info.backend_pid)
            connection.pgconn.finish()
        self.reset_after_fork()
        return backends

    def reset_after_fork(self) -> None:
        """Forget the connections, which belong to the parent."""
        self._for_threads, self._for_tasks = [], []


def _keep(kept: list[Any], raw: Any) -> None:
    if len(kept) < MOST:
        kept.append(raw.connection)
    else:
        raw.close()
