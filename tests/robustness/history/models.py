"""The fenced mutex, as a machine that does one thing at a time; and the search for an order in which it could have.

A history is linearizable if each operation can be given a moment between its beginning and its end, so that the
machine, doing them one after the other at those moments, answers as the service did. An operation of unknown outcome
may have its moment at any time from its beginning on, or never.

The search takes the beginnings and ends in the order of time, and remembers every state that the machine may be in,
each with the operations under way that have had their moment already. When one ends, only the states remain in which it
has had its moment, then or before. When none remains, there is no such order. (After Lowe, "Testing for
linearizability", 2016.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from tests.robustness.history.record import Operation

TOO_MANY = 20_000
"""States to keep apart; more would mean that the history says too little to be worth the search."""


class Mutex(NamedTuple):
    """The state of a lock: under which token it is held, if it is; and the newest token ever granted."""

    held: int | None = None
    newest: int = 0


class FencedMutex:
    """What a lock answers: tokens rise, a holder is believed in only while it holds, a release frees one exact grant.

    A lease may run out by itself, or be taken from the dead. `earliest` has for each token the moment before which
    neither may happen.
    """

    def __init__(self, earliest: dict[int, float] | None = None) -> None:
        self._earliest = earliest or {}

    def answer(self, state: Mutex, operation: Operation) -> Mutex | None:
        """Return the state after the operation, or None if it could not have gone so in this state."""
        kind, token = operation.kind, operation.said.get("token")
        if token is None:
            return state
        if kind == "acquire":
            if token <= state.newest or not self._may_be_free(state, operation):
                return None
            return Mutex(token, token)
        if kind in ("believe", "renew"):
            return state if state.held == token else None
        if kind in ("release", "force"):
            if operation.said.get("freed", True):
                return Mutex(None, state.newest) if state.held == token else None
            return state
        raise AssertionError(f"the fenced mutex knows nothing of {kind!r}")

    def too_late(self, state: Mutex, operation: Operation) -> bool:
        """Tell whether it cannot go so in this state, nor in any that may come of it."""
        token = operation.said.get("token")
        if token is None or not operation.said.get("freed", True):
            return False
        if operation.kind == "acquire":
            return bool(token <= state.newest)
        # What is granted under a later token, or was freed, is never held under this one again.
        return bool(token < state.newest or (token == state.newest and state.held is None))

    def _may_be_free(self, state: Mutex, operation: Operation) -> bool:
        return state.held is None or operation.returned >= self._earliest.get(state.held, -math.inf)


def linearize(model: FencedMutex, operations: Iterable[Operation]) -> Operation | None:
    """Search for an order; the result is None, or the operation at whose end there was none left."""
    events: list[tuple[float, int, int]] = []
    chosen = list(operations)
    for number, one in enumerate(chosen):
        events.append((one.called, 0, number))
        if not math.isinf(one.returned):
            events.append((one.returned, 1, number))
    heapq.heapify(events)
    under_way: set[int] = set()
    # The states that the machine may be in, each with those under way that have had their moment.
    reached: set[tuple[Mutex, frozenset[int]]] = {(Mutex(), frozenset())}
    while events:
        _, ends, number = heapq.heappop(events)
        if not ends:
            under_way.add(number)
            continue
        reached = _had_their_moment(model, chosen, under_way, reached, number)
        under_way.discard(number)
        if not reached:
            return chosen[number]
        if len(reached) > TOO_MANY:
            raise RuntimeError(f"{len(reached)} states are possible at {chosen[number]}: this history says too little")
        newest = min(state.newest for state, _ in reached)
        for unanswered in [one for one in under_way if math.isinf(chosen[one].returned)]:
            if chosen[unanswered].said.get("token", math.inf) < newest:
                # What acts on a token that is past can have no moment any more.
                under_way.discard(unanswered)
                reached = {(state, done - {unanswered}) for state, done in reached}
    return None


def _had_their_moment(
    model: FencedMutex,
    operations: list[Operation],
    under_way: set[int],
    reached: set[tuple[Mutex, frozenset[int]]],
    ending: int,
) -> set[tuple[Mutex, frozenset[int]]]:
    """Return what can be reached if some of those under way have their moment now, up to the one that ends.

    Those that would come after it can wait for the next end.
    """
    answered = {number for number in under_way if not math.isinf(operations[number].returned)}
    seen = set(reached)
    frontier = list(reached)
    found: set[tuple[Mutex, frozenset[int]]] = set()
    while frontier:
        state, done = frontier.pop()
        if ending in done:
            found.add((state, done - {ending}))
            continue
        for number in under_way - done:
            after = model.answer(state, operations[number])
            if after is None or (after, done | {number}) in seen:
                continue
            # A dead end, if one that must have its moment could not any more: with many waiters nearly all are that.
            if any(model.too_late(after, operations[other]) for other in answered - done if other != number):
                continue
            seen.add((after, done | {number}))
            frontier.append((after, done | {number}))
    return found
