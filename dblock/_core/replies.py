"""The database's replies as Python values, and how they are decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from dblock._core.presence import Presence


class Grant(NamedTuple):
    """One act of giving a lock to a holder, as the database reported it."""

    name: str
    token: int
    expires_at: float
    """The deadline by the database's clock, in seconds since 1970. For people and logs; never compare it with a local
    clock.
    """
    trusted_until: float
    """The end of the trust window, by the clock of `dblock._core.clock`."""
    sent_at: float
    """When the request was sent, by the same clock."""
    presence: Presence | None = None
    """The presence that the lease is tied to: if it ends, other clients may take the lock before the deadline."""
    lock: str | None = None
    """For a share of a read-write lock or a semaphore: the name of that lock. `name` is then the share's own name."""


class Renewal(NamedTuple):
    """The reply to a renewal of several grants."""

    sent_at: float
    moment: float
    """When the database renewed them, by its own clock, in seconds since 1970."""
    missed: dict[int, str]
    """The reason for each grant that was not renewed, by its index in the request."""


class TicketStatus(NamedTuple):
    """A ticket, and what the database said about its position."""

    ticket: int
    fresh: bool
    """Whether the ticket is new."""
    first: bool
    """Whether no live waiter is ahead."""
    next_check: float
    """Seconds after which the first waiter should check the lock again."""


class QueuePositions(NamedTuple):
    """The state of all tickets of one client."""

    total: int
    """How many tickets the client has."""
    firsts: list[tuple[str, float, bool]]
    """The tickets that are first in their queue: the attempt, the seconds until the next check, and whether the holder
    has a presence that can be checked.
    """


@dataclass(frozen=True)
class Waiter:
    """A waiter in a lock's queue."""

    holder: str
    since: datetime
    """When the waiter joined the queue, by the database's clock."""


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, as of the moment the database was asked."""

    token: int | None
    """The fencing token; None for an efficiency lock."""
    holder: str
    meta: Any
    """The meta as Python objects, or as JSON text if Python cannot decode it."""
    granted_at: datetime
    expires_at: datetime
    remaining: float
    """Seconds left by the database's clock at that moment."""
    permit: int | None = None
    """The number of the permit; None unless the lock is a semaphore."""


def moment(epoch: float) -> datetime:
    """Return a point of the database's time as a datetime in UTC."""
    try:
        return datetime.fromtimestamp(epoch, timezone.utc)
    except (OverflowError, ValueError):
        return (datetime.max if epoch > 0 else datetime.min).replace(tzinfo=timezone.utc)


def with_token(number: int, before: str = ", ") -> str:
    """Return the words of a log line for the token of a grant; none for an efficiency lock."""
    return f"{before}token {number}" if number > 0 else ""


def log_fields(
    lock: str, token: int = 0, *, holder: str | None = None, reason: str | None = None
) -> dict[str, str | int | None]:
    """Return the fields that a log record about a lock has besides its message."""
    return {"lock": lock, "token": token if token > 0 else None, "holder": holder, "reason": reason}


def array(values: Iterable[str]) -> str:
    """Return an array as Postgres reads it."""
    escaped = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    text = '","'.join(escaped)
    return f'{{"{text}"}}' if text else "{}"


def items(values: str | None) -> list[str]:
    """Return the items of an array of plain words, as Postgres writes it."""
    return values[1:-1].split(",") if values else []


def decoded(meta: str | None) -> Any:
    if meta is None:
        return None
    try:
        return json.loads(meta)
    except (ValueError, RecursionError):
        # Another client may have stored a number with more digits, or a nesting deeper, than Python's limits allow.
        return meta


def new_attempt() -> str:
    """Return the name of a new request: a random UUID, as Postgres reads it."""
    return os.urandom(16).hex()
