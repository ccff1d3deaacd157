"""The listener's connection on psycopg, and the translation of its errors."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg import capabilities
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dblock._core.effects import Call, Row
from dblock._core.listener_failures import ConnectionFailed, Failure, ServerState
from dblock._core.timings import Timings, chosen
from dblock._runtime.connection import LATE, POLL_INTERVAL, RawConnection, execute_until_fatal, poll_interval
from dblock._runtime.error_mapping import ENDS_SESSION, SHUTDOWN, Overdue, is_overdue, server_address, server_states
from dblock._runtime.fork_safe_connection import ForkSafeConnection
from dblock._runtime.socket_probe import SocketProbe
from dblock._runtime.target import Target
from dblock.errors import DblockError

ENDS_ALL_SESSIONS = ("57P01", "57P02")
"""The codes of the warning that each session gets in an immediate shutdown, and after a crash of another one."""

STAND_ASIDE = 0.002
"""Seconds between two looks of a call that stands aside for a renewal."""

INTERRUPT_EVERY = 0.1
"""Seconds after which a renewal that has only this connection cancels again what is under way over it."""

HANG_UP = getattr(select, "POLLRDHUP", 0)
"""The event by which poll() reports that the other end has closed, though there is something to read; 0 for none."""


class NotLent(Exception):
    """The listener's connection is not free. Nothing was sent over it."""


