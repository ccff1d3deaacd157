"""Presences in doubt: sessions that are gone, or silent, while leases may still depend on them.

Other clients may take the locks of such leases after the grace. So the client withdraws the presence: it reports that
it is alive and learns which locks were taken. If it cannot do so in its own part of the grace, it gives the leases up.

There is one exception: the server itself has ended. A takeover needs two looks at a presence that has ended, one grace
apart, in the same incarnation of the server. So if the server is known to end all its sessions within the client's part
of the grace, counted from when the session was last seen open, no takeover can happen any more: neither in this
incarnation, nor in the next one, in which the presence does not count. The leases then last for their own time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from dblock._core.effects import CallOverKeepAlive, Flow, redirect
from dblock._core.grants import GrantFlows
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.listener_failures import ServerState
from dblock._core.presence import Presence
from dblock.errors import DblockError

logger = logging.getLogger("dblock")


class KeepsLeases(Protocol):
    """The part of the keep-alive that the listener needs."""

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        """Return the leases that are tied to this presence and have not ended."""

    def tie(self) -> None:
        """Tie the leases to the client's new presence at once."""

    def keeps_any(self) -> bool:
        """Return whether there is a lease to keep."""


class KeepAliveSessions:
    """What the keep-alive knows of the end of its sessions. The runtime puts its own functions here."""

    ended_at: Callable[[], float] = staticmethod(lambda: -math.inf)
    """Returns when the server last ended a session of the keep-alive with a message."""
    refused: Callable[[], tuple[Mapping[str, ServerState], float]] = staticmethod(lambda: ({}, -math.inf))
    """Returns in which states servers last refused a connection, by their addresses, and when."""


class DoubtfulPresences:
    """The presences of one client that are in doubt."""

    def __init__(self, flows: GrantFlows, keepalive: KeepsLeases) -> None:
        self._flows = flows
        self._keepalive = keepalive
        self.keepalive = KeepAliveSessions()
        self.forget()

    def forget(self) -> None:
        """Forget all of them, because they belong to the parent of a fork."""
        self._presences: list[Presence] = []
        self._terminated: set[Presence] = set()
        """Those whose session was ended by the server in so many words."""

    def __iter__(self) -> Iterator[Presence]:
        return iter(list(self._presences))

    def __bool__(self) -> bool:
        return bool(self._presences)

    def add(self, presence: Presence, terminated: bool = False) -> None:
        """Add a presence whose connection is gone or silent. `terminated` means that the server ended the session."""
        self._presences.append(presence)
        if terminated:
            self._terminated.add(presence)

    def doubt(self) -> None:
        """Mark all their sessions as gone, before the sockets are closed."""
        for presence in self._presences:
            presence.doubt()

    def withdraw(self) -> Flow[None]:
        """Withdraw all of them over the keep-alive's connection; stop at the first that cannot be withdrawn now."""
        try:
            for presence in self:
                yield from redirect(self._withdraw(presence), CallOverKeepAlive)
        except DblockError:
            self.servers_are(*self.keepalive.refused())

    def _withdraw(self, presence: Presence) -> Flow[None]:
        """Report that this process is alive though this presence is gone, and learn which locks were taken.

        Then the presence has ended: no lease depends on it.
        """
        reported: set[LeaseState] = set()
        first = True
        while True:
            with presence.lock:
                states = [state for state in self._keepalive.tied_to(presence) if state not in reported]
                if not states and not first:
                    presence.end()
                    break
            first = False
            reported.update(states)
            lost = yield from self._flows.withdraw_presence(
                presence.name, [(state.name, state.token) for state in states]
            )
            for position in lost:
                states[position].lose(Reason.SUPERSEDED)
        self._remove(presence)

    def end(self, presence: Presence) -> None:
        """End this presence, because the server ended its session together with all others: it counts no more."""
        presence.end()
        self._remove(presence)

    def servers_are(self, states: Mapping[str, ServerState], at: float) -> None:
        """End the presences of which the state of their server proves that it ended all sessions in time.

        The state of another server proves nothing. A name may lead to several servers, at once or in turn.

        A server that is starting proves it. A server that is shutting down proves it only together with the end of this
        client's sessions: in a smart shutdown sessions continue, and an administrator may end single ones. So both the
        session of the presence and the keep-alive's must have been ended by it.

        `at` is when the servers replied. The proof must come in time: after a pause of this process, a takeover may
        have come before it.
        """
        for presence in self:
            state = states.get(presence.server, ServerState.UNKNOWN)
            all_ended = state is ServerState.STARTING or (
                state is ServerState.SHUTTING_DOWN
                and presence in self._terminated
                and self.keepalive.ended_at() >= presence.seen_open_at - presence.grace
            )
            if all_ended and presence.seen_open_at <= at and presence.stands(at):
                logger.info("listener: the server is %s, its clients' leases last until they expire", state.value)
                self.end(presence)

    def _remove(self, presence: Presence) -> None:
        self._presences.remove(presence)
        self._terminated.discard(presence)

    def give_up(self) -> None:
        """Give up the leases that are tied to a presence that is not valid any more."""
        for presence in self:
            if not presence.stands(self._flows.clock()):
                for state in self._keepalive.tied_to(presence):
                    state.lose(Reason.UNREACHABLE)
