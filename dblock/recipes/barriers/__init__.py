"""Barriers and latches: parties that continue together, and waiters that continue once enough is done.

Guarantee: a barrier trips once per generation, in one durable transaction, with exactly as many parties as it has. Each
of these parties returns its number, however often a reply is lost. A party that has left, timed out or died before the
trip is not among them. A latch opens once enough was counted down, each call counts once, and it stays open.

The database decides (`dblock/sql/barriers/`): which parties are there at this moment, by the heartbeat and the presence
of their clients, and when that is enough. This process only waits. A notification wakes it, and the client's heartbeat
finds out within a second if the notification was lost. After a crash or a failover of the database, the parties arrive
again under the same attempts.

- `flows`: the calls, and how a waiter waits, shared by both kinds of client.
- `barrier`, `latch`: the objects for threads and for asyncio.
"""

from dblock.recipes.barriers.barrier import AsyncBarrier, Barrier
from dblock.recipes.barriers.latch import AsyncLatch, Latch

__all__ = ["AsyncBarrier", "AsyncLatch", "Barrier", "Latch"]
