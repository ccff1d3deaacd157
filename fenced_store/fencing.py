"""A fence in the user's own transaction.

Guarantee: from the moment the fence is taken until the transaction ends, no holder of another token gets past the
fence. Whatever the transaction does, to whatever tables, is therefore done by the newest holder that the resource has
seen, and the work of two holders never overlaps. A stale token fails the transaction in the database itself, so that
none of its work can be committed by accident.
"""

# The module is not called `fence`, because `fenced_store.fence` is the public function.

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

from fenced_store._postgres.error_mapping import not_usable, refusal_of
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource, check_schema
from fenced_store._postgres.rejection_log import record_rejection, record_rejection_async
from fenced_store._postgres.user_transaction import UserTransaction
from fenced_store.errors import FenceBroken, FencedStoreError, InvalidArgument, StaleTokenError, abbreviated, translated
from fenced_store.tokens import HasToken, describe_writer, next_write, refuse_self_wait, token_of

TAKE = (
    "SELECT current_setting('fenced_store.token', true), current_setting('fenced_store.fence', true),"
    " CAST({schema}.raise_fence(CAST({resource} AS text),"
    " CAST({token} AS bigint), CAST({write} AS bigint), CAST({who} AS text)) AS text),"
    " set_config('fenced_store.token', CAST({carried} AS text), true),"
    " set_config('fenced_store.fence', CAST({fence} AS text), true), CAST(pg_current_xact_id() AS text)"
)
LEAVE = (
    "SELECT current_setting('fenced_store.token', true), current_setting('fenced_store.fence', true),"
    " set_config('fenced_store.token', CAST({carried} AS text), true),"
    " set_config('fenced_store.fence', CAST({fence} AS text), true), CAST(pg_current_xact_id_if_assigned() AS text)"
)


class Fence:
    """A fence around a part of a transaction; made by `fence`."""

    def __init__(
        self,
        connection: Any,
        resource: str,
        holder: int | HasToken,
        live: bool,
        schema: str,
        write: int | None = None,
    ) -> None:
        self._resource = check_resource(resource)
        self._holder = holder
        self.token = token_of(holder)
        """The token that every write in the body carries."""
        refuse_self_wait(self._resource, connection)
        self._live = live
        self._write = write
        self._schema = check_schema(schema)
        if live and not hasattr(holder, "assert_held"):
            raise InvalidArgument(
                f"live=True needs a lease that can be proved in the transaction, such as dblock's; got "
                f"{type(holder).__name__}."
            )
        self._connection = connection
        self._transaction = UserTransaction(connection, schema)
        self._name = f"{random.getrandbits(64):x}"
        """The fence's name in the transaction's settings. Rolling back past the fence removes the name as well."""
        self._outer_settings: dict[str, str] = {}
        """The token and the name of the fence around this one, restored at the end of the body."""
        self._transaction_id: str | None = None

    @property
    def _parameters(self) -> dict[str, Any]:
        return {
            "resource": self._resource,
            "token": self.token,
            "write": next_write() if self._write is None else self._write,
            "who": describe_writer(self._holder),
            "carried": str(self.token),
            "fence": self._name,
        }

    def __enter__(self) -> Fence:
        if self._transaction.is_async:
            raise InvalidArgument("This connection is asynchronous: write `async with fence(...)`.")
        if self._live:
            # Lock the lock's row before the fence's row, in the order of a grant with claims.
            self._holder.assert_held(self._connection)  # type: ignore[union-attr]
        try:
            row = self._transaction.fetch_row(TAKE, **self._parameters)
        except Exception as error:
            self._raise_translated(error)
            self._raise_refusal(error)
            raise
        self._entered(row)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._raise_translated(error)
            if self._transaction.usable:
                self._transaction.fetch_row(LEAVE, **self._outer_settings)
            return
        try:
            self._transaction.flush()
        except Exception as failed:
            self._raise_translated(failed)
            raise
        self._check_open()
        self._check_unbroken(self._transaction.fetch_row(LEAVE, **self._outer_settings))

    async def __aenter__(self) -> Fence:
        if not self._transaction.is_async:
            raise InvalidArgument("This connection is synchronous: write `with fence(...)`.")
        if self._live:
            await self._holder.assert_held(self._connection)  # type: ignore[union-attr]
        try:
            row = await self._transaction.fetch_row_async(TAKE, **self._parameters)
        except Exception as error:
            await self._raise_translated_async(error)
            self._raise_refusal(error)
            raise
        self._entered(row)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._raise_translated_async(error)
            if self._transaction.usable and isinstance(error, Exception):
                await self._transaction.fetch_row_async(LEAVE, **self._outer_settings)
            return
        try:
            await self._transaction.flush_async()
        except Exception as failed:
            await self._raise_translated_async(failed)
            raise
        self._check_open()
        self._check_unbroken(await self._transaction.fetch_row_async(LEAVE, **self._outer_settings))

    def _entered(self, row: tuple[Any, ...]) -> None:
        """Keep the settings and the transaction that the fence was taken in."""
        self._outer_settings = {"carried": row[0] or "", "fence": row[1] or ""}
        self._transaction_id = row[5]

    def _raise_translated(self, error: BaseException) -> None:
        """Raise the fenced_store error for a database error, if there is one, after recording a rejection."""
        counterpart = self._translated(error)
        if counterpart is not None:
            if isinstance(counterpart, StaleTokenError):
                record_rejection(self._transaction.driver, self._schema, counterpart, describe_writer(self._holder))
            raise counterpart from error

    async def _raise_translated_async(self, error: BaseException) -> None:
        counterpart = self._translated(error)
        if counterpart is not None:
            if isinstance(counterpart, StaleTokenError):
                await record_rejection_async(
                    self._transaction.driver, self._schema, counterpart, describe_writer(self._holder)
                )
            raise counterpart from error

    def _raise_refusal(self, error: Exception) -> None:
        """Raise the fenced_store error if the statement that takes the fence was refused for what it is.

        A lost connection is the user's own, and is reported as the user's library reports it. So is an error of a
        statement in the body.
        """
        if (counterpart := refusal_of(error, self._resource)) is not None:
            raise counterpart from error

    def _translated(self, error: BaseException) -> FencedStoreError | None:
        return translated(error) or not_usable(error, self._schema)

    def _check_open(self) -> None:
        if self._transaction.ended:
            raise self._broken("ended")

    def _check_unbroken(self, row: tuple[Any, ...]) -> None:
        carried, name, _, _, transaction_id = row
        if transaction_id != self._transaction_id:
            raise self._broken("ended, and another was begun")
        if (carried, name) != (str(self.token), self._name):
            raise self._broken("rolled back to a savepoint from before the fence, or changed fenced_store.token")

    def _broken(self, what: str) -> FenceBroken:
        return FenceBroken(
            f"Inside the fence of {abbreviated(self._resource)} its transaction {what}: the work since then is not "
            "protected. Commit or roll back after the body."
        )


def fence(
    connection: Any, resource: str, lease: int | HasToken, *, live: bool = False, schema: str = DEFAULT_SCHEMA
) -> Fence:
    """Protect a transaction by the fence of a resource: `with fence(connection, "ledger", lease): …`

    `connection` has an open transaction. It is psycopg's, a SQLAlchemy Connection or Session, or Django's. Use
    `async with` for their asyncio variants. The fence is taken at once, and StaleTokenError is raised if the resource
    has seen a higher token. Statements in the body carry the token for protected tables too.

    With `live`, and the lock in the same database, the lease must also still be the current grant. This is proved
    before the fence is taken.
    """
    return Fence(connection, resource, lease, live, schema)
