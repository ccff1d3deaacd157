"""A fence in a transaction of the user's own.

Guarantee: from where the fence was taken until that transaction ends, no holder of another token gets past it. Whatever
the transaction does, to whatever tables, is therefore done by the newest holder that the resource has seen, and what
two holders do is one after the other. A stale token fails the transaction in the database itself, so that nothing of it
can be committed by accident.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

from fenced_store._postgres.engines import missing
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource, check_schema
from fenced_store._postgres.user_transaction import UsersTransaction
from fenced_store.audit import note, note_async
from fenced_store.errors import FenceBroken, FencedStoreError, InvalidArgument, StaleTokenError, shown, translated
from fenced_store.tokens import HasToken, check_free, next_write, token_of, who

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
        """The token that everything inside is written with."""
        check_free(self._resource, connection)
        self._live = live
        self._write = write
        self._schema = check_schema(schema)
        if live and not hasattr(holder, "assert_held"):
            raise InvalidArgument(
                f"live=True needs a lease that can be proved in the transaction, such as dblock's; got "
                f"{type(holder).__name__}."
            )
        self._connection = connection
        self._transaction = UsersTransaction(connection, schema)
        self._name = f"{random.getrandbits(64):x}"
        """By which it is known in the transaction: a fence that was undone takes its name with it."""
        self._before: dict[str, str] = {}
        self._inside: str | None = None

    @property
    def _values(self) -> dict[str, Any]:
        return {
            "resource": self._resource,
            "token": self.token,
            "write": next_write() if self._write is None else self._write,
            "who": who(self._holder),
            "carried": str(self.token),
            "fence": self._name,
        }

    def __enter__(self) -> Fence:
        if self._transaction.is_async:
            raise InvalidArgument("This connection is asynchronous: write `async with fence(...)`.")
        if self._live:
            # The lock's row before the fence's, as a grant that claims takes them.
            self._holder.assert_held(self._connection)  # type: ignore[union-attr]
        try:
            row = self._transaction.row(TAKE, **self._values)
        except Exception as error:
            self._refuse(error)
            raise
        self._before, self._inside = {"carried": row[0] or "", "fence": row[1] or ""}, row[5]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._refuse(error)
            if self._transaction.usable:
                self._transaction.row(LEAVE, **self._before)
            return
        try:
            self._transaction.flush()
        except Exception as failed:
            self._refuse(failed)
            raise
        self._check_open()
        self._check_same(self._transaction.row(LEAVE, **self._before))

    async def __aenter__(self) -> Fence:
        if not self._transaction.is_async:
            raise InvalidArgument("This connection is synchronous: write `with fence(...)`.")
        if self._live:
            await self._holder.assert_held(self._connection)  # type: ignore[union-attr]
        try:
            row = await self._transaction.row_async(TAKE, **self._values)
        except Exception as error:
            await self._refuse_async(error)
            raise
        self._before, self._inside = {"carried": row[0] or "", "fence": row[1] or ""}, row[5]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._refuse_async(error)
            if self._transaction.usable and isinstance(error, Exception):
                await self._transaction.row_async(LEAVE, **self._before)
            return
        try:
            await self._transaction.flush_async()
        except Exception as failed:
            await self._refuse_async(failed)
            raise
        self._check_open()
        self._check_same(await self._transaction.row_async(LEAVE, **self._before))

    def _refuse(self, error: BaseException) -> None:
        """Raise our counterpart of a refusal by the database, once it is noted."""
        counterpart = self._counterpart(error)
        if counterpart is not None:
            if isinstance(counterpart, StaleTokenError):
                note(self._transaction.driver, self._schema, counterpart, who(self._holder))
            raise counterpart from error

    async def _refuse_async(self, error: BaseException) -> None:
        counterpart = self._counterpart(error)
        if counterpart is not None:
            if isinstance(counterpart, StaleTokenError):
                await note_async(self._transaction.driver, self._schema, counterpart, who(self._holder))
            raise counterpart from error

    def _counterpart(self, error: BaseException) -> FencedStoreError | None:
        return translated(error) or missing(error, self._schema)

    def _check_open(self) -> None:
        if self._transaction.ended:
            raise self._broken("ended")

    def _check_same(self, row: tuple[Any, ...]) -> None:
        carried, name, _, _, now = row
        if now != self._inside:
            raise self._broken("ended, and another was begun")
        if (carried, name) != (str(self.token), self._name):
            raise self._broken("went back to a savepoint from before the fence, or changed fenced_store.token")

    def _broken(self, what: str) -> FenceBroken:
        return FenceBroken(
            f"Inside the fence of {shown(self._resource)} its transaction {what}: what was done since is not "
            "protected. Commit or roll back after the body."
        )


def fence(
    connection: Any, resource: str, lease: int | HasToken, *, live: bool = False, schema: str = DEFAULT_SCHEMA
) -> Fence:
    """Protect a transaction by a resource's fence: `with fence(connection, "ledger", lease): …`

    `connection` has a transaction under way: psycopg's, or a SQLAlchemy Connection or Session; `async with` for one of
    asyncio's. The fence is taken at once, and StaleTokenError raised if the resource has seen a higher token.
    Statements in the body carry the token for protected tables too.

    With `live`, and the lock in the same database, the lease must also still be the current grant; it is proved first.
    """
    return Fence(connection, resource, lease, live, schema)
