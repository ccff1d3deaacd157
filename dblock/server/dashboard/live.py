"""What a stream sends: the difference between two snapshots, as the rows of one query.

All streams with the same query share one `LiveTable`, which renders a row only when it changes, and encodes each
difference once. A stream remembers only the number of the last snapshot that it sent. A browser gives this number when
it reconnects, and gets the difference, or all rows if the difference is no longer known.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dblock.server.dashboard.rendering import environment
from dblock.server.dashboard.rows import Query, Row, Table, make_table
from dblock.server.feed import Snapshot

MOST_QUERIES = 64
"""Queries that streams may have at the same time. Each costs the server a selection and a difference a second."""

MOST_GONE = 2000


class _Shown:
    """A row, its HTML, and the snapshots in which its look and its times last changed."""

    def __init__(self, row: Row, html: str, number: int) -> None:
        self.row = row
        self.html = html
        self.looks_since = number
        self.times_since = number


class LiveTable:
    """The rows of one query."""

    def __init__(self, query: Query, base: str) -> None:
        self._query = query
        self._base = base
        self._rows: dict[str, _Shown] = {}
        self._order_since = 0
        self._gone: deque[tuple[int, str]] = deque(maxlen=MOST_GONE)
        self._known_from = 0
        self._number = 0
        self._encoded: dict[int | None, str] = {}
        self._figures: dict[str, Any] = {}

    def update(self, table: Table) -> None:
        """Apply a snapshot, unless it was applied before."""
        if table.number <= self._number:
            return
        if not self._number:
            self._known_from = table.number
        self._number = number = table.number
        selected = table.select(self._query)
        first = (self._query.page - 1) * self._query.per
        before, self._rows = self._rows, {}
        macro = environment().get_template("rows.html").module.lock_row  # type: ignore[attr-defined]
        for row in selected[first : first + self._query.per]:
            shown = before.get(row.key)
            if shown is None or shown.row.look != row.look:
                shown = _Shown(row, str(macro(row, None, self._base)), number)
            elif shown.row.anchor != row.anchor:
                shown.times_since = number
            shown.row = row
            self._rows[row.key] = shown
        for key in before.keys() - self._rows.keys():
            if len(self._gone) == MOST_GONE:
                self._known_from = max(self._known_from, self._gone[0][0])
            self._gone.append((number, key))
        if list(before) != list(self._rows):
            self._order_since = number
        totals, oldest = table.totals, table.totals["oldest"]
        self._figures = {
            **{key: totals[key] for key in ("held", "waiting", "stuck", "gone")},
            "oldest": None if oldest is None else oldest.oldest,
            "found": len(selected),
            **{f"show-{show}": count for show, count in table.counts.items()},
        }
        self._encoded = {}

    def since(self, last: int | None) -> str:
        """Return what changed since a snapshot, as JSON. Return all rows if that snapshot is not known."""
        if last is not None and (last < self._known_from or last > self._number):
            last = None
        if last not in self._encoded:
            self._encoded[last] = json.dumps(self._difference(last), separators=(",", ":"))
        return self._encoded[last]

    def _difference(self, last: int | None) -> dict[str, Any]:
        after = -1 if last is None else last
        found: dict[str, Any] = {"figures": self._figures}
        changed = {key: shown.html for key, shown in self._rows.items() if shown.looks_since > after}
        times = {
            key: shown.row.times(0)
            for key, shown in self._rows.items()
            if shown.looks_since > after or shown.times_since > after
        }
        gone = [key for number, key in self._gone if number > after and key not in self._rows]
        if changed:
            found["rows"] = changed
        if times:
            found["times"] = times
        if last is None:
            found["full"] = True
        elif gone:
            found["gone"] = gone
        if last is None or self._order_since > after:
            found["order"] = list(self._rows)
        return found


class LiveTables:
    """The tables of all queries that streams have, from one snapshot."""

    def __init__(self, base: str = "./") -> None:
        """`base` is what the addresses in rows begin with."""
        self._base = base
        self._tables: OrderedDict[Query, LiveTable] = OrderedDict()
        self._made: tuple[Snapshot, Table] | None = None
        self._watched: Counter[Query] = Counter()

    def is_full(self, query: Query) -> bool:
        """Return whether streams have so many other queries that no stream may have this one."""
        return query not in self._watched and len(self._watched) >= MOST_QUERIES

    @contextmanager
    def watched(self, query: Query) -> Iterator[None]:
        """Count a stream with this query while the block runs."""
        self._watched[query] += 1
        try:
            yield
        finally:
            self._watched[query] -= 1
            if not self._watched[query]:
                del self._watched[query]

    def table(self, snapshot: Snapshot) -> Table:
        """Return the table of a snapshot, made once."""
        if self._made is None or self._made[0] is not snapshot:
            self._made = snapshot, make_table(snapshot)
        return self._made[1]

    def of(self, query: Query, snapshot: Snapshot) -> LiveTable:
        """Return the rows of a query, up to date."""
        live = self._tables.pop(query, None) or LiveTable(query, self._base)
        self._tables[query] = live
        while len(self._tables) > MOST_QUERIES:
            self._tables.popitem(last=False)
        live.update(self.table(snapshot))
        return live


def lock_stamp(snapshot: Snapshot, name: str) -> str:
    """Return a hash that changes when a lock's page has to be read again. A renewal does not change it."""
    found = hashlib.sha256()
    for lock in snapshot.locks:
        if name in (lock["name"], lock["head"]):
            queue = [(one["holder"], one["since"]) for one in lock["queue"] or ()]
            seen = (lock["name"], lock["token"], lock["forced_at"], lock["waiting"], lock["alive"], queue)
            found.update(repr((seen, lock["remaining"] > 0)).encode())
    return found.hexdigest()[:16]
