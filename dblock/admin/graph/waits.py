"""Build the wait-for graph from the locks, their holders and their queues.

Nothing here queries or prints. A participant is known by its holder name, so a client that holds one lock and waits for
another is one participant. That is also the limit of this graph: the threads of one process share a name unless the
program gave them others. So a participant that waits for a lock that it holds itself is not reported as a cycle,
because in most programs the wait is another thread's.

A cycle is a ring of participants, each of which waits for a lock that the next one holds. A read-write lock is held by
all its readers, and a writer waits for each of them. A semaphore counts only if it has one holder: of several, any one
that releases ends the wait.

A deadlock is a cycle that the database has found. It follows the threads and tasks that wait, whatever their names, and
also the sessions that work under a lease. It knows only waiters that have looked for a deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dblock.admin.inspect import LockState, Wait, Waiter


class Step(NamedTuple):
    """One wait in a cycle: the waiter, the lock, and the lock's holder."""

    waiter: str
    lock: str
    holder: str


@dataclass
class Graph:
    """Locks, holders, queues, and the cycles among them."""

    locks: dict[str, LockState] = field(default_factory=dict)
    shares: dict[str, list[LockState]] = field(default_factory=dict)
    """The shares of each read-write lock and semaphore that are held."""
    queues: dict[str, list[Waiter]] = field(default_factory=dict)
    """The waiters of each lock, in order."""
    holds: dict[str, list[str]] = field(default_factory=dict)
    """The locks that each participant holds."""
    waits: dict[str, list[Waiter]] = field(default_factory=dict)
    """Each participant's positions in queues."""
    cycles: list[list[Step]] = field(default_factory=list)
    deadlocks: list[list[Wait]] = field(default_factory=list)
    session_waits: list[Wait] = field(default_factory=list)
    """The waits between sessions."""

    @property
    def participants(self) -> list[str]:
        """All holders and waiters, sorted by name."""
        return sorted({*self.holds, *self.waits})

    def holders(self, name: str) -> list[str]:
        """Return the holders of a lock: none if it is free, several if it is shared."""
        if name in self.shares:
            return list(dict.fromkeys(share.holder or "" for share in self.shares[name]))
        lock = self.locks[name]
        return [] if lock.state == "free" or lock.held is not None else [lock.holder or ""]

    @cached_property
    def _stuck(self) -> set[Step]:
        return {step for cycle in self.cycles for step in cycle} | self.found_by_the_database

    @property
    def found_by_the_database(self) -> set[Step]:
        """The waits for locks in all deadlocks."""
        return {
            Step(wait.waiter, wait.lock, wait.holder or "")
            for deadlock in self.deadlocks
            for wait in deadlock
            if wait.lock is not None
        }

    def is_stuck(self, *, participant: str | None = None, lock: str | None = None) -> bool:
        """Return whether a cycle contains this participant, or this lock, or this participant's wait for this lock."""
        if participant is not None and lock is not None:
            return (participant, lock) in self._stuck_waits
        return participant in self._stuck_participants or lock in self._stuck_locks

    @cached_property
    def _stuck_waits(self) -> set[tuple[str, str]]:
        return {(step.waiter, step.lock) for step in self._stuck}

    @cached_property
    def _stuck_participants(self) -> set[str]:
        return {step.waiter for step in self._stuck}

    @cached_property
    def _stuck_locks(self) -> set[str]:
        return {step.lock for step in self._stuck}


