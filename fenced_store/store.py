"""A key-value store whose keys refuse stale writers.

Guarantee: a key accepts a write that carries a token only if its (token, write number) is greater than every pair that
the key has accepted or that was claimed for it. One statement decides. A write is idempotent: the same write sent twice
is stored once, and the second reply says so. Deleting a key keeps its fence.

Each write is one call in a transaction of its own, and is durable before the reply is sent.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import Any, NamedTuple

from sqlalchemy import TextClause, text
from sqlalchemy.exc import DBAPIError

from fenced_store._postgres.engines import Database, async_engine_of, engine_of
from fenced_store._postgres.error_mapping import not_usable
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource, check_schema
from fenced_store._postgres.values import Stored, Value, checked_bytes, decoded, encoded
from fenced_store.errors import (
    ClaimTimeout,
    InvalidArgument,
    OutcomeUnknown,
    StaleTokenError,
    VersionConflict,
    abbreviated,
    sqlstate,
    translated,
)
from fenced_store.schema import quoted_for_text
from fenced_store.tokens import HasToken, check_write, describe_writer, refuse_self_wait, token_of, write_of

TRIES = 4
"""How often a write is sent before OutcomeUnknown is raised."""

PAUSE = 0.2
"""Seconds before the first retry, doubled before each further one."""

PATIENCE = 5.0
"""Seconds that a claim waits by default for transactions that have passed the fence."""

_COLUMNS = "CAST(value AS text), data, version, token, stored_at, stored_by"
"""The JSON as text, because drivers decode it differently."""


class _Write(NamedTuple):
    """One write, ready to be sent."""

    key: str
    token: int | None
    number: int
    if_version: int | None
    statement: TextClause
    values: dict[str, Any]


_TYPES = {
    "key": "text", "token": "bigint", "number": "bigint", "value": "jsonb", "data": "bytea", "if_version": "bigint",
    "attempt": "uuid", "who": "text",
}  # fmt: skip
_REPEATED, _STALE, _CONFLICT = 1, 2, 3
"""The outcomes of a write, besides 0 for stored. The statement encodes the words of SQL's `write` as these integers,
because one array of integers is the quickest reply for the driver to decode."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class _StoreBase:
    """The part of both stores that does no I/O: the statements, their parameters, and the decoding of replies."""

    def __init__(self, schema: str, history: int, writer: str | None) -> None:
        if isinstance(history, bool) or not isinstance(history, int) or not 0 <= history <= 2**31 - 1:
            raise InvalidArgument(
                f"history is the number of versions to keep of each key, a whole number from 0; got {history!r:.80}."
            )
        self._schema = check_schema(schema)
        self._versions_kept = history
        self._writer = check_resource(writer) if writer is not None else None
        self._quoted_schema = quoted_schema = quoted_for_text(schema)
        self._writes: dict[tuple[str, ...], TextClause] = {}
        """The statement for each set of given values; values that are not given are not sent."""
        self._read_query = text(f"SELECT {_COLUMNS} FROM {quoted_schema}.read(CAST(:key AS text))")
        self._history_query = text(
            f"SELECT {_COLUMNS} FROM {quoted_schema}.history(CAST(:key AS text), CAST(:limit AS integer))"
        )
        self._claim_query = text(
            f"SELECT CAST({quoted_schema}.claim(CAST(:resources AS text[]), CAST(:token AS bigint), CAST(:who AS text),"
            " CAST(:patience AS double precision)) AS text)"
        )

    def _prepare_write(
        self,
        key: str,
        value: Any,
        fence: int | HasToken | None,
        if_version: int | None,
        write: int | None,
        delete: bool,
    ) -> _Write:
        check_resource(key)
        if fence is None and if_version is None:
            raise InvalidArgument(
                f"A write of key {abbreviated(key)} needs fence=, so that it is refused if stale, or if_version=, the "
                "version to replace. Without either, two writers would overwrite each other."
            )
        token = None if fence is None else token_of(fence)
        refuse_self_wait(key)
        if if_version is not None and (
            isinstance(if_version, bool) or not isinstance(if_version, int) or not 0 <= if_version < 2**63
        ):
            raise InvalidArgument(
                f"if_version is a whole number, 0 for a key that does not exist; got {if_version!r:.80}."
            )
        values: dict[str, Any] = {"key": key}
        if token is not None:
            assert fence is not None
            number = write_of(fence) if write is None else check_write(write)
            values |= {"token": token, "number": number}
        else:
            # Numbers order the writes under a token. Without a token, the number only identifies the write.
            number = random.getrandbits(62) + 1 if write is None else check_write(write)
            values["attempt"] = str(uuid.UUID(int=number))
        if if_version is not None:
            values["if_version"] = if_version
        if isinstance(value, (bytes, bytearray, memoryview)):
            values["data"] = checked_bytes(key, bytes(value))
        elif not delete:
            values["value"] = encoded(key, value)
        values["who"] = self._writer or describe_writer(fence)
        return _Write(key, token, number, if_version, self._statement(tuple(values)), values)

    def _statement(self, given: tuple[str, ...]) -> TextClause:
        statement = self._writes.get(given)
        if statement is None:
            value = {name: f"CAST(:{name} AS {kind})" if name in given else "NULL" for name, kind in _TYPES.items()}
            # The function is called as a column: Postgres would materialize the result of a function in FROM. OFFSET 0
            # makes it call the function once. The result is one array, because the driver takes time for each column.
            statement = self._writes[given] = text(
                "SELECT ARRAY[CASE (r).outcome WHEN 'stored' THEN 0 WHEN 'repeated' THEN 1 WHEN 'stale' THEN 2 ELSE 3"
                " END, (r).version, (r).stored_token, (r).stored_write,"
                " CAST(date_part('epoch', (r).stored_at) * 1e6 AS bigint)]"
                f" FROM (SELECT {self._quoted_schema}.write({value['key']}, {value['token']}, {value['number']},"
                f" {value['value']}, {value['data']},"
                f" {value['if_version']}, {value['attempt']}, {self._versions_kept}, {value['who']}) AS r"
                " OFFSET 0) AS a"
            )
        return statement

    def _claim_parameters(self, resources: Sequence[str], fence: int | HasToken, patience: float) -> dict[str, Any]:
        if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience < 86_400:
            raise InvalidArgument(
                f"patience is a number of seconds, more than 0 and less than a day; got {patience!r:.80}."
            )
        for resource in resources:
            refuse_self_wait(resource)
        return {
            "resources": _check_resources(resources),
            "token": token_of(fence),
            "who": self._writer or describe_writer(fence),
            "patience": patience,
        }

    def _result_of(self, write: _Write, rows: Sequence[Any]) -> Stored:
        outcome, version, token, number, at = rows[0][0]
        stored_at = None if at is None else _EPOCH + timedelta(microseconds=at)
        if outcome == _STALE:
            assert write.token is not None
            raise StaleTokenError(write.key, write.token, token, stored_at, numbers=(write.number, number))
        if outcome == _CONFLICT:
            assert write.if_version is not None
            raise VersionConflict(write.key, write.if_version, version)
        assert stored_at is not None
        return Stored(write.key, version, token, number, stored_at, outcome == _REPEATED)

    def _delay_or_raise(self, write: _Write | None, error: DBAPIError, tries: int, sent: bool) -> float:
        """Return the seconds to wait before the next try. If there is none, raise the fenced_store error for this one.

        A retry is safe however far the write came, because the database recognises a write that it has accepted.
        """
        lost = error.connection_invalidated or _is_connection_lost(error)
        if tries < TRIES and (lost or sqlstate(error) in ("40001", "40P01")):
            return PAUSE * 2.0 ** (tries - 1) if lost else 0.01
        counterpart = translated(error) or not_usable(error, self._schema)
        if write is None and sqlstate(error) == "55P03":
            counterpart = ClaimTimeout(
                "Claim timed out: a transaction that has already passed the fence is still open. Nothing was claimed. "
                "Try again, or give it more patience."
            )
        if counterpart is None and lost and sent and write is not None:
            counterpart = OutcomeUnknown(write.key, write.number, str(error.orig).strip())
        if counterpart is None:
            raise error
        raise counterpart from error

    def _decode_rows(self, rows: Sequence[Any]) -> list[Value]:
        return [
            Value(
                decoded(json_text, data),
                version,
                token,
                at.astimezone(timezone.utc),
                by,
                json_text is None and data is None,
            )
            for json_text, data, version, token, at, by in rows
        ]

    @staticmethod
    def _history_parameters(key: str, limit: int | None) -> dict[str, Any]:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit < 2**31):
            raise InvalidArgument(f"limit is a whole number from 1; got {limit!r:.80}.")
        return {"key": check_resource(key), "limit": limit}


