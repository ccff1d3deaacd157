"""What a client says and decides over its listener's connection, apart from how it waits.

Over that connection come the notifications that wake its waiters; and as long as it lasts, others see that the client
is there. When it is closed, they may take our locks after a grace. So within the greater part of the grace either the
database has been told, over another connection, that we are here all the same, and has said which leases are still
ours; or the server is known to have been restarted, and then no presence from before counts; or else the leases are
given up as lost. When the connection falls silent it is kept until one of these is so, because closing it is what would
start the grace. A new connection is a new presence, to which leases are tied once it is known to be one.

Where notifications do not come, behind a pooler that hands each transaction to another session say, waiters are served
all the same: the line looks in more often. Where something stands between us and the server, a pooler, a proxy, a
translation of addresses, there is no presence: it may close its other side, and we would not see it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from typing import Any

import psycopg
from psycopg import errors as pg

from dblock._core import clock
from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Flow
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.options import interval
from dblock._core.presence import OWN_PART, Presence
from dblock._core.replies import new_attempt
from dblock._core.statements import (
    ARE_YOU_THERE,
    KEEP_SESSION,
    NOTIFY_SELF,
    PROBE,
    STOP_LISTENING,
    WHICH_ENDPOINTS,
    listen,
)
from dblock._core.waiters import HEARTBEAT_INTERVAL, LocalWaiters
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import is_overdue
from dblock._runtime.forks import call_after_fork
from dblock._runtime.keepalive import AsyncKeepAlive, KeepAlive
from dblock._runtime.target import Target

logger = logging.getLogger("dblock")

BEAT = 5.0
"""Seconds between two signs of life over the connection."""

ANSWER_WITHIN = 5.0
"""Seconds that an answer over the connection is waited for; then it is held to have fallen silent."""

PROBE_WITHIN = 2.0
"""Seconds after which a notification that we sent to ourselves is held not to come."""

STARTS_OVER = ("the database system is starting up", "the database system is in recovery mode")
"""What a server says to new connections that has forgotten all its sessions."""

LISTEN_FOR = 30.0
"""Seconds for which it goes on listening when nobody waits any more."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Seconds before another attempt to connect."""

WORTH_A_WARNING = 1.0

AWAY_FOR = 5.0
"""Seconds after which waiters are sent to see for themselves that the database is away."""