class ListenerConnection:
    """One connection of the listener. Notifications that come over it are passed on."""

    def __init__(
        self,
        connection: Any,
        notified: Callable[[str], None],
        needs_transactions: bool = False,
        doubted: Callable[[], object] = lambda: None,
        look: Callable[[], float] = lambda: math.inf,
        timings: Timings | None = None,
    ) -> None:
        """`doubted` is called by another thread than the listener's whose call over the connection has failed.

        `look` is called while the listener waits for such a call. It returns the seconds until it is due again.
        """
        self.connection = connection
        self._doubted = doubted
        self._look = look
        self._timings = chosen(timings)
        self.raw = RawConnection(connection, prepares=False, execute=execute_until_fatal)
        self.raw.needs_transactions = needs_transactions
        self.lock = threading.Lock()
        """Held during every exchange and read, because other threads and an event loop use it too."""
        self._renewals: list[None] = []
        """One entry for each renewal that waits for the lock. All other calls stand aside for it."""
        self._interrupted = False
        """Whether the call that is under way was cancelled by a renewal that needs the connection."""
        self.reader: LoopReader | None = None
        """Reads the connection in an event loop, while the listener's thread waits for its end."""
        self._ended: psycopg.Error | None = None
        """Why it cannot be used any more: the server's last message, or what another thread found."""
        self.probe = SocketProbe(connection.pgconn.socket, timings)
        self._notified = notified
        connection.add_notice_handler(self._noticed)
        connection.add_notify_handler(lambda notification: notified(notification.payload))

    @property
    def server(self) -> str:
        """The address of the server."""
        info = self.connection.info
        return server_address(info.host, info.hostaddr, info.port)

    @property
    def leads_to_server(self) -> dict[str, str]:
        """The parameters that lead to this server alone."""
        info = self.connection.info
        return {"host": info.host, "hostaddr": info.hostaddr, "port": str(info.port)}

    @property
    def readable_in_loop(self) -> bool:
        """Whether an event loop may read it. A probe cannot understand encrypted input, so that is read at once."""
        return bool(HANG_UP) and not self.connection.pgconn.ssl_in_use

    def fileno(self) -> int:
        """Return the number of its socket. Raise the server's last message if it has come."""
        if self._ended is not None:
            raise self._ended
        number: int = self.connection.pgconn.socket
        return number

    def exchange(self, call: Call, within: float) -> Row | None:
        """Make a call over it. Notifications that come before the reply are passed on."""
        while not self._locked(self._look()):
            pass
        try:
            if self.raw.busy:
                self._finish(within)
            row: Row | None = self.connection.wait(self.raw.exchange(call, within))
            self._pass_on_notifications()
        finally:
            self.lock.release()
            if self.reader is not None:
                self.reader.resume()
        return row

    def lend(self, call: Call, within: float, wait: float) -> Row | None:
        """Make a call over it for another thread than the listener's. Raise NotLent if it is not free in time.

        A call without a reply is cancelled. The listener finds out what has become of the connection after a failure.
        """
        if not self._locked(wait):
            raise NotLent
        return self._lend(call, within)

    def renew(self, call: Call, within: float, wait: float, interrupts: bool) -> Row | None:
        """Make a call of the keep-alive before any other that waits for the connection; see lend.

        With `interrupts`, cancel what is under way over it.
        """
        until, pause = time.monotonic() + wait, 0.0 if interrupts else math.inf
        self._renewals.append(None)
        try:
            while not self.lock.acquire(timeout=_timeout(min(until - time.monotonic(), pause))):
                if time.monotonic() >= until:
                    raise NotLent
                self._interrupt(self._timings.interrupted_within)
                pause = INTERRUPT_EVERY
        finally:
            self._renewals.pop()
        return self._lend(call, within)

    def _locked(self, wait: float) -> bool:
        """Take the lock for a call, but not before a renewal. Return whether that was possible in so many seconds."""
        until = time.monotonic() + wait
        while self.lock.acquire(timeout=_timeout(until - time.monotonic())):
            if not self._renewals:
                return True
            self.lock.release()
            time.sleep(STAND_ASIDE)
        return False

    def _lend(self, call: Call, within: float) -> Row | None:
        """Make a call for another thread, which has taken the lock. Release the lock."""
        try:
            if self._ended is not None or not self.raw.usable:
                raise NotLent
            self._interrupted = False
            try:
                row: Row | None = self.connection.wait(self.raw.exchange(call, within), poll_interval(within))
                self._pass_on_notifications()
                if self._interrupted:
                    # A call that is cancelled while it waits for a standby ends as if it were done, but is not safe.
                    raise Overdue(LATE)
                return row
            except psycopg.Error as error:
                if is_overdue(error) and self.raw.busy:
                    self._cancel(error, min(call.giving_up, self._timings.give_up_within))
                elif not self.raw.usable and self._ended is None:
                    self._ended = error
                if not self.raw.usable:
                    self._doubted()
                raise
        finally:
            self.lock.release()
            if self.reader is not None:
                self.reader.resume()

    def _interrupt(self, within: float) -> None:
        """Cancel the statement that is under way over it, from any thread."""
        if self.raw.busy and capabilities.has_cancel_safe():
            self._interrupted = True
            with contextlib.suppress(psycopg.Error):
                self.connection.cancel_safe(timeout=within)

    def _cancel(self, error: psycopg.Error, within: float) -> None:
        """Cancel a statement that got no reply, and see it end. Mark the error if the statement had no effect."""
        self._interrupt(max(within, POLL_INTERVAL))
        with contextlib.suppress(psycopg.Error):
            ended = self._finish(within)
            if isinstance(error, Overdue):
                error.undone = isinstance(ended, pg.QueryCanceled)

    def _finish(self, within: float) -> psycopg.Error | None:
        """Read the rest of an exchange that was given up. Return the error that the statement has ended with."""
        try:
            self.connection.wait(self.raw.drain(within), poll_interval(within))
        except psycopg.Error as error:
            if not self.raw.usable:
                raise
            return error
        return None

    def read(self) -> None:
        """Read what has come while no call was under way."""
        with self.lock:
            self.read_locked()

    def read_locked(self) -> None:
        """Read what has come while no call was under way. The caller holds the lock."""
        self.connection.pgconn.consume_input()
        self._pass_on_notifications()
        if self._ended is not None:
            raise self._ended

    def _pass_on_notifications(self) -> None:
        """Pass on the notifications that libpq has read. One may have come right behind a reply."""
        while notification := self.connection.pgconn.notifies():
            self._notified(notification.extra.decode())

    def _noticed(self, notice: psycopg.errors.Diagnostic) -> None:
        # libpq takes an error for a notice if it comes while no call is under way. The socket may close much later.
        if notice.severity_nonlocalized in ENDS_SESSION:
            state = notice.sqlstate or "57P01"
            kind = pg.lookup(state) if state in SHUTDOWN else psycopg.OperationalError
            self._ended = kind(notice.message_primary or "")
        elif notice.severity_nonlocalized == "WARNING" and notice.sqlstate in ENDS_ALL_SESSIONS:
            self._ended = pg.CrashShutdown(notice.message_primary or "")

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
            elif isinstance(self._ended or error, pg.CrashShutdown):
                failure = Failure.SERVER_RESTARTED
            elif isinstance(self._ended or error, pg.AdminShutdown):
                failure = Failure.TERMINATED
            else:
                failure = Failure.CLOSED
            raise ConnectionFailed(str(error), failure) from error

    def close(self) -> None:
        """Close the connection at once, from any thread. Closing twice does no harm.

        A call that is under way has a moment to end. Then it is cancelled, so that it has no effect after its caller
        has given it up.
        """
        if self.reader is not None:
            self.reader.stop()
        locked = self.lock.acquire(timeout=self._timings.reads_end_within)
        if not locked:
            self._interrupt(self._timings.interrupted_within)
            locked = self.lock.acquire(timeout=self._timings.interrupted_within)
        self.raw.close()
        if locked:
            self.lock.release()
        self.probe.close()

    def drop(self) -> None:
        """Close this process's copy of the socket in the child of a fork, without a message to the server."""
        self.probe.close()
        if self.reader is not None:
            self.reader.drop()
        with contextlib.suppress(OSError, psycopg.Error):
            os.close(self.connection.pgconn.socket)


