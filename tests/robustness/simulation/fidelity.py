"""Send the same calls to the store in memory and to dblock's functions in Postgres, and compare the replies.

The functions in that database use a clock of the test, by a function that precedes Postgres's own in their search path.
So time stands still between two calls, and the test moves it in steps of 1/64 s. Both sides can add these up without
rounding, so that deadlines at exactly this instant are compared too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Row
from dblock._core.options import lock_options
from dblock._core.presence import Presence, SocketState
from dblock._core.replies import items
from dblock.testing.database.fence import Fence
from dblock.testing.database.null_observer import NullObserver
from dblock.testing.database.recipes import RecipeStore
from dblock.testing.database.statements import perform
from tests.support.databases import LET_WAITERS_DIE

TICK = 1 / 64

STILL_CLOCK = """
    CREATE FUNCTION dblock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS $$ SELECT to_timestamp(current_setting('simulated.now')::float8) $$
"""


@dataclass
class Granted:
    """A grant, as each side numbers it: without durability the numbers are random."""

    name: str
    real: int
    simulated: int


class Both:
    """A database with dblock in it, the store, and the same random calls for both."""

    only_durable = False
    """Whether every grant has a token that both sides number alike."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.history: list[str] = []
        self.kinds: set[str] = set()
        """The kinds of events so far, so that a test can check that there were enough."""
        self._dsn = dsn
        self._heard: dict[str, list[tuple[str, str]]] = {"real": [], "simulated": []}
        self.store = RecipeStore(lambda: self.now, self.chance, NullObserver(), self._notify)
        self._fence = Fence()
        self._names = ["a", "b"]
        self._numbers = 0
        self._clients = [self._uuid() for _ in range(3)]
        self._attempts = [self._uuid() for _ in range(6)]
        self._tickets: dict[tuple[str, str], int] = {}
        self._grants: list[Granted] = []
        self._sessions: dict[str, psycopg.Connection] = {}
        self._presences: list[str] = []
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute(LET_WAITERS_DIE.encode())
        self._set_up()

    def close(self) -> None:
        """Close all connections."""
        for session in (self._connection, *self._sessions.values()):
            session.close()

    def _set_up(self) -> None:
        self._connection.execute(STILL_CLOCK)
        found = self._connection.execute(
            "SELECT oid::regprocedure::text FROM pg_proc"
            " WHERE pronamespace = 'dblock'::regnamespace AND proconfig IS NOT NULL"
        ).fetchall()
        for (function,) in found:
            change = sql.SQL("ALTER FUNCTION {} SET search_path = dblock, pg_catalog, pg_temp")
            self._connection.execute(change.format(sql.SQL(function)))
        for client in self._clients:
            self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(f"dblock_{client}")))
        self._connection.add_notify_handler(self._hear)

    def _uuid(self) -> str:
        self._numbers += 1
        return f"{self._numbers:032x}"

    def _notify(self, client: str, attempt: str) -> None:
        self._heard["simulated"].append((client, attempt))

    def _hear(self, notification: psycopg.Notify) -> None:
        client = notification.channel.removeprefix("dblock_")
        self._heard["real"].append((client, notification.payload.replace("-", "")))

    # One random call.

    def step(self) -> None:
        """Let some time pass, make one call on both sides, and compare."""
        chance = self.chance
        self.now += TICK * chance.choice([0, 0, 0, 1, 2, 8, 32, 64, 64, 200])
        acts = self._acts()
        chance.choices(list(acts), list(acts.values()))[0]()

    def _acts(self) -> dict[Callable[[], None], float]:
        """Return the calls, and how often each is made relative to the others."""
        return {
            self._try_acquire: 7,
            self._plain_try: 1,
            self._acquire: 10,
            self._renew: 4,
            self._release: 4,
            self._release_all: 1,
            self._abandon: 2,
            self._heartbeat: 4,
            self._leave: 2,
            self._force: 1,
            self._reap: 0.7,
            self._wake_queue: 0.5,
            self._register_presence: 1,
            self._end_session: 0.8,
            self._withdraw_presence: 0.8,
        }

    def compare(self) -> None:
        """Compare the tables of both sides, and the waiters that they have woken since the last time."""
        self._compare_tables()
        # A transaction notifies each waiter once, and the order of the locks does not matter.
        real, simulated = (set(self._heard[side]) for side in ("real", "simulated"))
        assert real == simulated, self._story(str(self._heard))
        if real:
            self.kinds.add("woken")
        self._heard = {"real": [], "simulated": []}

    def _flows(self, client: str) -> LockFlows:
        flows = LockFlows("dblock", "holder", lambda: self.now)
        flows.client = client
        if self._presences and self.chance.random() < 0.6:
            name = self.chance.choice(self._presences)
            flows.presence = Presence(name, 1.0, lambda: SocketState.OPEN, self.now)
            flows.presence.stands = lambda now: True  # type: ignore[method-assign]
        return flows

    def _ask(self, call: Any, simulated: tuple[str | None, ...] | None = None) -> tuple[Row | None, Row | None]:
        """Make a call on both sides, with other arguments in memory where the numbers differ."""
        assert isinstance(call, Call)
        statement = call.again if call.again is not None and self.chance.random() < 0.2 else call.sql
        self._connection.execute(f"SELECT set_config('simulated.now', '{self.now}', false)")
        args = [None if arg is None else arg.encode() for arg in call.args]
        result = self._connection.pgconn.exec_params(statement, args)
        if result.error_message:
            raise AssertionError(f"{result.error_message.decode()} {statement!r}")
        found = tuple(_text(result.get_value(0, column)) for column in range(result.nfields))
        real = found if result.ntuples else None
        self.store.durable = False
        fake = perform(self.store, self._fence, statement, simulated if simulated is not None else call.args)
        what = statement.partition(b'"dblock".')[2].partition(b"(")[0].decode()
        self.history.append(f"{self.now} {what}{call.args} -> {real}")
        self.kinds.add(what)
        return real, fake

    def _same(self, real: Row | None, simulated: Row | None, but: int | None = None) -> None:
        assert real is not None
        assert simulated is not None
        for column, (one, other) in enumerate(zip(real, simulated, strict=True)):
            assert column == but or _alike(one, other), self._story(f"column {column}: {real} but {simulated}")

    def _story(self, what: str) -> str:
        return "\n".join([*self.history[-15:], what])

    def _wanted(self) -> tuple[Any, str, str]:
        chance = self.chance
        name, ttl = chance.choice(self._names), TICK * chance.choice([7, 16, 64, 400, 400])
        durable = chance.random() < 0.9 or self.only_durable
        wanted = lock_options(name, ttl, None, None, durable=durable, fair=chance.random() < 0.8)
        if chance.random() < 0.2:
            self._attempts[chance.randrange(len(self._attempts))] = self._uuid()
        return wanted, name, chance.choice(self._attempts)

    def _try_acquire(self) -> None:
        wanted, name, attempt = self._wanted()
        ticket = self._tickets.get((name, attempt)) if self.chance.random() < 0.8 else None
        flows = self._flows(self.chance.choice(self._clients))
        real, fake = self._ask(next(flows._try(wanted, attempt, math.inf, ticket)))
        self._note(name, real, fake)

    def _acquire(self) -> None:
        wanted, name, attempt = self._wanted()
        client = self._clients[self._attempts.index(attempt) % len(self._clients)]
        call = next(self._flows(client)._enqueue(wanted, attempt, math.inf, self.chance.random() < 0.5))
        real, fake = self._ask(call)
        self._note(name, real, fake)
        if real is not None and real[4] is not None:
            self._tickets[name, attempt] = int(real[4])

    def _note(self, name: str, real: Row | None, fake: Row | None) -> None:
        """Compare two replies of a call that may grant. The number of a grant without durability is random."""
        assert real is not None
        assert fake is not None
        random_number = (real[1] or "").startswith("-") and (fake[1] or "").startswith("-")
        self._same(real, fake, but=1 if random_number else None)
        if real[0] == "t":
            self.kinds.add("granted")
            self._grants.append(Granted(name, int(real[1] or 0), int(fake[1] or 0)))
            self._grants = self._grants[-6:]

    def _some(self) -> list[Granted]:
        return self.chance.sample(self._grants, min(len(self._grants), self.chance.randrange(1, 4)))

    def _renew(self) -> None:
        some = self._some()
        if some:
            flows, ttl = self._flows(self._clients[0]), TICK * self.chance.choice([7, 64, 200])
            tie = flows.presence if self.chance.random() < 0.5 else None
            # Each only once: a statement that names a row twice is not defined.
            some = list({one.name: one for one in some}.values())
            call = next(flows.renew([(one.name, one.real, ttl) for one in some], tie=tie))
            fake: Any = next(flows.renew([(one.name, one.simulated, ttl) for one in some], tie=tie))
            real, simulated = self._ask(call, fake.args)
            self._same(real, simulated)
            self.kinds.update(items(real[2] if real else None))

    def _release(self) -> None:
        for one in self._some()[:1]:
            call: Any = next(self._flows(self._clients[0]).release(one.name, one.real, 0.0))
            self._same(*self._ask(call, (one.name, str(one.simulated))))

    def _release_all(self) -> None:
        some = list({one.name: one for one in self._some()}.values())
        if some:
            flows = self._flows(self._clients[0])
            call = next(flows.release_all([(one.name, one.real) for one in some]))
            fake: Any = next(flows.release_all([(one.name, one.simulated) for one in some]))
            self._same(*self._ask(call, fake.args))

    def _abandon(self) -> None:
        _, name, attempt = self._wanted()
        flows = self._flows(self._clients[0])
        act = flows.abandon if self.chance.random() < 0.7 else flows.abandon_ticket
        self._same(*self._ask(next(act(name, attempt))))

    def _heartbeat(self) -> None:
        client = self.chance.choice(self._clients)
        names = self.chance.sample(self._names, min(self.chance.randrange(1, 3), len(self._names)))
        real, simulated = self._ask(next(self._flows(client).heartbeat(names, 1.0)))
        self._same(_in_order(real), _in_order(simulated))

    def _leave(self) -> None:
        flows = self._flows(self.chance.choice(self._clients))
        but = self.chance.sample(self._attempts, 2)
        self._ask(next(flows.leave() if self.chance.random() < 0.2 else flows.leave_all_but(but)))

    # Calls that no client makes.

    def _owner(self, statement: str, *args: object) -> Any:
        self._connection.execute(f"SELECT set_config('simulated.now', '{self.now}', false)")
        row = self._connection.execute(f"SELECT {statement}".encode(), args).fetchone()
        assert row is not None
        self.store.durable = False
        self.history.append(f"{self.now} {statement} {args} -> {row}")
        self.kinds.add(statement.partition(".")[2].partition("(")[0])
        return row[0]

    def _plain_try(self) -> None:
        """Try without an attempt, as a user does from psql."""
        name = self.chance.choice(self._names)
        real = self._owner(f"granted FROM dblock.try_acquire('{name}', '5 s')")
        assert real == self.store.try_acquire(name, 5.0, None).granted, self._story("in memory otherwise")

    def _force(self) -> None:
        for one in self._some()[:1]:
            now = self.chance.random() < 0.5
            real = self._owner("dblock.force_release(%s, %s, now => %s)", one.name, one.real, now)
            assert real == self.store.force_release(one.name, one.simulated, now), self._story("in memory otherwise")

    def _reap(self) -> None:
        idle = TICK * self.chance.choice([0, 64, 640])
        real = self._owner("dblock.reap(make_interval(secs => %s))", idle)
        assert real == self.store.reap(idle), self._story("in memory otherwise")

    def _wake_queue(self) -> None:
        name = self.chance.choice(self._names)
        self._owner("dblock.wake_queue(%s)", name)
        self.store.wake_if_free(name)

    def _register_presence(self) -> None:
        """Register a presence, in a session of its own."""
        if len(self._sessions) == 3:
            return
        name, grace = self._uuid(), TICK * self.chance.choice([4, 64])
        session = psycopg.connect(self._dsn, autocommit=True)
        session.execute("SELECT dblock.register_presence(%s, make_interval(secs => %s))", (name, grace))
        self._sessions[name] = session
        self._presences = [*self._presences, name][-4:]
        self.store.sessions.add(int(name, 16))
        self.store.session = int(name, 16)
        self.store.register_presence(name, grace)
        self.store.session = None
        self.history.append(f"{self.now} {name} comes")

    def _end_session(self) -> None:
        """End the session of a presence, and wait for its end."""
        if self._sessions:
            name = self.chance.choice(list(self._sessions))
            session = self._sessions.pop(name)
            self._connection.execute("SELECT pg_terminate_backend(%s, 5000)", (session.info.backend_pid,))
            session.close()
            self.store.sessions.discard(int(name, 16))
            self.history.append(f"{self.now} {name} goes")

    def _withdraw_presence(self) -> None:
        if self._presences:
            some, name = self._some(), self.chance.choice(self._presences)
            flows = self._flows(self._clients[0])
            call = next(flows.withdraw_presence(name, [(one.name, one.real) for one in some]))
            fake: Any = next(flows.withdraw_presence(name, [(one.name, one.simulated) for one in some]))
            self._same(*self._ask(call, fake.args))

    # The tables.

    def _compare_tables(self) -> None:
        rows = self._connection.execute(
            "SELECT name, greatest(token, 0), date_part('epoch', expires_at), replace(attempt::text, '-', ''),"
            " replace(presence::text, '-', ''), waiting, last_served_ticket, forced_at IS NOT NULL"
            " FROM dblock.distributed_locks ORDER BY name"
        ).fetchall()
        assert rows == [
            (
                r.name,
                max(r.token, 0),
                r.expires_at,
                r.attempt,
                r.presence,
                r.waiting,
                r.last_served_ticket,
                bool(r.forced_at),
            )
            for _, r in sorted(self.store.tables.rows.items())
        ], self._story(f"Postgres has {rows}, memory {self.store.tables.rows}")
        tickets = self._connection.execute(
            "SELECT name, number, replace(attempt::text, '-', ''), replace(client::text, '-', ''),"
            " replace(presence::text, '-', ''), date_part('epoch', since)"
            " FROM dblock.lock_tickets ORDER BY name, number"
        ).fetchall()
        assert tickets == [
            (t.name, t.number, t.attempt, t.client, t.presence, t.since)
            for _, line in sorted(self.store.tables.tickets.items())
            for t in line
        ], self._story(f"Postgres has {tickets}, memory {self.store.tables.tickets}")
        queues = self._connection.execute("SELECT name, last_ticket FROM dblock.lock_queues").fetchall()
        assert dict(queues) == self.store.queues, self._story(f"{queues} {self.store.queues}")
        heard = self._connection.execute(
            "SELECT replace(client::text, '-', ''), date_part('epoch', seen_until) FROM dblock.lock_clients"
        ).fetchall()
        assert dict(heard) == self.store.tables.clients, self._story(f"{heard} {self.store.tables.clients}")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _in_order(row: Row | None) -> Row:
    """Return the reply to a heartbeat with its attempts in order: waiters at barriers have none."""
    assert row is not None
    total, *columns = row
    firsts = sorted(zip(*map(items, columns), strict=True))
    return (total, *(",".join(column) for column in zip(*firsts, strict=True))) if firsts else row


def _alike(real: str | None, simulated: str | None) -> bool:
    if real == simulated:
        return True
    if real is None or simulated is None:
        return False
    real = real.replace("-", "") if len(real) > 30 else real
    ours = [one.strip("{}") for one in real.split(",")]
    theirs = [one.strip("{}") for one in simulated.split(",")]
    try:
        return [float(one) for one in ours] == [float(one) for one in theirs]
    except ValueError:
        return ours == theirs
