"""The metrics of dblock: their names, kinds, labels, buckets, and how many series each may have.

Guarantee: a process exports fewer than 2,000 series, whatever the names of its locks are. A lock appears as its group,
which is its name up to the first colon. The first hundred groups keep their names, and all later ones are `other`. A
histogram has many series for each combination of its labels, so its groups end earlier: see `label_sets`.

`docs/reference/metrics.md` has the same table, and a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_GROUPS = 100
OTHER = "other"
GROUP_LENGTH = 64

WAITS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0)
HOLDS = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0)
REPLIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)

REASONS = ("expired", "superseded", "forced", "unreachable")


class Metric(NamedTuple):
    """One metric."""

    name: str
    kind: str
    """One of histogram, counter and gauge."""
    labels: tuple[str, ...]
    source: str
    """Where its value comes from: `process` for what this process did, `database` for what all processes do, `server`
    for requests to `dblock serve`."""
    help: str
    buckets: tuple[float, ...] = ()
    label_sets: int = 0
    """How many combinations of labels keep their group. The group of all later ones is `other`. 0: no limit of its own,
    because the number of groups bounds it."""

    def most_series(self) -> int:
        """Return how many series the metric may have."""
        if not self.labels:
            sets = 1
        else:
            others = {"outcome": 6, "reason": len(REASONS)}.get(self.labels[0], 1)
            sets = self.label_sets + others if self.label_sets else (MAX_GROUPS + 1) * others
        return sets * (len(self.buckets) + 3 if self.kind == "histogram" else 1)


ACQUIRE_WAIT = Metric(
    "dblock_acquire_wait_seconds",
    "histogram",
    ("outcome", "group"),
    "process",
    "Time that a call for a lock took, by its outcome.",
    WAITS,
    50,
)
HOLD = Metric("dblock_hold_seconds", "histogram", ("group",), "process", "Time for which a lock was held.", HOLDS, 20)
HANDOFF = Metric(
    "dblock_handoff_seconds", "histogram", (), "process", "Time from the wake-up of a waiter to its grant.", REPLIES
)
LEASES_LOST = Metric(
    "dblock_leases_lost_total", "counter", ("reason", "group"), "process", "Leases that were lost while they were held."
)
RENEWAL = Metric(
    "dblock_renewal_seconds", "histogram", (), "process", "Time until the database confirmed a renewal.", REPLIES
)
RENEWAL_MARGIN = Metric(
    "dblock_renewal_margin_ratio",
    "histogram",
    (),
    "process",
    "Part of the ttl that was left when a renewal was confirmed. Below 0 the lease was lost.",
    RATIOS,
)
FENCE_REFUSALS = Metric(
    "dblock_fence_refusals_total", "counter", ("group",), "process", "Writes that a fence refused as stale."
)
LISTENER_UP = Metric(
    "dblock_listener_up", "gauge", (), "process", "1 if every listener of this process is connected, 0 if one is not."
)
HELD = Metric("dblock_held", "gauge", ("group",), "database", "Locks, readers and permits that are held.")
WAITING = Metric("dblock_waiting", "gauge", ("group",), "database", "Waiters in the queues.")
OLDEST_WAIT = Metric(
    "dblock_oldest_wait_seconds", "gauge", ("group",), "database", "Time for which the oldest waiter has waited."
)
OLDEST_HOLD = Metric(
    "dblock_oldest_hold_seconds", "gauge", ("group",), "database", "Time since the oldest grant that is still held."
)
ONCE_OVERDUE = Metric("dblock_once_overdue", "gauge", ("group",), "database", "Schedules that are overdue.")
DATABASE_UP = Metric(
    "dblock_database_up", "gauge", (), "database", "1 if the database replied to the last query for metrics, 0 if not."
)

METRICS = (
    ACQUIRE_WAIT,
    HOLD,
    HANDOFF,
    HELD,
    OLDEST_HOLD,
    WAITING,
    OLDEST_WAIT,
    LEASES_LOST,
    RENEWAL,
    RENEWAL_MARGIN,
    FENCE_REFUSALS,
    ONCE_OVERDUE,
    LISTENER_UP,
    DATABASE_UP,
)
