"""A key-value store whose keys refuse a stale writer.

Guarantee: of the writes that carry tokens, a key accepts one only if its (token, write number) is greater than the pair
that it has accepted before, or that was claimed for it; one statement decides. The same write sent twice is stored
once, and the second is answered as done. Deleting a key keeps its fence.

Each write is one call in a transaction of its own, made durable before it is answered.
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

from fenced_store._postgres.engines import Where, async_engine_of, engine_of, missing
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource, check_schema
from fenced_store._postgres.values import Stored, Value, bounded, decoded, encoded
from fenced_store.errors import (
    ClaimTimeout,
    InvalidArgument,
    OutcomeUnknown,
    StaleTokenError,
    VersionConflict,
    shown,
    sqlstate,
    translated,
)
from fenced_store.schema import bindable
from fenced_store.tokens import HasToken, check_free, check_write, token_of, who, write_of

TRIES = 4
"""How often a write is sent before its outcome is called unknown."""

PAUSE = 0.2
"""Seconds before the second sending, twice as long before each further one."""

PATIENCE = 5.0
"""Seconds that a claim waits for those who are past a fence, unless told otherwise."""

_COLUMNS = "CAST(value AS text), data, version, token, stored_at, stored_by"
"""The JSON as text, because drivers differ in what they make of it."""


class _Write(NamedTuple):
    key: str
    token: int | None
    number: int
    if_version: int | None
    statement: TextClause
    values: dict[str, Any]


_KINDS = {
    "key": "text", "token": "bigint", "number": "bigint", "value": "jsonb", "data": "bytea", "if_version": "bigint",
    "attempt": "uuid", "who": "text",
}  # fmt: skip
_REPEATED, _STALE, _CONFLICT = 1, 2, 3
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class _StoreBase:
    """What both kinds of store know: the statements, what goes into them, and what comes out."""

    def __init__(self, schema: str, history: int, writer: str | None) -> None:
        if isinstance(history, bool) or not isinstance(history, int) or not 0 <= history <= 2**31 - 1:
            raise InvalidArgument(
                f"history is the number of versions to keep of each key, from 0; got {history!r:.80}."
            )
        self._schema = check_schema(schema)
        self._history = history
        self._writer = check_resource(writer) if writer is not None else None
        ours = bindable(schema)
        self._ours = ours
        self._writes: dict[tuple[str, ...], TextClause] = {}
        """The statement for each set of values that a write may come with: what is not there need not be sent."""
        self._read = text(f"SELECT {_COLUMNS} FROM {ours}.read(CAST(:key AS text))")
        self._past = text(f"SELECT {_COLUMNS} FROM {ours}.history(CAST(:key AS text), CAST(:most AS integer))")
        self._claim = text(
            f"SELECT CAST({ours}.claim(CAST(:resources AS text[]), CAST(:token AS bigint), CAST(:who AS text),"
            " CAST(:patience AS double precision)) AS text)"
        )

    def _writing(
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
                f"A write of key {shown(key)} needs a fence= to be refused by when it is stale, or an if_version= to "
                "replace: without either, two writers would undo each other."
            )
        token = None if fence is None else token_of(fence)
        check_free(key)
        if if_version is not None and (
            isinstance(if_version, bool) or not isinstance(if_version, int) or not 0 <= if_version < 2**63
        ):
            raise InvalidArgument(
                f"A version is a whole number, 0 for a key that is not there; got {if_version!r:.80}."
            )
        values: dict[str, Any] = {"key": key}
        if token is not None:
            assert fence is not None
            number = write_of(fence) if write is None else check_write(write)
            values |= {"token": token, "number": number}
        else:
            # Numbers order writes under a token. Without one, it is only to tell the same write from another.
            number = random.getrandbits(62) + 1 if write is None else check_write(write)
            values["attempt"] = str(uuid.UUID(int=number))
        if if_version is not None:
            values["if_version"] = if_version
        if isinstance(value, (bytes, bytearray, memoryview)):
            values["data"] = bounded(key, bytes(value))
        elif not delete:
            values["value"] = encoded(key, value)
        values["who"] = self._writer or who(fence)
        return _Write(key, token, number, if_version, self._statement(tuple(values)), values)

    def _statement(self, given: tuple[str, ...]) -> TextClause:
        statement = self._writes.get(given)
        if statement is None:
            value = {name: f"CAST(:{name} AS {kind})" if name in given else "NULL" for name, kind in _KINDS.items()}
            # As a column and not as a table, which Postgres would first write down. OFFSET 0, so that it is called
            # once. One array of numbers, because each column that comes back takes its time in the driver.
            statement = self._writes[given] = text(
                "SELECT ARRAY[CASE (r).outcome WHEN 'stored' THEN 0 WHEN 'repeated' THEN 1 WHEN 'stale' THEN 2 ELSE 3"
                " END, (r).version, (r).stored_token, (r).stored_write,"
                " CAST(date_part('epoch', (r).stored_at) * 1e6 AS bigint)]"
                f" FROM (SELECT {self._ours}.write({value['key']}, {value['token']}, {value['number']},"
                f" {value['value']}, {value['data']},"
                f" {value['if_version']}, {value['attempt']}, {self._history}, {value['who']}) AS r"
                " OFFSET 0) AS a"
            )
        return statement

    def _claiming(self, resources: Sequence[str], fence: int | HasToken, patience: float) -> dict[str, Any]:
        if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience < 86_400:
            raise InvalidArgument(
                f"The patience of a claim is more than 0 s and less than a day; got {patience!r:.80}."
            )
        for resource in resources:
            check_free(resource)
        return {
            "resources": _resources(resources),
            "token": token_of(fence),
            "who": self._writer or who(fence),
            "patience": patience,
        }

    def _outcome(self, write: _Write, row: Sequence[Any]) -> Stored:
        outcome, version, token, number, at = row[0]
        stored_at = None if at is None else _EPOCH + timedelta(microseconds=at)
        if outcome == _STALE:
            assert write.token is not None
            raise StaleTokenError(write.key, write.token, token, stored_at, numbers=(write.number, number))
        if outcome == _CONFLICT:
            assert write.if_version is not None
            raise VersionConflict(write.key, write.if_version, version)
        assert stored_at is not None
        return Stored(write.key, version, token, number, stored_at, outcome == _REPEATED)

    def _failed(self, write: _Write | None, error: DBAPIError, tries: int, sent: bool) -> float:
        """Return how long to wait before the same is sent again, or raise what the error means.

        It can be sent again however far it came, because the database knows a write that it has accepted.
        """
        lost = error.connection_invalidated or _is_lost(error)
        if tries < TRIES and (lost or sqlstate(error) in ("40001", "40P01")):
            return PAUSE * 2.0 ** (tries - 1) if lost else 0.01
        counterpart = translated(error) or missing(error, self._schema)
        if write is None and sqlstate(error) == "55P03":
            counterpart = ClaimTimeout(
                "What was to be claimed could not be: a transaction past its fence goes on. Nothing was claimed."
            )
        if counterpart is None and lost and sent and write is not None:
            counterpart = OutcomeUnknown(write.key, write.number, str(error.orig).strip())
        if counterpart is None:
            raise error
        raise counterpart from error

    def _values_of(self, rows: Sequence[Any]) -> list[Value]:
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
    def _most(most: int | None) -> int | None:
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 < most < 2**31):
            raise InvalidArgument(f"A number of versions is from 1; got {most!r:.80}.")
        return most


class FencedStore(_StoreBase):
    """A store, for threads, in the schema that `install` has made."""

    def __init__(
        self, where: Where, *, schema: str = DEFAULT_SCHEMA, history: int = 10, writer: str | None = None
    ) -> None:
        """Name the database; nothing is opened yet. An engine is the user's, and stays open.

        `history` is how many versions are kept of each key, `writer` what is remembered of who wrote it, by default the
        machine and process.
        """
        super().__init__(schema, history, writer)
        self._engine, self._is_ours = engine_of(where)
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
        """Store a value, JSON or bytes; raise StaleTokenError when a newer holder has written or claimed the key.

        `fence` is a lease or a token. `if_version` replaces that version and no other, with or without a lock; 0 stands
        for a key that is not there. `write` numbers the writes under a token; by default it comes by itself, and is
        given only to send the same write again.
        """
        made = self._writing(key, value, fence, if_version, write, False)
        return self._outcome(made, self._run(made, made.statement, made.values)[0])

    def delete(
        self, key: str, *, fence: int | HasToken | None = None, if_version: int | None = None, write: int | None = None
    ) -> Stored:
        """Delete a key on the same terms as `put`. Its fence stays."""
        made = self._writing(key, None, fence, if_version, write, True)
        return self._outcome(made, self._run(made, made.statement, made.values)[0])

    def get(self, key: str) -> Value | None:
        """Return what is stored, or None."""
        found = self._values_of(self._run(None, self._read, {"key": check_resource(key)}))
        return found[0] if found else None

    def history(self, key: str, most: int | None = None) -> list[Value]:
        """Return the latest versions of a key, deletions among them, the newest first."""
        return self._values_of(self._run(None, self._past, {"key": check_resource(key), "most": self._most(most)}))

    def claims(self, *resources: str) -> Claims:
        """Name resources of this store for `client.lock(…, claims=[store.claims("a", "b")])`."""
        return Claims(self, resources)

    def claim(self, *resources: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise these fences to a token before anything is written with it, and refuse all lower ones from now on.

        Waits for transactions that are past these fences already; ClaimTimeout when that takes longer than `patience`.
        """
        self._run(None, self._claim, self._claiming(resources, fence, patience))

    def _run(self, write: _Write | None, statement: TextClause, values: dict[str, Any]) -> Sequence[Any]:
        tries, sent = 0, False
        while True:
            tries += 1
            try:
                with self._autocommit.connect() as connection:
                    sent = True
                    return connection.execute(statement, values).all()
            except DBAPIError as error:
                time.sleep(self._failed(write, error, tries, sent))

    def close(self) -> None:
        """Close what was opened for this store; a user's engine stays as it is."""
        if self._is_ours:
            self._engine.dispose()

    def __enter__(self) -> FencedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncFencedStore(_StoreBase):
    """A store, for asyncio. Each word means what it means in FencedStore."""

    def __init__(
        self, where: Where, *, schema: str = DEFAULT_SCHEMA, history: int = 10, writer: str | None = None
    ) -> None:
        """Name the database; nothing is opened yet. An engine is the user's, and stays open."""
        super().__init__(schema, history, writer)
        self._engine, self._is_ours = async_engine_of(where)
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
        """Store a value, JSON or bytes; raise StaleTokenError when a newer holder has written or claimed the key."""
        made = self._writing(key, value, fence, if_version, write, False)
        return self._outcome(made, (await self._run(made, made.statement, made.values))[0])

    async def delete(
        self, key: str, *, fence: int | HasToken | None = None, if_version: int | None = None, write: int | None = None
    ) -> Stored:
        """Delete a key on the same terms as `put`. Its fence stays."""
        made = self._writing(key, None, fence, if_version, write, True)
        return self._outcome(made, (await self._run(made, made.statement, made.values))[0])

    async def get(self, key: str) -> Value | None:
        """Return what is stored, or None."""
        found = self._values_of(await self._run(None, self._read, {"key": check_resource(key)}))
        return found[0] if found else None

    async def history(self, key: str, most: int | None = None) -> list[Value]:
        """Return the latest versions of a key, deletions among them, the newest first."""
        values = {"key": check_resource(key), "most": self._most(most)}
        return self._values_of(await self._run(None, self._past, values))

    def claims(self, *resources: str) -> AsyncClaims:
        """Name resources of this store for `client.lock(…, claims=[store.claims("a", "b")])`."""
        return AsyncClaims(self, resources)

    async def claim(self, *resources: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise these fences to a token before anything is written with it, and refuse all lower ones from now on.

        Waits for transactions that are past these fences already; ClaimTimeout when that takes longer than `patience`.
        """
        await self._run(None, self._claim, self._claiming(resources, fence, patience))

    async def _run(self, write: _Write | None, statement: TextClause, values: dict[str, Any]) -> Sequence[Any]:
        tries, sent = 0, False
        while True:
            tries += 1
            try:
                async with self._autocommit.connect() as connection:
                    sent = True
                    return (await connection.execute(statement, values)).all()
            except DBAPIError as error:
                await asyncio.sleep(self._failed(write, error, tries, sent))

    async def close(self) -> None:
        """Close what was opened for this store; a user's engine stays as it is."""
        if self._is_ours:
            await self._engine.dispose()

    async def __aenter__(self) -> AsyncFencedStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Claims:
    """Resources of a store, to be claimed with each grant of a lock; made by `FencedStore.claims`."""

    def __init__(self, store: Any, resources: Sequence[str]) -> None:
        self._store = store
        self.resources = tuple(_resources(resources))

    def claim(self, token: int, patience: float = PATIENCE) -> None:
        """Claim them for this token."""
        self._store.claim(*self.resources, fence=token, patience=patience)


class AsyncClaims:
    """Resources of a store, to be claimed with each grant of a lock; made by `AsyncFencedStore.claims`."""

    def __init__(self, store: Any, resources: Sequence[str]) -> None:
        self._store = store
        self.resources = tuple(_resources(resources))

    async def claim(self, token: int, patience: float = PATIENCE) -> None:
        """Claim them for this token."""
        await self._store.claim(*self.resources, fence=token, patience=patience)


def _resources(resources: Sequence[str]) -> list[str]:
    if not resources:
        raise InvalidArgument("A claim names at least one resource; none was given.")
    return [check_resource(resource) for resource in resources]


def _is_lost(error: DBAPIError) -> bool:
    """Tell whether the connection is gone, though SQLAlchemy has not noticed: it ended while the answer was awaited."""
    state = sqlstate(error)
    return (state is None and "connection" in str(error.orig).lower()) or state in (
        "57P01",
        "57P02",
        "57P03",
        "08006",
        "08003",
    )
