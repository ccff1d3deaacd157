"""When a pool opens another connection."""

from __future__ import annotations

from dblock._runtime.pool_demand import GROW_AFTER, LASTS_AFTER, ROUNDS, STUCK_AFTER, STUCK_AT_LATEST, Demand


def test_queue_whose_callers_come_back_needs_another_connection_soon() -> None:
    """As with several threads that acquire and release locks in a loop."""
    demand, now = Demand(), 100.0
    for length in range(1, 8):
        demand.waits(length, now)
    while now < 100.0 + LASTS_AFTER:
        assert not demand.is_unmet(now)
        now += 0.001
        demand.returned(now)
        demand.waits(7, now)
    assert demand.is_unmet(now)


def test_burst_of_calls_is_worked_off_by_one_connection_however_slowly() -> None:
    demand, now = Demand(), 100.0
    for length in range(1, 50):
        demand.waits(length, now)
    for _ in range(ROUNDS * 49 - 1):
        now += GROW_AFTER * 0.9
        demand.returned(now)
        assert not demand.is_unmet(now)
    demand.over()
    assert not demand.is_unmet(now + 1000.0)


def test_connection_that_does_not_come_back_is_soon_stuck() -> None:
    demand = Demand()
    demand.waits(1, 100.0)
    assert not demand.is_unmet(100.0 + GROW_AFTER * 0.9)
    assert demand.is_unmet(100.0 + GROW_AFTER * 1.1)


def test_connection_of_a_slow_machine_is_stuck_later_but_not_much_later() -> None:
    usual = GROW_AFTER * 2 / STUCK_AFTER
    for pace, stuck_after in (usual, GROW_AFTER * 2), (usual * 100, STUCK_AT_LATEST):
        demand, now = Demand(), 100.0
        for length in range(1, 100):
            demand.waits(length, now)
        for _ in range(50):
            now += pace
            demand.returned(now)
        assert not demand.is_unmet(now + stuck_after * 0.9)
        assert demand.is_unmet(now + stuck_after * 1.1)


def test_next_queue_begins_without_the_calls_of_the_last_one() -> None:
    demand, now = Demand(), 100.0
    demand.waits(1, now)
    for _ in range(ROUNDS):
        demand.returned(now)
    demand.over()
    now += 1000.0
    demand.waits(1, now)
    demand.returned(now + LASTS_AFTER * 2)
    assert not demand.is_unmet(now + LASTS_AFTER * 2)
