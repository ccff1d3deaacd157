"""Look at a socket without waiting and without reading."""

from __future__ import annotations

import select

from dblock._core.presence import Probe, SocketState

_HUNG_UP = (
    select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
    if hasattr(select, "poll")
    else 0
)


def socket_probe(socket: int) -> Probe:
    """Return a function that reports whether the other end has closed the socket of this number.

    Where there is no poll(), the socket always looks open, and only the clock decides.
    """
    if not _HUNG_UP:
        return lambda: SocketState.OPEN

    def register() -> select.poll:
        poll = select.poll()
        poll.register(socket, _HUNG_UP | select.POLLIN)
        return poll

    usual = register()

    def probe() -> SocketState:
        try:
            found = usual.poll(0)
        except RuntimeError:  # another thread is polling at this moment
            found = register().poll(0)
        if not found:
            return SocketState.OPEN
        return SocketState.CLOSED if any(event & _HUNG_UP for _, event in found) else SocketState.READABLE

    return probe
