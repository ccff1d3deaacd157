"""Run the tests of the clients on memory, unchanged.

The tests wait with asyncio.sleep and measure with time.monotonic. Here both follow the clock of the database in memory:
when the event loop has nothing to do, the clock moves to the next event instead. A synchronous client runs in a
greenlet, so that a call that blocks lets the other tasks of the test run. The test's statements for the database are
executed on the tables in memory.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, cast

import pytest
from sqlalchemy.util import await_only, greenlet_spawn

from dblock._core.effects import Call
from dblock._core.replies import new_attempt
from dblock.errors import ClientClosed
from dblock.testing import AsyncMemoryClient, Clock, MemoryClient, MemoryDatabase
from tests.support import memory_recipes
from tests.support.facade import _AsyncFacade, function_of
from tests.support.timings import timings_with

STEPS_WITHOUT_END = 100_000


class LoopClock(Clock):
    """A clock that the event loop moves. A call that blocks in a greenlet waits in the event loop."""

    def __init__(self) -> None:
        super().__init__(datetime.now(timezone.utc))
        self._sleepers: set[asyncio.Event] = set()

    def rule(self, patch: pytest.MonkeyPatch) -> None:
        """Let the running event loop and time.monotonic follow this clock."""
        loop: Any = asyncio.get_running_loop()
        began, select, steps = time.monotonic(), loop._selector.select, 0

        def follow(timeout: float | None) -> Any:
            nonlocal steps
            found = select(0)
            if found or timeout == 0:
                return found
            steps += 1
            until = math.inf if timeout is None else self() + timeout
            if (until == math.inf and self._next() == math.inf) or steps > STEPS_WITHOUT_END:
                raise AssertionError("the test waits for something that never happens")
            self.step_to(until)
            return found

        # Each reading is a little later, as on a real clock: a wait of 0.2 s is never measured to be shorter.
        readings = itertools.count()
        patch.setattr(time, "monotonic", lambda: began + self() + next(readings) * 1e-7)
        patch.setattr(loop._selector, "select", follow)

    def step_to(self, until: float) -> None:
        """Move to the next event, or to this moment if it comes first."""
        if self._next() <= until:
            self._step()
        else:
            self._now = until
        self._rouse()

    @property
    def is_due(self) -> bool:
        return True  # each call may have woken a sleeper

    def run_due(self) -> None:
        super().run_due()
        self._rouse()

    def wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        await_only(self._waiting(is_over, self() + seconds))

    async def _waiting(self, is_over: Callable[[], bool], until: float) -> None:
        while not is_over() and self() < until:
            event = asyncio.Event()
            self._sleepers.add(event)
            timer = self.call_later(until - self(), event.set) if until < math.inf else None
            try:
                await event.wait()
            finally:
                self._sleepers.discard(event)
                if timer is not None:
                    timer.cancel()

    def _rouse(self) -> None:
        for event in list(self._sleepers):
            event.set()


class MemoryClients:
    """Create clients of either kind, over one database in memory."""

    dsn = "memory"

    def __init__(self, kind: str, database: MemoryDatabase) -> None:
        self._kind = kind
        self._database = database
        self._clients: list[Any] = []
        self.timings = timings_with()

    def __call__(self, where: Any = None, **options: Any) -> Any:
        assert where is None
        kinds = {"sync": MemoryClient, "async": AsyncMemoryClient}
        client = kinds[self._kind](self._database, **{"timings": self.timings, **options})
        self._clients.append(client)
        return _AsyncFacade(client, self._run) if self._kind == "sync" else client

    async def close(self) -> None:
        for client in self._clients:
            if self._kind == "sync":
                client.close()
            else:
                await client.close()

    @contextmanager
    def before_calls(self, act: Callable[[str], Any], client: Any = None) -> Iterator[None]:
        """The database does not know which client calls: `act` gets the calls of all clients."""
        runtime = None if client is None else getattr(client, "_inner", client)._runtime

        def before(call: Call) -> None:
            was_closed = runtime is not None and runtime.closed
            done = act(function_of(call))
            if inspect.iscoroutine(done):
                with pytest.raises(StopIteration):  # a memory client closes at once
                    done.send(None)
            if runtime is not None and runtime.closed and not was_closed:
                raise ClientClosed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._database, "intercept", before)
            yield

    async def _run(self, function: Any, *args: Any, **options: Any) -> Any:
        return await greenlet_spawn(function, *args, **options)


class _Rows:
    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self._rows = list(rows)

    def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[Any]:
        return self._rows

    def __iter__(self) -> Any:
        return iter(self._rows)


class MemoryOwner:
    """Executes the statements of the tests on the tables in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._store = database.store

    def execute(self, statement: str | bytes, args: Sequence[Any] = ()) -> _Rows:
        text = statement.decode() if isinstance(statement, bytes) else statement
        for arg in args:
            text = text.replace("%s", f"'{arg}'" if isinstance(arg, str) else str(arg), 1)
        rows = _Rows([])
        for one in text.split(";"):
            rows = _Rows(self._one(" ".join(one.split())))
        return rows

    def _one(self, text: str) -> list[tuple[Any, ...]]:
        for pattern, act in _STATEMENTS:
            found = re.fullmatch(pattern, text)
            if found is not None:
                self._store.durable = False
                rows = cast("list[tuple[Any, ...]]", act(self, *found.groups()) or [])
                for name in list(self._store.tables.rows):
                    self._database.wake(name)
                memory_recipes.wake_waiters(self._store)
                return rows
        raise NotImplementedError(f"not on memory: {text}")

    def _held(self, name: str) -> list[Any]:
        found = self._store.holder(name)
        return [] if found is None else [found]

    def _expire(self, name: str | None) -> None:
        for row in self._store.tables.rows.values():
            if name is None or row.name == name:
                row.expires_at = self._store.now()

    def _free(self, name: str | None) -> None:
        for row in self._store.tables.rows.values():
            if name is None or row.name == name:
                row.expires_at, row.released_at = -math.inf, self._store.now()

    def _take(self, name: str) -> list[tuple[Any, ...]]:
        reply = self._store.try_acquire(name, 3600.0, new_attempt())
        return [(reply.token,)]

    def _force(self, name: str, token: str | None, now: str | None) -> list[tuple[Any, ...]]:
        row = self._store.tables.rows[name]
        return [(self._store.force_release(name, row.token if token is None else int(token), bool(now)),)]

    def _release(self, name: str, token: str) -> list[tuple[Any, ...]]:
        return [(self._store.release(name, int(token)),)]

    def _tickets(self, name: str | None) -> list[Any]:
        lines = self._store.tables.tickets
        return [ticket for at in sorted(lines) for ticket in lines[at] if name in (None, at)]

    def _granted(self, name: str) -> list[tuple[Any, ...]]:
        row = self._store.tables.rows.get(name)
        return [] if row is None else [(row.expires_at > self._store.now(),)]

    def _all_held(self) -> list[Any]:
        now = self._store.now()
        return sorted((row.name,) for row in self._store.tables.rows.values() if row.expires_at > now)


