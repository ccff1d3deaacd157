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
from dblock._core.acquire import Service
from dblock._core.effects import Call, Sleep, Steps, Wait
from dblock._core.lease_state import Hold
from dblock._core.options import interval
from dblock._core.presence import Presence
from dblock._core.renewal import Rounds, due_at
from dblock._core.waiters import Line
from dblock._runtime import listening
from dblock._runtime.client_base import ClientBase
from dblock._runtime.keepalive import _KeepAliveBase
from dblock._runtime.listening import Listening
from dblock.errors import ClientClosed, DatabaseError, DblockError
from tests.robustness.simulation.network import Network
from tests.robustness.simulation.process import Bell, Over, Place, Process, Task, Wire
from tests.robustness.simulation.world import World

CONNECTS_WITHIN = 2.0
"""Seconds after which an attempt to connect is given up where nothing gets through."""


class Keeper(_KeepAliveBase):
    """The keep-alive."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bell = Bell(client)
        self._dropped: list[Hold] = []
        self._task: Task | None = None
        super().__init__(client._service)
        self._rounds = Rounds(client._service, client.clock)

    def add(self, hold: Hold) -> None:
        """Keep this lease alive from now on."""
        self._rounds.add(hold)
        self._in_use = True
        if self._task is None:
            self._task = Task(self._client, self._go())
        elif due_at(hold) < self._asleep_until:
            self._bell.ring()

    def abandon(self, hold: Hold) -> None:
        """Release what nobody has in hand any more."""
        self._dropped.append(hold)
        self._bell.ring()

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._rounds.tie()
        self._bell.ring()

    def close(self) -> None:
        """Stop going round."""
        self._closed = True
        self._bell.ring()

    def letting_go(self) -> Steps[None]:
        self._collect()
        return super().letting_go()

    def _collect(self) -> None:
        for hold in self._dropped:
            self._rounds.discard(hold)
            self._abandoned.append(hold)
        self._dropped = []
        self._abandoned = self._rounds.releasable(self._abandoned)

    def _go(self) -> Steps[None]:
        yield Sleep(self._client.network.delay())
        if not self._client.cut_off:
            self._rounds.reached()
        while not self._closed:
            seconds = self._seconds_to_sleep()
            yield Wait(cast(Any, self._bell), math.inf if seconds is None else seconds)
            self._bell.mute()
            self._collect()
            self._abandoned = yield from self._rounds.turn(self._abandoned)


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
        super().__init__(cast(Any, _Target()), client._service, "dblock", "", cast(Any, keeper), grace)
        self.line = Line(client._service, self._hurry, client.clock, client.world.random.uniform)

    def start(self) -> None:
        """Listen from now on."""
        if self._task is None and not self._closed:
            self._task = Task(self._client, self._go())

    @property
    def started(self) -> bool:
        """Whether the database may know of us."""
        return self._task is not None

    def place(self, name: str, attempt: str) -> Place:
        """Make a place in line."""
        self.start()
        place = Place(self._client, self.line, name, attempt)
        self.line.add(place)
        return place

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._hurry()

    def _hurry(self) -> None:
        self._bell.ring()

    def _give_up_in(self, seconds: float) -> None:
        self._client.later(seconds / self._client.rate, self._give_up)

    def _greeting(self, wire: Any) -> Steps[Presence | None]:
        if self._grace is None:
            return None
        name, sent_at = self._client.world.name(), clock.now()
        yield Call(self._be_present, (name, interval(self._grace)))
        presence = Presence(name, self._grace, 0, sent_at)
        presence._look = wire.look
        return presence

    def _go(self) -> Steps[None]:
        while not self._closed:
            yield from self._turn()
        if isinstance(self._connected, tuple):
            self._connected[0].close()
        self._hang_up()

    def _turn(self) -> Steps[None]:
        """Do what is due; then wait for a notification, or for what is due next."""
        with contextlib.suppress(DblockError):
            for presence in list(self._doubtful):
                yield from self._excusing(presence)
        self._take_connection()
        if self._wire is None and clock.now() >= self._retry_at:
            self._retry_at = math.inf
            Task(self._client, self._connecting())
        self._look_at_the_clock()
        if self._sleep_for() <= 0:
            yield from self._look_in()
            if clock.now() >= self.line.pays_at():
                with contextlib.suppress(DatabaseError):
                    yield from self.line.pay()
        yield Wait(cast(Any, self._bell), self._sleep_for())
        self._bell.mute()
        wire = cast("Wire | None", self._wire)
        if wire is not None and wire.error is not None:
            self._failed(cast(Any, wire), wire.error)

    def _connecting(self) -> Steps[None]:
        client = self._client
        wire = Wire(client, client.network)
        yield Sleep(client.network.delay())
        try:
            if client.refused:
                raise psycopg.OperationalError("sorry, too many clients already")
            session = client.network.connect(wire)
            if session is None:
                if client.cut_off:
                    yield Sleep(CONNECTS_WITHIN)
                    raise psycopg.OperationalError("timeout expired")
                raise psycopg.OperationalError("the database system is starting up")
            wire.session = session
            wire.on_end = self._hurry
            wire.heard = lambda payload: self._hear(wire, payload)
            self._connected = (wire, (yield from self._say(wire, self._greeting(wire))))
            if self._closed:
                wire.close()
        except psycopg.Error as error:
            wire.close()
            self._connected = error
        self._hurry()

    def _hear(self, wire: Wire, payload: str) -> None:
        if cast(Any, self._wire) is wire:
            self._notified(_Notification(payload))
            self._hurry()

    def _take_connection(self) -> None:
        connected, self._connected = self._connected, None
        if isinstance(connected, tuple):
            self._came_up(*connected)
        elif connected is not None:
            self._could_not_connect(connected)

    def _look_in(self) -> Steps[None]:
        wire = cast("Wire | None", self._wire)
        if wire is not None:
            try:
                listened = self._listens
                yield from self._say(wire, self._listening())
                yield from self._say(wire, self._beating())
                self._looked(None)
                if self._listens and not listened:
                    yield from self._probing()
            except psycopg.Error as error:
                wire.usable = False
                self._failed(cast(Any, wire), error)
            except DblockError as error:
                if isinstance(error, ClientClosed):
                    raise
        elif clock.now() >= self.line.due_at():
            try:
                yield from self.line.look(math.inf)
                self._looked(None)
            except DblockError as error:
                self._looked(error)

    def _say(self, wire: Wire, steps: Steps[Any]) -> Generator[Any, Any, Any]:
        """Perform the steps over this connection."""
        try:
            step = next(steps)
            while True:
                assert isinstance(step, Call)
                try:
                    row = yield Over(wire, step, min(step.within, listening.ANSWER_WITHIN))
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
        self._service = Service("dblock", name, self.clock, world.random.uniform)
        self._service.client = world.name()
        self._grace = grace
        self._closed = False
        self._keeper = Keeper(self)
        self._listener = Listener(self, self._keeper, grace)

    @property
    def service(self) -> Service:
        return self._service

    @property
    def keeper(self) -> Keeper:
        return self._keeper

    @property
    def line(self) -> Line:
        return self._listener.line

    def _place(self, name: str, attempt: str) -> Place:
        return self._listener.place(name, attempt)

    def keep(self, hold: Hold, keep_alive: bool) -> None:
        """Look after a lease."""
        ClientBase._keep(cast(Any, self), hold, keep_alive)

    def owe(self, name: str, attempt: str) -> None:
        """Have what could not be given up now given up later."""
        ClientBase._owe(cast(Any, self), name, attempt)

    def close(self) -> None:
        """End the client: release what is held, give up all places, be absent. As dblock._runtime.shutdown does."""
        self._closed = True
        self._keeper.close()
        self._listener.close()
        self.line.wake_all()
        Task(self, self._saying_last(), lambda result: None)

    def _saying_last(self) -> Steps[None]:
        yield from self._keeper.letting_go()
        if self._listener.started:
            yield from self._service.leave()

    def die(self) -> None:
        """End without a word; the machine closes the connections, if anything gets through."""
        self.dead = True
        for session, wire in list(self.network.wires.items()):
            if wire.process is self and not self.cut_off:
                self.world.after(self.network.delay(), self.network.end_session, session)
