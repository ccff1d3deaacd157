"""Define the fenced mutex as a sequential model, and search for a linearization of a history.

A history is linearizable if each operation can be given a linearization point between its beginning and its end, so
that the model, performing the operations one after the other at those points, gives the same replies as the service. An
operation of unknown outcome may have its point at any time after its beginning, or never.

The search goes through the beginnings and ends in the order of time. It keeps every state that the model may be in,
each with the pending operations that already have their point. When an operation ends, only those states remain in
which the operation has its point, then or before. If no state remains, the history is not linearizable. (After Lowe,
"Testing for linearizability", 2016.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from tests.robustness.history.record import Operation

MAX_STATES = 20_000
"""Most states to keep. A history with more possible states says too little to be worth the search."""


class Mutex(NamedTuple):
    """The state of a lock: the token under which it is held, if it is held, and the newest token ever granted."""

    held: int | None = None
    newest: int = 0


class FencedMutex:
    """Model one lock: tokens rise, only the holder may believe in its lease, and a release frees one exact grant.

    A lease may expire, or be taken from a dead holder. `earliest` has for each token the moment before which neither
    may happen.
    """

    def __init__(self, earliest: dict[int, float] | None = None) -> None:
        self._earliest = earliest or {}

    def apply(self, state: Mutex, operation: Operation) -> Mutex | None:
        """Return the state after the operation, or None if the operation is impossible in this state."""
        kind, token = operation.kind, operation.details.get("token")
        if token is None:
            return state
        if kind == "acquire":
            if token <= state.newest or not self._may_be_free(state, operation):
                return None
            return Mutex(token, token)
        if kind in ("believe", "renew"):
            return state if state.held == token else None
        if kind in ("release", "force"):
            if operation.details.get("freed", True):
                return Mutex(None, state.newest) if state.held == token else None
            return state
        raise AssertionError(f"the fenced mutex has no operation {kind!r}")

    def never_possible(self, state: Mutex, operation: Operation) -> bool:
        """Return whether the operation is impossible in this state and in every state that may follow."""
        token = operation.details.get("token")
        if token is None or not operation.details.get("freed", True):
            return False
        if operation.kind == "acquire":
            return bool(token <= state.newest)
        # A lock that was granted under a later token, or was freed, is never held under this token again.
        return bool(token < state.newest or (token == state.newest and state.held is None))

    def _may_be_free(self, state: Mutex, operation: Operation) -> bool:
        return state.held is None or operation.returned >= self._earliest.get(state.held, -math.inf)


def linearize(model: FencedMutex, operations: Iterable[Operation]) -> Operation | None:
    """Search for a linearization; return None, or the operation at whose end no possible state was left."""
    events: list[tuple[float, int, int]] = []
    chosen = list(operations)
    for number, one in enumerate(chosen):
        events.append((one.called, 0, number))
        if not math.isinf(one.returned):
            events.append((one.returned, 1, number))
    heapq.heapify(events)
    pending: set[int] = set()
    # The states that the model may be in, each with the pending operations that already have their point.
    reached: set[tuple[Mutex, frozenset[int]]] = {(Mutex(), frozenset())}
    while events:
        _, ends, number = heapq.heappop(events)
        if not ends:
            pending.add(number)
            continue
        reached = _linearized_until(model, chosen, pending, reached, number)
        pending.discard(number)
        if not reached:
            return chosen[number]
        if len(reached) > MAX_STATES:
            raise RuntimeError(f"{len(reached)} states are possible at {chosen[number]}: the history says too little")
        newest = min(state.newest for state, _ in reached)
        for incomplete in [one for one in pending if math.isinf(chosen[one].returned)]:
            if chosen[incomplete].details.get("token", math.inf) < newest:
                # An operation on a superseded token can have no linearization point any more.
                pending.discard(incomplete)
                reached = {(state, done - {incomplete}) for state, done in reached}
    return None


def _linearized_until(
    model: FencedMutex,
    operations: list[Operation],
    pending: set[int],
    reached: set[tuple[Mutex, frozenset[int]]],
    ending: int,
) -> set[tuple[Mutex, frozenset[int]]]:
    """Return the states reachable if some pending operations have their point now, up to the operation that ends.

    Operations with a later point can wait for the next end.
    """
    completed = {number for number in pending if not math.isinf(operations[number].returned)}
    seen = set(reached)
    frontier = list(reached)
    found: set[tuple[Mutex, frozenset[int]]] = set()
    while frontier:
        state, done = frontier.pop()
        if ending in done:
            found.add((state, done - {ending}))
            continue
        for number in pending - done:
            after = model.apply(state, operations[number])
            if after is None or (after, done | {number}) in seen:
                continue
            # Skip dead ends, where a completed operation cannot have its point any more. With many waiters, most are.
            if any(model.never_possible(after, operations[other]) for other in completed - done if other != number):
                continue
            seen.add((after, done | {number}))
            frontier.append((after, done | {number}))
    return found
