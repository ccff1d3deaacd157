"""Bugs in waiting: wake-ups that are lost or reach all waiters, tickets that are passed over or left behind."""

from __future__ import annotations

from typing import Any

from tests.robustness.mutations import Bug, Edit

QUEUE = "07_queue.sql"
WAKING = (
    "        RETURN pg_notification_queue_usage() < 0.9\n"
    "            AND pg_notify('dblock_' || replace(next_client::text, '-', ''), next_attempt::text) IS NOT NULL;\n"
)
CROWD = {"locks": 1, "long": 0.0, "kept_alive": 1.0}


def _keep_isolation() -> None:
    """Leave the isolation of every connection as the server's default has it."""
    from dblock._runtime import target
    from dblock._runtime.isolation import Remedy

    async def nothing(connection: Any) -> Remedy:
        return Remedy.NOTHING

    module: Any = target
    module.with_option = lambda parameters: parameters
    module.set_isolation = lambda connection: Remedy.NOTHING
    module.set_isolation_async = nothing


BUGS = (
    Bug(
        "lost wake-up",
        "frees a lock and wakes no waiter",
        ("hand-over in time",),
        seconds=4.0,
        options=CROWD,
        edits=(Edit(QUEUE, WAKING, "        RETURN false;\n"),),
    ),
    Bug(
        "release wakes all waiters",
        "wakes all waiters, although only one can be granted the lock",
        ("one wake-up per release",),
        workers=6,
        options=CROWD,
        edits=(
            Edit(
                QUEUE,
                WAKING,
                "        PERFORM pg_notify('dblock_' || replace(t.client::text, '-', ''), t.attempt::text)\n"
                "        FROM lock_tickets AS t WHERE t.name = wake_next.name;\n        RETURN true;\n",
            ),
        ),
    ),
    Bug(
        "tickets of dead clients stay",
        "makes all clients wait behind a client that was killed",
        ("takeover in time", "hand-over in time", "recovery"),
        fault="kill",
        strikes=3,
        options=CROWD | {"ttl": 0.5, "brief": 0.1},
        edits=(
            Edit(
                QUEUE,
                "            IF (seen.seen_until > clock_timestamp()) IS NOT TRUE AND snapshot_is_fresh() THEN\n",
                "            IF false THEN\n",
            ),
            Edit(
                QUEUE,
                "CASE WHEN seen.presence IS NOT NULL THEN remaining_grace(seen.presence, false, false) END;",
                "NULL;",
            ),
            Edit(
                QUEUE,
                " OR client_is_alive(next_client))\n        AND (\n            next_presence IS NULL OR",
                " OR true)\n        AND (\n            true OR",
            ),
        ),
    ),
    Bug(
        "release waits for the queue",
        "makes a release wait for every transaction that uses the lock's queue",
        ("release in time",),
        fault="foreign-queues",
        strikes=4,
        options=CROWD,
        edits=(
            Edit(
                QUEUE,
                "    SELECT t.attempt, t.client, t.presence, t.since INTO",
                "    PERFORM FROM lock_queues AS q WHERE q.name = wake_next.name FOR UPDATE;\n"
                "    SELECT t.attempt, t.client, t.presence, t.since INTO",
            ),
        ),
    ),
    Bug(
        "notification without a look at its queue",
        "makes a release fail while the server's queue of notifications is full",
        ("release in time",),
        fault="full-notifications",
        strikes=2,
        options=CROWD,
        edits=(Edit(QUEUE, "        RETURN pg_notification_queue_usage() < 0.9\n            AND", "        RETURN"),),
    ),
    Bug(
        "new waiter ahead of the queue",
        "grants a free lock to a new waiter ahead of the queue",
        ("queue order",),
        workload="queue",
        edits=(Edit("11_acquire.sql", "(free AND (first OR NOT acquire.fair))", "(free)"),),
    ),
    Bug(
        "stricter isolation",
        "leaves a free lock marked as waited for where transactions are stricter than READ COMMITTED",
        ("free lock granted",),
        workload="cron",
        fault="isolation",
        seconds=12.0,
        edits=(
            Edit(
                QUEUE,
                "BEGIN\n    IF sees_latest_commits() THEN\n        PERFORM 1 FROM lock_queues",
                "BEGIN\n    IF NOT sees_latest_commits() THEN\n        RETURN false;\n    ELSE\n"
                "        PERFORM 1 FROM lock_queues",
            ),
        ),
        client=_keep_isolation,
    ),
)
