"""A candidate of an election in a simulated process: it campaigns again and again, and leads.

Every decision is dblock's own code: the campaign of dblock.recipes.elections.flows, the persistence of `run`, and what
both kinds of election and term share. This module performs their effects, as Election and Term do for threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dblock._core.effects import Flow, Sleep, Wait
from dblock._core.lease_state import LeaseState
from dblock._runtime.owners import caller
from dblock.errors import DatabaseError, DblockError, LockTimeout
from dblock.lock import _LockBase
from dblock.recipes.elections.base import WATCH_INTERVAL, ElectionBase
from dblock.recipes.elections.flows import Abandon, Acquire
from dblock.recipes.elections.persistence import Body, Campaign, Outcome, Pause, Stopped
from dblock.recipes.elections.records import ElectionOptions
from dblock.recipes.elections.term import _TermBase
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.elections.checks import TermChecks
from tests.robustness.simulation.process import Cancelled, Task, performed
from tests.robustness.simulation.worker import Lease, may_be_granted
from tests.robustness.simulation.world import BodyFailed, short


@dataclass
class Mandate:
    """What a candidate does with its terms, until one of its bodies returns by itself."""

    leads_for: float
    writes: int
    fails: bool
    stubborn: bool
    """Whether a body continues when it is asked to end, until its lease is over."""
    resource: str


class Term(_TermBase):
    """A term of a simulated candidate."""

    def __init__(self, candidate: Any, lease: Lease) -> None:
        super().__init__(candidate, lease)
        self.ending = False
        self.over = False

    def _ask_to_end(self, reason: str) -> None:
        if not self.ending:
            self._stop_renewing(reason)
            self.ending = True


class Candidate(ElectionBase[Any]):
    """A thread that is a candidate, with a list of mandates."""

    def __init__(
        self,
        client: Client,
        name: str,
        options: ElectionOptions,
        mandates: list[Mandate],
        checks: TermChecks,
        write: Callable[[Client, str, int, int], object],
    ) -> None:
        super().__init__(client, options)
        self.client = client
        self.thread = name
        self.hurries = False
        """Whether it ends with the mandate under way."""
        self.done = False
        self._mandates = mandates
        self._mandate = mandates[0]
        self._checks = checks
        self._write = write
        self._lock: _LockBase[Any] = _LockBase(client, options.lock, Lease)  # type: ignore[arg-type]
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
        for mandate in self._mandates:
            yield Sleep(self.client.world.random.uniform(0, 0.4))
            if self.hurries or self._stopping:
                break
            self._mandate = mandate
            try:
                yield from performed(self._persist(), self._perform_run)
            except (DblockError, Cancelled) as error:
                self._say(f"{self.name}: {type(error).__name__}")

    def _perform_run(self, effect: Any) -> Flow[Any]:
        if isinstance(effect, Campaign):
            return (yield from self._campaign(effect.stepped_back))
        if isinstance(effect, Body):
            return (yield from self._run_body(effect.term))
        assert isinstance(effect, Pause)
        yield Sleep(effect.seconds)
        return None

    # Campaigning.

    def _campaign(self, stepped_back: bool) -> Flow[Term]:
        self._enter_campaign()
        try:
            self._check_stopped()
            lease: Lease = yield from performed(self._flows.campaign(None, stepped_back), self._perform)
            self._term = term = Term(self, lease)
        except (DblockError, Stopped, Cancelled):
            self._campaigning.release()
            raise
        self._say(f"{self.name}: leads under token {term.token}")
        self._checks.leads(self.client, lease.state)
        if self._stopping:
            term._ask_to_end("stop")
        return term

    def _perform(self, effect: Any) -> Flow[Any]:
        if isinstance(effect, Acquire):
            return (yield from self._acquire(effect.attempt, effect.timeout))
        if isinstance(effect, Abandon):
            return self._abandon(effect.lease)
        return (yield effect)

    def _perform_waiting(self, effect: Any) -> Flow[Any]:
        if not isinstance(effect, Wait):
            return (yield effect)
        self._waiter = effect.waiter
        try:
            self._check_stopped()
            yield effect
            return self._check_stopped()
        finally:
            self._waiter = None

    def _acquire(self, attempt: str, timeout: float | None) -> Flow[Lease]:
        client, options = self.client, self._options.lock
        self._checks.asks(attempt, options)
        self._say(f"{self.name}: campaigns, attempt {short(attempt)}")
        try:
            grant = yield from performed(self._lock._acquiring(timeout, attempt, caller()), self._perform_waiting)
            if grant is None:
                raise LockTimeout(options.name, timeout or 0.0)
            state = LeaseState(grant, options.ttl, keep_alive=options.keep_alive, now=client.clock)
            client.track(state)
        except (DblockError, Stopped, Cancelled) as error:
            if may_be_granted(client, attempt, error):
                with client.deferring(options.name, attempt):
                    yield from client.flows.abandon(options.name, attempt)
            raise
        return Lease(client, state)

    # Leading.

    def _run_body(self, term: Term) -> Flow[Outcome]:
        outcome: Outcome | None = None
        try:
            Task(self.client, self._watch(term))
            try:
                yield from self._body(term)
                outcome = Outcome(by_itself=term.ending_reason is None and term.remaining() > 0)
            except (DblockError, BodyFailed, Cancelled) as error:
                yield from self._leave(term, error)
                raise
            yield from self._leave(term, None)
        except (DblockError, BodyFailed) as error:
            return outcome or self._outcome(term, error)
        return outcome

    def _body(self, term: Term) -> Flow[None]:
        mandate = self._mandate
        for number in range(1, mandate.writes + 1):
            yield Sleep(min(mandate.leads_for, 0.1 if self.hurries else mandate.leads_for) / mandate.writes)
            if term.ending and not mandate.stubborn:
                return
            term.raise_if_lost()
            self._write(self.client, mandate.resource, term.token, number)
            if mandate.fails and not self.hurries:
                raise BodyFailed
        while mandate.stubborn and not self.hurries and term.remaining():
            yield Sleep(0.1)

    def _leave(self, term: Term, error: BaseException | None) -> Flow[None]:
        """End a term, as Term.__exit__ does."""
        lease, state, keeper = term._lease, term._state, self.client.keepalive
        term._warn_if_ignored()
        term._decide_how(error)
        since = self.client.world.now
        try:
            if not state.settled:
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
                    lease._check_end(released, error)
                finally:
                    keeper.discard(state)
        finally:
            term.over = True
            self._forget(term)
            self._say(f"{self.name}: the term of token {term.token} is over")

    def _watch(self, term: Term) -> Flow[None]:
        """Look whether the term should end, until its body has returned."""
        while True:
            yield Sleep(WATCH_INTERVAL)
            if term.over or term._warn_if_ignored():
                return
            if term.ending or not term.remaining():
                continue
            try:
                demand = yield from self._flows.demand(term.token)
            except DblockError:
                continue
            if demand is not None:
                self._say(f"{self.name}: token {term.token} must end: {demand}")
            term._obey(demand)

    def transfer(self, to: str) -> None:
        """Ask the leader to hand over, as another candidate does."""
        Task(self.client, self._flows.transfer(to), lambda result: self._say(f"asks for {to}: {result!r}"))
