"""Bugs of elections to put into a run, one at a time. The checks must find each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dblock._core.effects import Call, Flow
from dblock.recipes.elections.flows import ElectionFlows, Position
from tests.robustness.simulation.elections.run import ElectionRun
from tests.robustness.simulation.mutations import Bug, instead
from tests.robustness.simulation.process import performed

BUGS: dict[str, Bug[ElectionRun]] = {}


def _bug(put: Bug[ElectionRun]) -> Bug[ElectionRun]:
    BUGS[put.__name__] = put
    return put


# In the place of the SQL functions.


@_bug
def begun_without_the_lock(run: ElectionRun) -> Iterator[None]:
    """Begin a term whose token does not hold the lock any more, or before another leader has ended its own."""
    elections = run.store.elections
    elections.holds = lambda name, token: f"election:{name}" in run.store.tables.rows  # type: ignore[method-assign]
    yield


@_bug
def earlier_term_left_open(run: ElectionRun) -> Iterator[None]:
    """Begin a term without ending an earlier one whose leader is gone."""
    run.store.elections.end_terms_below = lambda name, below: None  # type: ignore[method-assign]
    yield


@_bug
def term_not_on_disk(run: ElectionRun) -> Iterator[None]:
    """Reply before the beginning of a term is on disk."""
    elections, store = run.store.elections, run.store
    begin_term = elections.begin_term

    def quick(*args: Any) -> str:
        decision = begin_term(*args)
        store.durable = False
        return decision

    elections.begin_term = quick  # type: ignore[method-assign,assignment]
    yield


@_bug
def end_without_the_lock(run: ElectionRun) -> Iterator[None]:
    """Record that a leader has resigned although its lease had ended before."""
    elections = run.store.elections
    end_term = elections.end_term

    def end(name: str, token: int, how: str) -> bool:
        for term in elections.log(name):
            if term.token == token and term.ended_at is None and not elections.holds(name, token):
                elections.end(term, run.store.now(), how)
        return end_term(name, token, how)

    elections.end_term = end  # type: ignore[method-assign]
    yield


@_bug
def only_the_newest_term_listed(run: ElectionRun) -> Iterator[None]:
    """Show an observer the newest term alone, as etcd does."""
    elections = run.store.elections
    list_terms = elections.list_terms

    def newest(*args: Any) -> Any:
        rows, forgotten = list_terms(*args)
        return rows[-1:], forgotten

    elections.list_terms = newest  # type: ignore[method-assign,assignment]
    yield


# In dblock's own code.


@_bug
def yielded_term_led(run: ElectionRun) -> Iterator[None]:
    """Lead although another candidate comes first, or the lease had ended before the term could begin."""

    def campaign(flows: ElectionFlows, *args: Any) -> Flow[Any]:
        def perform(effect: Any) -> Flow[Any]:
            result = yield effect
            return ("lead",) if isinstance(effect, Call) and effect.sql == flows._begin else result

        return performed(before(flows, *args), perform)

    with instead(ElectionFlows, "campaign", campaign) as before:
        yield


@_bug
def end_not_awaited(run: ElectionRun) -> Iterator[None]:
    """Continue with the next term after the beginning of one, and miss its end if that comes later."""

    def passed(position: Position, seen: Any) -> None:
        position.token, position.is_open = seen.token, False

    with instead(Position, "passed", passed):
        yield
