"""The statements that the tests of recipes send to the database, executed on the tables in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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


def wake_waiters(store: Any) -> None:
    """Wake the waiters whose wait is over, as their heartbeats would."""
    for one in list(store.barriers.waiters.values()):
        if store.barriers.is_over(one):
            store.notify(one.client, one.attempt)


STATEMENTS: list[tuple[str, Callable[..., Any]]] = [
    (r"SELECT count\(\*\) FROM barrier_waiters( WHERE NOT over)?", _waiters),
    (r"SELECT tripped, number FROM arrive_barrier\('(.*)', (\d+), (\S+), (\S+)\)", _arrive),
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
