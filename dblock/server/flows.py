"""The flows of a server: those of a client, except that a ticket can outlast the request that made it.

An HTTP client waits in several requests. When one of them ends, its ticket is parked: it moves from this server to a
client of its own, which counts as alive for the ticket's ttl. The next request takes the ticket over, at this server or
at another.

An attempt is resumable if the HTTP client can name it, by a ticket or an Idempotency-Key. Otherwise the attempt is
private. If the request of a private attempt ends without a grant, its ticket is given up. The ticket or grant of a
resumable attempt may already belong to a request at another server, so it stays until it expires.

The `wait` of a request bounds how long it queues, and not how soon the database must reply: every call has the whole
patience of the server. Otherwise a request that tries once would fail if the database is slow for a second.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence

from dblock._core.acquire import NotGranted
from dblock._core.deadlocks import DeadlockWatch, Holds
from dblock._core.effects import Call, Flow
from dblock._core.options import LockOptions, interval, quoted
from dblock._core.replies import Grant, TicketStatus
from dblock._core.shared_acquire import SharedFlows
from dblock._core.waiters import LocalWaiter
from dblock.errors import DatabaseError

_SHARE = re.compile(r"#(writer|reader-[0-9]+|[0-9]+)$")
"""What the name of a share adds to the name of its lock."""


class ServerFlows(SharedFlows):
    """The flows of one server, in one schema."""

    def __init__(self, schema: str, holder: Callable[[], str], ticket_ttl: float) -> None:
        super().__init__(schema, holder)
        self.ticket_ttl = ticket_ttl
        """Seconds for which a parked ticket keeps its position."""
        self.private: set[str] = set()
        """The attempts that no HTTP client can name."""
        self.requeued: set[str] = set()
        """The attempts whose ticket was found to be gone, and that have a new one at the end of the queue."""
        self._keep_ticket = f"SELECT {quoted(schema)}.keep_ticket($1, $2, $3, $4)".encode()
        # The server that granted the lease may be another one, so the database says for how long it was held.
        held_for = (
            "(SELECT date_part('epoch', clock_timestamp()) - date_part('epoch', h.granted_at)"
            f" FROM {quoted(schema)}.holder($1) AS h WHERE h.token = $2)"
        )
        release = f"{quoted(schema)}.release($1, $2, durable => false)"
        self._end = f"SELECT {held_for}, {release}".encode()
        self._end_again = f"SELECT {held_for}, nullif({release}, false)".encode()

    def acquire(
        self,
        options: LockOptions,
        timeout: float | None,
        attempt: str,
        crowded: bool = False,
        holds: Holds | None = None,
    ) -> Flow[Grant | None]:
        """Acquire the lock or wait in the queue, as a client does, and report the wait to the observers."""
        flow = super().acquire(options, timeout, attempt, crowded, holds)
        return self.observed(options.name, flow, "busy" if timeout == 0 else "timeout")

    def observed(self, name: str, flow: Flow[Grant | None], missed: str) -> Flow[Grant | None]:
        """Report a flow that acquires a lock to the observers. `missed` is its outcome without a grant."""
        return flow if self.observation is None else self.observation.wait((name,), flow, missed=missed)

    def end(self, name: str, token: int) -> Flow[bool]:
        """Release this exact grant for its client, and report to the observers how long it was held.

        False if the grant was lost before, or if a reply was lost and it is unknown whether this call released it.
        """
        held_for, released = yield Call(self._end, (name, str(token)), self._end_again)
        if released != "t":
            return False
        if self.observation is not None and held_for is not None:
            self.observation.hold_seen(_SHARE.sub("", name), token, float(held_for))
        return True

    def park(self, name: str, attempt: str) -> Flow[bool]:
        """Let the attempt's ticket keep its position for the ticket's ttl. False if there is no ticket."""
        # The ticket's own client has the name of the attempt: a UUID that no other client has.
        args = (name, attempt, attempt, interval(self.ticket_ttl))
        (kept,) = yield Call(self._keep_ticket, args, within=self._give_up_within)
        return bool(kept == "t")

    def abandon_all(self, names: Sequence[str], attempt: str) -> Flow[None]:
        """Give up the ticket or grant of a private attempt after its request has ended."""
        if attempt in self.private:
            yield from super().abandon_all(names, attempt)
            self.private.discard(attempt)

    def abandon_ticket(self, name: str, attempt: str) -> Flow[None]:
        """Give up a ticket that a heartbeat found, and that has no waiter in this process any more.

        The ticket of a resumable attempt may have been parked since that heartbeat, so it is parked again.
        """
        if attempt in self.private:
            yield from super().abandon_ticket(name, attempt)
        else:
            yield from self.park(name, attempt)

    def _try(
        self, options: LockOptions, attempt: str, within: float = math.inf, ticket: int | None = None
    ) -> Flow[Grant | NotGranted]:
        return super()._try(options, attempt, math.inf, ticket)

    def _enqueue(
        self, options: LockOptions, attempt: str, within: float, had_ticket: bool, wait: bool = True
    ) -> Flow[Grant | TicketStatus | None]:
        reply = yield from super()._enqueue(options, attempt, math.inf, had_ticket, wait)
        if isinstance(reply, TicketStatus) and reply.fresh:
            self.requeued.add(attempt)
        return reply

    def _wait_in_queue(
        self, options: LockOptions, give_up_at: float, attempt: str, waiter: LocalWaiter, watch: DeadlockWatch
    ) -> Flow[Grant | None]:
        try:
            return (yield from super()._wait_in_queue(options, give_up_at, attempt, waiter, watch))
        except asyncio.CancelledError:
            # Before the waiter is removed: a heartbeat gives up tickets that have no waiter.
            if attempt not in self.private:
                yield from self._park_quietly(options, attempt)
            raise

    def _stop_waiting(self, options: LockOptions, attempt: str, waiter: LocalWaiter) -> Flow[Grant | None]:
        """Try a last time, and park the ticket. The client receives the ticket, so the attempt is resumable now."""
        reply = yield from self._enqueue(options, attempt, math.inf, True, False)
        if isinstance(reply, Grant):
            return reply
        self.private.discard(attempt)
        yield from self._park_quietly(options, attempt)
        return None

    def _park_quietly(self, options: LockOptions, attempt: str) -> Flow[None]:
        try:
            yield from self.park(options.name, attempt)
        except DatabaseError:
            return  # the database drops the ticket, and the next request queues again
