"""APScheduler: every host schedules the job, and each slot runs on one of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

import dblock
from dblock.integrations.apscheduler import add_once_job
from tests.support.eventually import eventually

pytestmark = [pytest.mark.second_stage]

HOST = """
import sys, time
import dblock
from apscheduler.schedulers.blocking import BlockingScheduler
from dblock.integrations.apscheduler import add_once_job

def report():
    print(dblock.current_run().slot.isoformat(), flush=True)
    time.sleep(60)

scheduler = BlockingScheduler(timezone="UTC")
add_once_job(scheduler, dblock.Client(sys.argv[1]), report, "report", every=1, poll=0.2, delivery="at-least-once")
scheduler.start()
"""


@pytest.fixture
def hosts(dsn: str) -> Iterator[list[tuple[BackgroundScheduler, dblock.Client]]]:
    """The schedulers and clients of three hosts."""
    made = [(BackgroundScheduler(timezone="UTC"), dblock.Client(dsn)) for _ in range(3)]
    for scheduler, _ in made:
        scheduler.start()
    yield made
    for scheduler, client in made:
        scheduler.shutdown()
        client.close()


def test_each_slot_runs_on_one_of_three_hosts(hosts: list[Any], owner: psycopg.Connection) -> None:
    ran: list[Any] = []

    def report() -> None:
        ran.append(dblock.current_run().slot)

    for scheduler, client in hosts:
        add_once_job(scheduler, client, report, "report", every=1, poll=0.2)
    eventually(lambda: len(ran) >= 3)
    for scheduler, _ in hosts:
        scheduler.pause()
    time.sleep(0.3)
    assert len(set(ran)) == len(ran), "a slot ran twice"
    outcomes = owner.execute("SELECT outcome FROM unnest(%s::timestamptz[]) s, slot_outcome('report', s)", [ran[:-1]])
    assert {*outcomes} == {("succeeded",)}


def test_job_returns_none_on_hosts_that_do_not_run_the_slot(hosts: list[Any]) -> None:
    returned: list[Any] = []
    for scheduler, client in hosts:
        scheduler.add_listener(lambda event: returned.append(event.retval), EVENT_JOB_EXECUTED)
        add_once_job(scheduler, client, lambda: "sent", "report", every=1, poll=0.2)
    eventually(lambda: {*returned} >= {"sent", None})
    assert {*returned} == {"sent", None}


def test_slot_of_a_killed_host_runs_again_on_another(hosts: list[Any], dsn: str) -> None:
    killed = subprocess.Popen([sys.executable, "-c", HOST, dsn], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    slot = datetime.fromisoformat(killed.stdout.readline().strip())
    ran: list[datetime] = []
    scheduler, client = hosts[0]
    add_once_job(
        scheduler,
        client,
        lambda: ran.append(dblock.current_run().slot),
        "report",
        every=1,
        poll=0.2,
        delivery="at-least-once",
    )
    time.sleep(0.5)
    assert slot not in ran, "its host is alive"
    killed.kill()
    killed.communicate()
    eventually(lambda: slot in ran)


async def test_coroutine_job_runs_in_an_asyncio_scheduler(dsn: str) -> None:
    ran = asyncio.Event()

    async def report() -> None:
        ran.set()

    async with dblock.AsyncClient(dsn) as client:
        scheduler = AsyncIOScheduler(timezone="UTC")
        scheduler.start()
        add_once_job(scheduler, client, report, "report", every=1, poll=0.2)
        await asyncio.wait_for(ran.wait(), 60)
        scheduler.shutdown()


def test_job_of_the_wrong_kind_is_refused(hosts: list[Any]) -> None:
    scheduler, client = hosts[0]

    async def report() -> None: ...

    with pytest.raises(dblock.InvalidArgument, match="needs an AsyncClient"):
        add_once_job(scheduler, client, report, "report", every=60)
    with pytest.raises(dblock.InvalidArgument, match="poll"):
        add_once_job(scheduler, client, lambda: None, "report", every=60, poll=0)
