"""What a watch notes of a test: each lease, wait, client, thread and transaction that stays, with its line."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import dblock
from dblock.observability import Observer
from dblock.recipes.elections.term import Term
from dblock.testing import leaks, private_database
from dblock.testing.leaks import Watch, watching
from dblock.testing.private_database import PrivateDatabase
from tests.support.eventually import eventually
from tests.support.machine import before_long


def line_here(offset: int) -> str:
    import sys

    return f"test_leaks.py:{sys._getframe(1).f_lineno + offset} in "


def test_held_lease_is_noted_with_its_line(watch: Watch, holder: dblock.Client) -> None:
    lease = holder.lock("a").acquire()
    expected = line_here(-1)
    watch.note_calls()
    (said,) = watch.left
    assert said.startswith(f"lock 'a' (token {lease.token}), held by holder: acquired at ")
    assert expected in said


def test_lease_of_a_decorated_function_is_noted_with_the_line_of_its_call(watch: Watch, holder: dblock.Client) -> None:
    left: list[str] = []

    @holder.locked("a")
    def locked() -> None:
        watch.note_calls()
        left.extend(watch.left)

    locked()
    assert line_here(-1) in left[0]


def test_efficiency_lease_is_noted_without_a_token(watch: Watch, holder: dblock.Client) -> None:
    lease = holder.efficiency_lock("a").acquire()
    watch.note_calls()
    assert watch.left[0].startswith("lock 'a' (an efficiency lock), held by holder")
    lease.release()


def test_released_and_lost_leases_are_not_noted(
    watch: Watch, holder: dblock.Client, database: PrivateDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_database, "SESSIONS_END_WITHIN", 0.0)  # the client is still open
    with holder.lock("a"):
        pass
    lease = holder.lock("b").acquire()
    database.connection.execute("SELECT dblock.force_release('b', %s, now => true)", [lease.token])
    with pytest.raises(dblock.LeaseLost):
        lease.renew()
    watch.note_calls()
    database.note_left(watch)
    assert not [said for said in watch.left if "lock" in said.split()[0]]


def test_lease_that_outlives_its_event_loop_is_noted(watch: Watch, dsn: str) -> None:
    loop = asyncio.new_event_loop()
    client = dblock.AsyncClient(dsn)
    lease = loop.run_until_complete(client.lock("a").acquire())
    loop.close()
    client._runtime.shutdown()  # as the client does by itself when it finds its loop closed
    watch.note_calls()
    assert watch.left[0].startswith(f"lock 'a' (token {lease.token}), held by ")


def test_thread_that_does_not_end_is_noted(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "THREADS_END_WITHIN", 0.01)
    end = threading.Event()
    for name in ("dblock listener", "a thread of the user"):
        threading.Thread(target=end.wait, name=name, daemon=True).start()
    watch.note_threads()
    end.set()
    assert watch.left == ["the thread 'dblock listener', which does not end"]


def test_client_that_is_open_is_noted_and_closed(watch: Watch, dsn: str) -> None:
    client = dblock.Client(dsn)
    expected = line_here(-1)
    unused = dblock.Client(dsn)
    client.lock("a").try_acquire()
    watch.close_clients()
    (said,) = watch.left
    assert expected in said
    with pytest.raises(dblock.ClientClosed):
        client.lock("a").try_acquire()
    unused.close()


def campaign(client: dblock.Client) -> object:
    return client.election("leader").campaign()


def lead(client: dblock.Client) -> object:
    stack = contextlib.ExitStack()
    stack.enter_context(client.election("leader").lead())
    return stack


def campaign_in_a_thread(client: dblock.Client) -> object:
    made: list[object] = []
    thread = threading.Thread(target=lambda: made.append(campaign(client)))
    thread.start()
    thread.join()
    return made


def run_a_body_that_stays(client: dblock.Client) -> object:
    begun, end = threading.Event(), threading.Event()

    def body(term: Term) -> None:
        begun.set()
        end.wait()

    threading.Thread(target=client.election("leader").run, args=[body], daemon=True).start()
    begun.wait()
    return end


@pytest.mark.second_stage
@pytest.mark.parametrize("leave_term", [campaign, lead, campaign_in_a_thread, run_a_body_that_stays])
def test_term_that_is_left_is_noted_once_and_released_at_once(
    watch: Watch, dsn: str, database: PrivateDatabase, leave_term: Callable[[dblock.Client], object]
) -> None:
    left = leave_term(dblock.Client(dsn))
    watch.note_calls()
    with before_long(1):
        watch.close_clients()
    watch.note_threads()
    database.note_left(watch)
    said_of_term, said_of_client = watch.left
    assert said_of_term.startswith("lock 'election:leader' (token ")
    assert said_of_client.startswith("a client with its connections and threads, not closed: ")
    if isinstance(left, threading.Event):
        left.set()


@pytest.mark.second_stage
def test_async_term_that_is_left_in_an_open_loop_is_released_at_once(
    watch: Watch, dsn: str, database: PrivateDatabase
) -> None:
    loop = asyncio.new_event_loop()
    client = dblock.AsyncClient(dsn)
    term = loop.run_until_complete(client.election("leader").campaign())
    with before_long(1):
        watch.close_clients()
    loop.close()
    watch.left.clear()
    database.note_left(watch)
    assert watch.left == []
    assert not term.remaining()


def wait_at_barrier(client: dblock.Client) -> None:
    client.barrier("b", parties=2).wait()


def wait_at_latch(client: dblock.Client) -> None:
    client.latch("b", count=2).wait()


@contextlib.contextmanager
def waiter(database: PrivateDatabase, client: dblock.Client, wait: Callable[[dblock.Client], None]) -> Iterator[None]:
    """Let a thread wait at a barrier or a latch until its client is closed."""

    def run() -> None:
        with contextlib.suppress(dblock.ClientClosed):
            wait(client)

    thread = threading.Thread(target=run)
    thread.start()
    waiters = "SELECT count(*) FROM dblock.barrier_waiters"
    eventually(lambda: database.connection.execute(waiters).fetchone() != (0,), "a waiter")
    try:
        yield
    finally:
        client.close()
        thread.join()


@pytest.mark.parametrize(("wait", "kind"), [(wait_at_barrier, "barrier"), (wait_at_latch, "latch")])
def test_waiter_at_a_barrier_or_a_latch_is_noted_with_its_line(
    watch: Watch,
    holder: dblock.Client,
    database: PrivateDatabase,
    wait: Callable[[dblock.Client], None],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaks, "WAITERS_LEAVE_WITHIN", 0.01)
    monkeypatch.setattr(private_database, "SESSIONS_END_WITHIN", 60.0)
    with waiter(database, holder, wait):
        watch.note_calls()
    watch.note_calls()
    database.note_left(watch)
    (said,) = watch.left
    assert said.startswith(f"a waiter at {kind} 'b': holder waits at ")
    assert said.endswith(f"test_leaks.py:{wait.__code__.co_firstlineno + 1} in {wait.__name__}")


@pytest.mark.parametrize(("wait", "kind"), [(wait_at_barrier, "barrier"), (wait_at_latch, "latch")])
def test_waiter_of_another_process_at_a_barrier_or_a_latch_is_noted(
    dsn: str, database: PrivateDatabase, wait: Callable[[dblock.Client], None], kind: str
) -> None:
    watch = Watch()
    outside = PrivateDatabase(dsn, "dblock", None, exclusive=False)
    with waiter(database, dblock.Client(dsn, holder="theirs"), wait):
        watch.note_calls()
        outside.note_left(watch)
    outside.close()
    assert watch.left == [f"a waiter at {kind} 'b': theirs waits in another process"]


def test_waiter_that_a_latch_lets_through_is_not_noted(
    watch: Watch, holder: dblock.Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "WAITERS_LEAVE_WITHIN", 60.0)
    made = PrivateDatabase(dsn, "dblock", None, exclusive=False)
    with waiter(made, holder, wait_at_latch):
        holder.latch("b", count=2).count_down(2)
        watch.note_calls()
        made.note_left(watch)
    made.close()
    assert watch.left == []


def test_observers_of_the_user_are_called_too(dsn: str) -> None:
    class Own(Observer):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def hold_began(self, hold: Any) -> None:
            self.seen.append(hold.lock)

    own = Own()
    with watching(Watch()) as watch, dblock.Client(dsn, observers=[own]) as client, client.lock("a"):
        pass
    assert own.seen == [hold.lock for hold, _ in watch.grants] == ["a"]
    with dblock.Client(dsn) as client, client.lock("b"):
        pass
    assert len(watch.grants) == 1


def test_rows_are_deleted_in_one_statement(watch: Watch, holder: dblock.Client, database: PrivateDatabase) -> None:
    for number in range(3):
        with holder.lock(f"lock {number}"), holder.read_lock(f"shared {number}"):
            pass
    holder.latch("latch", count=2).count_down()
    count = "SELECT (SELECT count(*) FROM dblock.distributed_locks) + (SELECT count(*) FROM dblock.latches)"
    assert database.connection.execute(count).fetchone() == (10,)
    database.clean(watch)
    assert database.connection.execute(count).fetchone() == (0,)
    with holder.lock("lock 0"):
        pass
    assert watch.left == []


@pytest.mark.second_stage
def test_transaction_in_the_way_is_noted_and_ended(
    watch: Watch, holder: dblock.Client, database: PrivateDatabase, dsn: str
) -> None:
    with holder.lock("a") as lease:
        open_one = psycopg.connect(dsn)
        lease.assert_held(open_one)
    database.clean(watch)
    (said,) = [said for said in watch.left if "transaction" in said]
    assert f"of backend {open_one.info.backend_pid}" in said
    assert "assert_held" in said
    with pytest.raises(psycopg.OperationalError):
        open_one.execute("SELECT 1")
