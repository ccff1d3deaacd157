"""The client's one lasting connection, for the calls of its other parts.

The listener's connection is the home of a client: its presence, its wake-ups and its heartbeats. A client that only
waits has no other connection, and neither has a holder without a presence, so renewals can go over the home too. A call
of the user borrows the home if the pool has no connection open, so that a client that wakes up after a long wait needs
no new one.

A borrowed call must not delay a renewal or a heartbeat. So the home is lent for a short time only, a few times in a
row, and not if a renewal is due in that time. A call without a reply in that time is cancelled and moves to a
connection of the pool. Borrowed calls run in a thread of their own: neither an interrupt of the caller nor a blocked
event loop can keep the connection locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from dblock._core.effects import Call, Row
from dblock._core.grants import GrantFlows
from dblock._core.listener_flow import ListenerFlow
from dblock._core.timings import Timings
from dblock._runtime.forks import call_after_fork
from dblock._runtime.listener_connection import ListenerConnection, NotLent
from dblock._runtime.threads import RevocableThread, started
from dblock.errors import Unavailable

LOANS = 4
"""How many calls borrow the home within `idle_for` seconds. The next one opens a connection of the pool."""


class Lends(Protocol):
    """A connection that can be borrowed for a call."""

    def lend(self, call: Call, within: float, wait: float) -> Row | None:
        """Make a call over it. Raise NotLent if it is not free in time."""


class Home:
    """Lends the connection of a client's listener."""

    def __init__(self, flows: GrantFlows) -> None:
        self._flows = flows
        self._timings = flows.timings
        self._flow: ListenerFlow | None = None
        self._renewal_due_at: Callable[[], float]
        self._keeps_leases: Callable[[], bool]
        self.reserve: Callable[[], Lends | None] = lambda: None
        """Returns the client's second connection if it is open. A call that has no other one borrows it."""
        self.reset_after_fork()
        call_after_fork(self)

    def reset_after_fork(self) -> None:
        """Forget the calls of the parent."""
        self._loans: deque[float] = deque(maxlen=LOANS)
        """When the home was lent last."""
        self._under_way: set[_Loan] = set()

    def set_up(self, flow: ListenerFlow, renewal_due_at: Callable[[], float], keeps_leases: Callable[[], bool]) -> None:
        """Lend the connection of this flow.

        The functions return when the next renewal is due, and whether the client has leases.
        """
        flow.is_home = True
        self._flow, self._renewal_due_at, self._keeps_leases = flow, renewal_due_at, keeps_leases

    @property
    def connection(self) -> ListenerConnection | None:
        """The connection, None while there is none."""
        flow = self._flow
        return cast("ListenerConnection | None", None if flow is None or flow.closed else flow.connection)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self.connection is not None

    @property
    def has_any(self) -> bool:
        """Whether there is a connection to borrow for a call that has no other one."""
        return self.is_open or self.reserve() is not None

    @property
    def is_enough(self) -> bool:
        """Whether the client needs no other connection: this one is open, and no lease depends on its session."""
        return self.is_open and (self._flows.presence is None or not self._keeps_leases())

    @property
    def in_use(self) -> bool:
        """Whether a call of the user is under way over it."""
        return bool(self._under_way)

    def renew(self, call: Call, within: float, wait: float, interrupts: bool = False) -> Row | None:
        """Make a call of the keep-alive. Raise NotLent if the connection is not free within `wait` seconds.

        Calls that begin in that time stand aside. If the call has no other connection, it `interrupts` the one that is
        under way.
        """
        connection, flow, clock = self.connection, self._flow, self._flows.clock
        if connection is None or flow is None:
            raise NotLent
        asked_at = clock()
        row = connection.renew(call, within, wait, interrupts)
        # At the latest it was sent when the wait for the connection was over. Before that is safe too.
        if flow.connection is connection:
            flow.replied(asked_at)
        return row

    def may_lend(self, call: Call) -> bool:
        """Return whether a call may borrow the connection now."""
        if not self.is_open:
            return False
        if call.apart and self._flows.presence is None:
            return False
        if self._renewal_due_at() < self._flows.clock() + self._timings.lent_for:
            return False
        now = time.monotonic()
        if len(self._loans) == LOANS and now < self._loans[0] + self._timings.idle_for:
            return False
        self._loans.append(now)
        return True

    def call(self, call: Call, within: float, wait: float | None = None) -> Row | None:
        """Make a call of the user's thread. Raise NotLent if the connection is not free in time.

        A call that has no other connection passes `wait`: it waits for so many seconds, and borrows for longer. If
        there is no home, it borrows the reserve.
        """
        came = threading.Lock()  # not an Event, which an interrupt may break
        came.acquire()
        loan = self._loan(call, within, wait, came.release)
        try:
            loan.start()
            loan.wait_for(came)
        except BaseException:
            loan.revoke()
            loan.wait_for(came)  # the caller cleans up after the call, not before it
            raise
        return loan.result()

    async def call_async(self, call: Call, within: float, wait: float | None = None) -> Row | None:
        """Make a call of the user's task; see call."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not came.done():
                came.set_result(None)

        loan = self._loan(call, within, wait, lambda: loop.call_soon_threadsafe(end))
        loan.start()
        cancelled: asyncio.CancelledError | None = None
        while not came.done():
            try:
                await asyncio.wait([came])
            except asyncio.CancelledError as error:
                cancelled = error  # the caller cleans up after the call, not before it
        if cancelled is not None:
            raise cancelled
        return loan.result()

    def _loan(self, call: Call, within: float, wait: float | None, ended: Callable[[], object]) -> _Loan:
        connection: Lends | None = self.connection or (self.reserve() if wait is not None else None)
        if connection is None:
            raise NotLent
        return _Loan(connection, call, within, wait, ended, self._under_way, self._timings)


class _Loan:
    """One borrowed call."""

    def __init__(
        self,
        connection: Lends,
        call: Call,
        within: float,
        wait: float | None,
        ended: Callable[[], object],
        under_way: set[_Loan],
        timings: Timings,
    ) -> None:
        self._connection = connection
        self._call = call._replace(giving_up=min(call.giving_up, timings.loan_given_up_within))
        self._lent_for = timings.lent_for
        longest = timings.lent_for if wait is None else max(timings.lent_for, timings.last_resort_for)
        self._within = min(within, longest)
        self._wait = timings.free_within if wait is None else wait
        self._ended = ended
        self._under_way = under_way
        self._row: Row | None = None
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = RevocableThread("dblock call", self._run)

    def start(self) -> None:
        """Begin the call. Raise NotLent if the process may start no thread now."""
        self._under_way.add(self)
        try:
            started(self._thread)
        except Unavailable:
            self._forget()
            raise NotLent from None

    def revoke(self) -> None:
        """Do not begin the call, if it has not begun."""
        if self._thread.revoke():
            self._forget()

    def wait_for(self, came: threading.Lock) -> None:
        """Wait until the call is over. The lock is released at its end, and an interrupt may have taken it again."""
        while not self._is_over:
            came.acquire(timeout=self._lent_for)

    def _run(self) -> None:
        try:
            self._row = self._connection.lend(self._call, self._within, self._wait)
        except BaseException as error:
            self._error = error
        finally:
            self._forget()
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._ended()

    def _forget(self) -> None:
        self._under_way.discard(self)
        self._is_over = True

    def result(self) -> Row | None:
        """Return its row, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._row
