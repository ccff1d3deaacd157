"""A simulated process with one dblock client in it: the real service, line, rounds, holds and listening.

What decides is dblock's own code. Here is only what its threads do around it, in the order in which they do it:
compare dblock._runtime.keepalive.AsyncKeepAlive and dblock._runtime.listener.Listener.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import Any, cast

import psycopg

from dblock._core import clock
from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Flow, Sleep, Wait
from dblock._core.lease_state import LeaseState
from dblock._core.options import interval
from dblock._core.presence import Presence
from dblock._core.renewal import RenewalSchedule, due_at
from dblock._core.waiters import LocalWaiters
from dblock._runtime import listening
from dblock._runtime.client_base import ClientBase
from dblock._runtime.keepalive import _KeepAliveBase
from dblock._runtime.listening import Listening
from dblock.errors import ClientClosed, DatabaseError, DblockError
from tests.robustness.simulation.network import Network
from tests.robustness.simulation.process import Bell, Over, Process, RawConnection, Task, Waiter
from tests.robustness.simulation.world import World

CONNECTS_WITHIN = 2.0
"""Seconds after which an attempt to connect is given up where nothing gets through."""


class Keeper(_KeepAliveBase):
    """The keep-alive."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bell = Bell(client)
        self._dropped: list[LeaseState] = []
        self._task: Task | None = None
        super().__init__(client._flows)
        self._schedule = RenewalSchedule(client._flows, client.clock)

    def add(self, state: LeaseState) -> None:
        """Keep this lease alive from now on."""
        self._schedule.add(state)
        self._in_use = True
        if self._task is None:
            self._task = Task(self._client, self._go())
        elif due_at(state) < self._asleep_until:
            self._bell.ring()

    def abandon(self, state: LeaseState) -> None:
        """Release what nobody has in hand any more."""
        self._dropped.append(state)
        self._bell.ring()

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._schedule.tie()
        self._bell.ring()

    def close(self) -> None:
        """Stop going round."""
        self._closed = True
        self._bell.ring()

    def letting_go(self) -> Flow[None]:
        self._collect()
        return super().letting_go()

    def _collect(self) -> None:
        for state in self._dropped:
            self._schedule.discard(state)
            self._abandoned.append(state)
        self._dropped = []
        self._abandoned = self._schedule.releasable(self._abandoned)

    def _go(self) -> Flow[None]:
        yield Sleep(self._client.network.delay())
        if not self._client.cut_off:
            self._schedule.reached()
        while not self._closed:
            seconds = self._seconds_to_sleep()
            yield Wait(cast(Any, self._bell), math.inf if seconds is None else seconds)
            self._bell.mute()
            self._collect()
            self._abandoned = yield from self._schedule.tick(self._abandoned)


class _Target:
    is_one_host = True


class _Notification:
    def __init__(self, payload: str) -> None:
        self.payload = payload


