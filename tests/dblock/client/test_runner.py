"""How a runner handles failing connections: when it retries, drops a connection, or stops preparing statements."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core.effects import Call, Flow
from dblock._core.statements import WHICH_BACKEND
from dblock._runtime.call_retry import CallRetry
from dblock._runtime.connection import RawConnection
from dblock._runtime.event_loop import LoopCalls, LoopKeepAliveRunner, LoopWatch
from dblock._runtime.runner import AsyncRunner, Runner
from dblock._runtime.target import Target, resolve
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.proxy import Proxy
from tests.support.sessions import Sessions

ONE = Call(b"SELECT $1::text", ("1",))


class Counted(Target):
    """Counts the attempts to connect."""

    attempts = 0

    def connect(self) -> psycopg.Connection[Any]:
        self.attempts += 1
        return super().connect()


def calling(call: Call) -> Flow[Any]:
    return (yield call)


@pytest.fixture
def runner(dsn: str) -> Any:
    runner = Runner(resolve(dsn), "dblock", 3, 5.0)
    yield runner
    runner.close()


def test_connection_that_cannot_be_opened_is_not_tried_twice() -> None:
    """A second attempt with a wrong password may lock the account."""
    target = Counted("postgresql://me:wrong@127.0.0.1:1/nowhere")
    with pytest.raises(dblock.Unavailable):
        Runner(target, "dblock", 1, 1.0).run(calling(ONE))
    assert target.attempts == 1


def test_connection_left_in_a_transaction_is_not_used_again(runner: Runner) -> None:
    backend = Call(b"SELECT pg_backend_pid()", ())
    first = runner.run(calling(backend))
    assert runner.run(calling(backend)) == first
    runner.run(calling(Call(b"BEGIN", ())))
    assert runner.run(calling(backend)) != first


def test_runner_stops_preparing_when_every_connection_loses_its_statements(
    runner: Runner, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens behind an unrecognised pooler that gives each statement another backend."""
    busy = Call(b"SELECT $1::text FROM pg_advisory_xact_lock_shared(7)", ("1",))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"

    def use_all_three() -> None:
        owner.execute("SELECT pg_advisory_lock(7)")
        with ThreadPoolExecutor(3) as threads:
            replies = threads.map(lambda _: runner.run(calling(busy)), range(3))
            eventually(lambda: owner.execute(waiting).fetchone() == (3,), "three calls wait")
            owner.execute("SELECT pg_advisory_unlock(7)")
            assert list(replies) == [("1",)] * 3

    use_all_three()
    idle = list(runner._pool._idle)
    assert len(idle) == 3
    for wire in idle:
        wire.connection.execute("DEALLOCATE ALL")
    use_all_three()
    assert not runner.prepares
    assert not any(wire.prepares for wire in runner._pool._idle)


def test_two_clients_never_share_a_statements_name(runner: Runner) -> None:
    """A pooler may give both clients one backend, where a shared name would run the other client's statement."""
    for number in range(3):
        runner.run(calling(Call(f"SELECT {number}".encode(), ())))
    (wire,) = runner._pool._idle
    names = wire.connection.execute("SELECT name, statement FROM pg_prepared_statements ORDER BY 1").fetchall()
    other = Runner(runner.target, "dblock", 1, 5.0)
    other.run(calling(Call(b"SELECT 7", ())))
    (others,) = other._pool._idle[0].connection.execute("SELECT name FROM pg_prepared_statements").fetchall()
    other.close()
    assert len(names) == 3
    assert others[0] not in {name for name, _ in names}