_STATEMENTS: list[tuple[str, Callable[..., Any]]] = [
    (r"UPDATE distributed_locks SET expires_at = clock_timestamp\(\)(?: WHERE name = '(.*)')?", MemoryOwner._expire),
    (
        r"UPDATE distributed_locks SET expires_at = '-infinity', released_at = clock_timestamp\(\)"
        r"(?: WHERE name = '(.*)')?",
        MemoryOwner._free,
    ),
    (r"SELECT token FROM try_acquire\('(.*)', '1 hour'\)", MemoryOwner._take),
    (
        r"SELECT force_release\('(\w)', (?:token|(\d+))(?:, (?:now => )?(true)|, false)?\)"
        r"(?: FROM distributed_locks.*)?",
        MemoryOwner._force,
    ),
    (r"SELECT release\('(.*)', (\d+)(?:, durable => true)?\)", MemoryOwner._release),
    (r"SELECT count\(\*\) FROM holder\('(.*)'\)", lambda owner, name: [(len(owner._held(name)),)]),
    (r"SELECT token FROM holder\('(.*)'\)", lambda owner, name: [(row.token,) for row in owner._held(name)]),
    (
        r"SELECT token FROM distributed_locks WHERE name = '(.*)'",
        lambda owner, name: [(owner._store.tables.rows[name].token,)],
    ),
    (
        r"SELECT count\(\*\) FROM lock_tickets(?: WHERE name = '(.*)')?",
        lambda owner, name: [(len(owner._tickets(name)),)],
    ),
    (
        r"SELECT name FROM lock_tickets(?: ORDER BY name, number)?",
        lambda owner: [(ticket.name,) for ticket in owner._tickets(None)],
    ),
    (
        r"SELECT max\(last_ticket\) FROM lock_queues",
        lambda owner: [(max(owner._store.queues.values(), default=None),)],
    ),
    (r"SELECT expires_at > clock_timestamp\(\) FROM distributed_locks WHERE name = '(.*)'", MemoryOwner._granted),
    (
        r"SELECT count\(\*\)(?:::int)? FROM distributed_locks WHERE expires_at > clock_timestamp\(\)",
        lambda owner: [(len(owner._all_held()),)],
    ),
    (
        r"SELECT name FROM distributed_locks WHERE expires_at > clock_timestamp\(\) ORDER BY name",
        MemoryOwner._all_held,
    ),
    (r"UPDATE lock_clients SET seen_until = .*", lambda owner: None),
    (r"SELECT count\(\*\) FROM lock_clients", lambda owner: [(len(owner._store.tables.clients),)]),
    (
        r"SELECT clock_timestamp\(\) < (.*)",
        lambda owner, moment: [(owner._database.clock.now() < datetime.fromisoformat(moment),)],
    ),
    (
        r"SELECT date_part\('epoch', clock_timestamp\(\)\) - (\d+) / 1e6",
        lambda owner, token: [(owner._store.now() - int(token) / 1e6,)],
    ),
    (
        r"SELECT count\(\*\) FROM waiting_holds",
        lambda owner: [(sum(map(len, owner._store.tables.waiting_holds.values())),)],
    ),
    *memory_recipes.STATEMENTS,
]
"""The statements of the tests, and what they do to the tables."""
