"""Performs the calls of the keep-alive: renewals, and reports that the client is alive.

Guarantee: a renewal waits for no call of the user, and needs no new connection as long as the client has one. It goes
over the first of these that is free:

1. a connection of its own, if one is open;
2. the client's home, which is the listener's connection, unless the call is large;
3. an idle connection of the pool;
4. a new connection.

If the server accepts no more connections, the renewal waits for a connection of the pool. If the pool has none, the
renewal cancels what is under way over the home, and goes over the home.

The connection of its own is the *reserve* of a client whose leases are tied to a presence. With the home alone, the end
of one session could cost these leases: on a full server, and in a shutdown, in which only the end of a second session
shows that the server ends all of them. A client without a presence opens the connection only if replies are slow or
renewals are large. A client whose listener connects elsewhere has no home, and opens the connection with its first
lease.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import psycopg

from dblock._core.effects import Call, Row
from dblock._runtime.call_retry import CallRetry, must_cancel
from dblock._runtime.connection import POLL_INTERVAL, RawConnection, poll_interval
from dblock._runtime.error_mapping import is_overdue
from dblock._runtime.home import Home
from dblock._runtime.listener_connection import NotLent
from dblock._runtime.pool import AsyncPool, Pool, Returns
from dblock._runtime.runner import Runner
from dblock._runtime.threads import start_thread
from dblock.errors import DblockError, Unavailable

LARGE = 50_000
"""Characters from which a call does not go over the home. It takes long, and would delay the waiters' heartbeat."""

SLOW_FOR = 60.0
"""Seconds for which a connection of its own stays open after the last slow reply."""


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
        self._slow_until = self._reserved_until = -math.inf
        if home is not None:
            self._pool.may_be_empty = lambda: (
                home.is_enough and time.monotonic() >= max(self._slow_until, self._reserved_until)
            )
            home.reserve = lambda: self if self._pool.in_use else None
            if self._spare is not None:
                self._keep_reserve(self._spare._pool, home)

    def _keep_reserve(self, pool: Pool | AsyncPool, home: Home) -> None:
        """Let the pool of the calls close its last connection only if another one is the reserve, or none is needed."""
        pool.may_be_empty = lambda: home.is_open and (home.is_enough or not self._pool.is_empty())

    def warm(self) -> None:
        """Open a connection before it is needed, unless the client has a home."""
        if self._home_of_client is None:
            super().warm()

    def reserve(self, lasting: bool) -> None:
        """Have a second session, so that the end of the home's alone costs no lease.

        In the first moments of a lease, a connection of the pool is enough. For a `lasting` lease it is one that no
        call of the user can keep busy.
        """
        if self._home_of_client is None:
            return
        if lasting:
            self._reserved_until = time.monotonic() + self.timings.reserved_for
        if self._pool.is_empty():
            self._begin(self._open_own if lasting else self._warm_calls)

    def lend(self, call: Call, within: float, wait: float) -> Row | None:
        """Make a call of the user over it, because the client has no other connection. Raise NotLent if it is busy."""
        try:
            raw = self._pool.take(wait)
        except (psycopg.Error, DblockError):
            raise NotLent from None
        try:
            row: Row | None = raw.connection.wait(raw.exchange(call, within), poll_interval(within))
            return row
        except psycopg.Error as error:
            if must_cancel(error, raw):
                with contextlib.suppress(psycopg.Error):
                    limit = self.giving_up(call)
                    raw.connection.cancel_safe(timeout=max(limit, POLL_INTERVAL))
                    raw.connection.wait(raw.drain(limit), poll_interval(limit))
            raise
        finally:
            self._pool.give(raw)

    def reserve_ended_at(self, calls_ended_at: float) -> float:
        """Return when the server last ended the second session with a message, on the clock of dblock._core.clock.

        `calls_ended_at` is when it ended one of those for calls.
        """
        return max(self.terminated_at, calls_ended_at) if self._pool.is_empty() else self.terminated_at

    def _call(self, call: Call, trouble: CallRetry | None = None) -> Row | None:
        home = self._home_of_client
        if home is None:
            return self._call_without_home(call)
        within = min(call.within, self.reply_within)
        trouble = CallRetry(self, call, sys.exc_info()[1])
        try:
            if not self._pool.has_idle and sum(len(arg or "") for arg in call.args) < LARGE:
                began = time.monotonic()
                row = home.renew(call, within, self._wait(within))
                if time.monotonic() - began >= within * self.timings.slow_part:
                    self._slow_until = time.monotonic() + SLOW_FOR
                    if self._pool.is_empty():
                        self._begin(self._open_own)
                return row
        except NotLent:
            pass
        except psycopg.Error as error:
            trouble.raise_or_retry(error, None)
        try:
            return self._call_without_home(trouble.call, trouble)
        except Unavailable as error:
            if is_overdue(error.__cause__) or self.is_refusal(error.__cause__) or not home.is_open:
                raise
            try:
                return home.renew(trouble.call, within, within, interrupts=True)
            except NotLent:
                raise error from None
            except psycopg.Error as problem:
                trouble.raise_or_give_up(problem, error)

    def _begin(self, function: Callable[[], object]) -> None:
        """Open a connection in the background. If that fails, the next turn of the keep-alive tries again."""

        def run() -> None:
            with contextlib.suppress(Exception):
                function()

        with contextlib.suppress(Unavailable):
            start_thread("dblock connecting", run)

    def _open_own(self) -> None:
        """Open a connection that no call of the user goes over, or take over an idle one of the pool."""
        raw = self._spare._pool.cede_idle() if self._spare is not None else None
        if raw is None:
            super().warm()
        else:
            raw.prepares = False  # that would take a round trip
            self._pool.adopt(raw)

    def _warm_calls(self) -> None:
        """Open a connection in the pool of the calls, if it has none."""
        if self._spare is not None and self._spare._pool.is_empty():
            self._spare.warm()

    def _call_without_home(self, call: Call, trouble: CallRetry | None = None) -> Row | None:
        return super()._call(call, trouble)

    def _drop_idle(self) -> None:
        super()._drop_idle()
        if self._spare is not None and self._home_of_client is not None:
            self._spare._drop_idle()

    def _take(self, within: float = math.inf, lent: bool = False) -> tuple[RawConnection, Returns]:
        home = self._home_of_client
        if self._spare is not None and home is not None and self._pool.is_empty():
            raw = self._spare._pool.take_idle()
            if raw is not None:
                return raw, _Unprepared(raw, self._spare._pool)
        if home is not None and home.is_open and self._pool.in_use and not self._pool.has_idle:
            # Another thread uses or opens it. That may take long, and there is still the home.
            return self._pool.take(self._wait(within)), self._pool
        return super()._take(within, lent)

    def _wait(self, within: float) -> float:
        """Return the seconds that a call waits for one connection before it goes over another."""
        return min(within / 4, self.timings.longest_wait)
