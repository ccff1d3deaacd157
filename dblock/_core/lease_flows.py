"""Renewing and releasing one lease, as flows.

Guarantee: both act on one exact grant, by name and token. The database decides whether that grant is still held. When
it is not, the flows ask the database for the reason before they report the loss.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from dblock._core.acquire import POLL_FIRST, TRUST, LockFlows
from dblock._core.effects import Flow, Sleep
from dblock._core.holds import HeldState
from dblock._core.lease_state import LeaseState, Reason, Status
from dblock._core.options import Seconds, check_ttl
from dblock.errors import DatabaseError


class LeaseFlows:
    """The steps of renewing and releasing one lease."""

    def __init__(self, service: LockFlows, state: LeaseState | HeldState) -> None:
        self._flows = service
        self._state = state

    def renew(self, ttl: Seconds | None) -> Flow[None]:
        """Extend the lease by hand, or raise LeaseLost."""
        state = self._state
        seconds = state.ttl if ttl is None else check_ttl(state.name, ttl)
        self._raise_if_gone()
        while True:
            reply = yield from self._flows.renew([(state.name, state.token, seconds)])
            why = reply.missed.get(0)
            if why != "busy":
                break
            # Another transaction has locked the row, perhaps the user's own. Retry while the trust window is open.
            yield Sleep(POLL_FIRST)
            self._raise_if_gone()
        if why is not None:
            state.renewal_refused(why)
        elif state.renewal_confirmed(reply.sent_at, reply.sent_at + seconds * TRUST, reply.moment + seconds):
            state.change_ttl(seconds)
        if not state.remaining():
            raise state.error()

    def learn_why(self) -> Flow[None]:
        """Mark the lease lost with the database's reason, after a statement that did not find it held."""
        state = self._state
        state.leave_refused()
        try:
            reply = yield from self._flows.renew([(state.name, state.token, state.ttl)])
        except DatabaseError:
            state.lose(Reason.UNREACHABLE)
            return
        why = reply.missed.get(0)
        if why is not None and why != "busy":
            state.renewal_refused(why)

    def release_without_asking(self, abandon: Callable[[Any], object]) -> bool | None:
        """Release the lease where no call may or need wait for it; return None if a release must be sent.

        `abandon` hands the lease to the keep-alive, which releases it in the background.
        """
        state = self._state
        if state.left and not state.finished:
            # Released in the user's transaction, which may still be open. A release sent now would wait for its end.
            state.let_go()
            abandon(state)
            return True
        if state.left and state.status is Status.RELEASED:
            return True  # the same, and a renewal has found the transaction committed
        if state.ours and state.may_be_granted:
            # Waiters need not wait for the deadline of a lease that was given up.
            abandon(state)
        return False if state.finished else None

    def release(self) -> Flow[bool]:
        """Release the lease; the result is False when it was no longer held under this token."""
        observation = self._flows.observation
        if observation is None:
            return self._release()
        state = self._state
        return observation.release([state.grant if isinstance(state, HeldState) else state], self._release())

    def _release(self) -> Flow[bool]:
        state = self._state
        if state.finished:
            return False
        # In doubt, another holder may have taken the lock before. Then a retried release that finds nothing to free
        # does not prove that the first attempt has freed it.
        doubtful = state.in_doubt
        state.let_go()
        trusted_until = -math.inf if doubtful else state.trusted_until
        released = yield from self._flows.release(state.name, state.token, trusted_until)
        if released or state.settled:
            state.release_confirmed()
            return released
        # Ask for a renewal, which the database refuses with the reason. If it renews the lease after all, an earlier
        # renewal had overtaken the release, which must be sent again.
        why: str | None = "superseded"
        with contextlib.suppress(DatabaseError):
            reply = yield from self._flows.renew([(state.name, state.token, state.ttl)])
            why = reply.missed.get(0)
            if why in (None, "busy", "forced"):
                released = yield from self._flows.release(state.name, state.token, trusted_until)
        if released:
            state.release_confirmed()
        else:
            freed = Reason.UNREACHABLE if doubtful else Reason.FORCED
            known = {"expired": Reason.EXPIRED, "released": freed, "forced": Reason.FORCED}
            state.release_refused(known.get(why or "", Reason.SUPERSEDED))
        return released

    def _raise_if_gone(self) -> None:
        """Raise LeaseLost unless the lease can be renewed. It can be while its release may have been rolled back."""
        state = self._state
        if state.over or not state.ours or state.lost_by_clock():
            raise state.error()
