"""What a client says and decides over its listener's connection, apart from how it waits.

Over that connection come the notifications that wake its waiters; and as long as it lasts, others see that the client
is there. When it is closed, they may take our locks after a grace. So within the greater part of the grace either the
database has been told, over another connection, that our presence cannot be seen any more and the time of the leases
alone decides; or a new connection has become the presence; or the server is known to have been restarted, and then no
presence from before counts; or else the leases are given up as lost. When the connection falls silent it is kept until
one of these is so, because closing it is what would start the grace.

Where notifications do not come, behind a pooler that hands each transaction to another session say, waiters are served
all the same: the line looks in more often.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from typing import Any

import psycopg
from psycopg import errors as pg

from dblock import clock
from dblock.calls import Call, Steps, new_attempt
from dblock.faults import is_overdue
from dblock.forks import mind_forks
from dblock.keepalive import AsyncKeepAlive, KeepAlive
from dblock.line import HEARD_EVERY, Line
from dblock.presence import DROPPED_AFTER, OWN_PART, Presence
from dblock.steps import GIVE_UP_WITHIN, Service
from dblock.target import Target
from dblock.terms import interval, literal, quoted
from dblock.wire import Wire

logger = logging.getLogger("dblock")

BEAT = 5.0
"""Seconds between two signs of life over the connection."""

ANSWER_WITHIN = 5.0
"""Seconds that an answer over the connection is waited for; then it is held to have fallen silent."""

PROBE_WITHIN = 2.0
"""Seconds after which a notification that we sent to ourselves is held not to come."""

PROBE = "probe"

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Seconds before another attempt to connect."""

AWAY_FOR = 5.0
"""Seconds after which waiters are sent to see for themselves that the database is away."""


