"""Describe changes and locks in words, for the stream and the live screen of `dblock watch`."""

from __future__ import annotations

from typing import Any

from dblock.admin.graph.labels import holder_text
from dblock.admin.inspect import LockState
from dblock.cli.output import duration, jsonable, printable
from dblock.cli.watch.changes import Change

STYLES = {
    "granted": "green",
    "handed_over": "cyan",
    "freed": "dim",
    "expired": "yellow",
    "died": "red",
    "forced": "yellow",
    "forced_now": "red",
    "refused": "bold red",
    "warned": "yellow",
}


def describe(change: Change) -> str:
    """Return a change as text that is safe to print."""
    holder = printable(change.holder) if change.holder else "an unnamed client"
    under = f" under token {change.token}" if change.token is not None else ""
    by = f", by {printable(change.actor)}" if change.actor else ""
    reason = f": {printable(change.reason)}" if change.reason else ""
    seen = f"; token {change.stored} was already seen" if change.stored is not None else ""
    offered = f"token {change.token}" if change.token is not None else "a write without a token"
    return {
        "granted": f"granted to {holder}{under}",
        "handed_over": f"handed over{f' from {printable(change.before)}' if change.before else ''} to {holder}{under}",
        "freed": f"freed by {holder}",
        "expired": f"expired, held by {holder}",
        "died": f"freed because its holder {holder} died",
        "forced": f"{holder} was told to release{by}{reason}",
        "forced_now": f"force-released at once, held by {holder}{by}{reason}",
        "refused": f"refused {offered} of {holder}{seen}",
        "warned": f"would refuse {offered} of {holder}{seen}",
    }[change.kind]


def change_data(change: Change) -> dict[str, Any]:
    """Return a change as JSON data, without the fields that do not apply."""
    data: dict[str, Any] = {"event": change.kind, **jsonable(change)}
    del data["kind"]
    return {key: value for key, value in data.items() if value is not None}


def describe_lock(lock: LockState) -> str:
    """Return the state of a lock as text that is safe to print."""
    waiting = f", {lock.waiting} waiting" if lock.waiting else ""
    if lock.state == "free":
        return f"free{waiting}"
    if lock.held is not None:
        return f"held, {holder_text(lock)}{waiting}"
    under = f" under token {lock.token}" if lock.token is not None else ""
    forced = ", told to release" if lock.state == "forced" else ""
    return f"held by {printable(lock.holder)}{under}, {duration(lock.remaining)} left{forced}{waiting}"
