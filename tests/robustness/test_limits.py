"""The claims of each limit hold at a small size. The nightly run goes as far as the documentation says."""

from __future__ import annotations

import pytest

from tests.robustness.limits import Measured, clients, connections, names, queues, snapshots
from tests.robustness.soak.flatness import COUNTS, MEMORY, RATE, Series, judge
from tests.robustness.soak.rolling import Windows

pytestmark = pytest.mark.usefixtures("embedded_binaries")


def verified(found: Measured) -> Measured:
    assert found.claims
    assert all(found.claims.values()), found.markdown()
    return found


@pytest.mark.second_stage
def test_many_names_lose_no_lock_and_the_reaper_deletes_the_idle_ones() -> None:
    # The duration is measured in test_million_names_cost_no_more_per_lock, while nothing else runs.
    found = verified(names.measure(5_000, 500, 150, durable=False))
    assert found.numbers["bytes"] < 600


@pytest.mark.second_stage
def test_open_snapshot_makes_the_table_grow_only_while_it_is_open() -> None:
    verified(snapshots.measure(1_500, durable=False))


@pytest.mark.second_stage
def test_client_has_two_connections_and_leaves_nothing_behind() -> None:
    assert verified(clients.measure(2, 4, durable=False)).numbers["connections"] == clients.CONNECTIONS


@pytest.mark.nightly
def test_clients_beyond_the_connection_limit_cost_the_others_no_lease() -> None:
    # More clients than connections, so that some clients get none, however few connections each of the others takes.
    found = verified(clients.measure_beyond_limit(2, 12, 20, ttl=2.0))
    assert 0 < found.numbers["held"] < 24


@pytest.mark.nightly
def test_leases_survive_a_period_without_free_connections() -> None:
    verified(connections.measure(ttl=1.5))


@pytest.mark.second_stage
def test_client_can_wait_for_many_locks() -> None:
    verified(queues.measure((30,), observe_for=0.2, durable=False))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_million_names_cost_no_more_per_lock() -> None:
    found = verified(names.measure())
    assert found.numbers["pair"] < 1.5, found.figures


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_five_hundred_clients_lose_no_lease() -> None:
    verified(clients.measure())
    verified(clients.measure_beyond_limit())


# What a soak judges as flat.


def over_an_hour(rule: object, *values: float) -> Series:
    """Make a series over an hour from these values, each for an equal part of it."""
    points = [(at / 10, values[int(at / 600 * len(values))]) for at in range(600)]
    return Series("it", "", rule, points)  # type: ignore[arg-type]


def flat(series: Series) -> bool:
    verdict = judge(series, 60)
    assert verdict is not None
    return verdict.flat


def test_constant_series_is_flat_despite_noise_and_warm_up() -> None:
    assert flat(over_an_hour(MEMORY, *[20.0] * 1, *[50.0, 51.0, 49.5] * 10))
    assert flat(over_an_hour(COUNTS, *[7.0, 8.0] * 30))
    assert flat(over_an_hour(RATE, *[1000.0, 950.0] * 30))


def test_slowly_growing_series_is_not_flat() -> None:
    assert not flat(over_an_hour(MEMORY, *[50.0 + number * 0.25 for number in range(60)]))
    assert not flat(over_an_hour(COUNTS, *[8.0 + number // 10 for number in range(60)]))
    assert not flat(over_an_hour(RATE, *[1000.0 - 8 * number for number in range(60)]))


def test_growth_hidden_by_a_late_drop_shows_in_the_slope() -> None:
    assert not flat(over_an_hour(MEMORY, *[50.0 + number * 0.4 for number in range(50)], *[52.0] * 10))


def line(number: int, at: float, **more: object) -> dict[str, object]:
    return {"id": number, "at": at, "details": {}, **more}


def grant(number: int, began: float, ended: float, key: str, token: int) -> list[dict[str, object]]:
    """Make the two lines that a process reports for a grant."""
    return [
        line(number, began, kind="acquire", key=key),
        {**line(number, ended, outcome="ok"), "details": {"token": token}},
    ]


def test_falling_token_is_found_across_several_windows() -> None:
    windows = Windows()
    windows.report("a", grant(1, 1.0, 2.0, "x", 10))
    for _ in range(5):
        windows.next()
    assert not windows.violations
    windows.report("b", grant(1, 20.0, 21.0, "x", 9))
    windows.next()
    assert len(windows.violations) == 1
    assert windows.checked["token order"] == 2


def test_lease_trusted_after_the_next_grant_is_found() -> None:
    windows = Windows()
    windows.report("a", [*grant(1, 1.0, 2.0, "x", 10), line(2, 9.0, kind="believe", key="x")])
    windows.next()
    windows.report("a", [{**line(2, 9.0, outcome="ok"), "details": {"token": 10}}])
    windows.report("b", grant(1, 3.0, 4.0, "x", 11))
    windows.next()
    assert len(windows.violations) == 1
