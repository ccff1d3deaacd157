"""A candidate of an election, for threads.

An election object is one candidate: it campaigns for one term at a time. `is_leader` asks no other thread and no
database, and is false from the end of the trust window on.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dblock._core.effects import Flow, Sleep, Wait, drive
from dblock._core.options import Seconds, check_timeout
from dblock._runtime.owners import caller
from dblock._runtime.runtime import ThreadRuntime
from dblock._runtime.threads import start_thread
from dblock.errors import DblockError, InvalidArgument
from dblock.lease import Lease
from dblock.lock import Lock
from dblock.recipes.elections.base import ElectionBase, one
from dblock.recipes.elections.flows import Abandon, Acquire, Position
from dblock.recipes.elections.persistence import Body, Campaign, Outcome, Pause, Stopped
from dblock.recipes.elections.records import ElectionOptions, Leader, Vacancy
from dblock.recipes.elections.term import Term

logger = logging.getLogger("dblock")

T = TypeVar("T")


class Election(ElectionBase[Term]):
    """One candidate of an election, for threads. From `Client.election`."""

    _runtime: ThreadRuntime

    def __init__(self, runtime: ThreadRuntime, options: ElectionOptions) -> None:
        super().__init__(runtime, options)
        self._lock: Lock[Lease] = Lock(runtime, options.lock, Lease)
        self._stop = runtime.new_event()

    def campaign(self, timeout: Seconds | None = None) -> Term:
        """Wait until this candidate leads, and return its term. Use the term in a `with`.

        Raise LockTimeout if the timeout passes first; None waits without end.
        """
        try:
            return self._campaign(timeout, False)
        except Stopped:
            raise self._stopped() from None

    @contextlib.contextmanager
    def lead(self, timeout: Seconds | None = None) -> Iterator[Term]:
        """Campaign, lead for the body of the `with`, and end the term when the body has returned."""
        with self.campaign(timeout) as term:
            yield term

    def run(self, function: Callable[[Term], T]) -> T | None:
        """Campaign and call `function` with each term, again after every loss and error.

        Return what the function returns by itself, or None after `stop` and `close`. The function should return when
        `term.wait()` returns True.
        """
        if inspect.iscoroutinefunction(function):
            raise InvalidArgument(
                f"The body of election {self.name!a:.80} is a coroutine function. Use AsyncClient.election for it."
            )

        def perform(effect: Any) -> Any:
            if isinstance(effect, Campaign):
                return self._campaign(None, effect.stepped_back)
            if isinstance(effect, Body):
                return self._run_body(function, effect.term)
            assert isinstance(effect, Pause)
            return self._stop.wait(effect.seconds)

        found: T | None = drive(self._persist(), perform)
        return found

    def stop(self) -> None:
        """End `run`: leave the queue, or ask the body of the present term to return. Any thread may call this."""
        super().stop()
        self._stop.set()

    def resign(self, timeout: Seconds | None = None) -> bool:
        """Ask the body to return, and wait until it has. Return whether its term was released.

        False means that there is no term, that the body has not returned before the timeout or the deadline of its
        lease, or that the body itself calls this: its term is then released when it returns.
        """
        term = self._term
        if term is None:
            return False
        term._ask_to_end("resign")
        return term._wait_for_body(check_timeout(self._lock.name, timeout))

    def transfer(self, to: str) -> None:
        """Ask the leader to hand over to the candidate with this holder name.

        Any candidate may ask. The call returns when the request is recorded: the leader's body must return first.
        Raise TransferRefused if the named candidate cannot lead next.
        """
        token = self._run(self._flows.transfer(to))
        term = self._term
        if term is not None and term.token == token:
            term._ask_to_end("transfer")

    def leader(self) -> Leader | None:
        """Return the present leader, None if there is none."""
        return self._run(self._flows.leader())

    def observe(
        self, since: int | Leader | Vacancy | None = None, *, timeout: Seconds | None = None
    ) -> Iterator[Leader | Vacancy]:
        """Yield every beginning of a term as a Leader and every end as a Vacancy, in order, without end.

        With a token, start after the beginning of that term; 0 starts with the first one. With a Leader or Vacancy,
        start after that event. With None, start with the present state. With a timeout, end if no event comes within
        this time.
        """
        position, seconds = Position(since), check_timeout(self._lock.name, timeout)
        while found := self._run(self._flows.next_events(position, seconds)):
            for event in found:
                position.passed(event)
                yield event

    def _run(self, flow: Flow[T]) -> T:
        return drive(flow, self._perform)

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, Acquire):
            return self._acquire(effect)
        if isinstance(effect, Abandon):
            return self._abandon(effect.lease)
        return self._runtime.run(one(effect))

    def _perform_waiting(self, effect: Any) -> Any:
        """Perform an effect of a candidate that waits for the lock, which `stop` may interrupt."""
        if not isinstance(effect, Wait):
            return self._perform(effect)
        self._waiter = effect.waiter
        try:
            self._check_stopped()
            self._perform(effect)
            return self._check_stopped()
        finally:
            self._waiter = None

    def _acquire(self, effect: Acquire) -> Lease:
        owner = caller()
        try:
            grant = drive(self._lock._acquiring(effect.timeout, effect.attempt, owner), self._perform_waiting)
            if grant is not None:
                return self._lock._lease(grant, owner)
        except BaseException as error:
            self._lock._abandon(effect.attempt, error)
            raise
        raise self._lock._timed_out(effect.limit)

    def _campaign(self, timeout: Seconds | None, stepped_back: bool) -> Term:
        self._enter_campaign()
        try:
            self._check_stopped()
            term = Term(self, self._run(self._flows.campaign(timeout, stepped_back)))
            self._term = term
            self._runtime.before_close.append(self._close)
        except BaseException:
            self._campaigning.release()
            raise
        logger.info("election %r: this candidate leads, token %d", self.name, term.token)
        if self._stopping:
            term._ask_to_end("stop")
        return term

    def _begin(self, term: Term) -> None:
        if self._runtime.background is not None:
            self._runtime.background(self._watching(term))
        else:
            start_thread("dblock term", self._watch, term)
        term._started = True
        if self._options.on_started is not None:
            self._options.on_started(term)

    def _finish(self, term: Term) -> None:
        term._end_waits()
        self._forget(term)
        logger.info("election %r: the term of token %d is over", self.name, term.token)
        if term._started and self._options.on_stopped is not None:
            try:
                self._options.on_stopped(term)
            except Exception:
                logger.exception("election %r: on_stopped failed", self.name)

    def _watch(self, term: Term) -> None:
        def perform(effect: Any) -> Any:
            return term._over.wait(effect.seconds) if isinstance(effect, Sleep) else self._perform(effect)

        drive(self._watching(term), perform)

    def _run_body(self, function: Callable[[Term], Any], term: Term) -> Outcome:
        outcome: Outcome | None = None
        try:
            with term:
                value = function(term)
                outcome = Outcome(by_itself=term.ending_reason is None and term.remaining() > 0, value=value)
        except Exception as error:
            return outcome or self._outcome(term, error)
        return outcome

    def _close(self) -> None:
        """Let the body return before the client is closed."""
        term = self._term
        if term is not None and term._state.ours:
            self._stopping = True
            self._stop.set()
            term._ask_to_end("close")
            if not term._wait_for_body(None) and term._has_no_body():
                with contextlib.suppress(DblockError):
                    term.end()
