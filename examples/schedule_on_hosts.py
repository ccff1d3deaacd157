"""Run a slot of a schedule on one of three hosts, and on another one because the first host is killed.

Three processes play three hosts, and all of them call the same scheduled function. Host 1 gets the slot and is killed.
With at-least-once the slot runs again, on host 2, under a higher token. Host 3 comes later and skips the slot.

    python examples/schedule_on_hosts.py

A schedule with `delay` is due when it is registered, so the example need not wait for a full hour. From the crontab of
each host you would use the command line:

    dblock once report --cron "0 * * * *" --at-least-once -- ./report.sh
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psycopg

import dblock
from dblock import embedded
from dblock.admin import schema

NAME = "example:report"


def host(dsn: str, number: int) -> None:
    """Call the scheduled function as one host does, until its slot has an outcome."""
    with dblock.Client(dsn, holder=f"host-{number}") as client:

        @client.once(NAME, delay=3600, delivery="at-least-once", ttl=5)
        def report() -> str:
            run = dblock.current_run()
            print(f"host-{number} runs the slot, run {run.number}", flush=True)
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return f"host-{number} has built the report"

        result = report()
        while result is dblock.SKIPPED and number == 2:  # until the database knows that host 1 is dead
            time.sleep(0.1)
            result = report()
        print(f"host-{number} skips the slot" if result is dblock.SKIPPED else result, flush=True)


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT dblock.delete_schedule(%s)", [NAME])  # what an earlier run of this example left
        for number in (1, 2, 3):
            subprocess.run([sys.executable, __file__, dsn, str(number)], check=number != 1)
        ledger = connection.execute("SELECT runs FROM dblock.list_schedules(%s)", [NAME]).fetchone()
    for run in reversed(ledger[0] if ledger else []):
        print("ledger:", run["holder"], run["outcome"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        host(sys.argv[1], int(sys.argv[2]))
    else:
        main()
