"""Send the same calls of read-write locks and semaphores to the store in memory and to Postgres, compare the replies.

The shares are also renewed, released, abandoned, forced and reaped, as `fidelity` does it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from dblock._core.effects import Call
from dblock._core.presence import Presence, SocketState
from dblock._core.shared_acquire import SharedFlows, SharedOptions, read_write_options, semaphore_options
from dblock.errors import PermitsDiffer
from tests.robustness.simulation.fidelity import TICK, Both, Granted

NAMES = {"read-write": "rw", "semaphore": "sem"}


class BothShared(Both):
    """A database with a shared lock in it, the store, and the same random calls for both."""

    only_durable = True

    def __init__(self, dsn: str, seed: int, kind: str) -> None:
        super().__init__(dsn, seed)
        self._kind = kind
        self._names = [NAMES[kind]]
        self._permits = 2

    def _acts(self) -> dict[Callable[[], None], float]:
        acts = super()._acts()
        for plain in (self._try_acquire, self._acquire, self._plain_try):
            del acts[plain]
        acts = {**acts, self._try_share: 8, self._ask_for_share: 14, self._state: 2, self._release: 6}
        if self._kind == "semaphore":
            return {**acts, self._resize: 1.5}
        return {**acts, self._downgrade: 4}

    def _options(self) -> tuple[SharedOptions, str]:
        chance = self.chance
        name, ttl = self._names[0], TICK * chance.choice([7, 16, 64, 400, 400])
        if chance.random() < 0.2:
            self._attempts[chance.randrange(len(self._attempts))] = self._uuid()
        attempt = chance.choice(self._attempts)
        if self._kind == "semaphore":
            head = self.store.tables.rows.get(name)
            permits = None if head is not None and chance.random() < 0.3 else self._permits
            return semaphore_options(permits, name, ttl, None, None, True), attempt
        # Each attempt wants one thing.
        mode = "write" if int(attempt, 16) % 3 == 0 else "read"
        return read_write_options(mode, name, ttl, None, None, True), attempt

    def _shared_flows(self, client: str) -> SharedFlows:
        flows = SharedFlows("dblock", "holder", lambda: self.now)
        flows.client = client
        if self._presences and self.chance.random() < 0.6:
            name = self.chance.choice(self._presences)
            flows.presence = Presence(name, 1.0, lambda: SocketState.OPEN, self.now)
            flows.presence.stands = lambda now: True  # type: ignore[method-assign]
        return flows

    def _try_share(self) -> None:
        options, attempt = self._options()
        self._ask_both(next(self._shared_flows(self._clients[0])._try(options, attempt)))

    def _ask_for_share(self) -> None:
        options, attempt = self._options()
        client = self._clients[self._attempts.index(attempt) % len(self._clients)]
        had_ticket = self.chance.random() < 0.5 and self._names[0] in self.store.tables.rows
        self._ask_both(next(self._shared_flows(client)._enqueue(options, attempt, math.inf, had_ticket)))

    def _ask_both(self, call: Call) -> None:
        head = self.store.tables.rows.get(self._names[0])
        name, attempt = self._names[0], call.args[7] or ""
        known = bool(self.store.tickets_of(name, attempt) or self.store.shares_of(name, attempt))
        agreed = known or call.args[10] == "t"  # a waiter and a holder agreed on the number before
        if head is not None and call.args[3] not in (None, str(head.permits)) and not agreed:
            self._refused(call)
            return
        real, simulated = self._ask(call)
        self._same(real, simulated)
        assert real is not None
        mode = call.args[2] or "permit"
        if real[0] == "t":
            self.kinds.add(f"{mode} granted")
            self._grants = [*self._grants, Granted(real[8] or "", int(real[1] or 0), int(real[1] or 0))][-6:]
        else:
            self.kinds.add(f"{mode} {'waits' if real[4] else 'refused'}")

    def _refused(self, call: Call) -> None:
        """Ask for another number of permits than the semaphore has."""
        told = None
        try:
            self._ask(call)
        except AssertionError as error:
            told = str(error)
        assert told is not None, self._story("the other number of permits was not noticed")
        assert "permits, but this call asks for one with" in told, self._story(told)
        self.kinds.add("permits differ")
        try:
            self.store.acquire_shared(self._names[0], "semaphore", None, int(call.args[3] or 0), 1.0, self._uuid())
        except PermitsDiffer as error:
            self._permits = error.permits
        else:
            raise AssertionError("in memory otherwise")

    def _downgrade(self) -> None:
        writers = [one.real for one in self._grants if one.name.endswith("#writer")]
        if not writers:
            return
        flows, (_, attempt) = self._shared_flows(self._clients[0]), self._options()
        presence = None if flows.presence is None else flows.presence.name
        ttl = f"{TICK * self.chance.choice([7, 64, 400])} s"
        token = self.chance.choice([writers[-1], writers[-1], writers[0]])
        args = (self._names[0], str(token), attempt, ttl, presence)
        real, simulated = self._ask(Call(flows.statements.downgrade, args))
        assert real is not None
        if real[0] == "f":
            assert simulated is not None
            assert simulated[0] == "f", self._story("downgraded in memory only")
        else:
            self._same(real, simulated)
            self._grants = [*self._grants, Granted(real[4] or "", int(real[1] or 0), int(real[1] or 0))][-6:]
        self.kinds.add(f"downgrade {real[0]}")

    def _resize(self) -> None:
        if self._names[0] in self.store.tables.rows:
            permits = self.chance.randrange(1, 4)
            statement = self._shared_flows(self._clients[0]).statements.resize_semaphore
            self._same(*self._ask(Call(statement, (self._names[0], str(permits)))))

    def _state(self) -> None:
        statement = self._shared_flows(self._clients[0]).statements.shared_state
        real, simulated = self._ask(Call(statement, (self._names[0],)))
        assert real is not None
        assert simulated is not None
        self._same(real[:3], simulated[:3])
        tokens = [[one["token"] for one in json.loads(row[3] or "[]")] for row in (real, simulated)]
        assert tokens[0] == tokens[1], self._story(f"{real} but {simulated}")

    def _compare_tables(self) -> None:
        super()._compare_tables()
        rows = self._connection.execute(
            "SELECT name, kind, head, permits, permit FROM dblock.distributed_locks ORDER BY name"
        ).fetchall()
        mine = sorted((r.name, r.kind, r.head, r.permits, r.permit) for r in self.store.tables.rows.values())
        assert rows == mine, self._story(f"Postgres has {rows},\nmemory {mine}")
        modes = self._connection.execute("SELECT number, mode FROM dblock.lock_tickets ORDER BY number").fetchall()
        line = self.store.tables.tickets.get(self._names[0], [])
        assert modes == [(t.number, t.mode) for t in line], self._story(f"{modes} {line}")
