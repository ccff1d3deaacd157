"""Run a standby of an embedded server, made with pg_basebackup from the same binaries."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from dblock.embedded import Server
from dblock.embedded.account import account_for
from dblock.embedded.binaries import find
from tests.support.eventually import eventually
from tests.support.servers import IN_FOLDER, new_folder

PATIENCE = 30.0


@contextmanager
def copy_of(primary: Server, *options: str) -> Iterator[Server]:
    """Yield a base backup of the primary, not yet started. The backup is removed at the end."""
    account = account_for(primary.data)
    folder = new_folder(primary.folder.parent)
    folder.mkdir(mode=0o711)
    data = folder / "data"
    data.mkdir(mode=0o700)
    account.own(data)
    program = find(primary.folder, account) / "pg_basebackup"
    if not program.exists():
        shutil.rmtree(folder)
        pytest.skip(f"there is no {program}")
    subprocess.run(
        [program, "--dbname", primary.url, "--pgdata", data, "--checkpoint=fast", "--no-sync", *options],
        check=True,
        capture_output=True,
        cwd="/",
        **account.popen_options(),
    )
    copy = Server(folder, settings=IN_FOLDER, dies_with_us=True)
    try:
        yield copy
    finally:
        copy.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def standby_of(primary: Server) -> Iterator[Server]:
    """Yield a running standby that follows the primary. The standby is stopped and removed at the end."""
    with copy_of(primary, "--write-recovery-conf") as standby:
        standby.start()
        yield standby


def recover_to(copy: Server, lsn: str, wal: Path) -> None:
    """Start a base backup that replays the WAL up to this LSN and then continues on a new timeline."""
    with open(copy.data / "postgresql.auto.conf", "a") as settings:
        settings.write(f"restore_command = 'cp {wal}/%f %p'\n")
        settings.write(f"recovery_target_lsn = '{lsn}'\nrecovery_target_action = promote\n")
    signal = copy.data / "recovery.signal"
    signal.touch()
    account_for(copy.data).own(signal)
    copy.start()
    with psycopg.connect(copy.url, autocommit=True) as connection:
        recovers = "SELECT pg_is_in_recovery()"
        eventually(lambda: connection.execute(recovers).fetchone() == (False,), "the end of the recovery")


def wait_until_caught_up(primary: Server, standby: Server) -> None:
    """Wait until the standby has replayed all WAL that the primary has written so far."""
    with (
        psycopg.connect(primary.url, autocommit=True) as leading,
        psycopg.connect(standby.url, autocommit=True) as following,
    ):
        row = leading.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
        assert row is not None
        replayed = "SELECT pg_last_wal_replay_lsn() >= %s"
        eventually(lambda: following.execute(replayed, row).fetchone() == (True,), "the standby has caught up")


def promote(standby: Server) -> None:
    """Promote the standby, and wait until it accepts writes."""
    with psycopg.connect(standby.url, autocommit=True) as connection:
        assert connection.execute("SELECT pg_promote()").fetchone() == (True,)


def kill(server: Server) -> None:
    """Kill a server, as a power failure would do."""
    assert server.pid is not None
    os.kill(server.pid, 9)
