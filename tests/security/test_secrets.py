"""No password is shown: not in a log, an error or its causes, a repr, a table, nor in the list of processes.

That holds for every way to give the password (a URL, keywords, an engine, $DBLOCK_DSN, PGPASSWORD, a .env), and both
when calls succeed and when they fail. A password that the user types into a command line is visible to every user of
the machine, and that is the user's own responsibility. `dblock run` passes exported variables on to its command, as
any program does. It does not pass on a password from a file or from an option.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import conninfo
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
import fenced_store
from dblock import cli
from dblock._runtime import target
from tests.support.eventually import eventually
from tests.support.facade import Clients
from tests.support.shell import Shell, ended

PASSWORD = "tr0ub4dor&3/@%"
"""Has characters that a URL must escape, and that reappear when the URL is parsed."""
SHOWN = ("tr0ub4dor", quote(PASSWORD, safe=""))


def hidden(*texts: object) -> None:
    """Fail if any of these contains the password. The failure message does not contain it either."""
    for one in texts:
        text = one if isinstance(one, str) else repr(one)
        assert not any(form in text for form in SHOWN), f"shown after {text[: text.find(SHOWN[0])][-200:]!r}"


def spellings(dsn: str) -> dict[str, str]:
    """Return the common spellings of a DSN, with the password."""
    parts = {key: str(value) for key, value in conninfo.conninfo_to_dict(dsn).items() if value is not None}
    host, port, user, name = (parts.get(key, "") for key in ("host", "port", "user", "dbname"))
    where = f"{user}:{quote(PASSWORD, safe='')}@"
    query = f"host={quote(host, safe='')}&port={port or 5432}"
    return {
        "URL": f"postgresql://{where}/{name}?{query}",
        "URL of SQLAlchemy": f"postgresql+psycopg://{where}/{name}?{query}",
        "query": f"postgresql://{user}@/{name}?{query}&password={quote(PASSWORD, safe='')}",
        "keywords": conninfo.make_conninfo(dsn, password=PASSWORD),
    }


@pytest.fixture(scope="module")
def refuses() -> Iterator[str]:
    """Run a server that asks for the password and refuses it, and return its DSN without a password."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    session, _ = listener.accept()
                except OSError:
                    return
                # A client may give up before the reply.
                with suppress(OSError, struct.error), session, closing(session.makefile("rb")) as received:
                    (length,) = struct.unpack("!i", received.read(4))
                    received.read(length - 4)
                    session.sendall(b"R" + struct.pack("!ii", 8, 3))
                    received.read(1)
                    (length,) = struct.unpack("!i", received.read(4))
                    received.read(length - 4)
                    fields = b"SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user\0\0"
                    session.sendall(b"E" + struct.pack("!i", 4 + len(fields)) + fields)

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        yield f"host=127.0.0.1 port={port} user=u dbname=d sslmode=disable gssencmode=disable"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check_error(error: BaseException) -> None:
    """Check every part of an error and of its causes."""
    for one in chain(error):
        hidden(str(one), repr(one), one.args, {key: value for key, value in vars(one).items() if key != "_obj"})
    hidden("".join(traceback.format_exception(error)))
    hidden(pickle.dumps(error).decode("latin-1"))


