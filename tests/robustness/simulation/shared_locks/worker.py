"""One thread of a process that uses read-write locks and semaphores, by the shipped flows.

A writer may become a reader, as dblock.shared.WriteLease.downgrade does it. A caller that asks for another number of
permits than the semaphore has learns the number and asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dblock._core.effects import Flow, Sleep
from dblock._core.lease_state import LeaseState
from dblock._core.replies import Grant
from dblock._core.shared_acquire import SharedOptions
from dblock.errors import DblockError, InvalidArgument, PermitsDiffer
from dblock.shared import _WriteLease
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.process import Cancelled
from tests.robustness.simulation.shared_locks.checks import SharedChecks
from tests.robustness.simulation.worker import Errand, Lease, Worker, may_be_granted
from tests.robustness.simulation.world import Violation


@dataclass
class SharedErrand(Errand):
    """One shared lock to acquire, and what to do with it."""

    downgrades: bool = False


class WriteLease(_WriteLease, Lease):
    """A writer's lease that this thread holds."""

    def __init__(self, client: Client, state: LeaseState) -> None:
        super().__init__(client, state)
        self._runtime = client

    def _begin_reading(self, grant: Grant) -> LeaseState:
        before, client = self.state, self._runtime
        state = LeaseState(grant, before.ttl, keep_alive=before.keep_alive, now=client.clock)
        client.track(state)
        return state


class SharedWorker(Worker):
    """A thread with a list of errands for shared locks."""

    def __init__(
        self,
        client: Client,
        name: str,
        errands: list[SharedErrand],
        checks: SharedChecks,
        write: Callable[[Client, str, int, int], object],
    ) -> None:
        self._checks = checks
        super().__init__(client, name, list(errands), self._ask, checks.holds, write, checks.released)

    def _ask(self, attempt: str, options: Any) -> None:
        self._checks.asks(attempt, options)
        self._checks.askers[attempt] = self.client

    def _acquire(self, errand: Errand) -> Flow[Lease | None]:
        try:
            return (yield from super()._acquire(errand))
        except PermitsDiffer as error:
            self._checks.count("permits differ")
            assert isinstance(errand.options, SharedOptions)
            errand.options = replace(errand.options, permits=error.permits)
            return (yield from super()._acquire(errand))
        except InvalidArgument as error:
            raise Violation("unexpected", f"{self.thread}: a request that was right is refused: {error}") from error

    def _use(self, errand: Errand, lease: Lease) -> Flow[None]:
        assert isinstance(errand, SharedErrand)
        assert isinstance(errand.options, SharedOptions)
        state = lease.state
        resource = f"behind {state.name}"
        yield from super()._use(replace(errand, resource="" if errand.options.mode == "read" else resource), lease)
        if not errand.downgrades or state.lost() or state.over:
            return
        writer = WriteLease(self.client, state)
        attempt = self.client.world.name()
        self._ask(attempt, errand.options)
        if self.client.world.tracing:
            self._say(f"{state.name}: downgrades token {state.token}")
        try:
            writer.raise_if_lost()
            reading = writer._begin_reading((yield from writer._downgrading(attempt)))
        except (DblockError, Cancelled) as error:
            if may_be_granted(self.client, attempt, error):
                with self.client.deferring(state.lock, attempt):
                    yield from writer._give_back(attempt)
            # The lease is held as before, or over, and is not released at once.
            yield Sleep(0.05 if self.hurries else errand.holds_for)
            raise
        self.client.keepalive.discard(state)
        self._checks.downgraded(state, reading)
        self._held(self.client, reading)
        self._lease = Lease(self.client, reading)
        yield Sleep(0.05 if self.hurries else errand.holds_for)
