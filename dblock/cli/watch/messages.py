"""What happened, in words: for the lines of `dblock watch` and for its screen."""

from __future__ import annotations

from typing import Any

from dblock.admin.inspect import LockState
from dblock.cli.output import plain, seconds, shown
from dblock.cli.watch.changes import Happening

STYLES = {
    "granted": "green",
    "handed_over": "cyan",
    "freed": "dim",
    "ran_out": "yellow",
    "died": "red",
    "forced": "yellow",
    "forced_now": "red",
    "refused": "bold red",
    "warned": "yellow",
}


def said(one: Happening) -> str:
    """Return what happened, in words, safe to show."""
    who = shown(one.holder) if one.holder else "somebody"
    under = f" under token {one.token}" if one.token is not None else ""
    by = f", by {shown(one.actor)}" if one.actor else ""
    why = f": {shown(one.reason)}" if one.reason else ""
    way = f"; token {one.stored} was seen" if one.stored is not None else ""
    offered = f"token {one.token}" if one.token is not None else "a write without a token"
    return {
        "granted": f"granted to {who}{under}",
        "handed_over": f"handed over{f' from {shown(one.before)}' if one.before else ''} to {who}{under}",
        "freed": f"freed by {who}",
        "ran_out": f"ran out on {who}, unreleased",
        "died": f"its holder {who} died",
        "forced": f"{who} was told to let go{by}{why}",
        "forced_now": f"taken from {who} at once{by}{why}",
        "refused": f"refused {offered} of {who}{way}",
        "warned": f"would refuse {offered} of {who}{way}",
    }[one.kind]


def facts(one: Happening) -> dict[str, Any]:
    """Return what happened, as JSON has it; what does not apply is left out."""
    named: dict[str, Any] = {"event": one.kind, **plain(one)}
    del named["kind"]
    return {key: value for key, value in named.items() if value is not None}


def state(lock: LockState) -> str:
    """Return how a lock stands, in words, safe to show."""
    waiting = f", {lock.waiting} waiting" if lock.waiting else ""
    if lock.state == "free":
        return f"free{waiting}"
    under = f" under token {lock.token}" if lock.token is not None else ""
    told = ", told to let go" if lock.state == "forced" else ""
    return f"held by {shown(lock.holder)}{under}, {seconds(lock.remaining)} left{told}{waiting}"
