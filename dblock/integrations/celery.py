"""Celery: tasks that run under a lock.

    locked = Locked(DSN)                 # or a Client; nothing is opened before a worker runs its first task

    @app.task
    @locked("report:{customer}")
    def build_report(customer): ...

Guarantee: while a worker runs the task, it holds the lock whose name the arguments give. See `task_locks` for what
happens to the lease. A task that is sent twice runs twice, one after the other. A unique task is not sent twice:

    @app.task(base=UniqueTask)
    @locked("report:{customer}", unique="until_start")
    def build_report(customer): ...

`on_busy` says what a worker does if the lock is not free:

- "retry" (the default) sends the task again, to run after `retry_in` seconds. That does not count as one of the task's
  `max_retries`. The worker is free for other tasks. A task that is called directly or eagerly raises LockTimeout.
- "skip" does not run the task, which succeeds with the result None: another worker is doing the work right now.
- "wait" keeps the worker waiting, at most `timeout` seconds, in the order of arrival. Then it raises LockTimeout.
- "raise" raises LockTimeout at once.

With `acks_late=True` and `task_reject_on_worker_lost`, a task whose worker died runs again. Its lock is free by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dblock.errors import ConfigurationError, InvalidArgument
from dblock.integrations.task_locks import TaskLocks

try:
    from celery import Task, current_task
    from celery.exceptions import Retry
    from celery.local import Proxy
except ImportError as error:
    raise ConfigurationError("dblock.integrations.celery needs Celery: pip install 'dblock[celery]'.") from error

from dblock.integrations.celery_unique import Uniqueness, UniqueTask

if TYPE_CHECKING:
    from dblock._core.options import Seconds

__all__ = ["Locked", "UniqueTask"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Locked(TaskLocks):
    """Decorate the functions of tasks. Put the decorator below `@app.task`."""

    def __call__(
        self,
        name: str,
        *,
        on_busy: str = "retry",
        retry_in: float = 5.0,
        timeout: Seconds | None = None,
        unique: str | None = None,
        queued_for: Seconds = 3600.0,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Return a decorator: the task runs under the lock whose name its arguments give, as in "report:{customer}".

        The other options are those of `Client.locked`. Inside of the task, `dblock.current_lease()` is its lease.

        A task with `unique` and the base UniqueTask is not sent while a message with the same lock is in the queue
        ("until_start"), or is in the queue or runs ("until_end"). If that message is lost, the task can be sent again
        after `queued_for` seconds, from a minute to a day.
        """
        if callable(name):
            raise InvalidArgument('The decorator needs the name of a lock. Write @locked("report:{customer}").')

        def decorate(function: Function) -> Function:
            if issubclass(type(function), (Task, Proxy)):
                raise InvalidArgument("This is a task already. Put @locked below @app.task, and not above it.")
            given: dict[str, Any] = {"on_busy": on_busy, "retry_in": retry_in, "timeout": timeout, "options": options}
            made: Any
            if unique is None:
                made = self.wrap(function, name, **given)
            else:
                made = Uniqueness(self, function, name, unique, queued_for).wrap(**given)
            return made  # type: ignore[no-any-return]

        return decorate

    def is_queued(self, function: Callable[..., Any]) -> bool:
        """Return whether a worker runs the task. A task that is called directly or eagerly cannot be sent again."""
        return bool(current_task) and not (current_task.request.called_directly or current_task.request.is_eager)

    def requeue(self, seconds: float) -> None:
        """Send the task again, with the retries that it has left, and record its state as RETRY."""
        request = current_task.request
        again = current_task.signature_from_request(request, countdown=seconds, retries=request.retries)
        again.apply_async()
        raise Retry("Its lock is busy.", when=seconds, sig=again)
