"""pgbouncer in transaction mode, in front of a database of a test's."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

needs_pgbouncer = pytest.mark.skipif(
    PGBOUNCER is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)"
)


@contextmanager
def pooled(dsn: str) -> Iterator[str]:
    """Yield a way to a database through a pooler that gives each transaction any of three backends."""
    parameters = conninfo.conninfo_to_dict(dsn)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="dblock-pgbouncer-"))
    password = f" password={parameters['password']}" if parameters.get("password") else ""
    (folder / "users").write_text(f'"{parameters["user"]}" ""\n')
    (folder / "ini").write_text(
        f"""
        [databases]
        pooled = host={parameters["host"]} port={parameters.get("port") or 5432} dbname={parameters["dbname"]} \
            user={parameters["user"]}{password} pool_size=3
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = any
        auth_file = {folder}/users
        pool_mode = transaction
        """.replace("\\\n", " ").replace("            user", " user")
    )
    account: dict[str, Any] = {}
    if os.geteuid() == 0:
        # pgbouncer refuses to be root; and the socket of root's server is open to that server's account alone.
        host = str(parameters["host"])
        account = {"user": os.stat(host).st_uid if host.startswith("/") else 65534}
        for path in (folder, *folder.iterdir()):
            os.chown(path, account["user"], -1)
    assert PGBOUNCER is not None
    process = subprocess.Popen([PGBOUNCER, "-q", str(folder / "ini")], stderr=subprocess.PIPE, **account)
    through = f"postgresql://{parameters['user']}@127.0.0.1:{port}/pooled"
    deadline = time.monotonic() + 15
    while True:
        try:
            psycopg.connect(through).close()
            break
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    try:
        yield through
    finally:
        process.terminate()
        process.communicate()
        shutil.rmtree(folder)
