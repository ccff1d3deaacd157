"""The calls of barriers and latches, and how a waiter waits, as flows for threads and asyncio.

Every call names the exact attempt, so it is safe to send twice. An outage of the database does not end a wait: the
waiter may have been told to continue by a reply that was lost, so it asks again under the same attempt until its
timeout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Flow, JoinQueue, Sleep, Wait
from dblock._core.options import Seconds, brief, check_name, check_seconds, quoted
from dblock._core.outage import Outage
from dblock.errors import DatabaseError, DblockError, InvalidArgument, NotWritable, Unavailable

MOST_PARTIES = 10_000
MOST_COUNTS = 1_000_000_000

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two requests to a database that is away. The pause doubles each time."""

AWAY = (Unavailable, NotWritable)
"""The errors of an outage or a failover, in which the request may have been executed."""


class Reply(NamedTuple):
    """What the database replied to a waiter."""

    result: int | None
    """The number of the party, or what remains of the latch. None: wait."""
    fresh: bool = False
    """Whether the waiter was not registered before."""
    next_check: float = math.inf
    """Seconds after which to ask again, without a notification."""


def check_size(kind: str, name: str, size: int) -> int:
    """Return the number of parties or the count, if the name and the number are within their limits."""
    check_name(name, f"A {kind}'s name")
    what, most = ("number of parties", MOST_PARTIES) if kind == "barrier" else ("count", MOST_COUNTS)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
        raise InvalidArgument(
            f"The {what} of {kind} {brief(name)} is a whole number from 1 to {most}; got {brief(size)}."
        )
    return size


def check_wait(kind: str, name: str, timeout: Seconds | None) -> float | None:
    """Return the timeout in seconds. None waits without end."""
    if timeout is None:
        return None
    seconds = check_seconds(f"timeout of {kind} {brief(name)}", timeout)
    if seconds < 0:
        raise InvalidArgument(
            f"The timeout of {kind} {brief(name)} is {seconds:g} s; give 0 to ask once, None to wait without end."
        )
    return None if seconds == math.inf else seconds


def must_leave(error: BaseException) -> bool:
    """Return whether the caller of a wait that raised this error may still count. DatabaseError has been seen to."""
    return not isinstance(error, DatabaseError) and (not isinstance(error, DblockError) or error.may_be_done)


class WaitingFlows:
    """What the flows of barriers and latches share."""

    kind = ""

    def __init__(self, flows: LockFlows, schema: str, name: str, size: int) -> None:
        self._flows = flows
        self._name = name
        self._size = size
        self._wake_waiters = f"SELECT {quoted(schema)}.wake_waiters($1, $2)".encode()

    def abandon(self, attempt: str) -> Flow[None]:
        """Give up the wait of a caller that leaves."""
        return self._flows.abandon(self.key, attempt)

    @property
    def key(self) -> str:
        """The name under which the client's listener knows the waiters."""
        return f"{self.kind}:{self._name}"

    def _wait(
        self,
        attempt: str,
        timeout: float | None,
        ask: Callable[[str, float], Flow[Reply]],
        leave: Callable[[str], Flow[int | None]],
    ) -> Flow[int | None]:
        """Ask until there is a result. When the timeout has passed, leave, which may still find a result."""
        flows = self._flows
        give_up_at = math.inf if timeout is None else flows.clock() + timeout
        outage = Outage(f"{self.kind} {self._name!r}: the database replies again")
        pause = FIRST_PAUSE
        waiter = yield JoinQueue(self.key, attempt)
        try:
            while True:
                waiter.ticket_redeemed()
                try:
                    reply = yield from ask(attempt, max(give_up_at - flows.clock(), flows.timings.least_patience))
                except AWAY as error:
                    outage.failed("%s %r: the database does not reply, asking again: %s", self.kind, self._name, error)
                    wait, pause = flows.uniform(pause / 2, pause), min(pause * 2, LONGEST_PAUSE)
                else:
                    outage.worked()
                    if reply.result is not None:
                        return reply.result
                    wait, pause = reply.next_check, FIRST_PAUSE
                    waiter.ticket_issued(False, math.inf, reply.fresh)
                left = give_up_at - flows.clock()
                if left > 0:
                    yield Wait(waiter, min(wait, left))
                if flows.clock() >= give_up_at:
                    waiter.ticket_redeemed()
                    return (yield from leave(attempt))
        except DatabaseError:
            # The database did not reply, but it may still count this waiter.
            waiter.defer_cleanup()
            raise
        finally:
            waiter.leave()

    def _arguments(self, attempt: str) -> tuple[str | None, ...]:
        flows = self._flows
        presence = flows._valid_presence(flows.clock())
        return (
            self._name,
            str(self._size),
            attempt,
            flows.client,
            flows.holder_name(),
            presence.name if presence else None,
        )

    def _wake(self) -> Flow[None]:
        """Wake the waiters whose wait is over. They find out by themselves if this fails."""
        with contextlib.suppress(DatabaseError):
            yield Call(self._wake_waiters, (self.kind, self._name), within=self._flows.timings.give_up_within)


