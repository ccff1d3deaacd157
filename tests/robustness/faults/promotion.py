"""Kill the primary and promote its standby; then replace the old primary by a standby of the new one.

Two servers alternate as primary, each in its own folder. The traffic's DSN names both, and connects to the one that
accepts writes.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg import conninfo

from dblock.embedded import Server
from dblock.embedded.account import account_for
from dblock.embedded.binaries import find
from dblock.embedded.processes import pids_working_in
from tests.robustness.faults import Fault
from tests.robustness.faults.server import LAZY, kill_everything, tell
from tests.robustness.traffic.stage import wait_until
from tests.support.servers import new_folder
from tests.support.standby import promote

if TYPE_CHECKING:
    from tests.robustness.traffic.stage import Stage

LOST = "a failover to an asynchronous standby can lose acknowledged grants (docs/concepts/protocol.md, Failovers)"


def follow(primary: Server, standby: Server) -> None:
    """Replace the second server's data by a standby of the primary, and start it."""
    standby.stop()
    shutil.rmtree(standby.data, ignore_errors=True)
    standby.folder.mkdir(mode=0o711, exist_ok=True)
    standby.data.mkdir(mode=0o700)
    account = account_for(primary.data)
    account.own(standby.data)
    subprocess.run(
        [
            find(primary.folder, account) / "pg_basebackup",
            *("--dbname", primary.url, "--pgdata", standby.data, "--checkpoint=fast", "--no-sync"),
            *("--write-recovery-conf", "--no-manifest"),
        ],
        check=True,
        capture_output=True,
        cwd="/",
        **account.popen_options(),
    )
    standby.start()


def one_value(server: Server, query: str) -> object:
    """Return the value of a query on a server."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    return None if row is None else row[0]


class SyncPromotion(Fault):
    """Kill the primary and promote its synchronous standby: nothing acknowledged is lost."""

    name = "promotion-sync"
    effect = "killed"
    settings = LAZY
    synchronous = True
    way: Mapping[str, str] = {}
    """Further parameters of the traffic's DSN."""
    every = (0.3, 0.8)
    afterwards = 3.0

    @contextmanager
    def setting(self, stage: Stage) -> Iterator[None]:
        first = stage.server
        second = Server(new_folder(), settings=dict(self.settings), dies_with_us=True)
        try:
            follow(first, second)
            stage.props["standby"] = second
            ways = [conninfo.conninfo_to_dict(one.url) for one in (first, second)]
            stage.dsn = conninfo.make_conninfo(
                user="postgres",
                dbname="postgres",
                host=",".join(str(way["host"]) for way in ways),
                port=",".join(str(way["port"]) for way in ways),
                target_session_attrs="read-write",
                **self.way,
            )
            stage.direct = stage.dsn
            self.attend(stage)
            yield
        finally:
            stage.server = first
            for one in (second, first):
                tell(pids_working_in(one.data), signal.SIGCONT)
                one.stop()
            shutil.rmtree(second.folder, ignore_errors=True)

    def attend(self, stage: Stage) -> None:
        """Return once the standby streams and, if it is synchronous, commits wait for its confirmation."""
        primary = stage.server
        if self.synchronous:
            with psycopg.connect(primary.url, autocommit=True) as owner:
                owner.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                owner.execute("SELECT pg_reload_conf()")
        state = "sync" if self.synchronous else "async"
        wait_until(
            f"the standby to be {state}",
            lambda: one_value(primary, "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'") == state,
        )

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        primary, standby = stage.server, stage.props["standby"]
        said = self.before(primary, standby, dice)
        killed = kill_everything(primary)
        self.go_over(standby)
        stage.server, stage.props["standby"] = standby, primary
        said |= self.between(stage, dice)
        follow(stage.server, stage.props["standby"])
        self.attend(stage)
        return {"killed": killed, **said}

    def before(self, primary: Server, standby: Server, dice: random.Random) -> dict[str, object]:
        """Prepare the servers before the primary is killed."""
        return {}

    def between(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        """Act on the servers after the standby has been promoted."""
        return {}

    def go_over(self, standby: Server) -> None:
        """Promote the standby, and let its commits not wait for a standby of its own."""
        with psycopg.connect(standby.url, autocommit=True) as owner:
            owner.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            owner.execute("SELECT pg_reload_conf()")
        promote(standby)


class AsyncPromotion(SyncPromotion):
    """Kill the primary while its standby lags behind: the last acknowledged grants are lost."""

    name = "promotion-async"
    synchronous = False
    excuses = dict.fromkeys(("linearizability", "loss told first", "durability"), LOST)

    def before(self, primary: Server, standby: Server, dice: random.Random) -> dict[str, object]:
        """Stop the WAL sender, so that the standby falls behind."""
        seconds = dice.choice([0, dice.uniform(0.1, 0.6), dice.uniform(0.1, 0.6)])
        sender = one_value(primary, "SELECT pid FROM pg_stat_replication")
        if seconds and isinstance(sender, int):
            tell([sender], signal.SIGSTOP)
            time.sleep(seconds)
        return {"lagged": seconds}


class SplitBrain(AsyncPromotion):
    """Promote a lagging standby, then restart the old primary for a moment, so that some of the traffic connects to it.

    Not for workloads whose resources are in the same database: there would be two of each.
    """

    name = "split-brain"
    effect = "sessions"
    way = {"load_balance_hosts": "random"}  # noqa: RUF012
    excuses = {  # noqa: RUF012
        **AsyncPromotion.excuses,
        "token order": "two primaries grant at the same time, each in the order of its own tokens. A grant by the old"
        " primary has the lower token, and the fence refuses it",
    }

    def between(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        old = stage.props["standby"]
        old.stop()
        old.start()
        with psycopg.connect(stage.server.url, autocommit=True) as owner:
            # So that clients choose their server again.
            owner.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dblock'")
        seconds = dice.uniform(0.5, 1.0)
        time.sleep(seconds)
        sessions = one_value(old, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dblock'")
        kill_everything(old)
        return {"seconds": seconds, "sessions": sessions}
