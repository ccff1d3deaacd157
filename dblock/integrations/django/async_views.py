"""Django: asynchronous views that run under a lock.

Guarantee: the view runs only while this process holds the lock. If the lease is lost, the view is cancelled at its next
`await`. If the request is cancelled, because the browser has gone, the lock is released.

The lease is one of the Client of this process, as for other views: a transaction of Django is synchronous too, and
proves it with `lease.assert_held(connection)`. An AsyncClient belongs to one event loop, and under WSGI each request
has a loop of its own. So the event loop waits for a thread that acquires the lock, and for one that releases it. Each
call has a thread of its own: in a pool, a release could wait behind the requests that wait for that lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dblock._runtime.owners import caller
from dblock.decorators import _running_under
from dblock.lease import _cancelling, _is_ours_alone

if TYPE_CHECKING:
    from dblock.errors import LeaseLost
    from dblock.lease import Lease
    from dblock.lock import Lock

T = TypeVar("T")


async def run_locked(lock: Lock[Lease], view: Callable[[], Awaitable[T]]) -> T:
    """Run the view under the lock."""
    lease = await _Acquiring(lock).wait()
    owner = caller()
    owner.add(lease._grant)  # the task of the request holds the lock, not the thread that has acquired it
    error: BaseException | None = None
    try:
        with _running_under(lease):
            return await _cancelled_by_loss(lease, view)
    except BaseException as raised:
        error = raised
        raise
    finally:
        owner.remove(lease._grant)
        await _in_thread(functools.partial(lease.__exit__, type(error) if error else None, error, None))


class _Acquiring:
    """A thread that acquires a lock. It releases the lock at once if the request has gone."""

    def __init__(self, lock: Lock[Lease]) -> None:
        self._lock = lock
        self._mutex = threading.Lock()
        self._has_left = False
        self._lease: Lease | None = None

    async def wait(self) -> Lease:
        try:
            return await _in_thread(self._acquire)
        except asyncio.CancelledError:
            with self._mutex:
                self._has_left = True
            if self._lease is not None:
                await _in_thread(self._lease.release)
            raise

    def _acquire(self) -> Lease:
        lease = self._lock.acquire()
        with self._mutex:
            self._lease = lease
        if self._has_left:
            lease.release()
        return lease


async def _cancelled_by_loss(lease: Lease, view: Callable[[], Awaitable[T]]) -> T:
    """Run the view, and cancel it when the lease is lost. Raise LeaseLost then."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    before = _cancelling(task)
    runs, was_cancelled = True, False

    def cancel() -> None:
        nonlocal was_cancelled
        if runs and not was_cancelled:
            was_cancelled = True
            task.cancel(f"the lease of lock {lease.name!r} was lost")

    def lost(_: LeaseLost) -> None:
        if runs:
            loop.call_soon_threadsafe(cancel)

    lease.on_lost(lost)
    error: BaseException | None = None
    try:
        result = await view()
    except BaseException as raised:
        error = raised
        raise
    finally:
        runs = False
        if was_cancelled:
            if await _is_ours_alone(task, error, before):
                if error is None or isinstance(error, asyncio.CancelledError):
                    lease.raise_if_lost()
            elif error is None:
                raise asyncio.CancelledError
    return result


async def _in_thread(function: Callable[[], T]) -> T:
    """Call the function in a thread of its own, which goes on if this task is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def call() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop of the request has been closed
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(call,), name="dblock-view", daemon=True).start()
    return await done