class BarrierFlows(WaitingFlows):
    """The flows of one barrier."""

    kind = "barrier"

    def __init__(self, flows: LockFlows, schema: str, name: str, parties: int) -> None:
        super().__init__(flows, schema, name, parties)
        prefix = quoted(schema)
        arrive = f"(SELECT {prefix}.arrive_barrier($1, $2, $3, $4, $5, $6) AS r OFFSET 0) AS a"
        self._arrive = f"SELECT (r).number, (r).wake, (r).fresh, (r).next_check FROM {arrive}".encode()
        # The first call may have tripped the barrier, and nothing has woken the others then.
        self._arrive_again = self._arrive.replace(b"(r).wake", b"(r).tripped")
        self._leave = f"SELECT {prefix}.leave_barrier($1, $2)".encode()

    def wait(self, attempt: str, timeout: float | None) -> Flow[int | None]:
        """Wait until the barrier trips. The result is the party's number, or None if it has left after the timeout."""
        return self._wait(attempt, timeout, self._ask, self.leave)

    def _ask(self, attempt: str, within: float) -> Flow[Reply]:
        row = yield Call(self._arrive, self._arguments(attempt), self._arrive_again, within)
        number, wake, fresh, next_check = row
        if wake == "t":
            yield from self._wake()
        return Reply(
            None if number is None else int(number),
            fresh == "t",
            math.inf if next_check is None else max(float(next_check), FIRST_PAUSE),
        )

    def leave(self, attempt: str) -> Flow[int | None]:
        """Leave the barrier. The result is the party's number, if the barrier had tripped with it before."""
        (number,) = yield Call(self._leave, (self._name, attempt))
        return None if number is None else int(number)


class LatchFlows(WaitingFlows):
    """The flows of one latch."""

    kind = "latch"

    def __init__(self, flows: LockFlows, schema: str, name: str, count: int) -> None:
        super().__init__(flows, schema, name, count)
        prefix = quoted(schema)
        self._await = f"SELECT remaining, fresh FROM {prefix}.await_latch($1, $2, $3, $4, $5, $6)".encode()
        self._count_down = f"SELECT remaining, opened FROM {prefix}.count_down($1, $2, $3, $4)".encode()
        # The first call may have opened the latch, and nothing has woken the waiters then.
        self._count_down_again = self._count_down.replace(b"opened", b"remaining = 0")
        self._remaining = f"SELECT {prefix}.latch_remaining($1, $2)".encode()

    def wait(self, attempt: str, timeout: float | None) -> Flow[int | None]:
        """Wait until the latch is open. The result is 0, or None when the timeout has passed."""
        return self._wait(attempt, timeout, self._ask, self._give_up)

    def _ask(self, attempt: str, within: float) -> Flow[Reply]:
        remaining, fresh = yield Call(self._await, self._arguments(attempt), within=within)
        return Reply(0 if remaining == "0" else None, fresh == "t")

    def _give_up(self, attempt: str) -> Flow[None]:
        yield from self.abandon(attempt)

    def count_down(self, attempt: str, by: int) -> Flow[int]:
        """Count the latch down, once per attempt. The result is what remains."""
        if isinstance(by, bool) or not isinstance(by, int) or not 1 <= by <= MOST_COUNTS:
            raise InvalidArgument(
                f"Latch {brief(self._name)} is counted down by 1 to {MOST_COUNTS} at a time; got {brief(by)}."
            )
        flows = self._flows
        give_up_at = flows.clock() + flows.timings.count_retry_for
        pause, statement = FIRST_PAUSE, self._count_down
        while True:
            try:
                args = (self._name, str(self._size), str(by), attempt)
                remaining, opened = yield Call(statement, args, self._count_down_again)
            except AWAY:
                if flows.clock() >= give_up_at:
                    raise
                statement = self._count_down_again
                yield Sleep(flows.uniform(pause / 2, pause))
                pause = min(pause * 2, LONGEST_PAUSE)
            else:
                break
        if opened == "t":
            yield from self._wake()
        return int(remaining)

    def remaining(self) -> Flow[int]:
        """Ask how much of the latch remains."""
        (remaining,) = yield Call(self._remaining, (self._name, str(self._size)))
        return int(remaining)
