"""Share work between asyncio workers: each customer is synchronised by one worker at a time.

Every worker walks over all customers. It skips a customer that another worker holds, and a customer that is already
done. Start the program on several machines, and they share the work too. All workers of a process share one client.

    python examples/worker_queue_async.py
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid

import dblock
import fenced_store
from dblock import embedded
from dblock.admin import schema

CUSTOMERS = ["ada", "bob", "cleo", "dan", "eve", "fay"]
WORKERS = 3


async def work(run: str, client: dblock.AsyncClient, store: fenced_store.AsyncFencedStore) -> int:
    """Synchronise whatever is left to do; return how many customers this worker did."""
    done = 0
    for customer in random.sample(CUSTOMERS, len(CUSTOMERS)):
        lease = await client.lock(f"example:customer:{customer}", ttl=10).try_acquire()
        if lease is None:
            continue  # another worker is busy with this customer
        async with lease:  # cancels the body if the lease is lost
            last = await store.get(f"example:sync:{customer}")
            if last is None or last.value != run:
                await asyncio.sleep(0.01)  # the work itself
                await store.put(f"example:sync:{customer}", run, fence=lease)
                done += 1
    return done


async def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    fenced_store.install(dsn)
    run = uuid.uuid4().hex
    async with dblock.AsyncClient(dsn) as client, fenced_store.AsyncFencedStore(dsn) as store:
        done = await asyncio.gather(*(work(run, client, store) for _ in range(WORKERS)))
    print(f"{WORKERS} workers synchronised {sum(done)} customers, each of them once")


if __name__ == "__main__":
    asyncio.run(main())
