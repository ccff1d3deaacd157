"""Who waits for whom, made of what the database tells: the locks with their holders, and the lines.

Nothing here asks or prints. Whoever takes part is known by its holder's name, so one that holds a lock and waits for
another is one participant. That is also the limit of what can be known: several threads of one process have the same
name unless they were given others. So one that waits for what it holds itself is no circle here, for in most
programs that is another thread's wait.

A circle is a ring of participants each of which waits for what the next one holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dblock.admin.inspect import LockState, Waiter


class Step(NamedTuple):
    """A part of a circle: who waits for what, and who has it."""

    waiter: str
    lock: str
    holder: str


@dataclass
class Graph:
    """Locks, holders, lines, and the circles among them."""

    locks: dict[str, LockState] = field(default_factory=dict)
    lines: dict[str, list[Waiter]] = field(default_factory=dict)
    """By the lock's name, in order."""
    holds: dict[str, list[str]] = field(default_factory=dict)
    """The locks that a participant holds."""
    waits: dict[str, list[Waiter]] = field(default_factory=dict)
    """A participant's places in lines."""
    circles: list[list[Step]] = field(default_factory=list)

    @property
    def participants(self) -> list[str]:
        """Everyone who holds or waits."""
        return sorted({*self.holds, *self.waits})

    @cached_property
    def _stuck(self) -> set[Step]:
        return {step for circle in self.circles for step in circle}

    def is_stuck(self, *, who: str | None = None, lock: str | None = None) -> bool:
        """Tell whether a circle goes through a participant, or a lock, or one's wait for the other."""
        if who is not None and lock is not None:
            return (who, lock) in self._stuck_waits
        return who in self._stuck_people or lock in self._stuck_locks

    @cached_property
    def _stuck_waits(self) -> set[tuple[str, str]]:
        return {(step.waiter, step.lock) for step in self._stuck}

    @cached_property
    def _stuck_people(self) -> set[str]:
        return {step.waiter for step in self._stuck}

    @cached_property
    def _stuck_locks(self) -> set[str]:
        return {step.lock for step in self._stuck}


def build(locks: Iterable[LockState], waiters: Iterable[Waiter]) -> Graph:
    """Make the graph of everything."""
    graph = Graph()
    for lock in sorted(locks, key=lambda one: one.name):
        graph.locks[lock.name] = lock
        if (holder := holder_of(lock)) is not None:
            graph.holds.setdefault(holder, []).append(lock.name)
    for place in sorted(waiters, key=lambda one: (one.name, one.position)):
        if place.name not in graph.locks:
            graph.locks[place.name] = LockState(place.name, 0, None, None, None, None, None, None, 0.0, 0)
        graph.lines.setdefault(place.name, []).append(place)
        graph.waits.setdefault(place.holder, []).append(place)
    graph.circles = _circles(graph)
    return graph


def holder_of(lock: LockState) -> str | None:
    """Return who has a lock, None while nobody does."""
    if lock.state == "free":
        return None
    return lock.holder or ""


def part(graph: Graph, pattern: str = "*", *, every: bool = False) -> Graph:
    """Return the locks that fit a pattern with * and ?, and all that hangs together with them.

    Without `every`, what nobody waits for is left out, unless its holder waits for something else.
    """
    fits = fitting(pattern)
    wanted = {name for name in graph.locks if fits(name)}
    if not every:
        wanted = {name for name in wanted if graph.lines.get(name) or holder_of(graph.locks[name]) in graph.waits}
    reached: set[str] = set()
    open_names = sorted(wanted)
    while open_names:
        name = open_names.pop()
        if name in reached:
            continue
        reached.add(name)
        people = [place.holder for place in graph.lines.get(name, [])]
        if (holder := holder_of(graph.locks[name])) is not None:
            people.append(holder)
        for who in people:
            open_names += [place.name for place in graph.waits.get(who, [])]
            open_names += [
                held for held in graph.holds.get(who, []) if every or who in graph.waits or graph.lines.get(held)
            ]
    return build(
        [lock for name, lock in graph.locks.items() if name in reached],
        [place for name in reached for place in graph.lines.get(name, [])],
    )


