"""dblock's own code holds in a simulated world; the simulation finds what it should, and is like the real thing."""

from __future__ import annotations

import pytest

from tests.robustness.simulation.fidelity import Both
from tests.robustness.simulation.many import find_bug, run_batch, run_many, run_one
from tests.robustness.simulation.mutations import BUGS
from tests.support.stages import first

pytestmark = pytest.mark.beside_others

SEEDS = 200

FOUND_WITHIN = 1500
"""Seeds within which every bug is found; most take fewer than a hundred."""


@pytest.mark.second_stage
def test_everything_holds_in_some_hundred_worlds() -> None:
    summary = run_batch(range(SEEDS))
    assert not summary.failures, str(summary)
    assert summary.grants > 5 * SEEDS, "there was something to look at"
    assert summary.handed_over > SEEDS / 2, "locks were handed over in calm weather"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_everything_holds_in_a_hundred_thousand_worlds() -> None:
    summary = run_many(0, 100_000, processes=2)
    assert not summary.failures, str(summary)


def test_a_seed_tells_the_same_story_each_time() -> None:
    first, second, other = (run_one(seed, tracing=True) for seed in (7, 7, 8))
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


@pytest.mark.parametrize("bug", first(4, BUGS))
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
