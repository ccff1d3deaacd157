"""Tell the sessions of dblock's own clients from those of the function that is proved.

A session is known by the process ID of its backend, which is noted when a client opens the session. The name of a
session shows nothing, because the function may give its own sessions any name.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from dblock._runtime import fork_safe_connection, target


@contextmanager
def noting_own_sessions() -> Iterator[set[int]]:
    """Yield a set that gets the process ID of each session that a client opens during the block."""
    own: set[int] = set()
    steps, detached = fork_safe_connection._steps, target._detached

    def noted_steps(opening: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        connection = yield from steps(opening)
        own.add(connection.info.backend_pid)
        return connection

    def noted_detached(pool: Any) -> Any:
        connection = detached(pool)
        own.add(connection.info.backend_pid)
        return connection

    fork_safe_connection._steps, target._detached = noted_steps, noted_detached
    try:
        yield own
    finally:
        fork_safe_connection._steps, target._detached = steps, detached


class FirstConnection:
    """Counts the first connection of an engine as one of dblock's own.

    Over that connection, SQLAlchemy asks for the version and the settings of the server. These are no statements of the
    function.
    """

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._is_next = True

    def note(self, connection: Any) -> Any:
        """Return a connection that was just opened."""
        if self._is_next:
            self._is_next = False
            self._own.add(connection.info.backend_pid)
        return connection
