"""Build random wait-for graphs in the database, and compare the victims of deadlocks with a plain model.

Many graphs are built and looked at together, because each statement has a price of its own. They have no participant
and no lock in common. In half of them every lock has one holder. Then every cycle has exactly one victim: the youngest
of its waiters. In the others some locks have several readers and are waited for by writers, so that paths part and meet
again. There a victim must be in a cycle at that moment, and in the end no cycle may be left.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Sequence

import psycopg

from dblock._core.replies import array

CLIENT = uuid.UUID(int=7)
"""The client of all participants, which must be alive."""

CLEAR = b"TRUNCATE waiting_holds, lock_tickets, distributed_locks"
LOOK = """
SELECT d.victim
FROM unnest(%s::text[], %s::uuid[], %s::text[]) WITH ORDINALITY AS l (name, attempt, holds, place)
CROSS JOIN LATERAL look_for_deadlock(l.name, l.attempt, l.holds::bigint[]) AS d
ORDER BY l.place
"""


class Graph:
    """A graph of up to nine participants, each of which waits for at most one lock."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.number = number
        self._chance = chance
        size = chance.randint(2, 9)
        self.shared = chance.random() < 0.5
        self.holders: dict[str, list[int]] = {}
        """Who holds each lock. A lock whose name has an `r` is a read-write lock, held by readers."""
        for lock in range(chance.randint(1, 12)):
            readers = self.shared and chance.random() < 0.4
            count = min(size, chance.randint(1, 3)) if readers else 1
            self.holders[f"g{number}:{'r' if readers else 'l'}{lock}"] = chance.sample(range(size), count)
        self.tokens = {
            (lock, holder): number * 100 + place + 1
            for place, (lock, holder) in enumerate((lock, one) for lock, held in self.holders.items() for one in held)
        }
        self.waits = {one: chance.choice([*self.holders]) for one in range(size) if chance.random() < 0.8}
        self.noted = chance.random() < 0.7
        """Whether all have looked before. What a participant holds is known once it has looked."""
        self.ages = chance.sample(range(size), size)
        self.story = f"holders {self.holders}, waits {self.waits}, ages {self.ages}"
        self.victims: list[int] = []

    def rows(self) -> list[tuple[object, ...]]:
        """Return the rows of its locks: name, token, held, holder, kind, head and permit."""
        rows: list[tuple[object, ...]] = []
        for lock, held in self.holders.items():
            if ":r" not in lock:
                rows.append((lock, self.tokens[lock, held[0]], True, f"p{held[0]}", None, None, None))
                continue
            # The head has the token of the newest share.
            rows.append((lock, self.tokens[lock, held[-1]], False, None, "read-write", None, None))
            rows.extend(
                (f"{lock}#reader-{place}", self.tokens[lock, one], True, f"p{one}", "reader", lock, place)
                for place, one in enumerate(held)
            )
        return rows

    def tickets(self) -> list[tuple[object, ...]]:
        """Return the rows of its waits: name, number, attempt, client, holder, age and mode."""
        return [
            (lock, one, self.attempt(one), CLIENT, f"p{one}", self.ages[one], "write" if ":r" in lock else None)
            for one, lock in self.waits.items()
        ]

    def attempt(self, one: int) -> uuid.UUID:
        return uuid.UUID(int=self.number * 100 + one + 1)

    def held_by(self, one: int) -> list[int]:
        return [token for (_, holder), token in self.tokens.items() if holder == one]

    def notes(self) -> list[tuple[object, ...]]:
        """Return the rows of what its waiters hold: attempt, token and name."""
        return [(self.attempt(one), token, lock) for one, lock in self.waits.items() for token in self.held_by(one)]

    def looks(self) -> list[tuple[Graph, int]]:
        """Return the waiters that still wait, in the order in which they look."""
        return [(self, one) for one in self._chance.sample([*self.waits], len(self.waits))]

    def cycle_through(self, start: int) -> bool:
        """Return whether the waits lead from this participant back to it."""
        reached: set[int] = set()
        ahead = [start]
        while ahead:
            one = ahead.pop()
            for holder in self.holders[self.waits[one]] if one in self.waits else ():
                if holder not in reached:
                    reached.add(holder)
                    ahead.append(holder)
        return start in reached

    def youngest_of_cycles(self) -> set[int]:
        """Return the youngest waiter of each cycle. Every lock must have one holder."""
        found = set()
        for start in self.waits:
            if self.cycle_through(start):
                cycle = [start]
                while (following := self.holders[self.waits[cycle[-1]]][0]) != start:
                    cycle.append(following)
                found.add(max(cycle, key=lambda one: self.ages[one]))
        return found

    def end_wait(self, victim: int) -> None:
        """Note that a look has made this participant the victim."""
        assert self.cycle_through(victim), f"p{victim} is in no cycle: {self.story}, victims {self.victims}"
        self.victims.append(victim)
        del self.waits[victim]


def check_random_graphs(owner: psycopg.Connection, numbers: Iterable[int], chance: random.Random) -> int:
    """Build these graphs, let their waiters look until a whole pass has no victim, and return the number of victims."""
    graphs = [Graph(number, chance) for number in numbers]
    expected = [None if graph.shared else graph.youngest_of_cycles() for graph in graphs]
    owner.execute(CLEAR)
    owner.cursor().executemany(
        "INSERT INTO distributed_locks (name, token, expires_at, holder, kind, head, permit)"
        " VALUES (%s, %s, CASE WHEN %s THEN 'infinity' ELSE '-infinity' END::timestamptz, %s, %s, %s, %s)",
        [row for graph in graphs for row in graph.rows()],
    )
    owner.cursor().executemany(
        "INSERT INTO lock_tickets (name, number, attempt, client, holder, since, mode)"
        " VALUES (%s, %s, %s, %s, %s, timestamptz 'epoch' + %s * interval '1 second', %s)",
        [row for graph in graphs for row in graph.tickets()],
    )
    owner.cursor().executemany(
        "INSERT INTO waiting_holds (attempt, token, name) VALUES (%s, %s, %s)",
        [note for graph in graphs if graph.noted for note in graph.notes()],
    )
    looking = graphs
    while looking:
        victims = _look(owner, looking, chance)
        # The first pass in a graph without notes may find nothing.
        looking = [graph for graph in looking if graph in victims or not graph.noted]
        for graph in looking:
            graph.noted = True
    for graph, youngest in zip(graphs, expected, strict=True):
        if youngest is not None:
            assert sorted(graph.victims) == sorted(youngest), graph.story
        assert not any(map(graph.cycle_through, graph.waits)), f"{graph.story}, victims {graph.victims}"
    return sum(len(graph.victims) for graph in graphs)


def _look(owner: psycopg.Connection, graphs: Sequence[Graph], chance: random.Random) -> list[Graph]:
    """Let all waiters look, and return the graphs that had a victim."""
    looks = [look for graph in graphs for look in graph.looks()]
    chance.shuffle(looks)
    replies = owner.execute(
        LOOK.encode(),
        [
            [graph.waits[one] for graph, one in looks],
            [graph.attempt(one) for graph, one in looks],
            [array(map(str, graph.held_by(one))) for graph, one in looks],
        ],
    ).fetchall()
    assert len(replies) == len(looks)
    victims = [look for look, (victim,) in zip(looks, replies, strict=True) if victim]
    for graph, victim in victims:
        graph.end_wait(victim)
    return [graph for graph, _ in victims]
