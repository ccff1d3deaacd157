"""What a runner makes of connections that fail: which are tried again, which are thrown away, which stop preparing."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock
from dblock.calls import Call, Steps
from dblock.runner import Runner, _Trouble
from dblock.target import Target, resolve

ONE = Call(b"SELECT $1::text", ("1",))


class Counted(Target):
    """A target that counts the attempts to connect."""

    attempts = 0

    def connect(self) -> psycopg.Connection[Any]:
        self.attempts += 1
        return super().connect()


def calling(call: Call) -> Steps[Any]:
    return (yield call)


@pytest.fixture
def runner(dsn: str) -> Any:
    runner = Runner(resolve(dsn), "dblock", 3, 5.0)
    yield runner
    runner.close()


def test_a_connection_that_cannot_be_opened_is_not_tried_twice() -> None:
    """A wrong password tried twice may lock the account."""
    target = Counted("postgresql://me:wrong@127.0.0.1:1/nowhere")
    with pytest.raises(dblock.Unavailable):
        Runner(target, "dblock", 1, 1.0).run(calling(ONE))
    assert target.attempts == 1


def test_a_connection_left_in_a_transaction_is_not_used_again(runner: Runner) -> None:
    backend = Call(b"SELECT pg_backend_pid()", ())
    first = runner.run(calling(backend))
    assert runner.run(calling(backend)) == first
    runner.run(calling(Call(b"BEGIN", ())))
    assert runner.run(calling(backend)) != first


def test_statements_lost_on_every_connection_are_prepared_no_more(
    runner: Runner, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a pooler that gives each statement another backend, and was not recognised."""
    busy = Call(b"SELECT $1::text FROM pg_sleep(0.2)", ("1",))
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda _: runner.run(calling(busy)), range(3))) == [("1",)] * 3
        idle = list(runner._pool._idle)
        assert len(idle) == 3
        for wire in idle:
            wire.connection.execute("DEALLOCATE ALL")
        assert list(threads.map(lambda _: runner.run(calling(busy)), range(3))) == [("1",)] * 3
    assert not runner.prepares
    assert not any(wire.prepares for wire in runner._pool._idle)


def test_two_clients_never_share_a_statements_name(runner: Runner) -> None:
    """A pooler may lead both to one backend, on which the name of one would run the statement of the other."""
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


def test_a_caller_who_leaves_comes_before_the_error_that_it_led_to(runner: Runner) -> None:
    """psycopg cancels for a caller who leaves, and meets a broken connection; the caller leaves all the same."""
    error = psycopg.OperationalError("broken")
    error.__context__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _Trouble(runner, ONE, None).raise_or_retry(error, None)


def test_but_what_the_caller_was_already_handling_does_not(runner: Runner) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as handled:
        trouble = _Trouble(runner, ONE, sys.exc_info()[1])
        error = psycopg.OperationalError("broken")
        error.__context__ = handled
        assert trouble.raise_or_retry(error, None) is True
