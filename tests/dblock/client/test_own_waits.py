"""A caller that waits for a lock which it holds itself."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

import dblock
from tests.support.facade import Clients

pytestmark = pytest.mark.usefixtures("patient")


async def test_wait_for_an_own_lock_is_logged_at_once(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    client = clients()
    lease = await client.lock("a").acquire()
    with pytest.raises(dblock.LockTimeout, match=f"this client itself holds it, under token {lease.token}") as caught:
        await client.lock("a").acquire(timeout=0.1)
    assert caught.value.own_token == lease.token
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert [message for message in caplog.messages if "already holds lock 'a'" in message]
    assert await lease.release()


def test_nested_with_is_logged_before_it_waits(client: dblock.Client, caplog: pytest.LogCaptureFixture) -> None:
    lock = client.lock("a", timeout=0.1)
    with lock, pytest.raises(dblock.LockTimeout, match="this client itself"), lock:
        pass
    assert len([message for message in caplog.messages if "already holds lock 'a'" in message]) == 1


def test_wait_for_another_thread_is_no_mistake(client: dblock.Client, caplog: pytest.LogCaptureFixture) -> None:
    lease = client.lock("a").acquire()
    found: list[str] = []

    def wait() -> None:
        with pytest.raises(dblock.LockTimeout) as caught:
            client.lock("a").acquire(timeout=0.1)
        found.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert "this client itself holds it" in found[0]
    assert "Release that lease first" in found[0]
    assert not caplog.messages
    lease.release()


async def test_wait_for_another_client_says_nothing_of_this_one(clients: Clients) -> None:
    lease = await clients().lock("a").acquire()
    other = clients()
    await (await other.lock("b").acquire()).release()
    with pytest.raises(dblock.LockTimeout) as caught:
        await other.lock("a").acquire(timeout=0.1)
    assert caught.value.own_token is None
    assert "itself" not in str(caught.value)
    await lease.release()
    await asyncio.sleep(0)


def test_lock_that_was_released_is_not_held(client: dblock.Client, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        client.lock("a").acquire().release()
    assert not caplog.messages
