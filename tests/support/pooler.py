"""Run pgbouncer in transaction mode in front of a test's database."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from tests.support.eventually import eventually
from tests.support.orphans import die_with_parent
from tests.support.ports import ReservedPort

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

needs_pgbouncer = pytest.mark.skipif(
    PGBOUNCER is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)"
)


_KEEPS_NO_STATEMENT = "max_prepared_statements = 0"
"""The default of versions before 1.21, which have no such setting."""


@functools.cache
def _version() -> tuple[int, ...]:
    assert PGBOUNCER is not None
    found = re.search(r"PgBouncer (\d+)\.(\d+)", subprocess.check_output([PGBOUNCER, "--version"], text=True))
    assert found is not None
    return tuple(map(int, found.groups()))


class Pooler:
    """Runs a pooler that gives each transaction any of three backends. Connect to `dsn` to go through the pooler."""

    def __init__(self, dsn: str, settings: str = "") -> None:
        parameters = conninfo.conninfo_to_dict(dsn)
        self._port = ReservedPort()
        port = self._port.number
        self._folder = Path(tempfile.mkdtemp(prefix="dblock-pgbouncer-"))
        password = f" password={parameters['password']}" if parameters.get("password") else ""
        (self._folder / "users").write_text(f'"{parameters["user"]}" ""\n')
        (self._folder / "ini").write_text(
            f"""
            [databases]
            pooled = host={parameters["host"]} port={parameters.get("port") or 5432} dbname={parameters["dbname"]} \
                user={parameters["user"]}{password} pool_size=3
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {port}
            unix_socket_dir =
            auth_type = any
            admin_users = {parameters["user"]}
            auth_file = {self._folder}/users
            pool_mode = transaction
            server_login_retry = 0.1
            {settings}
            """.replace("\\\n", " ").replace("                user", " user")
        )
        self._account: dict[str, Any] = {}
        if os.geteuid() == 0:
            # pgbouncer refuses to run as root, and only the account of root's server may open that server's socket.
            host = str(parameters["host"])
            self._account = {"user": os.stat(host).st_uid if host.startswith("/") else 65534}
            for path in (self._folder, *self._folder.iterdir()):
                os.chown(path, self._account["user"], -1)
        self.dsn = f"postgresql://{parameters['user']}@127.0.0.1:{port}/pooled"
        self._console = f"postgresql://{parameters['user']}@127.0.0.1:{port}/pgbouncer"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the pooler, and return once a connection goes through it."""
        assert PGBOUNCER is not None
        process = self._process = subprocess.Popen(
            [PGBOUNCER, "-q", str(self._folder / "ini")],
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
            **self._account,
        )

        def accepts() -> bool:
            try:
                psycopg.connect(self.dsn).close()
            except psycopg.OperationalError:
                if process.poll() is not None:
                    raise
                return False
            return True

        eventually(accepts, "a connection goes through the pooler")

    def command(self, what: str) -> None:
        """Send the pooler a command over its console."""
        with psycopg.connect(self._console, autocommit=True) as console:
            console.execute(what.encode())

    def kill(self) -> None:
        """Kill the pooler, so that it cannot close its connections in an orderly way."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Pooler:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the pooler, and remove its files."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
        self._port.close()
        shutil.rmtree(self._folder)


@contextmanager
def pooled(dsn: str, settings: str = "") -> Iterator[str]:
    """Yield a DSN that leads to a database through a pooler with these additional settings."""
    with Pooler(dsn, settings) as pooler:
        yield pooler.dsn
