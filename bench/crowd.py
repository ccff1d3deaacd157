"""Measure how a crowd is served: many waiters for one lock, in a few processes.

    python bench/crowd.py [--waiters 200] [--processes 4]

Every process has one AsyncClient and its share of the waiters. When all waiters are in the queue, the lock is
released. Each waiter acquires it and releases it at once. The program prints how long it took to serve all of them,
whether they were served in the order of their tickets, the number of connections, and the memory per waiter.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

import dblock
from dblock.admin import schema
from dblock.embedded import Server


def memory() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as found:
        return int(found.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def wait(client: dblock.AsyncClient, served: list[int]) -> None:
    async with client.lock("crowd", ttl=60) as lease:
        served.append(lease.token)


async def crowd(dsn: str, waiters: int, barrier: Any, told: Any) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await client.lock("another").holder()
        before = memory()
        served: list[int] = []
        tasks = [asyncio.create_task(wait(client, served)) for _ in range(waiters)]
        while sum(place.has_ticket for place in client._runtime.listener.waiters._all()) < waiters:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        told.put((memory() - before) / waiters)
        await asyncio.to_thread(barrier.wait)
        await asyncio.gather(*tasks)
        told.put(len(served))


def run(dsn: str, waiters: int, barrier: Any, told: Any) -> None:
    asyncio.run(crowd(dsn, waiters, barrier, told))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how a crowd of waiters is served.")
    parser.add_argument("--waiters", type=int, default=200, help="number of waiters in all (default: 200)")
    parser.add_argument("--processes", type=int, default=4, help="number of processes (default: 4)")
    options = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / f"dblock-bench-{os.getpid()}"
    server = Server(folder, dies_with_us=True)
    try:
        server.start()
        schema.install(server.url)
        with psycopg.connect(server.url, autocommit=True) as owner:
            owner.execute("SET search_path TO dblock")
            watch_order(owner)
            return serve(server.url, owner, options.waiters, options.processes)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def watch_order(owner: psycopg.Connection) -> None:
    """Record the number of each ticket when it is redeemed."""
    owner.execute("CREATE TABLE public.redeemed (place bigserial, number bigint)")
    owner.execute(
        """
        CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN
            INSERT INTO public.redeemed (number) VALUES (OLD.number);
            RETURN OLD;
        END $$
        """
    )
    owner.execute("CREATE TRIGGER note BEFORE DELETE ON lock_tickets FOR EACH ROW EXECUTE FUNCTION public.note()")


def serve(dsn: str, owner: psycopg.Connection, waiters: int, processes: int) -> int:
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(processes + 1), context.Queue()
    with dblock.Client(dsn, presence=None) as client:
        held = client.lock("crowd", ttl=600).acquire()
        crowds = [
            context.Process(target=run, args=(dsn, waiters // processes, barrier, told)) for _ in range(processes)
        ]
        for one in crowds:
            one.start()
        each = [told.get(timeout=600) for _ in crowds]
        (connections,) = owner.execute(
            "SELECT count(*) - 3 FROM pg_stat_activity WHERE backend_type = 'client backend'"
        ).fetchone() or (0,)  # without the holder's two connections and this one
        barrier.wait()
        began = time.monotonic()
        held.release()
        served = sum(told.get(timeout=600) for _ in crowds)
        took = time.monotonic() - began
        for one in crowds:
            one.join()
    order = [number for (number,) in owner.execute("SELECT number FROM public.redeemed ORDER BY place").fetchall()]
    (left,) = owner.execute("SELECT count(*) FROM lock_tickets").fetchone() or (0,)
    print(f"{served} waiters in {processes} processes: all served within {took:.2f} s, {served / took:.0f} per second")
    print(f"served in the order of their tickets: {order == sorted(order)}, tickets left behind: {left}")
    print(f"connections: {connections / processes:.1f} per process")
    print(f"memory: {max(each) / 1024:.1f} kB per waiter")
    return 0 if served == waiters and order == sorted(order) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
