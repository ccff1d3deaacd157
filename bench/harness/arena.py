"""Start the servers that a question needs, and offer its contenders: those whose server and library are installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import psycopg
from psycopg import conninfo, sql

from bench.harness import servers
from bench.harness.contender import Contender
from bench.harness.rounds import cause
from bench.harness.servers import Running
from bench.peers import sketch
from dblock.admin import schema

DBLOCK, REDIS, ADVISORY = "bench.peers.dblock_locks", "bench.peers.redis_locks", "bench.peers.advisory"

OURS = ("dblock", "dblock, efficiency")
LEASED = ("redis-py", "redis-py, fsync", "python-redis-lock", "python-redis-lock, fsync", "kazoo", "etcd v3lock")
"""Peers whose locks expire."""
SESSION = ("pg_advisory_lock", "sqlalchemy-dlock")
"""Peers whose locks end with a connection."""
SKETCH = "sketch"
NAIVE = "two SQL statements"
CONTENDERS = (
    "dblock", "redis-py", "python-redis-lock", "kazoo", "etcd v3lock", *SESSION, SKETCH, NAIVE, "pgbench", "SELECT 1",
    "two empty requests", "dblock over HTTP",
)  # fmt: skip
"""How the names of contenders begin. A variant follows after a comma."""

LIBRARIES = {
    "redis-py": "redis",
    "python-redis-lock": "redis_lock",
    "kazoo": "kazoo",
    "etcd v3lock": "grpc",
    "sqlalchemy-dlock": "sqlalchemy_dlock",
}
"""The module that each peer needs, by the beginning of its name."""

PACKAGES = (
    "dblock", "psycopg", "redis", "python-redis-lock", "kazoo", "grpcio", "sqlalchemy-dlock", "SQLAlchemy", "starlette",
    "uvicorn",
)  # fmt: skip
"""Whose versions are reported."""


class Arena:
    """The servers of one question, each started when it is first needed."""

    def __init__(self, folder: Path, only: Iterable[str] = (), *, fsync_delay_us: int = 0) -> None:
        self.folder = folder
        self.versions: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        """The servers that are installed and did not start."""
        self._only, self._fsync_delay_us = tuple(only), fsync_delay_us
        self._stack = contextlib.ExitStack()
        self._running: dict[str, Running | None] = {}
        self._databases: dict[str, str] = {}
        """The databases that contenders have for themselves, by contender."""

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def with_slow_disk(self, delay_us: int) -> Arena:
        """Return an arena with servers of its own, whose every fsync takes this much longer."""
        slow = Arena(self.folder, self._only, fsync_delay_us=delay_us)
        slow.versions, slow.failed = self.versions, self.failed
        return slow

    def _start(
        self, name: str, start: Callable[[], contextlib.AbstractContextManager[Running | None]]
    ) -> Running | None:
        if name not in self._running:
            try:
                running = self._running[name] = self._stack.enter_context(start())
            except servers.DidNotStart as error:
                running = self._running[name] = None
                print(f"{name} is left out. {error}", file=sys.stderr)
                self.failed[name] = cause(error)
            if running is not None:
                self.versions[name.partition(",")[0]] = running.version
        return self._running[name]

    @property
    def postgres(self) -> Running:
        """The embedded Postgres, with dblock installed."""
        delay = self._fsync_delay_us
        found = self._start("Postgres", lambda: servers.postgres(self.folder, fsync_delay_us=delay))
        assert found is not None
        return found

    def database(self, contender: str, install: Callable[[str], object]) -> str:
        """Return the name of a database for one contender, with its tables.

        Each contender that listens has one, because a NOTIFY wakes every session that listens in the same database:
        the idle clients of one contender would cost the hand-offs of another.
        """
        where = self.postgres.where
        template = f"template_{install.__module__.rpartition('.')[2]}"
        with psycopg.connect(where, autocommit=True) as admin:
            if template not in self._databases:
                admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(template)))
                install(conninfo.make_conninfo(where, dbname=template))
                self._databases[template] = template
            if contender not in self._databases:
                name = re.sub(r"\W+", "_", contender)
                admin.execute(
                    sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
                )
                self._databases[contender] = name
        return self._databases[contender]

    def redis(self, *, fsync: bool) -> Running | None:
        """A Redis, which may write each command to its disk."""
        delay = self._fsync_delay_us
        return self._start(f"Redis, {fsync}", lambda: servers.redis(self.folder, fsync=fsync, fsync_delay_us=delay))

    def pgbouncer(self) -> Running | None:
        """A pgbouncer in front of the Postgres."""
        return self._start("pgbouncer", lambda: servers.pgbouncer(self.folder, self.postgres))

    def wanted(self, name: str) -> bool:
        """Return whether the caller chose this contender, or made no choice."""
        return not self._only or name in self._only or name.partition(":")[0] in self._only

    def installed(self, name: str) -> bool:
        """Return whether the library of a contender is installed, and say so if it is not."""
        library = next((module for start, module in LIBRARIES.items() if name.startswith(start)), None)
        if library is None or importlib.util.find_spec(library) is not None:
            return True
        print(f"{name}: the Python module {library} is not installed: left out", file=sys.stderr)
        return False

    def contenders(self, *names: str, **options: object) -> list[Contender]:
        """Return the contenders of these names that are chosen and installed. Each gets the options."""
        found = []
        for name in names:
            if self.wanted(name) and self.installed(name) and (contender := self._contender(name, options)):
                found.append(contender)
        return found

    def _contender(self, name: str, options: dict[str, object]) -> Contender | None:
        """Return a contender by its name: a peer, then `, fsync`, `, efficiency`, `, asyncio` or `, socket`."""
        peer, *words = name.split(", ")
        if peer in ("dblock", *SESSION, SKETCH, NAIVE):
            return self._on_postgres(name, peer, words, options)
        running: Running | None
        if peer in ("redis-py", "python-redis-lock"):
            running = self.redis(fsync="fsync" in words)
            kind = {"redis-py": "RedisPy", "python-redis-lock": "PythonRedisLock"}[peer]
            kind = "Async" * ("asyncio" in words) + kind
            make = f"{REDIS}:{kind}"
        elif peer == "kazoo":
            running, make = (
                self._start("ZooKeeper", lambda: servers.zookeeper(self.folder)),
                "bench.peers.kazoo_lock:Kazoo",
            )
        elif peer == "etcd v3lock":
            running, make = self._start("etcd", lambda: servers.etcd(self.folder)), "bench.peers.etcd_lock:Etcd"
        else:
            raise ValueError(name)
        if running is None:
            return None
        return Contender(name, make, running.where, running.pid, options, "asyncio" in words)

    def _on_postgres(self, name: str, peer: str, words: list[str], options: dict[str, object]) -> Contender:
        running = self.postgres
        where = running.socket if "socket" in words else running.where
        prefix = "Async" * ("asyncio" in words)
        if peer in ("dblock", SKETCH):
            install = schema.install if peer == "dblock" else sketch.install
            where = conninfo.make_conninfo(where, dbname=self.database(name, install))
        if peer == "dblock":
            kind = "KeptLock" if "kept lock" in words else f"{prefix}Dblock"
            given = {**options, **({"durable": False} if "efficiency" in words else {})}
            return Contender(name, f"{DBLOCK}:{kind}", where, running.pid, given, bool(prefix))
        if peer == NAIVE:
            return Contender(name, "bench.peers.naive:TwoStatements", where, running.pid)
        if peer == SKETCH:
            return Contender(name, "bench.peers.sketch:Sketch", where, running.pid)
        kind = {"pg_advisory_lock": f"{prefix}AdvisoryLock", "sqlalchemy-dlock": "SqlalchemyDlock"}[peer]
        return Contender(name, f"{ADVISORY}:{kind}", where, running.pid, {}, bool(prefix))

    def recipes(self, peer: str, makes: Mapping[str, str]) -> list[Contender]:
        """Return other classes of a peer's adapter as contenders, by their names."""
        found = []
        for one in self.contenders(peer):
            for name, make in makes.items():
                if self.wanted(name):
                    where = one.where
                    if peer == "dblock":
                        where = conninfo.make_conninfo(where, dbname=self.database(name, schema.install))
                    found.append(replace(one, name=name, make=make, where=where))
        return found

    def all_versions(self) -> dict[str, str]:
        """Return the versions of the servers that were started and of the libraries that are installed."""
        found = dict(self.versions)
        for package in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return found
