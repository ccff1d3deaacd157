"""A thread that waits reads the listener's connection itself, and no wake-up is lost when it stops."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core import notification_probe, statements
from dblock._core.acquire import LockFlows
from dblock._core.effects import Call
from dblock._core.waiters import LocalWaiters
from dblock._runtime import thread_reader
from dblock._runtime.runner import Runner
from dblock._runtime.thread_reader import ThreadReader
from dblock._runtime.wakeups import ThreadWaiter

LONG = 20.0
"""Seconds for which a waiter waits that is not woken."""


class Connection:
    """A listener's connection over which the names of attempts come, one byte each."""

    readable_in_loop = True
    reader: Any = None

    def __init__(self, notified: Callable[[str], None]) -> None:
        self.lock = threading.Lock()
        self.ours, self.theirs = socket.socketpair()
        self.read_by: list[threading.Thread] = []
        self.broken = False
        self._notified = notified

    def fileno(self) -> int:
        return self.ours.fileno()

    def read(self) -> None:
        with self.lock:
            self.read_locked()

    def read_locked(self) -> None:
        self.read_by.append(threading.current_thread())
        if self.broken:
            raise psycopg.OperationalError("the server has closed it")
        for attempt in self.ours.recv(100).decode():
            self._notified(attempt)


class Flow:
    """What a reader needs of a listener's flow."""

    listens = True
    closed = False

    def __init__(self) -> None:
        self.waiters = LocalWaiters(LockFlows("dblock", "me"))
        self.open = Connection(self.waiters.notified)
        self.connection: Connection | None = self.open


class Client:
    """A client's waiters, each in a thread."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.connection = self.flow.open
        self.woken: list[str] = []
        """What woke the listener's thread."""
        self.reader = ThreadReader(self.flow, lambda: self.woken.append("!"))  # type: ignore[arg-type]

    def wait(self, attempt: str) -> tuple[ThreadWaiter, threading.Thread]:
        waiter = ThreadWaiter(self.flow.waiters, "a", attempt)
        waiter.reader = self.reader
        self.flow.waiters.add(waiter)

        def run() -> None:
            waiter.wait(LONG)
            assert waiter.is_woken()
            waiter.leave()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return waiter, thread

    def wait_as_reader(self, attempt: str) -> tuple[ThreadWaiter, threading.Thread]:
        waiter, thread = self.wait(attempt)
        wait_until(lambda: self.reader.is_reader(waiter))
        return waiter, thread


