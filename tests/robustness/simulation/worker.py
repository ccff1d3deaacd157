"""One thread of a process: what it does with locks, one thing after the other.

It acquires as dblock.lock does and releases as dblock.lease does, by their own flows, and in between writes to the
resource that the lock protects. It may time out, leave, renew by hand, forget its lease, or hold the lock for too long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dblock._core.effects import Flow, Sleep
from dblock._core.lease_flows import LeaseFlows
from dblock._core.lease_state import LeaseState
from dblock._core.options import LockOptions, lock_options
from dblock._runtime.owners import caller
from dblock.errors import DatabaseError, DblockError, LeaseLost
from dblock.lease import _LeaseBase
from dblock.lock import _LockBase, _may_be_granted
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.process import Cancelled, Task
from tests.robustness.simulation.world import short


@dataclass
class Errand:
    """One lock to acquire, and what to do with it."""

    options: LockOptions
    timeout: float | None
    tries_once: bool
    holds_for: float
    writes: int
    renews: bool
    forgets: bool
    """Whether the lease is not released but garbage-collected."""
    resource: str
    lingers: float = 0.0
    """The part of that time for which it then keeps the lock without checking its lease."""


class Lease(_LeaseBase):
    """A lease that this thread holds."""

    def __init__(self, client: Client, state: LeaseState) -> None:
        # Without a finalizer, whose moment Python would choose. An errand that forgets abandons the lease.
        self._state = self.state = state
        self._flows = LeaseFlows(client.flows, state)


class Worker:
    """A thread with a list of errands."""

    def __init__(
        self,
        client: Client,
        name: str,
        errands: list[Errand],
        asks: Callable[[str, LockOptions], object],
        held: Callable[[Client, LeaseState], object],
        write: Callable[[Client, str, int, int], object],
        released: Callable[[Client, LeaseState, float], object],
    ) -> None:
        self.client = client
        self.thread = name
        self.waits_since: float | None = None
        """Since when it has waited for a lock."""
        self.hurries = False
        """Whether it ends with the errand under way."""
        self.done = False
        self._errands = errands
        self._asks = asks
        self._held = held
        self._write = write
        self._released = released
        self._locks: dict[LockOptions, _LockBase[Any]] = {}
        self._lease: Lease
        self._task = Task(client, self._going(), self._ended)

    def cancel(self) -> None:
        """Make it leave whatever it waits for."""
        self._task.cancel()

    def _say(self, what: str) -> None:
        self.client.world.say(self.thread, what)

    def _ended(self, result: Any) -> None:
        if isinstance(result, BaseException) and not isinstance(result, Cancelled):
            raise result
        self.done = True

    def _going(self) -> Flow[None]:
        world = self.client.world
        for errand in self._errands:
            yield Sleep(world.random.uniform(0, 0.4))
            if self.hurries:
                break
            try:
                yield from self._run(errand)
            except (DblockError, Cancelled) as error:
                if world.tracing:
                    self._say(f"{errand.options.name}: {type(error).__name__} {getattr(error, 'reason', '')}")
            self.waits_since = None

    def _run(self, errand: Errand) -> Flow[None]:
        lease = yield from self._acquire(errand)
        self.waits_since = None
        if lease is None:
            return
        self._lease = lease
        try:
            yield from self._use(errand, lease)
        except (DblockError, Cancelled):
            yield from self._release(self._lease)
            raise
        if errand.forgets:
            self.client.keepalive.abandon(self._lease.state)
        else:
            yield from self._release(self._lease)

    def _acquire(self, errand: Errand) -> Flow[Lease | None]:
        client, options = self.client, errand.options
        attempt = client.world.name()
        self._asks(attempt, options)
        self.waits_since = client.world.now
        lock = self._locks.setdefault(options, _LockBase(client, options, Lease))  # type: ignore[arg-type]
        if client.world.tracing:
            self._say(f"{options.name}: wants it, attempt {short(attempt)}, timeout {errand.timeout}")
        try:
            if errand.tries_once:
                grant = yield from client.flows.try_acquire(options, attempt)
            else:
                grant = yield from lock._acquiring(errand.timeout, attempt, caller())
            if grant is None:
                return None
            state = LeaseState(grant, options.ttl, keep_alive=options.keep_alive, now=client.clock)
            client.track(state)
        except (DblockError, Cancelled) as error:
            if may_be_granted(client, attempt, error):
                with client.deferring(options.name, attempt):
                    yield from client.flows.abandon(options.name, attempt)
            raise
        if client.world.tracing:
            self._say(f"{options.name}: has it under token {state.token} for {state.remaining():.4f} s")
        self._held(client, state)
        return Lease(client, state)

    def _use(self, errand: Errand, lease: Lease) -> Flow[None]:
        state = lease.state
        for number in range(1, errand.writes + 1):
            yield Sleep(min(errand.holds_for, 0.1 if self.hurries else errand.holds_for) / errand.writes)
            lease.raise_if_lost()
            self._write(self.client, errand.resource, state.token, number)
            if errand.renews and number == 1:
                try:
                    yield from lease._flows.renew(None)
                except DatabaseError as error:
                    if self.client.world.tracing:
                        self._say(f"{state.name}: could not renew: {error}")
                except LeaseLost:
                    return
        # Then it keeps the lock and writes nothing, and does not check the lease before the release.
        yield Sleep(0.0 if self.hurries else errand.holds_for * errand.lingers)

    def _release(self, lease: Lease) -> Flow[None]:
        """Release the lock, as ThreadLease.release does."""
        state, keeper = lease.state, self.client.keepalive
        since = self.client.world.now
        try:
            released = lease._flows.release_without_asking(keeper.abandon)
            if released is None:
                released = yield from lease._flows.release()
        except (DblockError, Cancelled):
            keeper.abandon(state)
            raise
        finally:
            keeper.discard(state)
        if released:
            self._released(self.client, state, since)
        if self.client.world.tracing:
            lost = f", lost: {state.loss.reason}" if state.loss else ""
            self._say(f"{state.name}: let go of token {state.token}, {'released' if released else 'not held'}{lost}")


def may_be_granted(client: Client, attempt: str, error: BaseException) -> bool:
    """Return whether dblock says that a request that failed may have been granted. If not, it must not have been."""
    may_be = _may_be_granted(error)
    if not may_be:
        client.on_refusal(attempt)
    return may_be


def wanted(name: str, ttl: float, timeout: float | None, **options: Any) -> LockOptions:
    """Return the options of a lock."""
    return lock_options(name, ttl, timeout, None, **options)
