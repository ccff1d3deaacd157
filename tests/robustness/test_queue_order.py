"""Truth 7: grants follow the order of the tickets, whatever the waiters do, and no ticket is left behind."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import psycopg
import pytest

import dblock
from tests.support import mutants

pytestmark = [pytest.mark.second_stage]

PROCESSES, CLIENTS, TASKS = 4, 8, 3

WATCHED = """
CREATE TABLE public.granted (token bigint, attempt uuid);
CREATE TABLE public.redeemed (attempt uuid, since timestamptz);
CREATE FUNCTION public.note_grant() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.granted VALUES (NEW.token, NEW.attempt);
    RETURN NULL;
END $$;
CREATE FUNCTION public.note_ticket() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.redeemed VALUES (OLD.attempt, OLD.since);
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER UPDATE ON dblock.distributed_locks FOR EACH ROW
    WHEN (NEW.token <> OLD.token) EXECUTE FUNCTION public.note_grant();
CREATE TRIGGER note AFTER DELETE ON dblock.lock_tickets FOR EACH ROW EXECUTE FUNCTION public.note_ticket();
"""

GRANTS = "SELECT token, since FROM public.granted JOIN public.redeemed USING (attempt) ORDER BY token"


async def want(client: dblock.AsyncClient, rng: random.Random, until: float, enough: Event) -> None:
    """Acquire the lock repeatedly; at times give up after a short timeout, or cancel the wait."""
    while time.monotonic() < until or not enough.is_set():
        draw = rng.random()
        try:
            if draw < 0.2:
                async with client.lock("a", timeout=rng.uniform(0, 0.1)):
                    pass
            elif draw < 0.3:
                await asyncio.wait_for(client.lock("a").acquire(), rng.uniform(0, 0.1))
            elif draw < 0.4:
                if lease := await client.lock("a").try_acquire():
                    await lease.release()
            else:
                async with client.lock("a"):
                    pass
        except (dblock.LockTimeout, asyncio.TimeoutError):
            continue


def crowd(dsn: str, seed: int, seconds: float, everyone: Barrier, enough: Event) -> None:
    """Contend for this time, counted from when every process has started, and then until there are enough grants."""

    async def all_of_them() -> None:
        rng = random.Random(seed)
        clients = [dblock.AsyncClient(dsn, patience=30) for _ in range(CLIENTS)]
        everyone.wait(60)
        until = time.monotonic() + seconds
        await asyncio.gather(*(want(client, rng, until, enough) for client in clients for _ in range(TASKS)))
        for client in clients:
            await client.close()

    asyncio.run(all_of_them())


def contend(dsn: str, owner: psycopg.Connection, seconds: float, least: int) -> list[tuple[Any, ...]]:
    """Let all processes contend; return each grant with a ticket, in the order of tokens, with the ticket's time.

    A slow machine gets up to a minute more for the least number of grants.
    """
    owner.execute(WATCHED)
    context = multiprocessing.get_context("spawn")
    everyone = context.Barrier(PROCESSES)
    enough = context.Event()
    crowds = [context.Process(target=crowd, args=(dsn, seed, seconds, everyone, enough)) for seed in range(PROCESSES)]
    for one in crowds:
        one.start()
    ends = time.monotonic() + seconds + 60
    time.sleep(seconds)
    while time.monotonic() < ends and len(owner.execute(GRANTS).fetchall()) < least:
        time.sleep(0.5)
    enough.set()
    for one in crowds:
        one.join(seconds + 120)
        assert one.exitcode == 0
    return owner.execute(GRANTS).fetchall()


def backwards(grants: list[tuple[Any, ...]]) -> int:
    return sum(after[1] < before[1] for before, after in itertools.pairwise(grants))


@pytest.mark.parametrize(
    ("seconds", "least"),
    [(6, 300), pytest.param(420, 100_000, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])],
)
def test_grants_come_in_the_order_of_tickets(dsn: str, owner: psycopg.Connection, seconds: float, least: int) -> None:
    grants = contend(dsn, owner, seconds, least)
    assert len(grants) >= least
    assert backwards(grants) == 0
    assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,), "an orphaned ticket is left"
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


def test_queue_order_run_catches_a_ticket_redeemed_out_of_turn(dsn: str, owner: psycopg.Connection) -> None:
    mutants.replace(
        owner, mutants.altered("10_try_acquire.sql", "AND o.number < try_acquire.ticket", "AND o.number < 0")
    )
    mutants.replace(
        owner,
        mutants.altered(
            "07_queue.sql", "    ORDER BY t.number\n    LIMIT 1;", "    ORDER BY t.number DESC\n    LIMIT 1;"
        ),
    )
    assert backwards(contend(dsn, owner, 3, 50)) > 0
