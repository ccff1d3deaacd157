"""What a client reports to its observers: waits, holds, renewals and the state of the listener.

Guarantee: an observer changes nothing. If an observer raises an error, the client logs the error and continues. A
client without observers pays for one comparison for each event.

A wait is one call of `acquire` or `try_acquire`. It begins in the thread or task of the caller and ends there, so an
observer finds the caller's context. A hold is one grant from its arrival in this process to its end. It begins in the
caller's thread or task, and may end in any thread of the client.

This process only reports what it knows itself. If a lease expires while no part of the process checks it, the loss is
reported at the next check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dblock._core.effects import Flow, T, Wait
from dblock._core.lease_state import LeaseState
from dblock._core.options import brief
from dblock.errors import DeadlockDetected, InvalidArgument

logger = logging.getLogger("dblock")

OUTCOMES = ("granted", "busy", "timeout", "deadlock", "cancelled", "error")
"""How a wait ends: `busy` is a `try_acquire` that found the lock held, `cancelled` a caller that stopped waiting."""


class ObservedWait:
    """One call for a lock, or for several, from its beginning to its outcome."""

    def __init__(self, locks: tuple[str, ...], holder: str, began: float) -> None:
        self.locks = locks
        """The names of the requested locks: one, unless the call is for several."""
        self.holder = holder
        """The name under which others see this client."""
        self.began = began
        """When the wait began, on the clock of `dblock.monotonic()`."""
        self.seconds = 0.0
        """How long the wait took. 0 until it has ended."""
        self.outcome: str | None = None
        """One of `granted`, `busy`, `timeout`, `deadlock`, `cancelled` and `error`. None during the wait."""
        self.token: int | None = None
        """The fencing token, if one lock was granted under one."""
        self.handoff: float | None = None
        """Seconds from the last wake-up to the grant, if the caller had to queue."""
        self.error: BaseException | None = None


class ObservedHold:
    """One grant from its arrival in this process to its end."""

    def __init__(self, lock: str, token: int | None, holder: str, began: float) -> None:
        self.lock = lock
        self.token = token
        """The fencing token; None for an efficiency lock."""
        self.holder = holder
        self.began = began
        self.seconds = 0.0
        """How long the lock was held. 0 until the hold has ended."""
        self.lost: str | None = None
        """Why the lease was lost: expired, superseded, forced or unreachable. None if it was released."""


class Observer:
    """Receives what a client reports. Override the methods that you need. Each of them must return quickly.

    Threads of the program and of the client call these methods, several at a time.
    """

    def wait_began(self, wait: ObservedWait) -> None:
        """Receive a wait that begins. Called in the caller's thread or task."""

    def wait_ended(self, wait: ObservedWait) -> None:
        """Receive a wait with its outcome. Called in the caller's thread or task."""

    def hold_began(self, hold: ObservedHold) -> None:
        """Receive a hold that begins. Called in the caller's thread or task, after the end of its wait."""

    def hold_ended(self, hold: ObservedHold) -> None:
        """Receive a hold whose lease was released or lost. Called in any thread."""

    def renewed(self, seconds: float, margins: Sequence[float]) -> None:
        """Receive a renewal: the seconds until the reply, and for each lease the part of its ttl that was left."""

    def listener_changed(self, client: str, up: bool | None) -> None:
        """Receive whether the listener of this client is connected. None if it needs no connection."""


