"""The table of locks: from a snapshot to the rows that a query with filters, a search and a sort order selects.

Nothing here queries the database. A shared lock is one row, for any number of shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from dblock.admin.graph.waits import Graph, build_graph, name_matcher
from dblock.admin.inspect import LockState, Waiter
from dblock.server.feed import Snapshot

PER_PAGE = 100
MOST_PER_PAGE = 1000

FILTERS = {
    "all": "All",
    "awaited": "Awaited",
    "stuck": "In a cycle",
    "gone": "Holder gone",
    "forced": "Told to release",
    "shared": "Shared",
}
"""Each filter, and what its chip says."""

SORTS = {
    "trouble": "Trouble first",
    "name": "Name",
    "kind": "Kind",
    "holder": "Holder",
    "held": "Held for",
    "left": "Deadline",
    "waiting": "Waiters",
    "oldest": "Oldest wait",
}
"""Each order, and its name."""


@dataclass(frozen=True)
class Row:
    """A lock as the table shows it. The times are seconds at the moment of the snapshot."""

    name: str
    kind: str
    """One of lock, read-write and semaphore."""
    state: str
    """One of held, forced and free."""
    holder: str | None
    token: int | None
    shares: int
    permits: int | None
    alive: bool | None
    """Whether the holder's session lives: None if the grant is tied to no session."""
    waiting: int
    stuck: bool
    anchor: tuple[Any, ...] = field(default=(), repr=False)
    """The moments that the times below are measured from. A row looks the same until one of them changes."""
    held_for: float | None = field(default=None, compare=False)
    left: float | None = field(default=None, compare=False)
    oldest: float | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """The name in a form that HTML and JSON leave as it is, and that no other name has."""
        return self.name if self.name.isprintable() and "%" not in self.name else quote(self.name)

    @property
    def holder_text(self) -> str:
        """Who holds the lock."""
        if self.kind == "semaphore":
            return f"{self.shares} of {self.permits} permits"
        if self.kind == "read-write" and self.shares > 1:
            return f"{self.shares} readers"
        return self.holder or ("free" if self.state == "free" else "unnamed")

    @property
    def look(self) -> tuple[Any, ...]:
        """Everything that the row shows except its times."""
        return (
            self.name, self.kind, self.state, self.holder, self.token, self.shares, self.permits, self.alive,
            self.waiting, self.stuck,
        )  # fmt: skip

    def times(self, age: float) -> list[float | None]:
        """Return the seconds that the lock has been held, that are left, and that its first waiter has waited."""
        return [
            None if self.held_for is None else round(self.held_for + age, 1),
            None if self.left is None else round(max(self.left - age, 0), 1),
            None if self.oldest is None else round(self.oldest + age, 1),
        ]


@dataclass(frozen=True)
class Query:
    """What a browser asked to see: parsed from the query of its address, whatever that contains."""

    show: str = "all"
    search: str = ""
    sort: str = "trouble"
    descending: bool = False
    page: int = 1
    per: int = PER_PAGE

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Query:
        """Return the query of an address. Invalid values are ignored."""
        show, sort = given.get("show", "all"), given.get("sort", "trouble")
        return cls(
            show if show in FILTERS else "all",
            given.get("q", "").strip()[:512],
            sort if sort in SORTS else "trouble",
            given.get("down") == "1",
            _number(given.get("page"), 1, 100_000),
            _number(given.get("per"), PER_PAGE, MOST_PER_PAGE),
        )

    def href(self, **changes: Any) -> str:
        """Return the address of this query with changes. A change of what is selected goes back to the first page."""
        now = {
            "show": self.show, "q": self.search, "sort": self.sort, "down": "1" if self.descending else "",
            "page": self.page, "per": self.per,
        }  # fmt: skip
        if changes.keys() - {"page"}:
            now["page"] = 1
        now.update(changes)
        usual = {"show": "all", "q": "", "sort": "trouble", "down": "", "page": 1, "per": PER_PAGE}
        given = {key: value for key, value in now.items() if value != usual[key]}
        return f"?{urlencode(given)}" if given else "?"

    def sort_href(self, sort: str) -> str:
        """Return the address that sorts by a column, or reverses the order if the table is sorted by it already."""
        turned = self.sort == sort and not self.descending
        return self.href(sort=sort, down="1" if turned else "")


def _number(text: str | None, usual: int, most: int) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 6:
        return usual
    return min(max(int(text), 1), most)


