"""The tables of the simulated database, and what becomes of them in a crash.

A transaction that commits asynchronously is lost in a crash if nothing was flushed since. A transaction that waits for
the disk flushes all commits before it too. A standby lags behind, and has nothing newer when it is promoted. Presences
are unlogged: they do not survive a restart of the server.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Row:
    """A lock: its newest grant."""

    name: str
    token: int = 0
    expires_at: float = -math.inf
    released_at: float = -math.inf
    forced_at: float | None = None
    ttl: float = 0.0
    attempt: str | None = None
    presence: str | None = None
    waiting: bool = False
    last_served_ticket: int = 0
    minted_start: int | None = None
    """The start of the server that minted its token."""


@dataclass(slots=True)
class Ticket:
    """A position in a queue."""

    name: str
    number: int
    attempt: str
    client: str
    presence: str | None
    since: float


@dataclass(slots=True)
class Mark:
    """A presence: the session that holds it, and since when it is known to be gone."""

    session: int
    incarnation: int
    grace: float
    gone_since: float | None = None


@dataclass
class Tables:
    """Everything that is written to disk."""

    rows: dict[str, Row] = field(default_factory=dict)
    tickets: dict[str, list[Ticket]] = field(default_factory=dict)
    """In the order of their numbers."""
    clients: dict[str, float] = field(default_factory=dict)
    """Until when each waiting client counts as alive."""
    sequence: int = 0
    server_start: int = 0
    """The start of the server that minted the last token."""

    def copy(self) -> Tables:
        """Return a copy, as on another disk."""
        return Tables(
            {name: copy.copy(row) for name, row in self.rows.items()},
            {name: [copy.copy(ticket) for ticket in line] for name, line in self.tickets.items()},
            dict(self.clients),
            self.sequence,
            self.server_start,
        )
