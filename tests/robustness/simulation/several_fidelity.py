"""Send the same calls for several locks to the store in memory and to Postgres, and compare the replies.

The calls that look for deadlocks and that inspect a lock are among them. The locks are also acquired one by one,
renewed, released, abandoned, forced and reaped, as `fidelity` does it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from dblock._core.effects import Call, Row
from dblock._core.lock_any import LockAnyFlows
from dblock._core.lock_any import _Queue as AnyQueue
from dblock._core.options import LockOptions, lock_options
from dblock._core.replies import array, items
from dblock._core.several import SeveralFlows, _Queue
from dblock.testing.database.tables import Ticket
from tests.robustness.simulation.fidelity import TICK, Both, Granted

OWNERS = 5
"""How many threads ask. The attempts of one thread have the same first half."""


class BothSeveral(Both):
    """A database with some locks in it, the store, and the same random calls for both."""

    only_durable = True

    def __init__(self, dsn: str, seed: int) -> None:
        super().__init__(dsn, seed)
        self._names = ["a", "b", "c", "d"]

    def _uuid(self) -> str:
        self._numbers += 1
        return f"{self._numbers % OWNERS:016x}{self._numbers:016x}"

    def _acts(self) -> dict[Callable[[], None], float]:
        acts = super()._acts()
        del acts[self._plain_try]
        several = {self._try_all: 3, self._acquire_all: 14, self._acquire_any: 5, self._abandon_all: 0.5}
        looks = {self._cross: 1, self._give_way: 4, self._wake_set: 1, self._look: 12, self._holder: 2, self._queue: 2}
        # Locks stay held and waited for, so that waits form cycles.
        rare = {self._abandon: 0.5, self._leave: 0.3, self._reap: 0.3, self._release: 2, self._force: 0.3}
        return {**acts, **several, **looks, **rare}

    def step(self) -> None:
        self.now += TICK * self.chance.choice([0, 0, 0, 0, 1, 2, 8, 32, 64])
        acts = self._acts()
        self.chance.choices(list(acts), list(acts.values()))[0]()

    def _several(self) -> tuple[list[str], LockOptions, str, str]:
        """Return some names, the options that their locks share, an attempt, and its client."""
        options, _, attempt = self._wanted()
        names = self.chance.sample(self._names, self.chance.randrange(1, 4))
        client = self._clients[self._attempts.index(attempt) % len(self._clients)]
        return names, lock_options(names[0], options.ttl, None, None), attempt, client

    def _note_all(self, names: list[str], tokens: str | None) -> None:
        self._grants += [
            Granted(name, int(one), int(one)) for name, one in zip(names, items(tokens), strict=False) if one
        ]
        self._grants = self._grants[-6:]

    def _try_all(self) -> None:
        names, options, attempt, client = self._several()
        flows = SeveralFlows(self._flows(client))
        real, fake = self._ask(next(flows._ask(sorted(names), options, attempt)))
        self._same(real, fake)
        self._note_all(sorted(names), real[0] if real else None)

    def _acquire_all(self) -> None:
        names, options, attempt, client = self._several()
        names.sort()
        held = [name for name in self._names if name < names[0] and self.store.holding_attempt(name) == attempt]
        ticket = self._tickets.get((names[0], attempt)) if self.chance.random() < 0.7 else None
        places = {name: self.chance.randrange(1, 6) for name in names if self.chance.random() < 0.3}
        queue = _Queue(ticket, held, self.chance.random() < 0.5, places, True)
        flows = SeveralFlows(self._flows(client))
        real, fake = self._ask(next(flows._ask(names, options, attempt, math.inf, queue)))
        self._same(real, fake)
        assert real is not None
        self._note_all(names, real[0])
        if real[5] is not None:
            self._tickets[names[int(real[3] or 0) - 1], attempt] = int(real[5])
        self.kinds.update(kind for kind, column in (("cycle", 9), ("wanted", 11)) if real[column] is not None)

    def _acquire_any(self) -> None:
        names, options, attempt, client = self._several()
        if sum(self.store.holding_attempt(name) == attempt for name in names) > 1:
            return  # no attempt that asks for any of several locks holds two of them
        flows = LockAnyFlows(self._flows(client))
        queue = AnyQueue(self.chance.random() < 0.5, 0.01) if self.chance.random() < 0.8 else None
        real, fake = self._ask(next(flows._ask(names, options, attempt, math.inf, queue)))
        self._same(real, fake)
        assert real is not None
        if real[0] is not None:
            self._note_all([real[0]], f"{{{real[1]}}}")
            self.kinds.add("granted any")

    def _cross(self) -> None:
        """Let two threads ask for the same two locks, each in another order, and look for what comes of it."""
        low, high = sorted(self.chance.sample(self._names, 2))
        one, other = self._attempts[:2] = self._uuid(), self._uuid()
        if self.chance.random() < 0.7:
            for client in self._clients:
                self._ask(next(self._flows(client).leave()))
            self._owner("count(*) FROM dblock.distributed_locks, dblock.force_release(name, token, now => true)")
            for row in list(self.store.tables.rows.values()):
                self.store.force_release(row.name, row.token, True)
        for name, attempt in ((low, one), (high, other), (low, other)):
            self._enqueue(name, attempt)
        flows = SeveralFlows(self._flows(self._clients[0]))
        queue = _Queue(None, [low], False, {}, True)
        options = lock_options(high, 64 * TICK, None, None)
        real, fake = self._ask(next(flows._ask([high], options, one, math.inf, queue)))
        self._same(real, fake)
        assert real is not None
        self.kinds.update(kind for kind, column in (("cycle", 9), ("wanted", 11)) if real[column] is not None)
        for attempt in self.chance.sample([one, other], 2):
            for ticket in [t for line in self.store.tables.tickets.values() for t in line if t.attempt == attempt]:
                self._look_with(
                    ticket, [row.token for row in self.store.tables.rows.values() if row.attempt == attempt]
                )

    def _enqueue(self, name: str, attempt: str) -> None:
        client = self._clients[self._attempts.index(attempt) % len(self._clients)]
        options = lock_options(name, 400 * TICK, None, None)
        real, fake = self._ask(next(self._flows(client)._enqueue(options, attempt, math.inf, False)))
        self._note(name, real, fake)

    def _abandon_all(self) -> None:
        names, _, attempt, client = self._several()
        statements = self._flows(client).statements
        statement = self.chance.choice([statements.abandon_all, statements.abandon_tickets])
        self._same(*self._ask(Call(statement, (array(names), attempt))))

    def _give_way(self) -> None:
        tables = self.store.tables
        held = [
            (row.name, row.attempt)
            for row in tables.rows.values()
            if row.attempt in self._attempts and tables.tickets.get(row.name)
        ]
        if not held:
            return
        name, attempt = self.chance.choice(held)
        waiter = self.chance.choice(tables.tickets[name]).attempt
        names = [name, *self.chance.sample(self._names, 2)]
        ordered = "t" if self.chance.random() < 0.5 else "f"
        client = self._clients[self._attempts.index(attempt) % len(self._clients)]
        args = (array(dict.fromkeys(names)), attempt, waiter, client, None, "holder", ordered)
        real, fake = self._ask(Call(self._flows(client).statements.give_way, args))
        self._same(real, fake)
        if real and real[0] is not None:
            self.kinds.add("gave way")

    def _wake_set(self) -> None:
        statement = self._flows(self._clients[0]).statements.wake_set
        self._same(*self._ask(Call(statement, (self.chance.choice(self._names),))))

    def _look(self) -> None:
        tables = self.store.tables
        waiting = [ticket for line in tables.tickets.values() for ticket in line]
        if not waiting:
            return
        ticket = self.chance.choice(waiting)
        self._look_with(
            ticket,
            [row.token for row in tables.rows.values() if row.name != ticket.name and self.chance.random() < 0.6],
        )

    def _look_with(self, ticket: Ticket, tokens: list[int]) -> None:
        tables = self.store.tables
        ended = self.chance.sample(
            sorted(tables.waiting_holds), min(len(tables.waiting_holds), self.chance.randrange(2))
        )
        args = (ticket.name, ticket.attempt, array(map(str, tokens)), array(ended))
        real, fake = self._ask(Call(self._flows(ticket.client).statements.look_for_deadlock, args))
        assert real is not None
        assert fake is not None
        assert real[0] == fake[0], self._story(f"{real} but {fake}")
        assert _json(real) == _json(fake), self._story(f"{real} but {fake}")
        if real[1] is not None:
            self.kinds.add(f"deadlock {real[0]}")

    def _holder(self) -> None:
        statement = self._flows(self._clients[0]).statements.holder
        real, fake = self._ask(Call(statement, (self.chance.choice(self._names),)))
        free = (None,) * 6
        self._same(real or free, fake or free)

    def _queue(self) -> None:
        statement = self._flows(self._clients[0]).statements.queue
        real, fake = self._ask(Call(statement, (self.chance.choice(self._names),)))
        assert real is not None
        assert fake is not None
        assert json.loads(real[0] or "") == json.loads(fake[0] or ""), self._story(f"{real} but {fake}")

    def _compare_tables(self) -> None:
        super()._compare_tables()
        ordered = self._connection.execute(
            "SELECT name, number, ordered FROM dblock.lock_tickets ORDER BY 1, 2"
        ).fetchall()
        mine = [(t.name, t.number, t.ordered) for _, line in sorted(self.store.tables.tickets.items()) for t in line]
        assert ordered == mine, self._story(f"{ordered} {mine}")
        noted = self._connection.execute(
            "SELECT replace(attempt::text, '-', ''), token, name FROM dblock.waiting_holds ORDER BY 1, 2"
        ).fetchall()
        holds = self.store.tables.waiting_holds
        assert noted == sorted((attempt, token, name) for attempt in holds for token, name in holds[attempt].items())


def _json(row: Row) -> object:
    return None if row[1] is None else json.loads(row[1])
