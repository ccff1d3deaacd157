"""Run a cluster of Postgres nodes that Patroni manages, with one etcd, all on loopback.

Patroni and etcd are programs that the operating system installs (on Debian: `apt-get install patroni etcd-server
postgresql`). The cluster's DSN names every node and connects to the one that accepts writes, as an application's DSN
would. Ports are free ones, and everything ends with `stop`.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo

from dblock.embedded.processes import pids_working_in
from tests.support.eventually import eventually
from tests.support.ports import ReservedPort
from tests.support.servers import IN_FOLDER, new_folder

LEADER_KEY_TTL = 20
"""Seconds after which the key of a silent leader expires. Patroni allows no fewer."""

PATIENCE = 90.0

NODES = ("a", "b", "c")

PROGRAM = "DBLOCK_TEST_PATRONI"
"""The environment variable that names the Patroni to use instead of the one on the PATH."""


def missing() -> str | None:
    """Return what a cluster needs and this machine lacks, or None."""
    for program in (_patroni(), "etcd"):
        if shutil.which(program) is None:
            return f"{program} is not installed (on Debian: apt-get install patroni etcd-server postgresql)"
    if postgres_programs() is None:
        return "no Postgres with pg_rewind is installed (on Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and _account() is None:
        return "root needs an account 'postgres' to run the nodes under"
    return None


def version() -> tuple[int, ...]:
    """Return the version of Patroni."""
    said = subprocess.run([_patroni(), "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in said.split()[-1].split("."))


def postgres_programs() -> Path | None:
    """Return the folder of the newest installed Postgres that can be a node."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_rewind"), key=lambda path: float(path.parts[-3]))
    return found[-1].parent if found else None


