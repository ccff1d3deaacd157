"""Bugs in how a lease ends: releases, renewals, the reaper, the holder's presence."""

from __future__ import annotations

import threading
from typing import Any

import dblock
from tests.robustness.mutations import Bug, Edit
from tests.robustness.mutations.tokens import GRANT

RENEWAL = "21_renew_all.sql"
RENEWED = "        WHERE l.name = h.name AND l.token = h.token AND l.expires_at > clock_timestamp()\n"
REVIVING = Edit(RENEWAL, RENEWED, "        WHERE l.name = h.name AND l.token = h.token\n")


def _keep_renewing() -> None:
    """Never discard a released lease from the renewal schedule."""
    from dblock._core import renewal
    from dblock._core.lease_state import LeaseState

    discard_state, confirm = renewal.RenewalSchedule.discard, LeaseState.renewal_confirmed

    def discard(self: renewal.RenewalSchedule, state: LeaseState) -> None:
        if state.loss is not None or not state.over:
            discard_state(self, state)

    def miss(self: renewal.RenewalSchedule, state: LeaseState, ttl: float, why: str) -> None:
        discard_state(self, state)
        state.renewal_refused(why)

    def confirmed(self: LeaseState, sent_at: float, trusted_until: float, expires_at: float) -> bool:
        if self.over:
            self.sent_at = sent_at
            return True
        return confirm(self, sent_at, trusted_until, expires_at)

    renewal.RenewalSchedule.discard = discard  # type: ignore[method-assign]
    renewal.RenewalSchedule._miss = miss  # type: ignore[method-assign]
    renewal.due_at = lambda state: state.retry_at or state.sent_at + state.ttl / renewal.RENEWALS_PER_TTL
    LeaseState.renewal_confirmed = confirmed  # type: ignore[method-assign]


def _report_freed() -> None:
    """Make every release report that the lock was held until then."""
    from dblock.lease import TaskLease, ThreadLease

    release, release_task = ThreadLease.release, TaskLease.release

    def freed(self: ThreadLease) -> bool:
        release(self)
        return True

    async def freed_task(self: TaskLease) -> bool:
        await release_task(self)
        return True

    ThreadLease.release = freed  # type: ignore[method-assign]
    TaskLease.release = freed_task  # type: ignore[method-assign]


def _refuse_a_thread() -> None:
    """Refuse this process the first thread of its keep-alive, as a limit of its container does."""
    from dblock._runtime import keepalive

    module: Any = keepalive
    start_only_thread = module.start_only_thread
    refused: list[str] = []

    def start(remember: Any, name: str, *args: Any) -> None:
        if not refused:
            refused.append(name)
            raise dblock.Unavailable("can't start new thread")
        start_only_thread(remember, name, *args)

    module.start_only_thread = start


def _remember_early() -> None:
    """Let the keep-alive take a thread that could not be started for its own."""
    from dblock._runtime.keepalive import KeepAlive

    start: Any = KeepAlive._start

    def early(self: Any) -> None:
        try:
            start(self)
        except dblock.Unavailable:
            self._thread = threading.Thread()
            raise

    KeepAlive._start = early  # type: ignore[method-assign]


