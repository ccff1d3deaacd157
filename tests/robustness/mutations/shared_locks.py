"""Bugs in read-write locks and semaphores: holders that exclude each other, writers that starve, permits that are lost.

The lock on the head gives the grants of one lock their order. A bug of the tokens takes that lock away.
"""

from __future__ import annotations

from typing import Any

from tests.robustness.mutations import Bug, Edit

KINDS, SHARES, QUEUE = "01_kinds.sql", "03_shares.sql", "04_share_queue.sql"
ACQUIRE = "10_acquire_shared.sql"

ALL_KINDS = "lock_free_shares(acquire_shared.name, '{reader,writer}') = 0"
WRITER = "lock_free_shares(acquire_shared.name, '{writer}') = 0"
FREE = "AND s.permit < lowest_free_share.below AND s.expires_at <= clock_timestamp()"
LOCKED = "PERFORM 1 FROM distributed_locks AS l WHERE l.name = lock_head.name FOR UPDATE"

MINTED = "    UPDATE distributed_locks AS l\n    SET token = minted.token, minted_server_start"
"""What follows the minting of a token."""


def _downgrade_in_two_steps() -> None:
    """Release the write lock, and then wait for the read lock."""
    from dblock._core import shared_acquire

    kind: Any = shared_acquire.SharedFlows

    def changed(self: Any, state: Any, attempt: str) -> Any:
        state.let_go()
        yield from self.release(state.name, state.token, state.trusted_until)
        state.release_confirmed()
        options = shared_acquire.read_write_options("read", state.lock, state.ttl, None, None, True)
        return (yield from self.acquire(options, 10.0, attempt))

    kind.downgrade = changed


BUGS = (
    Bug(
        "reader beside a writer",
        "grants a reader its share without a look at the writer's",
        ("linearizability",),
        workload="readers_writers",
        edits=(
            Edit(QUEUE, "WHEN 'read' THEN '{writer}'::text[]", "WHEN 'read' THEN '{}'::text[]"),
            Edit(ACQUIRE, WRITER, "true"),
        ),
    ),
    Bug(
        "writer beside readers",
        "grants a writer its share as soon as no other writer holds the lock",
        ("linearizability",),
        workload="readers_writers",
        edits=(
            Edit(QUEUE, "WHEN 'write' THEN '{reader,writer}'", "WHEN 'write' THEN '{writer}'"),
            Edit(ACQUIRE, ALL_KINDS, WRITER),
        ),
    ),
    Bug(
        "readers pass a waiting writer",
        "grants a reader its share whenever no writer holds the lock, so that a stream of readers starves a writer",
        ("writers in turn",),
        workload="readers_writers",
        options={"locks": 1, "reads": 0.95},
        workers=6,
        seconds=6.0,
        edits=(
            Edit(
                ACQUIRE,
                "ELSE free > 0 AND ahead = 0 END",
                "ELSE free > 0 AND (ahead = 0 OR acquire_shared.mode = 'read') END",
            ),
        ),
    ),
    Bug(
        "downgrade in two steps",
        "releases the write lock and then acquires the read lock, so that another writer can come in between",
        ("linearizability",),
        workload="readers_writers",
        options={"locks": 1, "reads": 0.2},
        client=_downgrade_in_two_steps,
    ),
    Bug(
        "head not locked",
        "decides about a semaphore without a lock on its head, so that two sessions mint tokens at the same time",
        ("token order",),
        workload="permits",
        slow_edits=(Edit(SHARES, MINTED, "    PERFORM pg_sleep(random() * 0.01);\n" + MINTED),),
        edits=(
            Edit(KINDS, f"{LOCKED} SKIP LOCKED;", LOCKED.removesuffix(" FOR UPDATE") + ";"),
            Edit(KINDS, f"{LOCKED};", LOCKED.removesuffix(" FOR UPDATE") + ";"),
        ),
    ),
    Bug(
        "one permit too many",
        "grants one permit more than the semaphore has",
        ("linearizability",),
        workload="permits",
        edits=(
            Edit(ACQUIRE, "THEN greatest(head.permits - shares.held, 0)", "THEN head.permits + 1 - shares.held"),
            Edit(
                ACQUIRE,
                "lowest_free_share(acquire_shared.name, 'permit', head.permits)",
                "lowest_free_share(acquire_shared.name, 'permit', head.permits + 1)",
            ),
        ),
    ),
    Bug(
        "held permit granted again",
        "takes the permit with the lowest number, whether or not it is held",
        ("linearizability",),
        workload="permits",
        edits=(
            Edit(SHARES, FREE, FREE.partition(" AND s.expires_at")[0]),
            Edit(SHARES, "RETURN CASE WHEN seen.free THEN share END;", "RETURN share;"),
        ),
    ),
    Bug(
        "permits of the dead kept",
        "counts a permit as held until it is released, also if its lease has expired",
        ("permits back", "recovery"),
        workload="permits",
        fault="kill",
        strikes=6,
        edits=(
            Edit(SHARES, "AND s.expires_at > clock_timestamp();", "AND s.expires_at > '-infinity';"),
            Edit("20_shared_state.sql", "s.expires_at > clock_timestamp()", "s.expires_at > '-infinity'"),
        ),
    ),
    Bug(
        "share granted without durability",
        "replies to a grant of a share before it is on disk",
        ("durability", "token order"),
        workload="permits",
        fault="crash",
        strikes=4,
        edits=(Edit(SHARES, "    ready boolean := commit_durably();\n    last record;", "    last record;"),),
    ),
    Bug(
        "share token from its own count",
        "gives a share a token that is not in the order of the grants of its lock",
        ("token order",),
        workload="permits",
        edits=(
            Edit(
                SHARES,
                "    SET token = minted.token,\n        minted_server_start",
                "    SET token = minted.token + (random() * 20)::integer,\n        minted_server_start",
            ),
        ),
    ),
)
