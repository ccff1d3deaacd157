"""The keep-alive: renews all leases of a client together, in one statement, three times in each lease's time.

It has a thread (or task) and a connection of its own, so that neither a busy pool nor a blocked caller can starve it.
What fails is tried again for as long as the leases can still be believed; then they are lost, by the clock alone.

It never renews what was released, nor what belongs to the parent of a fork: both are struck off the list, and the
database would refuse them anyway, since a renewal names an exact grant.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable

from dblock import clock
from dblock.calls import GIVE_UP_WITHIN, Steps
from dblock.errors import ClientClosed, DatabaseError, DblockError
from dblock.events import wait_and_clear
from dblock.forks import mind_forks
from dblock.hold import Hold
from dblock.presence import Presence
from dblock.runner import AsyncRunner, Runner
from dblock.steps import TRUST, Service

logger = logging.getLogger("dblock")

ROUNDS = 3
"""How often a lease is renewed in its time."""

AGAIN = 3
"""How many answers it takes to ask again, at the least: that takes a new connection."""

LEAST_TIME = 0.1
"""Seconds that an answer is given however little time is left."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds before a renewal that failed is tried again: a twentieth of the ttl, within these bounds."""


class Rounds:
    """Which leases are to be renewed and when, and the steps of renewing them. Waits for nothing."""

    def __init__(self, service: Service, now: Callable[[], float] = clock.now) -> None:
        self._service = service
        self._now = now
        self._holds: dict[Hold, None] = {}
        self._reached = False
        self._took = 0.0
        """How long the last answer took."""
        self._too_slow = 0.0
        """How long the last answer was waited for in vain."""
        self._tie_now = False
        """Whether there is a new presence to tie the leases to."""

    def add(self, hold: Hold) -> None:
        hold.unreachable = hold.keep_alive and not self._reached
        self._holds[hold] = None

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._tie_now = True

    def tied_to(self, presence: Presence) -> list[Hold]:
        """Return what is tied to this presence, and not known to be lost."""
        return [hold for hold in list(self._holds) if hold.presence is presence and not hold.over and not hold.loss]

    def reached(self) -> None:
        """Take note that the database can be reached: what is lost now ran out for another reason."""
        self._reached = True
        for hold in list(self._holds):
            hold.unreachable = False

    def discard(self, hold: Hold) -> None:
        self._holds.pop(hold, None)

    def releasable(self, abandoned: list[Hold]) -> list[Hold]:
        """Return those that may still be held in the database."""
        now = self._now()
        return [
            hold
            for hold in abandoned
            if not hold.given_back
            # Of those that are lost some may well be ours still; nobody else need wait for their end.
            and (hold.loss is None or hold.given_up)
            and now < hold.trusted_until
        ]

    def release(self, abandoned: Iterable[Hold]) -> Steps[None]:
        """Release what nobody has in hand any more; what could not be released yet can be tried again."""
        held = list(abandoned)
        for hold in held:
            self.discard(hold)
            hold.finish()
        if not held:
            return
        try:
            busy = yield from self._give_back([(hold.name, hold.token) for hold in held])
        except ClientClosed:
            raise
        except DblockError as error:
            logger.warning("%d leases could not be released: %s", len(held), error)
            return
        for place, hold in enumerate(held):
            hold.given_back = place not in busy

    def _give_back(self, grants: list[tuple[str, int]]) -> Steps[set[int]]:
        # Not for longer than until the next round is due: what is held comes before what is not.
        within = max(min(self.due_at() - self._now(), GIVE_UP_WITHIN), LEAST_TIME)
        return (yield from self._service.release_all(grants, within))

    def held(self) -> list[Hold]:
        """Return what is held at this moment."""
        return [hold for hold in list(self._holds) if not hold.over and hold.ours and not hold.run_out()]

    def forget(self) -> None:
        """Strike everything off the list."""
        self._holds = {}
        self._reached = False

    def due_at(self) -> float:
        """Return when the next round is due; never, if there is nothing to renew."""
        if self._tie_now:
            return -math.inf
        return min((due_at(hold) for hold in list(self._holds)), default=math.inf)

    def round(self) -> Steps[None]:
        """Renew what is due, and with it all that would be due half a round later, so that they come to go together."""
        now = self._now()
        tie_now, self._tie_now = self._tie_now, False
        presence = self._service.presence
        tie = presence if presence is not None and presence.stands(now) else None
        if any(hold.presence not in (None, tie) and not hold.presence.ended for hold in list(self._holds)):
            tie = None  # one tie after the other, or nobody could say which of them counts
        chosen = [
            hold
            for hold in list(self._holds)
            if hold.keep_alive
            and (
                (tie_now and hold.presence is not tie)
                or max(hold.sent_at + hold.ttl / ROUNDS / 2, hold.retry_at) <= now
            )
        ]
        for hold in chosen:
            if hold.over or not hold.ours or hold.run_out():
                self.discard(hold)
        # Each with the ttl that it has now, which a renewal by hand may change meanwhile.
        asked = [(hold, hold.ttl) for hold in chosen if hold in self._holds]
        if not asked:
            return
        if self._too_slow:
            # The database takes longer than those with least time left can wait. Let them not take the rest along.
            patient = [(hold, ttl) for hold, ttl in asked if hold.trusted_until - now > 2.5 * self._too_slow]
            asked = patient or asked
        for hold, _ in asked:
            hold.unreachable = True  # until the answer has come
            if tie is not None and (hold.presence is None or hold.presence.ended):
                hold.presence = tie  # from before it may be so, and for good
        # Half of the time that is left, so that there is time for another try; or all of it, if there is not anyway.
        left = min(hold.trusted_until for hold, _ in asked) - now
        within = max(left / 2 if self._took * AGAIN < left / 2 else left, LEAST_TIME)
        try:
            answer = yield from self._service.renew([(hold.name, hold.token, ttl) for hold, ttl in asked], within, tie)
        except DblockError as error:
            for hold, ttl in asked:
                self._try_again(hold, ttl)
            self._reached = False
            self._too_slow = within
            if isinstance(error, ClientClosed):
                raise
            many = "lease" if len(asked) == 1 else "leases"
            logger.warning("%d %s could not be renewed, trying again: %s", len(asked), many, error)
            return
        self._reached = True
        self._took = self._now() - now
        self._too_slow = 0.0
        late = []
        for place, (hold, ttl) in enumerate(asked):
            why = answer.missed.get(place)
            if why is not None:
                self._miss(hold, ttl, why)
                continue
            if not hold.confirm(answer.sent_at, answer.sent_at + ttl * TRUST, answer.moment + ttl):
                if not hold.over:
                    late.append((hold.name, hold.token))
                self.discard(hold)
        if late:
            # Their holders know by now that they are lost; nobody need wait for another ttl, if it can be helped.
            with contextlib.suppress(DatabaseError):
                yield from self._give_back(late)

    def _miss(self, hold: Hold, ttl: float, why: str) -> None:
        hold.unreachable = False
        if why == "busy" or hold.being_left:
            self._try_again(hold, ttl)
            return
        self.discard(hold)
        hold.miss(why)

    def _try_again(self, hold: Hold, ttl: float) -> None:
        hold.retry_at = self._now() + min(max(ttl / 20, SHORTEST_PAUSE), LONGEST_PAUSE)