BUGS = (
    Bug(
        "release by name",
        "frees the lock, whichever client holds it by then",
        ("linearizability", "loss reported first"),
        seconds=4.0,
        options={"locks": 1, "ttl": 0.4, "kept_alive": 0.3, "brief": 0.2},
        slow_edits=(
            Edit(
                "30_release.sql",
                "    UPDATE distributed_locks AS l\n",
                "    PERFORM pg_sleep(0.5) WHERE random() < 0.5;\n    UPDATE distributed_locks AS l\n",
            ),
        ),
        edits=(
            Edit(
                "30_release.sql",
                "l.name = release.name AND l.token = release.token AND l.expires_at",
                "l.name = release.name AND l.expires_at",
            ),
        ),
    ),
    Bug(
        "release always reports freed",
        "reports to a holder whose lease was lost long ago that it has freed the lock",
        ("linearizability",),
        fault="freeze",
        strikes=3,
        workers=2,
        options={"locks": 1, "ttl": 0.3, "long": 0.5},
        client=_report_freed,
    ),
    Bug(
        "renewal revives a released lease",
        "extends a lease that was released while the renewal was on its way",
        ("hand-over in time",),
        workers=2,
        seconds=5.0,
        options={"locks": 2, "ttl": 6.0, "kept_alive": 1.0, "brief": 1.6, "long": 0.0},
        slow_edits=(Edit(RENEWAL, "    renewed_at := clock", "    PERFORM pg_sleep(0.7);\n    renewed_at := clock"),),
        edits=(REVIVING,),
    ),
    Bug(
        "keep-alive outlives release",
        "continues to renew a released lease, which the database accepts",
        ("hand-over in time",),
        workers=2,
        seconds=3.0,
        options={"locks": 8, "kept_alive": 1.0, "ttl": 0.5},
        edits=(REVIVING,),
        client=_keep_renewing,
    ),
    Bug(
        "reaper deletes held locks",
        "deletes the rows of locks that are held",
        ("loss reported first", "linearizability"),
        fault="reap",
        options={"brief": 0.05},
        edits=(
            Edit(
                "93_reap.sql",
                "            WHERE l.expires_at <= clock_timestamp() - idle\n",
                "            WHERE true\n",
            ),
        ),
    ),
    Bug(
        "presence not checked",
        "treats a live holder as dead, and grants its lock to another client",
        ("loss reported first", "linearizability"),
        options={"locks": 1, "ttl": 2.0, "long": 0.2},
        edits=(
            Edit(
                "05_presence.sql", "        pg_try_advisory_xact_lock_shared(seen.advisory_key) OR", "        true OR"
            ),
        ),
    ),
    Bug(
        "withdrawn presence ignored",
        "treats a client that lost one session as dead, although it has withdrawn that session's presence",
        ("loss reported first", "linearizability"),
        fault="terminate-listeners",
        seconds=8.0,
        options={"locks": 1, "ttl": 4.0, "brief": 2.0, "long": 0.0, "kept_alive": 0.0},
        edits=(
            Edit(
                "41_withdraw_presence.sql",
                "    DELETE FROM lock_presence AS p WHERE p.presence = withdraw_presence.presence;\n",
                "",
            ),
        ),
    ),
    Bug(
        "freed without notice",
        "frees a lock at once, although its holder should learn of the force-release first",
        ("loss reported first", "linearizability"),
        workload="force",
        workers=2,
        edits=(Edit("80_force_release.sql", "    IF force_release.now THEN\n", "    IF true THEN\n"),),
    ),
    Bug(
        "forced lease renewed",
        "continues to renew a force-released lease",
        ("forced",),
        workload="force",
        workers=2,
        edits=(Edit(RENEWAL, "          AND l.forced_at IS NULL\n", ""),),
    ),
    Bug(
        "grant does not wait for its commit",
        "replies with a token before the grant is on disk",
        ("durability", "token order", "loss reported first", "linearizability"),
        fault="crash",
        strikes=2,
        edits=(Edit(GRANT, "    IF try_acquire.durable THEN\n", "    IF false THEN\n"),),
    ),
    Bug(
        "no jump after a promotion",
        "continues with the tokens of the promoted standby",
        ("token order",),
        fault="promotion-async",
        strikes=4,
        workers=3,
        # A sequence is logged 32 numbers ahead. Fewer lost tokens would not make it go back.
        options={"hold": 0, "locks": 16},
        edits=(
            Edit("03_token_clock.sql", "target := clock;", "target := highest;"),
            Edit("03_token_clock.sql", "target := highest + second;", "target := highest;"),
            Edit("10_try_acquire.sql", " AND minted >= date_part('epoch', moment) * 1000000 - 1000000", ""),
        ),
    ),
    Bug(
        "thread remembered before its start",
        "renews no lease after the process was once refused a thread",
        ("lease kept alive",),
        workload="cron",
        seconds=12.0,
        slow_client=_refuse_a_thread,
        client=_remember_early,
    ),
)
