"""The server's access to the database: one runtime of a client for locks, and a small pool for reads.

The runtime has no presence, so a lease outlives the server that acquired it. The keep-alive gets no leases, so only the
HTTP client renews. Reads have their own connections, so many readers delay no renewal.

No connection is opened before the first request. If the database does not reply, a request raises an error of dblock,
which `problems` turns into the status 503.
"""

from __future__ import annotations

import asyncio
import json
from contextvars import ContextVar
from typing import Any, TypeVar

from dblock._core.effects import Call, Flow
from dblock._core.options import quoted
from dblock._core.replies import Grant
from dblock._core.schema_version import check_name
from dblock._runtime import runtime as runtimes
from dblock._runtime.runner import AsyncRunner
from dblock._runtime.target import resolve
from dblock.admin.schema import install
from dblock.errors import AccessDenied, Unavailable
from dblock.server.flows import ServerFlows
from dblock.server.settings import Settings

T = TypeVar("T")

READERS = 2
"""Connections for reads."""

holder_label: ContextVar[str] = ContextVar("holder_label", default="dblock serve")
"""The name that other clients see as the holder, for the request that runs in this context."""


class Database:
    """The database of one server."""

    def __init__(self, settings: Settings) -> None:
        """Name the database. Nothing is opened yet."""
        self.schema = check_name(settings.schema)
        self.flows = ServerFlows(self.schema, holder_label.get, settings.ticket_ttl)
        target = resolve(settings.dsn, embedded=settings.embedded)
        self.runtime = runtimes.TaskRuntime(
            runtimes.Settings(target, target, self.schema, settings.pool_size, settings.patience, None, install),
            self.flows,
        )
        self._reader = AsyncRunner(target, self.schema, READERS, settings.patience)

    async def run(self, flow: Flow[T]) -> T:
        """Perform a flow of `flows`."""
        return await self.runtime.run(flow)

    async def run_last(self, flow: Flow[T]) -> T:
        """Perform a flow that cleans up, to its end, even if the caller is cancelled or the server stops."""
        return await asyncio.shield(asyncio.ensure_future(self.runtime.run_even_if_closed(flow)))

    async def installation(self) -> str:
        """Return the ID of the installation, which no caller of the server sees."""
        if not self.runtime.installation:
            await self.run(_nothing())
        return self.runtime.installation

    async def read(
        self, call: str, *arguments: str | None, extra: str | None = None, where: str = ""
    ) -> list[dict[str, Any]]:
        """Call a function of the schema that returns rows, in one statement, and return the rows as JSON objects.

        `call` is the name of the function, or its call with $1, $2, … for the arguments and an alias. `extra` is one
        more column, and `where` what follows the call. In both {schema} stands for the schema.
        """
        await self.installation()
        schema = quoted(self.schema)
        if "(" not in call:
            call = f"{call}({', '.join(f'${number + 1}' for number in range(len(arguments)))})"
        columns = "*" if extra is None else f"*, {extra.replace('{schema}', schema)}"
        return await self.query(
            f"SELECT {columns} FROM {schema}.{call} {where.replace('{schema}', schema)}", *arguments
        )

    async def query(self, rows: str, *arguments: str | None) -> list[dict[str, Any]]:
        """Return the rows of any SELECT as JSON objects. `rows` names its schemas itself."""
        await self.installation()
        sql = f"SELECT coalesce(json_agg(to_jsonb(r)), '[]') FROM ({rows}) AS r"
        row = await self._reader.run(_one(Call(sql.encode(), arguments)))
        found: list[dict[str, Any]] = json.loads(row[0])
        return found

    async def force_release(self, name: str, token: int, actor: str, reason: str, now: bool) -> bool:
        """Take the lock from one exact grant. False if it is not held under this token, so nothing was done.

        Raises Unavailable if a lost reply leaves open whether the lock was taken.
        """
        await self.installation()
        taken = f"{quoted(self.schema)}.force_release($1, $2, $3, $4, $5)"
        call = Call(
            f"SELECT {taken}".encode(),
            (name, str(token), actor, reason, "t" if now else "f"),
            f"SELECT nullif({taken}, false)".encode(),
        )
        (found,) = await self._reader.run(_one(call))
        if found is None:
            lost = Unavailable(f"The reply about lock {name!a:.80} was lost. It may have been taken from its holder.")
            lost.may_be_done = True
            raise lost
        return bool(found == "t")

    async def is_there(self) -> bool:
        """Return whether the database replies, with a schema that fits. A role that lacks a privilege gets a reply."""
        try:
            await self.installation()
            await self._reader.run(_one(self._reader.statements.revision))
        except AccessDenied:
            return True
        except Exception:
            return False
        return True

    async def close(self) -> None:
        """Close the connections. Leases stay held, and tickets keep their positions for their ttl."""
        self._reader.close()
        await self.runtime.close()


def seconds_left(grant: Grant, now: float) -> float:
    """Return the seconds that a lease lasts at least, counted from before its request was sent."""
    from dblock._core.acquire import TRUST

    left = (grant.trusted_until - grant.sent_at) / TRUST - (now - grant.sent_at)
    return max(left, 0.0)


def _one(call: Call) -> Flow[Any]:
    row = yield call
    if row is None:
        raise Unavailable("The database returned no row.")
    return row


def _nothing() -> Flow[None]:
    """Open the runtime without a call."""
    return
    yield