async def test_client_that_closes_before_a_call_is_retried_leaves_no_lock(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has granted the lock, but the connection broke before the reply."""
    client = clients(presence=None)
    await client.lock("warm").holder()
    runtime, exchange = client._runtime, RawConnection.exchange

    def broken(self: RawConnection, call: Call, *rest: Any) -> Any:
        yield from exchange(self, call, *rest)
        if b".try_acquire(" in call.sql:
            runtime.closed = True
            runtime.runner._pool._refuse_calls()
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(RawConnection, "exchange", broken)
    with pytest.raises(dblock.ClientClosed):
        await client.lock("a").try_acquire()
    row = owner.execute("SELECT token > 0, expires_at = '-infinity' FROM distributed_locks WHERE name = 'a'").fetchone()
    assert row == (True, True)


def test_interrupt_of_the_caller_is_raised_instead_of_the_error_that_it_caused(runner: Runner) -> None:
    """psycopg cancels the statement because of the interrupt, and the cancel fails on a broken connection."""
    error = psycopg.OperationalError("broken")
    error.__context__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        CallRetry(runner, ONE, None).raise_or_retry(error, None)


def test_interrupt_that_the_caller_already_handles_does_not_end_the_call(runner: Runner) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as handled:
        trouble = CallRetry(runner, ONE, sys.exc_info()[1])
        error = psycopg.OperationalError("broken")
        error.__context__ = handled
        assert trouble.raise_or_retry(error, None) is True


async def test_call_that_is_dropped_with_its_loop_closes_its_connection_and_waits_for_nothing(dsn: str) -> None:
    runner = AsyncRunner(resolve(dsn), "dblock", 1, 5, prepares=False)
    assert await runner.call(ONE, False) == ("1",)
    (raw,) = runner._pool._idle
    asleep = runner.call(Call(b"SELECT pg_sleep(60)", ()), False)
    waiting = asleep.send(None)
    assert waiting is not None
    waiting._asyncio_future_blocking = False
    pid = raw.connection.info.backend_pid
    asleep.close()  # as the garbage collector does
    assert raw.connection.closed
    runner.close()
    with psycopg.connect(dsn) as owner:
        owner.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])


def test_statement_given_up_while_it_is_prepared_is_not_prepared_again(dsn: str) -> None:
    """A second PREPARE would fail, as where connections lose their statements, and the runner would stop preparing."""
    with Proxy(dsn) as proxy:
        runner = Runner(resolve(proxy.dsn), "dblock", 1, 5.0)
        runner.run(calling(WHICH_BACKEND))
        (wire,) = runner._pool._idle
        proxy.delay = 0.75
        with pytest.raises(dblock.Unavailable, match=r"has not answered for 0\.5 s"):
            runner.run(calling(ONE._replace(within=0.5)))
        proxy.delay = 0.0
        assert runner.run(calling(ONE)) == ("1",)
        assert runner._pool._idle == [wire]
        assert runner.prepares
        runner.close()


class Full(Target):
    """Refuses connections once `room` connections were opened."""

    room = 0

    def connect(self) -> psycopg.Connection[Any]:
        if not self.room:
            raise psycopg.OperationalError("sorry, too many clients already")
        self.room -= 1
        return super().connect()


@pytest.fixture
def borrower(runner: Runner, dsn: str) -> Any:
    """Return a runner that can open no connection of its own."""
    borrower = Runner(Full(dsn), "dblock", 1, 5.0, prepares=False, spare=runner)
    yield borrower
    borrower.close()


def test_borrower_waits_for_a_connection_in_use_and_opens_none(dsn: str, sessions: Sessions) -> None:
    full = Full(dsn)
    full.room = 1
    lender = Runner(full, "dblock", 3, 20.0)
    borrower = Runner(full, "dblock", 1, 20.0, prepares=False, spare=lender)
    busy = Call(b"SELECT $1::text FROM pg_advisory_xact_lock_shared(7)", ("1",))
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    with ThreadPoolExecutor(2) as threads:
        used = threads.submit(lender.run, calling(busy))
        sessions.wait_until_a_session_waits()
        lent = threads.submit(borrower.run, calling(ONE))
        time.sleep(0.3)
        assert not lent.done()
        keeper.do("SELECT pg_advisory_unlock(7)")
        assert lent.result() == ("1",)
        assert used.result() == ("1",)
    borrower.close()
    lender.close()


@pytest.mark.second_stage
def test_borrower_waits_no_longer_than_its_call_may_take(runner: Runner, borrower: Runner) -> None:
    wire = runner._pool.take()
    began = time.monotonic()
    with pytest.raises(dblock.Unavailable):
        borrower.run(calling(ONE._replace(within=0.3)))
    assert 0.3 <= time.monotonic() - began < 4.5, "not for the patience of its client"
    runner._pool.give(wire)


async def test_thread_that_borrows_of_a_loop_waits_for_a_connection_and_opens_none(dsn: str) -> None:
    class Crowded(Full):
        async def connect_async(self) -> psycopg.AsyncConnection[Any]:
            if not self.room:
                raise psycopg.OperationalError("sorry, too many clients already")
            self.room -= 1
            return await super().connect_async()

    full = Crowded(dsn)
    full.room = 1
    owner = AsyncRunner(full, "dblock", 3, 5.0)
    watch = LoopWatch(asyncio.get_running_loop())
    borrower = LoopKeepAliveRunner(full, "dblock", 1, 5.0, prepares=False, loop=LoopCalls(owner, watch))
    used = asyncio.ensure_future(owner.run(calling(Call(b"SELECT $1::text FROM pg_sleep(2 * 0.2)", ("1",)))))
    await eventually_async(lambda: not full.room, "the only connection is used")
    assert await asyncio.to_thread(borrower.run, calling(ONE)) == ("1",)
    assert await used == ("1",)
    borrower.close()
    owner.close()
