"""The calls of a store: their statements, parameters and replies, and when a call is retried. No I/O.

A call is retried if the connection was lost, because the database recognises a write that it has accepted. It is
retried in a READ COMMITTED transaction if it conflicts with another transaction, which happens if the server's default
isolation is stricter.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import TextClause, text
from sqlalchemy.exc import DBAPIError

from fenced_store._postgres.error_mapping import CONFLICTS, counterpart_of, is_login_refused, is_lost
from fenced_store._postgres.identifiers import check_resource, check_schema
from fenced_store._postgres.values import MICROSECONDS, Stored, Value, checked_bytes, decoded, encoded, moment
from fenced_store.errors import (
    ClaimTimeout,
    FencedStoreError,
    InvalidArgument,
    OutcomeUnknown,
    StaleTokenError,
    StoreClosed,
    VersionConflict,
    WriteTimeout,
    abbreviated,
    sqlstate,
)
from fenced_store.refusals import reported
from fenced_store.schema import quoted_for_text
from fenced_store.tokens import HasToken, check_write, describe_writer, refuse_self_wait, token_of, write_of

TRIES = 4
"""How often a write is sent before OutcomeUnknown is raised."""

PAUSE = 0.2
"""Seconds before the first retry, doubled before each further one."""

PATIENCE = 5.0
"""Seconds that a call waits by default for transactions that have passed the fence, and for the server's reply."""

REPLY_MARGIN = 1.0
"""Seconds that a reply may take longer than the server itself waits, so that the server's own error arrives first."""

_COLUMNS = f"CAST(value AS text), data, version, token, {MICROSECONDS.format('stored_at')}, stored_by"
"""The JSON as text, because drivers decode it differently."""


class Write(NamedTuple):
    """The part of a write that its result is compared with."""

    key: str
    token: int | None
    number: int
    if_version: int | None


class Call:
    """One call of a store, over all its tries."""

    def __init__(
        self,
        resource: str,
        statement: TextClause,
        values: dict[str, Any],
        patience: float,
        *,
        write: Write | None = None,
        explicit: bool = False,
    ) -> None:
        self.resource = resource
        self.statement = statement
        self.values = values
        self.patience = patience
        self.within = patience + REPLY_MARGIN
        """Seconds of silence after which the server counts as not answering."""
        self.deadline = time.monotonic() + patience
        """The time after which no further connection is opened."""
        self.write = write
        self.tries = 0
        self.sent = False
        """Whether the statement may have reached the server."""
        self.unanswered = False
        """Whether a try that may have reached the server got no reply."""
        self.explicit = explicit
        """Whether to begin a READ COMMITTED transaction, whatever the server's default. That costs two round trips."""


_TYPES = {
    "key": "text", "token": "bigint", "number": "bigint", "value": "jsonb", "data": "bytea", "if_version": "bigint",
    "attempt": "uuid", "who": "text",
}  # fmt: skip
_REPEATED, _STALE, _CONFLICT = 1, 2, 3
"""The outcomes of a write, besides 0 for stored. The statement encodes the words of SQL's `write` as these integers,
because one array of integers is the quickest reply for the driver to decode."""


