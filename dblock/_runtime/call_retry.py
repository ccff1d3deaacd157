"""What becomes of a call that failed: raised as one of dblock's errors, or retried.

If a call's connection turns out to be dead, the call is retried once over a new one. If a call conflicts with another
transaction, it is retried. If a call gets no reply in time, it raises an error.

Guarantee: after a call was sent, only an error of the called function itself means that nothing was done. Every other
error, and every error of a retry, is raised with `may_be_done`. The caller then gives back what it may have been given.
"""

from __future__ import annotations

import logging
from typing import NoReturn, Protocol

import psycopg
from psycopg import capabilities
from psycopg import errors as pg

from dblock._core import clock
from dblock._core.effects import Call
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import is_broken, is_overdue, is_passing, is_undone, translate
from dblock.errors import Unavailable

logger = logging.getLogger("dblock")

PASSING_RETRIES = 20
"""How often a call is retried because it conflicts with another transaction."""


class Retries(Protocol):
    """A runner, as far as a retry needs one."""

    schema: str
    reply_within: float
    terminated_at: float

    def stop_preparing(self, why: str) -> None:
        """Prepare no statements from here on."""


class CallRetry:
    """The failures of one call so far."""

    def __init__(self, runner: Retries, call: Call, outer: BaseException | None) -> None:
        """`outer` is the error that the caller was handling before the call, as when it leaves a body that failed."""
        self._runner = runner
        self.call = call
        """The call to send next."""
        self._outer = outer
        self.broken = False
        """Whether a connection of the runner broke before the reply, so that the call may have been executed."""
        self.unsure = False
        """The same, because the listener's connection broke, or a reply over it did not come in time."""
        self._passing = 0

    @property
    def may_be_done(self) -> bool:
        """Whether the call may have been executed."""
        return self.broken or self.unsure

    def raise_or_move(self, error: psycopg.Error) -> None:
        """Raise the error of a call that borrowed the listener's connection, unless it moves to another one."""
        if is_undone(error):
            return
        if not is_overdue(error):
            self.raise_or_retry(error, None)
            return
        self.unsure = True
        self.call = self.call.sent_again()

    def raise_or_give_up(self, error: psycopg.Error, refused: Unavailable) -> NoReturn:
        """Raise the error of a call that could only go over the listener's connection.

        `refused` says why there is no other connection. It is raised if the call had no effect.
        """
        if not is_undone(error):
            self.raise_or_retry(error, None)
            refused.may_be_done = self.may_be_done
        raise refused from None

    def raise_or_retry(self, error: psycopg.Error, raw: RawConnection | None) -> bool:
        """Raise the error for the caller. For a retry, return whether to drop the idle connections before it.

        `raw` is the connection of the runner over which the call went, None for the listener's.
        """
        if isinstance(error, pg.AdminShutdown) and raw is not None:
            self._runner.terminated_at = clock.now()
        leaving = error.__context__
        if leaving is not None and leaving is not self._outer and not isinstance(leaving, Exception):
            # The connection broke while psycopg was cancelling for a caller that leaves. Its error comes first.
            raise leaving
        if is_overdue(error):
            patience = min(self.call.within, self._runner.reply_within)
            late = Unavailable(
                f"The database has not answered for {patience:.2g} s; the call may have been executed. Is the database "
                "unreachable, or does a transaction hold dblock's tables? A client with more patience waits longer."
            )
            late.may_be_done = True
            raise late from error
        if is_broken(error) and not (self.broken and raw is not None):
            self.broken, self.unsure = self.broken or raw is not None, self.unsure or raw is None
            self.call = self.call.sent_again()
            logger.info("runner: connection lost, retrying over a new one: %s", error)
            return True
        if isinstance(error, (pg.InvalidSqlStatementName, pg.DuplicatePreparedStatement)) and raw and raw.prepares:
            self._runner.stop_preparing("prepared statements do not last")
            raw.prepares = False
            return False
        if is_passing(error) and self._passing < PASSING_RETRIES:
            self._passing += 1
            return False
        refused = translate(error, self._runner.schema)
        refused.may_be_done = self.may_be_done or is_broken(error)
        raise refused from error


def must_cancel(error: BaseException, raw: RawConnection) -> bool:
    """Return whether a statement is still under way that has no caller any more, and can be cancelled in bounded time.

    psycopg cancels by itself on Ctrl-C and cancellation, but not for other errors that a signal handler raises. A
    coroutine that is garbage-collected after its event loop cannot await anything.
    """
    if isinstance(error, GeneratorExit):
        return False
    return raw.busy and (capabilities.has_cancel_safe() or not is_overdue(error))
