"""Performs the calls of the keep-alive: renewals, and reports that the client is alive.

Guarantee: a renewal waits for no call of the user, and needs no new connection as long as the client has one. It goes
over the first of these that is free:

1. the client's home, which is the listener's connection, unless the call is large;
2. a connection of its own, if one is open;
3. an idle connection of the pool;
4. a new connection.

If replies are slow, the second one is opened before it is needed. If the server accepts no more connections, the
renewal waits for the pool's. If there is none, the renewal cancels what is under way over the home, and goes over that.

A client whose listener connects elsewhere has no home, and a client with a long grace renews over a second session.
Both open a connection for renewals before the first one is due.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import Any

import psycopg

from dblock._core.effects import Call, Row
from dblock._runtime.call_retry import CallRetry
from dblock._runtime.connection import RawConnection
from dblock._runtime.home import Home
from dblock._runtime.listener_connection import NotLent
from dblock._runtime.pool import Pool, Returns
from dblock._runtime.runner import Runner
from dblock._runtime.threads import start_thread
from dblock.errors import Unavailable

LARGE = 50_000
"""Characters from which a call does not go over the home. It takes long, and would delay the waiters' heartbeat."""

SLOW = 1 / 8
"""The part of its time from which a reply over the home is slow. Then a new connection would be slow to open too."""

SLOW_FOR = 60.0
"""Seconds for which a connection of its own stays open after the last slow reply."""

LONGEST_WAIT = 1.0
"""Seconds that a renewal waits for the home, at most. Then it goes over another connection."""


class _Unprepared:
    """Returns a connection to its pool. Until then nothing is prepared on it, which would take a round trip."""

    def __init__(self, raw: RawConnection, pool: Pool) -> None:
        self._pool = pool
        self._prepares, raw.prepares = raw.prepares, False

    def give(self, raw: RawConnection) -> None:
        raw.prepares = self._prepares
        self._pool.give(raw)


class KeepAliveRunner(Runner):
    """Performs calls in the threads of the keep-alive and the listener."""

    def __init__(self, *args: Any, home: Home | None = None, **options: Any) -> None:
        """`home` is None for a client that does not renew over it."""
        super().__init__(*args, **options)
        self._home_of_client = home
        self._slow_until = -math.inf
        if home is not None:
            self._pool.may_be_empty = lambda: home.is_open and time.monotonic() >= self._slow_until

    def warm(self) -> None:
        """Open a connection before it is needed, unless the client has a home."""
        if self._home_of_client is None:
            super().warm()

    def _call(self, call: Call, trouble: CallRetry | None = None) -> Row | None:
        home = self._home_of_client
        if home is None:
            return self._call_without_home(call)
        within = min(call.within, self.reply_within)
        trouble = CallRetry(self, call, sys.exc_info()[1])
        try:
            if sum(len(arg or "") for arg in call.args) < LARGE:
                wait = min(within / 4, LONGEST_WAIT) if self._pool.is_empty() else 0.0
                began = time.monotonic()
                row = home.renew(call, within, wait)
                if time.monotonic() - began >= within * SLOW:
                    self._open_beside()
                return row
        except NotLent:
            pass
        except psycopg.Error as error:
            trouble.raise_or_retry(error, None)
        try:
            return self._call_without_home(trouble.call)
        except Unavailable as error:
            if error.unanswered or self.is_refusal(error.__cause__) or not home.is_open:
                raise
            try:
                return home.renew(trouble.call, within, within, interrupts=True)
            except NotLent:
                raise error from None
            except psycopg.Error as problem:
                trouble.raise_or_give_up(problem, error)

    def _open_beside(self) -> None:
        """Open a connection in the background, for renewals that come while the home is busy."""
        self._slow_until = time.monotonic() + SLOW_FOR
        if self._pool.is_empty():
            with contextlib.suppress(Unavailable):
                start_thread("dblock connecting", self._warm_quietly)

    def _warm_quietly(self) -> None:
        with contextlib.suppress(Exception):  # the next slow reply opens it
            self._pool.give(self._pool.take())

    def _call_without_home(self, call: Call) -> Row | None:
        return super()._call(call)

    def _take(self, within: float = math.inf, lent: bool = False) -> tuple[RawConnection, Returns]:
        if self._spare is not None and self._home_of_client is not None and self._pool.is_empty():
            raw = self._spare._pool.take_idle()
            if raw is not None:
                return raw, _Unprepared(raw, self._spare._pool)
        return super()._take(within, lent)
