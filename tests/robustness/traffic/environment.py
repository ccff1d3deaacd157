"""Set up the environment of one run: a server, any proxy in front of it, and the traffic processes that faults strike.

An environment is created for one run and removed with it. Everything in it is real: Postgres, processes, sockets,
signals.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

import fenced_store
from dblock.admin import schema
from dblock.embedded import Server
from tests.robustness import mutations
from tests.robustness.history.record import History, Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import WorkerConfig
from tests.support.servers import private_server
from tests.support.warm_start import Program

ROOT = Path(__file__).parents[3]

WITNESS = """
CREATE TABLE public.witness (number bigserial, event text, name text, token bigint, ticket bigint);
CREATE FUNCTION public.note_grant() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.witness (event, name, token, ticket)
    VALUES ('granted', NEW.name, NEW.token, NULLIF(NEW.last_served_ticket, OLD.last_served_ticket));
    RETURN NULL;
END $$;
CREATE TRIGGER witness AFTER UPDATE ON dblock.distributed_locks FOR EACH ROW
    WHEN (NEW.token > 0 AND NEW.token <> OLD.token) EXECUTE FUNCTION public.note_grant();
"""
"""SQL that makes the server record its grants, each in the transaction and under the row lock of the grant."""


class Environment:
    """A server and the traffic processes."""

    def __init__(self, server: Server, folder: Path, workload: str, seed: int, bug: str | None = None) -> None:
        self.server = server
        self.folder = folder
        """The folder of the histories."""
        self.workload = workload
        self.bug = bug
        self.seed = seed
        self.options: dict[str, Any] = {}
        """The options of the workload."""
        self.dsn = server.url
        """The DSN of the traffic."""
        self.direct = server.url
        """The DSN that bypasses every proxy in front of the server."""
        self.components: dict[str, Any] = {}
        """The other components of the environment by name: a proxy, a standby."""
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self.recorder = Recorder(folder / "runner.jsonl")
        self._started = 0

    def start_worker(self, wait: bool = True) -> str:
        """Start one more traffic process and return its name. Every second process is asynchronous."""
        name = f"w{self._started}"
        config = WorkerConfig(
            self.workload,
            self.dsn,
            self.direct,
            str(self.folder / f"{name}.jsonl"),
            self.seed * 1000 + self._started,
            kind=("sync", "async")[self._started % 2],
            options=self.options,
            bug=self.bug,
        )
        self._started += 1
        with open(self.folder / f"{name}.err", "w") as errors:
            self.workers[name] = Program(
                [sys.executable, "-m", "tests.robustness.traffic.worker", json.dumps(config._asdict())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )
        if wait:
            self.wait_for(name)
        return name

    def wait_for(self, name: str) -> None:
        """Return once this process is running its workload."""
        stdout = self.workers[name].stdout
        assert stdout is not None
        assert stdout.readline() == "ready\n", (self.folder / f"{name}.err").read_text()

    def stop_workers(self) -> None:
        """Stop all traffic processes, each after its current step."""
        for process in self.workers.values():
            assert process.stdin is not None
            process.stdin.close()
        for name, process in self.workers.items():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.recorder.record("trouble", name, what="the process did not exit")
            assert process.stdout is not None
            process.stdout.close()

    def collect_history(self) -> History:
        """Record the final state of the server, and return the history of the run."""
        workloads.named(self.workload).record_final_state(self.direct, self.recorder, self.options)
        with psycopg.connect(self.direct) as connection:
            for name, token in connection.execute("SELECT name, token FROM dblock.distributed_locks").fetchall():
                self.recorder.record("newest", name, token=token)
            recorded = connection.execute(
                "SELECT number, name, token, ticket FROM public.witness ORDER BY 1"
            ).fetchall()
        for number, name, token, ticket in recorded:
            self.recorder.record("granted", name, order=number, token=token, ticket=ticket)
        return History.read(self.folder)


@contextmanager
def start_environment(
    workload: str, folder: Path, seed: int, *, settings: dict[str, str], bug: str | None = None, in_memory: bool = False
) -> Iterator[Environment]:
    """Create an environment that has only a server, prepared for the workload."""
    with ExitStack() as stack:
        server = stack.enter_context(private_server(settings, in_memory, installed=True))
        stack.callback(shutil.copyfile, server.log, folder / "server.log")
        prepare_database(server.url, workload, bug)
        env = Environment(server, folder, workload, seed, bug)
        env.options.update(stack.enter_context(workloads.named(workload).set_up(server.url, folder)))
        stack.callback(env.recorder.close)
        stack.callback(_end, env)
        yield env


def prepare_database(dsn: str, workload: str, bug: str | None) -> None:
    """Install both schemas, the server's own record of grants, the tables of the workload, and the bug."""
    schema.install(dsn)
    fenced_store.install(dsn)
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(WITNESS)
    workloads.named(workload).prepare(dsn)
    mutations.insert_into_database(bug, dsn)


def _end(env: Environment) -> None:
    for process in env.workers.values():
        if process.poll() is None:
            process.kill()
            process.wait()