class Listening:
    """The state of one client's listener; the base of both kinds."""

    def __init__(
        self,
        target: Target,
        service: LockFlows,
        installation: str,
        keeper: KeepAlive | AsyncKeepAlive,
        grace: float | None,
    ) -> None:
        self._target = target
        self._grace = grace
        self._flows = service
        self._installation = installation
        self._keepalive = keeper
        self.waiters = LocalWaiters(service, self._wake)
        self._said: set[str] = set()
        self._raw: RawConnection | None = None
        self._reset()
        call_after_fork(self)

    def _reset(self) -> None:
        self._raw = None
        self._silent: RawConnection | None = None
        """A connection that does not answer any more, kept open until nothing hangs on it."""
        self._doubtful: list[Presence] = []
        """Presences that are gone, or silent, and that something may still hang on."""
        self._closed = False
        self._sign_of_life = -math.inf
        """When we last asked over the connection and were answered."""
        self._listens = False
        self._listen_at = -math.inf
        """Not to be tried before then."""
        self._awaited_at = -math.inf
        """When somebody was last seen to wait."""
        self._probed_at: float | None = None
        """When we sent a notification to ourselves, unless it has come."""
        self._retry_at = -math.inf
        self._pause = FIRST_PAUSE
        self._away_since: float | None = None

    def reset_after_fork(self) -> None:
        """In the child of a fork there is no connection, no thread, and nobody in line; and it is another client."""
        for raw in (self._raw, self._silent):
            if raw is not None:
                # Only our copy, and without a word to the server: the session is the parent's, and should end with it.
                with contextlib.suppress(OSError, psycopg.Error):
                    os.close(raw.connection.pgconn.socket)
        self._flows.client = new_attempt()
        self._flows.presence = None
        self.waiters.reset_after_fork()
        self._reset()

    def _wake(self) -> None:
        """Have the next look come sooner than it was planned."""
        raise NotImplementedError

    def _give_up_in(self, seconds: float) -> None:
        """Call `_give_up` after so many seconds, whatever else is under way."""
        raise NotImplementedError

    # What is said over the connection.

    def _greeting(self, raw: RawConnection) -> Flow[Presence | None]:
        """Make sure of a fresh connection; the result is the presence that it has become, if it has."""
        (which,) = yield self._flows.statements.installation
        if which != self._installation:
            raise psycopg.OperationalError("listen_dsn leads to another installation of dblock than the client itself")
        raw.connection.add_notify_handler(self._notified)
        if self._grace is None:
            return None
        row = yield WHICH_ENDPOINTS
        if not self._is_direct(raw, *row):
            self._say_once("something stands between us and the database: leases end by their time alone")
            return None
        yield KEEP_SESSION
        name, sent_at = new_attempt(), clock.now()
        yield Call(self._flows.statements.register_presence, (name, interval(self._grace)))
        return Presence(name, self._grace, raw.connection.pgconn.socket, sent_at)

    def _is_direct(self, raw: RawConnection, backend: str, address: str | None, port: str | None) -> bool:
        """Tell whether the server's end of the connection is the other end of ours."""
        if backend != str(raw.connection.info.backend_pid):
            return False
        with socket.socket(fileno=os.dup(raw.connection.pgconn.socket)) as ours:
            if ours.family not in (socket.AF_INET, socket.AF_INET6):
                return address is None
            here = ours.getsockname()
        return address is not None and (_plain(address), port) == (_plain(here[0]), str(here[1]))

    def _excusing(self, presence: Presence) -> Flow[None]:
        """Say that we are here though this presence is gone, and learn what was taken; then nothing hangs on it."""
        told: set[LeaseState] = set()
        first = True
        while True:
            with presence.lock:
                states = [state for state in self._keepalive.tied_to(presence) if state not in told]
                if not states and not first:
                    presence.end()
                    break
            first = False
            told.update(states)
            lost = yield from self._flows.withdraw_presence(
                presence.name, [(state.name, state.token) for state in states]
            )
            for place in lost:
                states[place].lose(Reason.SUPERSEDED)
        self._doubtful.remove(presence)

    @property
    def _channel(self) -> str:
        return f"dblock_{self._flows.client}"

    def _listening(self) -> Flow[None]:
        """Begin to listen when somebody waits, and stop when nobody has for a while.

        Every notification wakes the sessions of all who listen, in the whole database.
        """
        wanted = self.waiters.in_use
        if wanted:
            self._awaited_at = clock.now()
        if wanted and not self._listens:
            yield listen(self._channel)
            self._listens = True
        elif self._listens and clock.now() >= self._awaited_at + LISTEN_FOR:
            yield STOP_LISTENING
            self._listens = False
            self.waiters.notifications_work = False

    def _probing(self) -> Flow[None]:
        """Send ourselves a notification, over another connection and without waiting for the disk."""
        self._probed_at = clock.now()
        yield Call(NOTIFY_SELF, (self._channel,))

    def _beating(self) -> Flow[None]:
        """Ask for a sign of life, and let ourselves be heard in line if it is time to."""
        sent_at = clock.now()
        if sent_at >= self.waiters.due_at():
            yield from self.waiters.check(ANSWER_WITHIN)
        else:
            yield ARE_YOU_THERE
        self._sign_of_life = sent_at
        if self._flows.presence is not None:
            self._flows.presence.confirm(sent_at)

    def _read(self, raw: RawConnection) -> None:
        """Take what has come over the connection while nothing was asked."""
        pgconn = raw.connection.pgconn
        pgconn.consume_input()
        while notification := pgconn.notifies():
            self._notified(notification)

    def _notified(self, notification: Any) -> None:
        extra = getattr(notification, "extra", None)
        payload = notification.payload if extra is None else extra.decode()
        self._probed_at = None
        self.waiters.notifications_work = True
        if payload != PROBE:
            # Who never waits for long is seldom there when we look; it was until now.
            self._awaited_at = clock.now()
            self.waiters.notified(payload)

    # What becomes of the connection.

    def _came_up(self, raw: RawConnection, presence: Presence | None) -> None:
        self._raw = raw
        self._listens = False
        self._sign_of_life = clock.now()
        self._pause = FIRST_PAUSE
        self._flows.presence = presence
        if presence is not None:
            self._keepalive.tie()
        self.waiters.wake_all()  # whatever was said while nobody listened

    def _failed(self, raw: RawConnection, error: psycopg.Error) -> None:
        """Take note that a call over the connection has failed, and usually the connection with it."""
        if raw.usable:
            logger.warning("the listener was refused: %s", error)
            self._sign_of_life = clock.now()
            self._listen_at = self._sign_of_life + HEARTBEAT_INTERVAL
            return
        self._raw = None
        self._retry_at = -math.inf
        self.waiters.notifications_work = False
        presence, self._flows.presence = self._flows.presence, None
        if presence is not None:
            self._doubtful.append(presence)
        if is_overdue(error) and presence is not None:
            logger.warning("the listener's connection has fallen silent: opening another")
            self._close_silent()
            self._silent = raw
            self._give_up_in(presence.left(clock.now()))
            return
        logger.info("the listener's connection was closed: %s", error)
        if presence is not None:
            presence.doubt()
            if isinstance(error, pg.CrashShutdown):
                self._end_all()  # the server starts over, and no mark made before counts
            else:
                self._give_up_in(presence.grace * OWN_PART)
        raw.close()

    def _hang_up(self) -> None:
        for presence in (self._flows.presence, *self._doubtful):
            if presence is not None:
                presence.doubt()
        for raw in (self._raw, self._silent):
            if raw is not None:
                raw.close()
        self._raw = self._silent = None

    def _begin_again(self) -> None:
        """Take note that the connection was hung up though the client goes on, as when all tasks were cancelled."""
        self._listens = False
        self._probed_at = None
        self._retry_at = -math.inf
        self.waiters.notifications_work = False
        presence, self._flows.presence = self._flows.presence, None
        if presence is not None:
            self._doubtful.append(presence)
            self._give_up_in(presence.grace * OWN_PART)

    def _close_silent(self) -> None:
        silent, self._silent = self._silent, None
        if silent is not None:
            for presence in self._doubtful:
                presence.doubt()
            silent.close()

    def _end_all(self) -> None:
        for presence in self._doubtful:
            presence.end()
        self._doubtful.clear()

    def _give_up(self) -> None:
        """Give up what is still tied to a presence that does not stand."""
        for presence in list(self._doubtful):
            if not presence.stands(clock.now()):
                for state in self._keepalive.tied_to(presence):
                    state.lose(Reason.UNREACHABLE)

    def _could_not_connect(self, error: Exception) -> None:
        said = str(error).strip()
        if self._target.is_one_host and any(words in said for words in STARTS_OVER):
            # No mark made in a session of that server before counts any more. That it is going down proves nothing: it
            # may let those who are connected go on.
            self._end_all()
        self._retry_at = clock.now() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        logger.info("no connection to listen on, trying again: %s", said)
        if self._pause > WORTH_A_WARNING:
            self._say_once(
                "no connection to listen on for a while: until there is one, waiters look in several times a second, "
                f"and leases end by their time alone. {said.splitlines()[0] if said else ''}"
            )

    def _looked(self, error: Exception | None) -> None:
        """Take note of whether the line could be looked at."""
        now = clock.now()
        if error is None:
            self._away_since = None
            return
        logger.info("the line could not be looked at: %s", error)
        self._away_since = self._away_since or now
        if now - self._away_since >= AWAY_FOR:
            self._away_since = now
            self.waiters.wake_all()

    def _look_at_the_clock(self) -> None:
        """Give up on what has not come by now."""
        now = clock.now()
        if not self._doubtful:
            self._close_silent()
        if self._probed_at is not None and now >= self._probed_at + PROBE_WITHIN:
            self._probed_at = None
            self.waiters.notifications_work = False
            self._say_once(
                "notifications do not come through, perhaps because of a pooler in transaction mode: waiters look in "
                "several times a second instead. Give listen_dsn a DSN that leads past the pooler"
            )
            self.waiters.wake_all()

    def _sleep_for(self) -> float:
        """Return the seconds until there is something to do, if nothing comes before."""
        due = [self.waiters.due_at(), self.waiters.cleanup_due_at()]
        if self._probed_at is not None:
            due.append(self._probed_at + PROBE_WITHIN)
        if self._silent is not None:
            due.append(clock.now() + HEARTBEAT_INTERVAL)
        if self._raw is None:
            due.append(self._retry_at)
        else:
            due.append(self._sign_of_life + BEAT)
            if self.waiters.in_use and not self._listens:
                due.append(self._listen_at)
        return max(min(due) - clock.now(), 0.0)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s", what)


def _plain(address: str) -> str:
    """Return an address without what IPv6 puts around one of IPv4, and without a zone."""
    return address.removeprefix("::ffff:").partition("%")[0]
