"""Celery: tasks that are not sent while the same task is queued or runs.

Guarantee: while a confirmed mark says that a message is in the queue (`dblock.integrations.sent_tasks`), UniqueTask
sends no other message with the same lock. The worker that begins the task removes the mark of its message.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery import Task, current_task, signals
from celery.exceptions import Retry
from celery.utils import uuid

from dblock._core.options import check_seconds
from dblock.decorators import DecoratorSettings
from dblock.errors import ConfigurationError, DatabaseError, InvalidArgument
from dblock.integrations.sent_tasks import Mark, SentTasks
from dblock.integrations.task_locks import TaskLocks

if TYPE_CHECKING:
    from dblock._core.options import Seconds

UNIQUE = ("until_start", "until_end")

_HEADER = "dblock_mark"
"""The header of a message with its mark."""

_waiting: ContextVar[Mark | None] = ContextVar("dblock_celery_mark", default=None)
"""The mark of the message whose task is waiting for its lock."""

logger = logging.getLogger("dblock")


class UniqueTask(Task):  # type: ignore[misc]
    """The base of unique tasks: `@app.task(base=UniqueTask)`, above `@locked(…, unique=…)`."""

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any) -> Any:
        """Send the task, or return the result of the one that is queued, or runs, under the same lock."""
        send = super().apply_async
        run = getattr(self, "_orig_run", self.run)  # a task with autoretry_for has another around it
        unique: Uniqueness | None = getattr(run, "dblock_unique", None)
        if unique is None:
            raise ConfigurationError(f"The task {self.name!r} has the base UniqueTask, and no `@locked(…, unique=…)`.")
        if self.app.conf.task_always_eager or any(options.get(name) for name in _PART_OF_MORE):
            return send(args, kwargs, task_id, **options)
        name = unique.lock_of(*([self] if inspect.ismethod(run) else []), *(args or ()), **(kwargs or {}))
        task_id = task_id or uuid()

        def send_with(mark: Mark | None) -> Any:
            headers = {key: value for key, value in (options.get("headers") or {}).items() if key != _HEADER}
            marked = headers | ({_HEADER: [*mark]} if mark else {})
            return send(args, kwargs, task_id, **{**options, "headers": marked})

        is_retry = bool(current_task) and current_task.request.id == task_id
        continued = _mark_in(options.get("headers")) if is_retry else None
        sent = unique.send(name, task_id, send_with, _delay(options), always=is_retry, mark=continued)
        return self.AsyncResult(sent) if isinstance(sent, str) else sent


_PART_OF_MORE = ("link", "link_error", "chain", "chord", "group_id")
"""Options that let something follow the task. Another task cannot take its place, because nothing follows that one."""


class Uniqueness:
    """What makes one task unique: from when a message is sent until its task begins or ends."""

    def __init__(
        self, locks: TaskLocks, function: Callable[..., Any], template: str, until: str, queued_for: Seconds
    ) -> None:
        if until not in UNIQUE:
            raise InvalidArgument(f"unique is one of {', '.join(map(repr, UNIQUE))}; got {until!r:.80}.")
        self._seconds = check_seconds(f"queued_for of {template!r:.80}", queued_for)
        if not 60 <= self._seconds <= 86_400:
            raise InvalidArgument(f"queued_for is a minute to a day; got {queued_for!r:.80}.")
        self._locks = locks
        self._function = function
        self._template = template
        self._until = until
        self._sent = SentTasks(locks.client)
        settings = DecoratorSettings(template, "raise", None, (), ttl=30.0, meta=None)
        self._options_of = settings.names_for(function)
        signals.task_revoked.connect(self._revoked, weak=False)

    def lock_of(self, *args: Any, **given: Any) -> str:
        """Return the name of the lock for the arguments of a task."""
        return self._options_of(*args, **given).name

    def send(
        self,
        name: str,
        task: str,
        send_with: Callable[[Mark | None], Any],
        delay: float,
        *,
        always: bool,
        mark: Mark | None,
    ) -> Any:
        """Send the task and return what that returns, or return the id of the task that is queued or runs.

        A task that is sent again by its own worker is sent `always`, and with the `mark` that it has, if any.
        """
        if mark is None or not self._sent.confirm(mark, self._seconds + delay):
            mark = self._sent.place(name, task)
        while mark is None:
            if queued := self._sent.queued_task(name):
                return send_with(None) if always else queued
            mark = self._sent.place(name, task)
        try:
            # In this order: a worker holds the task's lock before it removes the mark.
            if self._until == "until_end" and not always and (running := self._sent.running_task(name)):
                self._sent.remove(mark)
                return running
            result = send_with(mark)
        except BaseException:
            self._give_up(mark)
            raise
        try:
            self._sent.confirm(mark, self._seconds + delay)
        except DatabaseError as error:
            # The message is in the queue. If its mark expires, a newer message takes its place.
            logger.warning("The mark %r of a task that was sent expires soon: %s", mark.name, error)
        return result

    def wrap(self, **given: Any) -> Callable[..., Any]:
        """Return the function that a worker runs. It removes the mark of its message when it has the lock."""
        function = self._function
        if "meta" in given["options"]:
            raise InvalidArgument("The lock of a unique task has the task's id as its meta. Leave out meta.")

        @functools.wraps(function)
        def run_without_mark(*args: Any, **more: Any) -> Any:
            mark = _waiting.get()
            removed = mark is None or self._sent.remove(mark)
            _waiting.set(None)
            if mark is not None and not removed and self._sent.is_superseded(mark):
                raise _Superseded
            return function(*args, **more)

        made = self._locks.wrap(
            run_without_mark, self._template, meta=lambda: {"task": current_task.request.id}, **given
        )

        @functools.wraps(function)
        def run(*args: Any, **more: Any) -> Any:
            if not self._locks.is_queued(run):
                return made(*args, **more)
            if not isinstance(current_task._get_current_object(), UniqueTask):
                raise ConfigurationError("A unique task needs the base UniqueTask: @app.task(base=UniqueTask).")
            before = _waiting.set(_mark_in(current_task.request.headers))
            try:
                return made(*args, **more)
            except _Superseded:
                logger.info("A task is skipped, because a newer message has taken its place (lock %r).", self._template)
                return None
            except Retry:
                # A task that is sent again because its lock is busy keeps its mark.
                _waiting.set(None)
                raise
            finally:
                mark = _waiting.get()
                _waiting.reset(before)
                if mark is not None:
                    self._give_up(mark)

        run.dblock_unique = self  # type: ignore[attr-defined]
        return run

    def _give_up(self, mark: Mark) -> None:
        """Remove a mark, and raise nothing. If the database is away, the mark stays until it expires."""
        try:
            self._sent.remove(mark)
        except DatabaseError as error:
            logger.warning("The mark %r of a task that is not queued stays until it expires: %s", mark.name, error)

    def _revoked(self, sender: Any = None, request: Any = None, **_: Any) -> None:
        """Remove the mark of a message that the worker has discarded: it was revoked, or has expired."""
        run = getattr(sender, "_orig_run", getattr(sender, "run", None))
        mark = _mark_in(getattr(request, "headers", None))
        if mark is not None and getattr(run, "dblock_unique", None) is self:
            self._sent.remove(mark)


class _Superseded(Exception):
    """A newer message of the same lock is in the queue."""


def _mark_in(headers: dict[str, Any] | None) -> Mark | None:
    """Return the mark of a message, None if it has none."""
    found = (headers or {}).get(_HEADER)
    return Mark(str(found[0]), int(found[1])) if found else None


def _delay(options: dict[str, Any]) -> float:
    """Return how many seconds a message stays in the queue at least."""
    eta = options.get("eta")
    if isinstance(eta, str):
        eta = datetime.fromisoformat(eta)
    if isinstance(eta, datetime):
        now = datetime.now(eta.tzinfo) if eta.tzinfo else datetime.now(timezone.utc).replace(tzinfo=None)
        return max((eta - now).total_seconds(), 0.0)
    return max(float(options.get("countdown") or 0), 0.0)