@pytest.mark.usefixtures("patient")
async def test_working_client_shows_no_password(
    clients: Clients, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for spelling, dsn in spellings(clients.dsn).items():
        client = clients(dsn)
        lock = client.lock(spelling, meta={"by": spelling})
        lease = await lock.acquire()
        await lease.renew()
        with pytest.raises(dblock.LockTimeout) as late:
            await clients(dsn).lock(spelling).acquire(timeout=0.01)
        check_error(late.value)
        hidden(client, lock, lease, lease.lost, target.resolve(dsn), str(target.resolve(dsn)))
        with pytest.raises(TypeError) as refused:
            pickle.dumps(dblock.Client(dsn))
        check_error(refused.value)
    hidden(caplog.text)
    for table in ("distributed_locks", "lock_tickets", "lock_history", "lock_presence"):
        hidden(owner.execute(f"SELECT * FROM {table}".encode()).fetchall())
    hidden(owner.execute("SELECT application_name, query FROM pg_stat_activity").fetchall())


FAILURES = ("no server", "refused", "no database", "no schema", "unreadable")


def failing(how: str, dsn: str, refuses: str) -> tuple[list[str], dict[str, Any]]:
    """Return DSNs with the password that fail this way, and the options that go with them."""
    if how == "unreadable":
        return [
            f"postgresql://u:{PASSWORD}@h/d", f"postgresql://u:{SHOWN[0]}%zz@h/d",
            f"host=h password={SHOWN[0]} nonsense=1", f"host=h password='{SHOWN[0]}",
            f"postgresql://u:{SHOWN[0]}@h:port/d", f"mysql://u:{SHOWN[0]}@h/d",
        ], {}  # fmt: skip
    base = {
        "no server": "host=127.0.0.1 port=1 user=u dbname=d",
        "refused": refuses,
        "no database": conninfo.make_conninfo(dsn, dbname="no_such_database"),
        "no schema": dsn,
    }[how]
    return list(spellings(base).values()) if how == "no database" else [
        conninfo.make_conninfo(base, password=PASSWORD)
    ], ({"schema": "nothing_here"} if how == "no schema" else {})


@pytest.mark.parametrize("how", FAILURES)
async def test_failing_client_shows_no_password(
    clients: Clients, refuses: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.DEBUG)
    dsns, options = failing(how, clients.dsn, refuses)
    for dsn in dsns:
        with pytest.raises(dblock.DblockError) as failed:
            await clients(dsn, **options).lock("a").try_acquire()
        check_error(failed.value)
    if how != "no schema":
        with pytest.raises(Exception) as other:  # mostly an error of the driver  # noqa: PT011
            fenced_store.FencedStore(dsns[0]).put("k", 1, fence=1)
        hidden("".join(traceback.format_exception(other.value)))
    hidden(caplog.text)


async def test_client_with_an_engine_shows_no_password(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"postgresql+psycopg://u:{quote(PASSWORD, safe='')}@127.0.0.1:1/d"
    engines: list[Any] = [
        create_engine(url),
        create_async_engine(url),
        create_engine(url, connect_args={"connect_timeout": 1}),
    ]
    for engine in engines:
        client = clients(engine)
        hidden(client)
        with pytest.raises(dblock.DblockError) as failed:
            await client.lock("a").try_acquire()
        check_error(failed.value)
    hidden(caplog.text)


WAYS = ("--dsn", "DBLOCK_DSN", "PGPASSWORD", ".env", "pyproject.toml")


def given(way: str, dsn: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Give the command line a password in this way, and return its options and its environment."""
    monkeypatch.chdir(folder)
    for file in (".env", "pyproject.toml"):
        (folder / file).unlink(missing_ok=True)
    whole = conninfo.make_conninfo(dsn, password=PASSWORD)
    if way == "--dsn":
        return ["--dsn", whole], {}
    if way == "DBLOCK_DSN":
        return [], {"DBLOCK_DSN": whole}
    if way == "PGPASSWORD":
        return [], {"DBLOCK_DSN": dsn, "PGPASSWORD": PASSWORD}
    escaped = whole.replace("\\", "\\\\")
    text = f'DBLOCK_DSN="{escaped}"\n' if way == ".env" else f"[tool.dblock]\ndsn = '''{whole}'''\n"
    (folder / way).write_text(text)
    return [], {}


@pytest.mark.second_stage
@pytest.mark.parametrize("way", WAYS)
def test_no_command_shows_the_password(
    dsn: str, refuses: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = "host=127.0.0.1 port=1 user=u dbname=d"
    for where, commands in (
        (dsn, (["ls"], ["status", "--json"], ["doctor"], ["waiters"], ["ls", "--schema", "nothing_here"])),
        (wrong, (["ls"], ["status", "--json"], ["doctor"], ["install"], ["ls", "--debug"])),
        (refuses, (["ls"], ["run", "a", "--", "true"], ["bench", "--seconds", "0.5"])),
    ):
        options, environment = given(way, where, monkeypatch, tmp_path)
        with monkeypatch.context() as here:
            for name, value in environment.items():
                here.setenv(name, value)
            for command in commands:
                code = cli.main([command[0], *options, *command[1:]])
                output = capfd.readouterr()
                hidden(output.out, output.err)
                assert output.out or output.err
                assert (code == 0) is not (where != dsn or "nothing_here" in command) or command[0] == "doctor", output


def processes_of(root: int) -> dict[int, tuple[str, str]]:
    """Return a process and its descendants, each with its arguments and its environment."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    found = {}
    for pid in family:
        try:
            arguments, environment = ((Path("/proc") / str(pid) / what).read_bytes() for what in ("cmdline", "environ"))
        except OSError:
            continue
        found[pid] = arguments.decode("utf-8", "replace"), environment.decode("utf-8", "replace")
    return found


@pytest.mark.second_stage
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads the arguments of processes from /proc")
@pytest.mark.parametrize("way", ["DBLOCK_DSN", ".env"])
def test_no_process_has_the_password_in_its_arguments(
    dsn: str, shell: Shell, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes are `dblock run`, the keeper that watches the command, and the command with its environment."""
    _, environment = given(way, dsn, monkeypatch, tmp_path)
    bare = Shell(None, tmp_path)
    line = "env > environment.part; mv environment.part environment; while [ ! -e off ]; do sleep 0.02; done"
    process = bare.start("run", "job", "--ttl", "60", "--", "sh", "-c", line, env=environment, cold=True)
    try:
        exported = Path(
            eventually(lambda: (tmp_path / "environment").exists() and tmp_path / "environment", "the command")
        ).read_text()
        family = processes_of(process.pid)
        assert len(family) >= 3, "dblock run, the keeper, and the command"
        for arguments, _ in family.values():
            hidden(arguments)
        assert "DBLOCK_TOKEN=" in exported
        if way == ".env":
            hidden(exported)
            for _, inherited in family.values():
                hidden(inherited)
        else:
            assert f"DBLOCK_DSN={environment['DBLOCK_DSN']}" in exported, "an exported variable is passed on unchanged"
        with psycopg.connect(dsn) as looking:
            hidden(looking.execute("SELECT * FROM dblock.distributed_locks").fetchall())
        (tmp_path / "off").touch()
        done = ended(process)
        assert done.code == 0, done.err
        hidden(done.out, done.err)
    finally:
        bare.close()


def test_password_search_finds_a_password_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove that the search can fail."""
    for text in (PASSWORD, f"x {quote(PASSWORD, safe='')} y", [("a", PASSWORD)], {"dsn": f"password={PASSWORD}"}):
        with pytest.raises(AssertionError) as noticed:
            hidden(text)
        assert SHOWN[0] not in str(noticed.value).splitlines()[0]
    monkeypatch.setattr(target.Target, "__str__", lambda self: str(self._parameters))
    with pytest.raises(AssertionError):
        hidden(target.resolve(conninfo.make_conninfo("host=h", password=PASSWORD)))
    assert os.environ.get("PGPASSWORD") is None