class Listener(Listening):
    """The listener."""

    def __init__(self, client: Client, keeper: Keeper, grace: float | None) -> None:
        self._client = client
        self._bell = Bell(client)
        self._task: Task | None = None
        self._connected: tuple[Any, Presence | None] | Exception | None = None
        super().__init__(cast(Any, _Target()), client._flows, "", cast(Any, keeper), grace)
        self.waiters = LocalWaiters(client._flows, self._wake, client.clock, client.world.random.uniform)

    def start(self) -> None:
        """Listen from now on."""
        if self._task is None and not self._closed:
            self._task = Task(self._client, self._go())

    @property
    def started(self) -> bool:
        """Whether the database may know of us."""
        return self._task is not None

    def join_queue(self, name: str, attempt: str) -> Waiter:
        """Register a waiter."""
        self.start()
        waiter = Waiter(self._client, self.waiters, name, attempt)
        self.waiters.add(waiter)
        return waiter

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._bell.ring()

    def _give_up_in(self, seconds: float) -> None:
        self._client.later(seconds / self._client.rate, self._give_up)

    def _greeting(self, raw: Any) -> Flow[Presence | None]:
        if self._grace is None:
            return None
        name, sent_at = self._client.world.name(), clock.now()
        yield Call(self._flows.statements.register_presence, (name, interval(self._grace)))
        presence = Presence(name, self._grace, 0, sent_at)
        presence._look = raw.look
        return presence

    def _go(self) -> Flow[None]:
        while not self._closed:
            yield from self._turn()
        if isinstance(self._connected, tuple):
            self._connected[0].close()
        self._hang_up()

    def _turn(self) -> Flow[None]:
        """Do what is due; then wait for a notification, or for what is due next."""
        with contextlib.suppress(DblockError):
            for presence in list(self._doubtful):
                yield from self._excusing(presence)
        self._take_connection()
        if self._raw is None and clock.now() >= self._retry_at:
            self._retry_at = math.inf
            Task(self._client, self._connecting())
        self._look_at_the_clock()
        if self._sleep_for() <= 0:
            yield from self._look_in()
            if clock.now() >= self.waiters.cleanup_due_at():
                with contextlib.suppress(DatabaseError):
                    yield from self.waiters.run_cleanup()
        yield Wait(cast(Any, self._bell), self._sleep_for())
        self._bell.mute()
        raw = cast("RawConnection | None", self._raw)
        if raw is not None and raw.error is not None:
            self._failed(cast(Any, raw), raw.error)

    def _connecting(self) -> Flow[None]:
        client = self._client
        raw = RawConnection(client, client.network)
        yield Sleep(client.network.delay())
        try:
            if client.refused:
                raise psycopg.OperationalError("sorry, too many clients already")
            session = client.network.connect(raw)
            if session is None:
                if client.cut_off:
                    yield Sleep(CONNECTS_WITHIN)
                    raise psycopg.OperationalError("timeout expired")
                raise psycopg.OperationalError("the database system is starting up")
            raw.session = session
            raw.on_end = self._wake
            raw.heard = lambda payload: self._hear(raw, payload)
            self._connected = (raw, (yield from self._say(raw, self._greeting(raw))))
            if self._closed:
                raw.close()
        except psycopg.Error as error:
            raw.close()
            self._connected = error
        self._wake()

    def _hear(self, raw: RawConnection, payload: str) -> None:
        if cast(Any, self._raw) is raw:
            self._notified(_Notification(payload))
            self._wake()

    def _take_connection(self) -> None:
        connected, self._connected = self._connected, None
        if isinstance(connected, tuple):
            self._came_up(*connected)
        elif connected is not None:
            self._could_not_connect(connected)

    def _look_in(self) -> Flow[None]:
        raw = cast("RawConnection | None", self._raw)
        if raw is not None:
            try:
                listened = self._listens
                yield from self._say(raw, self._listening())
                yield from self._say(raw, self._beating())
                self._looked(None)
                if self._listens and not listened:
                    yield from self._probing()
            except psycopg.Error as error:
                raw.usable = False
                self._failed(cast(Any, raw), error)
            except DblockError as error:
                if isinstance(error, ClientClosed):
                    raise
        elif clock.now() >= self.waiters.due_at():
            try:
                yield from self.waiters.check(math.inf)
                self._looked(None)
            except DblockError as error:
                self._looked(error)

    def _say(self, raw: RawConnection, steps: Flow[Any]) -> Generator[Any, Any, Any]:
        """Perform the steps over this connection."""
        try:
            step = next(steps)
            while True:
                assert isinstance(step, Call)
                try:
                    row = yield Over(raw, step, min(step.within, listening.ANSWER_WITHIN))
                except BaseException as error:
                    steps.throw(error)
                    raise
                step = steps.send(row)
        except StopIteration as done:
            return done.value


class Client(Process):
    """A process with one client."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        rate: float,
        patience: float,
        grace: float | None,
    ) -> None:
        super().__init__(world, network, name, rate, patience)
        self._flows = LockFlows("dblock", name, self.clock, world.random.uniform, world.name)
        self._grace = grace
        self._closed = False
        self._keepalive = Keeper(self)
        self._listener = Listener(self, self._keepalive, grace)

    @property
    def service(self) -> LockFlows:
        return self._flows

    @property
    def keeper(self) -> Keeper:
        return self._keepalive

    @property
    def waiters(self) -> LocalWaiters:
        return self._listener.waiters

    def join_queue(self, name: str, attempt: str) -> Waiter:
        return self._listener.join_queue(name, attempt)

    def keep(self, state: LeaseState) -> None:
        """Look after a lease."""
        ClientBase._keep(cast(Any, self), state)

    def defer_cleanup(self, name: str, attempt: str) -> None:
        """Have what could not be given up now given up later."""
        ClientBase._defer_cleanup(cast(Any, self), name, attempt)

    def close(self) -> None:
        """End the client: release what is held, give up all places, be absent. As dblock._runtime.shutdown does."""
        self._closed = True
        self._keepalive.close()
        self._listener.close()
        self.waiters.wake_all()
        Task(self, self._saying_last(), lambda result: None)

    def _saying_last(self) -> Flow[None]:
        yield from self._keepalive.letting_go()
        if self._listener.started:
            yield from self._flows.leave()

    def die(self) -> None:
        """End without a word; the machine closes the connections, if anything gets through."""
        self.dead = True
        for session, raw in list(self.network.wires.items()):
            if raw.process is self and not self.cut_off:
                self.world.after(self.network.delay(), self.network.end_session, session)