class Observation:
    """Reports the events of one client to its observers."""

    def __init__(self, observers: Iterable[Observer], holder: Callable[[], str], clock: Callable[[], float]) -> None:
        self._observers = tuple(observers) if isinstance(observers, Iterable) else ()
        if not self._observers or not all(isinstance(one, Observer) for one in self._observers):
            raise InvalidArgument(f"observers is a list of dblock.observability.Observer; got {brief(observers)}.")
        self._holder = holder
        self._clock = clock
        self._holds: dict[LeaseState, ObservedHold] = {}
        self._released: dict[LeaseState, float | None] = {}
        """The leases whose release is under way, each with the moment at which its holder stopped using it."""
        self._listeners: dict[str, bool] = {}
        """Whether the listener is connected, by the client's name in the queues. A fork changes that name."""

    def wait(self, locks: tuple[str, ...], flow: Flow[T], *, missed: str = "timeout", all_of: bool = False) -> Flow[T]:
        """Perform a flow that acquires locks, and report how it ends. `missed` is its outcome without a grant.

        The flow returns a grant or None. With `all_of` it returns the name of a lock that it did not get, or None.
        """
        wait = ObservedWait(locks, self._holder(), self._clock())
        self._tell("wait_began", wait)
        woken_at: float | None = None
        try:
            effect = next(flow)
            while True:
                try:
                    result = yield effect
                except BaseException as error:
                    effect = flow.throw(error)
                else:
                    if isinstance(effect, Wait):
                        woken_at = self._clock()
                    effect = flow.send(result)
        except StopIteration as done:
            value: T = done.value
            self._conclude(wait, value, missed if (value is None) is not all_of else "granted", woken_at)
            return value
        except BaseException as error:
            wait.error = error
            wait.outcome = _outcome_of(error)
            wait.seconds = self._clock() - wait.began
            self._tell("wait_ended", wait)
            raise

    def _conclude(self, wait: ObservedWait, value: Any, outcome: str, woken_at: float | None) -> None:
        now = self._clock()
        wait.outcome, wait.seconds = outcome, now - wait.began
        if outcome == "granted":
            token = getattr(value, "token", 0)
            wait.token = token if token > 0 else None
            wait.handoff = None if woken_at is None else now - woken_at
        self._tell("wait_ended", wait)

    def hold(self, state: LeaseState) -> None:
        """Report a new lease now, and its end when it ends."""
        token = state.token if state.token > 0 else None
        hold = self._holds[state] = ObservedHold(state.lock, token, self._holder(), self._clock())
        self._tell("hold_began", hold)
        state.at_end(lambda: self._let_go(state))

    def hold_seen(self, lock: str, token: int, seconds: float) -> None:
        """Report the end of a hold that may have begun in another process."""
        hold = ObservedHold(lock, token if token > 0 else None, self._holder(), self._clock() - seconds)
        hold.seconds = seconds
        self._tell("hold_ended", hold)

    def _let_go(self, state: LeaseState) -> None:
        if state in self._released and state.loss is None:
            self._released[state] = self._clock()  # the reply decides whether it was lost
        else:
            self._end(state, self._clock())

    def release(self, states: Sequence[LeaseState], flow: Flow[T]) -> Flow[T]:
        """Perform a flow that releases leases, and report whether each was still held."""
        for state in states:
            self._released[state] = None
        try:
            return (yield from flow)
        finally:
            for state in states:
                let_go_at = self._released.pop(state, None)
                if state.ended:
                    self._end(state, let_go_at or self._clock())

    def _end(self, state: LeaseState, at: float) -> None:
        hold = self._holds.pop(state, None)
        if hold is not None:
            hold.seconds = at - hold.began
            hold.lost = state.loss.reason.value if state.loss else None
            self._tell("hold_ended", hold)

    def renewed(self, seconds: float, margins: Sequence[float]) -> None:
        """Report that renewals got a reply."""
        self._tell("renewed", seconds, margins)

    def listener_changed(self, client: str, up: bool | None) -> None:
        """Report whether the listener is connected, if that has changed. None if it needs no connection."""
        if self._listeners.get(client) is not up:
            if up is None:
                del self._listeners[client]
            else:
                self._listeners[client] = up
            self._tell("listener_changed", client, up)

    def _tell(self, event: str, *args: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, event)(*args)
            except Exception:
                logger.exception("observer: %s of %r failed", event, type(observer).__name__)


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, DeadlockDetected):
        return "deadlock"
    # All other exceptions end the caller's wait: KeyboardInterrupt, GeneratorExit, the cancellation of a task.
    return "error" if isinstance(error, Exception) else "cancelled"
