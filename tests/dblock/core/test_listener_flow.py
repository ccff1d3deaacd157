"""The listener's flow, driven by hand: no connection, no thread, and a clock that only the test moves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dblock._core import statements
from dblock._core.acquire import LockFlows
from dblock._core.effects import CallLater, CallOver, CallOverKeepAlive, Connect, Spawn, WaitForInput
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.listener_failures import ConnectFailed, ConnectionFailed, Failure, ServerState
from dblock._core.listener_flow import FIRST_PAUSE, ListenerFlow
from dblock._core.presence import Presence, SocketState
from dblock._core.replies import Grant
from dblock._core.timings import default
from dblock.errors import Unavailable

GRACE = 0.15


class FakeConnection:
    """A connection that records whether it was closed."""

    state = SocketState.OPEN
    direct = True
    registered_direct = True
    """Whether the statement that registers the presence runs at the other end of this connection."""
    closed = False
    server = "here"

    def is_direct(self, backend: str, *ends: str | None) -> bool:
        return self.direct if backend == "1" else self.registered_direct

    def probe(self) -> SocketState:
        return self.state

    def close(self) -> None:
        self.closed = True

    def drop(self) -> None:
        raise NotImplementedError


class Listener:
    """A listener whose effects the test performs, with one lease that its client holds."""

    def __init__(self, grace: float | None = GRACE) -> None:
        self.now = 100.0
        self.woken = 0
        self.tied = 0
        self.asked: list[bytes] = []
        """The statements of the handshakes."""
        self.flows = LockFlows("dblock", "me", lambda: self.now, lambda low, high: high)
        self.flow = ListenerFlow(self.flows, self, "here", grace, self.wake)
        grant = Grant("a", 7, 0.0, self.now + 30, self.now)
        self.lease = LeaseState(grant, 30, now=lambda: self.now)
        self.loop = self.flow.run()

    def wake(self) -> None:
        self.woken += 1

    def tie(self) -> None:
        self.tied += 1
        if self.flows.presence is not None:
            self.lease.tie(self.flows.presence)

    def keeps_any(self) -> bool:
        return not self.lease.ended

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        return [self.lease] if self.lease.presence is presence and not self.lease.ended else []

    def start(self) -> Any:
        """Start the loop; return the flow that connects."""
        spawn = next(self.loop)
        assert isinstance(spawn, Spawn)
        assert self.loop.send(None) == WaitForInput(None, math.inf), "one attempt to connect at a time"
        return spawn.flow

    def shake_hands(self, connecting: Any, connection: FakeConnection) -> None:
        """Perform the effects of the flow that connects."""
        assert isinstance(next(connecting), Connect)
        effect = connecting.send(connection)
        replies = {
            self.flows.statements.installation: ("here",),
            statements.WHICH_ENDPOINTS: ("1", None, None, None, None),
        }
        register = self.flows.statements.register_presence
        with pytest.raises(StopIteration):
            while True:
                assert isinstance(effect, CallOver)
                assert effect.connection is connection
                self.asked.append(effect.call.sql)
                registered = ("2", None, None, None, None, "") if effect.call.sql == register else ("",)
                effect = connecting.send(replies.get(effect.call, registered))

    def connect(self) -> FakeConnection:
        """Bring the listener to where it waits for notifications over a connection."""
        connection = FakeConnection()
        self.shake_hands(self.start(), connection)
        assert self.loop.send(None) == WaitForInput(connection, default.ping_interval)
        return connection


def test_new_connection_becomes_the_presence_and_the_leases_are_tied_to_it() -> None:
    listener = Listener()
    connection = listener.connect()
    assert listener.flows.presence is not None
    assert listener.tied == 1
    assert listener.flow.connection is connection


@pytest.mark.parametrize(("grace", "direct"), [(None, True), (GRACE, False)])
def test_connection_is_no_presence_without_a_grace_or_with_something_in_between(
    grace: float | None, direct: bool
) -> None:
    listener = Listener(grace)
    connection = FakeConnection()
    connection.direct = direct
    listener.shake_hands(listener.start(), connection)
    listener.loop.send(None)
    assert listener.flow.connection is connection
    assert listener.flows.presence is None
    assert listener.tied == 0


def test_connection_is_no_presence_if_another_session_registered_it() -> None:
    listener = Listener()
    connection = FakeConnection()
    connection.registered_direct = False
    listener.shake_hands(listener.start(), connection)
    listener.loop.send(None)
    assert listener.flow.connection is connection, "it still brings notifications"
    assert listener.flows.presence is None
    assert listener.asked[-1] == listener.flows.statements.withdraw_presence, "what was registered is withdrawn"


def test_connection_to_another_installation_is_closed_and_retried_later() -> None:
    listener = Listener()
    connecting, connection = listener.start(), FakeConnection()
    next(connecting)
    connecting.send(connection)
    with pytest.raises(StopIteration):
        connecting.send(("elsewhere",))
    assert connection.closed
    waits = listener.loop.send(None)
    assert waits.connection is None
    assert waits.seconds == pytest.approx(FIRST_PAUSE)


def test_closed_connection_puts_its_presence_in_doubt_and_starts_the_clock() -> None:
    listener = Listener()
    connection = listener.connect()
    presence = listener.flows.presence
    assert presence is not None
    connection.state = SocketState.CLOSED
    later = listener.loop.throw(ConnectionFailed("closed", Failure.CLOSED))
    assert isinstance(later, CallLater)
    assert later.seconds == pytest.approx(GRACE * default.own_part)
    assert listener.flows.presence is None
    withdrawal = listener.loop.send(None)
    assert connection.closed
    assert isinstance(withdrawal, CallOverKeepAlive), "the pool may be busy"
    assert withdrawal.call.args == (presence.name, '{"a"}', '{"7"}')
    listener.now += GRACE * default.own_part
    later.function()
    assert listener.lease.loss is not None
    assert listener.lease.loss.reason is Reason.UNREACHABLE


def test_withdrawn_presence_costs_only_the_leases_that_were_taken() -> None:
    listener = Listener()
    listener.connect()
    presence = listener.flows.presence
    assert presence is not None
    later = listener.loop.throw(ConnectionFailed("closed", Failure.CLOSED))
    assert isinstance(listener.loop.send(None), CallOverKeepAlive)
    assert isinstance(listener.loop.send((None,)), Spawn), "withdrawn, so it reconnects"
    assert presence.ended
    listener.now += GRACE
    later.function()
    assert listener.lease.loss is None


def test_restart_of_the_server_ends_the_presence_and_keeps_the_leases() -> None:
    listener = Listener()
    connection = listener.connect()
    presence = listener.flows.presence
    assert presence is not None
    assert isinstance(listener.loop.throw(ConnectionFailed("crash", Failure.SERVER_RESTARTED)), Spawn)
    assert connection.closed
    assert presence.ended
    assert listener.lease.loss is None


@pytest.mark.parametrize(
    ("failure", "others_ended", "state", "after", "kept"),
    [
        pytest.param(Failure.TERMINATED, True, ServerState.SHUTTING_DOWN, 0.5, True, id="fast shutdown"),
        pytest.param(Failure.CLOSED, False, ServerState.STARTING, 0.5, True, id="restart after a crash"),
        pytest.param(Failure.TERMINATED, True, ServerState.UNKNOWN, 0.5, False, id="one ended, no server found"),
        pytest.param(Failure.TERMINATED, False, ServerState.SHUTTING_DOWN, 0.5, False, id="smart shutdown, one ended"),
        pytest.param(Failure.CLOSED, True, ServerState.SHUTTING_DOWN, 0.5, False, id="smart shutdown, connection cut"),
        pytest.param(Failure.TERMINATED, True, ServerState.SHUTTING_DOWN, 1.0, False, id="shutdown after a takeover"),
        pytest.param(Failure.TERMINATED, True, ServerState.STARTING, 1.0, False, id="restart after a takeover"),
    ],
)
def test_end_of_the_server_keeps_the_leases_only_if_it_is_proven_in_time(
    failure: Failure, others_ended: bool, state: ServerState, after: float, kept: bool
) -> None:
    """`after` is when the proof comes, in parts of the client's part of the grace.

    Another server that the same name leads to is starting, which proves nothing.
    """
    listener = Listener()
    connection = listener.connect()
    presence = listener.flows.presence
    assert presence is not None
    listener.now += 10
    listener.flow.look()
    connection.state = SocketState.CLOSED
    ended_at = listener.now if others_ended else listener.now - 1
    listener.flow.in_doubt.keepalive.ended_at = lambda: ended_at
    later = listener.loop.throw(ConnectionFailed("ended", failure))
    assert isinstance(later, CallLater)
    assert isinstance(listener.loop.send(None), CallOverKeepAlive)
    connecting = listener.loop.throw(Unavailable("no server"))
    assert isinstance(connecting, Spawn)
    listener.loop.send(None)
    assert isinstance(next(connecting.flow), Connect)
    listener.now += after * GRACE * default.own_part
    with pytest.raises(StopIteration):
        connecting.flow.throw(ConnectFailed("not now", {"elsewhere": ServerState.STARTING, connection.server: state}))
    waiting = listener.loop.send(None)
    if isinstance(waiting, CallOverKeepAlive):
        listener.loop.throw(Unavailable("no server"))
    assert presence.ended is kept
    listener.now += GRACE
    later.function()
    assert (listener.lease.lost() is None) is kept


def test_crash_ends_no_earlier_presence_that_is_still_in_doubt() -> None:
    """The session of that presence ended before the crash, and its locks may have been taken."""
    listener = Listener()
    listener.connect()
    presence = listener.flows.presence
    assert presence is not None
    listener.loop.throw(ConnectionFailed("closed", Failure.CLOSED))
    assert isinstance(listener.loop.send(None), CallOverKeepAlive)
    connecting = listener.loop.throw(Unavailable("busy"))
    assert isinstance(connecting, Spawn)
    listener.loop.send(None)
    listener.shake_hands(connecting.flow, FakeConnection())
    assert isinstance(listener.loop.send(None), CallOverKeepAlive)
    listener.loop.throw(Unavailable("busy"))
    listener.now += GRACE
    listener.loop.throw(ConnectionFailed("crash", Failure.SERVER_RESTARTED))
    assert not presence.ended


def test_listener_looks_at_the_socket_while_a_lease_depends_on_it_and_for_a_moment_after() -> None:
    listener = Listener()
    assert listener.flow.look_every() == math.inf
    listener.connect()
    assert listener.flow.look_every() < GRACE * default.own_part
    listener.lease.let_go()
    listener.now += default.look_for - 0.01
    assert listener.flow.look_every() < GRACE * default.own_part, "another lease need not wake it"
    listener.now += 0.01
    assert listener.flow.look_every() == math.inf


def test_connection_that_a_turn_outlasts_the_need_for_is_closed_by_the_next() -> None:
    listener = Listener(None)
    connection = FakeConnection()
    listener.shake_hands(listener.start(), connection)
    listener.loop.send(None)
    listener.now = 100.0 + default.listen_for - 0.001
    ping = listener.loop.send(None)
    assert isinstance(ping, CallOver)
    listener.now += 0.002
    assert listener.loop.send(("",)) == WaitForInput(connection, 0.0)
    assert listener.loop.send(None) == WaitForInput(None, math.inf)
    assert connection.closed


def test_silent_connection_is_kept_until_its_presence_is_withdrawn() -> None:
    listener = Listener()
    connection = listener.connect()
    later = listener.loop.throw(ConnectionFailed("late", Failure.SILENT))
    assert isinstance(later, CallLater)
    assert isinstance(listener.loop.send(None), CallOverKeepAlive)
    assert not connection.closed, "closing it would start the grace"
    assert isinstance(listener.loop.send((None,)), Spawn)
    listener.loop.send(None)
    assert connection.closed


def test_reply_to_another_thread_delays_the_next_request() -> None:
    listener = Listener()
    connection = listener.connect()
    listener.now += default.ping_interval - 1
    listener.flow.replied(listener.now)
    assert listener.loop.send(None) == WaitForInput(connection, default.ping_interval)


def test_connection_in_doubt_is_asked_for_a_reply_at_once() -> None:
    listener = Listener()
    listener.connect()
    listener.flow.doubt_connection()
    assert isinstance(listener.loop.send(None), CallOver)


def test_refused_request_keeps_the_connection() -> None:
    listener = Listener()
    connection = listener.connect()
    assert listener.loop.throw(ConnectionFailed("no", Failure.REFUSED)) == WaitForInput(
        connection, default.ping_interval
    )
    assert not connection.closed


def test_connection_that_comes_after_close_is_closed() -> None:
    listener = Listener()
    connecting, connection = listener.start(), FakeConnection()
    listener.flow.closed = True
    with pytest.raises(StopIteration):
        listener.loop.send(None)
    listener.flow.hang_up()
    listener.shake_hands(connecting, connection)
    assert connection.closed


def test_connection_that_the_loop_has_not_taken_is_closed_at_hang_up() -> None:
    listener = Listener()
    connection = FakeConnection()
    listener.shake_hands(listener.start(), connection)
    listener.flow.hang_up()
    assert connection.closed


def test_failed_attempts_to_connect_come_at_growing_intervals() -> None:
    listener = Listener()
    connecting, pauses = listener.start(), []
    for _ in range(3):
        next(connecting)
        with pytest.raises(StopIteration):
            connecting.throw(ConnectFailed("refused"))
        waits = listener.loop.send(None)
        pauses.append(waits.seconds)
        listener.now += waits.seconds
        connecting = listener.loop.send(None).flow
        listener.loop.send(None)
    assert pauses == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE])


def test_attempt_that_cannot_be_started_is_repeated_later() -> None:
    """As when the process may start no more threads at this moment."""
    listener = Listener()
    assert isinstance(next(listener.loop), Spawn)
    waits = listener.loop.throw(RuntimeError("can't start new thread"))
    assert waits.connection is None
    assert waits.seconds == pytest.approx(FIRST_PAUSE)
    listener.now += waits.seconds
    assert isinstance(listener.loop.send(None), Spawn)


def test_doubt_outlasts_a_reply_to_an_earlier_request() -> None:
    """The thread of a renewal may record its reply after another thread found the connection dead."""
    flow = ListenerFlow(LockFlows("dblock", "me", lambda: 100.0), Listener(), "here", None, lambda: None)
    flow.is_home = True
    flow.connection = FakeConnection()
    flow.doubt_connection()
    flow.replied(99.0)
    assert flow._seconds_until_due() == 0, "it asks for a reply at once"
    flow.replied(100.0)
    assert flow._seconds_until_due() > 0
