"""What a lock needs done, told step by step, apart from how it is done.

Whatever takes more than one step (try, wait, try again) is written once, as a generator that yields the steps it
needs and is sent their results. A runner performs them: one on psycopg's Connection, one on AsyncConnection. The
generators touch neither a database nor a clock of their own, so a test can drive them by hand.

What the database decides: who is granted, under which token, until when. What is only assumed here: the trust
window, counted on this process's monotonic clock from before the request was sent, so that a slow reply
cannot stretch the lease.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import socket
from collections.abc import Callable, Iterable, Sequence

from dblock._core import clock as clocks
from dblock._core.effects import GIVE_UP_WITHIN, Call, Flow, Place, Sleep, Wait
from dblock._core.options import LockOptions, interval, quoted
from dblock._core.presence import Presence
from dblock._core.replies import (
    Grant,
    Holder,
    QueuePositions,
    Renewal,
    TicketStatus,
    Waiter,
    array,
    decoded,
    items,
    moment,
    new_attempt,
)
from dblock.errors import ClaimBusy, DatabaseError

logger = logging.getLogger("dblock")

TRUST = 0.98
"""The part of a lease's time that its holder believes in; the rest covers clocks that run at unequal speeds."""

POLL_FIRST = 0.01
POLL_LONGEST = 0.05

HOLDER_CHECK_INTERVAL = 0.075
"""Seconds between two looks of the first in line at whether the holder is still there."""

LEAST_PATIENCE = 1.0
"""Seconds that an answer is always given, also to a caller who would not wait at all."""

BRISK = 1 / 8
"""The part of its time in which each step of giving up a renewal is done, for another is to follow in good time."""

CLAIM_WITHIN = 0.5
"""Seconds that a grant waits for those who are past a fence that it claims, before it is undone and tried again."""

TRANSIT_LOOKS = 3
"""How often a single try looks at a lock that is neither held nor to be had."""