class StoreBase:
    """The part of both stores that does no I/O: the statements, their parameters, and the decoding of replies."""

    def __init__(self, schema: str, history: int, writer: str | None, patience: float) -> None:
        if isinstance(history, bool) or not isinstance(history, int) or not 0 <= history <= 2**31 - 1:
            raise InvalidArgument(
                f"history is the number of versions to keep of each key, a whole number from 0; got {history!r:.80}."
            )
        self._schema = check_schema(schema)
        self._versions_kept = history
        self._writer = check_resource(writer) if writer is not None else None
        self._patience = _check_patience(patience)
        self._closed = False
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

    def _check_open(self, call: Call | None = None) -> None:
        """Raise StoreClosed if the store was closed, or OutcomeUnknown if this call has sent a write before that."""
        if not self._closed:
            return
        if call is not None and call.sent and call.write is not None:
            raise OutcomeUnknown(call.write.key, call.write.number, "the store was closed before a retry.")
        raise StoreClosed(type(self).__name__, self._schema)

    def _write_call(
        self,
        key: str,
        value: Any,
        fence: int | HasToken | None,
        if_version: int | None,
        write: int | None,
        delete: bool,
    ) -> Call:
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
        return Call(
            key,
            self._statement(tuple(values)),
            values,
            self._patience,
            write=Write(key, token, number, if_version),
        )

    def _read_call(self, key: str) -> Call:
        return Call(key, self._read_query, {"key": check_resource(key)}, self._patience)

    def _history_call(self, key: str, limit: int | None) -> Call:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit < 2**31):
            raise InvalidArgument(f"limit is a whole number from 1; got {limit!r:.80}.")
        return Call(key, self._history_query, {"key": check_resource(key), "limit": limit}, self._patience)

    def _statement(self, given: tuple[str, ...]) -> TextClause:
        statement = self._writes.get(given)
        if statement is None:
            value = {name: f"CAST(:{name} AS {kind})" if name in given else "NULL" for name, kind in _TYPES.items()}
            # Evaluated before the function is called, for this transaction alone.
            limit = f"set_config('lock_timeout', '{max(round(self._patience * 1000), 1)}ms', true)"
            # The function is called as a column: Postgres would materialize the result of a function in FROM. OFFSET 0
            # makes it call the function once. The result is one array, because the driver takes time for each column.
            statement = self._writes[given] = text(
                "SELECT ARRAY[CASE (r).outcome WHEN 'stored' THEN 0 WHEN 'repeated' THEN 1 WHEN 'stale' THEN 2 ELSE 3"
                f" END, (r).version, (r).stored_token, (r).stored_write, {MICROSECONDS.format('(r).stored_at')}]"
                f" FROM (SELECT {self._quoted_schema}.write(CASE WHEN {limit} IS NOT NULL THEN {value['key']} END,"
                f" {value['token']}, {value['number']},"
                f" {value['value']}, {value['data']},"
                f" {value['if_version']}, {value['attempt']}, {self._versions_kept}, {value['who']}) AS r"
                " OFFSET 0) AS a"
            )
        return statement

    def _claim_call(self, resources: Sequence[str], fence: int | HasToken, patience: float) -> Call:
        _check_patience(patience)
        for resource in resources:
            refuse_self_wait(resource)
        values = {
            "resources": check_resources(resources),
            "token": token_of(fence),
            "who": self._writer or describe_writer(fence),
            "patience": patience,
        }
        # A claim must see the tables that were protected while it waited. A stricter transaction would not.
        return Call(resources[0], self._claim_query, values, patience, explicit=True)

    def _result_of(self, call: Call, rows: Sequence[Any]) -> Stored:
        write = call.write
        assert write is not None
        outcome, version, token, number, at = rows[0][0]
        stored_at = moment(at)
        if outcome == _STALE:
            assert write.token is not None
            raise reported(StaleTokenError(write.key, write.token, token, stored_at, numbers=(write.number, number)))
        if outcome == _CONFLICT:
            assert write.if_version is not None
            raise VersionConflict(write.key, write.if_version, version)
        assert stored_at is not None
        return Stored(write.key, version, token, number, stored_at, outcome == _REPEATED)

    def _delay_or_raise(self, call: Call, error: Exception) -> float:
        """Return the seconds to wait before the next try. If there is none, raise the fenced_store error for this one.

        A retry is safe however far the write came, because the database recognises a write that it has accepted.
        """
        refused = is_login_refused(error)
        lost = not refused and isinstance(error, DBAPIError) and (error.connection_invalidated or is_lost(error))
        conflict = sqlstate(error) in CONFLICTS
        if call.tries < TRIES and (conflict or (lost and time.monotonic() < call.deadline)):
            # A transaction that is no stricter than READ COMMITTED waits for the other one, and then succeeds.
            call.explicit = call.explicit or conflict
            call.unanswered = call.unanswered or (lost and call.sent)
            return PAUSE * 2.0 ** (call.tries - 1) if lost else 0.01
        write = call.write
        counterpart: FencedStoreError | None
        if sqlstate(error) == "55P03" and write is not None:
            counterpart = WriteTimeout(write.key, self._patience)
        elif sqlstate(error) == "55P03":
            counterpart = ClaimTimeout(
                "Claim timed out: a transaction that has already passed the fence is still open. Nothing was claimed. "
                "Try again, or give it more patience."
            )
        elif (call.unanswered if refused else lost and call.sent) and write is not None:
            counterpart = OutcomeUnknown(write.key, write.number, str(getattr(error, "orig", error)).strip())
        else:
            counterpart = counterpart_of(error, self._schema, call.resource)
        if counterpart is None:
            raise error
        raise counterpart from error

    def _decode_rows(self, rows: Sequence[Any]) -> list[Value]:
        found = []
        for json_text, data, version, token, at, by in rows:
            stored_at = moment(at)
            assert stored_at is not None
            is_deletion = json_text is None and data is None
            found.append(Value(decoded(json_text, data), version, token, stored_at, by, is_deletion))
        return found


def check_resources(resources: Sequence[str]) -> list[str]:
    """Return the resources of a claim if there is at least one and all are valid."""
    if not resources:
        raise InvalidArgument("A claim names at least one resource; none was given.")
    return [check_resource(resource) for resource in resources]


def _check_patience(patience: float) -> float:
    if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience < 86_400:
        raise InvalidArgument(
            f"patience is a number of seconds, more than 0 and less than a day; got {patience!r:.80}."
        )
    return patience
