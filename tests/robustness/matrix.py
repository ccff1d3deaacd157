"""List the runs of `make robustness`: every workload, every fault, and the long runs.

Each entry is one run with a seed of its own. The counts in docs/concepts/robustness.md (freezes, kills of the whole
Postgres, promotions, operations) are sums over entries in this file.
"""

from __future__ import annotations

from tests.robustness import faults
from tests.robustness.scenarios import Scenario
from tests.robustness.traffic import workloads

Entry = tuple[Scenario, int]
"""A scenario and its seed."""

MANY_LOCKS: dict[str, object] = {"locks": 1000, "hold": 0}
"""Many locks that are released at once: as many operations as the machine can perform."""

FAULTS_OF_EVERY_WORKLOAD = ("freeze", "kill", "crash", "cut", "lose-replies", "stop-server")
"""The faults that are injected into every workload. All other faults are injected into the plain lock, the shared
locks and the recipes only."""

RECIPES = ("schedules", "election")
"""The workloads that keep a record of their own in the database. They meet every fault."""

SHARED = ("readers_writers", "permits")
"""The workloads of shared locks. They meet every fault."""


def full() -> list[Entry]:
    """Return all runs of the matrix, the longest first, so that parallel runs end at about the same time."""
    return [*_long_runs(), *_cluster_runs(), *_short_runs()]


def _long_runs() -> list[Entry]:
    sets = [name for name in workloads.names() if name.startswith("set_add:")]
    runs = [Scenario("mutex", "crash", strikes=125)] * 8
    runs += [Scenario(name, "freeze-past", strikes=150) for name in sets]
    runs += [Scenario(name, "promotion-sync", strikes=25) for name in ("mutex", "set_add:key")]
    # A resource in the same database as the lock would be lost together with the lock.
    runs += [Scenario(name, "promotion-async", strikes=25) for name in ("mutex", "set_add:s3")]
    # What a promoted server granted is lost, and the next one must not issue its tokens again.
    runs += [
        Scenario(name, fault, strikes=8)
        for name in ("mutex", "set_add:s3")
        for fault in ("promotion-sibling", "flip-back")
    ]
    runs += [Scenario("mutex", workers=6, seconds=150, options=MANY_LOCKS)] * 4
    return [(run, 1000 + index) for index, run in enumerate(runs)]


def _cluster_runs() -> list[Entry]:
    runs = [Scenario(name, "cluster-sync", strikes=12) for name in ("mutex", "set_add:key")]
    runs += [Scenario(name, "cluster-freeze", strikes=6) for name in ("mutex", "set_add:s3")]
    # A resource in the same database as the lock would be lost together with the lock.
    runs += [Scenario(name, "cluster-async", strikes=12) for name in ("mutex", "set_add:s3")]
    runs += [
        Scenario(name, fault, strikes=4)
        for name in (*RECIPES, *SHARED)
        for fault in ("cluster-sync", "cluster-freeze", "cluster-async")
    ]
    return [(run, 2000 + index) for index, run in enumerate(runs)]


def _short_runs() -> list[Entry]:
    brief = [name for name in sorted(faults.all_faults()) if not name.startswith("cluster-")]
    runs = [Scenario("mutex", fault, seconds=12) for fault in brief]
    others = [name for name in workloads.names() if name not in ("mutex", *RECIPES, *SHARED)]
    runs += [Scenario(name, fault, seconds=10) for name in others for fault in ("none", *FAULTS_OF_EVERY_WORKLOAD)]
    # If two primaries grant locks, only the fence protects the resource, provided that there is only one resource.
    runs.append(Scenario("set_add:s3", "split-brain", seconds=30))
    runs += [Scenario(name, fault, seconds=12) for name in (*RECIPES, *SHARED) for fault in brief]
    return [(run, index) for index, run in enumerate(runs)]
