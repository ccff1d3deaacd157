"""Connections that are opened in a way that a fork cannot interrupt.

While libpq opens a connection over TCP, it and OpenSSL hold locks of their own, above all for the first one. The child
of a fork at such a moment has these locks, held for ever by a thread that it does not have, and would hang in its own
connection attempt, where no timeout applies. So a fork waits while libpq works. It does not wait for the network.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import psycopg

from dblock._runtime.forks import importing


def _steps(opening: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run psycopg's generator, and keep forks out of each of its steps."""
    ready: Any = None
    while True:
        with importing:
            try:
                state = opening.send(ready)
            except StopIteration as done:
                return done.value
        try:
            ready = yield state
        except BaseException as error:
            with importing:
                opening.throw(error)
            raise


class ForkSafeConnection(psycopg.Connection[Any]):
    """A connection for threads."""

    @classmethod
    def _connect_gen(cls, *args: Any, **options: Any) -> Any:
        return _steps(super()._connect_gen(*args, **options))


class AsyncForkSafeConnection(psycopg.AsyncConnection[Any]):
    """A connection for asyncio."""

    @classmethod
    def _connect_gen(cls, *args: Any, **options: Any) -> Any:
        return _steps(super()._connect_gen(*args, **options))
