"""Send the same calls of barriers and latches to the store in memory and to Postgres, and compare the replies."""

from __future__ import annotations

from collections.abc import Callable

from dblock._core.effects import Call
from dblock.recipes.barriers.flows import BarrierFlows, LatchFlows
from tests.robustness.simulation.fidelity import Both

PARTIES = {"b": 2, "c": 3}
LATCHES = 4
"""The count of each latch."""


class BothBarriers(Both):
    """A database with two barriers and one latch after the other, the store, and the same random calls for both."""

    def _acts(self) -> dict[Callable[[], None], float]:
        acts = super()._acts()
        del acts[self._reap]  # the store keeps barriers for ever
        return {
            **acts,
            self._arrive: 20,
            self._leave_barrier: 2,
            self._wake_waiters: 4,
            self._count_down: 4,
            self._await: 8,
            self._remaining: 1,
        }

    def _barrier(self, client: str) -> tuple[str, BarrierFlows]:
        name = self.chance.choice(list(PARTIES))
        return name, BarrierFlows(self._flows(client), "dblock", name, PARTIES[name])

    def _latch(self, client: str) -> LatchFlows:
        # The next latch when the last one is open, which it stays.
        latches = self.store.barriers.latches
        number = sum(latch.remaining == 0 for latch in latches.values())
        name = f"l{max(number - self.chance.choice([0, 0, 0, 1]), 0)}"
        return LatchFlows(self._flows(client), "dblock", name, LATCHES)

    def _attempt(self, kind: str, name: str) -> str:
        """Return an attempt for this barrier or latch: one that waits there, one that has passed it, or a new one."""
        here = [one.attempt for one in self.store.barriers.at(kind, name)]
        passed = [attempt for attempt, found in self.store.barriers.passes.items() if found.name == name]
        known = here + (passed[-3:] if kind == "barrier" else [])
        return self.chance.choice(known) if known and self.chance.random() < 0.4 else self._uuid()

    def _send(self, call: Call) -> None:
        real, simulated = self._ask(call)
        self._same(real, simulated)
        assert real is not None
        what = self.history[-1].split("(")[0].split(" ", 1)[1]
        self.kinds.add(f"{what} {real[0] is not None}")

    def _arrive(self) -> None:
        client = self.chance.choice(self._clients)
        name, flows = self._barrier(client)
        attempt = self._attempt("barrier", name)
        self._send(Call(flows._arrive, flows._arguments(attempt), flows._arrive_again))

    def _leave_barrier(self) -> None:
        name, flows = self._barrier(self._clients[0])
        self._send(Call(flows._leave, (name, self._attempt("barrier", name))))

    def _wake_waiters(self) -> None:
        name, flows = self._barrier(self._clients[0])
        latch = self._latch(self._clients[0])._name
        args = self.chance.choice([("barrier", name), ("latch", latch)])
        self._send(Call(flows._wake_waiters, args))

    def _count_down(self) -> None:
        flows = self._latch(self._clients[0])
        by = str(self.chance.choice([1, 1, 2, 5]))
        args = (flows._name, str(LATCHES), by, self.chance.choice(self._attempts))
        self._send(Call(flows._count_down, args, flows._count_down_again))

    def _await(self) -> None:
        flows = self._latch(self.chance.choice(self._clients))
        self._send(Call(flows._await, flows._arguments(self._attempt("latch", flows._name))))

    def _remaining(self) -> None:
        flows = self._latch(self._clients[0])
        self._send(Call(flows._remaining, (flows._name, str(LATCHES))))

    def _abandon(self) -> None:
        waiting = list(self.store.barriers.waiters)
        if not waiting or self.chance.random() < 0.5:
            super()._abandon()
        else:
            flows = self._flows(self._clients[0])
            self._same(*self._ask(next(flows.abandon("any", self.chance.choice(waiting)))))

    def _compare_tables(self) -> None:
        super()._compare_tables()
        barriers = self.store.barriers
        found = self._rows("name, parties, arrivals, generation FROM dblock.barriers ORDER BY name")
        assert found == [
            (name, one.parties, one.arrivals, one.generation) for name, one in sorted(barriers.barriers.items())
        ], self._story(f"{found} but {barriers.barriers}")
        found = self._rows(
            "kind, name, replace(attempt::text, '-', ''), number, replace(client::text, '-', ''),"
            " replace(presence::text, '-', ''), date_part('epoch', since), over"
            " FROM dblock.barrier_waiters ORDER BY attempt"
        )
        assert found == [
            (one.kind, one.name, one.attempt, one.number, one.client, one.presence, one.since, one.over)
            for _, one in sorted(barriers.waiters.items())
        ], self._story(f"{found} but {barriers.waiters}")
        found = self._rows(
            "replace(attempt::text, '-', ''), name, generation, number FROM dblock.barrier_passes ORDER BY attempt"
        )
        assert found == [(attempt, *one) for attempt, one in sorted(barriers.passes.items())], self._story(str(found))
        found = self._rows("name, count, remaining FROM dblock.latches ORDER BY name")
        assert found == [(name, one.count, one.remaining) for name, one in sorted(barriers.latches.items())]

    def _rows(self, query: str) -> list[tuple[object, ...]]:
        return self._connection.execute(f"SELECT {query}".encode()).fetchall()
