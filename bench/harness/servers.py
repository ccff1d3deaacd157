"""Start the servers of the contenders on loopback, on free ports, and stop them with this process.

A server whose program is not installed is `None`, with a message that names what to install.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import conninfo

from dblock.admin import schema
from dblock.embedded import Server

PATIENCE = 60.0
PASSWORD = "bench"  # noqa: S105 - of a server that lives on loopback for the length of a run

SLOW_FSYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
static int slowly(const char *name, int file) {
    int (*real)(int) = (int (*)(int)) dlsym(RTLD_NEXT, name);
    usleep(DELAY);
    return real(file);
}
"""


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    where: str
    """The address for its clients."""
    pid: int
    version: str
    socket: str = ""
    """The address over a Unix socket, if it has one."""


def free_port() -> int:
    """Return a port of loopback that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder for the data of servers, which accounts other than root's can reach."""
    folder = Path(tempfile.mkdtemp(prefix="dblock-bench-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class DidNotStart(RuntimeError):
    """A server that is installed did not start."""


def missing(program: str, package: str) -> None:
    """Say that a contender is left out."""
    print(f"{program} is not installed: left out (Debian: apt-get install {package})", file=sys.stderr)


def die_with_parent() -> None:
    """Let the kernel kill this process when the process that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Return whether a process has not ended. One that its parent has not reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def _process(command: list[str], folder: Path, log: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / log, "ab") as output:
        # In a session of its own, so that Ctrl-C reaches only the benchmark, which then stops it.
        process = subprocess.Popen(  # type: ignore[call-overload]
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_parent,
            start_new_session=True, **options,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until(process: subprocess.Popen[bytes], ready: Callable[[], object], what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError, psycopg.Error):
            if ready():
                return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise DidNotStart(f"{what} did not start:\n{tail}")
        time.sleep(0.02)


def _accepts(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), 1).close()
    return True


def _version(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+(\.\d+)?", done.stdout + done.stderr)
    return found[0] if found else "?"


@contextlib.contextmanager
def postgres(
    folder: Path, settings: Mapping[str, str] | None = None, *, fsync_delay_us: int = 0, install: bool = True
) -> Iterator[Running]:
    """Run the embedded Postgres, over TCP and over its Unix socket, with dblock installed."""
    port = free_port()
    chosen = {"listen_addresses": "127.0.0.1", "port": str(port), "max_connections": "1000"}
    server = Server(folder / f"postgres-{port}", settings=chosen | dict(settings or {}), dies_with_us=True)
    if fsync_delay_us:
        server.environment["LD_PRELOAD"] = str(slow_disk(folder, fsync_delay_us))
    try:
        server.start()
        with psycopg.connect(server.url, autocommit=True) as owner:
            owner.execute(f"ALTER ROLE postgres PASSWORD '{PASSWORD}'".encode())
            version = owner.info.parameter_status("server_version") or "?"
        if install:
            schema.install(server.url)
        where = conninfo.make_conninfo(
            host="127.0.0.1", port=port, user="postgres", password=PASSWORD, dbname="postgres"
        )
        assert server.pid is not None
        yield Running(where, server.pid, version, server.url)
    finally:
        server.stop()


def slow_disk(folder: Path, delay_us: int, calls: Sequence[str] = ("fsync", "fdatasync")) -> Path:
    """Build a library that makes these calls of a program take longer."""
    source, library = folder / "slow.c", folder / "slow.so"
    slow = [f'int {call}(int file) {{ return slowly("{call}", file); }}\n' for call in calls]
    source.write_text(SLOW_FSYNC.replace("DELAY", str(delay_us)) + "".join(slow))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@contextlib.contextmanager
def redis(folder: Path, *, fsync: bool, fsync_delay_us: int = 0) -> Iterator[Running | None]:
    """Run a Redis that writes every command to its disk before it replies, or one that never waits for its disk."""
    program = shutil.which("redis-server")
    if program is None:
        missing("redis-server", "redis-server")
        yield None
        return
    port = free_port()
    data = folder / f"redis-{port}"
    data.mkdir()
    settings = {"bind": "127.0.0.1", "port": str(port), "dir": str(data), "save": "", "maxclients": "2000"}
    settings |= {"appendonly": "yes", "appendfsync": "always"} if fsync else {"appendonly": "no"}
    command = [program, *(word for key, value in settings.items() for word in (f"--{key}", value))]
    environment = {**os.environ, **({"LD_PRELOAD": str(slow_disk(folder, fsync_delay_us))} if fsync_delay_us else {})}
    with _process(command, data, "log", env=environment) as process:
        _wait_until(process, lambda: _accepts(port), "redis-server", data / "log")
        yield Running(f"redis://127.0.0.1:{port}", process.pid, _version([program, "--version"]))


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[Running | None]:
    """Run one member of etcd."""
    program = shutil.which("etcd")
    if program is None:
        missing("etcd", "etcd-server")
        yield None
        return
    port, peer = free_port(), free_port()
    data = folder / f"etcd-{port}"
    data.mkdir(mode=0o700)
    client, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [program, "--data-dir", str(data / "data"), "--name", "bench", "--logger", "zap"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"bench={peers}"]
    with _process(command, data, "log") as process:
        _wait_until(process, lambda: _answers_http(f"{client}/health"), "etcd", data / "log")
        yield Running(f"127.0.0.1:{port}", process.pid, _version([program, "--version"]))


def _answers_http(url: str) -> bool:
    import urllib.request

    with urllib.request.urlopen(url, timeout=1) as reply:  # noqa: S310 - the address is on loopback
        return b"true" in reply.read()


@contextlib.contextmanager
def zookeeper(folder: Path) -> Iterator[Running | None]:
    """Run one ZooKeeper from Debian's jar. It syncs its log before it replies, which is its default."""
    jar, java = Path("/usr/share/java/zookeeper.jar"), shutil.which("java")
    if not jar.exists() or java is None:
        missing("ZooKeeper", "zookeeper")
        yield None
        return
    port = free_port()
    data = folder / f"zookeeper-{port}"
    data.mkdir()
    (data / "zoo.cfg").write_text(
        f"tickTime=500\ndataDir={data}\nclientPort={port}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n"
        "minSessionTimeout=1000\nmaxSessionTimeout=60000\nadmin.enableServer=false\n"
    )
    command = [java, "-cp", f"{data}:{jar}", "-Dzookeeper.4lw.commands.whitelist=*"]
    command += ["org.apache.zookeeper.server.ZooKeeperServerMain", str(data / "zoo.cfg")]
    with _process(command, data, "log") as process:
        _wait_until(process, lambda: _ruok(port), "ZooKeeper", data / "log")
        yield Running(f"127.0.0.1:{port}", process.pid, _jar_version(jar))


def _jar_version(jar: Path) -> str:
    """Return the version in the name of the jar, or in that of a link to it beside it."""
    for name in [jar.resolve().name, *(one.name for one in jar.parent.glob(f"{jar.stem}-*.jar"))]:
        if found := re.fullmatch(rf"{jar.stem}-(\d[\d.]*)\.jar", name):
            return found[1]
    return "?"


def _ruok(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1) as connection:
        connection.sendall(b"ruok")
        return connection.recv(16) == b"imok"


@contextlib.contextmanager
def pgbouncer(folder: Path, server: Running, pool_size: int = 20) -> Iterator[Running | None]:
    """Run pgbouncer in transaction mode in front of this Postgres."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        missing("pgbouncer", "pgbouncer")
        yield None
        return
    port = free_port()
    data = folder / f"pgbouncer-{port}"
    data.mkdir()
    (data / "users").write_text(f'"postgres" "{PASSWORD}"\n')
    (data / "ini").write_text(
        f"[databases]\npooled = {server.where} pool_size={pool_size}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"auth_file = {data}/users\npool_mode = transaction\nmax_client_conn = 1000\n"
    )
    options: dict[str, object] = {}
    if os.geteuid() == 0:  # it refuses to run as root
        options["user"] = 65534
        for path in (data, *data.iterdir()):
            os.chown(path, 65534, -1)
    with _process([program, "-q", str(data / "ini")], data, "log", **options) as process:
        where = f"host=127.0.0.1 port={port} user=postgres dbname=pooled"
        _wait_until(process, lambda: psycopg.connect(where), "pgbouncer", data / "log")
        yield Running(where, process.pid, _version([program, "--version"]))
