"""The tests of the clients, unchanged, on memory: every test that needs nothing but clients and some statements.

A test is left out if it asks for a fixture that means Postgres, such as a DSN, or if OF_POSTGRES names it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import pytest

from dblock.testing import MemoryClient, MemoryDatabase
from tests.dblock.client import (
    test_deadlocks,
    test_decorators,
    test_efficiency,
    test_leases,
    test_lock,
    test_own_waits,
    test_reentrance,
    test_several,
    test_shared,
    test_waiting,
)
from tests.dblock.recipes import test_barriers
from tests.support.facade import Clients
from tests.support.memory import LoopClock, MemoryClients, MemoryOwner

MODULES = [
    *(test_lock, test_leases, test_waiting, test_own_waits, test_efficiency, test_reentrance, test_decorators),
    *(test_shared, test_deadlocks, test_several, test_barriers),
]

INJECTED_CLOCK = True

OF_POSTGRES = {
    "test_all_leases_are_renewed_in_one_statement": "counts transactions",
    "test_keep_alive_connects_before_the_first_renewal_is_due": "is about a connection",
    "test_close_releases_a_lease_that_counts_as_lost_when_its_presence_ends": "ends a connection",
    "test_many_first_calls_at_once_open_one_client": "counts sessions",
    "test_many_waiters_share_one_connection": "counts sessions",
    "test_listen_dsn_is_checked": "is about a DSN",
    "test_client_without_waiters_does_not_listen": "is about the listener",
    "test_lost_notification_costs_a_bounded_delay": "no notification is lost on memory",
    "test_ticket_without_a_waiter_blocks_no_other_waiter": "needs a heartbeat",
    "test_tickets_without_a_waiter_are_abandoned_though_the_client_waits_for_another_lock": "needs a heartbeat",
    "test_waiter_whose_ticket_was_deleted_takes_a_new_one": "needs a heartbeat",
    "test_meta_that_python_cannot_parse_is_returned_as_text": "another client stores it, by SQL",
    "test_waiter_creates_a_semaphore_that_a_failover_has_lost": "needs a heartbeat",
    "test_request_that_outlasts_the_close_of_its_client_leaves_no_ticket": "makes a function of SQL sleep",
    "test_free_lock_is_granted_with_a_token": "no time passes between two calls on memory",
    "test_renew_extends_from_now": "no time passes between two calls on memory",
    "test_thread_can_wait_for_the_loss": "threads wait in real time",
    "test_lease_can_be_released_in_another_thread": "threads wait in real time",
    "test_busy_lock_is_waited_for_skipped_or_refused": "threads wait in real time",
    "test_function_whose_lease_is_lost_raises": "threads wait in real time",
    "test_waiter_that_holds_nothing_leaves_no_note": "threads wait in real time",
    "test_lost_reply_is_found_again_and_grants_nothing_twice": "breaks a connection",
    "test_parents_lease_in_a_child_is_over_and_not_lost": "the child has a database of its own",
    "test_bad_arguments_are_refused_before_anything_is_sent": "is about a DSN",
    "test_party_arrives_again_after_a_crash_of_the_database": "ends connections",
    "test_child_of_a_fork_does_not_share": "the child has a database of its own",
}
"""Tests that cannot run on memory, and why."""


@pytest.fixture
def database() -> MemoryDatabase:
    return MemoryDatabase(LoopClock())


@pytest.fixture(params=["sync", "async"])
async def clients(
    request: pytest.FixtureRequest, database: MemoryDatabase, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Clients]:
    clock = database.clock
    assert isinstance(clock, LoopClock)
    with monkeypatch.context() as patched:
        clock.rule(patched)
        made = MemoryClients(request.param, database)
        yield made
        await made.close()


@pytest.fixture
def owner(database: MemoryDatabase) -> MemoryOwner:
    return MemoryOwner(database)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryClient]:
    with MemoryClient() as client:
        monkeypatch.setattr(time, "sleep", client.clock.tick)
        yield client


MEMORY_FIXTURES = {"clients", "client", "owner", "caplog", "monkeypatch"}
"""The fixtures that exist on memory."""


def needs(test: Any) -> set[str]:
    """Return the fixtures that a test asks for."""
    marks = getattr(test, "pytestmark", [])
    values = {
        name.strip()
        for mark in marks
        if mark.name == "parametrize" and not mark.kwargs.get("indirect")
        for name in (mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0])
    }
    used = {name for mark in marks if mark.name == "usefixtures" for name in mark.args}
    return {*inspect.signature(test).parameters, *used} - values


def needs_a_server(test: Any) -> bool:
    """Return whether a test needs connections: to put something in between, to end them, or to open its own."""
    source = inspect.getsource(test)
    return any(one in source for one in ("Proxy(", "clients.dsn", "psycopg.connect", "owner.info", "owner.transaction"))


def of_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the tests of a module that run on memory."""
    for name, test in vars(module).items():
        if (
            name.startswith("test_")
            and name not in OF_POSTGRES
            and needs(test) <= MEMORY_FIXTURES
            and not needs_a_server(test)
            and needs(test) & {"clients", "client"}
        ):
            yield name, test


def test_every_test_that_is_left_out_exists() -> None:
    assert {name for name in OF_POSTGRES if not any(hasattr(module, name) for module in MODULES)} == set()


for _module in MODULES:
    for _name, _test in of_module(_module):
        globals()[f"{_name}__{_module.__name__.rpartition('.')[2]}"] = _test
