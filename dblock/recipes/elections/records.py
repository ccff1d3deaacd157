"""What observers of an election see, and the options of a candidate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from dblock._core.options import Seconds, brief, encode_meta, lock_options
from dblock._core.replies import moment
from dblock.errors import InvalidArgument

PREFIX = "election:"
"""The lock of an election has this before the election's name."""

HIGHEST_PRIORITY = 2**31 - 1
LONGEST_VERSION = 15
HIGHEST_PART = 2**63 - 1

STEPPED_BACK = (-(2**62),)
"""The rank of a candidate that has stepped back: lower than every priority."""


@dataclass(frozen=True)
class Leader:
    """The leader of an election: the beginning of a term."""

    election: str
    token: int
    """The fencing token of the term: higher than that of every earlier term."""
    holder: str
    """The name of the client that leads."""
    value: Any
    """What the leader has published, such as its address."""
    since: datetime
    """When the term began, by the database's clock."""


@dataclass(frozen=True)
class Vacancy:
    """The end of a term. Until the next term begins, there is no leader."""

    election: str
    token: int
    """The token of the term that has ended."""
    holder: str
    """The name of the client that led."""
    how: str
    """One of: resigned, transferred, outranked, failed, released, expired, died, forced."""
    since: datetime
    """When the term ended, by the database's clock."""


class ElectionOptions(NamedTuple):
    """The checked options of a candidate."""

    name: str
    lock: Any
    """The options of the lock."""
    value: str | None
    """The value to publish, as JSON."""
    rank: tuple[int, ...]
    on_started: Callable[[Any], object] | None
    on_stopped: Callable[[Any], object] | None


def election_options(
    name: str,
    ttl: Seconds,
    value: Any,
    priority: int,
    version: str | None,
    on_started: Callable[[Any], object] | None,
    on_stopped: Callable[[Any], object] | None,
) -> ElectionOptions:
    """Check all options against their limits, or raise InvalidArgument that names the bad one."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"The name of an election is text of at least one character; got {brief(name)}.")
    lock = lock_options(PREFIX + name, ttl, None, None)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > HIGHEST_PRIORITY:
        raise InvalidArgument(
            f"The priority in election {name!a} is a whole number from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}; got "
            f"{brief(priority)}."
        )
    for what, callback in (("on_started", on_started), ("on_stopped", on_stopped)):
        if callback is not None and not callable(callback):
            raise InvalidArgument(f"{what} of election {name!a} is a function; got {brief(callback)}.")
    return ElectionOptions(
        name,
        lock,
        encode_meta(name, value, "value of election"),
        (priority, *_parts(name, version)),
        on_started,
        on_stopped,
    )


def _parts(name: str, version: str | None) -> list[int]:
    if version is None:
        return []
    parts = (
        [int(part) for part in version.split(".")]
        if isinstance(version, str) and re.fullmatch(r"[0-9]{1,19}(\.[0-9]{1,19})*", version)
        else []
    )
    if not 1 <= len(parts) <= LONGEST_VERSION or max(parts) > HIGHEST_PART:
        raise InvalidArgument(
            f"The version in election {name!a} is up to {LONGEST_VERSION} numbers with dots between them, like 1.20.3; "
            f"got {brief(version)}."
        )
    return parts


def events(election: str, rows: str | None, since: int | None, seen_open: bool) -> list[Leader | Vacancy]:
    """Return the events that a reply of list_terms() tells to an observer.

    `since` is the token of the last term that the observer has seen, and `seen_open` whether it has seen its beginning
    and not its end.
    """
    found: list[Leader | Vacancy] = []
    for one in json.loads(rows) if rows else []:
        token, holder = one["token"], one["holder"]
        if token != since and not (since is None and one["ended_at"] is not None):
            found.append(Leader(election, token, holder, one["value"], moment(one["began_at"])))
        if one["ended_at"] is not None and (token != since or seen_open):
            found.append(Vacancy(election, token, holder, one["how"], moment(one["ended_at"])))
    return found
