"""Each kind of lock behaves as a plain model of it, over calls that Hypothesis chooses.

The machines are imported in the tests: only the process that runs them takes the time to import Hypothesis.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import psycopg
import pytest

from tests.support.facade import AsyncClients, Clients, SyncClients
from tests.support.stages import lengths
from tests.support.steered_calls import SteeredCalls

for _model in ("shared", "several", "barrier", "reentrance"):
    pytest.register_assert_rewrite(f"tests.support.{_model}_model")


@pytest.fixture
def calls(dsn: str) -> Iterator[SteeredCalls]:
    with contextlib.closing(SteeredCalls(dsn)) as calls:
        yield calls


@lengths(medium_runs=40)
def test_read_write_lock_follows_its_model(calls: SteeredCalls, examples: int, steps: int) -> None:
    from tests.support.shared_model import ReadWriteLockMachine
    from tests.support.state_machines import follow

    follow(ReadWriteLockMachine, lambda: ReadWriteLockMachine(calls), examples, steps)


@lengths(medium_runs=40)
def test_semaphore_follows_its_model(calls: SteeredCalls, examples: int, steps: int) -> None:
    from tests.support.shared_model import SemaphoreMachine
    from tests.support.state_machines import follow

    follow(SemaphoreMachine, lambda: SemaphoreMachine(calls), examples, steps)


@lengths(medium_runs=30)
def test_several_locks_at_once_follow_their_model(calls: SteeredCalls, examples: int, steps: int) -> None:
    from tests.support.several_model import SeveralMachine
    from tests.support.state_machines import follow

    follow(SeveralMachine, lambda: SeveralMachine(calls), examples, steps)


@lengths(medium_runs=40)
def test_barrier_follows_its_model(owner: psycopg.Connection, examples: int, steps: int) -> None:
    from tests.support.barrier_model import BarrierMachine
    from tests.support.state_machines import follow

    follow(BarrierMachine, lambda: BarrierMachine(owner), examples, steps)


@lengths(medium_runs=40)
def test_latch_follows_its_model(owner: psycopg.Connection, examples: int, steps: int) -> None:
    from tests.support.barrier_model import LatchMachine
    from tests.support.state_machines import follow

    follow(LatchMachine, lambda: LatchMachine(owner), examples, steps)


@lengths(medium_runs=20)
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.usefixtures("patient")
def test_reentrant_lock_follows_its_model(
    dsn: str, owner: psycopg.Connection, kind: str, examples: int, steps: int
) -> None:
    from tests.support.reentrance_model import Owners, ReentranceMachine
    from tests.support.state_machines import follow

    clients: Clients = SyncClients(dsn) if kind == "sync" else AsyncClients(dsn)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        owners = Owners(loop, [clients(), clients()], owner)
        try:
            follow(ReentranceMachine, lambda: ReentranceMachine(owners), examples, steps)
        finally:
            owners.end()
            owners.run(clients.close())
