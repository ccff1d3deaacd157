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
import math
import os
import random
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeVar

from dblock import clock as clocks
from dblock.terms import Terms, interval, quoted

T = TypeVar("T")
Row = tuple["str | None", ...]

TRUST = 0.98
"""The part of a lease's time that its holder believes in; the rest covers clocks that run at unequal speeds."""

POLL_FIRST = 0.01
POLL_LONGEST = 0.25

LEAST_PATIENCE = 1.0
"""Seconds that an answer is always given, also to a caller who would not wait at all."""

GIVE_UP_WITHIN = 2.0
"""Seconds that each step of giving up an unanswered call may take: to cancel it, to see it end, to undo it."""

TRANSIT_LOOKS = 3
"""How often a single try looks at a lock that is neither held nor to be had."""


class Call(NamedTuple):
    """Call one of the database's functions; the result is its row as text, or None. Safe to send twice."""

    sql: bytes
    args: tuple[str | None, ...]
    again: bytes | None = None
    """What to send after the connection broke, if not the same: the first sending may have been done."""
    within: float = math.inf
    """Seconds to wait for the answer; never longer than the client's patience."""


class Sleep(NamedTuple):
    """Let this many seconds pass."""

    seconds: float


Steps = Generator["Call | Sleep", Any, T]


class Grant(NamedTuple):
    """One act of giving a lock to a holder, as the database told it."""

    name: str
    token: int
    expires_at: float
    """In seconds since 1970, by the database's clock; for people and logs, never to be compared with ours."""
    trusted_until: float
    """By our monotonic clock."""
    sent_at: float
    """When the request was sent, by the same clock."""


class Renewal(NamedTuple):
    """What became of an attempt to renew several grants."""

    sent_at: float
    moment: float
    """When the database did it, by its own clock, in seconds since 1970."""
    missed: dict[int, str]
    """Why not, for those that were not renewed, by their place in the request from 0."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as of the moment the database was asked."""

    token: int | None
    """The fencing token; None for a lock without durability."""
    holder: str
    meta: Any
    """As Python objects; as the JSON itself where Python cannot hold it."""
    granted_at: datetime
    expires_at: datetime
    remaining: float
    """Seconds left by the database's clock, at that moment."""


