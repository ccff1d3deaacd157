"""Look at a socket without waiting for it and without reading from it.

Guarantee: a socket looks open only if the server's session had not ended a moment ago, as far as this machine knows.
The server frees the session's locks before it closes the connection, and it may send a last message before that. So
unread input is looked at too. If it cannot be understood, because it is encrypted or begins in the middle of a message,
it may be that last message. Then only the listener, which reads it, can tell.

gevent and eventlet replace select.poll by one that hides a hang-up, or remove it. A probe needs the original. Whether a
poll reports a hang-up is tested, not assumed. Where none does, a client has no presence.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dblock._core.presence import SocketState
from dblock._core.timings import Timings, chosen

_PEEKED = 65536
"""How many bytes of unread input are looked at."""

_MESSAGES = frozenset(b"123ACDEINSTZnst")
"""The first byte of each message that a server sends to a listener."""

_HUNG_UP = sum(getattr(select, name, 0) for name in ("POLLHUP", "POLLERR", "POLLNVAL", "POLLRDHUP")) or 0x2038
_INPUT = getattr(select, "POLLIN", 1)

_OPEN = SocketState.OPEN
"""The usual reply, looked up once, because each lookup of a member costs as much as a call."""


def find_poll() -> Callable[[], Any] | None:
    """Return a poll() that reports when the other end has closed a socket, None if there is none."""
    return next((candidate for candidate in _candidates() if _reports_hang_up(candidate)), None)


def _candidates() -> Iterator[Any]:
    yield getattr(select, "poll", None)
    # Both libraries keep the original. Neither is imported here.
    if gevent := sys.modules.get("gevent.monkey"):
        with contextlib.suppress(Exception):
            yield gevent.get_original("select", "poll")
    if eventlet := sys.modules.get("eventlet.patcher"):
        with contextlib.suppress(Exception):
            yield eventlet.original("select").poll


def _reports_hang_up(poll: Any) -> bool:
    if poll is None:
        return False
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.suppress(Exception):
        looking = poll()
        looking.register(ours.fileno(), _HUNG_UP | _INPUT)
        if looking.poll(0):
            return False
        theirs.close()
        return any(event & _HUNG_UP for _, event in looking.poll(0))
    return False


poll = find_poll()
"""The poll() that every probe uses."""


class SocketProbe:
    """Reports whether the other end of a socket has closed it.

    It has a handle of its own. libpq may close its socket at any moment, and another socket may then get the number.
    """

    def __init__(self, number: int, timings: Timings | None = None) -> None:
        self._read_within = chosen(timings).read_within
        self._handle = _socket.socket(fileno=os.dup(number))  # the plain one: a patched socket would wait
        self._handle.setblocking(False)
        self._usual = self._register() if poll is not None else None

    def _register(self) -> Any:
        assert poll is not None
        looking = poll()
        looking.register(self._handle.fileno(), _HUNG_UP | _INPUT)
        return looking

    def addresses(self) -> list[str]:
        """Return the address and port of this end and of the other end; nothing for a Unix socket."""
        handle = self._handle
        if handle.family not in (socket.AF_INET, socket.AF_INET6):
            return []
        return [str(part) for name in (handle.getsockname(), handle.getpeername()) for part in name[:2]]

    def __call__(self, patient: bool = False) -> SocketState:
        """Look at the socket. If `patient`, give the listener a moment to read what cannot be understood here."""
        if patient:
            return self._look_patiently()
        if self._usual is None:
            return SocketState.CLOSED
        try:
            try:
                found = self._usual.poll(0)
            except RuntimeError:  # another thread is polling at this moment
                found = self._register().poll(0)
            if not found:
                return _OPEN
            if any(event & _HUNG_UP for _, event in found):
                return SocketState.CLOSED
            return _meaning(self._handle.recv(_PEEKED, socket.MSG_PEEK))
        except BlockingIOError:
            return SocketState.OPEN  # the listener has just read it
        except (OSError, ValueError):
            return SocketState.CLOSED

    def _look_patiently(self) -> SocketState:
        until = time.monotonic() + self._read_within
        while (state := self()) is SocketState.READABLE and time.monotonic() < until:
            time.sleep(0.001)
        return state

    def close(self) -> None:
        """Close the handle, and with it this process's last hold on the connection. Closing twice does no harm."""
        self._handle.close()

    __del__ = close


def _meaning(unread: bytes) -> SocketState:
    """Return what unread input says about the session that sent it."""
    if not unread:
        return SocketState.CLOSED
    while unread:
        end = 1 + int.from_bytes(unread[1:5], "big")
        if unread[0] not in _MESSAGES or not 5 <= end <= len(unread):
            return SocketState.READABLE
        if unread[:1] == b"E" and any(field in (b"VFATAL", b"VPANIC") for field in unread[5:end].split(b"\0")):
            return SocketState.CLOSED
        unread = unread[end:]
    return SocketState.OPEN
