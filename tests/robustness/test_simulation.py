"""dblock's own code holds in a simulated world; the simulation finds what it should, and is like the real thing."""

from __future__ import annotations

import pytest

from tests.robustness.simulation.fidelity import Both
from tests.robustness.simulation.many import BUGS_OF, WORKLOADS, find_bug, run_batch, run_many, run_one
from tests.robustness.simulation.recipe_fidelity import BothRecipes
from tests.robustness.simulation.shared_fidelity import BothShared
from tests.support.stages import first

SEEDS = 200
"""Half of them for locks, and a quarter for shared locks and for each recipe."""

FOUND_WITHIN = 1500
"""Seeds within which every bug is found; most take fewer than a hundred."""


@pytest.mark.second_stage
def test_everything_holds_in_some_hundred_worlds() -> None:
    summary = run_batch(range(SEEDS // 2))
    assert not summary.failures, str(summary)
    assert summary.grants > 5 * SEEDS // 2, "there was something to look at"
    assert summary.handed_over > SEEDS / 4, "locks were handed over in calm weather"


@pytest.mark.second_stage
def test_everything_holds_with_some_shared_locks() -> None:
    summary = run_batch(range(SEEDS // 4), workload="shared_locks")
    assert not summary.failures, str(summary)
    assert min(summary.counts[kind] for kind in ("readers", "writers", "permits")) > SEEDS / 4, "all kinds were granted"
    assert summary.counts["downgrades"] > 5, "writers became readers"
    assert summary.handed_over > SEEDS / 4, "shares were handed over in calm weather"


@pytest.mark.second_stage
def test_everything_holds_in_some_elections() -> None:
    summary = run_batch(range(SEEDS // 4), workload="elections")
    assert not summary.failures, str(summary)
    assert summary.counts["terms"] > SEEDS, "candidates led"
    assert summary.counts["observers"] >= SEEDS / 5, "the log was read"


@pytest.mark.second_stage
def test_everything_holds_in_some_schedules() -> None:
    summary = run_batch(range(SEEDS // 4), workload="schedules")
    assert not summary.failures, str(summary)
    assert summary.counts["runs succeeded"] > SEEDS, "slots were run"
    assert summary.counts["runs again"] > 5, "slots were run again whose runner died"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("workload", "seeds"), [("locks", 80_000), ("shared_locks", 10_000), ("elections", 10_000), ("schedules", 10_000)]
)
def test_everything_holds_in_many_thousand_worlds(workload: str, seeds: int) -> None:
    summary = run_many(0, seeds, processes=2, workload=workload)
    assert not summary.failures, str(summary)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_tells_the_same_story_each_time(workload: str) -> None:
    first, second, other = (run_one(seed, tracing=True, workload=workload) for seed in (7, 7, 8))
    assert not first.check, first.what
    assert first.story == second.story
    assert first.digest == second.digest != other.digest
    assert len(first.story) > 50


def test_a_seed_that_fails_does_so_each_time() -> None:
    found = find_bug("release_by_name", 0, FOUND_WITHIN)
    assert found is not None
    told = [run_one(found[1].seed, "release_by_name", tracing=True) for _ in range(2)]
    assert told[0].what == told[1].what == found[1].what, "and it is the same with and without its story told"
    assert told[0].digest == told[1].digest
    assert "VIOLATION" in told[0].story[-1]


@pytest.mark.parametrize("bug", [bug for bugs in BUGS_OF.values() for bug in first(2, bugs)])
def test_a_bug_is_found(bug: str) -> None:
    assert find_bug(bug, 0, FOUND_WITHIN) is not None


@pytest.mark.parametrize("seed", first(1, range(2)))
def test_the_store_in_memory_answers_as_postgres_does(dsn: str, seed: int) -> None:
    both = Both(dsn, seed)
    try:
        for _ in range(100):
            for _ in range(3):
                both.step()
            both.compare()
    finally:
        both.close()
    assert both.kinds >= {
        "granted",
        "woken",
        "superseded",
        "try_acquire",
        "acquire",
        "heartbeat",
        "withdraw_presence",
        "reap",
    }


RECIPES = {
    "elections": {
        "_begin lead",
        "_begin lost",
        "_begin yield",
        "_end t",
        "_end f",
        "_demand priority",
        "_demand transfer",
        "_demand over",
        "_transfer asked",
        "_transfer outranked",
        "_transfer absent",
    },
    "schedules": {
        "claim run",
        "claim running",
        "claim plan",
        "claim queued",
        "claim none",
        "claim skipped",
        "end_slot succeeded",
        "end_slot failed",
        "end_slot None",
    },
}
"""What must happen at least once when both sides are compared."""


@pytest.mark.second_stage
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_in_memory_answers_as_in_postgres(dsn: str, recipe: str, seed: int) -> None:
    both = BothRecipes(dsn, seed, recipe)
    try:
        for _ in range(150):
            for _ in range(3):
                both.step()
            both.compare()
    finally:
        both.close()
    assert both.kinds >= RECIPES[recipe]


SHARED = {
    "read-write": {
        "read granted",
        "read waits",
        "read refused",
        "write granted",
        "write waits",
        "write refused",
        "downgrade t",
        "downgrade f",
        "woken",
        "heartbeat",
        "withdraw_presence",
        "reap",
    },
    "semaphore": {
        "permit granted",
        "permit waits",
        "permit refused",
        "permits differ",
        "resize_semaphore",
        "shared_state",
        "woken",
        "heartbeat",
        "reap",
    },
}
"""What must happen at least once when both sides are compared."""


@pytest.mark.second_stage
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", SHARED)
def test_a_shared_lock_in_memory_answers_as_in_postgres(dsn: str, kind: str, seed: int) -> None:
    both = BothShared(dsn, seed, kind)
    try:
        for _ in range(150):
            for _ in range(3):
                both.step()
            both.compare()
    finally:
        both.close()
    assert both.kinds >= SHARED[kind]