def due_at(hold: Hold) -> float:
    """Return when a lease is to be renewed next; never, if it is not kept alive or over."""
    if not hold.keep_alive or hold.over:
        return math.inf
    return max(hold.sent_at + hold.ttl / ROUNDS, hold.retry_at)


class _KeepAliveBase:
    """What both kinds of keep-alive know: what is held, what was abandoned, and when there is something to do."""

    def __init__(self, service: Service) -> None:
        self._rounds = Rounds(service)
        self.start_anew()
        mind_forks(self)

    def start_anew(self) -> None:
        """In the child of a fork nothing goes round, and there is no lease of ours."""
        self._rounds.forget()
        self._abandoned: list[Hold] = []
        self._in_use = False
        self._asleep_until = math.inf
        self._closed = False

    def tied_to(self, presence: Presence) -> list[Hold]:
        """Return what is tied to this presence, and not known to be lost."""
        return self._rounds.tied_to(presence)

    def discard(self, hold: Hold) -> None:
        """Renew it no more."""
        self._rounds.discard(hold)

    def letting_go(self) -> Steps[None]:
        """Release all that is still held, and what was abandoned."""
        return self._rounds.release([*self._rounds.held(), *self._rounds.releasable(self._abandoned)])

    def _seconds_to_sleep(self) -> float | None:
        """Return how long there is nothing to do; None for ever.

        A client that takes and frees locks in quick succession would wake us each time, only for us to find nothing to
        do. So while it is in use we look in once a second, and it wakes us for what is due sooner.
        """
        self._asleep_until = math.inf  # whoever adds a lease while we look for the next one due wakes us
        in_use, self._in_use = self._in_use, False
        due = min(self._rounds.due_at(), clock.now() + LONGEST_PAUSE if self._abandoned or in_use else math.inf)
        self._asleep_until = due
        return None if due == math.inf else min(max(due - clock.now(), 0.0), threading.TIMEOUT_MAX)


