"""What this process knows of one grant: until when it may be believed, and whether and how it was lost.

Guarantee: a hold that was lost stays lost, and says so from the first moment on at which somebody else could have been
granted the lock. Nobody needs to tell it: whoever asks looks at the clock, so that a process which was stopped for a
minute finds its leases lost when it goes on, before any thread of ours has run.

A hold does no I/O. The lease in the user's hands, the keep-alive and the watch all share it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import NamedTuple

from dblock._core import clock
from dblock._core.replies import Grant
from dblock.errors import LeaseLost

logger = logging.getLogger("dblock")


class Reason(str, enum.Enum):
    """Why a lease was lost."""

    EXPIRED = "expired"
    """It ran out before it was renewed: the process was stopped, or the lease was not kept alive."""
    SUPERSEDED = "superseded"
    """The database has granted the lock to another since."""
    FORCED = "forced"
    """Somebody else took it away."""
    UNREACHABLE = "unreachable"
    """The database could not be asked until it was too late to believe in the lease."""

    def __str__(self) -> str:
        return self.value


class Loss(NamedTuple):
    """How a lease was lost."""

    reason: Reason
    last_held: datetime
    """The last moment at which it was known to be held, by this machine's wall clock."""


class LeaseState:
    """One grant in this process's hands."""

    def __init__(self, grant: Grant, ttl: float, now: Callable[[], float] = clock.now) -> None:
        self.name = grant.name
        self.token = grant.token
        """The grant's number; a fencing token only if it is positive."""
        self.ttl = ttl
        self.expires_at = grant.expires_at
        """By the database's clock, in seconds since 1970; for people to read."""
        self.trusted_until = grant.trusted_until
        self.sent_at = grant.sent_at
        """When the request was sent that this trust goes back to."""
        self.retry_at = 0.0
        """Not to be renewed again before then: the last try has failed."""
        self.unreachable = False
        """The last try to renew was not answered, or not yet."""
        self._left_at: float | None = None
        """When a release was sent inside the user's own transaction, which may be committed or rolled back."""
        self.presence = grant.presence
        """What it ends with for others, besides its time: the presence of this process, if it is tied to it."""
        self.keep_alive = True
        """Whether it is to be renewed in the background."""
        self.over = False
        """Being given back, or given back: not to be believed, and not to be called lost."""
        self.given_back = False
        """The database has said so."""
        self.loss: Loss | None = None
        self._last_held = time.time() - (now() - grant.sent_at)
        self._now = now
        self._process = os.getpid()
        # Reentrant, because a finalizer may run in the middle of anything, and ask.
        self._lock = threading.RLock()
        self._endings: list[Callable[[], object]] = []
        self._in_hand: weakref.ref[object] | None = None

    @property
    def ours(self) -> bool:
        """Whether this process acquired it; a child of that process may do nothing with it."""
        return self._process == os.getpid()

    def mind(self, lease: object, abandon: Callable[[LeaseState], object]) -> None:
        """Warn, and have the hold released, if the lease goes out of use before it is released.

        By a weak reference, which is dropped on release: a finalizer of the lease would run each time, and an interrupt
        that came during it would be swallowed.
        """
        self._in_hand = weakref.ref(lease, functools.partial(_forgotten, self, abandon))

    @property
    def last_held(self) -> datetime:
        """The last moment at which it was known to be held, by this machine's wall clock."""
        return datetime.fromtimestamp(self._last_held, timezone.utc)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Note a release inside the user's own transaction, unless it cannot be sent."""
        before, self._left_at = self._left_at, math.inf
        try:
            yield
        except BaseException:
            self._left_at = before
            raise
        self._left_at = self._now()

    def stays(self) -> None:
        """Note that a release inside the user's own transaction has found nothing to release."""
        self._left_at = None

    @property
    def being_left(self) -> bool:
        """Whether a release inside the user's own transaction is under way at this moment."""
        return self._left_at == math.inf

    @property
    def left(self) -> bool:
        """Whether a release inside the user's own transaction was sent, and is not known to have been rolled back."""
        return self._left_at is not None

    @property
    def given_up(self) -> bool:
        """Whether it was lost in doubt, or on demand, and may still be ours in the database."""
        return self.loss is not None and self.loss.reason in (Reason.UNREACHABLE, Reason.FORCED)

    def lost(self) -> Loss | None:
        """Return how it was lost, None if it was not. Looks at the clock, and at whether others see us here."""
        if self.run_out() is None and self.in_doubt and not self.over and self.ours:
            # Somebody may have taken the lock. Who asks at this moment is told what is safe.
            self.lose(Reason.UNREACHABLE)
        return self.loss

    @property
    def in_doubt(self) -> bool:
        """Whether it is tied to a presence that does not stand."""
        presence = self.presence
        return presence is not None and not presence.stands(self._now())

    def run_out(self) -> Loss | None:
        """Return how it was lost, None if it was not. Looks at the clock alone."""
        if self.loss is None and not self.over and self.ours and self._now() >= self.trusted_until:
            if self.left:
                self.finish()
            else:
                self.lose(Reason.UNREACHABLE if self.unreachable else Reason.EXPIRED)
        return self.loss

    def remaining(self) -> float:
        """Return the seconds for which it may still be believed without asking."""
        if self.over or self.left or not self.ours or self.lost():
            return 0.0
        return max(0.0, self.trusted_until - self._now())

    def confirm(self, sent_at: float, trusted_until: float, expires_at: float) -> bool:
        """Take note that the database has extended it; False when that comes too late to be believed."""
        if self.over or self.run_out():
            return False
        # A renewal never brings the deadline nearer, so of two that were under way at once the longer is true.
        if trusted_until > self.trusted_until:
            self.trusted_until, self.expires_at = trusted_until, expires_at
        if sent_at > self.sent_at:
            self.sent_at = sent_at
            self._last_held = time.time() - (self._now() - sent_at)
        self.unreachable = False
        self.retry_at = 0.0
        if self._left_at is not None and sent_at > self._left_at:
            self._left_at = None  # it could be renewed, so the transaction that released it was rolled back
        return True

    def lose(self, reason: Reason) -> None:
        """Take note that it was lost, unless it was lost or given back before."""
        loss = Loss(reason, self.last_held)
        with self._lock:
            if self.loss is not None or self.over:
                return
            self.loss = loss
        self._end()

    def miss(self, why: str) -> None:
        """Take note of the reason that the database gave for not renewing it."""
        if self.left and why in ("released", "superseded"):
            # Released inside the user's own transaction, which has been committed since.
            self.finish()
            self.given_back = True
        else:
            if why != "forced":
                # Who has been told to let go keeps the deadline; whatever else it is, the lock may be another's by now.
                self.trusted_until = min(self.trusted_until, self._now())
            self.lose(Reason.FORCED if why == "released" else Reason(why))

    def finish(self) -> None:
        """Be over: given back, whatever becomes of the call. Who lets go may not go on writing."""
        with self._lock:
            self.over = True
        self._in_hand = None
        self._end()

    def at_end(self, ending: Callable[[], object]) -> Callable[[], None]:
        """Call this once, when the hold is lost or over, at once if it is; return what takes the wish back."""
        with self._lock:
            if self.loss is None and not self.over:
                self._endings.append(ending)
                return lambda: self._forget(ending)
        ending()
        return lambda: None

    def _forget(self, ending: Callable[[], object]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._endings.remove(ending)

    def error(self) -> LeaseLost:
        """Return what to raise for a lease that is not held any more."""
        if self.loss is not None:
            return LeaseLost(self.name, self.loss.reason.value, self.loss.last_held, self.token)
        return LeaseLost(self.name, "over", self.last_held, self.token)

    def _end(self) -> None:
        with self._lock:
            endings, self._endings = self._endings, []
        for ending in endings:
            try:
                ending()
            except Exception:
                # Nobody else may go untold for it.
                logger.exception("one who wanted to know of the end of a lease could not be told")


def _forgotten(state: LeaseState, abandon: Callable[[LeaseState], object], gone: object) -> None:
    # Called by the garbage collector, so it does little; and the warning, which may be an error, comes last.
    if state.ours and not state.over:
        abandon(state)
        if not state.left and state.loss is None and state._now() < state.trusted_until:
            warnings.warn(f"the lease of lock {state.name!r} was never released", ResourceWarning, stacklevel=2)
