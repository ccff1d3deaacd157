"""A call that is cancelled at any of its awaits leaves no connection open, and none to the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import psycopg
import pytest

from fenced_store import AsyncFencedStore
from tests.support.eventually import eventually_async

pytestmark = [pytest.mark.second_stage]


@types.coroutine
def cancelled_at(step: int, call: Coroutine[Any, Any, Any]) -> Generator[Any, Any, bool]:
    """Cancel the running task when the call suspends for the nth time. Return whether the call ended before."""
    task, steps, suspended = asyncio.current_task(), call.__await__(), 0
    assert task is not None
    try:
        waits_for = next(steps)
        while True:
            suspended += 1
            if suspended == step:
                task.cancel()
            try:
                reply = yield waits_for
            except BaseException as error:
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(reply)
    except StopIteration:
        return suspended < step


@pytest.fixture
def suspends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let psycopg suspend where it need not wait for the server, as some versions do now and then."""
    for name in ("set_autocommit", "set_isolation_level"):
        monkeypatch.setattr(psycopg.AsyncConnection, name, suspending(getattr(psycopg.AsyncConnection, name)))


def suspending(method: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def suspend_and_call(*args: Any) -> None:
        await asyncio.sleep(0)
        await method(*args)

    return suspend_and_call


@pytest.mark.usefixtures("suspends")
@pytest.mark.parametrize("call", ["put", "claim"])
async def test_cancelled_call_leaves_no_connection_open(dsn: str, owner: psycopg.Connection[Any], call: str) -> None:
    ended, step = False, 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        while not ended:
            step += 1
            store = AsyncFencedStore(f"{dsn} application_name=cancelled")
            calling = store.put("a", 1, fence=1) if call == "put" else store.claim("a", fence=1)
            with contextlib.suppress(asyncio.CancelledError):
                ended = await cancelled_at(step, calling)
            await store.close()
            await asyncio.sleep(0)
            del store, calling
            gc.collect()
        assert step > 3, "there was nothing to cancel"
        open_now = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cancelled'"
        await eventually_async(lambda: owner.execute(open_now).fetchone() == (0,), "the end of all sessions")
        gc.collect()
    assert [str(one.message) for one in seen] == []
