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
    holder: str | None = None
    granted_at: float | None = None
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
    kind: str | None = None
    head: str | None = None
    """Of a share: the name of its lock."""
    permits: int | None = None
    permit: int | None = None
    meta: str | None = None


HEADS = ("read-write", "semaphore")
"""The kinds of the rows that a shared lock has beside its shares."""


@dataclass(slots=True)
class Ticket:
    """A position in a queue."""

    name: str
    number: int
    attempt: str
    client: str
    presence: str | None
    since: float
    mode: str | None = None
    holder: str | None = None
    ordered: bool = False
    """Whether its waiter holds no lock whose name comes after."""


@dataclass(slots=True)
class Mark:
    """A presence: the session that holds it, and since when it is known to be gone."""

    session: int
    incarnation: int
    grace: float
    gone_since: float | None = None


@dataclass(slots=True)
class Candidate:
    """A candidate of an election, registered before it waits for the lock."""

    attempt: str
    holder: str
    rank: tuple[int, ...]


@dataclass(slots=True)
class Term:
    """A term of an election: a row of the log."""

    name: str
    token: int
    number: int
    holder: str | None
    rank: tuple[int, ...]
    value: str | None
    began_at: float
    ended_at: float | None = None
    how: str | None = None
    transfer_to: str | None = None


@dataclass(slots=True)
class Schedule:
    """A schedule: its definition, and up to which slot everything is decided. Moments are whole microseconds."""

    name: str
    kind: str
    period: int
    catch_up: str
    delivery: str
    grace: int | None
    overlap: str
    at_least: int | None
    expression: str | None
    zone: str | None
    since: int
    decided_until: int | None = None
    last_claimed_at: int | None = None
    last_ended_at: int | None = None
    upcoming: list[int] = field(default_factory=list)
    """The slots of a cron expression that are known. Replaced as a whole."""
    planned_until: int | None = None


@dataclass(slots=True)
class SlotRun:
    """A row of the ledger: a run of a slot, or a series of slots that did not run."""

    run: int
    name: str
    slot: int
    last_slot: int
    slots: int
    number: int
    claimed_at: int
    lock: str | None = None
    token: int | None = None
    attempt: str | None = None
    outcome: str | None = None
    ended_at: int | None = None
    exit_code: int | None = None
    error: str | None = None


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
    history: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict)
    """The newest event of each grant that did not end by a release, and its moment."""
    candidates: dict[str, dict[str, Candidate]] = field(default_factory=dict)
    """The candidates of each election, by their attempts."""
    terms: dict[str, list[Term]] = field(default_factory=dict)
    """The log of each election, in the order of its numbers."""
    waiting_holds: dict[str, dict[int, str]] = field(default_factory=dict)
    """The tokens that the thread or task of a waiting attempt holds, each with the lock that it waits for."""
    schedules: dict[str, Schedule] = field(default_factory=dict)
    slot_runs: list[SlotRun] = field(default_factory=list)
    """The ledger of all schedules, in the order of its rows."""

    def copy(self) -> Tables:
        """Return a copy, as on another disk."""
        return Tables(
            {name: copy.copy(row) for name, row in self.rows.items()},
            {name: [copy.copy(ticket) for ticket in line] for name, line in self.tickets.items()},
            dict(self.clients),
            self.sequence,
            self.server_start,
            dict(self.history),
            {name: {one.attempt: copy.copy(one) for one in those.values()} for name, those in self.candidates.items()},
            {name: [copy.copy(term) for term in log] for name, log in self.terms.items()},
            {attempt: dict(holds) for attempt, holds in self.waiting_holds.items()},
            {name: copy.copy(schedule) for name, schedule in self.schedules.items()},
            [copy.copy(run) for run in self.slot_runs],
        )
