"""One grant as this process knows it: a state machine with a clock.

Guarantee: a lost lease stays lost. It reports the loss from the first moment at which the database could grant the
lock to another holder. The report needs no thread and no message: every reader compares the clock with the trust
window. A process that was paused for a minute therefore finds its leases lost in its first instruction after the pause.

The database decides who holds the lock. This process only assumes that the grant still stands, and only inside the
trust window. The lease in the user's hands, the keep-alive, the listener and the callbacks share one `LeaseState`.
They read its properties and report events to it. Only this module assigns its fields, and it does no I/O.

    grant
      │    ┌───┐ renewal_confirmed
      ▼    ▼   │
    ┌────────────┐          leaving            ┌─────────┐
    │    HELD    │ ──────────────────────────► │ LEAVING │
    │            │ ◄────────────────────────── │         │
    └────────────┘     leave_refused, or       └─────────┘
      │        │       renewal_confirmed, sent   │  │  │
      │        │       after the release         │  │  │ renewal_refused: released, superseded
      │        │                                 │  │  │ (the user's transaction was committed)
      │        │ let_go        let_go, or the    │  │  └───────────────────────────┐
      │        │               trust window ends │  │                              │
      │        └──────────────────┐  ┌───────────┘  │                              │
      │                           ▼  ▼              │                              ▼
      │                       ┌───────────┐         │   release_confirmed    ┌──────────┐
      │                       │ RELEASING │ ────────┼──────────────────────► │ RELEASED │
      │                       └───────────┘         │                        └──────────┘
      │                             │               │
      │ lose, renewal_refused,      │ release_      │ lose, renewal_refused: expired, forced,
      │ the trust window ends,      │ refused       │ or the presence is in doubt
      │ or the presence is in doubt ▼               │
      │                        ┌────────┐           │
      └──────────────────────► │  LOST  │ ◄─────────┘
                               └────────┘

Every other event leaves the status as it is: no event revives a lease, and of a loss and a release that race with each
other the first one wins. `test_lease_state.py` has the whole table.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

from dblock._core import clock, lease_logs
from dblock._core.presence import Presence
from dblock._core.replies import Grant
from dblock.errors import DblockError, LeaseLost


class Reason(str, enum.Enum):
    """Why a lease was lost."""

    EXPIRED = "expired"
    """The lease expired before it was renewed: the process was paused, or the lease is not kept alive."""
    SUPERSEDED = "superseded"
    """The database has granted the lock to another holder since."""
    FORCED = "forced"
    """An operator or another session released the lock by force."""
    UNREACHABLE = "unreachable"
    """The database did not reply before the trust window ended, or this process's presence was in doubt."""

    def __str__(self) -> str:
        return self.value


class Status(enum.Enum):
    """Where one grant stands in this process."""

    HELD = "held"
    """Believed inside the trust window, and renewed if it is kept alive."""
    LEAVING = "leaving"
    """A release was sent inside the user's own transaction. Not believed. The next renewal shows how it ended."""
    RELEASING = "releasing"
    """The holder has let go. Not believed and never called lost on suspicion; the database has not confirmed it yet."""
    RELEASED = "released"
    """The database has confirmed the release."""
    LOST = "lost"
    """Not believed, for the reason in `loss`."""


class Loss(NamedTuple):
    """How a lease was lost."""

    reason: Reason
    last_held: datetime
    """The last moment at which the lease was known to be held, by this machine's wall clock."""