class LoopReader:
    """Reads a listener's connection in an event loop, so that a notification reaches its task without another thread.

    The listener's thread exchanges messages over the same connection, and watches it for its end. The lock of the
    connection keeps the two apart. The loop has its own number for the socket, which only the loop closes, so that the
    loop never watches a number that was given to another socket.
    """

    _socket: int | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: ListenerConnection, failed: Callable[[], None]):
        """`failed` is called when the connection cannot be read any more."""
        self._loop = loop
        self._connection = connection
        self._failed = failed
        self._socket = os.dup(connection.fileno())
        self._hung_up = select.poll()
        self._hung_up.register(self._socket, HANG_UP)
        self._paused = False
        self._in_loop(self._start)

    def resume(self) -> None:
        """Read again after an exchange that kept the loop from reading."""
        if self._paused:
            self._in_loop(self._start)

    def stop(self) -> None:
        """Stop reading. The socket's number in the loop is closed by the loop, or here if the loop is closed."""
        if not self._in_loop(self._stop):
            self._close()

    def drop(self) -> None:
        """Close this process's copy of the socket in the child of a fork."""
        self._close()

    def _in_loop(self, function: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _start(self) -> None:
        self._paused = False
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._readable)

    def _stop(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._close()

    def _close(self) -> None:
        number, self._socket = self._socket, None
        if number is not None:
            os.close(number)

    __del__ = _close  # for a loop that was closed before it could stop

    def _readable(self) -> None:
        lock = self._connection.lock
        if self._hung_up.poll(0):
            self._stop()  # its end is for the listener's thread
            return
        if not lock.acquire(blocking=False):
            if self._socket is not None:
                self._loop.remove_reader(self._socket)
            self._paused = True
            if not lock.acquire(blocking=False):
                return  # the exchange that has the lock sees that this is paused
            self._start()
        try:
            self._connection.read_locked()
        except psycopg.Error:
            self._stop()
            self._failed()  # the listener's thread gets the same error
        finally:
            lock.release()


def states_of(server: dict[str, str], target: Target) -> dict[str, ServerState]:
    """Ask one server, of several that the target names, whether it accepts connections."""
    try:
        parameters = {**conninfo_to_dict(target.conninfo()), **server, "target_session_attrs": "any"}
        ForkSafeConnection.connect(make_conninfo("", **parameters), connect_timeout=1).close()
    except (psycopg.Error, DblockError) as error:
        return server_states(error)
    return {}


def _timeout(seconds: float) -> float:
    """Return the seconds as a lock takes them."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


def _plain(address: str) -> str:
    """Return an address without the IPv6 prefix of an IPv4 address, and without a zone."""
    return address.removeprefix("::ffff:").partition("%")[0]
