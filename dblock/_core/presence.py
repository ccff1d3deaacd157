"""Whether other clients can see that this process is alive.

A session of this client holds an advisory lock under the name of its presence. Leases are tied to the presence. When
the session ends, the first waiter in the queue of such a lease takes the lock after a short grace, long before the
lease expires. So a lease may be trusted only while its presence is valid. Each check of a presence looks at two things:

- the clock, because the server drops a session that it has not heard from for too long;
- the session's socket, because the server may have ended the session a moment ago, or while this process was stopped.
  The server's last message may come before the socket is closed, so unread input is doubt unless it is understood.

The last time the socket was seen open bounds how long ago it can have closed. The client may use the rest of its share
of the grace to recover. To recover, it reports to the database that it is alive, and learns which locks were taken.
Then the presence has ended, and the leases that were tied to it last for their own time.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable

from dblock._core.timings import Timings, chosen

DROPPED_AFTER = 60
"""Seconds of silence after which the server may drop the session. Longer than `trusted_for`, so that this client knows
first."""


class SocketState(enum.Enum):
    """What a probe of a socket found, without reading from it."""

    OPEN = "open"
    """Open, and whatever there is to read is not the server's last message."""
    READABLE = "readable"
    """Open with something to read, which may be the server's last message."""
    CLOSED = "closed"


# Looked up once, because each lookup of a member costs as much as a call.
_OPEN, _READABLE = SocketState.OPEN, SocketState.READABLE

Probe = Callable[..., SocketState]
"""Probes a socket. With the argument True it gives the listener a moment to read what there is."""


class Presence:
    """One session of this client by which other clients see that it is alive."""

    def __init__(
        self,
        name: str,
        grace: float,
        probe: Probe,
        sent_at: float,
        server: str = "",
        timings: Timings | None = None,
    ) -> None:
        """`sent_at` is when its registration was sent, and `server` the address of the server that has the session."""
        self.name = name
        self.grace = grace
        self.server = server
        given = chosen(timings)
        self._trusted_for = given.trusted_for
        self._look_for = given.look_for
        self.own_time = grace * given.own_part
        """Seconds after its end within which this client recovers or gives its leases up."""
        self.ended = False
        """Whether no lease depends on it any more."""
        self.lock = threading.RLock()
        """Held while a lease is tied to it, and while it is ended."""
        self._probe: Probe | None = probe
        self._trusted_until = sent_at + self._trusted_for
        self.seen_open_at = sent_at
        """When its socket was last seen open."""
        self._needed_at = -math.inf

    def look_every(self, needed: bool, now: float) -> float:
        """Return the seconds between two looks at its socket; infinite if no lease depends on it, and none did lately.

        A holder that acquires again soon finds the listener looking, and need not wake it.
        """
        if needed:
            self._needed_at = now
        return self.own_time / 3 if now < self._needed_at + self._look_for else math.inf

    def confirm(self, sent_at: float) -> None:
        """Extend the trust by a reply from the server to a request that was sent then."""
        self._trusted_until = sent_at + self._trusted_for

    def doubt(self) -> None:
        """Mark the session as gone. Call this before its socket is closed, because the number may be reused."""
        self._probe = None

    def end(self) -> None:
        """Mark that no lease depends on it any more."""
        with self.lock:
            self.ended = True
            self._probe = None

    def left(self, now: float) -> float:
        """Return the seconds for which it is still trusted without another reply."""
        return max(self._trusted_until - now, 0.0)

    def stands(self, now: float) -> bool:
        """Return whether it is valid: no other client can have taken a lock that is tied to it by now."""
        if self.ended:
            return True
        if now >= self._trusted_until:
            return False
        probe = self._probe
        if probe is not None:
            found = probe()
            if found is _READABLE and now >= self.seen_open_at + self.own_time:
                found = probe(True)
            if self._probe is probe and found is _OPEN:
                self.seen_open_at = now
                return True
        return now < self.seen_open_at + self.own_time
