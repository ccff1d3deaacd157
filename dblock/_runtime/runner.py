"""Perform the effects of a flow on psycopg: one runner for threads, one for asyncio.

Guarantee: a call that cannot be made raises one of dblock's errors, and never looks like a reply. If a call's
connection turns out to be dead, the call is retried once over a new one. That is safe because every call names the
exact attempt or grant that it is about. If a call conflicts with another transaction, it is retried. If a call gets no
reply within the client's patience, it is cancelled and raises an error, even if it then ends well: a call that is
cancelled while it waits for a standby ends as if it were done, but is not safe.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psycopg

import dblock._runtime.fork_safe_connection  # noqa: F401  a target needs it, and this module is imported while forks wait
from dblock._core.effects import Call, Flow, JoinQueue, Row, Wait, drive, drive_async
from dblock._core.schema_version import check_revision
from dblock._core.statements import WHICH_BACKEND
from dblock._core.timings import Timings
from dblock._runtime.call_retry import CallRetry, must_cancel
from dblock._runtime.connection import POLL_INTERVAL, RawConnection, poll_interval
from dblock._runtime.error_mapping import translated
from dblock._runtime.home import Home
from dblock._runtime.listener_connection import NotLent
from dblock._runtime.pool import AsyncPool, Pool, Returns
from dblock._runtime.runner_base import RunnerBase
from dblock._runtime.target import Target
from dblock.errors import DblockError, Unavailable

T = TypeVar("T")

Install = Callable[[Target, str], object]
"""Installs the schema of that name in the target."""

logger = logging.getLogger("dblock")

IDLE_POLL = 0.002


class Runner(RunnerBase):
    """Performs steps in the calling thread."""

    def __init__(
        self,
        target: Target,
        schema: str,
        pool_size: int,
        patience: float,
        *,
        prepares: bool = True,
        spare: Runner | None = None,
        home: Home | None = None,
        timings: Timings | None = None,
    ) -> None:
        """Name the database. Nothing is opened yet. If no connection can be opened, borrow one of `spare`.

        While `home` is open, an idle runner has no connection, and its next call borrows the home.
        """
        super().__init__(target, schema, patience, prepares, timings)
        self._pool: Pool = Pool(self._connect, pool_size, patience, timings)
        self._spare = spare
        self._home = home
        if home is not None:
            self._pool.may_be_empty = lambda: home.is_open

    def open(self, install: Install) -> None:
        """Check that the schema fits this client. On the embedded server, install it if necessary."""
        try:
            row = self._call(self.statements.revision)
            check_revision(self.schema, row[0] if row else None)
        except DblockError as error:
            if not self.must_install(error):
                raise
            install(self.target, self.schema)
        row = self._call(self.statements.installation)
        self.installation = str(row[0]) if row else ""

    def warm(self) -> None:
        """Open a connection before it is needed."""
        raw, pool = self._take()
        pool.give(raw)

    def close(self) -> None:
        self._pool.close()

    def shrink(self) -> float:
        """Close connections that have been idle for long. Return the seconds until the next one has."""
        return self._pool.shrink()

    def wait_until_idle(self, seconds: float) -> None:
        """After closing, wait until no call is under way, but no longer than so many seconds."""
        until = time.monotonic() + seconds
        while (self._pool.in_use or self._borrows) and time.monotonic() < until:
            time.sleep(IDLE_POLL)

    def run(self, flow: Flow[T]) -> T:
        """Perform every effect of the flow and return its result."""
        return drive(flow, self.perform)

    def perform(self, effect: Any) -> Any:
        """Perform one effect of a lock's flow."""
        if isinstance(effect, Call):
            return self._call(effect)
        if isinstance(effect, Wait):
            effect.waiter.wait(effect.seconds)
        elif isinstance(effect, JoinQueue):
            return self.join_queue(effect.name, effect.attempt)
        else:
            time.sleep(effect.seconds)
        return None

    def _call_when_quiet(self, call: Call, home: Home) -> Row | None:
        """Make a call although no connection of the pool is open: over the home, if it may borrow that."""
        within, trouble = min(call.within, self.reply_within), CallRetry(self, call, sys.exc_info()[1])
        try:
            if self._pool.is_empty() and home.may_lend(call):
                return home.call(call, within)
        except NotLent:
            pass
        except psycopg.Error as error:
            trouble.raise_or_move(error)
        try:
            return self._call(trouble.call, trouble)
        except Unavailable as refused:
            if not self.must_borrow(refused, trouble):
                raise
            try:
                return home.call(trouble.call, within, within)
            except NotLent:
                raise refused from None
            except psycopg.Error as error:
                trouble.raise_or_give_up(error, refused)

    def _call(self, call: Call, trouble: CallRetry | None = None) -> Row | None:
        if trouble is None and self._home is not None and not self._pool.has_idle:
            return self._call_when_quiet(call, self._home)
        outer = sys.exc_info()[1]
        while True:
            raw: RawConnection | None = None
            try:
                within = min(call.within, self.reply_within)
                raw, pool = self._take(within)
                try:
                    return raw.call(call, within)
                except BaseException as error:
                    if must_cancel(error, raw):
                        with suppress(psycopg.Error):
                            limit = self.giving_up(call)
                            raw.connection.cancel_safe(timeout=max(limit, POLL_INTERVAL))
                            raw.connection.wait(raw.drain(limit), poll_interval(limit))
                    raise
                finally:
                    pool.give(raw)
            except DblockError as refused:
                refused.may_be_done = trouble is not None and trouble.may_be_done
                raise
            except psycopg.Error as error:
                trouble = trouble or CallRetry(self, call, outer)
                if trouble.raise_or_retry(error, raw):
                    self._drop_idle()
                call = trouble.call

    def _drop_idle(self) -> None:
        """Close the idle connections, because another one turned out to be dead."""
        self._pool.drop_idle()

    def _take(self, within: float = math.inf, lent: bool = False) -> tuple[RawConnection, Returns]:
        """Borrow a connection. Return it with what takes it back.

        If a connection cannot be opened, raise at once, so that a wrong password is not tried twice.
        """
        try:
            return self._pool.take(within if lent else None), self._pool
        except DblockError:
            raise
        except Exception as error:
            if not self.is_refusal(error) and self._spare is not None and self._spare._pool.in_use:
                self.opening.failed("runner: could not open a connection, borrowing one of the pool: %s", error)
                return self._spare._take(within, lent=True)
            with translated(self.schema):
                raise error

    def _connect(self) -> RawConnection:
        connection = self.target.connect()
        try:
            raw = RawConnection(connection, prepares=False)
            if self.prepares:
                self.make_ready(raw, connection.wait(raw.exchange(WHICH_BACKEND, self.reply_within)))
            raw.needs_transactions = self.target.needs_transactions
            self.opening.worked()
            return raw
        except BaseException:
            connection.close()
            raise


