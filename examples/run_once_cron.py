"""Run a nightly job once per day, although cron starts it on every machine, with nothing but a lock and a fence.

A schedule does this for you, with a ledger and an alarm: `dblock once`, or `client.once` in schedule_on_hosts.py.

A lock alone lets one machine work at a time. If the job is short, the second machine gets the lock when the first has
finished, and runs the job again. So the job also records under the lock that today's run is done.

    DBLOCK_DSN=postgresql://… python examples/run_once_cron.py     # the first run does the work
    DBLOCK_DSN=postgresql://… python examples/run_once_cron.py     # every other run today does nothing

It insists on DBLOCK_DSN, because cron starts jobs with few variables, and each machine would otherwise use a database
of its own. To try it on one machine: DBLOCK_DSN=$(dblock embedded url) python examples/run_once_cron.py
"""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone

import dblock
import fenced_store
from dblock.admin import schema


def build_report() -> int:
    """Do the work; return how many rows the report has."""
    return 1234


def run_nightly(client: dblock.Client, store: fenced_store.FencedStore) -> str:
    today = datetime.now(timezone.utc).date().isoformat()
    lease = client.lock("example:nightly-report", ttl=30).try_acquire()
    if lease is None:
        return "Another machine is running the report."
    with lease:
        run = f"example:nightly-report:{today}"
        if store.get(run) is not None:
            return "Today's report was already built."
        rows = build_report()
        # If this process was paused past its lease, the store refuses this write.
        store.put(run, {"rows": rows}, fence=lease)
    return f"Built today's report: {rows} rows."


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or sys.exit("Set DBLOCK_DSN to the database that all machines share.")
    schema.install(dsn)
    fenced_store.install(dsn)
    with dblock.Client(dsn) as client, fenced_store.FencedStore(dsn) as store:
        print(run_nightly(client, store))


if __name__ == "__main__":
    main()
