"""Bugs in the resource: fences that accept stale tokens."""

from __future__ import annotations

from typing import Any

from tests.robustness.mutations import Bug, Edit

STORE = "20_write.sql"
LATE = {"late": 0.3, "kept_alive": 0.3}
"""Many writers with an expired lease."""


def _claim_nothing() -> None:
    """Make the client request the grant without the claims."""
    from dblock._core.acquire import LockFlows
    from dblock._core.effects import Call

    def call(self: LockFlows, options: Any, sql: bytes, args: Any, again: bytes | None, within: float) -> Call:
        return Call(sql, args, again, within)

    LockFlows._call = call  # type: ignore[method-assign]


def _deliver_twice() -> None:
    """Deliver each write of a key a second time, after the next write."""
    from fenced_store import FencedStore

    put: Any = FencedStore.put
    before: dict[tuple[int, str], Any] = {}

    def twice(self: FencedStore, *args: Any, **options: Any) -> Any:
        result = put(self, *args, **options)
        late = before.get((id(self), args[0]))
        before[id(self), args[0]] = args, options
        if late is not None and late[1].get("fence") == options.get("fence"):
            put(self, *late[0], **late[1])
        return result

    FencedStore.put = twice  # type: ignore[method-assign]


def _fence(file: str, right: str, wrong: str) -> Edit:
    return Edit(file, right, wrong, "fenced_store")


PAIRS = "        WHERE (excluded.token, excluded.write_number) > (f.token, f.write_number)\n"

BUGS = (
    Bug(
        "fence compares nothing",
        "stores every write, whatever its token",
        ("fence", "sets"),
        workload="set_add:key",
        workers=2,
        seconds=1.5,
        options=LATE,
        edits=(_fence(STORE, PAIRS, ""),),
    ),
    Bug(
        "fence of a transaction compares nothing",
        "accepts every transaction at the fence",
        ("bank", "fence"),
        workload="bank",
        options=LATE,
        edits=(_fence("10_raise_fence.sql", "    WHERE f.token <= excluded.token AND (NOT", "    WHERE (NOT"),),
    ),
    Bug(
        "protected row unguarded",
        "lets every statement write a protected row, whatever the token of its transaction",
        ("sets", "fence"),
        workload="set_add:row",
        options=LATE,
        edits=(
            _fence("31_guards.sql", "          f.token > greatest(offered, stored)\n", "          false\n"),
            _fence("31_guards.sql", "IF fence.token > greatest(offered, stored) THEN", "IF false THEN"),
            _fence("31_guards.sql", "    IF offered < stored THEN\n", "    IF false THEN\n"),
        ),
    ),
    Bug(
        "fence accepts an equal token",
        "stores a write with the same token as the last one, whichever of the two was sent first",
        ("fence", "sets"),
        workload="set_add:key",
        slow_client=_deliver_twice,
        edits=(_fence(STORE, PAIRS, "        WHERE excluded.token >= f.token\n"),),
    ),
    Bug(
        "grant claims nothing",
        "grants the lock, and does not raise the fence before the first write",
        ("fence", "sets"),
        workload="set_add:key",
        options=LATE,
        client=_claim_nothing,
    ),
)
