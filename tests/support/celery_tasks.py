"""The tasks of a Celery worker that tests start, with files as its broker."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from celery import Celery

import dblock
from dblock.integrations.celery import Locked, UniqueTask

FOLDER = Path(os.environ["CELERY_FOLDER"])

app = Celery("tests", broker="filesystem://", backend=f"file://{FOLDER / 'results'}")
app.conf.broker_transport_options = {
    "data_folder_in": str(FOLDER / "messages"),
    "data_folder_out": str(FOLDER / "messages"),
    "control_folder": str(FOLDER / "control"),
}
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)

locked = Locked(os.environ["DBLOCK_DSN"])


@app.task
@locked("job:{number}", ttl=1, on_busy="raise")
def hold(number: int) -> int:
    """Hold the lock as `hold_while` does."""
    return hold_while(number)


@app.task(base=UniqueTask)
@locked("job:{number}", unique="until_end")
def hold_alone(number: int) -> int:
    """Hold the lock as `hold_while` does. No such task is sent until this one ends."""
    return hold_while(number)


def hold_while(number: int) -> int:
    """Write the process into a file, and hold the lock while the file exists, at most a minute."""
    file = FOLDER / f"job-{number}"
    file.write_text(str(os.getpid()))
    ends = time.monotonic() + 60
    try:
        while file.exists() and time.monotonic() < ends:
            with contextlib.suppress(Exception):  # also in a task that catches everything, a loss arrives
                time.sleep(0.01)
    finally:
        file.unlink(missing_ok=True)
    return dblock.current_lease().token


@app.task(max_retries=0)
@locked("turn:{name}", retry_in=0.1)
def take_turn(name: str) -> list[float]:
    """Hold the lock for a moment, and return from when to when."""
    began = time.monotonic()
    time.sleep(0.25)
    return [began, time.monotonic()]
