"""A ticket that keeps its position while no process waits with it."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.support.still_clock import StillClock

FIRST, SECOND, CLIENT, OTHER, PARKED = (str(uuid.UUID(int=number)) for number in range(1, 6))
EXPIRE = "UPDATE distributed_locks SET expires_at = clock_timestamp()"


def join(owner: psycopg.Connection, attempt: str, client: str, had_ticket: bool = False) -> tuple[bool, int | None]:
    asked = "SELECT granted, ticket FROM acquire('a', attempt => %s, client => %s, had_ticket => %s)"
    ((granted, ticket),) = owner.execute(asked, [attempt, client, had_ticket]).fetchall()
    return granted, ticket


def tickets(owner: psycopg.Connection) -> list[tuple[str, str]]:
    rows = owner.execute("SELECT attempt, client FROM lock_tickets ORDER BY number").fetchall()
    return [(str(attempt), str(client)) for attempt, client in rows]


def keep(owner: psycopg.Connection, seconds: float, attempt: str = FIRST, client: str = PARKED) -> bool:
    call = "SELECT keep_ticket('a', %s, %s, make_interval(secs => %s))"
    ((kept,),) = owner.execute(call, [attempt, client, seconds]).fetchall()
    return bool(kept)


def test_kept_ticket_stays_first_when_its_client_is_gone(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a')")
    join(owner, FIRST, CLIENT)
    join(owner, SECOND, OTHER)
    assert keep(owner, 60)
    owner.execute("SELECT leave_queue(%s)", [CLIENT])
    owner.execute(EXPIRE)
    assert join(owner, SECOND, OTHER, True)[0] is False, "the lock is reserved for the ticket that is kept"
    assert join(owner, FIRST, CLIENT)[0] is True


def test_kept_ticket_loses_its_position_after_its_time(owner: psycopg.Connection, clock: StillClock) -> None:
    owner.execute("SELECT try_acquire('a', '30 s')")
    join(owner, FIRST, CLIENT)
    join(owner, SECOND, OTHER)
    assert keep(owner, 60)
    clock.advance(59)
    assert join(owner, SECOND, OTHER, True)[0] is False, "the lock is free, and the ticket is still kept"
    clock.advance(1)
    assert join(owner, SECOND, OTHER, True)[0] is True
    assert tickets(owner) == []


def test_release_passes_over_a_ticket_that_was_kept_for_a_moment(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a')")
    join(owner, FIRST, CLIENT)
    join(owner, SECOND, OTHER)
    assert keep(owner, 0)
    owner.execute("SELECT release('a', (SELECT token FROM holder('a')), durable => false)")
    assert tickets(owner) == [(SECOND, OTHER)], "deleted by the release"


@pytest.mark.parametrize("had_ticket", [False, True])
def test_ticket_follows_the_client_that_asks(had_ticket: bool, owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a')")
    _, number = join(owner, FIRST, CLIENT)
    keep(owner, 60)
    assert tickets(owner) == [(FIRST, PARKED)]
    assert join(owner, FIRST, OTHER, had_ticket) == (False, number)
    assert tickets(owner) == [(FIRST, OTHER)]


@pytest.mark.parametrize("mode", ["read", "write"])
def test_ticket_of_a_shared_lock_follows_the_client_that_asks(mode: str, owner: psycopg.Connection) -> None:
    owner.execute("SELECT acquire_shared('a', 'read-write', 'write')")
    asked = "SELECT granted FROM acquire_shared('a', 'read-write', %s, attempt => %s, client => %s)"
    for client in (CLIENT, OTHER):
        assert owner.execute(asked, [mode, FIRST, client]).fetchall() == [(False,)]
        assert tickets(owner) == [(FIRST, client)]
        assert keep(owner, 60)
        assert tickets(owner) == [(FIRST, PARKED)]


def test_attempt_without_a_ticket_keeps_nothing(owner: psycopg.Connection) -> None:
    assert not keep(owner, 60)
    assert owner.execute("SELECT FROM lock_clients").fetchall() == []


@pytest.mark.parametrize(("client", "seconds"), [(None, 1), (PARKED, 301), (PARKED, -1), (PARKED, None)])
def test_ticket_is_not_kept_for_long(client: str | None, seconds: float | None, owner: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        keep(owner, seconds, client=client)  # type: ignore[arg-type]


def test_list_continues_after_a_name(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire(n) FROM unnest('{a,b,c,d}'::text[]) AS n")
    page = "SELECT name FROM list_locks(max_rows => 2, after => %s)"
    assert owner.execute(page, ["b"]).fetchall() == [("c",), ("d",)]
    assert owner.execute(page, ["d"]).fetchall() == []
