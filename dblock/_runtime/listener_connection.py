"""The listener's connection on psycopg, and the translation of its errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg import errors as pg

from dblock._core.listener_failures import ConnectFailed, ConnectionFailed, Failure
from dblock._runtime.connection import ENDS_SESSION, RawConnection, execute_until_fatal
from dblock._runtime.error_mapping import is_overdue
from dblock._runtime.socket_probe import SocketProbe
from dblock._runtime.target import Target

SERVER_STARTING = ("the database system is starting up", "the database system is in recovery mode")
"""What a server that has ended all its sessions replies to new connections."""


class ListenerConnection:
    """One connection of the listener. Notifications that come over it are passed on."""

    def __init__(self, connection: Any, notified: Callable[[str], None], needs_transactions: bool = False) -> None:
        self.connection = connection
        self.raw = RawConnection(connection, prepares=False, execute=execute_until_fatal)
        self.raw.needs_transactions = needs_transactions
        self._ended: psycopg.Error | None = None
        """The server's last message, if it came while no call was under way."""
        self._reading: tuple[asyncio.AbstractEventLoop, int] | None = None
        self.probe = SocketProbe(connection.pgconn.socket)
        self._notified = notified
        connection.add_notice_handler(self._noticed)
        connection.add_notify_handler(lambda notification: notified(notification.payload))

    def fileno(self) -> int:
        """Return the number of its socket."""
        number: int = self.connection.pgconn.socket
        return number

    def read(self) -> None:
        """Read what has come while no call was under way."""
        pgconn = self.connection.pgconn
        pgconn.consume_input()
        while notification := pgconn.notifies():
            self._notified(notification.extra.decode())
        if self._ended is not None:
            raise self._ended

    def _noticed(self, notice: psycopg.errors.Diagnostic) -> None:
        # libpq takes an error for a notice if it comes while no call is under way. The socket may close much later.
        if notice.severity_nonlocalized in ENDS_SESSION:
            self._ended = pg.lookup(notice.sqlstate or "57P01")(notice.message_primary or "")

    def start_reading(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None]) -> None:
        """Call this function in the event loop whenever there is something to read."""
        handle = self.fileno()
        loop.add_reader(handle, readable)
        self._reading = loop, handle

    def stop_reading(self) -> None:
        """Unregister from the event loop. Closing does so too, before the socket's number can be reused."""
        reading, self._reading = self._reading, None
        if reading is not None and not reading[0].is_closed():
            loop, handle = reading
            loop.remove_reader(handle)

    def is_direct(self, backend: str, *ends: str | None) -> bool:
        """Return whether both ends, as the server describes them, are those of this connection.

        They are the backend, the client's address and port, and the server's address and port.
        """
        if backend != str(self.connection.info.backend_pid):
            return False
        seen = self.probe.addresses()
        if not seen:
            return not any(ends)
        return [_plain(end or "") for end in ends] == [_plain(end) for end in seen]

    @contextlib.contextmanager
    def translating(self) -> Iterator[None]:
        """Raise ConnectionFailed for whatever psycopg raises inside."""
        try:
            yield
        except psycopg.Error as error:
            if self.raw.usable and self._ended is None:
                failure = Failure.REFUSED
            elif is_overdue(error):
                failure = Failure.SILENT
            elif isinstance(error, pg.CrashShutdown):
                failure = Failure.SERVER_RESTARTED
            else:
                failure = Failure.CLOSED
            raise ConnectionFailed(str(error), failure) from error

    def close(self) -> None:
        """Close the connection at once, from any thread. Closing twice does no harm."""
        self.stop_reading()
        self.raw.close()
        self.probe.close()

    def drop(self) -> None:
        """Close this process's copy of the socket in the child of a fork, without a message to the server."""
        self.probe.close()
        with contextlib.suppress(OSError, psycopg.Error):
            os.close(self.fileno())


def connect_failed(error: Exception, target: Target) -> ConnectFailed:
    """Translate the reason for which no connection could be opened."""
    message = str(error)
    return ConnectFailed(message, target.is_one_host and any(words in message for words in SERVER_STARTING))


def _plain(address: str) -> str:
    """Return an address without the IPv6 prefix of an IPv4 address, and without a zone."""
    return address.removeprefix("::ffff:").partition("%")[0]
