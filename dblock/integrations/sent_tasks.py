"""Marks of tasks that are in a queue. A mark says that a message was sent, and that no worker has begun its task.

A mark is a grant of the lock `queued:` and the name of the task's lock, with the id of the task as its meta. The lease
of the sender cannot say that, because the sender ends and the message stays. So a mark has no presence, and no process
renews it. These rules make up for that:

- A mark is placed for a moment, and confirmed when the broker has the message. So a sender that fails or dies in
  between blocks the next one for `SENDING` seconds at most, and other senders rely on a confirmed mark only.
- The message carries the token of its mark, and the worker removes that exact mark once it holds the task's lock.
- A message that is lost leaves its mark until the mark expires. If the mark expires while the message is still in the
  queue, the next sender places a mark with a higher token. The worker then leaves the older message to the newer one.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Flow
from dblock._core.options import TTL_MAX, interval, lock_options
from dblock.errors import LockTimeout

if TYPE_CHECKING:
    from dblock.client import Client

SENDING = 10.0
"""Seconds after which a mark that was not confirmed expires."""

_POLL_INTERVAL = 0.02
"""Seconds between two questions to the database."""

_CONFIRM_TRIES = 50
"""How often to confirm a mark whose row another transaction has locked."""


class Mark(NamedTuple):
    """One mark: the lock that it is a grant of, and the token of the grant."""

    name: str
    token: int


class SentTasks:
    """The marks of the tasks that are in the queues of one application."""

    def __init__(self, client: Client) -> None:
        self._runtime: Any = client._runtime
        flows = self._runtime.flows
        # Not the flows of the client: its grants end with this process.
        self._flows = LockFlows(self._runtime.schema, flows.holder_name, timings=flows.timings)

    def place(self, name: str, task: str) -> Mark | None:
        """Mark the task with this lock as being sent. Return None if a message with that lock is in the queue."""
        options = lock_options(f"queued:{name}", SENDING, 0, {"task": task})
        grant = self._runtime.run(self._flows.try_acquire(options, self._flows.new_name()))
        return None if grant is None else Mark(grant.name, grant.token)

    def confirm(self, mark: Mark, seconds: float) -> bool:
        """Keep the mark for this time, because the message is in the queue. Return False if the mark is gone."""
        missed = {0: "busy"}
        for _ in range(_CONFIRM_TRIES):
            missed = self._runtime.run(self._flows.renew([(*mark, min(seconds, TTL_MAX))])).missed
            if missed != {0: "busy"}:
                break
            time.sleep(_POLL_INTERVAL)
        return not missed

    def remove(self, mark: Mark) -> bool:
        """Remove this exact mark, and return whether it was still there."""
        removed: bool = self._runtime.run(self._flows.release(*mark, math.inf))
        return removed

    def is_superseded(self, mark: Mark) -> bool:
        """Return whether a newer message has a mark in its place."""
        found = self._runtime.run(self._flows.holder(mark.name))
        return found is not None and found.token > mark.token

    def queued_task(self, name: str) -> str | None:
        """Return the task whose message with this lock is in the queue. Wait while a message is being sent."""
        give_up = time.monotonic() + 2 * SENDING
        while found := self._runtime.run(self._flows.holder(f"queued:{name}")):
            if found.expires_at - found.granted_at > timedelta(seconds=SENDING + 1):
                return str(found.meta["task"])
            if time.monotonic() > give_up:
                raise LockTimeout(f"queued:{name}", 2 * SENDING)
            time.sleep(_POLL_INTERVAL)
        return None

    def running_task(self, name: str) -> str | None:
        """Return the task that runs under this lock, None if no task does or its worker has died."""
        while found := self._runtime.run(self._flows.holder(name)):
            if not isinstance(found.meta, dict) or "task" not in found.meta:
                return None
            asked_at = time.monotonic()
            held_for = self._runtime.run(self._probe(name))
            # If the worker's session has ended, the database replies with the rest of its grace, which is shorter.
            left = found.remaining - (time.monotonic() - asked_at)
            if held_for is not None and held_for > left - 0.05:
                return str(found.meta["task"])
            time.sleep(min(held_for or _POLL_INTERVAL, SENDING))
        return None

    def _probe(self, name: str) -> Flow[float | None]:
        """Return for how long a holder has the lock; None if it is free. The call frees the lock of a dead holder."""
        attempt = self._flows.new_name()
        args = (name, interval(1), self._flows.holder_name(), None, attempt, "f", None, "t", None)
        granted, token, _, remaining, *_ = yield Call(
            self._flows.statements.try_acquire, args, self._flows.statements.try_acquire_again
        )
        if granted == "t":
            yield from self._flows.release(name, int(token), math.inf)
            return None
        return float(remaining)
