"""Re-entrance: one grant that its owner has acquired several times, and the leases that share it.

Guarantee: the grant is released once, with the last of its leases, in whatever order they are released. It is renewed
once, for the longest ttl that one of its leases asks for. A lease never joins a grant that is lost or released, or that
belongs to the parent of a fork.

Each lease sees the grant through a `HeldState` of its own, in the place of a `LeaseState`: after its own release the
lease is over, and a loss of the grant before that is its own loss. This module does no I/O.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from dblock._core.lease_state import LeaseState, Loss
from dblock.errors import LeaseLost

logger = logging.getLogger("dblock")


class Hold:
    """One grant, and the leases that share it."""

    def __init__(self, grant: LeaseState, claims: tuple[str, ...] = ()) -> None:
        self.grant: Final = grant
        self.claims: Final = claims
        """The resources that were claimed with the grant."""
        self.bodies: list[Any] = []
        """The leases whose `async with` is running, the innermost last. Only the event loop uses it."""
        # Reentrant, because a lease that is garbage-collected may leave in the middle of anything.
        self.lock = threading.RLock()
        self._open: list[HeldState] = []
        self._closed = False
        """Whether the last lease has begun to release the grant. No lease joins it from then on."""

    def begin(self, ttl: float, keep_alive: bool) -> HeldState:
        """Return the first lease of the grant."""
        with self.lock:
            state = HeldState(self, ttl, keep_alive)
            self._open.append(state)
        return state

    def join(self, ttl: float, keep_alive: bool) -> HeldState | None:
        """Return another lease of the grant; None if the grant is not held any more."""
        if not self.grant.ours:  # asked first: a thread of the parent may have had the lock at the fork
            return None
        with self.lock:
            if self._closed or not self.grant.remaining():
                return None
            state = self.begin(ttl, keep_alive)
            self.apply()
        return state

    def leave(self, state: HeldState, *, close: bool) -> bool:
        """Take a lease out, unless it is the last one, which closes the hold if `close` is set."""
        with self.lock:
            if self._open == [state]:
                self._closed = self._closed or close
                return False
            self._open.remove(state)
            self.apply()
            return True

    def rejoin(self, state: HeldState) -> bool:
        """Take a lease in again that has left, unless the hold is closed."""
        with self.lock:
            if not self._closed:
                self._open.append(state)
                self.apply()
            return not self._closed

    def apply(self) -> None:
        """Renew the grant for the longest ttl of its leases, in the background if one of them asks for it."""
        self.grant.change_ttl(
            max(state.own_ttl for state in self._open), any(state.own_keep_alive for state in self._open)
        )


class HeldState:
    """A grant as one of its leases sees it. What is not defined here is that of the grant."""

    def __init__(self, hold: Hold, ttl: float, keep_alive: bool) -> None:
        self.hold: Final = hold
        self.grant: Final = hold.grant
        self.own_ttl = ttl
        self.own_keep_alive: Final = keep_alive
        self._gone = False
        """Whether this lease has ended before the grant."""
        self._loss: Loss | None = None
        """How the grant was lost, if this lease has ended after that."""
        self._endings: list[Callable[[], object]] = []
        self._in_hand: weakref.ref[object] | None = None
        self._unsubscribe = self.grant.at_end(self._end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grant, name)

    # What its readers see.

    @property
    def over(self) -> bool:
        """Whether this lease was released."""
        return self._loss is None if self._gone else self.grant.over

    @property
    def loss(self) -> Loss | None:
        """How the lease was lost, as of the last event; None if it was not."""
        return self._loss if self._gone else self.grant.loss

    @property
    def ended(self) -> bool:
        """Whether the lease is over or lost, as of the last event."""
        return self._gone or self.grant.ended

    @property
    def settled(self) -> bool:
        """Whether this lease has nothing left to release."""
        return self._gone or self.grant.settled

    @property
    def finished(self) -> bool:
        """Whether this process has nothing to release for this lease. Checks the clock."""
        return self._gone or self.grant.finished

    def remaining(self) -> float:
        """Return the seconds for which the lease may still be believed without asking the database."""
        return 0.0 if self._gone else self.grant.remaining()

    def lost(self) -> Loss | None:
        """Return how the lease was lost, None if it was not. Checks the clock and the presence."""
        return self._loss if self._gone else self.grant.lost()

    def lost_by_clock(self) -> Loss | None:
        """Return how the lease was lost, None if it was not. Checks the clock alone."""
        return self._loss if self._gone else self.grant.lost_by_clock()

    def error(self) -> LeaseLost:
        """Return the error to raise for a lease that is no longer held."""
        if self._gone and self._loss is None:
            return LeaseLost(self.grant.lock, "over", self.grant.last_held, self.grant.token)
        return self.grant.error()

    # Events.

    def change_ttl(self, ttl: float) -> None:
        """Renew the grant for this many seconds from now on, or for longer if another of its leases asks for it."""
        with self.hold.lock:
            if ttl != self.grant.ttl:
                self.own_ttl = ttl
            if not self._gone:
                self.hold.apply()

    def leave(self) -> bool | None:
        """End this lease and return whether it was held; None if it is the last one, which must release the grant."""
        if not self.grant.ours:
            return None
        with self.hold.lock:
            if self._gone:
                return False
            loss = self.grant.lost()
            if not self.hold.leave(self, close=True):
                return None
            self._gone, self._loss, self._in_hand = True, loss, None
            held = self.grant.remaining() > 0
        self._end()
        return held

    @contextlib.contextmanager
    def leaving(self) -> Iterator[bool]:
        """End this lease while a statement is sent inside the user's own transaction.

        Yields whether it is the last one, so that the statement must release the grant. If the statement fails, the
        lease is held as before. After a commit and after a rollback, a lease that was not the last one is over.
        """
        with contextlib.ExitStack() as stack:
            with self.hold.lock:
                last = not self.hold.leave(self, close=False)
                if last:
                    stack.enter_context(self.grant.leaving())
                self._gone = not last
            try:
                yield last
            except BaseException:
                self._come_back()
                raise
        if not last:
            self._in_hand = None
            self._end()

    def leave_refused(self) -> None:
        """Hold on to the lease, because the statement inside the user's own transaction has not found it held."""
        self._come_back()
        self.grant.leave_refused()

    def _come_back(self) -> None:
        with self.hold.lock:
            if self._gone:
                self._gone = not self.hold.rejoin(self)

    def let_go(self) -> None:
        """Stop believing in the grant, because its last lease is released."""
        self._in_hand = None
        self.grant.let_go()

    # The callbacks at the end.

    def at_end(self, ending: Callable[[], object]) -> Callable[[], None]:
        """Call `ending` once when this lease is lost or ends, now if it has; return a function that cancels."""
        with self.hold.lock:
            if not self.ended:
                self._endings.append(ending)
                return lambda: self._cancel_ending(ending)
        ending()
        return lambda: None

    def release_if_forgotten(self, lease: object, abandon: Callable[[LeaseState], object]) -> None:
        """Release this lease, and warn, if it is garbage-collected before it is released."""
        self._in_hand = weakref.ref(lease, functools.partial(_forgotten, self, abandon))

    def _cancel_ending(self, ending: Callable[[], object]) -> None:
        with self.hold.lock, contextlib.suppress(ValueError):
            self._endings.remove(ending)

    def _end(self) -> None:
        with self.hold.lock:
            endings, self._endings = self._endings, []
        if self._gone:
            self._unsubscribe()
        for ending in endings:
            try:
                ending()
            except Exception:
                # The others must still hear of the end.
                logger.exception("callback at the end of a lease failed (lock %r)", self.grant.lock)


def _forgotten(state: HeldState, abandon: Callable[[LeaseState], object], gone: object) -> None:
    # Called by the garbage collector, so it does little. The warning comes last because it may be an error.
    grant = state.grant
    if grant.ours and not state.settled and not state.over:
        held = grant.loss is None and not grant.left and grant.remaining() > 0
        if state.leave() is None:
            abandon(grant)
        if held:
            warnings.warn(f"the lease of lock {grant.lock!r} was never released", ResourceWarning, stacklevel=2)