def wait_until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(4000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("the condition did not become true")


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    for one in (client.connection.ours, client.connection.theirs):
        one.close()


def ended(thread: threading.Thread) -> bool:
    thread.join(LONG / 2)
    return not thread.is_alive()


def test_waiter_reads_its_notification_in_its_own_thread(client: Client) -> None:
    _, thread = client.wait_as_reader("x")
    assert client.reader.reads(client.connection)
    client.connection.theirs.send(b"x")
    assert ended(thread)
    assert client.connection.read_by == [thread]
    assert client.woken == []
    assert client.reader.reads(client.connection), "the listener's thread leaves the reading to the next wait"


def test_reader_passes_on_what_comes_for_other_waiters(client: Client) -> None:
    _, first = client.wait_as_reader("x")
    _, second = client.wait("y")
    client.connection.theirs.send(b"y")
    assert ended(second)
    assert first.is_alive()
    client.connection.theirs.send(b"x")
    assert ended(first)
    assert set(client.connection.read_by) == {first}


def test_reader_that_leaves_gives_the_reading_back_if_others_wait(client: Client) -> None:
    _, first = client.wait_as_reader("x")
    waiter, second = client.wait("y")
    client.connection.theirs.send(b"x")
    assert ended(first)
    assert client.woken
    assert not client.reader.reads(client.connection)
    assert second.is_alive()
    waiter.wake()
    assert ended(second)


def test_reader_is_woken_by_another_thread(client: Client) -> None:
    waiter, thread = client.wait_as_reader("x")
    waiter.wake()
    assert ended(thread)
    assert client.connection.read_by == []


def test_waiter_that_was_woken_before_it_reads_does_not_wait(client: Client) -> None:
    waiter = ThreadWaiter(client.flow.waiters, "a", "x")
    waiter.reader = client.reader
    waiter.wake()
    waiter.wait(LONG)
    assert waiter.is_woken()


def test_wait_ends_at_its_time(client: Client) -> None:
    waiter = ThreadWaiter(client.flow.waiters, "a", "x")
    waiter.reader = client.reader
    client.flow.waiters.add(waiter)
    waiter.wait(0.01)
    assert not waiter.is_woken()
    assert not client.reader.is_reader(waiter)


def test_reader_leaves_a_connection_that_is_closed_to_the_listener(client: Client) -> None:
    waiter, thread = client.wait_as_reader("x")
    client.reader.stop()  # what ListenerConnection.close() does
    wait_until(lambda: not client.reader.is_reader(waiter))
    assert not client.reader.reads(client.connection)
    waiter.wake()  # what the listener does when it has another connection
    assert ended(thread)


def test_reader_leaves_a_broken_connection_to_the_listener(client: Client) -> None:
    waiter, thread = client.wait_as_reader("x")
    client.connection.broken = True
    client.connection.theirs.send(b"x")
    wait_until(lambda: client.woken)
    assert not client.reader.reads(client.connection)
    waiter.wake()
    assert ended(thread)


def test_reader_does_not_read_during_an_exchange(client: Client) -> None:
    _, thread = client.wait_as_reader("x")
    with client.connection.lock:
        client.connection.theirs.send(b"x")
        thread.join(0.05)
        assert client.connection.read_by == []
    assert ended(thread)


def test_reader_that_an_interrupt_left_behind_is_forgotten(client: Client) -> None:
    gone, thread = client.wait_as_reader("z")
    client.connection.theirs.send(b"z")
    assert ended(thread)
    client.reader._reader, client.reader._read_until = gone, 0.0
    assert not client.reader.reads(client.connection)
    _, thread = client.wait_as_reader("x")
    client.connection.theirs.send(b"x")
    assert ended(thread)


@pytest.mark.parametrize("why", ["no connection", "not listening", "encrypted"])
def test_waiter_does_not_read_where_it_cannot(client: Client, why: str) -> None:
    if why == "no connection":
        client.flow.connection = None
    client.flow.listens = why != "not listening"
    client.connection.readable_in_loop = why != "encrypted"
    waiter, thread = client.wait("x")
    waiter.wake()
    assert ended(thread)
    assert client.connection.read_by == []
    assert not client.reader.reads(client.connection)


def test_exchange_that_begins_before_a_read_does_not_keep_the_reader(client: Client) -> None:
    """The reader would otherwise wait for the reply of the exchange, beyond the time of its own wait."""
    connection = client.connection

    class Lock:
        """A lock that an exchange takes once a reader has seen it free."""

        def locked(self) -> bool:
            busy = connection_lock.locked()
            connection_lock.acquire(blocking=False)
            return busy

        def acquire(self, *args: Any, **options: Any) -> bool:
            connection_lock.acquire(blocking=False)
            return connection_lock.acquire(*args, **options)

        def release(self) -> None:
            connection_lock.release()

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    connection_lock, connection.lock = connection.lock, Lock()  # type: ignore[assignment]
    waiter, thread = client.wait_as_reader("x")
    connection.theirs.send(b"x")
    wait_until(connection_lock.locked)
    waiter.wake()  # what the exchange does with the notification
    assert ended(thread)
    connection_lock.release()


def test_reader_waits_for_an_exchange_in_a_process_with_many_open_files(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """select() takes no number from 1024 on."""

    def open_high() -> tuple[int, int]:
        low = open_pipe()
        high = fcntl.fcntl(low[0], fcntl.F_DUPFD, 1024), fcntl.fcntl(low[1], fcntl.F_DUPFD, 1024)
        for handle in low:
            os.close(handle)
        return high

    open_pipe = thread_reader._open_pipe
    monkeypatch.setattr(thread_reader, "_open_pipe", open_high)
    _, thread = client.wait_as_reader("x")
    with client.connection.lock:
        client.connection.theirs.send(b"x")
        thread.join(0.05)
        assert thread.is_alive()
    assert ended(thread)


@pytest.mark.second_stage
@pytest.mark.beside_others
def test_notification_that_comes_after_the_last_waiter_left_is_read(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the client takes the notification that it sends to itself for lost, and polls."""
    left, perform = threading.Event(), Runner.perform

    def send_late(runner: Runner, effect: Any) -> Any:
        if isinstance(effect, Call) and effect.sql == statements.NOTIFY_SELF:
            left.wait(LONG)
        return perform(runner, effect)

    def give_up(lock: dblock.Lock[Any]) -> None:
        with pytest.raises(dblock.LockTimeout):
            lock.acquire(timeout=0.5)

    monkeypatch.setattr(Runner, "perform", send_late)
    monkeypatch.setattr(notification_probe, "PROBE_WITHIN", 4.0)
    with dblock.Client(dsn) as holder, dblock.Client(dsn, presence=None) as client:
        lease = holder.lock("a").acquire()
        waiting = threading.Thread(target=give_up, args=(client.lock("a"),), daemon=True)
        waiting.start()
        wait_until(lambda: client._runtime.runner and client._runtime.listener.flow._probe.due_at() < math.inf)
        flow, reader = client._runtime.listener.flow, client._runtime.listener._reader
        flow.waiters.wake_all()  # it waits again, and reads
        wait_until(lambda: reader.reads(flow.connection))
        assert ended(waiting)
        left.set()
        wait_until(lambda: flow._probe.due_at() == math.inf)
        assert flow.waiters.notifications_work
        assert "do not come through" not in caplog.text
        assert lease.release()
