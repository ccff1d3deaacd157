"""The limits, with small numbers: what is claimed of them is so. The long ones go as far as the page says."""

from __future__ import annotations

import pytest

from tests.robustness.limits import Measured, clients, connections, names, queues, snapshots
from tests.robustness.soak.flatness import COUNTS, MEMORY, RATE, Series, judge
from tests.robustness.soak.rolling import Windows

pytestmark = pytest.mark.usefixtures("embedded_binaries")


def is_so(found: Measured) -> Measured:
    assert found.claims
    assert all(found.claims.values()), found.markdown()
    return found


@pytest.mark.second_stage
def test_among_many_names_nothing_is_missing_and_the_reaper_takes_what_is_idle() -> None:
    # How long it takes is measured where nothing else runs, in test_a_million_names.
    found = is_so(names.measure(5_000, 500, 150, durable=False))
    assert found.numbers["bytes"] < 600


@pytest.mark.second_stage
def test_a_snapshot_held_open_makes_the_table_grow_only_while_it_is() -> None:
    is_so(snapshots.measure(1_500, durable=False))


def test_a_client_has_three_connections_and_leaves_nothing_behind() -> None:
    assert is_so(clients.measure(2, 4, durable=False)).numbers["connections"] == clients.CONNECTIONS


@pytest.mark.long
def test_clients_beyond_the_connection_limit_cost_the_others_no_lease() -> None:
    # More than there are connections, so that some get none however few each of the others takes.
    found = is_so(clients.measure_without_room(2, 12, 20, ttl=2.0))
    assert 0 < found.numbers["held"] < 24


@pytest.mark.long
def test_leases_outlast_a_time_without_free_connections() -> None:
    is_so(connections.measure(ttl=1.5))


def test_client_can_wait_for_many_locks() -> None:
    is_so(queues.measure((30,), look_for=0.2, durable=False))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_names() -> None:
    found = is_so(names.measure())
    assert found.numbers["pair"] < 1.5, found.figures


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_five_hundred_clients() -> None:
    is_so(clients.measure())
    is_so(clients.measure_without_room())


# What a soak says is flat.


def over_an_hour(rule: object, *values: float) -> Series:
    """Make a series of an hour with these values, each for an equal part of it."""
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
    return {"id": number, "at": at, "said": {}, **more}


def grant(number: int, began: float, ended: float, key: str, token: int) -> list[dict[str, object]]:
    """Make the two lines that a process reports of a grant."""
    return [
        line(number, began, kind="acquire", key=key),
        {**line(number, ended, outcome="ok"), "said": {"token": token}},
    ]


def test_a_token_that_goes_back_is_found_though_windows_lie_between() -> None:
    windows = Windows()
    windows.report("a", grant(1, 1.0, 2.0, "x", 10))
    for _ in range(5):
        windows.next()
    assert not windows.violations
    windows.report("b", grant(1, 20.0, 21.0, "x", 9))
    windows.next()
    assert len(windows.violations) == 1
    assert windows.looked_at["token order"] == 2


def test_a_lease_that_is_believed_in_after_the_next_grant_is_found() -> None:
    windows = Windows()
    windows.report("a", [*grant(1, 1.0, 2.0, "x", 10), line(2, 9.0, kind="believe", key="x")])
    windows.next()
    windows.report("a", [{**line(2, 9.0, outcome="ok"), "said": {"token": 10}}])
    windows.report("b", grant(1, 3.0, 4.0, "x", 11))
    windows.next()
    assert len(windows.violations) == 1
