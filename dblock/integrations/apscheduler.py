"""APScheduler: a job that every host schedules, and one host runs.

    add_once_job(scheduler, client, send_report, "report", cron="0 7 * * *", tz="Europe/Berlin")

Guarantee: each slot of the schedule runs once, on whichever host asks first. The database's clock and its ledger decide
that, see `Client.once`. The scheduler of each host only asks, every `poll` seconds. So a host with a wrong clock
neither runs a slot twice nor misses one.

It is made for APScheduler 3, whose job stores must not be shared between schedulers. Keep the job in memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from dblock._core.slots import SKIPPED
from dblock.async_client import AsyncClient
from dblock.client import Client
from dblock.errors import InvalidArgument


def add_once_job(
    scheduler: Any,
    client: Client | AsyncClient,
    function: Callable[[], Any],
    name: str,
    *,
    poll: float = 10.0,
    job: dict[str, Any] | None = None,
    **schedule: Any,
) -> Any:
    """Add the job to the scheduler of this host, and return it. A slot starts up to `poll` seconds after its time.

    `schedule` is what `Client.once` accepts: one of `every`, `cron` and `delay`, and the options. An AsyncIOScheduler
    needs an AsyncClient and a coroutine function, every other scheduler a Client and a function. `job` are more options
    of `add_job`.
    """
    if inspect.iscoroutinefunction(function) != isinstance(client, AsyncClient):
        raise InvalidArgument("A coroutine function needs an AsyncClient, and a function needs a Client.")
    if not poll > 0:
        raise InvalidArgument(f"poll is a number of seconds above 0; got {poll!r:.80}.")
    scheduled: Any = client.once(name, **schedule)(function)

    # APScheduler logs what a job raises. Its result is for listeners: None if this host did not run the slot.
    @functools.wraps(function)
    def ask() -> Any:
        result = scheduled()
        return None if result is SKIPPED else result

    @functools.wraps(function)
    async def ask_async() -> Any:
        result = await scheduled()
        return None if result is SKIPPED else result

    target = ask_async if isinstance(client, AsyncClient) else ask
    # One question at a time. The scheduler does not make up for questions that it has missed.
    options = {"id": name, "max_instances": 1, "coalesce": True, "misfire_grace_time": None} | (job or {})
    return scheduler.add_job(target, "interval", seconds=poll, **options)
