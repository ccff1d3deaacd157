"""Celery tasks under a lock: two workers, and never two reports of one customer at the same time.

    DBLOCK_DSN=postgresql://… celery -A examples.celery_locks worker           # as a worker
    python examples/celery_locks.py                                            # a worker and its callers

The messages go through files, so that the example needs no broker. Needs celery.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from celery import Celery

import dblock
from dblock import embedded
from dblock.admin import schema
from dblock.integrations.celery import Locked, UniqueTask

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.setdefault("CELERY_FOLDER", tempfile.mkdtemp(prefix="celery-")))
for name in ("messages", "results", "control"):
    (FOLDER / name).mkdir(exist_ok=True)

app = Celery("reports", broker="filesystem://", backend=f"file://{FOLDER / 'results'}")
app.conf.broker_transport_options = {
    "data_folder_in": str(FOLDER / "messages"),
    "data_folder_out": str(FOLDER / "messages"),
    "control_folder": str(FOLDER / "control"),
}
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)

locked = Locked(os.environ.get("DBLOCK_DSN") or embedded.start().url)


@app.task(name="reports.build", max_retries=0)
@locked("report:{customer}", retry_in=0.2)
def build_report(customer: str) -> list[float]:
    began = time.monotonic()
    time.sleep(0.3)  # the work; pass the token to every resource that it writes to
    return [began, time.monotonic(), dblock.current_lease().token]


@app.task(name="reports.refresh_cache")
@locked("cache", on_busy="skip")
def refresh_cache() -> str:
    time.sleep(0.5)
    return "refreshed"


@app.task(name="reports.refresh_totals", base=UniqueTask)
@locked("totals:{customer}", unique="until_start")
def refresh_totals(customer: str) -> str:
    return f"totals of {customer}"


def main() -> None:
    schema.install(os.environ.get("DBLOCK_DSN") or embedded.start().url)
    sent = [refresh_totals.delay("ada") for _ in range(5)]
    command = [sys.executable, "-m", "celery", "--quiet", "-A", "examples.celery_locks", "worker", "--concurrency", "2"]
    command += ["--loglevel", "error", "--without-mingle"]
    worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        reports = [build_report.delay("ada") for _ in range(3)]
        runs = sorted(report.get(timeout=60) for report in reports)
        apart = all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
        print("three reports of one customer ran one after the other:", apart)
        print("each under a higher token:", [run[2] for run in runs] == sorted({run[2] for run in runs}))
        refreshed = [refresh_cache.delay() for _ in range(2)]
        print("five sends of a unique task:", len({one.id for one in sent}), "message,", sent[4].get(timeout=60))
        print("two refreshes at once:", sorted(str(one.get(timeout=60)) for one in refreshed))
    finally:
        worker.terminate()
        worker.wait()
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
