"""Tasks of a task queue that run under a lock: what the modules of Celery and Dramatiq share.

Guarantee: while a worker runs the task, it holds the lock whose name the arguments give. The lease is renewed while the
task runs, however long that takes, so it does not expire early. It ends with the task, and soon after its worker if
that dies, so it does not stick. A task whose lease is lost is interrupted, and fails with LeaseLost.

An interruption is an exception that Python raises in the task's thread at its next bytecode. A call into C that blocks
is interrupted when it returns. The exception is no Exception, so `except Exception` does not stop it. There is none in
workers with greenlets (gevent, eventlet), where all tasks share one thread: the task then fails at its end.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dblock._core.slots import SKIPPED
from dblock.client import Client
from dblock.decorators import current_lease
from dblock.errors import InvalidArgument, LeaseLost

if TYPE_CHECKING:
    from dblock._core.options import Seconds
    from dblock.lease import AsyncLease, Lease

ON_BUSY = ("retry", "skip", "wait", "raise")

logger = logging.getLogger("dblock")


class LeaseInterrupt(BaseException):
    """Raised in the thread of a task when its lease is lost. The task then fails with LeaseLost."""


class TaskLocks:
    """Make the functions of tasks run under locks, with one client for each process.

    The first argument is a Client, or what a Client accepts: nothing is opened before the first task. A child of a fork
    opens connections of its own.
    """

    def __init__(self, where: Any = None, **options: Any) -> None:
        self.client = where if isinstance(where, Client) and not options else Client(where, **options)

    def runs_locked(
        self,
        function: Callable[..., Any],
        template: str,
        *,
        on_busy: str,
        retry_in: float,
        timeout: Seconds | None,
        options: dict[str, Any],
    ) -> Callable[..., Any]:
        """Return the function that runs under the lock. Placeholders are checked against its parameters at once."""
        if on_busy not in ON_BUSY:
            raise InvalidArgument(f"on_busy is one of {', '.join(map(repr, ON_BUSY))}; got {on_busy!r:.80}.")
        if inspect.iscoroutinefunction(function):
            raise InvalidArgument("A task under a lock is a plain function, not a coroutine function.")
        if not retry_in > 0:
            raise InvalidArgument(f"retry_in is a number of seconds above 0; got {retry_in!r:.80}.")

        @functools.wraps(function)
        def interruptible(*args: Any, **given: Any) -> Any:
            with interrupted_by_loss(current_lease()):
                return function(*args, **given)

        def under_lock(how: Any) -> Any:
            return self.client.locked(template, on_busy=how, timeout=timeout, **options)(interruptible)

        locked = under_lock("skip" if on_busy == "retry" else on_busy)
        without_queue = under_lock("raise") if on_busy == "retry" else locked

        @functools.wraps(function)
        def run(*args: Any, **given: Any) -> Any:
            is_queued = self.is_queued(run)
            result = (locked if is_queued else without_queue)(*args, **given)
            if result is not SKIPPED:
                return result
            if on_busy == "retry":
                self.requeue(retry_in)
            logger.info("A task is skipped, because its lock %r is busy.", template)
            return self.skip() if is_queued else None

        return run

    def is_queued(self, function: Callable[..., Any]) -> bool:
        """Return whether the function runs for a task of a queue, which can be sent again."""
        raise NotImplementedError

    def requeue(self, seconds: float) -> None:
        """Let the current task run again after this time, and leave it."""
        raise NotImplementedError

    def skip(self) -> Any:
        """End the current task without running it."""
        return None


@contextmanager
def interrupted_by_loss(lease: Lease | AsyncLease) -> Iterator[None]:
    """Interrupt the body, in this thread, when the lease is lost."""
    thread = threading.get_ident()
    mutex = threading.Lock()
    state = {"runs": True, "sent": False}

    def interrupt(_: LeaseLost) -> None:
        with mutex:
            if state["runs"]:
                state["sent"] = True
                _raise_in(thread, LeaseInterrupt)

    if not _has_greenlets():
        lease.on_lost(interrupt)
    try:
        try:
            yield
        finally:
            with mutex:
                state["runs"] = False
            if state["sent"]:
                # It may not have arrived yet. It arrives here, or was raised in the body.
                _raise_in(thread, None)
    except LeaseInterrupt:
        lease.raise_if_lost()
        raise


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    argument = ctypes.py_object() if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


def _has_greenlets() -> bool:
    """Return whether gevent or eventlet has replaced threads by greenlets, or this is not CPython."""
    module = getattr(threading.get_ident, "__module__", "") or ""
    return sys.implementation.name != "cpython" or module.split(".")[0] in ("gevent", "eventlet")
