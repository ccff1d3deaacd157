"""Celery: tasks under a lock, in a worker with several processes. The lock neither expires early nor sticks."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery

import dblock
from dblock.integrations.celery import Locked
from tests.support import isolation
from tests.support.eventually import eventually
from tests.support.machine import before_long, measured, not_judged, too_late_to_renew
from tests.support.servers import private_server

pytestmark = [pytest.mark.second_stage]

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path]]:
    """A worker of three processes: its tasks, its database, and its folder."""
    folder = tmp_path_factory.mktemp("celery")
    for name in ("messages", "results", "control"):
        (folder / name).mkdir()
    patched = pytest.MonkeyPatch()
    with private_server({"fsync": "off"}, in_memory=True, installed=True) as server, patched.context() as patch:
        patch.setenv("CELERY_FOLDER", str(folder))
        patch.setenv("DBLOCK_DSN", server.url)
        tasks = importlib.import_module("tests.support.celery_tasks")
        arguments = ["-A", "tests.support.celery_tasks", "worker", "--concurrency", "3", "--loglevel", "info"]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "--quiet", *arguments, "--without-mingle"],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield tasks, server.url, folder
        finally:
            process.terminate()
            process.wait(30)


def wait_for(path: Path) -> str:
    """Return what a task has written into a file."""
    written: str = eventually(
        lambda: path.exists() and path.read_text(), lambda: f"{path.name}: {(path.parent / 'log').read_text()}"
    )
    return written


def wait_for_presence(dsn: str, name: str) -> None:
    """Return once the server knows which session the holder of a lock depends on."""
    with psycopg.connect(dsn, autocommit=True) as owner:
        query = "SELECT FROM dblock.distributed_locks WHERE name = %s AND presence IS NOT NULL"
        eventually(lambda: owner.execute(query, [name]).fetchone() is not None, "the presence of the holder")


def failure(result: Any) -> str:
    """Wait for a task that fails, and return its traceback."""
    result.get(timeout=40, propagate=False)
    assert result.failed()
    return str(result.traceback)


def test_task_that_outlasts_its_ttl_keeps_its_lock_and_then_frees_it(worker: tuple[Any, str, Path]) -> None:
    tasks, dsn, folder = worker
    with dblock.Client(dsn) as client, measured() as lateness:
        running = tasks.hold.delay(1)
        wait_for(folder / "job-1")
        time.sleep(1.8)
        busy = tasks.hold.delay(1)
        eventually(lambda: busy.ready() or running.ready(), "the end of a task")
        late = too_late_to_renew(lateness(), 1)
        if late and not busy.ready():
            wait_for(folder / "job-1")  # the other task has the lock
            (folder / "job-1").unlink()
            not_judged("to renew")
        assert "LockTimeout" in failure(busy)
        (folder / "job-1").unlink(missing_ok=True)
        token = running.get(timeout=40, propagate=False)
        if running.failed() and (late or too_late_to_renew(lateness(), 1)):
            not_judged("to renew")
        lease = client.lock("job:1").try_acquire()
        assert lease is not None
        assert lease.token > token


def test_lock_of_a_killed_worker_process_does_not_stick(worker: tuple[Any, str, Path]) -> None:
    tasks, dsn, folder = worker
    with dblock.Client(dsn) as client:
        tasks.hold.delay(2)
        os.kill(int(wait_for(folder / "job-2")), signal.SIGKILL)
        with before_long(2):
            client.lock("job:2").acquire(timeout=30).release()


def test_unique_task_of_a_killed_worker_process_can_be_sent_again(worker: tuple[Any, str, Path]) -> None:
    tasks, dsn, folder = worker
    with isolation.kept():  # the connection of the sender stays open
        running = tasks.hold_alone.delay(4)
    process = int(wait_for(folder / "job-4"))
    wait_for_presence(dsn, "job:4")
    assert tasks.hold_alone.delay(4).id == running.id
    os.kill(process, signal.SIGKILL)
    (folder / "job-4").unlink()
    with before_long(5):  # its lease would last for 30 s
        # The server has yet to notice that the session has ended.
        (again,) = eventually(lambda: (sent := tasks.hold_alone.delay(4)).id != running.id and (sent,), "a new task")
    wait_for(folder / "job-4")
    (folder / "job-4").unlink()
    assert again.get(timeout=40)


def test_task_whose_lease_is_lost_is_interrupted_and_fails(worker: tuple[Any, str, Path]) -> None:
    tasks, dsn, folder = worker
    running = tasks.hold.delay(3)
    wait_for(folder / "job-3")
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute("SELECT dblock.force_release('job:3', token) FROM dblock.holder('job:3')")
    with before_long(5):
        assert "LeaseLost" in failure(running)
    eventually(lambda: not (folder / "job-3").exists(), "its `finally` has run")


def test_busy_tasks_are_sent_again_and_use_up_no_retries(worker: tuple[Any, str, Path]) -> None:
    tasks, _, _ = worker
    runs = sorted(one.get(timeout=40) for one in [tasks.take_turn.delay("a") for _ in range(4)])
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(runs))


def test_busy_task_that_no_worker_runs_raises_and_is_not_sent_again(dsn: str) -> None:
    app = Celery("direct", broker="memory://")
    locked = Locked(dsn)

    @locked("report:{customer}")
    def report(customer: str) -> str:
        return dblock.current_lease().name

    build = app.task(report)
    assert build("ada") == build.apply(["ada"]).get() == "report:ada"
    with locked.client.lock("report:ada"):
        with pytest.raises(dblock.LockTimeout, match="report:ada"):
            build("ada")
        with pytest.raises(dblock.LockTimeout, match="report:ada"):
            build.apply(["ada"]).get()
    locked.client.close()


def test_task_with_a_wrong_placeholder_fails_at_import(dsn: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match="customre"):

        @Locked(dsn)("report:{customre}")
        def build(customer: str) -> None: ...


@pytest.mark.parametrize("wrong", [{"on_busy": "never"}, {"retry_in": 0}, {"on_busy": "skip", "timeout": 3}])
def test_task_with_wrong_options_fails_at_import(dsn: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(dblock.InvalidArgument):
        Locked(dsn)("report", **wrong)(lambda: None)


def test_decorator_without_a_name_or_above_the_task_fails_at_import(dsn: str) -> None:
    def build(customer: str) -> None: ...

    locked, app = Locked(dsn), Celery("reports", broker="memory://")
    with pytest.raises(dblock.InvalidArgument, match="needs the name of a lock"):
        locked(build)  # type: ignore[arg-type]
    with pytest.raises(dblock.InvalidArgument, match="Put @locked below @app.task"):
        locked("report:{customer}")(app.task(build))
    with pytest.raises(dblock.InvalidArgument, match="Put @locked below @app.task"):
        locked("report:{customer}")(app.task(build, lazy=False))
