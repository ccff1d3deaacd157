"""Perform steps on psycopg: one runner for threads, one for asyncio.

Guarantee: a call that cannot be made raises one of dblock's errors, and never looks like an answer. A call whose
connection turns out to be dead is sent once more over a fresh one; that is safe because every call names the exact
attempt or grant that it is about. A call that another transaction got in the way of is simply made again. A call that
is not answered within the client's patience is cancelled, and is an error, whatever comes of it meanwhile: one that is
cancelled while it waits for a standby ends as if it were done, and is not safe.
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
from psycopg import capabilities
from psycopg import errors as pg

from dblock._core.acquire import LEAST_PATIENCE
from dblock._core.effects import Call, Flow, JoinQueue, Row, Wait, drive, drive_async
from dblock._core.schema_version import check_revision
from dblock._core.statements import WHICH_BACKEND, Statements
from dblock._core.waiters import LocalWaiter
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import is_broken, is_overdue, is_passing, translate, translated
from dblock._runtime.pool import AsyncPool, Pool
from dblock._runtime.target import Target
from dblock.errors import DblockError, SchemaMissing, SchemaOutdated, Unavailable

T = TypeVar("T")

Install = Callable[[Target, str], object]
"""Installs the schema of that name."""

logger = logging.getLogger("dblock")

IDLE_POLL = 0.002

POLL_INTERVAL = 0.1
"""Seconds after which psycopg looks whether the time is up, where it is not asked to do so sooner."""

PASSING_RETRIES = 20
"""How often a call is made anew because another transaction got in its way."""


class _Base:
    """What both runners know: where to connect, and what to make of an error."""

    def __init__(self, target: Target, schema: str, patience: float, prepares: bool) -> None:
        self.target = target
        self.answer_within = max(patience, LEAST_PATIENCE)
        self.schema = schema
        self.prepares = prepares
        self.installation = ""
        """Which installation this is, to tell it from one in another database."""
        self.join_queue: Callable[[str, str], LocalWaiter] = _cannot_wait
        """Registers a waiter for a lock, under its attempt; set once there is a listener to wake it."""
        self.statements = Statements(schema)

    def make_ready(self, raw: RawConnection, backend: Row | None) -> None:
        """Decide whether to prepare statements on a fresh connection, given which backend answers over it."""
        if backend != (str(raw.connection.info.backend_pid),):
            self.stop_preparing("a pooler stands before the database")
        raw.prepares = self.prepares

    def stop_preparing(self, why: str) -> None:
        if self.prepares:
            logger.info("%s: statements are not prepared from here on", why)
            self.prepares = False

    def must_install(self, error: DblockError) -> bool:
        """Tell whether to install the schema: the embedded server is dblock's own, and nobody else would."""
        return self.target.embedded and isinstance(error, (SchemaMissing, SchemaOutdated))


class _Trouble:
    """What has gone wrong with one call so far."""

    def __init__(self, runner: _Base, call: Call, outer: BaseException | None) -> None:
        """Begin; `outer` is what the caller was handling before the call, as when a body that failed is being left."""
        self._runner = runner
        self.call = call
        """What to send."""
        self._outer = outer
        self._broken = False
        self._passing = 0

    def raise_or_retry(self, error: psycopg.Error, raw: RawConnection | None) -> bool:
        """Raise what the caller should see; or return whether idle connections must be dropped before a retry."""
        leaving = error.__context__
        if leaving is not None and leaving is not self._outer and not isinstance(leaving, Exception):
            # The connection broke while psycopg was cancelling for a caller who leaves; that comes first.
            raise leaving
        if is_overdue(error):
            patience = min(self.call.within, self._runner.answer_within)
            unanswered = Unavailable(
                f"The database has not answered for {patience:.2g} s; what was sent may have been done. Is it out of "
                "reach, or does a transaction hold dblock's tables? A client with more patience waits longer."
            )
            unanswered.unanswered = True
            raise unanswered from error
        if is_broken(error) and not self._broken:
            self._broken = True
            self.call = self.call._replace(sql=self.call.again or self.call.sql)
            logger.info("connection lost, trying a fresh one: %s", error)
            return True
        if isinstance(error, (pg.InvalidSqlStatementName, pg.DuplicatePreparedStatement)) and raw and raw.prepares:
            self._runner.stop_preparing("prepared statements do not last here")
            raw.prepares = False
            return False
        if is_passing(error) and self._passing < PASSING_RETRIES:
            self._passing += 1
            return False
        raise translate(error, self._runner.schema) from error


def poll_interval(within: float) -> float:
    """Return the seconds between two checks of whether the time is up."""
    return min(within / 20, POLL_INTERVAL)


def must_cancel(error: BaseException, raw: RawConnection) -> bool:
    """Tell whether a statement is still under way that nobody waits for any more, and can be cancelled in bounded time.

    psycopg does so by itself for Ctrl-C and cancellation, but not for what else a signal handler may raise.
    """
    return raw.busy and (capabilities.has_cancel_safe() or not is_overdue(error))


def _cannot_wait(name: str, attempt: str) -> LocalWaiter:
    raise NotImplementedError("this runner has no listener to wake its waiters")


