"""The statements that the tests of recipes send to the database, executed on the tables in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

from dblock.testing import MemoryDatabase
from tests.support.still_clock import StillClock


def _waiters(owner: Any, only_waiting: str | None) -> list[tuple[int]]:
    found = owner._store.barriers.waiters.values()
    return [(sum(not (only_waiting and one.over) for one in found),)]


def _arrive(owner: Any, name: str, parties: str, attempt: str, client: str) -> list[tuple[Any, ...]]:
    owner._store.touch_client(client)
    reply = owner._store.barriers.arrive_barrier(name, int(parties), attempt.replace("-", ""), client, None)
    return [(reply.tripped, reply.number)]


def _count_down(owner: Any, name: str, count: str) -> list[tuple[int, bool]]:
    return [owner._store.barriers.count_down(name, int(count), 1, "by sql")]


def _terms(owner: Any) -> list[Any]:
    return [term for log in owner._store.tables.terms.values() for term in log]


def _renumber(owner: Any, number: str) -> None:
    for term in _terms(owner):
        term.number = int(number)


def _candidates(owner: Any) -> list[tuple[int]]:
    return [(sum(map(len, owner._store.tables.candidates.values())),)]


def _ledger(owner: Any, columns: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(run, one) for one in columns.split(", ")) for run in owner._store.tables.slot_runs]


def _outcomes(owner: Any, name: str) -> list[tuple[str, int]]:
    found: Counter[str] = Counter()
    for run in owner._store.schedules.ledger(name):
        found[run.outcome or "running"] += run.slots
    return list(found.items())


class MemoryStillClock(StillClock):
    """Moves the clock of the database in memory, and not that of its clients."""

    def __init__(self, database: MemoryDatabase, now: datetime) -> None:
        self._database = database
        self.set(now)

    def set(self, now: datetime) -> None:
        self.now = now
        self._database.step += now.timestamp() - self._database.now()


def wake_waiters(store: Any) -> None:
    """Wake the waiters whose wait is over, as their heartbeats would."""
    for one in list(store.barriers.waiters.values()):
        if store.barriers.is_over(one):
            store.notify(one.client, one.attempt)


STATEMENTS: list[tuple[str, Callable[..., Any]]] = [
    (r"SELECT count\(\*\) FROM barrier_waiters( WHERE NOT over)?", _waiters),
    (r"SELECT tripped, number FROM arrive_barrier\('(.*)', (\d+), (\S+), (\S+)\)", _arrive),
    (
        r"SELECT coalesce\(outcome, 'running'\), sum\(slots\)::int FROM slot_runs WHERE name = '(.*)' GROUP BY 1",
        _outcomes,
    ),
    (r"SELECT ((?:outcome|error|number|, )+) FROM slot_runs", _ledger),
    (r"SELECT how FROM terms", lambda owner: [(term.how,) for term in _terms(owner)]),
    (r"UPDATE terms SET number = (\d+)", _renumber),
    (r"DELETE FROM terms", lambda owner: owner._store.tables.terms.clear()),
    (r"SELECT count\(\*\) FROM candidates", _candidates),
    (
        r"SELECT count\(\*\) FROM list_candidates\('(.*)'\)",
        lambda owner, name: [(len(owner._store.elections.live_candidates(name)),)],
    ),
    (r"SELECT count_down\('(.*)', (\d+)\)", _count_down),
]