def build_graph(locks: Iterable[LockState], waiters: Iterable[Waiter], waits: Iterable[Wait] = ()) -> Graph:
    """Build the graph of all locks and waiters, with the deadlocks and the waits between sessions."""
    graph = Graph()
    numbered: dict[int, list[Wait]] = {}
    for wait in waits:
        if wait.cycle is not None:
            numbered.setdefault(wait.cycle, []).append(wait)
        if wait.session is not None:
            graph.session_waits.append(wait)
    graph.deadlocks = list(numbered.values())
    locks = sorted(locks, key=lambda lock: lock.name)
    heads = {lock.name for lock in locks if lock.held is not None}
    for lock in locks:
        if lock.head not in heads:
            graph.locks[lock.name] = lock
        elif lock.state != "free":
            graph.shares.setdefault(lock.head or "", []).append(lock)
    for name in graph.locks:
        for holder in graph.holders(name):
            graph.holds.setdefault(holder, []).append(name)
    for waiter in sorted(waiters, key=lambda waiter: (waiter.name, waiter.position)):
        if waiter.name not in graph.locks:
            from dblock.admin.inspect import LockState

            graph.locks[waiter.name] = LockState(waiter.name, 0, None, None, None, None, None, None, 0.0, 0)
        graph.queues.setdefault(waiter.name, []).append(waiter)
        graph.waits.setdefault(waiter.holder, []).append(waiter)
    graph.cycles = _find_cycles(graph)
    return graph


def select(graph: Graph, pattern: str = "*", *, every: bool = False) -> Graph:
    """Return the part of the graph that is connected with the locks that match a pattern with * and ?.

    Without `every`, a lock that no participant waits for is left out, unless its holder waits for another lock.
    """
    matches = name_matcher(pattern)
    wanted = {name for name in graph.locks if matches(name)}
    if not every:
        wanted = {name for name in wanted if graph.queues.get(name) or graph.waits.keys() & graph.holders(name)}
    reached: set[str] = set()
    open_names = sorted(wanted)
    while open_names:
        name = open_names.pop()
        if name in reached:
            continue
        reached.add(name)
        participants = [*(waiter.holder for waiter in graph.queues.get(name, [])), *graph.holders(name)]
        for participant in participants:
            open_names += [waiter.name for waiter in graph.waits.get(participant, [])]
            open_names += [
                held
                for held in graph.holds.get(participant, [])
                if every or participant in graph.waits or graph.queues.get(held)
            ]
    selected = build_graph(
        [lock for name in reached for lock in (graph.locks[name], *graph.shares.get(name, []))],
        [waiter for name in reached for waiter in graph.queues.get(name, [])],
    )
    selected.deadlocks = [
        deadlock for deadlock in graph.deadlocks if pattern == "*" or any(wait.lock in reached for wait in deadlock)
    ]
    selected.session_waits = [
        wait
        for wait in graph.session_waits
        if pattern == "*" or any(wait in deadlock for deadlock in selected.deadlocks)
    ]
    return selected


def name_matcher(pattern: str, *, ignore_case: bool = False) -> Callable[[str], object]:
    """Return a test for names: in the pattern, * matches any text and ? any character.

    The time of a test grows with the length of the name times that of the pattern, whatever both contain.
    """
    first, *rest = ("".join("." if one == "?" else re.escape(one) for one in part) for part in pattern.split("*"))
    expression = first
    if rest:
        *middle, last = rest
        # The first place where a part matches is as good as any later one. A lookahead is never entered again, so the
        # places are not tried in all combinations, of which there are more than can be tried.
        parts = (f"(?=(?P<part{number}>.*?{part}))(?P=part{number})" for number, part in enumerate(middle) if part)
        expression += "".join(parts) + f".*{last}"
    return re.compile(expression, re.DOTALL | (re.IGNORECASE if ignore_case else 0)).fullmatch


def roots(graph: Graph) -> list[tuple[str | None, str]]:
    """Return the nodes to start drawing at, so that every node is reached: holders, or (None, name) for a free lock.

    These are one participant of each cycle, the holders that wait for no other participant, the free locks, and then
    the other holders, in case they were not reached.
    """
    stuck: list[tuple[str | None, str]] = [(cycle[0].waiter, "") for cycle in graph.cycles]
    first: list[tuple[str | None, str]] = []
    others: list[tuple[str | None, str]] = []
    for participant in sorted(graph.holds):
        own = all(graph.holders(waiter.name) == [participant] for waiter in graph.waits.get(participant, []))
        (first if own else others).append((participant, ""))
    unheld = [name for name in graph.locks if not graph.holders(name)]
    free: list[tuple[str | None, str]] = [(None, name) for name in unheld]
    return [*stuck, *first, *free, *others]


