"""Presences in doubt: sessions that are gone, or silent, while leases may still depend on them.

Other clients may take the locks of such leases after the grace. So the client withdraws the presence: it reports that
it is alive and learns which locks were taken. If it cannot do so in its own part of the grace, it gives the leases up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from dblock._core.effects import CallOverKeepAlive, Flow, redirect
from dblock._core.grants import GrantFlows
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.presence import Presence
from dblock.errors import DblockError


class KeepsLeases(Protocol):
    """The part of the keep-alive that the listener needs."""

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        """Return the leases that are tied to this presence and have not ended."""

    def tie(self) -> None:
        """Tie the leases to the client's new presence at once."""


class DoubtfulPresences:
    """The presences of one client that are in doubt."""

    def __init__(self, flows: GrantFlows, keepalive: KeepsLeases) -> None:
        self._flows = flows
        self._keepalive = keepalive
        self._presences: list[Presence] = []

    def __iter__(self) -> Iterator[Presence]:
        return iter(list(self._presences))

    def __bool__(self) -> bool:
        return bool(self._presences)

    def add(self, presence: Presence) -> None:
        """Add a presence whose connection is gone or silent."""
        self._presences.append(presence)

    def doubt(self) -> None:
        """Mark all their sessions as gone, before the sockets are closed."""
        for presence in self._presences:
            presence.doubt()

    def withdraw(self) -> Flow[None]:
        """Withdraw all of them over the keep-alive's connection; stop at the first that cannot be withdrawn now."""
        with contextlib.suppress(DblockError):
            for presence in self:
                yield from redirect(self._withdraw(presence), CallOverKeepAlive)

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
        self._presences.remove(presence)

    def end(self) -> None:
        """End all of them, because the server ended all its sessions: no presence from before counts any more.

        That a server is shutting down proves nothing, because it may let its sessions continue.
        """
        for presence in self._presences:
            presence.end()
        self._presences.clear()

    def give_up(self) -> None:
        """Give up the leases that are tied to a presence that is not valid any more."""
        for presence in self:
            if not presence.stands(self._flows.clock()):
                for state in self._keepalive.tied_to(presence):
                    state.lose(Reason.UNREACHABLE)
