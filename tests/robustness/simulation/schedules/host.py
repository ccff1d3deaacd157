"""A host of a schedule in a simulated process: it calls a scheduled function again and again.

The decisions are dblock's own code: the flows of dblock._core.slots, and the pauses of Schedule.run. This module
performs their effects, as Slots and Schedule do for threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dblock._core.effects import Flow, Sleep
from dblock._core.lease_state import LeaseState
from dblock._core.slots import Claim, Definition, SlotFlows
from dblock.errors import DatabaseError, DblockError, LeaseLost
from dblock.recipes.schedules.schedule import LONGEST_WAIT, _pause
from dblock.testing.database.schedules.slots import SECOND
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.process import Cancelled, Task
from tests.robustness.simulation.schedules.checks import SlotChecks
from tests.robustness.simulation.worker import Lease, may_be_granted
from tests.robustness.simulation.world import BodyFailed


class Host:
    """A thread that runs what is due."""

    def __init__(
        self,
        client: Client,
        name: str,
        definition: Definition,
        lasts: Callable[[], float],
        fails: float,
        checks: SlotChecks,
        write: Callable[[Client, str, int, int], object],
        until: float | None = None,
    ) -> None:
        """`lasts` returns how long a body lasts, `fails` is the share of bodies that fail.

        With `until`, the host ends when a slot after that moment is decided.
        """
        self.client = client
        self.thread = name
        self.hurries = False
        """Whether it ends with the call under way."""
        self.done = False
        self._lasts = lasts
        self._fails = fails
        self._checks = checks
        self._write = write
        self._until = until
        self._flows = SlotFlows(client.flows, definition)
        self._definition = definition
        self._task = Task(client, self._going(), self._ended)

    def cancel(self) -> None:
        """Make it leave whatever it waits for."""
        self._task.cancel()

    def _say(self, what: str) -> None:
        if self.client.world.tracing:
            self.client.world.say(self.thread, what)

    def _ended(self, result: Any) -> None:
        if isinstance(result, BaseException) and not isinstance(result, Cancelled):
            raise result
        self.done = True

    def _going(self) -> Flow[None]:
        """Call the function at each of its slots, as Schedule.run does. A call that is cancelled is followed by one."""
        yield Sleep(self.client.world.random.uniform(0, 0.4))
        while not self.hurries:
            try:
                claim = yield from self._call()
                wait = _pause(self._definition, claim)
                if self._until is not None and claim.slot is not None and claim.slot.timestamp() > self._until:
                    return
            except (DblockError, BodyFailed, Cancelled) as error:
                self._say(f"{type(error).__name__} {getattr(error, 'reason', '')}")
                wait = LONGEST_WAIT if isinstance(error, DatabaseError) else 0.0
            yield Sleep(wait)

    def _call(self) -> Flow[Claim]:
        while True:
            claim, lease = yield from self._claim()
            if lease is None or claim.slot is None:
                return claim
            yield from self._perform(claim, round(claim.slot.timestamp() * SECOND), lease)
            if self._definition.catch_up != "all" or self.hurries:
                return claim

    def _claim(self) -> Flow[tuple[Claim, Lease | None]]:
        client, one = self.client, self._definition
        attempt = client.world.name()
        try:
            claim = yield from self._flows.claim(attempt)
            if claim.grant is None:
                return claim, None
            state = LeaseState(claim.grant, one.ttl, keep_alive=one.keep_alive, now=client.clock)
            client.track(state)
        except (DblockError, Cancelled) as error:
            if may_be_granted(client, attempt, error):
                with client.deferring(f"once:{one.name}", attempt):
                    yield from self._flows.abandon(attempt)
            raise
        self._checks.holds(client, state)
        return claim, Lease(client, state)

    def _perform(self, claim: Claim, slot: int, lease: Lease) -> Flow[None]:
        """Run the function and report its end, as Schedule._perform does."""
        state = lease.state
        self._say(f"runs slot {slot}, run {claim.number}, under token {state.token}")
        try:
            try:
                yield from self._body(slot, claim.number, lease)
            except (DblockError, BodyFailed, Cancelled):
                if not state.lost():
                    try:
                        yield from self._end(lease, "failed")
                    except DblockError as error:
                        self._say(f"its failure could not be recorded: {error}")
                raise
            if (yield from self._end(lease, "succeeded")) is None:
                raise LeaseLost(state.name, "expired", state.last_held, state.token)
        except (DblockError, BodyFailed, Cancelled) as error:
            yield from self._leave(lease, error)
            raise
        yield from self._leave(lease, None)

    def _body(self, slot: int, number: int, lease: Lease) -> Flow[None]:
        self._checks.started(slot, number, lease.state.token)
        seconds = self._lasts()
        for write in (1, 2):
            yield Sleep(min(seconds, 0.1) / 2 if self.hurries else seconds / 2)
            lease.raise_if_lost()
            self._write(self.client, f"behind {lease.state.name}", lease.state.token, write)
        if self.client.world.chance(self._fails):
            raise BodyFailed
        self._checks.finished(lease.state.token)

    def _end(self, lease: Lease, outcome: str) -> Flow[str | None]:
        state = lease.state
        try:
            recorded = yield from self._flows.end(state, outcome)
        finally:
            if state.settled:
                self.client.keepalive.discard(state)
        self._checks.reported(state.token, recorded)
        self._say(f"reports {outcome} under {state.token}: {recorded}")
        return recorded

    def _leave(self, lease: Lease, error: BaseException | None) -> Flow[None]:
        """Release the lock if the end could not be reported, as ThreadLease.__exit__ does."""
        state, keeper = lease.state, self.client.keepalive
        if state.settled:
            return
        since = self.client.world.now
        try:
            released = lease._flows.release_without_asking(keeper.abandon)
            if released is None:
                released = yield from lease._flows.release()
        except (DblockError, Cancelled) as problem:
            keeper.abandon(state)
            if error is None or not isinstance(problem, DatabaseError):
                raise
        else:
            if released:
                self._checks.released(self.client, state, since)
        finally:
            keeper.discard(state)