class FencedStore(_StoreBase):
    """A key-value store for threads, in the schema that `install` creates."""

    def __init__(
        self, database: Database, *, schema: str = DEFAULT_SCHEMA, history: int = 10, writer: str | None = None
    ) -> None:
        """Create a store; nothing is opened yet. An engine that you pass stays yours, and stays open.

        `history` is the number of versions kept of each key. `writer` is the description stored with each write, by
        default machine, process and lock.
        """
        super().__init__(schema, history, writer)
        self._engine, self._owns_engine = engine_of(database)
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")

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
        prepared = self._prepare_write(key, value, fence, if_version, write, False)
        return self._result_of(prepared, self._run(prepared, prepared.statement, prepared.values))

    def delete(
        self, key: str, *, fence: int | HasToken | None = None, if_version: int | None = None, write: int | None = None
    ) -> Stored:
        """Delete a key under the same conditions as `put`. Its fence stays."""
        prepared = self._prepare_write(key, None, fence, if_version, write, True)
        return self._result_of(prepared, self._run(prepared, prepared.statement, prepared.values))

    def get(self, key: str) -> Value | None:
        """Return the value of a key, or None if there is none."""
        found = self._decode_rows(self._run(None, self._read_query, {"key": check_resource(key)}))
        return found[0] if found else None

    def history(self, key: str, limit: int | None = None) -> list[Value]:
        """Return the versions of a key, deletions included, newest first; at most `limit` of them."""
        return self._decode_rows(self._run(None, self._history_query, self._history_parameters(key, limit)))

    def claims(self, *resources: str) -> Claims:
        """Return claims on resources of this store, for `client.lock(…, claims=[store.claims("a", "b")])`."""
        return Claims(self, resources)

    def claim(self, *resources: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise these fences to a token before the first write with it, so that all lower tokens are refused.

        Waits for transactions that have already passed these fences. Raises ClaimTimeout if that takes longer than
        `patience` seconds.
        """
        self._run(None, self._claim_query, self._claim_parameters(resources, fence, patience))

    def _run(self, write: _Write | None, statement: TextClause, values: dict[str, Any]) -> Sequence[Any]:
        tries, sent = 0, False
        while True:
            tries += 1
            try:
                with self._autocommit.connect() as connection:
                    sent = True
                    return connection.execute(statement, values).all()
            except DBAPIError as error:
                time.sleep(self._delay_or_raise(write, error, tries, sent))

    def close(self) -> None:
        """Close the connections that this store opened. An engine that you passed stays open."""
        if self._owns_engine:
            self._engine.dispose()

    def __enter__(self) -> FencedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncFencedStore(_StoreBase):
    """A key-value store for asyncio, with the methods of FencedStore."""

    def __init__(
        self, database: Database, *, schema: str = DEFAULT_SCHEMA, history: int = 10, writer: str | None = None
    ) -> None:
        """Create a store; nothing is opened yet. An engine that you pass stays yours, and stays open."""
        super().__init__(schema, history, writer)
        self._engine, self._owns_engine = async_engine_of(database)
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")

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
        prepared = self._prepare_write(key, value, fence, if_version, write, False)
        return self._result_of(prepared, await self._run(prepared, prepared.statement, prepared.values))

    async def delete(
        self, key: str, *, fence: int | HasToken | None = None, if_version: int | None = None, write: int | None = None
    ) -> Stored:
        """Delete a key under the same conditions as `put`. Its fence stays."""
        prepared = self._prepare_write(key, None, fence, if_version, write, True)
        return self._result_of(prepared, await self._run(prepared, prepared.statement, prepared.values))

    async def get(self, key: str) -> Value | None:
        """Return the value of a key, or None if there is none."""
        found = self._decode_rows(await self._run(None, self._read_query, {"key": check_resource(key)}))
        return found[0] if found else None

    async def history(self, key: str, limit: int | None = None) -> list[Value]:
        """Return the versions of a key, deletions included, newest first; at most `limit` of them."""
        return self._decode_rows(await self._run(None, self._history_query, self._history_parameters(key, limit)))

    def claims(self, *resources: str) -> AsyncClaims:
        """Return claims on resources of this store, for `client.lock(…, claims=[store.claims("a", "b")])`."""
        return AsyncClaims(self, resources)

    async def claim(self, *resources: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise these fences to a token before the first write with it, so that all lower tokens are refused.

        Waits for transactions that have already passed these fences. Raises ClaimTimeout if that takes longer than
        `patience` seconds.
        """
        await self._run(None, self._claim_query, self._claim_parameters(resources, fence, patience))

    async def _run(self, write: _Write | None, statement: TextClause, values: dict[str, Any]) -> Sequence[Any]:
        tries, sent = 0, False
        while True:
            tries += 1
            try:
                async with self._autocommit.connect() as connection:
                    sent = True
                    return (await connection.execute(statement, values)).all()
            except DBAPIError as error:
                await asyncio.sleep(self._delay_or_raise(write, error, tries, sent))

    async def close(self) -> None:
        """Close the connections that this store opened. An engine that you passed stays open."""
        if self._owns_engine:
            await self._engine.dispose()

    async def __aenter__(self) -> AsyncFencedStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _ClaimsBase:
    def __init__(self, store: Any, resources: Sequence[str]) -> None:
        self._store = store
        self.resources = tuple(_check_resources(resources))


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


def _check_resources(resources: Sequence[str]) -> list[str]:
    if not resources:
        raise InvalidArgument("A claim names at least one resource; none was given.")
    return [check_resource(resource) for resource in resources]


def _is_connection_lost(error: DBAPIError) -> bool:
    """Return whether the connection ended while it waited for the reply, which SQLAlchemy does not notice."""
    state = sqlstate(error)
    return (state is None and "connection" in str(error.orig).lower()) or state in (
        "57P01",
        "57P02",
        "57P03",
        "08006",
        "08003",
    )
