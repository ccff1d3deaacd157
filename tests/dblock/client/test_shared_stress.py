"""Read-write locks and semaphores under load: many processes, kills, cancellations, lost replies, and exact times."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import dblock
from tests.dblock.client.test_shared import nothing_is_left, waits_for
from tests.dblock.client.test_waiting import SLOW, keep_waiters, settled, wait_for_tickets
from tests.support.eventually import eventually_async
from tests.support.machine import measured
from tests.support.proxy import Proxy
from tests.support.renewals import TTL, renewed
from tests.support.timings import polls_every

pytestmark = [pytest.mark.second_stage]

ROOT = Path(__file__).parents[3]

WORKER = """
import random, sys, time
import psycopg
import dblock
from tests.support.orphans import die_with_parent

die_with_parent()
dsn, number, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(number)
with dblock.Client(dsn) as client, psycopg.connect(dsn, autocommit=True) as inside:
    semaphore = client.semaphore("the semaphore", permits=3)
    done = 0
    while done < rounds:
        lease = semaphore.try_acquire() if chance.random() < 0.5 else semaphore.acquire()
        if lease is None:
            time.sleep(0.002)
            continue
        # The key of the table is the permit: two holders of one permit would fail here.
        inside.execute("INSERT INTO public.inside VALUES (%s)", [lease.permit])
        assert 0 <= lease.permit < 3, lease.permit
        time.sleep(chance.random() * 0.004)
        inside.execute("DELETE FROM public.inside WHERE permit = %s", [lease.permit])
        lease.release()
        done += 1
"""

HOLDER = """
import sys, time
import dblock
from tests.support.orphans import die_with_parent

die_with_parent()
client = dblock.Client(sys.argv[1])
leases = [client.semaphore("the semaphore", ttl=600).acquire(), client.read_lock("rw", ttl=600).acquire()]
while any(lease._state.presence is None for lease in leases):
    time.sleep(0.01)  # without it, its leases would last for their ttl
print("held", flush=True)
time.sleep(60)
"""


def long(rounds: int) -> Any:
    """Return a number of rounds that take many minutes."""
    return pytest.param(rounds, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rounds", [40, long(25_000)])
def test_semaphore_never_has_more_holders_than_permits(dsn: str, owner: psycopg.Connection, rounds: int) -> None:
    """One process more than permits, each of which mixes tries and waits."""
    owner.execute("CREATE TABLE public.inside (permit integer PRIMARY KEY)")
    workers = [start(WORKER, dsn, str(number), str(rounds)) for number in range(4)]
    try:
        for worker in workers:
            assert worker.wait(120 + rounds / 5) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert owner.execute("SELECT count(*) FROM public.inside").fetchone() == (0,)


@pytest.mark.usefixtures("needs_presence")
@pytest.mark.parametrize("rounds", [4, long(100)])
async def test_permits_of_the_dead_the_cancelled_and_the_unanswered_come_back(
    dsn: str, owner: psycopg.Connection, rounds: int
) -> None:
    """What is available is what the live holders have not, after every way to leave without a release.

    A round has two kills, eight cancellations and a lost reply.
    """
    permits, chance = 6, random.Random(7)
    with Proxy(dsn) as proxy:
        async with dblock.AsyncClient(dsn) as client, dblock.AsyncClient(proxy.dsn) as cut:
            semaphore = client.semaphore("the semaphore", permits=permits)
            live = [await semaphore.acquire(), await semaphore.acquire()]

            async def all_available() -> bool:
                return bool(await semaphore.available() == permits - len(live))

            async def cancelled() -> None:
                task = waits_for(client.semaphore("the semaphore", ttl=600))
                await asyncio.sleep(chance.random() * 0.02)
                task.cancel()
                lease = (await asyncio.gather(task, return_exceptions=True))[0]
                if not isinstance(lease, BaseException):
                    await lease.release()

            async def unanswered() -> None:
                before = proxy.lost
                proxy.lose_reply_to(b"the semaphore")
                lease = await cut.semaphore("the semaphore", ttl=600).acquire(timeout=30)
                assert proxy.lost > before
                await lease.release()

            for _ in range(rounds):
                holders = [start(HOLDER, dsn) for _ in range(2)]
                try:
                    for holder in holders:
                        assert holder.stdout is not None
                        await asyncio.to_thread(holder.stdout.readline)
                finally:
                    for holder in holders:
                        holder.kill()
                        holder.communicate()
                await asyncio.gather(*(cancelled() for _ in range(8)))
                await unanswered()
                await eventually_async(all_available, "every permit but those of live leases is available")
                assert len(await semaphore.holders()) == len(live)

            rest = [await semaphore.try_acquire() for _ in range(permits - len(live))]
            assert all(rest)
            assert await semaphore.try_acquire() is None
            assert sorted(lease.permit for lease in (*live, *rest) if lease) == list(range(permits))
            # The readers that were killed are gone, too.
            writer = await client.write_lock("rw").acquire(timeout=30)
            for lease in (*live, *rest, writer):
                assert lease is not None
                assert await lease.release()
    await nothing_is_left(owner)


@pytest.mark.usefixtures("needs_presence")
async def test_dead_reader_is_gone_while_other_readers_renew(dsn: str, owner: psycopg.Connection) -> None:
    """Each reader renews its own lease alone. The dead one's lease would last for its ttl, a minute."""
    async with dblock.AsyncClient(dsn) as client, dblock.AsyncClient(dsn) as other:
        await (await client.semaphore("the semaphore", permits=1).acquire()).release()
        reader = await client.read_lock("rw", ttl=TTL).acquire()
        dead = start(HOLDER, dsn)
        try:
            assert dead.stdout is not None
            await asyncio.to_thread(dead.stdout.readline)
            assert len(await client.read_lock("rw").holders()) == 2
            writing = waits_for(other.write_lock("rw"))
            await wait_for_tickets(owner, 1)
        finally:
            dead.kill()
            dead.communicate()
        await renewed(reader)
        assert not writing.done()
        await reader.release()
        assert (await asyncio.wait_for(writing, 20)).token > reader.token


