"""Everything that is known about one lock: its grants, its queue, its history, its fences, and why others wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dblock.admin.inspect import Wait
from dblock.server.dashboard.reads import Fences, Reads
from dblock.server.dashboard.rows import Row, Table, make_table
from dblock.server.dashboard.timeline import Timeline, timeline
from dblock.server.feed import Snapshot

BY_NAME = "This is judged by the names of holders and waiters. It is no cycle if several processes share a name."
"""What a page says about a cycle that the database has not found. A caller over HTTP has only a name."""


@dataclass(frozen=True)
class LockView:
    """What a lock's page shows."""

    name: str
    unknown: bool
    """Whether the lock has no row."""
    row: Row | None
    grants: list[dict[str, Any]]
    """The grants that are held: one for a plain lock, one for each share of a shared one."""
    queue: list[dict[str, Any]]
    history: list[dict[str, Any]]
    recorded: bool
    fences: Fences
    timeline: Timeline
    told: list[tuple[dict[str, Any], dict[str, Any] | None]]
    """The grants whose holders were told to release, each with the event that says by whom and why."""
    reasons: list[tuple[str, str]]
    """Why others wait: each with a level, bad, warn or good."""
    meta: Any


async def view_of(reads: Reads, table: Table, name: str, stamp: str) -> LockView:
    """Return what is known about a lock. Reads are shared while the lock has this stamp."""
    locks = await reads.lock(name, stamp)
    rows = make_table(Snapshot(1, locks)).rows
    row = next((one for one in rows if one.name == name), None)
    grants = [one for one in locks if one["remaining"] and (one["head"] is not None or one["held"] is None)]
    for grant in grants:
        grant["number"] = grant["token"]
    head = next((one for one in locks if one["name"] == name), None)
    history = await reads.history(name, stamp=stamp)
    tokens = tuple(grant["token"] for grant in grants)
    earlier = tuple({event["token"] for event in history if event["token"] is not None} - set(tokens))
    return LockView(
        name,
        head is None,
        row,
        grants,
        (head or {}).get("queue") or [],
        history,
        await reads.grants_are_recorded(),
        await reads.fences(tokens, tuple(sorted(earlier))),
        timeline(history, grants),
        [(grant, _telling(grant, history)) for grant in grants if grant["forced_at"] is not None],
        _reasons(name, grants, (head or {}).get("queue") or [], table, await reads.waits()),
        grants[0]["meta"] if len(grants) == 1 else None,
    )


def _telling(grant: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest event in which the holder was told to release. None if the history does not reach that far."""
    # The history has no token for a grant that is not durable.
    tokens = (grant["token"], None)
    told = (event for event in history if event["event"] == "forced" and event["name"] == grant["name"])
    return next((event for event in told if event["token"] in tokens), None)


def _reasons(
    name: str, grants: list[dict[str, Any]], queue: list[dict[str, Any]], table: Table, waits: list[Wait]
) -> list[tuple[str, str]]:
    found = []
    proven = any(wait.lock == name and wait.cycle is not None for wait in waits)
    if proven or table.graph.is_stuck(lock=name):
        members = [step for cycle in table.graph.cycles if any(one.lock == name for one in cycle) for step in cycle]
        chain = "; ".join(f"{step.waiter} waits for {step.lock}, held by {step.holder}" for step in members[:4])
        if not proven and chain:
            chain += f". {BY_NAME}"
        found.append(("bad", f"A cycle: the holders wait for each other. {chain}".strip()))
    holders = {grant["holder"] for grant in grants}
    for wait in waits:
        if wait.session is not None and wait.waiter in holders:
            found.append(
                (
                    "bad",
                    f"The holder's transaction (session {wait.session}) waits inside Postgres for session "
                    f"{wait.blocker} ({wait.holder}).",
                )
            )
    for grant in grants:
        if grant["alive"] is False:
            found.append(
                ("warn", f"The session of {grant['holder']} is gone. The next waiter takes the lock after the grace.")
            )
        if grant["forced_at"] is not None:
            found.append(("warn", f"{grant['holder']} was told to release, and has not done so yet."))
    if queue and not grants:
        found.append(
            (
                "warn",
                "The lock is free and the first waiter has not taken it yet. If this lasts for seconds, the waiter's "
                "listener is down, or its process is busy.",
            )
        )
    if queue and not found:
        found.append(("good", "Nothing is wrong: the lock is held, and its lease lasts until the deadline."))
    return found