class Service:
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
        self._try_acquire = (
            "SELECT granted, token, extract(epoch FROM expires_at), remaining"
            f" FROM {prefix}.try_acquire($1, $2, $3, $4, $5, $6)"
        ).encode()
        self._try_acquire_again = self._try_acquire.replace(b"$6)", b"$6, sent_before => true)")
        self._renew_all = (
            f"SELECT extract(epoch FROM moment), missed, reasons FROM {prefix}.renew_all($1, $2, $3)"
        ).encode()
        self._release_all = f"SELECT busy FROM {prefix}.release_all($1, $2)".encode()
        self._abandon = f"SELECT {prefix}.abandon($1, $2)".encode()
        # Losing a release in a crash only keeps the lock until its deadline, so nobody waits for the disk.
        self._release = f"SELECT {prefix}.release($1, $2, durable => false)".encode()
        # Sent a second time, a release that finds nothing to free proves nothing: the first may have freed it.
        self._release_again = f"SELECT nullif({prefix}.release($1, $2, durable => false), false)".encode()
        self._holder = (
            "SELECT token, holder, meta, extract(epoch FROM granted_at), extract(epoch FROM expires_at), remaining"
            f" FROM {prefix}.holder($1)"
        ).encode()
        self._holder_name = holder
        self._host = socket.gethostname()
        self._clock = clock
        self._uniform = uniform

    def try_acquire(self, terms: Terms, attempt: str) -> Steps[Grant | None]:
        """Ask once; the result is None when another holds the lock."""
        for _ in range(TRANSIT_LOOKS):
            grant, held_for = yield from self._ask(terms, attempt)
            if grant or held_for > 0:
                break
            # Free, and in the hands of a transaction that is not through: it is worth another look.
            yield Sleep(self._uniform(POLL_FIRST / 2, POLL_FIRST))
        return grant

    def acquire(self, terms: Terms, timeout: float | None, attempt: str) -> Steps[Grant | None]:
        """Ask until granted, or until the timeout has passed; the result is then None."""
        started = self._clock()
        pause = POLL_FIRST
        while True:
            left = float("inf") if timeout is None else started + timeout - self._clock()
            grant, held_for = yield from self._ask(terms, attempt, max(left, LEAST_PATIENCE))
            if grant:
                return grant
            left = float("inf") if timeout is None else started + timeout - self._clock()
            if left <= 0:
                return None
            # Spread out, so that a crowd does not come back together; not past the holder's deadline.
            yield Sleep(min(self._uniform(pause / 2, pause), max(held_for, POLL_FIRST), left))
            pause = min(pause * 1.5, POLL_LONGEST)

    def abandon(self, name: str, attempt: str) -> Steps[None]:
        """Give back whatever the attempt was granted, for a caller who left before the answer came."""
        yield Call(self._abandon, (name, attempt), within=GIVE_UP_WITHIN)

    def _ask(self, terms: Terms, attempt: str, within: float = math.inf) -> Steps[tuple[Grant | None, float]]:
        """Ask once; the result is the grant, or None and the seconds that the lock is still held for."""
        sent_at = self._clock()
        args = (terms.name, terms.interval, self._who(), terms.meta, attempt, "t" if terms.durable else "f")
        granted, token, expires_at, remaining = yield Call(self._try_acquire, args, self._try_acquire_again, within)
        left = float(remaining)
        if granted != "t":
            return None, left
        grant = Grant(terms.name, int(token), float(expires_at), sent_at + left * TRUST, sent_at)
        if self._clock() >= grant.trusted_until:
            # The answer took longer than the lease lasts. Nobody may act on it, so it is given back.
            yield from self.release(grant.name, grant.token, grant.trusted_until)
            return None, POLL_FIRST
        return grant, left

    def _who(self) -> str:
        """Return what others see of us; asked each time, for after a fork the process is another."""
        return self._holder_name if self._holder_name is not None else f"{self._host} pid {os.getpid()}"

    def renew(self, grants: Sequence[tuple[str, int, float]], within: float = math.inf) -> Steps[Renewal]:
        """Extend these exact grants, each given by name, token and ttl, in one call."""
        sent_at = self._clock()
        names, tokens, ttls = zip(*grants, strict=True)
        moment, missed, reasons = yield Call(
            self._renew_all,
            (array(names), array(map(str, tokens)), array(map(interval, ttls))),
            within=within,
        )
        places = [int(place) - 1 for place in items(missed)]
        return Renewal(sent_at, float(moment), dict(zip(places, items(reasons), strict=True)))

    def release_all(self, grants: Sequence[tuple[str, int]], within: float = math.inf) -> Steps[set[int]]:
        """Give these exact grants back in one call that waits for no row.

        The result is the places, from 0, of those that another transaction is at work on: ask again for these.
        """
        names, tokens = zip(*grants, strict=True)
        (busy,) = yield Call(self._release_all, (array(names), array(map(str, tokens))), within=within)
        return {int(place) - 1 for place in items(busy)}

    def release(self, name: str, token: int, trusted_until: float) -> Steps[bool]:
        """Give this exact grant back; the result is False when it was lost before."""
        args = (name, str(token))
        (released,) = yield Call(self._release, args, self._release_again)
        if released is None:
            # The first sending's answer is lost. While we may believe in the grant, nothing else has ended it.
            return self._clock() < trusted_until
        return bool(released == "t")

    def holder(self, name: str) -> Steps[Holder | None]:
        """Ask who holds the lock; the result is None when nobody does."""
        row = yield Call(self._holder, (name,))
        if row is None:
            return None
        token, holder, meta, granted_at, expires_at, remaining = row
        return Holder(
            int(token) if token else None,
            holder,
            _decoded(meta),
            moment(float(granted_at)),
            moment(float(expires_at)),
            float(remaining),
        )


def moment(epoch: float) -> datetime:
    """Return a point of the database's time as a datetime in UTC."""
    try:
        return datetime.fromtimestamp(epoch, timezone.utc)
    except (OverflowError, ValueError):
        return (datetime.max if epoch > 0 else datetime.min).replace(tzinfo=timezone.utc)


def array(values: Iterable[str]) -> str:
    """Return an array as Postgres reads it."""
    escaped = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return '{"' + '","'.join(escaped) + '"}'


def items(values: str | None) -> list[str]:
    """Return the items of an array of plain words, as Postgres writes it."""
    return values[1:-1].split(",") if values else []


def _decoded(meta: str | None) -> Any:
    if meta is None:
        return None
    try:
        return json.loads(meta)
    except (ValueError, RecursionError):
        # A number of more digits, or a nesting deeper, than Python's limits; another client may have put it there.
        return meta


def new_attempt() -> str:
    """Return a new request's name: a random UUID, as Postgres reads it."""
    return os.urandom(16).hex()
