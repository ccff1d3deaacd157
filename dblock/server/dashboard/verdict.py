"""Whether it is safe to take a lock from its holder, judged by the holder's session and by the fences.

Nothing here queries the database. The judgement is careful: a resource counts as unprotected unless it is known to
refuse the old holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dblock.server.dashboard.reads import Fences


@dataclass(frozen=True)
class Verdict:
    """A judgement about one way to take the lock."""

    level: str
    """One of safe, partly and unsafe."""
    title: str
    text: str


def telling(forced: bool, event: dict[str, Any] | None) -> Verdict:
    """Judge telling the holder to release. `event` says by whom and why it was told, if it was."""
    if forced:
        who = "" if event is None else f"By {event['actor']}: {event['reason'] or 'no reason'}. "
        text = f"{who}The lock is free at its deadline at the latest."
        return Verdict("safe", "The holder was told already", text)
    return Verdict(
        "safe",
        "Safe: like a lease that expires",
        "The holder's next renewal is refused, so the holder learns that it must stop. The next waiter is granted the "
        "lock when the holder has released it, or at the deadline.",
    )


def freeing(grant: dict[str, Any], fences: Fences) -> Verdict:
    """Judge freeing the lock at once, while the holder may still work."""
    gone = grant["alive"] is False
    enforced = [table for table in fences.tables if table["enabled"] and not table["warn_only"]]
    if grant["token"] <= 0:
        return Verdict(
            "unsafe",
            "Not safe: the grant has no token",
            "An efficiency lock has no token, so no fence can refuse its holder.",
        )
    if not fences.known:
        return Verdict("unsafe", "Not safe: no fence is known", fences.why)
    if not fences.own and not enforced:
        if gone:
            return Verdict(
                "partly",
                "Nothing is fenced, but the holder's session is gone",
                "If its process is dead as well, no write is under way. dblock sees only the session.",
            )
        return Verdict(
            "unsafe",
            "Not safe: nothing refuses the old holder",
            "The holder may still work, and no resource that dblock knows refuses its token.",
        )
    if fences.unprotected or not fences.own:
        return Verdict(
            "partly",
            "Partly safe: only the fenced resources refuse the old holder",
            "Each refuses the old holder once the next holder has claimed the resource or written to it. Everything "
            "else is unprotected.",
        )
    return Verdict(
        "safe",
        "Safe for everything that dblock knows",
        "Each resource below refuses the old holder once the next holder has claimed the resource or written to it.",
    )
