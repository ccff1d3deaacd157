"""The database in memory answers as Postgres does: the same random calls go to both, and the replies are compared.

The tables are compared too, and which waiters were woken.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.robustness.simulation.barrier_fidelity import BothBarriers
from tests.robustness.simulation.fidelity import Both
from tests.robustness.simulation.recipe_fidelity import BothRecipes
from tests.robustness.simulation.several_fidelity import BothSeveral
from tests.robustness.simulation.shared_fidelity import BothShared

KINDS: dict[str, Callable[[str, int], Both]] = {
    "locks": Both,
    "several": BothSeveral,
    "read-write": lambda dsn, seed: BothShared(dsn, seed, "read-write"),
    "semaphore": lambda dsn, seed: BothShared(dsn, seed, "semaphore"),
    "barriers": BothBarriers,
    "elections": lambda dsn, seed: BothRecipes(dsn, seed, "elections"),
    "schedules": lambda dsn, seed: BothRecipes(dsn, seed, "schedules"),
}

PER_RUN = 400
"""How many calls one database gets."""


def answers_alike(dsn: str, kind: str, seed: int, steps: int) -> set[str]:
    """Send so many random calls to both sides. Return what happened."""
    both = KINDS[kind](dsn, seed)
    try:
        for number in range(1, steps + 1):
            both.step()
            if number % 3 == 0:
                both.compare()
    finally:
        both.close()
    return both.kinds


@pytest.mark.second_stage
@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_postgres_answer_alike_in_two_thousand_steps(dsn: str, kind: str) -> None:
    happened = answers_alike(dsn, kind, 1, PER_RUN)
    if kind == "several":
        assert happened >= {
            *("granted", "granted any", "cycle", "wanted", "gave way", "woken", "deadlock t", "deadlock f"),
            *("acquire_all", "acquire_any", "abandon_all", "give_way", "wake_set", "holder", "queue"),
        }
    if kind == "barriers":
        assert happened >= {"arrive_barrier True", "arrive_barrier False", "leave_barrier True", "woken", "heartbeat"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_postgres_answer_alike_in_a_hundred_thousand_steps(dsn: str, kind: str, seed: int) -> None:
    answers_alike(dsn, kind, 100 + seed, PER_RUN)
