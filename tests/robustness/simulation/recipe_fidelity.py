"""Send the same calls of elections and schedules to the store in memory and to Postgres, and compare the replies.

The locks of an election and of two schedules are also renewed, released, forced and reaped, as `fidelity` does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Row
from dblock._core.replies import array
from dblock._core.slots import SlotFlows, check_definition
from dblock.recipes.elections.flows import ElectionFlows
from dblock.recipes.elections.records import election_options
from dblock.testing.database.schedules.slots import SECOND
from tests.robustness.simulation.fidelity import TICK, Both, Granted

ELECTION = "e"

HOLDERS = ["one", "two"]


class BothRecipes(Both):
    """A database with an election or two schedules in it, the store, and the same random calls for both."""

    only_durable = True

    def __init__(self, dsn: str, seed: int, recipe: str) -> None:
        super().__init__(dsn, seed)
        self._recipe = recipe
        self._overlap = "skip"
        self._names = ["election:e"] if recipe == "elections" else ["once:s", "once:d", "once:c"]

    def _acts(self) -> dict[Callable[[], None], float]:
        if self._recipe == "schedules":
            return {**super()._acts(), self._claim: 24, self._end_slot: 12, self._outcome: 2}
        return {
            **super()._acts(),
            self._campaign: 15,
            self._join: 4,
            self._leave_election: 1,
            self._begin: 8,
            self._end: 3,
            self._publish: 1,
            self._transfer: 4,
            self._demand: 4,
            self._leader: 2,
            self._list: 4,
        }

    def _flows(self, client: str) -> LockFlows:
        flows = super()._flows(client)
        flows._holder = self.chance.choice(HOLDERS)
        return flows

    # Elections.

    def _election(self) -> ElectionFlows:
        options = election_options(ELECTION, 5.0, None, 0, None, None, None)
        return ElectionFlows(self._flows(self._clients[0]), "dblock", options)

    def _term(self) -> int | None:
        """Return the token of a grant of the election's lock, usually the newest."""
        tokens = [one.real for one in self._grants if one.name == "election:e" and one.real > 0]
        return self.chance.choice([tokens[0], *tokens[-1:] * 8]) if tokens else None

    def _campaign(self) -> None:
        """Queue, join, begin a term if the lock was granted, and ask whether it should end, all at one instant."""
        for act in (self._begin, self._acquire, self._join, self._demand, self._transfer, self._demand):
            act()

    def _join(self) -> None:
        rank = array(map(str, self.chance.choice([(), (0,), (0,), (1,), (1, 2)])))
        waiting = [ticket.attempt for ticket in self.store.tables.tickets.get("election:e", [])]
        attempt = self.chance.choice(waiting or self._attempts)
        args = (ELECTION, attempt, self.chance.choice(HOLDERS), rank)
        self._ask(Call(self._election()._join, args))

    def _leave_election(self) -> None:
        self._same(*self._ask(Call(self._election()._leave, (ELECTION, self.chance.choice(self._attempts)))))

    def _call_of_term(self, statement: str, *more: str | None, again: bool = False) -> None:
        token, flows = self._term(), self._election()
        if token is not None:
            retry = getattr(flows, statement + "_again") if again else None
            real, simulated = self._ask(Call(getattr(flows, statement), (ELECTION, str(token), *more), retry))
            self._same(real, simulated)
            self.kinds.add(f"{statement} {real and real[0]}")

    def _begin(self) -> None:
        self._call_of_term("_begin", self.chance.choice(self._attempts), self.chance.choice([None, '{"at": 1}']))

    def _end(self) -> None:
        self._call_of_term("_end", self.chance.choice(["resigned", "transferred", "outranked", "failed"]), again=True)

    def _publish(self) -> None:
        self._call_of_term("_publish", '{"at": 2}')

    def _transfer(self) -> None:
        self._call_of_term("_transfer", self.chance.choice([*HOLDERS, "absent"]))

    def _demand(self) -> None:
        self._call_of_term("_demand")

    def _leader(self) -> None:
        self._same(*self._ask(Call(self._election()._leader, (ELECTION,))))

    def _list(self) -> None:
        since = self.chance.choice([None, 0, self._term()])
        args = (ELECTION, None if since is None else str(since), self.chance.choice("tf"), "5")
        real, simulated = self._ask(Call(self._election()._terms, args))
        assert real is not None
        assert simulated is not None
        found, expected = ([*json.loads(row[0] or "[]"), row[1]] for row in (real, simulated))
        assert found == expected, self._story(f"{found} but {expected}")

    # Schedules.

    def _claim(self) -> None:
        chance = self.chance
        name = chance.choice("ssdcc")
        period = TICK * chance.choice([64, 64, 64, 64, 128])
        if chance.random() < 0.1:
            self._overlap = chance.choice(["skip", "queue", "allow"])
        definition = check_definition(
            name,
            every=period if name == "s" else None,
            delay=period if name == "d" else None,
            cron=chance.choice(["* * * * *"] * 9 + ["0 * * * *"]) if name == "c" else None,
            overlap=self._overlap,
            at_least=None if self._overlap == "allow" else chance.choice([None, None, TICK * 96]),
            catch_up=chance.choice(["none", "none", "latest", "all"]),
            delivery=chance.choice(["at-most-once", "at-least-once"]),
            grace=chance.choice([None, TICK * 8]),
            ttl=TICK * chance.choice([16, 64, 400]),
            planner=lambda *_: _plan,
        )
        _, _, attempt = self._wanted()
        waiting = [run.attempt for run in self.store.tables.slot_runs if run.outcome == "queued" and run.attempt]
        if waiting and chance.random() < 0.3:
            attempt = waiting[-1]
        flow = SlotFlows(self._flows(chance.choice(self._clients)), definition).claim_now(attempt)
        real, simulated = self._ask(next(flow))
        self._same(real, simulated)
        assert real is not None
        self.kinds.add(f"claim {real[0]}")
        if real[0] == "plan" and chance.random() < 0.9:
            real, simulated = self._ask(flow.send(real))
            self._same(real, simulated)
            assert real is not None
            self.kinds.add(f"claim {real[0]}")
        if real[0] == "run":
            self._grants = [*self._grants, Granted(real[1] or "", int(real[2] or 0), int(real[2] or 0))][-6:]

    def _outcome(self) -> None:
        runs = self.store.tables.slot_runs
        if runs:
            run = self.chance.choice(runs)
            args = (run.name, str(run.slot + self.chance.choice([0, 0, 1])))
            call = Call(self._flows(self._clients[0]).statements.slot_outcome, args)
            real, simulated = self._ask(call)
            assert real == simulated, self._story(f"{real} but {simulated}")

    def _end_slot(self) -> None:
        runs = [one for one in self._grants if one.name.startswith("once:") and one.real > 0]
        if runs:
            run = self.chance.choice(runs)
            outcome = self.chance.choice(["succeeded", "failed"])
            args = (run.name.removeprefix("once:").partition("@")[0], str(run.real), outcome, None, None)
            real, simulated = self._ask(Call(self._flows(self._clients[0]).statements.end_slot, args))
            self._same(real, simulated)
            self.kinds.add(f"end_slot {real and real[0]}")

    # The tables.

    def _compare_tables(self) -> None:
        super()._compare_tables()
        tables = self.store.tables
        self._compare_rows(
            "token, number, holder, rank, value::text, date_part('epoch', began_at), date_part('epoch', ended_at), how,"
            " transfer_to FROM dblock.terms ORDER BY number",
            [
                (t.token, t.number, t.holder, list(t.rank), t.value, t.began_at, t.ended_at, t.how, t.transfer_to)
                for t in tables.terms.get(ELECTION, [])
            ],
        )
        self._compare_rows(
            "replace(attempt::text, '-', ''), holder, rank FROM dblock.candidates ORDER BY attempt",
            [(c.attempt, c.holder, list(c.rank)) for _, c in sorted(tables.candidates.get(ELECTION, {}).items())],
        )
        self._compare_rows(
            f"name, kind, catch_up, delivery, {_micro('since', 'decided_until', 'last_claimed_at', 'last_ended_at')}"
            " FROM dblock.schedules ORDER BY name",
            [
                (s.name, s.kind, s.catch_up, s.delivery, s.since, s.decided_until, s.last_claimed_at, s.last_ended_at)
                for _, s in sorted(tables.schedules.items())
            ],
        )
        self._compare_rows(
            f"overlap, expression, zone, cardinality(upcoming), {_micro('planned_until')}"
            " FROM dblock.schedules ORDER BY name",
            [
                (s.overlap, s.expression, s.zone, len(s.upcoming), s.planned_until)
                for _, s in sorted(tables.schedules.items())
            ],
        )
        runs = tables.slot_runs
        self._compare_rows(
            f"name, number, slots, {_micro('slot', 'last_slot', 'claimed_at', 'ended_at')}"
            " FROM dblock.slot_runs ORDER BY run",
            [(r.name, r.number, r.slots, r.slot, r.last_slot, r.claimed_at, r.ended_at) for r in runs],
        )
        self._compare_rows(
            "lock, token, replace(attempt::text, '-', ''), outcome FROM dblock.slot_runs ORDER BY run",
            [(r.lock, r.token, r.attempt, r.outcome) for r in runs],
        )

    def _compare_rows(self, query: str, simulated: list[Row] | list[Any]) -> None:
        real = self._connection.execute(f"SELECT {query}".encode()).fetchall()
        assert real == simulated, self._story(f"Postgres has {real},\nmemory {simulated}")


def _plan(after: datetime, now: datetime) -> list[int]:
    """Return the slots of every cron expression here: not quite each third second."""
    first, last = (int(moment.timestamp()) for moment in (after, now))
    return [slot for slot in range(first + 1, last + 12) if slot % 3 == 0 and slot % 7]


def _micro(*columns: str) -> str:
    return ", ".join(f"(extract(epoch FROM {column}) * {SECOND})::bigint" for column in columns)