def graph_data(graph: Graph) -> dict[str, Any]:
    """Return the graph as JSON data."""
    participants = [
        {"id": f"participant:{participant}", "kind": "participant", "name": participant}
        for participant in graph.participants
    ]
    locks = [
        {
            "id": f"lock:{lock.name}",
            "kind": "lock",
            "name": lock.name,
            "state": lock.state,
            "token": lock.token,
            "remaining": lock.remaining,
            "waiting": len(graph.queues.get(lock.name, [])),
        }
        for lock in graph.locks.values()
    ]
    edges: list[dict[str, Any]] = []
    for participant, names in graph.holds.items():
        edges += [{"kind": "holds", "from": f"participant:{participant}", "to": f"lock:{name}"} for name in names]
    for queue in graph.queues.values():
        edges += [
            {
                "kind": "waits",
                "from": f"participant:{waiter.holder}",
                "to": f"lock:{waiter.name}",
                "position": waiter.position,
                "since": waiter.since,
                "seconds": waiter.seconds,
            }
            for waiter in queue
        ]
    cycles = [
        [{"participant": step.waiter, "waits_for": step.lock, "held_by": step.holder} for step in cycle]
        for cycle in graph.cycles
    ]
    return {
        "nodes": participants + locks,
        "edges": edges,
        "cycles": cycles,
        "deadlocks": [[_wait_data(wait) for wait in deadlock] for deadlock in graph.deadlocks],
        "session_waits": [_wait_data(wait) for wait in graph.session_waits],
    }


def _wait_data(wait: Wait) -> dict[str, Any]:
    return {name: value for name, value in asdict(wait).items() if name != "cycle"}


def _find_cycles(graph: Graph) -> list[list[Step]]:
    """Return cycles that together contain every participant that is in any cycle."""
    steps: dict[str, list[Step]] = {}
    for participant, tickets in graph.waits.items():
        for name in dict.fromkeys(ticket.name for ticket in tickets):
            if graph.locks[name].permits is not None and len(graph.shares.get(name, [])) > 1:
                continue
            for holder in graph.holders(name):
                if holder != participant:
                    steps.setdefault(participant, []).append(Step(participant, name, holder))
    steps = _prune(steps)
    found: list[list[Step]] = []
    covered: set[str] = set()
    for participant in sorted(steps):
        if participant not in covered and (cycle := _shortest_cycle(steps, participant)):
            found.append(cycle)
            covered |= {step.waiter for step in cycle}
    return found


def _prune(steps: dict[str, list[Step]]) -> dict[str, list[Step]]:
    """Drop participants that wait for no other, or only for dropped ones: every path that remains leads to a cycle."""
    waiting: dict[str, list[str]] = {}
    left: dict[str, int] = {}
    for participant, some in steps.items():
        left[participant] = len(some)
        for step in some:
            waiting.setdefault(step.holder, []).append(participant)
    ends = [participant for participant in waiting if participant not in steps]
    for end in ends:  # the list grows during the loop
        for participant in waiting.get(end, []):
            left[participant] -= 1
            if not left[participant]:
                ends.append(participant)
    gone = set(ends)
    return {
        participant: [step for step in some if step.holder not in gone]
        for participant, some in steps.items()
        if participant not in gone
    }


def _shortest_cycle(steps: dict[str, list[Step]], start: str) -> list[Step]:
    """Return a shortest path from a participant back to itself; an empty list if there is none."""
    way: dict[str, Step] = {}
    nearest = [start]
    for participant in nearest:  # the list grows during the loop
        for step in steps.get(participant, []):
            if step.holder == start:
                cycle = [step]
                while cycle[-1].waiter != start:
                    cycle.append(way[cycle[-1].waiter])
                return cycle[::-1]
            if step.holder not in way:
                way[step.holder] = step
                nearest.append(step.holder)
    return []
