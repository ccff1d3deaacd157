"""lock_metrics(): what a monitoring system collects, in a bounded number of groups."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.support.still_clock import StillClock


def metrics(owner: psycopg.Connection, known: list[str] | None = None, most: int = 100) -> dict[str, tuple[Any, ...]]:
    rows = owner.execute("SELECT * FROM lock_metrics(%s::text[], %s)", [known or [], most]).fetchall()
    return {group: (held, waiting, waited, overdue) for group, held, _, waiting, waited, overdue in rows}


def test_empty_database_has_no_groups(owner: psycopg.Connection) -> None:
    assert metrics(owner) == {}


def test_holders_and_waiters_are_counted_by_the_prefix_of_the_name(owner: psycopg.Connection) -> None:
    for name in ("order:1", "order:2", "nightly", ":odd"):
        owner.execute("SELECT try_acquire(%s)", [name])
    owner.execute("SELECT release('gone', token) FROM try_acquire('gone')")
    owner.execute("SELECT try_acquire('expired')")
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = 'expired'")
    for name in ("order:1", "order:1", "order:2"):
        owner.execute("SELECT acquire(%s, attempt => gen_random_uuid(), client => gen_random_uuid())", [name])
    owner.execute("UPDATE lock_tickets SET since = since - interval '1 hour'")
    found = metrics(owner)
    assert {group: row[:2] for group, row in found.items()} == {"order": (2, 3), "nightly": (1, 0), "other": (1, 0)}
    assert 3600 < found["order"][2] < 3660
    assert found["nightly"][2] == 0


def test_oldest_hold_counts_from_the_oldest_grant_of_the_group(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a:1')")
    owner.execute("SELECT pg_sleep(0.1)")
    owner.execute("SELECT try_acquire('a:2')")
    ((oldest,),) = owner.execute("SELECT oldest_hold FROM lock_metrics()").fetchall()
    assert oldest >= 0.1
    owner.execute("SELECT release('a:1', token) FROM holder('a:1')")
    ((newer,),) = owner.execute("SELECT oldest_hold FROM lock_metrics()").fetchall()
    assert newer < oldest + 60
    owner.execute("SELECT release('a:2', token) FROM holder('a:2')")
    assert owner.execute("SELECT oldest_hold FROM lock_metrics('{a}')").fetchall() == [(0,)]


def test_shares_count_for_the_group_of_their_lock(owner: psycopg.Connection) -> None:
    for name, kind in (("rw:a", "'read-write', 'read'"), ("rw:a", "'read-write', 'read'"), ("s", "'semaphore'")):
        permits = ", permits => 2" if kind == "'semaphore'" else ""
        owner.execute(f"SELECT acquire_shared('{name}', {kind}, attempt => gen_random_uuid(){permits})".encode())
    assert {group: row[0] for group, row in metrics(owner).items()} == {"rw": 2, "s": 1}


def test_dead_waiter_is_not_counted(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a')")
    owner.execute("SELECT acquire('a', attempt => gen_random_uuid(), client => gen_random_uuid())")
    assert metrics(owner)["a"][1] == 1
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() - interval '1 s'")
    assert metrics(owner)["a"][1:3] == (0, 0)


def test_overdue_schedule_is_counted_in_its_group(owner: psycopg.Connection, clock: StillClock) -> None:
    claim = "SELECT end_slot('reports:daily', token, 'succeeded') FROM claim_slot('reports:daily', every => '1 hour')"
    owner.execute(claim.encode())
    clock.at("13:10")
    assert metrics(owner) == {}
    clock.at("13:10:01")
    assert metrics(owner)["reports"][3] == 1
    owner.execute("SELECT pause_schedule('reports:daily', 'me', 'test')")
    assert metrics(owner) == {}


def test_groups_beyond_the_limit_are_added_up(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('g' || n || ':x') FROM generate_series(1, 150) AS n")
    owner.execute("SELECT acquire('g150:x', attempt => gen_random_uuid(), client => gen_random_uuid())")
    found = metrics(owner)
    assert len(found) == 101
    assert found["other"][0] == 50
    assert found["g150"][:2] == (1, 1), "groups with waiters come first"
    assert sum(row[0] for row in found.values()) == 150
    assert metrics(owner, most=0) == {"other": (150, 1, pytest.approx(found["g150"][2], abs=60), 0)}


def test_known_groups_stay_and_leave_the_rest_to_the_others(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('g' || n || ':x') FROM generate_series(1, 9) AS n")
    found = metrics(owner, ["free", "g9"], most=2)
    assert {group: row[0] for group, row in found.items()} == {"free": 0, "g9": 1, "other": 8}
    assert metrics(owner, ["free"], most=0) == {"other": (9, 0, 0, 0)}


def test_long_prefix_is_cut(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire(%s)", ["ü" * 200])
    assert metrics(owner) == {"ü" * 64: (1, 0, 0, 0)}
