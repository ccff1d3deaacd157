"""What both kinds of election share: everything that needs no I/O."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, Generic, TypeVar

from dblock._core.effects import Flow, Sleep
from dblock.errors import ClientClosed, DblockError, LeaseLost
from dblock.recipes.elections.flows import ElectionFlows
from dblock.recipes.elections.persistence import Outcome, Stopped, keep_campaigning
from dblock.recipes.elections.records import ElectionOptions
from dblock.recipes.elections.term import AsyncTerm, Term

logger = logging.getLogger("dblock")

TermT = TypeVar("TermT", Term, AsyncTerm)

WATCH_INTERVAL = 0.5
"""Seconds between two looks of a leader whether its term should end."""


class ElectionBase(Generic[TermT]):
    """What both kinds of election share."""

    def __init__(self, runtime: Any, options: ElectionOptions) -> None:
        self._runtime = runtime
        self._options = options
        self._flows = ElectionFlows(runtime.flows, runtime.schema, options)
        self._term: TermT | None = None
        self._campaigning = threading.Lock()
        self._stopping = False
        self._waiter: Any = None
        """What the candidate waits at, in the queue."""

    @property
    def name(self) -> str:
        """The name of the election."""
        return self._options.name

    def is_leader(self) -> bool:
        """Return whether this candidate leads at this moment. Asks no database, and is false before another may."""
        term = self._term
        return term is not None and term._state.remaining() > 0.0

    def stop(self) -> None:
        """End `run`: leave the queue, or ask the body of the present term to return. Any thread may call this."""
        self._stopping = True
        waiter, term = self._waiter, self._term
        if waiter is not None:
            waiter.wake()
        if term is not None:
            term._ask_to_end("stop")

    def _enter_campaign(self) -> None:
        if not self._campaigning.acquire(blocking=False):
            raise self._busy()

    def _busy(self) -> DblockError:
        return DblockError(
            f"This candidate of election {self.name!r} campaigns or leads already. End that term first, or create "
            "another candidate with client.election()."
        )

    def _stopped(self) -> DblockError:
        return DblockError(
            f"This candidate of election {self.name!r} was stopped. Create another candidate with client.election()."
        )

    def _check_stopped(self) -> None:
        if self._stopping:
            raise Stopped

    def _abandon(self, lease: Any) -> None:
        """Give back a lease that has led nothing. The keep-alive releases it."""
        lease._state.let_go()
        self._runtime.keepalive.abandon(lease._state)

    def _forget(self, term: Any) -> None:
        if self._term is term:
            self._term = None
            with contextlib.suppress(ValueError):
                self._runtime.before_close.remove(self._close)
            self._campaigning.release()

    def _close(self) -> Any:
        raise NotImplementedError

    def _watching(self, term: TermT) -> Flow[None]:
        """Look whether the term should end, until its body has returned."""
        while True:
            yield Sleep(WATCH_INTERVAL)
            if term._over.is_set() or term._warn_if_ignored() or not term._state.ours:
                return
            if term.ending.is_set() or not term.remaining():
                continue
            try:
                demand = yield from self._flows.demand(term.token)
            except ClientClosed:
                return
            except DblockError as error:
                logger.debug("election %r: the leader could not ask for its successor: %s", self.name, error)
                continue
            term._obey(demand)

    def _persist(self) -> Flow[Any]:
        if self._campaigning.locked():
            raise self._busy()
        flows = self._runtime.flows
        return keep_campaigning(self.name, lambda: self._stopping, flows.clock, flows.uniform, flows.timings)

    def _outcome(self, term: TermT, error: BaseException) -> Outcome:
        """Return how a body has ended that raised this error."""
        if isinstance(error, LeaseLost) and error.token == term.token:
            return Outcome()
        if term.ending_reason is not None or term._state.loss is not None:
            logger.warning("election %r: the body failed while its term ended", self.name, exc_info=error)
            return Outcome()
        logger.error("election %r: the body failed, its term ends", self.name, exc_info=error)
        return Outcome(failed=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}{', leads' if self.is_leader() else ''}>"


def one(effect: Any) -> Flow[Any]:
    """Return a flow of this one effect."""
    return (yield effect)
