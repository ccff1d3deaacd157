"""Kill or freeze the primary and promote a standby; then replace the old primary by a standby of the new one.

The servers alternate as primary, each in its own folder. The traffic's DSN names all of them, and connects to the one
that accepts writes.
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
from tests.robustness.faults.server import LAZY, kill_all_processes
from tests.support.eventually import eventually
from tests.support.frozen import frozen, send_signal
from tests.support.servers import new_folder
from tests.support.standby import promote

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

LOST = "a failover to an asynchronous standby can lose acknowledged grants (docs/concepts/protocol.md, Failovers)"


def make_standby(primary: Server, standby: Server) -> None:
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


def fetch_value(server: Server, query: str) -> object:
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
    dsn_parameters: Mapping[str, str] = {}
    """Further parameters of the traffic's DSN."""
    standbys = 1
    every = (0.3, 0.8)
    afterwards = 3.0

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        first = env.server
        others = [Server(new_folder(), settings=dict(self.settings), dies_with_us=True) for _ in range(self.standbys)]
        try:
            for one in others:
                make_standby(first, one)
            env.components["standby"], *env.components["siblings"] = others
            addresses = [conninfo.conninfo_to_dict(one.url) for one in (first, *others)]
            env.dsn = conninfo.make_conninfo(
                user="postgres",
                dbname="postgres",
                host=",".join(str(address["host"]) for address in addresses),
                port=",".join(str(address["port"]) for address in addresses),
                target_session_attrs="read-write",
                **self.dsn_parameters,
            )
            env.direct = env.dsn
            self.wait_for_standby(env)
            yield
        finally:
            env.server = first
            for one in (*others, first):
                send_signal(pids_working_in(one.data), signal.SIGCONT)
                one.stop()
            for one in others:
                shutil.rmtree(one.folder, ignore_errors=True)

    def wait_for_standby(self, env: Environment) -> None:
        """Return once the standby streams and, if it is synchronous, commits wait for its confirmation."""
        primary = env.server
        if self.synchronous:
            with psycopg.connect(primary.url, autocommit=True) as owner:
                owner.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                owner.execute("SELECT pg_reload_conf()")
        state = "sync" if self.synchronous else "async"
        count = f"SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = '{state}'"
        eventually(
            lambda: fetch_value(primary, count) == self.standbys,
            f"the standby is {state}",
        )

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        primary, standby = env.server, env.components["standby"]
        details = self.before_kill(primary, standby, rng)
        killed = kill_all_processes(primary)
        self.promote_standby(standby)
        env.server, env.components["standby"] = standby, primary
        details |= self.after_promotion(env, rng)
        make_standby(env.server, env.components["standby"])
        self.wait_for_standby(env)
        return {"killed": killed, **details}

    def before_kill(self, primary: Server, standby: Server, rng: random.Random) -> dict[str, object]:
        """Prepare the servers before the primary is killed."""
        return {}

    def after_promotion(self, env: Environment, rng: random.Random) -> dict[str, object]:
        """Act on the servers after the standby has been promoted."""
        return {}

    def promote_standby(self, standby: Server) -> None:
        """Promote the standby, and let its commits not wait for a standby of its own."""
        with psycopg.connect(standby.url, autocommit=True) as owner:
            owner.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            owner.execute("SELECT pg_reload_conf()")
        promote(standby)


class AsyncPromotion(SyncPromotion):
    """Kill the primary while its standby lags behind: the last acknowledged grants are lost."""

    name = "promotion-async"
    synchronous = False
    loses_state = True
    exempt_checkers = dict.fromkeys(("linearizability", "loss reported first", "durability"), LOST)

    def before_kill(self, primary: Server, standby: Server, rng: random.Random) -> dict[str, object]:
        """Stop the WAL sender, so that the standby falls behind."""
        seconds = rng.choice([0, rng.uniform(0.1, 0.6), rng.uniform(0.1, 0.6)])
        sender = fetch_value(primary, "SELECT pid FROM pg_stat_replication")
        if seconds and isinstance(sender, int):
            send_signal([sender], signal.SIGSTOP)
            time.sleep(seconds)
        return {"lagged": seconds}


class SplitBrain(AsyncPromotion):
    """Promote a lagging standby, then restart the old primary for a moment, so that some of the traffic connects to it.

    Not for workloads whose resources are in the same database: there would be two of each.
    """

    name = "split-brain"
    effect = "sessions"
    dsn_parameters = {"load_balance_hosts": "random"}  # noqa: RUF012
    exempt_checkers = {  # noqa: RUF012
        **AsyncPromotion.exempt_checkers,
        "token order": "two primaries grant at the same time, each in the order of its own tokens. A grant by the old"
        " primary has the lower token, and the fence refuses it",
    }

    def after_promotion(self, env: Environment, rng: random.Random) -> dict[str, object]:
        old = env.components["standby"]
        old.stop()
        old.start()
        with psycopg.connect(env.server.url, autocommit=True) as owner:
            # So that clients choose their server again.
            owner.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dblock'")
        seconds = rng.uniform(0.5, 1.0)
        time.sleep(seconds)
        sessions = fetch_value(old, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dblock'")
        kill_all_processes(old)
        return {"seconds": seconds, "sessions": sessions}


class SiblingPromotion(AsyncPromotion):
    """Promote a standby, let it grant, kill it, and promote another standby that never saw those grants.

    Both take the same timeline. What the first one granted is lost.
    """

    name = "promotion-sibling"
    effect = "grants"
    standbys = 2

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        primary, one, (other,) = env.server, env.components["standby"], env.components["siblings"]
        kill_all_processes(primary)
        self.promote_standby(one)
        granted = wait_for_grants(one, rng)
        kill_all_processes(one)
        self.promote_standby(other)
        env.server, env.components["standby"], env.components["siblings"] = other, one, [primary]
        for server in (one, primary):
            make_standby(other, server)
        self.wait_for_standby(env)
        return {"grants": granted}


class FlipBack(AsyncPromotion):
    """Freeze the primary, let its promoted standby grant, kill that one, and let the first primary continue.

    It keeps its timeline. What the other one granted is lost.
    """

    name = "flip-back"
    effect = "grants"
    dsn_parameters = {"connect_timeout": "2"}  # noqa: RUF012
    afterwards = 5.0

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        primary, standby = env.server, env.components["standby"]
        with frozen(primary.data):
            self.promote_standby(standby)
            granted = wait_for_grants(standby, rng)
            kill_all_processes(standby)
            # Tokens may be a second behind the clock. A cluster manager needs longer to make a node the leader again.
            time.sleep(1.1)
        time.sleep(rng.uniform(0.5, 1.0))
        make_standby(primary, standby)
        self.wait_for_standby(env)
        return {"grants": granted}


def wait_for_grants(server: Server, rng: random.Random) -> int:
    """Wait until the traffic has found this server and was granted locks for a while; return how many locks."""
    since = fetch_value(server, "SELECT clock_timestamp()")
    count = f"SELECT count(*) FROM dblock.distributed_locks WHERE granted_at > '{since}'"
    eventually(lambda: fetch_value(server, count), f"grants by {server}")
    time.sleep(rng.uniform(0.3, 0.6))
    granted = fetch_value(server, count)
    assert isinstance(granted, int)
    return granted
