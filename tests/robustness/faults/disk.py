"""Run out of space: the disk is full, or files may not grow. The server crashes, and recovers when there is space."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psycopg

from dblock.embedded import Server
from dblock.embedded.account import account_for
from dblock.embedded.processes import pids_working_in
from tests.robustness.faults import Fault
from tests.robustness.faults.server import kill_all_processes

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

MEBIBYTES = 256
"""Size of the small disk: enough for a server and its log, and soon full."""


HANGS_AFTER = 5.0
"""Seconds that the server has to recover by itself once there is space."""


def write_log(env: Environment, seconds: float) -> int:
    """Make the server write new log files for this time; return how often it succeeded."""
    until, times = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        try:
            with psycopg.connect(env.direct, autocommit=True) as owner:
                while time.monotonic() < until:
                    owner.execute("SELECT pg_logical_emit_message(true, 'fill', repeat('x', 200000)), pg_switch_wal()")
                    times += 1
        except psycopg.Error:
            time.sleep(0.02)
    return times


def recover(server: Server) -> bool:
    """Wait until the server replies; restart it if it has given up or hangs. Return whether a restart was needed."""
    waits_until, started = time.monotonic() + HANGS_AFTER, False
    while not server.answers():
        if not pids_working_in(server.data) or time.monotonic() > waits_until:
            # An old process may still wait for something, or have been forked with the limit. A new one does not.
            kill_all_processes(server)
            server.stop()
            server.start()
            started = True
        time.sleep(0.02)
    return started


def _enter_mount_namespace() -> None:
    """Enter a mount namespace: only this process and its children see new mounts, which end with the last of them."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "cannot create a mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def crashes(server: Server) -> int:
    """Return the number of PANIC messages in the server's log."""
    return server.log.read_text(errors="replace").count("PANIC:")


class DiskFull(Fault):
    """Fill the disk for a while, for tables and log alike."""

    name = "disk-full"
    settings = {"min_wal_size": "32MB", "max_wal_size": "64MB", "fsync": "off"}  # noqa: RUF012
    afterwards = 3.0

    @classmethod
    def missing(cls) -> str | None:
        if os.geteuid() != 0:
            return "mounting a small disk needs root"
        if not (shutil.which("mount") and shutil.which("unshare")):
            return "the programs that mount a small disk are not installed (Debian: mount, util-linux)"
        tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
        return None if tried.returncode == 0 else "mounting is not allowed on this machine, as in most containers"

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        """Move the server to a small disk."""
        server = env.server
        server.stop()
        aside = server.data.with_name("aside")
        server.data.rename(aside)
        owner = aside.stat()
        server.data.mkdir(mode=0o700)
        _enter_mount_namespace()
        options = f"size={MEBIBYTES}m,mode=0700,uid={owner.st_uid},gid={owner.st_gid}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(server.data)], check=True)
        try:
            subprocess.run(["cp", "-a", f"{aside}/.", str(server.data)], check=True)
            server.start()
            yield
        finally:
            try:
                server.stop()
            finally:
                # Always, because a mount would outlive this process. Lazily, in case a process still uses it.
                subprocess.run(["umount", "--lazy", str(server.data)], check=True)
            server.data.rmdir()
            aside.rename(server.data)

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        server, before = env.server, crashes(env.server)
        ballast = server.data / "ballast"
        with open(ballast, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**16))
        written = write_log(env, rng.uniform(0.2, 0.8))
        ballast.unlink()
        started = recover(server)
        return {"crashes": crashes(server) - before, "started": started, "written": written}


class FilesCannotGrow(Fault):
    """Limit the length of the server's files for a while, as a quota or a resource limit does."""

    name = "files-cannot-grow"
    settings = {"min_wal_size": "32MB", "max_wal_size": "64MB", "fsync": "off"}  # noqa: RUF012
    afterwards = 3.0

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("prlimit") else "prlimit is not installed (Debian: util-linux)"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        server, before = env.server, crashes(env.server)
        longest = rng.choice([2**15, 2**20, 2**23])
        _limit(server, str(longest))
        written = write_log(env, rng.uniform(0.2, 0.8))
        _limit(server, "unlimited")
        started = recover(server)
        return {"crashes": crashes(server) - before, "started": started, "written": written, "longest": longest}


def _limit(server: Server, longest: str) -> None:
    """Limit the file length of all server processes, which only the server's own account may do."""
    script = 'longest=$1; shift; for pid; do prlimit --pid "$pid" --fsize="$longest:" 2>/dev/null; done; true'
    # A second time for processes that were being forked during the first.
    for _ in range(2):
        subprocess.run(
            ["/bin/sh", "-c", script, "sh", longest, *map(str, pids_working_in(server.data))],
            check=True,
            cwd="/",
            **account_for(server.data).popen_options(),
        )