class LockFlows:
    """The steps of each thing that can be done with a lock, in one schema, for one holder."""

    def __init__(
        self,
        schema: str,
        holder: str | None,
        clock: Callable[[], float] = clocks.now,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        prefix = quoted(schema)
        # Times come as seconds since 1970, so that no DateStyle, TimeZone or IntervalStyle has a say.
        # As a column and not as a table, which Postgres would first write down. OFFSET 0, so that it is called once.
        self._try_acquire = (
            "SELECT (r).granted, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).waiting FROM"
            f" (SELECT {prefix}.try_acquire($1, $2, $3, $4, $5, $6, presence => $7, fair => $8, ticket => $9) AS r"
            " OFFSET 0) AS a"
        ).encode()
        self._try_acquire_again = self._try_acquire.replace(b"$6,", b"$6, sent_before => true,")
        self._acquire = (
            "SELECT (r).granted, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).ticket, (r).first,"
            " (r).watched, (r).fresh FROM (SELECT"
            f" {prefix}.acquire($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) AS r OFFSET 0) AS a"
        ).encode()
        # With claims the grant raises fences too: all of it, or nothing.
        self._claiming = {
            call: _claiming(call, place)
            for call, place in ((self._try_acquire, 10), (self._try_acquire_again, 10), (self._acquire, 11))
        }
        self._heartbeat = (f"SELECT places, firsts, look_again, watched FROM {prefix}.heartbeat($1, $2)").encode()
        self._leave_place = f"SELECT {prefix}.abandon($1, $2, only_ticket => true)".encode()
        self._leave = f"SELECT {prefix}.leave($1, $2)".encode()
        self._leave_but = f"SELECT {prefix}.leave($1, but => $2)".encode()
        self._withdraw_presence = f"SELECT lost FROM {prefix}.withdraw_presence($1, $2, $3)".encode()
        self._queue = f"SELECT {prefix}.queue($1)".encode()
        self._renew_all = (
            f"SELECT date_part('epoch', moment), missed, reasons FROM {prefix}.renew_all($1, $2, $3, $4)"
        ).encode()
        self._release_all = f"SELECT busy FROM {prefix}.release_all($1, $2)".encode()
        self._abandon = f"SELECT {prefix}.abandon($1, $2)".encode()
        # Losing a release in a crash only keeps the lock until its deadline, so nobody waits for the disk.
        self._release = f"SELECT {prefix}.release($1, $2, durable => false)".encode()
        # Sent a second time, a release that finds nothing to free proves nothing: the first may have freed it.
        self._release_again = f"SELECT nullif({prefix}.release($1, $2, durable => false), false)".encode()
        self._holder = (
            "SELECT token, holder, meta, date_part('epoch', granted_at), date_part('epoch', expires_at), remaining"
            f" FROM {prefix}.holder($1)"
        ).encode()
        self.client = new_attempt()
        """A name for this process's part in the lines, which nobody can guess."""
        self.presence: Presence | None = None
        """How others can see that this process is there, while they can."""
        self._holder_name = holder
        self._host = socket.gethostname()
        self._clock = clock
        self._uniform = uniform

    def try_acquire(self, options: LockOptions, attempt: str) -> Flow[Grant | None]:
        """Ask once; the result is None when another holds the lock, or others wait for it in line."""
        for _ in range(TRANSIT_LOOKS):
            grant, held_for, waiting = yield from self._ask(options, attempt)
            if grant or held_for > 0 or waiting:
                break
            # Free, and in the hands of a transaction that is not through: it is worth another look.
            yield Sleep(self._uniform(POLL_FIRST / 2, POLL_FIRST))
        return grant

    def acquire(
        self,
        options: LockOptions,
        timeout: float | None,
        attempt: str,
        place: Callable[[], Place],
        crowded: bool = False,
    ) -> Flow[Grant | None]:
        """Ask, and wait in line until granted or until the timeout has passed; the result is then None.

        Where a crowd is to be expected it lines up at once, without a try beforehand.
        """
        give_up = math.inf if timeout is None else self._clock() + timeout
        if not crowded or timeout == 0:
            grant, _, _ = yield from self._ask(options, attempt, max(give_up - self._clock(), LEAST_PATIENCE))
            if grant or self._clock() >= give_up:
                return grant
        here = place()
        try:
            return (yield from self._wait_in_line(options, give_up, attempt, here))
        except DatabaseError:
            # That the database is away, or would not answer, does not mean that it has forgotten us.
            here.defer_cleanup()
            raise
        finally:
            here.leave()

    def _wait_in_line(self, options: LockOptions, give_up: float, attempt: str, here: Place) -> Flow[Grant | None]:
        ticket: int | None = None
        while True:
            within = max(give_up - self._clock(), LEAST_PATIENCE)
            grant, seat = yield from self._ask_in_line(options, attempt, within, ticket is not None)
            if grant:
                return grant
            left = give_up - self._clock()
            if left <= 0:
                break
            if seat is None:
                # Another transaction is at work on the lock, perhaps a long one; there is no ticket yet.
                yield Sleep(min(self._uniform(POLL_FIRST, POLL_LONGEST), left))
                continue
            if ticket is not None and seat.fresh:
                logger.warning("lock %r: not heard of in time, lost its place in line, has a new one", options.name)
            ticket = seat.ticket
            here.ticket_issued(seat.first, seat.look_in)
            yield Wait(here, left)
            here.ticket_redeemed()
            left = give_up - self._clock()
            if left <= 0:
                break
            # Usually it is our turn, and this is the shortest way.
            grant, _, _ = yield from self._ask(options, attempt, max(left, LEAST_PATIENCE), ticket)
            if grant:
                return grant
        # Nobody should wait behind a ticket that nobody will redeem.
        try:
            yield from self.abandon(options.name, attempt)
        except DatabaseError:
            here.defer_cleanup()
        return None

    def abandon(self, name: str, attempt: str) -> Flow[None]:
        """Give back whatever the attempt was granted, and its place in line, for a caller who leaves."""
        yield Call(self._abandon, (name, attempt), within=GIVE_UP_WITHIN)

    def leave_place(self, name: str, attempt: str) -> Flow[None]:
        """Give up a place in line that nobody waits at; a grant stays as it is."""
        yield Call(self._leave_place, (name, attempt), within=GIVE_UP_WITHIN)

    def heartbeat(self, client: str, names: Iterable[str], within: float) -> Flow[QueuePositions]:
        """Let a client that waits be heard, and ask how its places stand in the lines for these locks."""
        row = yield Call(self._heartbeat, (client, array(names)), within=within)
        places, firsts, look_again, watched = row
        return QueuePositions(
            int(places),
            [
                (attempt.replace("-", ""), float(seconds), seen == "t")
                for attempt, seconds, seen in zip(items(firsts), items(look_again), items(watched), strict=True)
            ],
        )

    def leave(self) -> Flow[None]:
        """End this client: give up all its places in line, and its presence."""
        name = self.presence.name if self.presence else None
        yield Call(self._leave, (self.client, name), within=GIVE_UP_WITHIN)

    def leave_all_but(self, attempts: Iterable[str]) -> Flow[None]:
        """Give up all places in line but these."""
        yield Call(self._leave_but, (self.client, array(attempts)), within=GIVE_UP_WITHIN)

    def withdraw_presence(self, presence: str, grants: Sequence[tuple[str, int]]) -> Flow[set[int]]:
        """Say that we are here, though this presence is gone.

        The result is the places, from 0, of those of the grants that are not ours any more.
        """
        args = (presence, array(name for name, _ in grants), array(str(token) for _, token in grants))
        (lost,) = yield Call(self._withdraw_presence, args, within=GIVE_UP_WITHIN)
        return {int(place) - 1 for place in items(lost)}

    def queue(self, name: str) -> Flow[list[Waiter]]:
        """Ask who waits for the lock, in order."""
        (found,) = yield Call(self._queue, (name,))
        return [Waiter(one["holder"], moment(float(one["since"]))) for one in json.loads(found)]

    def _ask(
        self, options: LockOptions, attempt: str, within: float = math.inf, ticket: int | None = None
    ) -> Flow[tuple[Grant | None, float, bool]]:
        """Ask once; the result is the grant, or None, how long it is still held for, and whether others wait."""
        sent_at = self._clock()
        presence = self._present(sent_at)
        args = (
            options.name,
            options.interval,
            self._who(),
            options.meta,
            attempt,
            "t" if options.durable else "f",
            presence.name if presence else None,
            "t" if options.fair else "f",
            None if ticket is None else str(ticket),
        )
        try:
            row = yield self._call(options, self._try_acquire, args, self._try_acquire_again, within)
        except ClaimBusy:
            return None, 0.0, False
        granted, token, expires_at, remaining, waiting, *_ = row
        left = float(remaining)
        if granted != "t":
            return None, left, waiting == "t"
        grant = Grant(options.name, int(token), float(expires_at), sent_at + left * TRUST, sent_at, presence)
        return (yield from self._in_time(grant)), left, False

    def _ask_in_line(
        self, options: LockOptions, attempt: str, within: float, had_ticket: bool
    ) -> Flow[tuple[Grant | None, TicketStatus | None]]:
        """Ask, and line up; the result is the grant, or None and whether we are first and when to look in again.

        Without even that, there is no ticket yet.
        """
        sent_at = self._clock()
        presence = self._present(sent_at)
        args = (
            options.name,
            options.interval,
            self._who(),
            options.meta,
            attempt,
            self.client,
            "t" if options.durable else "f",
            "t" if options.fair else "f",
            presence.name if presence else None,
            "t" if had_ticket else "f",
        )
        try:
            row = yield self._call(options, self._acquire, args, None, within)
        except ClaimBusy:
            return None, None
        granted, token, expires_at, remaining, ticket, first, watched, fresh, *_ = row
        left = float(remaining)
        if granted == "t":
            grant = Grant(options.name, int(token), float(expires_at), sent_at + left * TRUST, sent_at, presence)
            return (yield from self._in_time(grant)), None
        if ticket is None:
            return None, None
        look_in = min(left, HOLDER_CHECK_INTERVAL) if watched == "t" else left
        return None, TicketStatus(int(ticket), fresh == "t", first == "t", look_in)

    def _call(
        self, options: LockOptions, sql: bytes, args: tuple[str | None, ...], again: bytes | None, within: float
    ) -> Call:
        if not options.claims:
            return Call(sql, args, again, within)
        claiming = self._claiming
        args = (*args, array(options.claims), f"{min(within, CLAIM_WITHIN):.3f}")
        return Call(claiming[sql], args, claiming[again] if again else None, within)

    def _in_time(self, grant: Grant) -> Flow[Grant | None]:
        """Return the grant, unless its answer took longer than the lease lasts: nobody may act on it then."""
        if self._clock() < grant.trusted_until:
            return grant
        yield from self.release(grant.name, grant.token, grant.trusted_until)
        return None

    def _present(self, now: float) -> Presence | None:
        """Return our presence, unless it is in doubt: a new lease is better off without one then."""
        return self.presence if self.presence is not None and self.presence.stands(now) else None

    def _who(self) -> str:
        """Return what others see of us; asked each time, for after a fork the process is another."""
        return self._holder_name if self._holder_name is not None else f"{self._host} pid {os.getpid()}"

    def renew(
        self, grants: Sequence[tuple[str, int, float]], within: float = math.inf, tie: Presence | None = None
    ) -> Flow[Renewal]:
        """Extend these exact grants, each given by name, token and ttl, in one call; tie them, if so wanted."""
        sent_at = self._clock()
        names, tokens, ttls = zip(*grants, strict=True)
        moment, missed, reasons = yield Call(
            self._renew_all,
            (array(names), array(map(str, tokens)), array(map(interval, ttls)), tie.name if tie else None),
            within=within,
            giving_up=min(within * BRISK, GIVE_UP_WITHIN),
        )
        places = [int(place) - 1 for place in items(missed)]
        return Renewal(sent_at, float(moment), dict(zip(places, items(reasons), strict=True)))

    def release_all(
        self, grants: Sequence[tuple[str, int]], within: float = math.inf, giving_up: float = GIVE_UP_WITHIN
    ) -> Flow[set[int]]:
        """Give these exact grants back in one call that waits for no row.

        The result is the places, from 0, of those that another transaction is at work on: ask again for these.
        """
        names, tokens = zip(*grants, strict=True)
        args = (array(names), array(map(str, tokens)))
        (busy,) = yield Call(self._release_all, args, within=within, giving_up=giving_up)
        return {int(place) - 1 for place in items(busy)}

    def release(self, name: str, token: int, trusted_until: float) -> Flow[bool]:
        """Give this exact grant back; the result is False when it was lost before."""
        args = (name, str(token))
        (released,) = yield Call(self._release, args, self._release_again)
        if released is None:
            # The first sending's answer is lost. While we may believe in the grant, nothing else has ended it.
            return self._clock() < trusted_until
        return bool(released == "t")

    def holder(self, name: str) -> Flow[Holder | None]:
        """Ask who holds the lock; the result is None when nobody does."""
        row = yield Call(self._holder, (name,))
        if row is None:
            return None
        token, holder, meta, granted_at, expires_at, remaining = row
        return Holder(
            int(token) if token else None,
            holder,
            decoded(meta),
            moment(float(granted_at)),
            moment(float(expires_at)),
            float(remaining),
        )


def _claiming(call: bytes, place: int) -> bytes:
    """Return a call that grants, made to raise the fences of the resources in its argument of that number too."""
    claim = b", CASE WHEN (r).granted THEN fenced_store.claim($%d, (r).token, $3, $%d)::text END FROM" % (
        place,
        place + 1,
    )
    return call.replace(b" FROM", claim, 1)
