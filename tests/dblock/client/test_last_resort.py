"""Calls of a client whose one connection is the listener's, on a server that accepts no other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core.effects import Call, Row
from dblock._runtime import home as home_module
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import Overdue
from dblock._runtime.listener_connection import NotLent
from dblock._runtime.target import Target
from tests.dblock.client.test_home import BLOCKED, called, only_home, quick, watched  # noqa: F401
from tests.support.eventually import eventually_async
from tests.support.facade import Clients
from tests.support.sessions import Sessions

FULL = "sorry, too many clients already"
HELD = "SELECT count(*) FROM distributed_locks WHERE name = 'a' AND expires_at > clock_timestamp()"


@pytest.fixture
async def quiet(
    clients: Clients,
    owner: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    quick: None,  # noqa: F811
) -> Any:
    """A client that has one connection, while the server takes a moment to refuse any other one."""
    client = watched(clients)
    await client.lock("kept").acquire()
    await only_home(client, owner)

    def refuse(_: Target) -> Any:
        time.sleep(0.02)
        raise psycopg.OperationalError(FULL)

    async def refuse_async(_: Target) -> Any:
        await asyncio.sleep(0.02)
        raise psycopg.OperationalError(FULL)

    monkeypatch.setattr(Target, "connect", refuse)
    monkeypatch.setattr(Target, "connect_async", refuse_async)
    yield client
    monkeypatch.undo()


@pytest.fixture
def patient_loans(clients: Clients) -> None:
    """Lend the connection for longer than a machine stands still."""
    clients.timings = replace(clients.timings, lent_for=20.0, last_resort_for=20.0, loan_given_up_within=20.0)


@pytest.mark.usefixtures("patient_loans")
async def test_calls_at_the_same_time_take_turns_over_the_one_connection(quiet: Any) -> None:
    leases = await asyncio.gather(*(quiet.lock(f"a{number}").try_acquire() for number in range(8)))
    assert await asyncio.gather(*(lease.release() for lease in leases)) == [True] * 8


@pytest.fixture
def lends_for_long(clients: Clients) -> None:
    clients.timings = replace(clients.timings, last_resort_for=20.0, give_up_within=20.0)


@pytest.mark.second_stage
@pytest.mark.usefixtures("lends_for_long")
async def test_call_borrows_the_one_connection_for_longer_if_it_has_no_other(
    clients: Clients,
    quiet: Any,
    sessions: Sessions,
    owner: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = await only_home(quiet, owner)
    lent, lend = 0, home.lend

    def count(call: Call, within: float, wait: float) -> Row | None:
        nonlocal lent
        lent += call.sql == BLOCKED.sql
        row: Row | None = lend(call._replace(giving_up=20.0), within, wait)
        return row

    monkeypatch.setattr(home, "lend", count)
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    calling = asyncio.create_task(called(quiet, BLOCKED))
    await eventually_async(lambda: lent == 2)
    await asyncio.to_thread(sessions.wait_until_a_session_waits)
    await asyncio.sleep(clients.timings.lent_for * 1.5)
    keeper.do("SELECT pg_advisory_unlock(7)")
    assert await calling == ("1",)


async def test_grant_whose_reply_came_too_late_is_given_back(
    quiet: Any, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = await only_home(quiet, owner)
    lend = home.lend

    def refuse(*_: object) -> None:
        raise NotLent

    def lose_reply(*args: Any) -> None:
        monkeypatch.setattr(home, "lend", refuse)
        lend(args[0]._replace(giving_up=20.0), 20.0, 20.0)
        raise Overdue("late")

    monkeypatch.setattr(home, "lend", lose_reply)
    monkeypatch.setattr(home_module.Home, "may_lend", lambda home, call: True)  # also while the keep-alive is at work
    with pytest.raises(dblock.Unavailable, match=FULL):
        await quiet.lock("a", ttl=600).try_acquire()
    assert owner.execute(HELD).fetchone() == (1,)
    monkeypatch.setattr(home, "lend", lend)
    await eventually_async(lambda: owner.execute(HELD).fetchone() == (0,))


async def test_grant_whose_connection_broke_on_a_full_server_is_given_back(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call may have been executed before its connection broke, and cannot be retried."""
    client = watched(clients)
    await (await client.lock("a").acquire()).release()
    make_call, exchange, breaks = RawConnection.call, RawConnection.exchange, True

    def call_and_break(raw: RawConnection, call: Call, within: float) -> Row | None:
        return broken(raw, call, make_call(raw, call, within))

    def exchange_and_break(raw: RawConnection, call: Call, within: float) -> Any:
        return broken(raw, call, (yield from exchange(raw, call, within)))

    def broken(raw: RawConnection, call: Call, row: Row | None) -> Row | None:
        nonlocal breaks
        if breaks and b"acquire" in call.sql:
            breaks = False
            monkeypatch.setattr(Target, "connect", refuse)
            monkeypatch.setattr(Target, "connect_async", refuse)
            raw.close()
            raise psycopg.OperationalError("the connection is lost")
        return row

    def refuse(_: Target) -> Any:
        raise psycopg.OperationalError(FULL)

    monkeypatch.setattr(RawConnection, "call", call_and_break)
    monkeypatch.setattr(RawConnection, "exchange", exchange_and_break)
    monkeypatch.setattr(home_module.Home, "may_lend", lambda home, call: False)
    monkeypatch.setattr(home_module.Home, "has_any", False)
    with pytest.raises(dblock.Unavailable, match=FULL) as caught:
        await client.lock("a", ttl=600).try_acquire()
    assert caught.value.may_be_done
    assert owner.execute(HELD).fetchone() == (1,)
    monkeypatch.undo()
    await eventually_async(lambda: owner.execute(HELD).fetchone() == (0,))
