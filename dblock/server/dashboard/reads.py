"""The queries of the pages beside the snapshot. All browsers share each result for at least a second.

So any number of browsers with the same page costs the database as much as one browser.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from dblock._core.options import quoted
from dblock.admin.inspect import Wait
from dblock.errors import AccessDenied
from dblock.server.database import Database
from dblock.server.feed import INTERVAL, lock_columns

FENCES = "fenced_store"
"""The schema whose fences are shown."""

MOST_FENCES = 200_000
"""Fences that are searched for a token. More of them would take too long, because tokens have no index."""

LOST = ("expired", "died", "forced", "forced_now")
"""The events of leases that did not end with a release."""


@dataclass(frozen=True)
class Fences:
    """Which resources refuse a stale token, as far as the server's role may read that."""

    known: bool
    """False if the schema of fenced_store is missing, or the role may not read it."""
    why: str = ""
    """Why nothing is known."""
    own: list[dict[str, Any]] = field(default_factory=list)
    """The fences that stand at the token of this grant: resource, token, stored_at, stored_by."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """The fences that stand at tokens of earlier grants of the lock, as far as the history has these."""
    tables: list[dict[str, Any]] = field(default_factory=list)
    """The tables with fences: resource, per, strict, warn_only, enabled."""
    unprotected: list[str] = field(default_factory=list)
    """The tables without one, up to a hundred."""


class Reads:
    """Shares the results of reads for an interval."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: dict[tuple[Any, ...], tuple[float, asyncio.Future[Any]]] = {}

    async def _shared(self, key: tuple[Any, ...], read: Callable[[], Awaitable[Any]], lasts: float = INTERVAL) -> Any:
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is None or now - kept[0] >= lasts:
            self._kept = {one: found for one, found in self._kept.items() if now - found[0] < 60}
            kept = now, asyncio.ensure_future(read())
            self._kept[key] = kept
        try:
            return await asyncio.shield(kept[1])
        except Exception:
            self._kept.pop(key, None)
            raise

    def forget(self) -> None:
        """Forget all results, because something was changed."""
        self._kept.clear()

    async def lock(self, name: str, stamp: str) -> list[dict[str, Any]]:
        """Return the rows of a lock and of its shares, as in a snapshot, with the whole queue.

        A result is shared only while the lock has the same stamp, so that it is not older than the snapshot.
        """
        extra, presence = lock_columns(1000)
        return await self._shared(  # type: ignore[no-any-return]
            ("lock", name, stamp),
            lambda: self._database.read(
                "list_locks('%', $1, true, 1000) AS l", name, extra=extra, where=presence
            ),
        )  # fmt: skip

    async def history(self, name: str | None, limit: int = 100, stamp: str = "") -> list[dict[str, Any]]:
        """Return the events of a lock or of all, newest first, each with its age."""
        return await self._shared(  # type: ignore[no-any-return]
            ("history", name, limit, stamp),
            lambda: self._database.read("list_history($1, $2)", name, str(limit), extra=_AGE),
        )

    async def grants_are_recorded(self) -> bool:
        """Return whether the history has every grant and release."""
        rows = await self._shared(
            ("recorded",), lambda: self._database.read("grants_are_recorded() AS recorded"), lasts=10
        )
        return bool(rows[0]["recorded"])

    async def waits(self) -> list[Wait]:
        """Return every wait for a lock, and of sessions that work under a token."""
        rows = await self._shared(("waits",), lambda: self._database.read("wait_graph(1000)"))
        return [Wait(**row) for row in rows]

    async def schedules(self) -> list[dict[str, Any]]:
        """Return the schedules with their newest runs."""
        return await self._shared(  # type: ignore[no-any-return]
            ("schedules",),
            lambda: self._database.read(
                "list_schedules(NULL, 12)",
                extra="date_part('epoch', next_slot) - date_part('epoch', clock_timestamp()) AS due_in,"
                " date_part('epoch', clock_timestamp()) - date_part('epoch', overdue_since) AS overdue_for",
            ),
        )

    async def elections(self) -> list[dict[str, Any]]:
        """Return the elections, each with its leader and its candidates."""
        schema = quoted(self._database.schema)
        rows = (
            "SELECT e.election, l.token, l.holder, l.value,"
            " date_part('epoch', clock_timestamp()) - date_part('epoch', l.began_at) AS led_for,"
            f" (SELECT coalesce(json_agg(to_jsonb(c) ORDER BY c.position), '[]')"
            f" FROM {schema}.list_candidates(e.election) AS c) AS candidates"
            " FROM (SELECT substr(k.name, 10) AS election"
            f" FROM {schema}.list_locks('election:%', NULL, true, 100) AS k) AS e"
            f" CROSS JOIN LATERAL {schema}.election_leader(e.election) AS l ORDER BY 1"
        )
        return await self._shared(("elections",), lambda: self._database.query(rows))  # type: ignore[no-any-return]

    async def rejections(self) -> list[dict[str, Any]] | None:
        """Return the newest refused writes. None if there is no fenced_store, or the role may not read its log."""
        if not (await self._fences_there())["readable"]:
            return None
        rows = (
            "SELECT r.*, date_part('epoch', clock_timestamp()) - date_part('epoch', r.rejected_at) AS ago"
            f" FROM {FENCES}.rejections AS r ORDER BY r.id DESC LIMIT 200"
        )
        return await self._shared(("rejections",), lambda: self._database.query(rows))  # type: ignore[no-any-return]

    async def fences(self, tokens: tuple[int, ...], earlier: tuple[int, ...]) -> Fences:
        """Return what is fenced for the grants with these tokens."""
        there = await self._fences_there()
        if not there["installed"]:
            return Fences(False, "fenced_store is not installed in this database, so dblock knows of no fences.")
        if not there["readable"]:
            return Fences(False, "The server's database role may not read the fences of fenced_store.")
        if there["fences"] > MOST_FENCES:
            return Fences(False, f"There are more than {MOST_FENCES} fences, which are not searched for a token.")
        wanted = "{" + ",".join(str(token) for token in (*tokens, *earlier) if token > 0) + "}"
        rows = (
            "SELECT f.resource, f.token, f.stored_at, f.stored_by,"
            " date_part('epoch', clock_timestamp()) - date_part('epoch', f.stored_at) AS ago"
            f" FROM {FENCES}.fences AS f WHERE f.token = ANY ($1::bigint[]) AND NOT f.purgeable"
            " ORDER BY f.token DESC, f.resource LIMIT 200"
        )
        found = await self._shared(("fences", wanted), lambda: self._database.query(rows, wanted), lasts=2)
        tables = await self._shared(
            ("tables",), lambda: self._database.query(f"SELECT * FROM {FENCES}.protected_tables()"), lasts=5
        )
        bare = await self._shared(("bare",), lambda: self._database.query(_UNPROTECTED, self._database.schema), lasts=5)
        return Fences(
            True,
            own=[one for one in found if one["token"] in tokens],
            earlier=[one for one in found if one["token"] not in tokens],
            tables=tables,
            unprotected=[one["name"] for one in bare],
        )

    async def _fences_there(self) -> dict[str, Any]:
        try:
            (found,) = await self._shared(("fenced",), lambda: self._database.query(_FENCES_THERE), lasts=10)
        except AccessDenied:
            return {"installed": True, "readable": False, "fences": 0}
        return found  # type: ignore[no-any-return]


_AGE = "date_part('epoch', clock_timestamp()) - date_part('epoch', at) AS ago"

_FENCES_THERE = (
    "SELECT c.oid IS NOT NULL AS installed, coalesce(c.reltuples, 0) AS fences,"
    " coalesce(has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')"
    " AND has_table_privilege(r.oid, 'SELECT'), false) AS readable"
    f" FROM (SELECT) AS one LEFT JOIN pg_namespace AS n ON n.nspname = '{FENCES}'"
    " LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'fences'"
    " LEFT JOIN pg_class AS r ON r.relnamespace = n.oid AND r.relname = 'rejections'"
)

_UNPROTECTED = (
    "SELECT format('%I.%I', n.nspname, c.relname) AS name FROM pg_class AS c"
    " JOIN pg_namespace AS n ON n.oid = c.relnamespace"
    " WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition"
    f" AND n.nspname NOT IN ('pg_catalog', 'information_schema', '{FENCES}', $1) AND n.nspname NOT LIKE 'pg\\_%'"
    f" AND c.relname <> 'alembic_version' AND NOT EXISTS (SELECT FROM {FENCES}.protections AS p"
    " WHERE p.target = c.oid AND NOT p.warn_only) ORDER BY 1 LIMIT 100"
)
