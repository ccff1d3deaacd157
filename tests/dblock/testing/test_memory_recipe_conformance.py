"""The tests of elections and schedules, unchanged, on memory: every test that needs nothing but clients.

`dblock.Client` and `dblock.AsyncClient` are clients of one database in memory here, whatever DSN a test gives. A test
is left out if it asks for a fixture that means Postgres, or if OF_POSTGRES names it.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import dblock
from dblock.testing import AsyncMemoryClient, MemoryClient, MemoryDatabase
from tests.dblock.recipes import test_elections, test_elections_async, test_schedules
from tests.dblock.testing.test_memory_conformance import needs, needs_a_server
from tests.support.memory import LoopClock, MemoryOwner
from tests.support.memory_recipes import MemoryStillClock
from tests.support.still_clock import NOON

MODULES = [test_elections, test_elections_async, test_schedules]

INJECTED_CLOCK = True

OF_POSTGRES = {
    "test_leader_knows_of_its_loss_before_the_lock_is_free": "no time passes between two calls on memory",
    "test_closing_the_client_waits_for_the_body__test_elections": "threads wait in real time",
    "test_loop_pauses_after_a_claim_that_fails": "renames a function of the database",
    "test_fence_is_awaited_or_entered": "needs a transaction",
}
"""Tests that mean a part of Postgres or of its connections, and why."""


def needs_processes(test: Any) -> bool:
    """Return whether a test starts processes, or threads that wait for each other in real time."""
    source = inspect.getsource(test)
    return any(one in source for one in ("run_in_child(", "killed_at(", "ThreadPoolExecutor("))


def measures(test: Any) -> bool:
    """Return whether a test measures what it takes of a processor."""
    return any(mark.name == "alone" for mark in getattr(test, "pytestmark", []))


def has_tasks(request: pytest.FixtureRequest) -> bool:
    """Return whether the test is a coroutine function."""
    return inspect.iscoroutinefunction(request.function)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> MemoryDatabase:
    return MemoryDatabase(LoopClock() if has_tasks(request) else None)


@pytest.fixture(autouse=True)
async def _ruled(database: MemoryDatabase, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let the event loop, or time.sleep, follow the clock of the database."""
    with monkeypatch.context() as patched:
        if isinstance(database.clock, LoopClock):
            database.clock.rule(patched)
        else:
            patched.setattr(time, "sleep", database.clock.tick)
        yield


@pytest.fixture(autouse=True)
def dsn(database: MemoryDatabase, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every client be one of the database in memory."""

    def make(kind: Any, where: str, **options: Any) -> Any:
        return kind(database, **options)

    monkeypatch.setattr(dblock, "Client", functools.partial(make, MemoryClient))
    monkeypatch.setattr(dblock, "AsyncClient", functools.partial(make, AsyncMemoryClient))
    return "memory"


@pytest.fixture
def client(request: pytest.FixtureRequest, database: MemoryDatabase) -> Iterator[Any]:
    if has_tasks(request):
        yield AsyncMemoryClient(database)
    else:
        with MemoryClient(database) as client:
            yield client


@pytest.fixture
def owner(database: MemoryDatabase) -> MemoryOwner:
    return MemoryOwner(database)


@pytest.fixture
def other(database: MemoryDatabase) -> Iterator[MemoryClient]:
    """A second host."""
    with MemoryClient(database) as other:
        yield other


@pytest.fixture
def clock(database: MemoryDatabase) -> MemoryStillClock:
    return MemoryStillClock(database, NOON)


MEMORY_FIXTURES = {"client", "other", "clock", "dsn", "owner", "caplog", "monkeypatch"}
"""The fixtures that exist on memory."""


def test_every_test_that_is_left_out_exists() -> None:
    names = {name.partition("__")[0] for name in OF_POSTGRES}
    assert {name for name in names if not any(hasattr(module, name) for module in MODULES)} == set()


for _module in MODULES:
    for _name, _test in vars(_module).items():
        _here = f"{_name}__{_module.__name__.rpartition('.')[2]}"
        if (
            _name.startswith("test_")
            and not {_name, _here} & OF_POSTGRES.keys()
            and needs(_test) <= MEMORY_FIXTURES
            and needs(_test) & {"client", "dsn"}
            and not needs_a_server(_test)
            and not needs_processes(_test)
            and not measures(_test)
        ):
            globals()[_here] = _test