class KeepAlive(_KeepAliveBase):
    """Goes round in a thread of its own, from the first lease on."""

    def __init__(self, runner: Runner, service: Service) -> None:
        self._runner = runner
        super().__init__(service)

    def start_anew(self) -> None:
        super().start_anew()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # May be put to from a finalizer, which may run in the middle of anything.
        self._wake: queue.SimpleQueue[Hold | None] = queue.SimpleQueue()

    def add(self, hold: Hold) -> None:
        """Keep this lease alive from now on."""
        self._rounds.add(hold)
        self._in_use = True
        if self._thread is None:
            self._start()
        elif due_at(hold) < self._asleep_until:
            self._wake.put(None)

    def abandon(self, hold: Hold) -> None:
        """Release what nobody has in hand any more. Can be called from a finalizer."""
        self._wake.put(hold)

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._rounds.tie()
        self._wake.put(None)

    def letting_go(self) -> Steps[None]:
        self._collect(block=False)
        self._wake.put(None)  # what was meant for the thread may have been among it
        return super().letting_go()

    def close(self) -> None:
        """Stop going round."""
        self._closed = True
        self._wake.put(None)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._go, name="dblock keep-alive", daemon=True)
                self._thread.start()

    def _go(self) -> None:
        with contextlib.suppress(DblockError):
            # Now, so that the first round does not begin with the opening of a connection.
            self._runner.warm()
            self._rounds.reached()
        while True:
            try:
                self._collect(block=True)
                if self._closed:
                    return
                self._abandoned = self._rounds.releasable(self._abandoned)
                self._runner.run(self._rounds.release(self._abandoned))
                self._abandoned = self._rounds.releasable(self._abandoned)
                self._runner.run(self._rounds.round())
            except ClientClosed:
                return
            except Exception:
                logger.exception("the keep-alive met what it did not expect, and goes on")
                threading.Event().wait(SHORTEST_PAUSE)

    def _collect(self, *, block: bool) -> None:
        """Collect what was abandoned; wait until there is something to do, if so wanted."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._wake.get(block, self._seconds_to_sleep() if block else None)
                block = False
                if item is not None:
                    self._rounds.discard(item)
                    self._abandoned.append(item)


class AsyncKeepAlive(_KeepAliveBase):
    """Goes round in a task of its own, from the first lease on."""

    def __init__(self, runner: AsyncRunner, service: Service) -> None:
        self._runner = runner
        super().__init__(service)

    def start_anew(self) -> None:
        super().start_anew()
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dropped: deque[Hold] = deque()

    def add(self, hold: Hold) -> None:
        """Keep this lease alive from now on."""
        self._rounds.add(hold)
        self._in_use = True
        if self._task is None or self._task.done():
            self._loop = asyncio.get_running_loop()
            self._wake = asyncio.Event()
            self._task = self._loop.create_task(self._go(self._wake), name="dblock keep-alive")
        elif self._wake is not None and due_at(hold) < self._asleep_until:
            self._wake.set()

    def abandon(self, hold: Hold) -> None:
        """Release what nobody has in hand any more. Can be called from a finalizer, in any thread."""
        self._dropped.append(hold)
        if self._loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake.set)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """What runs for it in the event loop."""
        return {self._task} if self._task is not None else set()

    def close(self) -> None:
        """Stop going round."""
        self._closed = True
        if self._task is not None and self._loop is not None and not self._loop.is_closed():
            self._task.cancel()

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._rounds.tie()
        if self._wake is not None:
            self._wake.set()

    def letting_go(self) -> Steps[None]:
        self._collect()
        return super().letting_go()

    def _collect(self) -> None:
        while self._dropped:
            hold = self._dropped.popleft()
            self._rounds.discard(hold)
            self._abandoned.append(hold)
        self._abandoned = self._rounds.releasable(self._abandoned)

    async def _go(self, wake: asyncio.Event) -> None:
        with contextlib.suppress(DblockError):
            # Now, so that the first round does not begin with the opening of a connection.
            await self._runner.warm()
            self._rounds.reached()
        while not self._closed:
            try:
                await wait_and_clear(wake, self._seconds_to_sleep())
                self._collect()
                await self._runner.run(self._rounds.release(self._abandoned))
                self._abandoned = self._rounds.releasable(self._abandoned)
                await self._runner.run(self._rounds.round())
            except ClientClosed:
                return
            except Exception:
                logger.exception("the keep-alive met what it did not expect, and goes on")
                await asyncio.sleep(SHORTEST_PAUSE)
