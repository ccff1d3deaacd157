"""The Postgres of one test run: shared by all processes of the run, and gone with the last of them.

Guarantee: a run has one server, however many processes ask for it at once. Nothing of the server stays, however these
processes end.

The run has a folder. Each process that uses the server keeps the pipe `users` in that folder open. The first process
starts the server, and a guardian (dblock.testing.guardian) that cleans up when all processes have closed the pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dblock.testing import guardian

SETTINGS = {
    # The data is thrown away, so nothing has to reach a disk.
    "fsync": "off",
    "autovacuum": "off",
    "max_connections": "400",
    # Otherwise each session loads it again.
    "shared_preload_libraries": "plpgsql",
}

DATABASE = "dblock_test"

GONE_WITHIN = 15.0


def new_folder() -> Path:
    """Return the path of a folder that does not exist yet, in memory if the system has a folder for that."""
    memory = Path("/dev/shm")  # noqa: S108 - the folder gets a name of its own, and is private
    suitable = (
        os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free > 2**30
        # A server may have to keep a copy of its programs there.
        and not os.statvfs(memory).f_flag & getattr(os, "ST_NOEXEC", 8)
    )
    return (memory if suitable else Path(tempfile.gettempdir())) / f"dblock-pytest-{uuid.uuid4().hex[:12]}"


class SharedServer:
    """The server of a run, as one of its processes sees it."""

    def __init__(self, url: str, pipe: int) -> None:
        self._pipe = pipe
        self.url = url

    def clone(self, name: str) -> str:
        """Create a database with both schemas installed, and return its DSN."""
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.url, autocommit=True) as connection:
            statement = "CREATE DATABASE {} TEMPLATE {}"
            connection.execute(sql.SQL(statement).format(sql.Identifier(name), sql.Identifier(DATABASE)))
        return self.dsn(name)

    def dsn(self, name: str = DATABASE) -> str:
        """Return the DSN of a database of this server."""
        return self.url.replace("/postgres?", f"/{name}?")

    def leave(self) -> None:
        """Stop using the server. The guardian stops it when all processes have left."""
        if self in _joined:
            _joined.remove(self)
            os.close(self._pipe)


_joined: list[SharedServer] = []
"""The servers that this process uses."""


def join(folder: Path) -> SharedServer:
    """Return the server of the run with this folder, after starting it if it is not running."""
    from dblock.embedded import Server

    with _guarded(folder):
        users = folder / "users"
        first = not users.exists()
        if first:
            os.mkfifo(users, 0o600)
        # For reading too, because a pipe without a reader cannot be opened for writing at once.
        pipe = os.open(users, os.O_RDWR | os.O_NONBLOCK)
        try:
            server = Server(folder, settings=SETTINGS)
            if first:
                _start_guardian(folder)
            if not (folder / "ready").exists():
                _start(server)
                (folder / "ready").touch()
        except BaseException:
            os.close(pipe)
            raise
    joined = SharedServer(server.url, pipe)
    _joined.append(joined)
    return joined


def wait_until_gone(folder: Path) -> None:
    """Leave all servers of this process, and wait until the guardian has removed the folder, if there is one."""
    for server in list(_joined):
        server.leave()
    until = time.monotonic() + GONE_WITHIN
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.01)


@contextlib.contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    """Keep every other process, and the guardian, from changing the folder during the block."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)
        try:
            guard = open(folder / "guard", "ab")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            continue  # the guardian of earlier processes has just removed the folder
        with guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(guard.fileno()), (folder / "guard").stat())
            except FileNotFoundError:
                same = False
            if same:
                yield
                return


def _start_guardian(folder: Path) -> None:
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(guardian.__file__), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # so that Ctrl-C does not reach it
    ).returncode = 0  # it outlives this process, so Python need not warn of that


def _start(server: Any) -> None:
    import psycopg

    statements: list[str] = []
    # The imports for the statements take as long as the creation of the data folder, so both run at the same time.
    writer = threading.Thread(target=lambda: statements.append(_statements()), daemon=True)
    writer.start()
    server.start()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}".encode())
    writer.join()
    if not statements:
        statements.append(_statements())  # raises the error here
    with psycopg.connect(server.url.replace("/postgres?", f"/{DATABASE}?"), autocommit=True) as connection:
        connection.execute(statements[0].encode())


def _statements() -> str:
    import fenced_store
    from dblock.admin import schema

    return f"{schema.ddl()}\n;\n{fenced_store.ddl()}"