class Listening:
    """The state of one client's listener; the base of both kinds."""

    def __init__(
        self,
        target: Target,
        service: Service,
        schema: str,
        installation: str,
        keeper: KeepAlive | AsyncKeepAlive,
    ) -> None:
        self._target = target
        self._service = service
        self._installation = installation
        self._keeper = keeper
        self.line = Line(service, self._hurry)
        prefix = quoted(schema)
        self._which = Call(f"SELECT {prefix}.installation()".encode(), ())
        self._be_present = f"SELECT {prefix}.be_present($1, $2)".encode()
        self._be_absent = f"SELECT {prefix}.be_absent($1)".encode()
        self._said: set[str] = set()
        self._wire: Wire | None = None
        self._reset()
        mind_forks(self)

    def _reset(self) -> None:
        self._wire = None
        self._silent: Wire | None = None
        """A connection that does not answer any more, kept open until another has taken its place."""
        self._closed = False
        self._sign_of_life = -math.inf
        """When we last asked over the connection and were answered."""
        self._probed_at: float | None = None
        """When we sent a notification to ourselves, unless it has come."""
        self._retry_at = -math.inf
        self._pause = FIRST_PAUSE
        self._away_since: float | None = None

    def start_anew(self) -> None:
        """In the child of a fork there is no connection, no thread, and nobody in line; and it is another client."""
        for wire in (self._wire, self._silent):
            if wire is not None:
                # Only our copy, and without a word to the server: the session is the parent's, and should end with it.
                with contextlib.suppress(OSError, psycopg.Error):
                    os.close(wire.connection.pgconn.socket)
        self._service.client = new_attempt()
        if self._presence is not None:
            self._presence.end()
            self._presence.client = self._service.client
        self.line.start_anew()
        self._reset()

    def _hurry(self) -> None:
        """Have the next look come sooner than it was planned."""
        raise NotImplementedError

    def _give_up_in(self, seconds: float) -> None:
        """Call `_give_up` after so many seconds, whatever else is under way."""
        raise NotImplementedError

    @property
    def _presence(self) -> Presence | None:
        return self._service.presence

    # What is said over the connection.

    def _greeting(self, wire: Wire) -> Steps[None]:
        """Begin to listen and to be present over a fresh connection."""
        (which,) = yield self._which
        if which != self._installation:
            raise psycopg.OperationalError("listen_dsn leads to another installation of dblock than the client itself")
        wire.connection.add_notify_handler(self._notified)
        yield Call(f"LISTEN {quoted(self._channel)}".encode(), ())
        if self._presence is None:
            return
        (backend,) = yield Call(b"SELECT pg_backend_pid()", ())
        if backend != str(wire.connection.info.backend_pid):
            self._say_once("a pooler stands before the database: leases end by their time alone")
            return
        yield self._keep_session
        # Under the same name as before: what is tied to it is safe again.
        self._presence.declare(wire.connection.pgconn.socket, clock.now())
        yield Call(self._be_present, (self._presence.client, interval(self._presence.grace)))

    def _excusing(self) -> Steps[None]:
        """Say that our presence cannot be seen any more, though we are here."""
        presence = self._presence
        if presence is not None:
            yield Call(self._be_absent, (presence.client,), within=GIVE_UP_WITHIN)
            presence.end()

    @property
    def _channel(self) -> str:
        return f"dblock_{self._service.client}"

    @property
    def _keep_session(self) -> Call:
        """Have the server keep the session for longer than we believe in it without a sign of life."""
        settings = {
            "idle_session_timeout": 0,
            "tcp_keepalives_idle": DROPPED_AFTER // 2,
            "tcp_keepalives_interval": DROPPED_AFTER // 6,
            "tcp_keepalives_count": 3,
            "tcp_user_timeout": DROPPED_AFTER * 1000,
        }
        calls = ", ".join(f"set_config({literal(name)}, '{value}', false)" for name, value in settings.items())
        return Call(f"SELECT {calls}".encode(), ())

    def _probing(self) -> Steps[None]:
        """Send ourselves a notification, over another connection and without waiting for the disk."""
        self._probed_at = clock.now()
        sql = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, '{PROBE}')"
        yield Call(sql.encode(), (self._channel,))

    def _beating(self) -> Steps[None]:
        """Ask for a sign of life, and let ourselves be heard in line if it is time to."""
        sent_at = clock.now()
        if sent_at >= self.line.due_at():
            yield from self.line.look(ANSWER_WITHIN)
        else:
            yield Call(b"SELECT 1", ())
        self._sign_of_life = sent_at
        if self._presence is not None:
            self._presence.confirm(sent_at)

    def _read(self, wire: Wire) -> None:
        """Take what has come over the connection while nothing was asked."""
        pgconn = wire.connection.pgconn
        pgconn.consume_input()
        while notification := pgconn.notifies():
            self._notified(notification)

    def _notified(self, notification: Any) -> None:
        extra = getattr(notification, "extra", None)
        payload = notification.payload if extra is None else extra.decode()
        self._probed_at = None
        self.line.pushed = True
        if payload != PROBE:
            self.line.notified(payload)

    # What becomes of the connection.

    def _came_up(self, wire: Wire) -> None:
        self._wire = wire
        self._sign_of_life = clock.now()
        self._pause = FIRST_PAUSE
        self._close_silent()
        self.line.wake_all()  # whatever was said while nobody listened

    def _failed(self, wire: Wire, error: psycopg.Error) -> None:
        """Take note that the connection, or a call over it, has failed."""
        self._wire = None
        self._retry_at = -math.inf
        self.line.pushed = False
        if is_overdue(error):
            logger.warning("the listener's connection has fallen silent: opening another")
            self._close_silent()
            self._silent = wire
            if self._presence is not None and self._presence.declared:
                self._give_up_in(self._presence.left(clock.now()))
        else:
            wire.close()
            logger.info("the listener's connection was closed: %s", error)
            self._closed_under_us(error)

    def _closed_under_us(self, error: Exception) -> None:
        """Take note that the session that was our presence, or was about to be, is gone."""
        if self._presence is not None and self._presence.declared:
            self._presence.doubt()
            if isinstance(error, pg.CrashShutdown):
                self._presence.end()  # the server starts over, and no mark made before counts
            else:
                self._give_up_in(self._presence.grace * OWN_PART)

    def _close_silent(self) -> None:
        silent, self._silent = self._silent, None
        if silent is not None:
            silent.close()

    @property
    def _must_excuse(self) -> bool:
        """Whether a presence is declared that we have no good connection for."""
        return self._wire is None and self._presence is not None and self._presence.declared

    def _give_up(self) -> None:
        """Give up what is still tied to a presence that does not stand."""
        if self._presence is not None and not self._presence.stands(clock.now()):
            self._keeper.lose_tied()

    def _could_not_connect(self, error: Exception) -> None:
        said = str(error).strip()
        over_its_socket = "on socket" in said and ("Connection refused" in said or "No such file" in said)
        if self._presence is not None and ("the database system is" in said or over_its_socket):
            # Going down, starting up, or not there: no mark made in a session of that server counts any more.
            self._presence.end()
        self._retry_at = clock.now() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        logger.info("no connection to listen on, trying again: %s", said)

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
            self.line.wake_all()

    def _look_at_the_clock(self) -> None:
        """Give up on what has not come by now."""
        now = clock.now()
        if self._silent is not None and (self._presence is None or not self._presence.declared):
            self._close_silent()
        elif self._silent is not None:
            self._give_up()
        if self._probed_at is not None and now >= self._probed_at + PROBE_WITHIN:
            self._probed_at = None
            self.line.pushed = False
            self._say_once(
                "notifications do not come through, perhaps because of a pooler in transaction mode: waiters look in "
                "several times a second instead. Give listen_dsn a DSN that leads past the pooler"
            )
            self.line.wake_all()

    def _sleep_for(self) -> float:
        """Return the seconds until there is something to do, if nothing comes before."""
        due = [self.line.due_at()]
        if self._probed_at is not None:
            due.append(self._probed_at + PROBE_WITHIN)
        if self._silent is not None:
            due.append(clock.now() + HEARD_EVERY)
        due.append(self._retry_at if self._wire is None else self._sign_of_life + BEAT)
        return max(min(due) - clock.now(), 0.0)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s", what)
