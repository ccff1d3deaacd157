"""Dramatiq: actors under a lock, in a worker with several threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import dramatiq
import psycopg
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries

import dblock
from dblock.integrations.dramatiq import LockMiddleware
from tests.support.eventually import eventually
from tests.support.machine import before_long, measured, not_judged, too_late_to_renew


@pytest.fixture
def locks(dsn: str) -> Iterator[LockMiddleware]:
    made = LockMiddleware(dsn)
    yield made
    made.client.close()


@pytest.fixture
def broker(locks: LockMiddleware) -> Iterator[StubBroker]:
    made = StubBroker(middleware=[Retries(max_retries=0)])
    made.add_middleware(locks)
    worker = dramatiq.Worker(made, worker_timeout=50, worker_threads=3)
    worker.start()
    yield made
    worker.stop()
    made.close()


def test_busy_messages_are_enqueued_again_and_use_up_no_retries(broker: StubBroker) -> None:
    inside: list[int] = []
    seen: list[int] = []

    @dramatiq.actor(broker=broker, lock="turn:{name}", lock_retry_in=0.02, max_retries=0)
    def take_turn(name: str) -> None:
        inside.append(1)
        seen.append(len(inside))
        time.sleep(0.03)
        inside.pop()

    for _ in range(4):
        take_turn.send("a")
    eventually(lambda: len(seen) == 4)
    assert seen == [1, 1, 1, 1]


def test_busy_message_is_skipped(broker: StubBroker, locks: LockMiddleware) -> None:
    ran: list[str] = []

    @dramatiq.actor(broker=broker, lock="cache", lock_on_busy="skip")
    def refresh() -> None:
        ran.append("refreshed")

    with locks.client.lock("cache"):
        refresh.send()
        broker.join("default", timeout=20_000)
    assert ran == []
    refresh.send()
    broker.join("default", timeout=20_000)
    assert ran == ["refreshed"]


def test_busy_message_waits_or_raises(broker: StubBroker, locks: LockMiddleware) -> None:
    tokens: list[int] = []

    @dramatiq.actor(broker=broker, lock="job", lock_on_busy="wait", lock_timeout=30)
    def wait() -> None:
        tokens.append(dblock.current_lease().token)

    @dramatiq.actor(broker=broker, lock="job", lock_on_busy="raise")
    def give_up() -> None: ...

    with locks.client.lock("job") as lease:
        give_up.send()
        with pytest.raises(dblock.LockTimeout):
            broker.join("default", fail_fast=True, timeout=20_000)
        wait.send()
        eventually(lambda: locks.client.lock("job").queue())
    eventually(lambda: tokens)
    assert tokens[0] > lease.token


@pytest.mark.second_stage
def test_actor_that_outlasts_its_ttl_keeps_its_lock_and_then_frees_it(
    broker: StubBroker, locks: LockMiddleware
) -> None:
    running, go_on = threading.Event(), threading.Event()

    @dramatiq.actor(broker=broker, lock="job", lock_ttl=0.5)
    def hold() -> None:
        running.set()
        go_on.wait(30)

    with measured() as lateness:
        hold.send()
        assert running.wait(30)
        time.sleep(0.9)
        lease = locks.client.lock("job").try_acquire()
        if too_late_to_renew(lateness(), 0.5):
            not_judged("to renew")
        assert lease is None
    go_on.set()
    broker.join("default", timeout=20_000)
    assert locks.client.lock("job").holder() is None


def test_actor_that_fails_frees_its_lock(broker: StubBroker, locks: LockMiddleware) -> None:
    held: list[bool] = []

    @dramatiq.actor(broker=broker, lock="job")
    def fail() -> None:
        held.append(locks.client.lock("job").holder() is not None)
        raise ZeroDivisionError

    fail.send()
    with pytest.raises(ZeroDivisionError):
        broker.join("default", fail_fast=True, timeout=20_000)
    assert held == [True]
    assert locks.client.lock("job").holder() is None


@pytest.mark.second_stage
def test_actor_whose_lease_is_lost_is_interrupted_and_fails(broker: StubBroker, owner: psycopg.Connection) -> None:
    running = threading.Event()
    ended: list[str] = []

    @dramatiq.actor(broker=broker, lock="job", lock_ttl=0.5)
    def hold() -> None:
        running.set()
        ends = time.monotonic() + 30
        try:
            while time.monotonic() < ends:
                with contextlib.suppress(Exception):  # also in a task that catches everything, a loss arrives
                    time.sleep(0.01)
        finally:
            ended.append("cleaned up")

    hold.send()
    assert running.wait(30)
    owner.execute("SELECT force_release('job', token) FROM holder('job')")
    with before_long(3), pytest.raises(dblock.LeaseLost):
        broker.join("default", fail_fast=True, timeout=20_000)
    assert ended == ["cleaned up"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lock": "report:{customre}"},
        {"lock": "report", "lock_on_busy": "never"},
        {"lock": "report", "lock_retry_in": 0},
        {"lock": 7},
        {"lock_ttl": 3},
    ],
)
def test_actor_with_wrong_options_is_not_declared(broker: StubBroker, wrong: dict[str, Any]) -> None:
    with pytest.raises(dblock.InvalidArgument, match="'build' is not declared"):

        @dramatiq.actor(broker=broker, **wrong)
        def build(customer: str) -> None: ...

    assert not broker.actors


def test_actor_called_without_a_message_runs_under_the_lock(broker: StubBroker, locks: LockMiddleware) -> None:
    @dramatiq.actor(broker=broker, lock="report:{customer}", lock_on_busy="skip")
    def build(customer: str) -> str:
        return dblock.current_lease().name

    assert build("ada") == "report:ada"
    with locks.client.lock("report:ada"):
        assert build("ada") is None


def test_actor_called_without_a_message_is_not_sent_again(broker: StubBroker, locks: LockMiddleware) -> None:
    @dramatiq.actor(broker=broker, lock="report:{customer}")
    def build(customer: str) -> str:
        return dblock.current_lease().name

    assert build("ada") == "report:ada"
    with locks.client.lock("report:ada"), pytest.raises(dblock.LockTimeout, match="report:ada"):
        build("ada")


def test_actor_called_by_another_actor_leaves_the_message_of_that_actor_alone(
    broker: StubBroker, locks: LockMiddleware
) -> None:
    seen: list[object] = []

    @dramatiq.actor(broker=broker, lock="report:{customer}", lock_on_busy="skip")
    def build(customer: str) -> str:
        return dblock.current_lease().name

    @dramatiq.actor(broker=broker)
    def build_all() -> None:
        seen.append(build("ada"))
        seen.append(build("grace"))

    with locks.client.lock("report:ada"):
        build_all.send()
        broker.join("default", timeout=20_000)
    assert seen == [None, "report:grace"]
