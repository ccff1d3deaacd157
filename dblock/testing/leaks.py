"""Find what a test has left behind: held locks, tickets, open clients and threads, each with the line that made it.

During a test, a Watch observes every new client of this process. It notes the caller's line at each wait and each
grant, which costs a walk over a few frames. A client that existed before the test is not watched, unless the plugin
has lent it to the test.

A Watch sees only this process. The plugin finds in the database what other processes have left, without a line.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dblock._runtime.shutdown import close_without_loop
from dblock.client_base import ClientBase
from dblock.observability import ObservedHold, ObservedWait, Observer
from dblock.recipes.barriers.flows import WaitingFlows
from dblock.testing.client_clock import ClientClock
from dblock.testing.locations import UNKNOWN, Location, caller_location

if TYPE_CHECKING:
    from dblock._core.effects import Flow
    from dblock.recipes.elections.base import ElectionBase

THREADS_END_WITHIN = 2.0

WAITERS_LEAVE_WITHIN = 0.25
"""Seconds in which a waiter leaves a barrier or a latch that has just let it through."""

HELPERS = ("dblock connecting", "dblock timer", "dblock timeout", "dblock callback", "dblock call")
"""The names of the threads that a client starts for a single call or callback."""

current: Watch | None = None
"""The watch of the test that runs."""


class Watch(Observer):
    """What this process has taken since the test began, and where."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waits: dict[ObservedWait, Location | None] = {}
        """The waits that have not ended."""
        self.waits_at: dict[object, tuple[WaitingFlows, Location | None]] = {}
        """The waits at barriers and latches that have not ended, of all clients of this process."""
        self.holds: dict[ObservedHold, Location | None] = {}
        """The leases that have not ended."""
        self.clients: list[tuple[Any, Location | None]] = []
        """The clients that were made during the test."""
        self.lent: list[Any] = []
        """The clients that the plugin has lent to the test. They outlive it."""
        self.disturbed = False
        """Whether the test may have broken the clients that outlive it."""
        self.grants: list[tuple[ObservedHold, Location | None]] = []
        """All leases of this test, in the order of their arrival."""
        self.queued: list[tuple[ObservedWait, Location | None]] = []
        """All calls of this test that had to wait in a queue, or did not get the lock."""
        self.at_end: list[Callable[[], object]] = []
        """Functions that undo the chaos verbs at the end of the test, before a client is closed."""
        self.left: list[str] = []
        """One sentence for each thing that the test has left behind."""
        self._threads = set(threading.enumerate())

    def wait_began(self, wait: ObservedWait) -> None:
        location = caller_location()
        with self._lock:
            self.waits[wait] = location

    def wait_ended(self, wait: ObservedWait) -> None:
        with self._lock:
            location = self.waits.pop(wait, None)
            if wait.handoff is not None or wait.outcome != "granted":
                self.queued.append((wait, location))

    def hold_began(self, hold: ObservedHold) -> None:
        location = caller_location()
        with self._lock:
            self.holds[hold] = location
            self.grants.append((hold, location))

    def hold_ended(self, hold: ObservedHold) -> None:
        if hold.lost is None and _in_shutdown_without_loop():
            # The event loop was closed while the lease was held: the shutdown has released the lease, and not the test.
            return
        with self._lock:
            self.holds.pop(hold, None)

    def location_of(self, token: int | None) -> Location | None:
        """Return the line at which this process was granted a lock under this token."""
        return next((location for hold, location in self.grants if hold.token == token), None)

    def undo_chaos(self) -> None:
        """Undo what the chaos verbs of this test have done."""
        while self.at_end:
            self.at_end.pop()()

    def note_calls(self) -> None:
        """Note each lease that is held and each call that waits, by any client of this test."""
        self.undo_chaos()
        with self._lock:
            holds, waits = list(self.holds.items()), list(self.waits.items())
            self.holds.clear()
            self.waits.clear()
        self.left += [
            describe_held_lock(hold.lock, hold.token, hold.holder, f"at {location or UNKNOWN}")
            for hold, location in holds
        ]
        for wait, location in waits:
            names = ", ".join(map(repr, wait.locks))
            self.left.append(f"a ticket in the queue for {names}: {wait.holder} waits at {location or UNKNOWN}")
        self._note_waits_at_barriers()

    def _note_waits_at_barriers(self) -> None:
        clients = [*self.lent, *(client for client, _ in self.clients)]
        of_test = [client._runtime.flows for client in clients]
        until = time.monotonic() + WAITERS_LEAVE_WITHIN
        while found := [key for key, (flows, _) in list(self.waits_at.items()) if flows._flows in of_test]:
            if time.monotonic() >= until:
                break
            time.sleep(0.002)
        for flows, location in filter(None, (self.waits_at.pop(key, None) for key in found)):
            holder = flows._flows.holder_name()
            self.left.append(describe_waiter(flows.kind, flows._name, holder, f"at {location or UNKNOWN}"))

    def close_clients(self) -> None:
        """Note each client that is open, and close it."""
        for client, location in self.clients:
            if client._runtime.runner is not None:
                self.left.append(
                    f"a client with its connections and threads, not closed: made at {location or UNKNOWN}"
                )
                close(client)
        self.clients.clear()

    def note_threads(self, lasting: Set[threading.Thread] = frozenset()) -> None:
        """Note each thread of dblock that was started during the test and does not end, except those that may last."""
        until = time.monotonic() + THREADS_END_WITHIN
        while found := [thread for thread in threading.enumerate() if self._is_left(thread, lasting)]:
            if time.monotonic() >= until:
                self.left += [f"the thread {thread.name!r}, which does not end" for thread in found]
                return
            time.sleep(0.002)

    def _is_left(self, thread: threading.Thread, lasting: Set[threading.Thread]) -> bool:
        if not thread.name.startswith("dblock") or thread in self._threads or thread in lasting:
            return False
        # A client that outlives the test may need one of these at any time.
        return not (self.lent and thread.name in HELPERS)


@contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Let every client that is made during the block report to this watch."""
    original = ClientBase.__init__

    @functools.wraps(original)
    def init(self: ClientBase, *args: Any, **kwargs: Any) -> None:
        kwargs["observers"] = [*kwargs.get("observers", ()), watch]
        original(self, *args, **kwargs)
        self._runtime.flows.clock = ClientClock()
        watch.clients.append((self, caller_location()))

    original_wait = WaitingFlows._wait

    @functools.wraps(original_wait)
    def wait(self: WaitingFlows, *args: Any) -> Flow[int | None]:
        key = object()
        watch.waits_at[key] = (self, caller_location())
        try:
            return (yield from original_wait(self, *args))
        finally:
            watch.waits_at.pop(key, None)

    global current
    before, current = current, watch
    ClientBase.__init__ = init  # type: ignore[method-assign]
    WaitingFlows._wait = wait  # type: ignore[method-assign,assignment]
    try:
        yield watch
    finally:
        ClientBase.__init__ = original  # type: ignore[method-assign]
        WaitingFlows._wait = original_wait  # type: ignore[method-assign]
        current = before


@contextmanager
def unwatched() -> Iterator[None]:
    """Let the clients that are made during the block report to no watch."""
    watched = ClientBase.__init__
    ClientBase.__init__ = getattr(watched, "__wrapped__", watched)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ClientBase.__init__ = watched  # type: ignore[method-assign]


def close(client: Any) -> None:
    """Close a client of either kind from outside of its event loop."""
    runtime = client._runtime
    loop = getattr(runtime, "_loop", None)
    if loop is None:
        # A Client, or an AsyncClient that was never used.
        if runtime.runner is not None:
            _abandon_terms(runtime)
            client.close()
    elif loop.is_closed() or loop.is_running():
        runtime.shutdown()
        runtime.closed, runtime.runner = True, None
    else:
        _abandon_terms(runtime)
        loop.run_until_complete(client.close())


def _abandon_terms(runtime: Any) -> None:
    """Let the close of a client release its terms at once. By itself it waits for their bodies, up to the ttl."""
    for close_election in list(runtime.before_close):
        election: ElectionBase[Any] = close_election.__self__
        election.stop()
        term = election._term
        with contextlib.suppress(ValueError):  # the body has just returned
            runtime.before_close.remove(close_election)
            if term is not None:
                election._abandon(term._lease)
                term._end_waits()


def describe_held_lock(lock: str, token: int | None, holder: str | None, where: str) -> str:
    """Return a sentence that names a lock, its holder, and where the lock was acquired."""
    kind = "an efficiency lock" if token is None or token < 0 else f"token {token}"
    return f"lock {lock!r} ({kind}), held by {holder}: acquired {where}"


def describe_waiter(kind: str, name: str, holder: str, where: str) -> str:
    """Return a sentence that names a barrier or a latch, a waiter at it, and where that one waits."""
    return f"a waiter at {kind} {name!r}: {holder} waits {where}"


def _in_shutdown_without_loop() -> bool:
    """Return whether a client is being shut down in this thread because its event loop is closed."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is close_without_loop.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