@pytest.mark.parametrize("rounds", [12, long(10_000)])
async def test_no_writer_enters_while_another_one_downgrades(dsn: str, owner: psycopg.Connection, rounds: int) -> None:
    """The trigger records every grant: after the grant of a writer comes that of its own read lease."""
    owner.execute(
        "CREATE TABLE public.grants (token bigint);"
        " CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
        " AS 'BEGIN INSERT INTO public.grants VALUES (NEW.token); RETURN NULL; END';"
        " CREATE TRIGGER note AFTER UPDATE OF token ON distributed_locks FOR EACH ROW"
        " WHEN (NEW.token <> OLD.token AND NEW.head IS NOT NULL) EXECUTE FUNCTION public.note()"
    )
    async with dblock.AsyncClient(dsn) as client, dblock.AsyncClient(dsn) as other:
        writing = waits_for(other.write_lock("a"))
        downgrades = []
        for number in range(rounds):
            writer = await writing
            writing = waits_for((client if number % 2 else other).write_lock("a"))
            await wait_for_tickets(owner, 1)
            reader = await writer.downgrade()
            downgrades.append((writer.token, reader.token))
            assert not writing.done()
            await reader.release()
        await (await writing).release()
    tokens = [token for (token,) in owner.execute("SELECT token FROM public.grants ORDER BY token").fetchall()]
    assert [tokens[tokens.index(writer) + 1] for writer, _ in downgrades] == [reader for _, reader in downgrades]


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda client: client.lock("a"),
    "write": lambda client: client.write_lock("a"),
    "semaphore": lambda client: client.semaphore("a", permits=1),
}


@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
async def test_release_reaches_the_next_of_20_waiters_in_time(dsn: str, owner: psycopg.Connection, kind: str) -> None:
    """In 50 ms for 19 of 20 hand-overs, in the same process and in another, apart from what the machine takes."""
    with measured() as lateness:
        async with dblock.AsyncClient(dsn) as here, dblock.AsyncClient(dsn) as there:
            released = [math.inf]
            took: list[float] = []

            async def take(client: Any) -> None:
                lease = await KINDS[kind](client).acquire()
                took.append(time.monotonic() - released[0])
                await asyncio.sleep(0.005)
                released[0] = time.monotonic()
                await lease.release()

            held = await KINDS[kind](here).acquire()
            waiting = [
                asyncio.create_task(take(client)) for _, client in zip(range(20), itertools.cycle([here, there]))
            ]
            await wait_for_tickets(owner, 20)
            await settled(here)
            await settled(there)
            released[0] = time.monotonic()
            await held.release()
            await asyncio.gather(*waiting)
        late = lateness()
    assert sorted(took)[18] < 0.05 + 3 * late, f"{sorted(took)} with a lateness of {late:.3f} s"


@pytest.mark.alone
async def test_writer_enters_within_the_longest_read_that_was_running(dsn: str) -> None:
    """However many readers come while it waits."""
    reads = 0.4
    with measured() as lateness:
        async with dblock.AsyncClient(dsn) as client, dblock.AsyncClient(dsn) as other:
            ended = asyncio.Event()
            entered: list[float] = []

            async def read(number: int) -> None:
                while not ended.is_set():
                    async with (client, other)[number % 2].read_lock("a"):
                        entered.append(time.monotonic())
                        await asyncio.sleep(reads)

            readers = [asyncio.create_task(read(number)) for number in range(6)]
            await eventually_async(lambda: len(entered) >= 6, "six readers are inside")
            for _ in range(3):
                await asyncio.sleep(reads / 3)
                asked = time.monotonic()
                async with other.write_lock("a"):
                    waited = time.monotonic() - asked
                    last = max(entered)
                # A read may have begun between the question and its arrival in the queue.
                assert waited < max(last - asked, 0) + reads + 0.1 + 6 * lateness(), f"waited {waited:.3f} s"
            ended.set()
            await asyncio.gather(*readers)


async def test_growing_wakes_waiters_in_time(dsn: str, owner: psycopg.Connection) -> None:
    """In 100 ms, apart from what the machine takes. Only a notification can be in time, because polling is slow."""
    timings = polls_every(SLOW)
    with measured() as lateness:
        async with (
            dblock.AsyncClient(dsn, timings=timings) as client,
            dblock.AsyncClient(dsn, timings=timings) as other,
        ):
            semaphore = client.semaphore("a", permits=1)
            held = await semaphore.acquire()
            waiting = [waits_for(other.semaphore("a")) for _ in range(4)]
            await wait_for_tickets(owner, 4)
            keep_waiters(owner)
            await settled(other)
            began = time.monotonic()
            await semaphore.resize(5)
            leases = await asyncio.gather(*waiting)
            took = time.monotonic() - began
            for lease in (held, *leases):
                await lease.release()
        assert took < 0.1 + 6 * lateness(), f"took {took:.3f} s"
