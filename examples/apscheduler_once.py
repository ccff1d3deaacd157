"""APScheduler on two hosts: both schedule the job, and each slot of the schedule runs on one of them.

    python examples/apscheduler_once.py              # on $DBLOCK_DSN, or on the embedded Postgres

Needs apscheduler, version 3.
"""

from __future__ import annotations

import os
import time
from datetime import datetime

from apscheduler.schedulers.background import BackgroundScheduler

import dblock
from dblock import embedded
from dblock.admin import schema
from dblock.integrations.apscheduler import add_once_job

DSN = os.environ.get("DBLOCK_DSN") or embedded.start().url

slots: list[datetime] = []


def send_report() -> None:
    slots.append(dblock.current_run().slot)


def main() -> None:
    schema.install(DSN)
    hosts = [BackgroundScheduler(timezone="UTC") for _ in range(2)]
    clients = [dblock.Client(DSN, holder=f"host-{number}") for number in range(2)]
    for host, client in zip(hosts, clients, strict=True):
        add_once_job(host, client, send_report, "example-report", every=1, poll=0.2)
        host.start()
    while len(slots) < 3:
        time.sleep(0.1)
    for host, client in zip(hosts, clients, strict=True):
        host.shutdown()
        client.close()
    print("three slots, each on one of two hosts:", len(slots) == len(set(slots)))


if __name__ == "__main__":
    main()
