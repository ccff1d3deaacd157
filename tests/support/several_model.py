"""Make calls for several locks at once, and compare every reply with a plain model of them.

The model has for each lock its holder and its queue. A request for all of its locks takes them in sorted order, and
waits at the first one that it cannot have. A request for any of its locks waits in every queue, and gets one lock.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.support.state_machines import Machine, picked, picks
from tests.support.steered_calls import SteeredCalls

NAMES = ("a", "b", "c", "d")

names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
ttls = st.sampled_from([1, 2, 4, 8])


@dataclass
class Grant:
    """What a lock is held by."""

    attempt: uuid.UUID
    token: int
    until: float


@dataclass(eq=False)
class Request:
    """An attempt that has asked for several locks, with a client: `left` are those that it still asks for."""

    attempt: uuid.UUID
    client: uuid.UUID
    left: list[str]
    ticket: int | None = None


@dataclass
class Locks:
    """The locks: who holds each, and who waits for it, in order. Nothing else decides."""

    now: float = 1000.0
    grants: dict[str, Grant] = field(default_factory=dict)
    queues: dict[str, list[Request]] = field(default_factory=lambda: {name: [] for name in NAMES})
    seen_until: dict[uuid.UUID, float] = field(default_factory=dict)

    def held(self, name: str) -> Grant | None:
        grant = self.grants.get(name)
        return grant if grant and grant.until > self.now else None

    def live(self, name: str) -> list[Request]:
        return [one for one in self.queues[name] if self.seen_until[one.client] > self.now]

    def may_have(self, name: str, attempt: uuid.UUID) -> bool:
        """Return whether an attempt gets a lock, or has it. One without a ticket comes after all that wait."""
        held = self.held(name)
        if held:
            return held.attempt == attempt
        live = self.live(name)
        return not live or live[0].attempt == attempt

    def wait(self, name: str, request: Request) -> None:
        if request not in self.queues[name]:
            self.queues[name].append(request)

    def leave(self, name: str, attempt: uuid.UUID) -> bool:
        """Remove an attempt from a queue, and return whether it was there."""
        before = self.queues[name]
        self.queues[name] = [one for one in before if one.attempt != attempt]
        return len(self.queues[name]) < len(before)

    def next(self, name: str) -> set[uuid.UUID]:
        """Return the waiter that can have the lock now."""
        return set() if self.held(name) else {one.attempt for one in self.live(name)[:1]}


class SeveralMachine(Machine):
    """Four locks in a database, and their model."""

    def __init__(self, calls: SteeredCalls) -> None:
        super().__init__()
        self.calls, self.model = calls, Locks()
        self._highest = 0
        self._all: list[Request] = []
        self._any: list[Request] = []
        calls.start()
        self._move(0)
        self._clients = [self._new_client() for _ in range(3)]

    def compare(self) -> None:
        query = "SELECT name, token FROM dblock.distributed_locks WHERE expires_at > dblock.clock_timestamp()"
        found: dict[str, int] = dict(self.calls.connection.execute(query).fetchall())
        held = {name: self.model.held(name) for name in NAMES}
        assert found == {name: grant.token for name, grant in held.items() if grant}
        rows = self.calls.connection.execute("SELECT name, attempt FROM dblock.lock_tickets ORDER BY number").fetchall()
        for name in NAMES:
            live = [one.attempt for one in self.model.live(name)]
            assert [attempt for at, attempt in rows if at == name and attempt in live] == live
            known = {one.attempt for one in self.model.queues[name]}
            assert {attempt for at, attempt in rows if at == name} <= known, "no ticket stays behind"

    # What the calls share.

    def _new_client(self) -> uuid.UUID:
        client = self.calls.new_uuid()
        self.calls.listen(client)
        self.model.seen_until[client] = 0.0
        return client

    def _move(self, seconds: float) -> None:
        self.model.now += seconds
        self.calls.set_clock(self.model.now)

    def _touch(self, client: uuid.UUID) -> None:
        if self.model.seen_until[client] <= self.model.now + 2:
            self.model.seen_until[client] = self.model.now + 3

    def _is_alive(self, request: Request) -> bool:
        return request.client in self._clients

    def _waiting(self, requests: list[Request]) -> list[Request]:
        return [one for one in requests if self._is_alive(one) and one.left]

    def _granted(self, name: str, attempt: uuid.UUID, token: int, ttl: int) -> None:
        """Compare a token with the model, and note the grant."""
        held = self.model.held(name)
        if held:
            assert (held.attempt, held.token) == (attempt, token), "a retry finds its grant"
            return
        assert token > self._highest, "tokens are in the order of the grants"
        self._highest = token
        self.model.leave(name, attempt)
        self.model.grants[name] = Grant(attempt, token, self.model.now + ttl)

    def _woken(self, names: list[str]) -> None:
        """Assert that the last call has notified the next waiter of each of these locks that is free."""
        self.calls.connection.execute("SELECT 1")
        expected = {attempt for name in names for attempt in self.model.next(name)}
        live = {one.attempt for name in names for one in self.model.live(name)}
        assert self.calls.notified & live == expected, "the next waiters are woken"

    # All of several locks.

    def _ask_for_all(self, request: Request, ttl: int, redeem: int | None = None) -> None:
        model, wanted = self.model, request.left
        free = [model.may_have(name, request.attempt) for name in wanted]
        gets = [*free, False].index(False)
        waited = gets < len(wanted) and request in model.queues[wanted[gets]]
        tokens, refused, ticket, fresh = self.calls.query(
            "SELECT tokens, refused, ticket, fresh FROM dblock.acquire_all("
            "%s, make_interval(secs => %s), attempt => %s, client => %s, redeem => %s)",
            *(wanted, ttl, request.attempt, request.client, redeem),
        )
        assert len(tokens) == gets, "the first names are granted, for as long as it is possible"
        assert refused == (gets + 1 if gets < len(wanted) else None)
        for name, token in zip(wanted, tokens, strict=False):
            self._granted(name, request.attempt, token, ttl)
        request.left = wanted[gets:]
        if request.left:
            assert fresh == (not waited)
            model.wait(request.left[0], request)
            self._touch(request.client)
            request.ticket = ticket

    @rule(names=names, ttl=ttls)
    def try_all(self, names: list[str], ttl: int) -> None:
        wanted, attempt = sorted(names), self.calls.new_uuid()
        free = [self.model.may_have(name, attempt) for name in wanted]
        tokens, refused = self.calls.query(
            "SELECT tokens, refused FROM dblock.acquire_all(%s, make_interval(secs => %s), attempt => %s)",
            *(wanted, ttl, attempt),
        )
        if all(free):
            assert refused is None
            for name, token in zip(wanted, tokens, strict=True):
                self._granted(name, attempt, token, ttl)
        else:
            assert (tokens, refused) == ([], free.index(False) + 1), "all or none"

    @rule(names=names, ttl=ttls, pick=picks)
    def ask_for_all(self, names: list[str], ttl: int, pick: int) -> None:
        request = Request(self.calls.new_uuid(), picked(self._clients, pick), sorted(names))
        self._all = [*self._all[-5:], request]
        self._ask_for_all(request, ttl)

    @precondition(lambda self: self._waiting(self._all))
    @rule(ttl=ttls, pick=picks)
    def ask_for_the_rest(self, ttl: int, pick: int) -> None:
        request = picked(self._waiting(self._all), pick)
        self._ask_for_all(request, ttl, request.ticket)

    # Any of several locks.

    def _ask_for_any(self, request: Request, ttl: int, had_tickets: bool = False) -> None:
        model, wanted = self.model, request.left
        own = [name for name in wanted if (held := model.held(name)) and held.attempt == request.attempt]
        free = own or [name for name in wanted if model.may_have(name, request.attempt)]
        # A waiter that asks again, but has given up its tickets, gets new ones until it comes to a free lock.
        passed = wanted[: wanted.index(free[0])] if had_tickets and free and not own else []
        others = sum(request in model.queues[name] or name in passed for name in wanted if name not in free[:1])
        name, token, left_queues, fresh = self.calls.query(
            "SELECT name, token, left_queues, fresh FROM dblock.acquire_any("
            "%s, make_interval(secs => %s), attempt => %s, client => %s, had_tickets => %s)",
            *(wanted, ttl, request.attempt, request.client, had_tickets),
        )
        assert name == (free[0] if free else None), "the first that is free"
        if name is None:
            assert fresh == [request not in model.queues[one] for one in wanted]
            for one in wanted:
                model.wait(one, request)
            self._touch(request.client)
            return
        self._granted(name, request.attempt, token, ttl)
        assert left_queues == others
        for one in wanted:
            model.leave(one, request.attempt)
        if left_queues:
            self.calls.notified.clear()
            self.calls.call("abandon_all(%s, %s, only_tickets => true)", wanted, request.attempt)
            self._woken(wanted)

    @rule(names=names, ttl=ttls)
    def try_any(self, names: list[str], ttl: int) -> None:
        attempt = self.calls.new_uuid()
        free = [name for name in names if self.model.may_have(name, attempt)]
        name, token = self.calls.query(
            "SELECT name, token FROM dblock.acquire_any(%s, make_interval(secs => %s), attempt => %s)",
            *(names, ttl, attempt),
        )
        assert name == (free[0] if free else None)
        if name is not None:
            self._granted(name, attempt, token, ttl)

    @rule(names=names, ttl=ttls, pick=picks)
    def ask_for_any(self, names: list[str], ttl: int, pick: int) -> None:
        request = Request(self.calls.new_uuid(), picked(self._clients, pick), names)
        self._any = [*self._any[-5:], request]
        self._ask_for_any(request, ttl)

    @precondition(lambda self: self._waiting(self._any))
    @rule(ttl=ttls, pick=picks)
    def ask_for_any_again(self, ttl: int, pick: int) -> None:
        """Ask again, after a notification or a lost reply: an attempt that has its lock finds it."""
        self._ask_for_any(picked(self._waiting(self._any), pick), ttl, had_tickets=True)

    # What ends a grant or a wait.

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        held = self.model.held(name)
        if held:
            del self.model.grants[name]
            self.calls.notified.clear()
            assert self.calls.call("release(%s, %s, durable => false)", name, held.token) == (True,)
            self._woken([name])

    @precondition(lambda self: self._all or self._any)
    @rule(names=names, pick=picks)
    def abandon(self, names: list[str], pick: int) -> None:
        model, request = self.model, picked(self._all + self._any, pick)
        # The tickets of a dead client may be deleted already.
        if not self._is_alive(request):
            return
        had = []
        for name in names:
            held = model.held(name)
            holds = held is not None and held.attempt == request.attempt
            if holds:
                del model.grants[name]
            if model.leave(name, request.attempt) or holds:
                had.append(name)
        self.calls.notified.clear()
        assert self.calls.call("abandon_all(%s, %s)", names, request.attempt) == (len(had),)
        self._woken(had)

    @rule(seconds=st.sampled_from([1 / 64, 1 / 8, 1 / 2, 1]))
    def pass_time(self, seconds: float) -> None:
        self._move(seconds)
        self._beat()

    def _beat(self) -> None:
        for client in self._clients:
            self.calls.call("heartbeat(%s, %s)", client, [*NAMES])
            self._touch(client)

    @precondition(lambda self: any(self.model.live(name) for name in NAMES))
    @rule(pick=picks)
    def die(self, pick: int) -> None:
        """Let a client die, with its tickets: the others pass over them when its last heartbeat does not count."""
        self._clients.remove(picked(self._clients, pick))
        for _ in range(4):
            self._move(0.9)
            self._beat()
        self._clients.append(self._new_client())
