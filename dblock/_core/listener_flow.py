"""The listener as a flow: what a client says and decides over its listener's connection, apart from how it waits.

Two things depend on that connection. Notifications that wake the client's waiters come over it. And while it lasts,
other clients see that this process is alive: it is the client's presence. When it closes, other clients may take the
locks of this one after a grace. So within the greater part of the grace one of three things happens:

- The client reports over another connection that it is alive, and learns which leases it still holds.
- The server is known to end all its sessions, or to have ended them. Then no presence from before counts.
- The client gives its leases up as lost.

If the connection falls silent, the client keeps it open until one of these has happened, because closing it would start
the grace. A new connection is a new presence. Leases are tied to it once the database knows of it.

If notifications do not come through, for example behind a pooler that runs each transaction in another session, waiters
are still served: the client checks their positions more often. If something stands between the client and the server (a
pooler, a proxy, a NAT), there is no presence, because that thing may close its side toward the server, unseen by the
client. The threads and the simulation perform the effects of this flow.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from dblock._core import statements
from dblock._core.acquire import LockFlows
from dblock._core.doubtful_presences import DoubtfulPresences, KeepsLeases
from dblock._core.effects import Call, CallLater, CallOver, Connect, Flow, Sleep, Spawn, T, WaitForInput, redirect
from dblock._core.handshake import handshake
from dblock._core.heartbeats import Heartbeats
from dblock._core.listener_failures import ConnectFailed, Connection, ConnectionFailed, Failure
from dblock._core.notification_probe import LOST, NotificationProbe
from dblock._core.outage import Outage
from dblock._core.presence import Presence
from dblock._core.waiters import LocalWaiters
from dblock.errors import ClientClosed, DblockError

logger = logging.getLogger("dblock")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Seconds before the next attempt to connect."""

WARN_AFTER = 1.0
"""Warn once the pause between two attempts to connect is longer than this many seconds."""


