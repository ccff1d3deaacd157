"""Celery: unique tasks. One that is queued, or runs, is not sent again. Its mark neither expires early nor sticks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import psycopg
import pytest
from celery import Celery, chain, signals
from celery.contrib.testing.worker import start_worker
from celery.worker import state
from kombu.exceptions import OperationalError

import dblock
from dblock.integrations import sent_tasks
from dblock.integrations.celery import Locked, UniqueTask
from tests.support import isolation
from tests.support.eventually import eventually

pytestmark = [pytest.mark.second_stage]

NUMBERS = iter(range(1_000_000))

SENDER = """
import os, signal, sys, time
import psycopg
from celery import Celery
from dblock.integrations.celery import Locked, UniqueTask

app = Celery("unique", broker="memory://")
locks = Locked(sys.argv[1])

@app.task(base=UniqueTask)
@locks("report:{customer}", unique="until_start")
def report(customer="ada"): ...

with locks.client.lock("another lock"), psycopg.connect(sys.argv[1], autocommit=True) as connection:
    # From here on, the leases of this client end with its process.
    while not connection.execute("SELECT FROM dblock.list_presence()").fetchall():
        time.sleep(0.01)
    print(report.delay().id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Case:
    """An application with a unique task, whose messages are counted. A worker is started when a test wants one."""

    def __init__(self, dsn: str, **options: Any) -> None:
        # Each application has queues of its own: the broker is the memory of this process.
        self.queue = f"queue-{next(NUMBERS)}"
        self.app = Celery("unique", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(
            task_default_queue=self.queue,
            worker_prefetch_multiplier=1,
            broker_transport_options={"polling_interval": 0.02},
        )
        self.locks = Locked(dsn)
        self.ran: list[Any] = []
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.body: Callable[[Any], Any] = lambda task: None

        task_options: dict[str, Any] = options.pop("task", {})
        lock_options: dict[str, Any] = {"unique": "until_start", "retry_in": 0.05} | options

        @self.locks("report:{customer}", **lock_options)
        def report(task: Any, customer: str = "ada") -> str:
            self.ran.append(task.request.id)
            self.began.set()
            self.body(task)
            return customer

        self.report = self.app.task(report, base=UniqueTask, bind=True, shared=False, **task_options)

    def messages(self) -> int:
        """Return how many messages no worker has taken."""
        with self.app.connection() as connection:
            return int(connection.default_channel.queue_declare(self.queue, passive=False).message_count)

    def hold(self, task: Any) -> None:
        """Let the body run until `may_end`."""
        assert self.may_end.wait(30)

    @contextmanager
    def worker(self, threads: int = 2) -> Iterator[None]:
        # Celery sets environment variables for its own processes, and a thread of its pool may outlast the worker.
        with (
            isolation.kept(),
            mock.patch.dict(os.environ),
            start_worker(self.app, pool="threads", concurrency=threads, perform_ping_check=False, loglevel="error"),
        ):
            try:
                yield
            finally:
                # The worker looks whether it should end after each message, and otherwise every two seconds.
                state.should_terminate = 0
                self.app.tasks["celery.accumulate"].delay()


@pytest.fixture(autouse=True)
def _no_logging_of_celery() -> Iterator[None]:
    """Leave the root logger as it is: Celery would raise its level, and hide warnings from all later tests."""

    def leave_it(**_: Any) -> None: ...

    signals.setup_logging.connect(leave_it, weak=False)
    yield
    signals.setup_logging.disconnect(leave_it)


@pytest.fixture
def make(dsn: str) -> Iterator[Callable[..., Case]]:
    made: list[Case] = []

    def one(**options: Any) -> Case:
        made.append(Case(dsn, **options))
        return made[-1]

    yield one
    for case in made:
        case.may_end.set()
        case.locks.client.close()


def marks(owner: psycopg.Connection) -> list[str]:
    return [name for (name,) in owner.execute("SELECT name FROM list_locks() WHERE name LIKE 'queued:%'")]


def test_queued_task_is_not_sent_again_by_senders_at_the_same_time(make: Callable[..., Case], dsn: str) -> None:
    case = make()
    with ThreadPoolExecutor(8) as senders:
        results = list(senders.map(lambda _: case.report.delay("ada"), range(24)))
    assert len({result.id for result in results}) == 1
    assert case.messages() == 1
    assert case.report.delay("grace").id != results[0].id, "another customer has a report of its own"
    with case.worker():
        assert results[-1].get(timeout=30) == "ada"
    assert case.ran.count(results[0].id) == 1


def test_mark_of_a_message_outlives_its_sender(make: Callable[..., Case], dsn: str) -> None:
    case = make()
    sender = subprocess.run([sys.executable, "-c", SENDER, dsn], stdout=subprocess.PIPE, text=True, timeout=60)
    for _ in range(4):
        assert case.report.delay().id == sender.stdout.strip()
        time.sleep(0.2)  # longer than the grace of a process that has ended


def test_task_until_its_start_is_sent_once_more_while_it_runs(
    make: Callable[..., Case], owner: psycopg.Connection
) -> None:
    case = make()
    case.body = case.hold
    with case.worker():
        running = case.report.delay()
        assert case.began.wait(30)
        again = {case.report.delay().id for _ in range(3)}
        assert len(again) == 1
        assert again != {running.id}
        time.sleep(0.3)  # its lock is busy, so it is sent again
        assert {case.report.delay().id} == again, "the mark goes with the message that is sent again"
        case.may_end.set()
        case.app.AsyncResult(again.pop()).get(timeout=30)
    assert len(case.ran) == 2
    assert marks(owner) == []


def test_task_until_its_end_is_not_sent_while_it_runs(make: Callable[..., Case]) -> None:
    case = make(unique="until_end")
    case.body = case.hold
    with case.worker():
        running = case.report.delay()
        assert case.began.wait(30)
        assert {case.report.delay().id for _ in range(3)} == {running.id}
        case.may_end.set()
        running.get(timeout=30)
        assert case.report.delay().get(timeout=30) == "ada", "it can be sent when it has ended"
    assert len(case.ran) == 2


@pytest.mark.parametrize("until", ["until_start", "until_end"])
def test_task_that_failed_can_be_sent_again(make: Callable[..., Case], until: str, owner: psycopg.Connection) -> None:
    case = make(unique=until)
    case.body = lambda task: 1 / 0
    with case.worker():
        with pytest.raises(ZeroDivisionError):
            case.report.delay().get(timeout=30)
        with pytest.raises(ZeroDivisionError):
            case.report.delay().get(timeout=30)
    assert len(case.ran) == 2
    assert marks(owner) == []


@pytest.mark.parametrize("on_busy", ["skip", "raise"])
def test_task_that_did_not_run_because_its_lock_was_busy_can_be_sent_again(
    make: Callable[..., Case], on_busy: str, owner: psycopg.Connection
) -> None:
    case = make(on_busy=on_busy)
    with case.locks.client.lock("report:ada"), case.worker():
        case.report.delay().get(timeout=30, propagate=False)
        assert marks(owner) == []
    assert case.ran == []
    assert case.report.delay()
    assert case.messages() == 1


def test_sender_that_fails_leaves_no_mark_and_another_does_not_rely_on_it(
    make: Callable[..., Case], owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make()
    fails = threading.Event()
    real = case.app.send_task

    def refuse(*args: Any, **options: Any) -> Any:
        case.began.set()
        if not fails.is_set():
            assert fails.wait(30)
            raise OperationalError("the broker is away")
        return real(*args, **options)

    monkeypatch.setattr(case.app, "send_task", refuse)
    with ThreadPoolExecutor(2) as senders:
        first = senders.submit(case.report.delay)
        assert case.began.wait(30)
        second = senders.submit(case.report.delay)
        time.sleep(0.2)
        assert not second.done(), "the first message is not in the queue yet"
        fails.set()
        with pytest.raises(OperationalError):
            first.result(30)
        assert second.result(5)  # before the mark of the first one expires
    assert case.messages() == 1


def test_sender_that_cannot_confirm_its_mark_has_sent_the_message(
    make: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make()

    def fail(*_: Any) -> bool:
        raise dblock.Unavailable("the database is away")

    monkeypatch.setattr(sent_tasks.SentTasks, "confirm", fail)
    assert case.report.delay()
    assert case.messages() == 1


def test_sender_that_dies_while_it_sends_blocks_the_next_one_for_a_moment(
    make: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_tasks, "SENDING", 0.5)
    case = make()
    assert sent_tasks.SentTasks(case.locks.client).place("report:ada", "a task that was not sent")
    case.report.delay()
    assert case.messages() == 1


def test_older_message_leaves_the_work_to_the_newer_one(make: Callable[..., Case], owner: psycopg.Connection) -> None:
    case = make()
    older = case.report.delay()
    owner.execute("SELECT force_release('queued:report:ada', token, now => true) FROM holder('queued:report:ada')")
    newer = case.report.delay()
    assert newer.id != older.id
    assert case.messages() == 2
    with case.worker(threads=1):  # the older message comes first
        assert newer.get(timeout=30) == "ada"
        assert older.get(timeout=30) is None
    assert case.ran == [newer.id]


def test_message_that_is_delivered_again_runs_although_its_mark_is_gone(
    make: Callable[..., Case], owner: psycopg.Connection
) -> None:
    case = make()
    first = case.report.delay()
    owner.execute("SELECT force_release('queued:report:ada', token, now => true) FROM holder('queued:report:ada')")
    with case.worker():
        assert first.get(timeout=30) == "ada"


def test_message_that_expires_or_is_revoked_leaves_no_mark(
    make: Callable[..., Case], owner: psycopg.Connection
) -> None:
    case = make()
    case.report.apply_async(expires=-1)
    with case.worker():
        eventually(lambda: marks(owner) == [])
    assert case.ran == []


@pytest.mark.parametrize("until", ["until_start", "until_end"])
def test_task_that_retries_is_sent_and_stays_unique(
    make: Callable[..., Case], until: str, owner: psycopg.Connection
) -> None:
    case = make(unique=until)
    lock = case.locks.client.lock("report:ada")

    def retry(task: Any) -> None:
        case.hold(task)
        if task.request.retries == 0:
            raise task.retry(countdown=0.05)

    case.body = retry
    with case.worker(), ThreadPoolExecutor(1) as thread:
        first = case.report.delay()
        assert case.began.wait(30)
        # The next holder of the lock keeps the message that is sent again from beginning.
        acquiring = thread.submit(lock.acquire, 30)
        eventually(lock.queue)
        case.may_end.set()
        with acquiring.result(30):
            assert case.report.delay().id == first.id
        assert first.get(timeout=30) == "ada"
    assert case.ran == [first.id] * 2
    assert marks(owner) == []


def test_task_with_autoretry_is_sent_again_and_then_free(make: Callable[..., Case], owner: psycopg.Connection) -> None:
    case = make(task={"autoretry_for": (ZeroDivisionError,), "retry_backoff": False, "default_retry_delay": 0.1})

    def fail_once(task: Any) -> None:
        if len(case.ran) == 1:
            raise ZeroDivisionError

    case.body = fail_once
    with case.worker():
        assert case.report.delay().get(timeout=30) == "ada"
    assert len(case.ran) == 2
    assert marks(owner) == []


def test_task_of_a_chain_is_always_sent(make: Callable[..., Case]) -> None:
    case = make()
    case.report.delay()

    def then(customer: str) -> str:
        return f"after {customer}"

    after = case.app.task(then, name="after", shared=False)
    with case.worker():
        assert chain(case.report.s("ada"), after.s()).delay().get(timeout=30) == "after ada"


def test_eager_task_runs_at_once(make: Callable[..., Case]) -> None:
    case = make()
    case.app.conf.task_always_eager = True
    assert [case.report.delay().get() for _ in range(2)] == ["ada", "ada"]


def test_delay_of_a_message_prolongs_its_mark(make: Callable[..., Case], owner: psycopg.Connection) -> None:
    case = make(queued_for=60)
    case.report.apply_async(countdown=100)
    left = owner.execute("SELECT remaining FROM holder('queued:report:ada')").fetchone()
    assert left is not None
    assert 100 < left[0] <= 160


def test_database_that_is_away_refuses_to_send(dsn: str) -> None:
    case = Case(dsn.replace("port=", "port=1"))
    with pytest.raises(dblock.DatabaseError):
        case.report.delay()
    assert case.messages() == 0


def test_unique_task_with_wrong_options_fails_at_import(dsn: str) -> None:
    locked = Locked(dsn)
    for wrong in ({"unique": "ever"}, {"unique": "until_end", "queued_for": 5}, {"unique": "until_end", "meta": 1}):
        with pytest.raises(dblock.InvalidArgument):
            locked("report", **wrong)(lambda: None)


def test_unique_task_without_its_base_or_its_lock_fails(make: Callable[..., Case]) -> None:
    case = make()

    def refresh() -> None:
        case.ran.append("refreshed")

    without_base = case.app.task(case.locks("cache", unique="until_start")(refresh), name="base", shared=False)
    with case.worker(), pytest.raises(dblock.ConfigurationError, match="UniqueTask"):
        without_base.delay().get(timeout=30)
    without_lock = case.app.task(refresh, name="lock", base=UniqueTask, shared=False)
    with pytest.raises(dblock.ConfigurationError, match="unique"):
        without_lock.delay()
    assert case.ran == []
