"""Make calls for one shared lock, and compare every reply with a plain model of the lock.

The functions use a clock that the test moves, so that deadlines are exact. Each client sends its heartbeat whenever the
clock moves, until it dies. The model knows no rows and no row locks: only who holds what until when, and the queue.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.support.state_machines import Machine, picked, picks
from tests.support.steered_calls import SteeredCalls

NAME = "a"

SHARE_KINDS = {"read": "reader", "write": "writer", None: "permit"}


@dataclass
class Share:
    """A grant."""

    name: str
    kind: str
    number: int | None
    token: int
    until: float
    attempt: uuid.UUID
    forced: bool = False


@dataclass
class Waiter:
    """A ticket."""

    number: int
    attempt: uuid.UUID
    client: uuid.UUID
    mode: str | None


@dataclass
class Model:
    """A shared lock: what is held and waited for, and which request is granted."""

    kind: str
    permits: int | None
    now: float = 1000.0
    shares: list[Share] = field(default_factory=list)
    queue: list[Waiter] = field(default_factory=list)
    seen_until: dict[uuid.UUID, float] = field(default_factory=dict)

    def held(self, *kinds: str) -> list[Share]:
        return [one for one in self.shares if one.until > self.now and (not kinds or one.kind in kinds)]

    def live(self) -> list[Waiter]:
        return [one for one in self.queue if self.seen_until[one.client] > self.now]

    def ahead(self, attempt: uuid.UUID | None) -> list[Waiter]:
        """Return the live waiters before an attempt: all, if it does not wait."""
        numbers = [one.number for one in self.queue if one.attempt == attempt]
        return [one for one in self.live() if not numbers or one.number < numbers[0]]

    def blockers(self, mode: str | None) -> list[Share]:
        return self.held("writer") if mode == "read" else self.held()

    def free(self) -> int:
        assert self.permits is not None
        return max(self.permits - len(self.held()), 0)

    def may_enter(self, mode: str | None, attempt: uuid.UUID | None) -> bool:
        ahead = self.ahead(attempt)
        if mode == "read":
            return not self.held("writer") and all(one.mode == "read" for one in ahead)
        if mode == "write":
            return not self.held() and not ahead
        return len(ahead) < self.free()

    def is_next(self, mode: str | None, attempt: uuid.UUID | None) -> bool:
        ahead = self.ahead(attempt)
        if mode == "read":
            return all(one.mode == "read" for one in ahead)
        return len(ahead) <= (0 if mode == "write" else self.free())

    def next_check(self, mode: str | None) -> float:
        return min((one.until - self.now for one in self.blockers(mode)), default=0.0)

    def woken(self) -> set[uuid.UUID]:
        """Return the attempts that can be granted now."""
        return {one.attempt for one in self.live() if self.may_enter(one.mode, one.attempt)}

    def drop(self, attempt: uuid.UUID) -> None:
        self.queue = [one for one in self.queue if one.attempt != attempt]


MODES = {kind: mode for mode, kind in SHARE_KINDS.items()}

ttls = st.sampled_from([1, 2, 4, 8])


class SharedLockMachine(Machine):
    """One shared lock in a database, and its model."""

    modes: tuple[str | None, ...] = (None,)

    def __init__(self, calls: SteeredCalls, model: Model) -> None:
        super().__init__()
        self.calls, self.model = calls, model
        self._highest = 0
        calls.start()
        self._move(0)
        self._clients = [self._new_client() for _ in range(3)]

    def compare(self) -> None:
        rows = self.calls.connection.execute("SELECT token FROM dblock.holder(%s)", [NAME]).fetchall()
        assert sorted(token for (token,) in rows) == sorted(one.token for one in self.model.held())
        if self.model.held("writer"):
            assert len(rows) == 1, "a writer is alone"

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

    def _own_waiters(self) -> list[Waiter]:
        return [one for one in self.model.live() if one.client in self._clients]

    def _expect_wakes(self, call: Callable[[], object]) -> None:
        """Make a call that ends with a look for waiters that can be granted now."""
        self.calls.notified.clear()
        call()
        self.calls.connection.execute("SELECT 1")
        live = {one.attempt for one in self.model.live()}
        assert self.calls.notified & live == self.model.woken(), "the waiters that can be granted are woken"

    def _request(
        self, mode: str | None, ttl: int, attempt: uuid.UUID, client: uuid.UUID | None = None, had_ticket: bool = False
    ) -> None:
        model = self.model
        mine = [one for one in model.held(SHARE_KINDS[mode]) if one.attempt == attempt]
        enters, is_next, ticket = model.may_enter(mode, attempt), model.is_next(mode, attempt), None
        permits, granted, token, _, remaining, ticket, first, _, fresh, share, number = self.calls.call(
            "acquire_shared(%s, %s, %s, %s, make_interval(secs => %s), attempt => %s, client => %s, had_ticket => %s)",
            NAME, model.kind, mode, model.permits, ttl, attempt, client, had_ticket,
        )  # fmt: skip
        assert permits == model.permits
        assert granted == bool(mine or enters)
        waited = [one for one in model.queue if one.attempt == attempt]
        if client is not None and not granted:
            self._touch(client)
        if mine:
            model.drop(attempt)
            assert (token, share, number) == (mine[0].token, mine[0].name, mine[0].number)
            return
        if granted:
            model.drop(attempt)
            self._granted(Share(share, SHARE_KINDS[mode], number, token, model.now + ttl, attempt))
            assert remaining == ttl
            return
        assert first == is_next
        assert abs(remaining - model.next_check(mode)) < 1e-6
        if client is None:
            assert (ticket, fresh) == (waited[0].number if waited else None, False)
        elif waited:
            assert (ticket, fresh) == (waited[0].number, False)
        else:
            assert fresh
            assert all(ticket > one.number for one in model.queue), "tickets are in the order of arrival"
            model.queue.append(Waiter(ticket, attempt, client, mode))

    def _granted(self, share: Share) -> None:
        model = self.model
        assert share.token > self._highest, "tokens are in the order of the grants"
        self._highest = share.token
        assert share.name not in {one.name for one in model.held()}
        if share.kind == "permit":
            assert model.permits is not None
            assert share.number is not None
            assert share.number < model.permits
        model.shares = [*model.held(), share]
        if model.permits is not None:
            assert len(model.shares) <= model.permits

    # The calls.

    @precondition(lambda self: len(self.model.queue) < 8)
    @rule(mode=picks, ttl=ttls, pick=picks)
    def ask(self, mode: int, ttl: int, pick: int) -> None:
        self._request(picked(self.modes, mode), ttl, self.calls.new_uuid(), picked(self._clients, pick))

    @precondition(lambda self: self._own_waiters())
    @rule(ttl=ttls, pick=picks, had_ticket=st.booleans())
    def ask_again(self, ttl: int, pick: int, had_ticket: bool) -> None:
        one = picked(self._own_waiters(), pick)
        self._request(one.mode, ttl, one.attempt, one.client, had_ticket)

    @precondition(lambda self: self._own_waiters())
    @rule(ttl=ttls)
    def ask_again_in_order(self, ttl: int) -> None:
        one = self._own_waiters()[0]
        self._request(one.mode, ttl, one.attempt, one.client, True)

    @rule(mode=picks, ttl=ttls)
    def try_once(self, mode: int, ttl: int) -> None:
        self._request(picked(self.modes, mode), ttl, self.calls.new_uuid())

    @precondition(lambda self: self.model.held())
    @rule(ttl=ttls, pick=picks)
    def retry(self, ttl: int, pick: int) -> None:
        one = picked(self.model.held(), pick)
        self._request(MODES[one.kind], ttl, one.attempt)

    @precondition(lambda self: self.model.shares)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        share = picked(self.model.shares, pick)
        held = share.until > self.model.now
        if held:
            self.model.shares.remove(share)

        def released() -> None:
            assert self.calls.call("release(%s, %s, durable => false)", share.name, share.token) == (held,)

        if held:
            self._expect_wakes(released)
        else:
            released()

    @precondition(lambda self: self.model.shares)
    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        share = picked(self.model.shares, pick)
        _, failed, _ = self.calls.call(
            "renew_all(ARRAY[%s], ARRAY[%s], ARRAY['3 s'::interval])", share.name, share.token
        )  # fmt: skip
        if share.until > self.model.now and not share.forced:
            assert failed is None
            share.until = max(share.until, self.model.now + 3)
        else:
            assert failed == [1]

    @rule(seconds=st.sampled_from([1 / 64, 1 / 8, 1 / 2, 1]))
    def pass_time(self, seconds: float) -> None:
        self._move(seconds)
        self._beat()

    def _beat(self) -> None:
        model = self.model
        for client in self._clients:
            tickets, firsts, checks, _ = self.calls.call("heartbeat(%s, ARRAY[%s])", client, NAME)
            self._touch(client)
            assert tickets == sum(one.client == client for one in model.queue)
            expected: dict[uuid.UUID, float] = {}
            for one in model.live():
                if one.client == client and model.is_next(one.mode, one.attempt):
                    if model.may_enter(one.mode, one.attempt):
                        expected[one.attempt] = 0.0
                    elif not expected or one.mode is None:  # of readers, only the first
                        expected[one.attempt] = model.next_check(one.mode)
            found = dict(zip(firsts or [], checks or [], strict=True))
            assert found.keys() == expected.keys()
            assert all(abs(found[one] - expected[one]) < 1e-6 for one in found)

    @precondition(lambda self: self.model.live() or self.model.held())
    @rule(pick=picks)
    def abandon(self, pick: int) -> None:
        # The ticket of a dead client may be deleted already.
        attempts = [one.attempt for one in self.model.live()] + [one.attempt for one in self.model.held()]
        attempt = picked(attempts, pick)
        self.model.drop(attempt)
        self.model.shares = [one for one in self.model.shares if one.attempt != attempt]
        self._expect_wakes(lambda: self.calls.call("abandon(%s, %s)", NAME, attempt))

    @precondition(lambda self: len(self._own_waiters()) > 1)
    @rule(pick=picks)
    def die(self, pick: int) -> None:
        """Let a client die, with its tickets: the others pass over them when its last heartbeat does not count."""
        self._clients.remove(picked(self._clients, pick))
        for _ in range(4):
            self._move(0.9)
            self._beat()
        self._clients.append(self._new_client())

    @precondition(lambda self: self.model.queue)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        client = picked(self._clients, pick)
        had = any(one.client == client for one in self.model.queue)
        self.model.queue = [one for one in self.model.queue if one.client != client]
        self.model.seen_until[client] = 0.0
        left = "leave_queue(%s)"
        if had:
            self._expect_wakes(lambda: self.calls.call(left, client))
        else:
            self.calls.call(left, client)

    @precondition(lambda self: self.model.held())
    @rule(pick=picks, now=st.booleans(), by_share=st.booleans())
    def force(self, pick: int, now: bool, by_share: bool) -> None:
        share = picked(self.model.held(), pick)
        assert self.calls.call("force_release(%s, %s, now => %s)", share.name, share.token, now) == (True,)
        share.forced = True
        if now:
            self.model.shares.remove(share)
            self._expect_wakes(lambda: self.calls.call("wake_queue(%s)", share.name if by_share else NAME))

    @rule(seconds=st.sampled_from([0, 2, 60]))
    def reap(self, seconds: int) -> None:
        self.calls.call("reap(make_interval(secs => %s))", seconds)
        gone = {one.client for one in self.model.queue} - {*self._clients}
        kept = self.calls.connection.execute("SELECT attempt FROM dblock.lock_tickets").fetchall()
        attempts = {attempt for (attempt,) in kept}
        assert {one.attempt for one in self.model.live()} <= attempts
        self.model.queue = [one for one in self.model.queue if one.client not in gone or one.attempt in attempts]

    @rule()
    def delete(self) -> None:
        listed = "SELECT held, waiting FROM dblock.list_locks(name => %s) WHERE head IS NULL"
        counts = len(self.model.held()), len(self.model.live())
        row = self.calls.connection.execute(listed.encode(), [NAME]).fetchone()
        assert row == (counts if any(counts) else None)
        (deleted,) = self.calls.call("delete_lock(%s)", NAME)
        if deleted:
            assert not self.model.held()
            assert not self.model.live()
            self.model.shares, self.model.queue = [], []


class ReadWriteLockMachine(SharedLockMachine):
    modes = ("read", "read", "write")

    def __init__(self, calls: SteeredCalls) -> None:
        super().__init__(calls, Model("read-write", None))

    @precondition(lambda self: any(one.kind == "writer" for one in self.model.shares))
    @rule()
    def downgrade(self) -> None:
        model = self.model
        attempt = self.calls.new_uuid()
        share = next(one for one in model.shares if one.kind == "writer")
        may = share.until > model.now and not share.forced
        token, granted, *_, name, number = self.calls.call(
            "downgrade(%s, %s, %s, '4 s')", NAME, share.token, attempt
        )  # fmt: skip
        assert granted == may
        if granted:
            model.shares.remove(share)
            self._granted(Share(name, "reader", number, token, model.now + 4, attempt))
            self._expect_wakes(lambda: self.calls.call("wake_queue(%s)", NAME))


class SemaphoreMachine(SharedLockMachine):
    def __init__(self, calls: SteeredCalls) -> None:
        super().__init__(calls, Model("semaphore", 2))

    @rule(permits=st.sampled_from([1, 2, 3]))
    def resize(self, permits: int) -> None:
        model = self.model
        exists = "SELECT FROM dblock.distributed_locks WHERE name = %s"
        if self.calls.connection.execute(exists.encode(), [NAME]).fetchone() is None:
            return
        before, model.permits = model.permits, permits

        def resized() -> None:
            assert self.calls.call("resize_semaphore(%s, %s)", NAME, model.permits) == (before,)

        if before is not None and permits > before:
            self._expect_wakes(resized)
        else:
            resized()
