"""Whether others can see that this process is there.

A session of this client holds a mark in the database: a presence, with a name of its own. Leases are tied to it. When
the session ends, whoever is first in line for one of them takes it after a short grace, long before the lease has run
out. So a lease may be believed only as long as its presence stands, and whoever asks looks: at the clock, because the
server drops a session from which it has not heard for too long; and at the session's socket, because the server may
have closed it a moment ago, or while this process was stopped. Where somebody has looked a moment before, it is known
how long ago at most that was, and what is left of our part of the grace may be used to set things right.

Setting things right is to tell the database that we are here all the same, and to be told what was taken. Then the
presence has ended: the time of what was tied to it alone decides.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

TRUSTED = 45.0
"""Seconds for which the presence is believed after a sign of life from the server, on its own connection."""

DROPPED_AFTER = 60
"""Seconds of silence after which the server may drop the session. Longer than TRUSTED, so that we know first."""

OWN_PART = 2 / 3
"""The part of the grace within which we come back or give our leases up; the rest is for those who take them."""

_HUNG_UP = (
    select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
    if hasattr(select, "poll")
    else 0
)


class Presence:
    """One session of this client by which others see that it is there."""

    def __init__(self, name: str, grace: float, socket: int, sent_at: float) -> None:
        self.name = name
        self.grace = grace
        self.ended = False
        """Whether nothing hangs on it any more."""
        self.lock = threading.RLock()
        """Held by whoever ties a lease to it, and by whoever ends it."""
        self._look: Callable[[], list[tuple[int, int]]] | None = _looking_at(socket)
        """Looks at the socket: whether there is something to read, and whether the other end has closed it."""
        self._trusted_until = sent_at + TRUSTED
        self._looked_at = sent_at
        """When the socket was last seen to be open."""

    def confirm(self, sent_at: float) -> None:
        """Take note of a sign of life on that session."""
        self._trusted_until = sent_at + TRUSTED

    def doubt(self) -> None:
        """Take note that the session is gone, which others may see too. Before its socket is another's."""
        self._look = None

    def end(self) -> None:
        """Take note that nothing hangs on it any more."""
        with self.lock:
            self.ended = True
            self._look = None

    def left(self, now: float) -> float:
        """Return the seconds for which it is still believed without another sign of life."""
        return max(self._trusted_until - now, 0.0)

    def stands(self, now: float) -> bool:
        """Tell whether nobody can have taken what is tied to it, as of this very moment."""
        if self.ended:
            return True
        if now >= self._trusted_until:
            return False
        look = self._look
        if look is not None:
            found = look()
            if self._look is look and not any(event & _HUNG_UP for _, event in found):
                if not found:
                    self._looked_at = now  # with something to read it may be the server's last word
                return True
        return now < self._looked_at + self.grace * OWN_PART


def _looking_at(socket: int) -> Callable[[], list[tuple[int, int]]]:
    """Return what looks at a socket, without waiting and without reading."""
    if not _HUNG_UP:
        return list

    def poll() -> select.poll:
        made = select.poll()
        made.register(socket, _HUNG_UP | select.POLLIN)
        return made

    usual = poll()

    def look() -> list[tuple[int, int]]:
        try:
            return usual.poll(0)
        except RuntimeError:  # another thread looks at this very moment
            return poll().poll(0)

    return look
