"""What the database answers, and how it is decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from dblock._core.presence import Presence


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
    presence: Presence | None = None
    """What else the lease ends with, in the eyes of others."""


class Renewal(NamedTuple):
    """What became of an attempt to renew several grants."""

    sent_at: float
    moment: float
    """When the database did it, by its own clock, in seconds since 1970."""
    missed: dict[int, str]
    """Why not, for those that were not renewed, by their place in the request from 0."""


class TicketStatus(NamedTuple):
    """A ticket, and what is known of the line."""

    ticket: int
    fresh: bool
    """Whether it is a new one."""
    first: bool
    """Whether nobody alive is ahead."""
    next_check: float
    """Seconds until there may be news for the first in line."""


class QueuePositions(NamedTuple):
    """How a client's places in line stand."""

    total: int
    """How many tickets it has."""
    firsts: list[tuple[str, float, bool]]
    """Who is first in line: the attempt, the seconds until there may be news, whether the holder is watched."""


@dataclass(frozen=True)
class Waiter:
    """Who waits for a lock."""

    holder: str
    since: datetime
    """When it lined up, by the database's clock."""


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


def moment(epoch: float) -> datetime:
    """Return a point of the database's time as a datetime in UTC."""
    try:
        return datetime.fromtimestamp(epoch, timezone.utc)
    except (OverflowError, ValueError):
        return (datetime.max if epoch > 0 else datetime.min).replace(tzinfo=timezone.utc)


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
        # A number of more digits, or a nesting deeper, than Python's limits; another client may have put it there.
        return meta


def new_attempt() -> str:
    """Return a new request's name: a random UUID, as Postgres reads it."""
    return os.urandom(16).hex()