class LeaseState:
    """One grant in this process's hands. The module's docstring draws its states."""

    def __init__(
        self, grant: Grant, ttl: float, *, keep_alive: bool = True, now: clock.Clock = clock.now, owner: Any = None
    ) -> None:
        self.name: Final = grant.name
        self.lock: Final = grant.lock or grant.name  # the name that users know
        self.token: Final = grant.token
        """The grant's number. It is a fencing token only if it is positive."""
        self.keep_alive = keep_alive
        """Whether the keep-alive renews the lease in the background."""
        self.owner: Final = owner  # the thread or task that acquired it, and that records the leases it holds
        self._status = Status.HELD
        self._loss: Loss | None = None
        self._freed = False
        """Whether the database has nothing left to free for this grant. Only asked of a lost lease."""
        self._left_at: float | None = None
        """When a release was sent inside the user's own transaction; infinite while it is being sent."""
        self._ttl = ttl
        self._expires_at = grant.expires_at
        self._trusted_until = grant.trusted_until
        self.sent_at = grant.sent_at
        """When the request was sent from which the trust window is counted."""
        self.retry_at = 0.0
        """When to repeat the last renewal, which failed; 0 if it did not."""
        self._unreachable = False
        self._presence = grant.presence
        self._last_held = clock.wall(now, grant.sent_at)
        self.now = now  # the clock on which the trust window is counted
        self._process = os.getpid()
        # Reentrant, because a finalizer may run in the middle of any transition and start another one.
        self._lock = threading.RLock()
        self._endings: list[Callable[[], object]] = []
        self._in_hand: weakref.ref[object] | None = None

    # What its readers see.

    @property
    def status(self) -> Status:
        """The status as of the last event. It lags behind the clock until `lost` or `lost_by_clock` is called."""
        return self._status

    @property
    def over(self) -> bool:
        """Whether the holder has let go. The lease is then neither believed nor called lost on suspicion."""
        status = self._status
        return status is Status.RELEASING or status is Status.RELEASED

    @property
    def loss(self) -> Loss | None:
        """How the lease was lost, as of the last event; None if it was not."""
        return self._loss

    @property
    def ended(self) -> bool:
        """Whether the lease is over or lost, as of the last event."""
        status = self._status  # read once: another thread may change it from LEAVING back to HELD
        return status is not Status.HELD and status is not Status.LEAVING

    @property
    def settled(self) -> bool:
        """Whether the database has replied to a release of this grant, so that nothing is left to free."""
        return self._status is Status.RELEASED or self._freed

    @property
    def may_be_granted(self) -> bool:
        """Whether the lease was lost in doubt or on demand, and the database may still record the grant."""
        return self._loss is not None and not self._freed and self._loss.reason in (Reason.UNREACHABLE, Reason.FORCED)

    @property
    def left(self) -> bool:
        """Whether a release was sent inside the user's own transaction and is not known to have been rolled back."""
        return self._left_at is not None

    @property
    def being_left(self) -> bool:
        """Whether a release inside the user's own transaction is being sent at this moment."""
        return self._left_at == math.inf

    @property
    def ours(self) -> bool:
        """Whether this process acquired the lease. A child of that process may do nothing with it."""
        return self._process == os.getpid()

    @property
    def ttl(self) -> float:
        """The seconds for which each renewal extends the lease."""
        return self._ttl

    @property
    def trusted_until(self) -> float:
        """The end of the trust window, on the clock of `dblock._core.clock`."""
        return self._trusted_until

    @property
    def expires_at(self) -> float:
        """The deadline by the database's clock, in seconds since 1970; for people to read."""
        return self._expires_at

    @property
    def last_held(self) -> datetime:
        """The last moment at which the lease was known to be held, by this machine's wall clock."""
        return datetime.fromtimestamp(self._last_held, timezone.utc)

    @property
    def unreachable(self) -> bool:
        """Whether a renewal is due or under way and the database has not replied."""
        return self._unreachable

    @property
    def presence(self) -> Presence | None:
        """The presence that the lease is tied to: if its session ends, waiters take the lock after a short grace."""
        return self._presence

    @property
    def in_doubt(self) -> bool:
        """Whether the lease is tied to a presence that may have ended in the eyes of others."""
        presence = self._presence
        return presence is not None and not presence.stands(self.now())

    def remaining(self) -> float:
        """Return the seconds for which the lease may still be believed without asking the database."""
        # The usual case first, and cheap: callers ask this before each step of their work.
        left = self._trusted_until - self.now()
        if left > 0 and self._status is Status.HELD and not self.in_doubt and self.ours:
            return left
        gone = self.over or self.left or not self.ours or self.lost()
        return 0.0 if gone else max(0.0, self._trusted_until - self.now())

    def error(self) -> LeaseLost:
        """Return the error to raise for a lease that is no longer held."""
        loss = self._loss
        reason, last_held = (loss.reason.value, loss.last_held) if loss else ("over", self.last_held)
        return LeaseLost(self.lock, reason, last_held, self.token)

    # What time does to it.

    def lost(self) -> Loss | None:
        """Return how the lease was lost, None if it was not. Checks the clock and the presence."""
        if self.lost_by_clock() is None and self.in_doubt and not self.over and self.ours:
            # Another holder may have taken the lock. A caller that checks at this moment gets the safe reply.
            self.lose(Reason.UNREACHABLE)
        return self._loss

    def lost_by_clock(self) -> Loss | None:
        """Return how the lease was lost, None if it was not. Checks the clock alone."""
        if self.now() >= self._trusted_until and not self.ended and self.ours:
            if self.left:
                self.let_go()
            else:
                self.lose(Reason.UNREACHABLE if self._unreachable else Reason.EXPIRED)
        return self._loss

    @property
    def finished(self) -> bool:
        """Whether this process has nothing to release: the lease was released or lost, or is another process's."""
        held = self._status is Status.HELD and self.now() < self._trusted_until and self.ours  # the usual case
        return not held and (self.settled or not self.ours or (not self.over and self.lost_by_clock() is not None))

    # Events of renewal.

    def reply_awaited(self) -> None:
        """Record that a renewal is due: if the trust window ends before a reply, the reason is `unreachable`."""
        self._unreachable = True

    def reply_received(self) -> None:
        """Record that the database can be reached: if the trust window ends now, the lease has expired."""
        self._unreachable = False

    def retry_renewal(self, at: float) -> None:
        """Postpone the next renewal to this moment, because the last one failed or found the row in use."""
        self.retry_at = at

    def renewal_confirmed(self, sent_at: float, trusted_until: float, expires_at: float) -> bool:
        """Extend the lease as the database has; return False when the reply comes too late to be believed."""
        if self.ended or self.lost_by_clock():
            return False
        with self._lock:
            if self.ended:
                return False
            # A renewal never brings the deadline nearer, so of two that overlap the longer one is true.
            if trusted_until > self._trusted_until:
                self._trusted_until, self._expires_at = trusted_until, expires_at
            if sent_at > self.sent_at:
                self.sent_at, self._last_held = sent_at, clock.wall(self.now, sent_at)
            self._unreachable, self.retry_at = False, 0.0
            if self._left_at is not None and sent_at > self._left_at:
                # The database could renew it, so the transaction that released it was rolled back.
                self._leave(None)
        return True

    def renewal_refused(self, why: str) -> None:
        """End the lease for the reason that the database gave for not renewing it."""
        if self.left and why in ("released", "superseded"):
            # Released inside the user's own transaction, which has been committed since.
            self.let_go()
            self.release_confirmed()
            return
        if why != "forced":
            # A holder that was asked to release has the lock until its deadline. Else another holder may have it now.
            self._trusted_until = min(self._trusted_until, self.now())
        self.lose(Reason.FORCED if why == "released" else Reason(why))

    def change_ttl(self, ttl: float, keep_alive: bool | None = None) -> None:
        """Renew the lease for this many seconds from now on; `keep_alive` says whether in the background."""
        self._ttl, self.keep_alive = ttl, self.keep_alive if keep_alive is None else keep_alive

    def use_clock(self, now: clock.Clock) -> None:
        """Count the trust window on another clock from now on. The test kit pauses a holder in this way."""
        self.now = now

    def tie(self, presence: Presence) -> None:
        """Tie the lease to a presence, for good. Called before the database can learn of it."""
        self._presence = presence

    # Events of release.

    @contextlib.contextmanager
    def leaving(self) -> Iterator[bool]:
        """Stop believing in the lease while a request is sent that may end it. Yields True.

        If the request fails, the lease is held as before, unless it may be done: no reply says that it is not.
        """
        before = self._left_at
        self._leave(math.inf)
        try:
            yield True
        except BaseException as error:
            if isinstance(error, DblockError) and error.may_be_done:
                self.let_go()
            self._leave(before)
            raise
        self._leave(self.now())

    def leave_refused(self) -> None:
        """Hold on to the lease, because the release inside the user's own transaction has found nothing to free."""
        self._leave(None)

    def _leave(self, at: float | None) -> None:
        with self._lock:
            self._left_at = at
            if not self.ended:
                self._status = Status.HELD if at is None else Status.LEAVING

    def let_go(self) -> None:
        """Stop believing in the lease, whatever the reply to its release: a holder that lets go may not write again."""
        with self._lock:
            if not self.ended:
                self._status = Status.RELEASING
        self._in_hand = None
        self._end()

    def release_confirmed(self) -> None:
        """Record that the database has nothing left to free for this grant. A lost lease stays lost."""
        with self._lock:
            if self._status is Status.RELEASING:
                self._status = Status.RELEASED
                lease_logs.released(self.name, self.lock, self.token)
            elif self._status is Status.LOST:
                self._freed = True

    def release_refused(self, reason: Reason) -> None:
        """Mark the lease lost, because its release has found that it was no longer held under this token."""
        with self._lock:
            if self._status is Status.RELEASING:
                self._status, self._loss = Status.LOST, Loss(reason, self.last_held)
            if self._status is Status.LOST:
                self._freed = True

    # Loss, and the callbacks at the end.

    def lose(self, reason: Reason) -> None:
        """Mark the lease lost, unless it has ended."""
        with self._lock:
            if self.ended:
                return
            self._status, self._loss = Status.LOST, Loss(reason, self.last_held)
        lease_logs.lost(self.name, self.lock, self.token, reason.value)
        self._end()

    def at_end(self, ending: Callable[[], object]) -> Callable[[], None]:
        """Call `ending` once when the lease is lost or let go, now if it has ended; return a function that cancels."""
        with self._lock:
            if not self.ended:
                self._endings.append(ending)
                return lambda: self._cancel_ending(ending)
        ending()
        return lambda: None

    def release_if_forgotten(self, lease: object, abandon: Callable[[LeaseState], object]) -> None:
        """Release the grant with `abandon`, and warn, if the lease is garbage-collected before it is released.

        This uses a weak reference that is dropped on release. A finalizer of the lease would run each time, and an
        interrupt that came during it would be swallowed.
        """
        self._in_hand = weakref.ref(lease, functools.partial(_forgotten, self, abandon))

    def _cancel_ending(self, ending: Callable[[], object]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._endings.remove(ending)

    def _end(self) -> None:
        with self._lock:
            endings, self._endings = self._endings, []
        if self.owner is not None:
            self.owner.remove(self)
        for ending in endings:
            try:
                ending()
            except Exception:
                lease_logs.callback_failed(self.name)  # the others must still hear of the end


def _forgotten(state: LeaseState, abandon: Callable[[LeaseState], object], gone: object) -> None:
    # Called by the garbage collector, so it does little. The warning comes last because it may be an error.
    if state.ours and not state.over:
        abandon(state)
        if not state.left and state.loss is None and state.now() < state.trusted_until:
            warnings.warn(f"the lease of lock {state.lock!r} was never released", ResourceWarning, stacklevel=2)
