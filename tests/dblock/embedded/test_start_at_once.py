"""Ten processes start the server and install the schema at once: one server, one schema, no error."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from dblock import cli
from dblock.embedded import Server
from dblock.embedded.processes import pids_working_in
from tests.support.servers import memory, new_folder

PROCESSES = 10


def start_and_install(folder: str) -> tuple[int, int, str]:
    """Run the two commands as a shell would, and return their exit codes and their standard error."""
    os.environ["DBLOCK_HOME"] = folder
    for variable in ("DBLOCK_DSN", "DBLOCK_POSTGRES"):
        os.environ.pop(variable, None)
    with open(os.devnull, "w") as nowhere, _stderr(f"{folder}.{os.getpid()}.err") as said:
        sys.stdout = nowhere
        codes = cli.main(["embedded", "start"]), cli.main(["install", "--embedded"])
    return (*codes, said.read_text())


@contextmanager
def _stderr(path: str) -> Iterator[Path]:
    with open(path, "w") as file:
        sys.stderr = file
        yield Path(path)


@pytest.mark.second_stage
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.nightly)])
def test_ten_processes_at_once_make_one_server_and_one_schema(rounds: int) -> None:
    # Forked from a clean process that has imported the command line, so that all ten start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dblock.cli", "dblock.admin.schema", "alembic.command", __name__])
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        for number in range(rounds):
            folder = new_folder(memory())
            server = Server(folder)
            try:
                done = list(processes.map(start_and_install, [str(folder)] * PROCESSES))
                assert [codes for *codes, _ in done] == [[0, 0]] * PROCESSES, (number, done)
                pid = server.pid
                assert pid is not None
                assert _postmasters(server) == {pid}
                with psycopg.connect(server.url) as connection:
                    rows = connection.execute("SELECT version_num FROM dblock.installed_revision").fetchall()
                    assert rows == [("0001",)]
            finally:
                server.stop()
                shutil.rmtree(folder, ignore_errors=True)
                for file in folder.parent.glob(f"{folder.name}.*.err"):
                    file.unlink()


def _postmasters(server: Server) -> set[int]:
    """Return the processes in the data folder whose parent is not one of them."""
    parents: dict[int, int] = {}
    for pid in pids_working_in(server.data):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a session that has ended since the listing
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return {pid for pid, parent in parents.items() if parent not in parents}
