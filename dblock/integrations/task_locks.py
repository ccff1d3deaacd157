"""Tasks of a task queue that run under a lock: what the modules of Celery and Dramatiq share.

Guarantee: while a worker runs a task, it holds the lock whose name the task's arguments give. The lease is renewed
until the task ends, so it does not expire early. If the worker dies, the lock is free soon after, so it does not stick.
A task whose lease is lost is interrupted (`dblock.integrations.interruption`), and fails with LeaseLost.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dblock._core.slots import SKIPPED
from dblock.client import Client
from dblock.decorators import current_lease
from dblock.errors import InvalidArgument
from dblock.integrations.interruption import interrupted_by_loss

if TYPE_CHECKING:
    from dblock._core.options import Seconds

ON_BUSY = ("retry", "skip", "wait", "raise")

logger = logging.getLogger("dblock")


class TaskLocks:
    """Let tasks run under locks, with one client for each process.

    `where` is a Client, or what a Client accepts. The client opens no connection before the first task. A child of a
    fork opens connections of its own.
    """

    def __init__(self, where: Any = None, **options: Any) -> None:
        self.client = where if isinstance(where, Client) and not options else Client(where, **options)

    def wrap(
        self,
        function: Callable[..., Any],
        template: str,
        *,
        on_busy: str,
        retry_in: float,
        timeout: Seconds | None,
        options: dict[str, Any],
        meta: Callable[[], Any] | None = None,
    ) -> Callable[..., Any]:
        """Return a function that runs this one under its lock. Check the placeholders of the template at once.

        `meta` makes the meta of the lock for each task of a queue.
        """
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

        def under_lock(how: Any, **more: Any) -> Any:
            return self.client.locked(template, on_busy=how, timeout=timeout, **options, **more)(interruptible)

        in_queue = "skip" if on_busy == "retry" else on_busy
        locked = under_lock(in_queue)
        without_queue = under_lock("raise") if on_busy == "retry" else locked

        @functools.wraps(function)
        def run(*args: Any, **given: Any) -> Any:
            is_queued = self.is_queued(run)
            if is_queued and meta is not None:
                result = under_lock(in_queue, meta=meta())(*args, **given)
            else:
                result = (locked if is_queued else without_queue)(*args, **given)
            if result is not SKIPPED:
                return result
            if on_busy == "retry":
                self.requeue(retry_in)
            logger.info("A task is skipped, because its lock %r is busy.", template)
            return self.skip() if is_queued else None

        return run

    def is_queued(self, function: Callable[..., Any]) -> bool:
        """Return whether a worker runs the function for a task of the queue. Only such a task can be sent again."""
        raise NotImplementedError

    def requeue(self, seconds: float) -> None:
        """Send the current task again, to run after this time, and end this run of it by an exception."""
        raise NotImplementedError

    def skip(self) -> Any:
        """End the current task without running it."""
        return None