class Runner(_Base):
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
    ) -> None:
        """Name the database; nothing is opened yet. Where no connection can be had, one that `spare` has will do."""
        super().__init__(target, schema, patience, prepares)
        self._pool = Pool(self._connect, pool_size, patience)
        self._spare = spare

    def open(self, install: Install) -> None:
        """Check that the schema fits this client; on the embedded server, install it if need be."""
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

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until no call is under way, after closing; but not for longer than that."""
        until = time.monotonic() + seconds
        while self._pool.in_use and time.monotonic() < until:
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

    def _call(self, call: Call) -> Row | None:
        outer = sys.exc_info()[1]
        trouble: _Trouble | None = None
        while True:
            raw: RawConnection | None = None
            try:
                within = min(call.within, self.answer_within)
                raw, pool = self._take(within)
                try:
                    row: Row | None = raw.connection.wait(raw.exchange(call, within), poll_interval(within))
                    return row
                except BaseException as error:
                    if must_cancel(error, raw):
                        with suppress(psycopg.Error):
                            raw.connection.cancel_safe(timeout=max(call.giving_up, POLL_INTERVAL))
                            raw.connection.wait(raw.drain(call.giving_up), poll_interval(call.giving_up))
                    raise
                finally:
                    pool.give(raw)
            except psycopg.Error as error:
                trouble = trouble or _Trouble(self, call, outer)
                if trouble.raise_or_retry(error, raw):
                    self._pool.drop_idle()
                call = trouble.call

    def _take(self, within: float = math.inf, lent: bool = False) -> tuple[RawConnection, Pool]:
        """Borrow a connection, and learn whom to give it back to.

        One that cannot be opened is an error at once, lest a wrong password be tried twice.
        """
        try:
            return self._pool.take(within if lent else None), self._pool
        except DblockError:
            raise
        except Exception as error:
            if self._spare is not None and self._spare._pool.in_use:
                logger.info("no connection of its own could be had, borrowing one: %s", error)
                return self._spare._take(within, lent=True)
            with translated(self.schema):
                raise error

    def _connect(self) -> RawConnection:
        connection = self.target.connect()
        try:
            raw = RawConnection(connection, prepares=False)
            if self.prepares:
                self.make_ready(raw, connection.wait(raw.exchange(WHICH_BACKEND, self.answer_within)))
            return raw
        except BaseException:
            connection.close()
            raise


class AsyncRunner(_Base):
    """Performs steps in the running event loop."""

    def __init__(
        self,
        target: Target,
        schema: str,
        pool_size: int,
        patience: float,
        *,
        prepares: bool = True,
        spare: AsyncRunner | None = None,
    ) -> None:
        """Name the database; nothing is opened yet. Where no connection can be had, one that `spare` has will do."""
        super().__init__(target, schema, patience, prepares)
        self._pool = AsyncPool(self._connect, pool_size, patience)
        self._spare = spare

    async def open(self, install: Install) -> None:
        """Check that the schema fits this client; on the embedded server, install it if need be."""
        if self.target.embedded:
            # Starting the server takes a moment; the event loop need not stand still for it.
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

    async def warm(self) -> None:
        """Open a connection before it is needed."""
        raw, pool = await self._take()
        pool.give(raw)

    def close(self) -> None:
        self._pool.close()

    async def wait_until_idle(self, seconds: float) -> None:
        """Wait until no call is under way, after closing; but not for longer than that."""
        until = time.monotonic() + seconds
        while self._pool.in_use and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_POLL)

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

    async def _call(self, call: Call) -> Row | None:
        outer = sys.exc_info()[1]
        trouble: _Trouble | None = None
        while True:
            raw: RawConnection | None = None
            try:
                within = min(call.within, self.answer_within)
                raw, pool = await self._take(within)
                try:
                    row: Row | None = await raw.connection.wait(raw.exchange(call, within), poll_interval(within))
                    return row
                except BaseException as error:
                    if must_cancel(error, raw):
                        with suppress(psycopg.Error):
                            await raw.connection.cancel_safe(timeout=max(call.giving_up, POLL_INTERVAL))
                            await raw.connection.wait(raw.drain(call.giving_up), poll_interval(call.giving_up))
                    raise
                finally:
                    pool.give(raw)
            except psycopg.Error as error:
                trouble = trouble or _Trouble(self, call, outer)
                if trouble.raise_or_retry(error, raw):
                    self._pool.drop_idle()
                call = trouble.call

    async def _take(self, within: float = math.inf, lent: bool = False) -> tuple[RawConnection, AsyncPool]:
        """Borrow a connection, and learn whom to give it back to.

        One that cannot be opened is an error at once, lest a wrong password be tried twice.
        """
        try:
            return await self._pool.take(within if lent else None), self._pool
        except DblockError:
            raise
        except Exception as error:
            if self._spare is not None and self._spare._pool.in_use:
                logger.info("no connection of its own could be had, borrowing one: %s", error)
                return await self._spare._take(within, lent=True)
            with translated(self.schema):
                raise error

    async def _connect(self) -> RawConnection:
        connection = await self.target.connect_async()
        try:
            raw = RawConnection(connection, prepares=False)
            if self.prepares:
                self.make_ready(raw, await connection.wait(raw.exchange(WHICH_BACKEND, self.answer_within)))
            return raw
        except BaseException:
            await connection.close()
            raise