class ListenerFlow:
    """The state of one client's listener, and its loop."""

    def __init__(
        self,
        flows: LockFlows,
        keepalive: KeepsLeases,
        installation: str,
        grace: float | None,
        wake: Callable[[], object],
    ) -> None:
        """`wake` ends the wait of the loop; it may be called from any thread that the client runs in."""
        self._flows = flows
        self._statements = flows.statements
        self._now = flows.clock
        self._timings = flows.timings
        self._keepalive = keepalive
        self._installation = installation
        self._grace = grace
        self._wake = wake
        self._warned: set[str] = set()
        self._connecting = Outage("listener: connected again", logging.INFO)
        self._heartbeats = Heartbeats(flows.timings)
        self.waiters = LocalWaiters(flows, wake, flows.clock, flows.uniform)
        self.in_doubt = DoubtfulPresences(flows, keepalive)
        self.is_home = False
        """Whether leases are renewed over the connection."""
        self._reset()

    def _reset(self) -> None:
        self.connection: Connection | None = None
        self._connect_outcome: tuple[Connection, Presence | None] | Exception | None = None
        """The outcome of an attempt to connect, until the loop takes it."""
        self._silent: Connection | None = None
        """A connection that does not reply any more, kept open until no lease depends on it."""
        self.in_doubt.forget()
        self.closed = False
        self._replied_at = -math.inf
        """When the last request that got a reply over the connection was sent."""
        self._doubted_at = -math.inf
        """When another thread got no reply over the connection, if there was none since."""
        self.listens = False
        self._listen_at = -math.inf
        """When to try to listen at the earliest."""
        self._awaited_at = -math.inf
        """When a waiter was last seen."""
        self._kept_at = -math.inf
        """When a lease that is renewed over the connection was last seen."""
        self._probe = NotificationProbe(self._timings)
        self._retry_at = -math.inf
        """When to connect at the earliest. Never, while an attempt is under way."""
        self._pause = FIRST_PAUSE
        self._heartbeats.reset()

    def reset_after_fork(self) -> None:
        """Start as another client, without connection and waiters. The parent's session ends with the parent."""
        for connection in self._connections():
            connection.drop()
        self._flows.listener_is(None)
        self._flows.client, self._flows.presence = self._flows.new_name(), None
        self.waiters.reset_after_fork()
        self._reset()

    # The loop.

    def run(self) -> Flow[None]:
        """Listen until the client is closed. Call `hang_up` at the end, however it ends."""
        self._awaited_at = self._now()
        while not self.closed:
            try:
                yield from self._turn()
            except ClientClosed:
                break
            except Exception:
                if self.closed:
                    break  # the client closes what the loop uses
                logger.exception("listener: unexpected error, continuing")
                yield Sleep(FIRST_PAUSE)

    def _turn(self) -> Flow[None]:
        """Do what is due. Then wait for a notification, or until something is due."""
        yield from self.in_doubt.withdraw()
        self._take_connection()
        if self._keeps_leases:
            self._kept_at = self._now()
        if not self._needed:
            self._hang_up_unneeded()
        if self.connection is None and self._needed and self._now() >= self._retry_at:
            # In a flow of its own, because it may take long and the waiters need attention in that time.
            self._retry_at = math.inf
            try:
                yield Spawn(self._connect())
            except Exception as error:  # the process may start no more threads at this moment
                self._connect_failed(error)
        self._check_deadlines()
        if self._seconds_until_due() <= 0:
            yield from self._heartbeat()
            if self._now() >= self.waiters.cleanup_due_at():
                yield from self.waiters.run_cleanup()
        connection = self.connection
        self._flows.listener_is(connection is not None if self._needed else None)
        try:
            yield WaitForInput(connection, self._seconds_until_due())
        except ConnectionFailed as error:
            if connection is not None:
                yield from self._failed(connection, error)

    def _heartbeat(self) -> Flow[None]:
        """Send what is due over the connection. Without a connection, send the waiters' heartbeat over the pool."""
        connection = self.connection
        if connection is not None:
            try:
                listened = self.listens
                yield from self._over(connection, self._listen_if_needed())
                yield from self._over(connection, self._ping())
                self._heartbeats.worked()
                if self.listens and not listened:
                    yield from self._probe_notifications()
            except ConnectionFailed as error:
                yield from self._failed(connection, error)
            except ClientClosed:
                raise
            except DblockError as error:
                logger.info("listener: notifications could not be probed: %s", error)
        elif self._now() >= self.waiters.due_at():
            try:
                yield from self.waiters.check(math.inf)
                self._heartbeats.worked()
            except ClientClosed:
                raise
            except DblockError as error:
                if self._heartbeats.are_away(error, self._now()):
                    self.waiters.wake_all()

    def _check_deadlines(self) -> None:
        """Close a silent connection that no lease depends on, and give up on a probe that has not come back."""
        if not self.in_doubt:
            self._close_silent()
        if self._probe.is_lost(self._now()):
            self.waiters.notifications_work = False
            self._warn_once(LOST)
            self.waiters.wake_all()

    def _seconds_until_due(self) -> float:
        """Return the seconds until there is something to do, if nothing comes before."""
        due = [self.waiters.due_at(), self.waiters.cleanup_due_at(), self._probe.due_at()]
        if self._silent is not None:
            due.append(self._now() + self._timings.heartbeat_interval)
        if not self._needed:
            return math.inf if self.connection is None else 0.0
        if self.connection is None:
            due.append(self._retry_at)
        else:
            if self._grace is None and not self.waiters.in_use:
                in_use_at = self._now() if self._keeps_leases else max(self._awaited_at, self._kept_at)
                due.append(in_use_at + self._timings.listen_for)
            # Without a presence and without waiters, the renewals show whether the connection lasts.
            doubted = self._doubted_at > -math.inf
            pings = not self.is_home or self._grace is not None or self.waiters.in_use or self.listens or doubted
            due.append((self._replied_at if pings else self._now()) + self._timings.ping_interval)
            if self.waiters.in_use and not self.listens:
                due.append(self._listen_at)
        return max(min(due) - self._now(), 0.0)

    def look_every(self) -> float:
        """Return the seconds between two looks at the socket of the presence; infinite if no lease depends on it."""
        presence = self._flows.presence
        return math.inf if presence is None else presence.look_every(self._keepalive.keeps_any(), self._now())

    def look(self) -> float:
        """Look at the presence's socket, to know when it was open. Return the seconds until the next look."""
        if (presence := self._flows.presence) is not None:
            presence.stands(self._now())
        return self.look_every()

    @property
    def _needed(self) -> bool:
        """Whether a connection is needed: without a presence, only while it is in use, and for a while after."""
        in_use = self._grace is not None or self.waiters.in_use or self._keeps_leases
        return in_use or self._now() < max(self._awaited_at, self._kept_at) + self._timings.listen_for

    @property
    def _keeps_leases(self) -> bool:
        return self.is_home and self._keepalive.keeps_any()

    def _hang_up_unneeded(self) -> None:
        """Close the connection until there are waiters again, so that an idle client sends nothing."""
        connection, self.connection = self.connection, None
        if connection is not None:
            self.waiters.notifications_work, self._retry_at = False, -math.inf
            connection.close()

    # Over the connection.

    def _connect(self) -> Flow[None]:
        """Open a connection and make sure of it. The loop takes the outcome from there."""
        connection: Connection | None = None
        try:
            opened: Connection = yield Connect()
            connection = opened
            shaking = handshake(self._flows, opened, self._installation, self._grace, self._warn_once)
            presence = yield from self._over(opened, shaking)
        except Exception as error:
            if connection is not None:
                connection.close()
            outcome: tuple[Connection, Presence | None] | Exception = error
        else:
            outcome = opened, presence
        self._connect_outcome = outcome
        if connection is not None and self.closed:
            connection.close()
        self._wake()

    @property
    def channel(self) -> str:
        """The channel of this client's notifications."""
        return f"dblock_{self._flows.client}"

    def _listen_if_needed(self) -> Flow[None]:
        """Start to listen when there are waiters, and stop when there have been none for a while.

        Every notification wakes the sessions of all listening clients, in the whole database.
        """
        needed = self.waiters.in_use
        if needed:
            self._awaited_at = self._now()
        if needed and not self.listens and self._now() >= self._listen_at:
            try:
                yield statements.listen(self.channel)
            except ConnectionFailed as error:
                if error.failure is not Failure.REFUSED:
                    raise
                # The waiters' heartbeat must not depend on it: without one they lose their positions.
                self._listen_at = self._now() + self._timings.listen_for
                self._warn_once(
                    f"listener: the server refused to listen: {error}. Waiters poll several times a second instead."
                )
                return
            self.listens = True
        elif self.listens and self._now() >= self._awaited_at + self._timings.listen_for:
            yield statements.STOP_LISTENING
            self.listens = False
            self.waiters.notifications_work = False

    def _probe_notifications(self) -> Flow[None]:
        """Send a notification to this client. A pooler may deliver one that comes over its own connection alone."""
        self._probe.sent(self._now())
        yield Call(statements.NOTIFY_SELF, (self.channel,), apart=True)

    def _ping(self) -> Flow[None]:
        """Ask for a reply: to the waiters' heartbeat, if that is due."""
        sent_at = self._now()
        if sent_at < self.waiters.due_at() or not (yield from self.waiters.check(self._timings.reply_within)):
            yield statements.ARE_YOU_THERE
        self.replied(sent_at)

    def replied(self, sent_at: float) -> None:
        """Record a reply over the connection to a request that was sent then. Another thread may have sent it."""
        if sent_at >= self._doubted_at:  # otherwise the doubt came later
            self._doubted_at, self._replied_at = -math.inf, sent_at
            if self._flows.presence is not None:
                self._flows.presence.confirm(sent_at)

    def doubt_connection(self) -> None:
        """Ask for a reply over the connection at once, because another thread got none over it."""
        self._doubted_at, self._replied_at = self._now(), -math.inf
        self._wake()

    def notified(self, payload: str) -> None:
        """Wake the waiter that a notification names. Called from the thread that reads the connection."""
        self._probe.came()
        self.waiters.notifications_work = True
        if payload != statements.PROBE:
            # A short wait can begin and end between two turns of the loop. This notification shows that there was one.
            self._awaited_at = self._now()
            self.waiters.notified(payload)

    # What becomes of the connection.

    def _take_connection(self) -> None:
        outcome, self._connect_outcome = self._connect_outcome, None
        if isinstance(outcome, tuple):
            self._connection_opened(*outcome)
        elif outcome is not None:
            self._connect_failed(outcome)

    def _connection_opened(self, connection: Connection, presence: Presence | None) -> None:
        self._connecting.worked()
        self.listens, self.connection = False, connection
        self._replied_at = self._now()
        self._pause = FIRST_PAUSE
        self._flows.presence = presence
        if presence is not None:
            self._keepalive.tie()
        self.waiters.wake_all()  # notifications may have been lost while there was no connection

    def _connect_failed(self, error: Exception) -> None:
        if isinstance(error, ConnectFailed):
            self.in_doubt.servers_are(error.states, self._now())
        self._retry_at = self._now() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        message = str(error).strip()
        self._connecting.failed("listener: could not connect, will retry: %s", message)
        if self._pause > WARN_AFTER:
            self._warn_once(
                "listener: no connection for a while. Until there is one, waiters poll several times a second, and "
                f"leases of a dead process last until they expire. {message.splitlines()[0] if message else ''}"
            )

    def _failed(self, connection: Connection, error: ConnectionFailed) -> Flow[None]:
        """Decide what becomes of a connection over which a call failed, and of its presence."""
        if error.failure is Failure.REFUSED:
            logger.warning("listener: the server refused a request, will retry: %s", error)
            self._replied_at = self._now()
            self._listen_at = self._replied_at + self._timings.heartbeat_interval
            return
        self.connection, self._retry_at = None, -math.inf
        self.waiters.notifications_work = False
        presence, self._flows.presence = self._flows.presence, None
        if presence is not None:
            self.in_doubt.add(presence, error.failure is Failure.TERMINATED)
        if error.failure is Failure.SILENT and presence is not None:
            logger.warning("listener: connection has fallen silent, opening another")
            self._close_silent()
            self._silent = connection
            yield CallLater(presence.left(self._now()), self.in_doubt.give_up)
            return
        logger.info("listener: connection closed, reconnecting: %s", error)
        if presence is not None:
            presence.doubt()
            if error.failure is Failure.SERVER_RESTARTED:
                self.in_doubt.end(presence)
            else:
                yield CallLater(presence.own_time, self.in_doubt.give_up)
        connection.close()

    def _close_silent(self) -> None:
        silent, self._silent = self._silent, None
        if silent is not None:
            self.in_doubt.doubt()
            silent.close()

    def hang_up(self) -> None:
        """Close all connections. Their presences are in doubt from here on."""
        self._flows.listener_is(None)
        if self._flows.presence is not None:
            self._flows.presence.doubt()
        self.in_doubt.doubt()
        for connection in self._connections():
            connection.close()
        self.connection = self._silent = self._connect_outcome = None

    def _connections(self) -> list[Connection]:
        connected = self._connect_outcome[0] if isinstance(self._connect_outcome, tuple) else None
        return [one for one in (self.connection, self._silent, connected) if one is not None]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)

    def _over(self, connection: Connection, flow: Flow[T]) -> Flow[T]:
        """Make the calls of a flow over this connection."""
        longest = self._timings.reply_within
        return redirect(flow, lambda call: CallOver(connection, call, min(call.within, longest)))
