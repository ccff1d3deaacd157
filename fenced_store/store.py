"""A key-value store whose keys refuse stale writers.

Guarantee: a key accepts a write that carries a token only if its (token, write number) is greater than every pair that
the key has accepted or that was claimed for it. One statement decides. A write is idempotent: the same write sent twice
is stored once, and the second reply says so. Deleting a key keeps its fence.

Each write is one call in a transaction of its own, and is durable before the reply is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.util import greenlet_spawn

from fenced_store._calls import PATIENCE, REPLY_MARGIN, Call, StoreBase, check_resources
from fenced_store._postgres.connections import LimitedCall
from fenced_store._postgres.engines import Database, async_engine_of, engine_of
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA
from fenced_store._postgres.opening import in_background, opened
from fenced_store._postgres.values import Stored, Value
from fenced_store.tokens import HasToken

if TYPE_CHECKING:
    # Imported only where it is needed, because it imports the whole ORM.
    from sqlalchemy.ext.asyncio import AsyncConnection


class FencedStore(StoreBase):
    """A key-value store for threads, in the schema that `install` creates."""

    def __init__(
        self,
        database: Database,
        *,
        schema: str = DEFAULT_SCHEMA,
        history: int = 10,
        writer: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Create a store; nothing is opened yet. An engine that you pass stays yours, and stays open.

        `history` is the number of versions kept of each key. `writer` is the description stored with each write, by
        default machine, process and lock. `patience` is the number of seconds that a call waits for transactions that
        have passed the fence, and for a server that does not answer.
        """
        super().__init__(schema, history, writer, patience)
        self._engine, self._owns_engine = engine_of(database, patience + REPLY_MARGIN, pool_timeout=patience)
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._read_committed = self._engine.execution_options(isolation_level="READ COMMITTED")

    def put(
        self,
        key: str,
        value: Any,
        *,
        fence: int | HasToken | None = None,
        if_version: int | None = None,
        write: int | None = None,
    ) -> Stored:
        """Store a value, JSON or bytes. Raise StaleTokenError if a newer holder has written or claimed the key.

        `fence` is a lease or a token. With `if_version`, the write succeeds only if the key has this version now (0:
        the key does not exist), with or without a fence. `write` is the number of the write under its token. Give it
        only to retry a write: by default each write gets the next number.
        """
        call = self._write_call(key, value, fence, if_version, write, False)
        return self._result_of(call, self._run(call))

    def delete(
        self, key: str, *, fence: int | HasToken | None = None, if_version: int | None = None, write: int | None = None
    ) -> Stored:
        """Delete a key under the same conditions as `put`. Its fence stays."""
        call = self._write_call(key, None, fence, if_version, write, True)
        return self._result_of(call, self._run(call))

    def get(self, key: str) -> Value | None:
        """Return the value of a key, or None if there is none."""
        found = self._decode_rows(self._run(self._read_call(key)))
        return found[0] if found else None

    def history(self, key: str, limit: int | None = None) -> list[Value]:
        """Return the versions of a key, deletions included, newest first; at most `limit` of them."""
        return self._decode_rows(self._run(self._history_call(key, limit)))

    def claims(self, *resources: str) -> Claims:
        """Return claims on resources of this store, for `client.lock(…, claims=[store.claims("a", "b")])`."""
        self._check_open()
        return Claims(self, resources)

    def claim(self, *resources: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise these fences to a token before the first write with it, so that all lower tokens are refused.

        Waits for transactions that have already passed these fences. Raises ClaimTimeout if that takes longer than
        `patience` seconds.
        """
        self._run(self._claim_call(resources, fence, patience))

    def _run(self, call: Call) -> Sequence[Any]:
        while True:
            self._check_open(call)
            call.tries += 1
            try:
                with (
                    self._read_committed.begin() if call.explicit else self._autocommit.connect() as connection,
                    LimitedCall(connection.connection.driver_connection, call.within),
                ):
                    call.sent = True
                    return connection.execute(call.statement, call.values).all()
            except (DBAPIError, PoolTimeout, UnicodeEncodeError) as error:
                time.sleep(self._delay_or_raise(call, error))
            finally:
                if self._closed:
                    self.close()  # the connection of this call too

    def close(self) -> None:
        """Close the store for good, and the connections that it opened. An engine that you passed stays open.

        Later calls raise StoreClosed. A call that is running ends as usual. Closing twice is allowed.
        """
        self._closed = True
        if self._owns_engine:
            # Engine.dispose() would replace the pool, and then no code could close a connection that is in use now.
            self._engine.pool.dispose()

    def __enter__(self) -> FencedStore:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncFencedStore(StoreBase):
    """A key-value store for asyncio, with the methods of FencedStore."""

    def __init__(
        self,
        database: Database,
        *,
        schema: str = DEFAULT_SCHEMA,
        history: int = 10,
        writer: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Create a store; nothing is opened yet. An engine that you pass stays yours, and stays open."""
        super().__init__(schema, history, writer, patience)
        self._engine, self._owns_engine = async_engine_of(database, patience + REPLY_MARGIN, pool_timeout=patience)
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._read_committed = self._engine.execution_options(isolation_level="READ COMMITTED")

    async def put(
        self,
        key: str,
        value: Any,
        *,
        fence: int | HasToken | None = None,
        if_version: int | None = None,
        write: int | None = None,
    ) -> Stored:
        """Store a value, JSON or bytes. Raise StaleTokenError if a newer holder has written or claimed the key."""
        call = self._write_call(key, value, fence, if_version, write, False)
        return self._result_of(call, await self._run(call))

    async def delete(
        self, key: str, *, fence: int | HasToken | None = None, if_version: int | None = None, write: int | None = None
    ) -> Stored:
        """Delete a key under the same conditions as `put`. Its fence stays."""
        call = self._write_call(key, None, fence, if_version, write, True)
        return self._result_of(call, await self._run(call))

    async def get(self, key: str) -> Value | None:
        """Return the value of a key, or None if there is none."""
        found = self._decode_rows(await self._run(self._read_call(key)))
        return found[0] if found else None

    async def history(self, key: str, limit: int | None = None) -> list[Value]:
        """Return the versions of a key, deletions included, newest first; at most `limit` of them."""
        return self._decode_rows(await self._run(self._history_call(key, limit)))

    def claims(self, *resources: str) -> AsyncClaims:
        """Return claims on resources of this store, for `client.lock(…, claims=[store.claims("a", "b")])`."""
        self._check_open()
        return AsyncClaims(self, resources)

    async def claim(self, *resources: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise these fences to a token before the first write with it, so that all lower tokens are refused.

        Waits for transactions that have already passed these fences. Raises ClaimTimeout if that takes longer than
        `patience` seconds.
        """
        await self._run(self._claim_call(resources, fence, patience))

    async def _run(self, call: Call) -> Sequence[Any]:
        while True:
            self._check_open(call)
            call.tries += 1
            try:
                async with self._connection(call.explicit) as connection:
                    with LimitedCall((await connection.get_raw_connection()).driver_connection, call.within):
                        call.sent = True
                        return (await connection.execute(call.statement, call.values)).all()
            except (DBAPIError, PoolTimeout, UnicodeEncodeError) as error:
                await asyncio.sleep(self._delay_or_raise(call, error))
            finally:
                await self._close_again()

    @asynccontextmanager
    async def _connection(self, explicit: bool) -> AsyncIterator[AsyncConnection]:
        """Open a connection, with a transaction if it is to be explicit. It is closed also on cancellation."""
        connection = await opened(self._read_committed if explicit else self._autocommit, self._close_again)
        try:
            if explicit:
                async with connection.begin():
                    yield connection
            else:
                yield connection
        finally:
            # A cancellation must not interrupt it.
            await asyncio.shield(in_background(self._give_back(connection)))

    async def _give_back(self, connection: AsyncConnection) -> None:
        await connection.close()
        await self._close_again()

    async def _close_again(self) -> None:
        """Close a connection that came back to the pool after the store was closed."""
        if self._closed:
            await self.close()

    async def close(self) -> None:
        """Close the store for good, and the connections that it opened. An engine that you passed stays open.

        Later calls raise StoreClosed. A call that is running ends as usual. Closing twice is allowed.
        """
        self._closed = True
        if self._owns_engine:
            # Engine.dispose() would replace the pool, and then no code could close a connection that is in use now.
            await greenlet_spawn(self._engine.pool.dispose)

    async def __aenter__(self) -> AsyncFencedStore:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _ClaimsBase:
    def __init__(self, store: Any, resources: Sequence[str]) -> None:
        self._store = store
        self.resources = tuple(check_resources(resources))


class Claims(_ClaimsBase):
    """Resources to claim with each grant of a lock; made by `FencedStore.claims`."""

    def claim(self, token: int, patience: float = PATIENCE) -> None:
        """Raise the fences of these resources to this token."""
        self._store.claim(*self.resources, fence=token, patience=patience)


class AsyncClaims(_ClaimsBase):
    """Resources to claim with each grant of a lock; made by `AsyncFencedStore.claims`."""

    async def claim(self, token: int, patience: float = PATIENCE) -> None:
        """Raise the fences of these resources to this token."""
        await self._store.claim(*self.resources, fence=token, patience=patience)