class AsyncRunner(RunnerBase):
    """Performs steps in the running event loop."""

    def __init__(
        self,
        target: Target,
        schema: str,
        pool_size: int,
        patience: float,
        *,
        prepares: bool = True,
        home: Home | None = None,
        timings: Timings | None = None,
    ) -> None:
        """Name the database. Nothing is opened yet. See Runner for `home`."""
        super().__init__(target, schema, patience, prepares, timings)
        self._pool: AsyncPool = AsyncPool(self._connect, pool_size, patience, timings)
        self._home = home
        if home is not None:
            self._pool.may_be_empty = lambda: home.is_open

    async def open(self, install: Install) -> None:
        """Check that the schema fits this client. On the embedded server, install it if necessary."""
        if self.target.embedded:
            # In a thread, because starting the server takes a moment.
            await asyncio.to_thread(self.target.conninfo)
        try:
            row = await self._call(self.statements.revision)
            check_revision(self.schema, row[0] if row else None)
        except DblockError as error:
            if not self.must_install(error):
                raise
            await asyncio.to_thread(install, self.target, self.schema)
        row = await self._call(self.statements.installation)
        self.installation = str(row[0]) if row else ""

    def close(self) -> None:
        self._pool.close()

    async def wait_until_idle(self, seconds: float) -> None:
        """After closing, wait until no call is under way, but no longer than so many seconds."""
        until = time.monotonic() + seconds
        while (self._pool.in_use or self._borrows) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_POLL)

    def surplus_in(self) -> float:
        """Return the seconds until a connection has been idle for long. Any thread may ask."""
        return self._pool.surplus_in()

    def shrink(self) -> None:
        """Close connections that have been idle for long."""
        self._pool.shrink()

    async def warm(self) -> None:
        """Open a connection before it is needed."""
        self._pool.give(await self._take(math.inf, False))

    async def run(self, flow: Flow[T]) -> T:
        """Perform every effect of the flow and return its result."""
        return await drive_async(flow, self.perform)

    async def perform(self, effect: Any) -> Any:
        """Perform one effect of a lock's flow."""
        if isinstance(effect, Call):
            return await self._call(effect)
        if isinstance(effect, Wait):
            await effect.waiter.wait(effect.seconds)
        elif isinstance(effect, JoinQueue):
            return self.join_queue(effect.name, effect.attempt)
        else:
            await asyncio.sleep(effect.seconds)
        return None

    @property
    def may_lend(self) -> bool:
        """Whether a call of a runner that could open no connection may go over a connection of this one."""
        return self._pool.in_use

    async def call(self, call: Call, lent: bool) -> Row | None:
        """Make a call for a thread. With `lent`, use a connection that is open already."""
        return await self._call(call, lent)

    async def _call_when_quiet(self, call: Call, home: Home) -> Row | None:
        """Make a call although no connection of the pool is open: over the home, if it may borrow that."""
        within, trouble = min(call.within, self.reply_within), CallRetry(self, call, sys.exc_info()[1])
        try:
            if self._pool.is_empty() and home.may_lend(call):
                return await home.call_async(call, within)
        except NotLent:
            pass
        except psycopg.Error as error:
            trouble.raise_or_move(error)
        try:
            return await self._call(trouble.call, trouble=trouble)
        except Unavailable as refused:
            if not self.must_borrow(refused, trouble):
                raise
            try:
                return await home.call_async(trouble.call, within, within)
            except NotLent:
                raise refused from None
            except psycopg.Error as error:
                trouble.raise_or_give_up(error, refused)

    async def _call(self, call: Call, lent: bool = False, trouble: CallRetry | None = None) -> Row | None:
        if trouble is None and self._home is not None and not lent and not self._pool.has_idle:
            return await self._call_when_quiet(call, self._home)
        outer = sys.exc_info()[1]
        while True:
            raw: RawConnection | None = None
            try:
                within = min(call.within, self.reply_within)
                raw = await self._take(within, lent)
                try:
                    row: Row | None = await raw.connection.wait(raw.exchange(call, within), poll_interval(within))
                    return row
                except BaseException as error:
                    if must_cancel(error, raw):
                        with suppress(psycopg.Error):
                            limit = self.giving_up(call)
                            await raw.connection.cancel_safe(timeout=max(limit, POLL_INTERVAL))
                            await raw.connection.wait(raw.drain(limit), poll_interval(limit))
                    raise
                finally:
                    self._pool.give(raw)
            except DblockError as refused:
                refused.may_be_done = trouble is not None and trouble.may_be_done
                raise
            except psycopg.Error as error:
                trouble = trouble or CallRetry(self, call, outer)
                if trouble.raise_or_retry(error, raw):
                    self._pool.drop_idle()
                call = trouble.call

    async def _take(self, within: float, lent: bool) -> RawConnection:
        """Borrow a connection. If it cannot be opened, raise at once, so that a wrong password is not tried twice."""
        try:
            return await self._pool.take(within if lent else None)
        except DblockError:
            raise
        except Exception as error:
            with translated(self.schema):
                raise error

    async def _connect(self) -> RawConnection:
        connection = await self.target.connect_async()
        try:
            raw = RawConnection(connection, prepares=False)
            if self.prepares:
                self.make_ready(raw, await connection.wait(raw.exchange(WHICH_BACKEND, self.reply_within)))
            raw.needs_transactions = self.target.needs_transactions
            self.opening.worked()
            return raw
        except BaseException:
            await connection.close()
            raise
