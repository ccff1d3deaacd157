"""An exception of a signal handler in the middle of a call leaves no lock held and leaks no connection of the pool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

import dblock
from tests.support.sessions import Sessions


class Soft(Exception):
    """Raised like the soft time limit of a task queue."""


class Hard(BaseException):
    """Raised like the exceptions of a test framework that bypass `except Exception`."""


@contextmanager
def raised_after(wait: Callable[[], object], error: type[BaseException]) -> Iterator[None]:
    """Raise the error in the body, from a signal handler, when `wait` has returned."""

    def raise_it(*_: object) -> None:
        raise error

    def interrupt() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_it)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [Soft, Hard, KeyboardInterrupt])
def test_exception_in_a_signal_handler_leaves_no_lock(
    client: dblock.Client, sessions: Sessions, owner: psycopg.Connection, error: type[BaseException]
) -> None:
    """The statement waits at the server when the handler raises. Uncancelled, it would grant the lock later."""
    client.lock("warm").holder()
    keeper = sessions.open()
    keeper.do("BEGIN")
    keeper.do("LOCK TABLE distributed_locks")
    with pytest.raises(error), raised_after(sessions.wait_until_a_session_waits, error):
        client.lock("a", ttl=600).acquire()
    keeper.do("COMMIT")
    time.sleep(0.3)
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


INTERRUPTED = """
import gc, json, random, signal, sys, time, warnings, dblock
warnings.simplefilter("ignore")
class Soft(Exception): pass
def interrupt(*_): raise Soft
signal.signal(signal.SIGALRM, interrupt)
client = dblock.Client(sys.argv[1])
client.lock("warm").holder()
slots = held = 0
for number in range(int(sys.argv[2])):
    lease = None
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003))
        lease = client.lock(f"{number}", ttl=600).acquire()
        while True:
            pass
    except Soft:
        pass
    if lease is not None:
        lease.release()
gc.collect()
deadline = time.monotonic() + 15
pool = client._runtime.runner._pool
while time.monotonic() < deadline:
    held = sum(client.lock(f"{number}").holder() is not None for number in range(int(sys.argv[2])))
    slots = len(pool._slots) - len(pool._idle)
    if not held and not slots:
        break
print(json.dumps({"held": held, "slots": slots}))
"""


@pytest.mark.second_stage
def test_interrupts_at_random_moments_of_acquire_leave_nothing(dsn: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, dsn, "200"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == {"held": 0, "slots": 0}


@pytest.mark.second_stage
async def test_callers_own_timeout_is_raised_while_the_database_does_not_reply(dsn: str) -> None:
    """The backend is stopped, so psycopg's cancel has no effect and the client's patience ends too.

    The caller must still get its own timeout.
    """
    async with dblock.AsyncClient(dsn, patience=1, pool_size=1) as client:
        await client.lock("warm").holder()
        assert client._runtime.runner is not None
        (wire,) = client._runtime.runner._pool._idle
        backend = wire.connection.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        try:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.lock("a").acquire(), 0.3)
        finally:
            os.kill(backend, signal.SIGCONT)
