"""Log records about a lock carry its name, token, holder and reason as fields."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock
from tests.support.eventually import eventually

FIELDS = ("lock", "token", "holder", "reason")


def records(caplog: pytest.LogCaptureFixture, words: str) -> list[tuple[Any, ...]]:
    """Return the fields of the records whose message has these words."""
    return [
        tuple(getattr(record, field) for field in FIELDS)
        for record in caplog.records
        if record.name == "dblock" and words in record.getMessage()
    ]


@pytest.fixture
def debug(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "dblock")
    return caplog


def test_grant_and_release_carry_the_lock_and_the_token(dsn: str, debug: pytest.LogCaptureFixture) -> None:
    with dblock.Client(dsn, holder="me") as client:
        with client.lock("order:1") as lease:
            token = lease.token
        with client.lock_all(["b"]) as held:
            other = held["b"].token
        with client.read_lock("rw") as read:
            third = read.token
    assert records(debug, "granted") == [
        ("order:1", token, "me", None),
        ("b", other, "me", None),
        ("rw", third, "me", None),
    ]
    assert records(debug, "released") == [
        (lock, number, None, None) for lock, number, _, _ in records(debug, "granted")
    ]


@pytest.mark.second_stage
def test_loss_carries_its_reason(client: dblock.Client, owner: psycopg.Connection, debug: Any) -> None:
    lease = client.lock("a", ttl=0.1, keep_alive=False).acquire()
    owner.execute("SELECT pg_sleep(0.11)")
    assert lease.remaining() == 0
    assert records(debug, "lost") == [("a", lease.token, None, "expired")]


def test_timeout_carries_the_holder(dsn: str, debug: pytest.LogCaptureFixture) -> None:
    with dblock.Client(dsn, holder="me") as client, client.lock("a"):
        with pytest.raises(dblock.LockTimeout):
            client.lock("a").acquire(timeout=0.05)
        with pytest.raises(dblock.LockTimeout):
            client.lock_any(["a"]).acquire(timeout=0.05)
    assert records(debug, "not acquired") == [("a", None, "me", "timeout")] * 2
    (warned, *_) = records(debug, "already holds")
    assert (warned[0], warned[2]) == ("a", "me")
    assert warned[1] is not None


def test_queue_carries_the_holder(dsn: str, client: dblock.Client, debug: pytest.LogCaptureFixture) -> None:
    with dblock.Client(dsn, holder="me") as waiter, ThreadPoolExecutor(1) as thread:
        with client.lock("a"):
            waiting = thread.submit(waiter.lock("a").acquire)
            eventually(lambda: records(debug, "queued"), "the waiter is queued")
        waiting.result(60).release()
    assert records(debug, "queued")[0] == ("a", None, "me", None)


def test_efficiency_lock_has_no_token_in_its_records(client: dblock.Client, debug: Any) -> None:
    with client.efficiency_lock("a"):
        pass
    assert [fields[:2] for fields in records(debug, "granted")] == [("a", None)]


def test_fields_can_be_written_as_json(client: dblock.Client, debug: pytest.LogCaptureFixture) -> None:
    with client.lock("a"):
        pass
    for fields in records(debug, "granted"):
        assert json.loads(json.dumps(dict(zip(FIELDS, fields, strict=True))))["lock"] == "a"
