"""The one connection that an examination goes over.

Guarantee: nobody waits for an answer for longer than SILENCE. The server's own limits end what takes too long there;
where nothing comes at all, the connection is cut off.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psycopg

from dblock._runtime.error_mapping import cleaned
from dblock.errors import Unavailable

if TYPE_CHECKING:
    from dblock._runtime.target import Target

SILENCE = 15.0
"""Seconds without an answer after which the connection is cut off: the server itself would have given up before."""

TICK = 0.1


class Link:
    """A connection that does not hang; use it in a `with`."""

    def __init__(self, target: Target) -> None:
        self._name = f"The database at {target}"
        self.connection = target.connect()
        # Behind a pooler the next statement may run in a session that knows nothing of it.
        self.connection.prepare_threshold = None
        self._gives_up_at: float | None = None
        self._silent = False
        self._over = threading.Event()
        threading.Thread(target=self._callbacks, daemon=True).start()

    def ask(self, sql: bytes, arguments: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Send a statement, with $1, $2, … for the arguments, and return its rows."""
        self._gives_up_at = time.monotonic() + SILENCE
        try:
            with psycopg.RawCursor(self.connection) as cursor:
                cursor.execute(sql, arguments or None)
                return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            if not self._silent:
                raise
            raise Unavailable(f"{self._name} did not answer within {SILENCE:g} s.") from cleaned(error)
        finally:
            self._gives_up_at = None

    def _callbacks(self) -> None:
        while not self._over.wait(TICK):
            gives_up_at = self._gives_up_at
            if gives_up_at is not None and time.monotonic() > gives_up_at:
                self._silent = True
                self._cut()
                return

    def _cut(self) -> None:
        with (
            contextlib.suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(self.connection.fileno())) as link,
        ):
            link.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        # Without a word to a server that may have fallen silent.
        self.connection.close()