@dataclass
class Node:
    """One Postgres and the Patroni that manages it."""

    name: str
    folder: Path
    port: int
    api_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def pids(self) -> set[int]:
        """Return the processes of this node: Patroni's and those of Postgres."""
        patroni = {self.process.pid} if self.process is not None and self.process.poll() is None else set()
        return patroni | pids_working_in(self.data)

    def ask(self, about: str) -> dict[str, Any]:
        """Return what Patroni says about this node (`patroni`) or its cluster (`cluster`); nothing without a reply."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.api_port}/{about}", timeout=2) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:  # 503: the node does not run, and says so
            with suppress(ValueError):
                return dict(json.load(error))
            return {}
        except (OSError, ValueError):
            return {}

    def accepts_writes(self) -> bool:
        """Return whether a client would be granted a lock here: the node runs and is no standby."""
        try:
            with psycopg.connect(self.url, connect_timeout=2, autocommit=True) as connection:
                return connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,)
        except psycopg.OperationalError:
            return False


@dataclass
class Cluster:
    """Three nodes and their etcd."""

    folder: Path
    synchronous: bool
    nodes: list[Node] = field(default_factory=list)
    etcd: subprocess.Popen[bytes] | None = None
    etcd_port: int = 0
    _ports: list[ReservedPort] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The DSN of an application: every node, and only the one that accepts writes."""
        return conninfo.make_conninfo(
            user="postgres",
            dbname="postgres",
            host=",".join("127.0.0.1" for _ in self.nodes),
            port=",".join(str(node.port) for node in self.nodes),
            target_session_attrs="read-write",
        )

    def start(self) -> None:
        """Start etcd and the nodes, and wait until two standbys follow a leader."""
        self._ports = [ReservedPort() for _ in range(2 + 2 * len(NODES))]
        ports = iter([port.number for port in self._ports])
        self.folder.mkdir(mode=0o755)
        self.etcd_port, peers = next(ports), next(ports)
        self._own(self.folder)
        self.etcd = self._spawn(
            "etcd",
            [
                "etcd",
                "--name=etcd",
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls=http://127.0.0.1:{self.etcd_port}",
                f"--advertise-client-urls=http://127.0.0.1:{self.etcd_port}",
                f"--listen-peer-urls=http://127.0.0.1:{peers}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
                f"--initial-cluster=etcd=http://127.0.0.1:{peers}",
                "--unsafe-no-fsync",
            ],
        )
        wait_for("etcd", self._etcd_replies)
        for name in NODES:
            node = Node(name, self.folder / name, next(ports), next(ports))
            node.folder.mkdir(mode=0o755)
            (node.folder / "patroni.yml").write_text(json.dumps(self._config(node), indent=1))  # JSON is YAML
            self._own(node.folder)
            self.nodes.append(node)
        for node in self.nodes:
            self.start_node(node)
        wait_for("a leader and two standbys", self.is_whole)

    def start_node(self, node: Node) -> None:
        """Start the Patroni of a node, which starts its Postgres."""
        node.process = self._spawn(node.name, [_patroni(), str(node.folder / "patroni.yml")])

    def stop(self) -> None:
        """End every process of the cluster, and remove its files."""
        for node in self.nodes:
            kill_node(node)
        if self.etcd is not None:
            self.etcd.kill()
            self.etcd.wait()
        for port in self._ports:
            port.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def leader(self) -> Node | None:
        """Return the node that Patroni calls the leader, if there is exactly one and it accepts writes."""
        leaders = [node for node in self.nodes if node.ask("patroni").get("role") in ("master", "primary")]
        return leaders[0] if len(leaders) == 1 and leaders[0].accepts_writes() else None

    def is_whole(self) -> bool:
        """Return whether there is one leader, and every other node streams from it as Patroni wants it to.

        In synchronous mode Patroni must have recorded which standby may replace the leader. A moment before, a failure
        of the leader would leave the cluster without one.
        """
        leader = self.leader()
        if leader is None:
            return False
        roles = sorted(member["role"] for member in leader.ask("cluster").get("members", []))
        try:
            with psycopg.connect(leader.url, connect_timeout=2, autocommit=True) as connection:
                row = connection.execute(
                    "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
                ).fetchone()
        except psycopg.OperationalError:
            return False
        wanted = ["leader", "replica", "sync_standby"] if self.synchronous else ["leader", "replica", "replica"]
        return roles == wanted and row == (2,)

    def wait_for_standbys(self) -> None:
        """Wait until both standbys have replayed what the leader has written so far."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            (written,) = connection.execute("SELECT pg_current_wal_lsn()").fetchone() or (None,)
            replayed = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= %s"
            wait_for(
                "both standbys to replay what was written",
                lambda: connection.execute(replayed, [written]).fetchone() == (2,),
            )

    def switch_over(self) -> None:
        """Ask Patroni to make another node the leader, in order, as soon as Patroni has a candidate."""
        wait_for("a switchover", self._switched_over)

    def _switched_over(self) -> bool:
        leader = self.leader()
        if leader is None:
            return False
        request = urllib.request.Request(
            f"http://127.0.0.1:{leader.api_port}/switchover",
            json.dumps({"leader": leader.name}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            if error.code != 412:  # 412: no standby is a candidate yet
                raise AssertionError(f"Patroni refused the switchover: {error.read().decode()}") from None
            return False
        return True

    def logs(self) -> list[Path]:
        """Return the log of each program of the cluster."""
        return sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*/log/*.log"))

    def _config(self, node: Node) -> dict[str, Any]:
        programs = postgres_programs()
        local = f"127.0.0.1:{node.port}"
        return {
            "scope": "dblock",
            "name": node.name,
            "restapi": {"listen": f"127.0.0.1:{node.api_port}", "connect_address": f"127.0.0.1:{node.api_port}"},
            "etcd3": {"hosts": f"127.0.0.1:{self.etcd_port}"},
            "bootstrap": {
                "dcs": {
                    "ttl": LEADER_KEY_TTL,
                    "loop_wait": 2,
                    "retry_timeout": 3,
                    "maximum_lag_on_failover": 2**30,
                    "primary_start_timeout": 0,
                    "master_start_timeout": 0,
                    "synchronous_mode": self.synchronous,
                    "postgresql": {
                        "use_pg_rewind": True,
                        "use_slots": True,
                        "parameters": {"wal_log_hints": "on", "max_connections": 200, "fsync": "off"},
                    },
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C.UTF-8"}, {"auth": "trust"}, "no-sync"],
            },
            "postgresql": {
                "listen": local,
                "connect_address": local,
                "data_dir": str(node.data),
                "bin_dir": str(programs),
                "pgpass": str(node.folder / "pgpass"),
                "authentication": {
                    "superuser": {"username": "postgres"},
                    "replication": {"username": "postgres"},
                    "rewind": {"username": "postgres"},
                },
                "pg_hba": ["local all all trust", "host all all all trust", "host replication all all trust"],
                "parameters": {"unix_socket_directories": str(node.folder), **IN_FOLDER},
            },
        }

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        account = _account()
        options: dict[str, Any] = {}
        if account is not None:
            options = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder), "LANG": "C.UTF-8"},
                start_new_session=True,
                **options,
            )

    def _own(self, folder: Path) -> None:
        account = _account()
        if account is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, account.pw_uid, account.pw_gid)

    def _etcd_replies(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.etcd_port}/health", timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def running_cluster(synchronous: bool) -> Iterator[Cluster]:
    """Yield a cluster with a leader and two standbys; stop and remove it at the end."""
    cluster = Cluster(new_folder(), synchronous)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def signal_node(node: Node, what: signal.Signals) -> int:
    """Send a signal to every process of a node; return how many received it."""
    sent = 0
    for pid in node.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, what)
            sent += 1
    return sent


def kill_node(node: Node) -> int:
    """Kill the Patroni and the Postgres of a node, as a failure of its machine would; return how many processes."""
    killed: set[int] = set()
    while new := node.pids() - killed:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= new
        if node.process is not None:
            node.process.wait()
        time.sleep(0.02)
    return len(killed)


def wait_for(what: str, condition: Any, patience: float = PATIENCE) -> None:
    """Return as soon as the condition is true, within the time that a cluster may take."""
    eventually(condition, what, patience)


def _patroni() -> str:
    return os.environ.get(PROGRAM, "patroni")


def _account() -> pwd.struct_passwd | None:
    """Return the account for the nodes if the tests run as root. Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return None