def fitting(pattern: str, *, ignore_case: bool = False) -> Callable[[str], object]:
    """Return a test for names, by a pattern in which * stands for any text and ? for any character."""
    parts = {"*": ".*", "?": "."}
    expression = "".join(parts.get(character) or re.escape(character) for character in pattern)
    return re.compile(expression, re.DOTALL | (re.IGNORECASE if ignore_case else 0)).fullmatch


def roots(graph: Graph) -> list[tuple[str | None, str]]:
    """Return where drawing begins, so that everything is reached: holders, or locks (with None) that nobody holds.

    One of each circle; who waits for no other; what is free; and whatever else holds a lock, should it not have been
    reached from these.
    """
    stuck: list[tuple[str | None, str]] = [(circle[0].waiter, "") for circle in graph.circles]
    first: list[tuple[str | None, str]] = []
    others: list[tuple[str | None, str]] = []
    for who in sorted(graph.holds):
        own = all(holder_of(graph.locks[place.name]) == who for place in graph.waits.get(who, []))
        (first if own else others).append((who, ""))
    unheld = [name for name, lock in graph.locks.items() if holder_of(lock) is None]
    free: list[tuple[str | None, str]] = [(None, name) for name in unheld]
    return [*stuck, *first, *free, *others]


def facts(graph: Graph) -> dict[str, Any]:
    """Return the graph as JSON has it."""
    people = [{"id": f"participant:{who}", "kind": "participant", "name": who} for who in graph.participants]
    locks = [
        {
            "id": f"lock:{one.name}",
            "kind": "lock",
            "name": one.name,
            "state": one.state,
            "token": one.token,
            "remaining": one.remaining,
            "waiting": len(graph.lines.get(one.name, [])),
        }
        for one in graph.locks.values()
    ]
    edges: list[dict[str, Any]] = []
    for who, names in graph.holds.items():
        edges += [{"kind": "holds", "from": f"participant:{who}", "to": f"lock:{name}"} for name in names]
    for places in graph.lines.values():
        edges += [
            {
                "kind": "waits",
                "from": f"participant:{place.holder}",
                "to": f"lock:{place.name}",
                "position": place.position,
                "since": place.since,
                "seconds": place.seconds,
            }
            for place in places
        ]
    circles = [
        [{"participant": step.waiter, "waits_for": step.lock, "held_by": step.holder} for step in circle]
        for circle in graph.circles
    ]
    return {"nodes": people + locks, "edges": edges, "cycles": circles}


def _circles(graph: Graph) -> list[list[Step]]:
    """Return circles such that everybody who is in any is in one of these."""
    steps: dict[str, list[Step]] = {}
    for who, places in graph.waits.items():
        for name in dict.fromkeys(place.name for place in places):
            holder = holder_of(graph.locks[name])
            if holder is not None and holder != who:
                steps.setdefault(who, []).append(Step(who, name, holder))
    steps = _leading_on(steps)
    found: list[list[Step]] = []
    covered: set[str] = set()
    for who in sorted(steps):
        if who not in covered and (ring := _ring(steps, who)):
            found.append(ring)
            covered |= {step.waiter for step in ring}
    return found


def _leading_on(steps: dict[str, list[Step]]) -> dict[str, list[Step]]:
    """Leave out who waits for nothing, and who waits only for such: what remains leads to a circle."""
    waiting: dict[str, list[str]] = {}
    left: dict[str, int] = {}
    for who, some in steps.items():
        left[who] = len(some)
        for step in some:
            waiting.setdefault(step.holder, []).append(who)
    ends = [who for who in waiting if who not in steps]
    for end in ends:  # grows as it is gone through
        for who in waiting.get(end, []):
            left[who] -= 1
            if not left[who]:
                ends.append(who)
    gone = set(ends)
    return {who: [one for one in some if one.holder not in gone] for who, some in steps.items() if who not in gone}


def _ring(steps: dict[str, list[Step]], start: str) -> list[Step]:
    """Return a shortest way from a participant back to itself, none if there is none."""
    way: dict[str, Step] = {}
    nearest = [start]
    for who in nearest:  # grows as it is gone through
        for step in steps.get(who, []):
            if step.holder == start:
                ring = [step]
                while ring[-1].waiter != start:
                    ring.append(way[ring[-1].waiter])
                return ring[::-1]
            if step.holder not in way:
                way[step.holder] = step
                nearest.append(step.holder)
    return []
