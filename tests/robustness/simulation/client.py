"""A simulated process with one dblock client in it: the shipped flows, waiters, leases, keep-alive and listener.

Every decision is dblock's own code: the loops of dblock._core.keepalive_flow and dblock._core.listener_flow run here as
they are. This module only performs their effects, as dblock._runtime.keepalive and dblock._runtime.listener do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from dblock._core.effects import Connect, WaitForInput
from dblock._core.keepalive_flow import Reserve, WaitForWake, Warm
from dblock._core.lease_state import LeaseState
from dblock._core.listener_failures import ConnectFailed, ServerState
from dblock._core.shared_acquire import SharedFlows
from dblock._core.waiters import LocalWaiters
from dblock._runtime.keepalive import _KeepAliveBase
from dblock._runtime.listener import _ListenerBase
from dblock._runtime.runtime import RuntimeBase
from dblock.testing.database.statements import INSTALLATION
from tests.robustness.simulation.network import Network
from tests.robustness.simulation.process import Bell, Connection, Process, Resume, Task, Waiter, failed
from tests.robustness.simulation.world import World

CONNECTS_WITHIN = 2.0
"""Seconds after which an attempt to connect is given up while the process is cut off."""


class KeepAlive(_KeepAliveBase):
    """The keep-alive, in a task of the simulation."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bell = Bell(client)
        super().__init__(client.flows)

    def _reset(self) -> None:
        self._task: Task | None = None

    def _wake(self) -> None:
        self._bell.ring()

    def add(self, state: LeaseState) -> None:
        """Keep this lease alive from now on."""
        due_sooner = self.flow.add(state)
        if self._task is None:
            self._task = Task(self._client, self.flow.run(), perform=self._perform, keeps_alive=True)
        elif due_sooner:
            self._wake()

    def close(self) -> None:
        """Stop renewing."""
        self.flow.closed = True
        self._wake()

    def _perform(self, effect: Any, resume: Resume) -> bool:
        client = self._client
        if isinstance(effect, WaitForWake):
            self._bell.wait_and_mute(effect.seconds, resume)
        elif isinstance(effect, (Warm, Reserve)):
            client.later(0.0, resume, None)  # a client with a presence always has its other session
        else:
            return False
        return True


class Listener(_ListenerBase):
    """The listener, in a task of the simulation."""

    def __init__(self, client: Client, keepalive: KeepAlive, grace: float | None) -> None:
        self._client = client
        self._bell = Bell(client)
        super().__init__(cast(Any, None), client.flows, INSTALLATION, keepalive, grace)
        self.flow.is_home = True
        self.flow.in_doubt.keepalive.ended_at = lambda: client.other_session.ended_at
        self.flow.in_doubt.keepalive.refused = lambda: client.other_session.refused

    def _reset(self) -> None:
        self._task: Task | None = None

    def _wake(self) -> None:
        self._bell.ring()

    def start(self) -> None:
        """Listen from now on."""
        if self._task is None and not self.flow.closed:
            self._task = Task(self._client, self.flow.run(), lambda _: self.flow.hang_up(), self._perform)
        elif self.flow.connection is None:
            self._wake()

    @property
    def started(self) -> bool:
        """Whether the database may know of this client."""
        return self._task is not None

    def join_queue(self, name: str, attempt: str) -> Waiter:
        """Register a waiter."""
        self.start()
        waiter = Waiter(self._client, self.waiters, name, attempt)
        self.waiters.add(waiter)
        return waiter

    def close(self) -> None:
        """Stop listening."""
        self.flow.closed = True
        self._wake()

    def _perform(self, effect: Any, resume: Resume) -> bool:
        if isinstance(effect, WaitForInput):
            connection = cast("Connection | None", effect.connection)

            def woken(_: Any) -> None:
                error = connection.error if connection is not None else None
                resume(None if error is None else failed(error))

            self._bell.wait_and_mute(effect.seconds, woken)
        elif isinstance(effect, Connect):
            client = self._client
            client.later(client.network.delay() / client.rate, self._connect, resume)
        else:
            return False
        return True

    def _connect(self, resume: Resume) -> None:
        client = self._client
        if client.refused:
            resume(ConnectFailed("sorry, too many clients already"))
            return
        connection = Connection(client, client.network)
        session = client.network.connect(connection)
        if session is not None:
            connection.session = session
            connection.on_end = self._wake
            connection.look = lambda: self._look(connection)
            connection.notified = lambda payload: self._notified(connection, payload)
            connection.doubted = lambda: self._doubted(connection)
            resume(connection)
        elif client.cut_off:
            client.later(CONNECTS_WITHIN / client.rate, resume, ConnectFailed("timeout expired"))
        else:
            state = client.network.database.state
            states = {} if state is ServerState.UNKNOWN else {connection.server: state}
            resume(ConnectFailed(f"the database system is {state.value}", states))

    def _look(self, connection: Connection) -> None:
        """Look at a socket that closes now, as the loop has last done: it looks now and then while it waits."""
        client, presence, every = self._client, self._client.flows.presence, self.flow.look_every()
        if presence is None or self.flow.connection is not connection or every == math.inf or client.stopped:
            return
        looked_at = client.clock() - client.world.random.uniform(0, every)
        if looked_at > max(presence.seen_open_at, client.continued_at):
            presence.stands(looked_at)

    def _doubted(self, connection: Connection) -> None:
        if self.flow.connection is connection:
            self.flow.doubt_connection()

    def _notified(self, connection: Connection, payload: str) -> None:
        if self.flow.connection is connection:
            self.flow.notified(payload)
            self._wake()


class Client(Process, RuntimeBase):
    """A process with one client, and the runtime of that client."""

    keepalive: KeepAlive
    listener: Listener
    has_home = True
    schema = "dblock"

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        rate: float,
        patience: float,
        grace: float | None,
    ) -> None:
        Process.__init__(self, world, network, name, rate, patience)
        uniform = world.random.uniform
        flows = SharedFlows("dblock", name, self.clock, uniform, world.name, timings=self.timings)
        RuntimeBase.__init__(self, flows, grace)
        self.on_refusal: Callable[[str], object] = lambda attempt: None
        """Called with each attempt whose error says that nothing was done."""
        self.keepalive = KeepAlive(self)
        self.listener = Listener(self, self.keepalive, grace)

    @property
    def waiters(self) -> LocalWaiters:
        """The client's waiters."""
        return self.listener.waiters

    @property
    def has_reserve(self) -> bool:
        """Whether it keeps a session beside the listener's."""
        return self._grace is not None

    @property
    def home(self) -> Connection | None:
        """The connection of the listener; None while there is none."""
        flow = self.listener.flow
        return cast("Connection | None", None if flow.closed else flow.connection)

    def join_queue(self, name: str, attempt: str) -> Waiter:
        """Register a waiter for a lock."""
        return self.listener.join_queue(name, attempt)

    def die(self) -> None:
        """End without a message. The machine closes the connections, unless the process is cut off."""
        self.dead = True
        for session, connection in list(self.network.connections.items()):
            if connection.process is self and not self.cut_off:
                self.world.after(self.network.delay(), self.network.end_session, session)
