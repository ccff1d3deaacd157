"""Bugs in what a holder believes: trust windows that are too long, start too late, or never end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.robustness.mutations import Bug, Edit
from tests.robustness.mutations.tokens import GRANT

GRANTED = "            INTO granted, token, expires_at, remaining, waiting;\n            RETURN;\n"
UNKEPT = {"locks": 1, "ttl": 0.4, "kept_alive": 0.0, "long": 0.5}
"""Many leases that are held until they are lost."""


def _change_grants(change: Callable[[Any, Any], Any]) -> None:
    """Change every grant in a reply of the database before the client sees it."""
    from dblock._core.acquire import LockFlows
    from dblock._core.replies import Grant

    def changed(ask: Any) -> Any:
        def wrapper(self: LockFlows, *args: Any) -> Any:
            reply = yield from ask(self, *args)
            return change(self, reply) if isinstance(reply, Grant) else reply

        return wrapper

    for name in ("_try", "_enqueue"):
        setattr(LockFlows, name, changed(getattr(LockFlows, name)))


def _trust_from_reply() -> None:
    def later(service: Any, grant: Any) -> Any:
        now = service.clock()
        return grant._replace(trusted_until=now + (grant.trusted_until - grant.sent_at), sent_at=now)

    _change_grants(later)


def _trust_longer() -> None:
    _change_grants(
        lambda _, grant: grant._replace(trusted_until=grant.sent_at + 1.3 * (grant.trusted_until - grant.sent_at))
    )


_attempt_of_retry: list[Callable[[str], str]] = [lambda attempt: attempt]
"""The attempt under which a request is retried."""


def _new_attempt() -> None:
    from dblock._core.replies import new_attempt

    _attempt_of_retry[:] = [lambda attempt: new_attempt()]


def _lose_replies(share: float = 0.5, after: float = 0.5) -> None:
    """Lose the replies to a share of the grants, and retry the request after a part of the ttl."""
    from dblock._core.acquire import LockFlows
    from dblock._core.effects import Sleep
    from dblock._core.replies import Grant

    ask: Any = LockFlows._try

    def wrapper(self: LockFlows, options: Any, attempt: str, *args: Any) -> Any:
        reply = yield from ask(self, options, attempt, *args)
        if isinstance(reply, Grant) and random.random() < share:
            yield Sleep(options.ttl * after)
            reply = yield from ask(self, options, _attempt_of_retry[0](attempt))
        return reply

    LockFlows._try = wrapper  # type: ignore[assignment, method-assign]


def _lose_few_replies() -> None:
    _lose_replies(0.1, 0.0)


def _never_lost() -> None:
    from dblock._core.lease_state import LeaseState

    LeaseState.lost = lambda self: None  # type: ignore[method-assign]
    LeaseState.lost_by_clock = lambda self: None  # type: ignore[method-assign]
    LeaseState.remaining = lambda self: 0.0 if self.over else self.ttl  # type: ignore[method-assign]


BUGS = (
    Bug(
        "trust from the reply",
        "counts the trust window from the reply, however late the reply was",
        ("loss reported first", "linearizability"),
        options=UNKEPT,
        slow_edits=(
            Edit(GRANT, GRANTED, GRANTED.replace("  RETURN", "  PERFORM pg_sleep(seconds * 0.6);\n            RETURN")),
        ),
        client=_trust_from_reply,
    ),
    Bug(
        "retry gets the whole ttl",
        "replies to a retried request as if the grant that it finds were new",
        ("loss reported first", "linearizability"),
        options=UNKEPT,
        slow_client=_lose_replies,
        edits=(
            Edit(
                GRANT,
                "        waiting := remaining = 0 AND",
                "        IF granted THEN remaining := seconds; END IF;\n        waiting := remaining = 0 AND",
            ),
        ),
    ),
    Bug(
        "retry under a new attempt",
        "retries a request under a new attempt, and waits for its own first grant",
        ("hand-over in time",),
        workers=2,
        options={"locks": 2, "ttl": 5.0, "long": 0.0},
        slow_client=_lose_few_replies,
        client=_new_attempt,
    ),
    Bug(
        "trust beyond the ttl",
        "trusts a lease for a third longer than its ttl",
        ("loss reported first", "linearizability"),
        options=UNKEPT,
        client=_trust_longer,
    ),
    Bug(
        "loss ignored",
        "continues as the holder after its lease has expired, like a process that never checks",
        ("loss reported first", "linearizability"),
        workers=2,
        seconds=1.0,
        options=UNKEPT,
        client=_never_lost,
    ),
    Bug(
        "granted too early",
        "grants a lock again shortly before the lease of its holder has expired",
        ("loss reported first", "linearizability"),
        options=UNKEPT | {"tried": 0.8},
        edits=(
            Edit(
                GRANT,
                "l.expires_at <= clock_timestamp() AND l.kind IS NULL",
                "l.expires_at <= clock_timestamp() + interval '150 ms' AND l.kind IS NULL",
            ),
        ),
    ),
)