@dataclass(frozen=True)
class Table:
    """All rows of a snapshot, for every query."""

    rows: list[Row]
    graph: Graph
    number: int
    more: bool

    @property
    def counts(self) -> dict[str, int]:
        """How many rows each filter selects."""
        return {show: sum(map(_FILTER[show], self.rows)) for show in FILTERS}

    @property
    def totals(self) -> dict[str, Any]:
        """The figures above the table."""
        oldest = max(
            (row for row in self.rows if row.oldest is not None), key=lambda row: row.oldest or 0, default=None
        )
        return {
            "held": sum(row.state != "free" for row in self.rows),
            "waiting": sum(row.waiting for row in self.rows),
            "oldest": oldest,
            "stuck": sum(row.stuck for row in self.rows),
            "gone": sum(row.alive is False for row in self.rows),
        }

    def select(self, query: Query) -> list[Row]:
        """Return the rows that the query selects, in its order, on all pages."""
        shown = _FILTER[query.show]
        found = [row for row in self.rows if shown(row)]
        if query.search:
            wild = "*" in query.search or "?" in query.search
            text = query.search.casefold()
            matches = name_matcher(query.search, ignore_case=True)
            found = [
                row
                for row in found
                if (matches(row.name) if wild else text in row.name.casefold() or text in (row.holder or "").casefold())
            ]
        found.sort(key=lambda row: row.name)
        found.sort(key=_ORDER[query.sort])
        return found[::-1] if query.descending else found


def make_table(snapshot: Snapshot) -> Table:
    """Return the table of a snapshot."""
    states = [lock_state(lock) for lock in snapshot.locks]
    waiters = [waiter_of(lock["name"], one) for lock in snapshot.locks for one in lock["queue"] or ()]
    graph = build_graph(states, waiters)
    shares: dict[str, list[dict[str, Any]]] = {}
    for lock in snapshot.locks:
        if lock["head"] is not None and lock["remaining"]:
            shares.setdefault(lock["head"], []).append(lock)
    rows = [
        _row(lock, state, shares.get(lock["name"], []), graph)
        for lock, state in zip(snapshot.locks, states, strict=True)
        if lock["head"] is None
    ]
    return Table(rows, graph, snapshot.number, snapshot.more)


def lock_state(lock: Mapping[str, Any]) -> LockState:
    """Return a lock of a snapshot as the graph takes it, without its moments."""
    return LockState(
        lock["name"], lock["token"], lock["holder"], None, None, None, None, lock["forced_at"],
        float(lock["remaining"]), lock["waiting"], lock["kind"], lock["head"], lock["permits"], lock["held"],
    )  # fmt: skip


def waiter_of(name: str, one: Mapping[str, Any]) -> Waiter:
    """Return a waiter of a snapshot as the graph takes it."""
    return Waiter(name, one["position"], one["holder"], one["since"], float(one["seconds"]), one["mode"])


def _row(lock: dict[str, Any], state: LockState, shares: list[dict[str, Any]], graph: Graph) -> Row:
    grants = shares if state.held is not None else [lock] if state.state != "free" else []
    alive = [one["alive"] for one in grants if one["alive"] is not None]
    first = min(grants, key=lambda one: float(one["remaining"]), default=None)
    longest = max(grants, key=lambda one: float(one["held_for"] or 0), default=None)
    queue = lock["queue"] or []
    forced = state.state == "forced" or any(one["forced_at"] for one in grants)
    return Row(
        lock["name"],
        lock["kind"] or "lock",
        "free" if state.state == "free" else "forced" if forced else "held",
        grants[0]["holder"] if len(grants) == 1 else None,
        grants[0]["token"] if len(grants) == 1 and grants[0]["token"] > 0 else None,
        len(shares),
        state.permits,
        None if not alive else all(alive),
        lock["waiting"],
        graph.is_stuck(lock=lock["name"]),
        (longest and longest["granted_at"], first and first["expires_at"], queue[0]["since"] if queue else None),
        None if longest is None else float(longest["held_for"]),
        None if first is None else float(first["remaining"]),
        float(queue[0]["seconds"]) if queue else None,
    )


_FILTER: dict[str, Callable[[Row], bool]] = {
    "all": lambda row: True,
    "awaited": lambda row: row.waiting > 0,
    "stuck": lambda row: row.stuck,
    "gone": lambda row: row.alive is False,
    "forced": lambda row: row.state == "forced",
    "shared": lambda row: row.kind != "lock",
}

_ORDER: dict[str, Callable[[Row], Any]] = {
    "trouble": lambda row: (not row.stuck, row.alive is not False, row.state != "forced", -(row.oldest or 0)),
    "name": lambda row: row.name,
    "kind": lambda row: row.kind,
    "holder": lambda row: row.holder_text.casefold(),
    "held": lambda row: -(row.held_for or 0),
    "left": lambda row: float("inf") if row.left is None else row.left,
    "waiting": lambda row: -row.waiting,
    "oldest": lambda row: -(row.oldest or 0),
}
