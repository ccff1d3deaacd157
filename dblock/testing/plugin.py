"""The pytest plugin: clients on a private database, and a check that each test leaves nothing behind.

pytest loads it by itself. `-p no:dblock` turns it off. A project that uses none of its fixtures pays for this module
alone: it imports the rest of dblock when a fixture is first used.

    def test_invoice_is_closed_once(dblock_client):
        with dblock_client.lock("invoice:42"):
            ...

The database is on an embedded Postgres that all processes of the run share and that ends with them, or a schema in the
database of `--dblock-dsn`. Each process of pytest-xdist has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dblock.async_client import AsyncClient
    from dblock.client import Client
    from dblock.testing.chaos_verbs import Chaos
    from dblock.testing.leaks import Watch
    from dblock.testing.private_database import PrivateDatabase
    from dblock.testing.warm_client import WarmClient
    from dblock.testing.warm_connections import WarmConnections

_FOLDER = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dblock")
    group.addoption(
        "--dblock-dsn", metavar="DSN", help="test in a schema of this database, not on an embedded Postgres"
    )
    parser.addini("dblock_dsn", "test in a schema of this database, not on an embedded Postgres", default="")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give every process of pytest-xdist the same folder."""
    node.workerinput["dblock_folder"] = str(_folder(node.config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Let the error of `assert_locked` name the holder, the token and the line of each grant of its lock."""
    try:
        return (yield)
    except Exception as error:
        leaks = sys.modules.get("dblock.testing.leaks")
        if leaks is not None and leaks.current is not None:
            from dblock.testing.assertions import name_grants

            name_grants(error)
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Undo chaos before any fixture ends, so that the clients of other fixtures can release their leases."""
    leaks = sys.modules.get("dblock.testing.leaks")
    try:
        if leaks is not None and leaks.current is not None:
            leaks.current.undo_chaos()
    finally:
        result = yield
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    """Wait until the server is gone, so that nothing of it is left when pytest has ended."""
    if _FOLDER in config.stash and not hasattr(config, "workerinput"):
        from dblock.testing.shared_server import wait_until_gone

        wait_until_gone(config.stash[_FOLDER])


@pytest.fixture(scope="session")
def _dblock_database(request: pytest.FixtureRequest) -> Iterator[PrivateDatabase]:
    import psycopg

    from dblock.errors import DblockError
    from dblock.testing.private_database import private_database
    from dblock.testing.private_schema import private_schema

    dsn = request.config.getoption("--dblock-dsn") or request.config.getini("dblock_dsn")
    worker = getattr(request.config, "workerinput", {}).get("workerid")
    with ExitStack() as stack:
        made = private_schema(dsn) if dsn else private_database(_folder(request.config), worker)
        refusal = None
        try:
            database = stack.enter_context(made)
        except (DblockError, psycopg.Error) as error:
            of = "no database at --dblock-dsn (or at the setting dblock_dsn)" if dsn else "no Postgres"
            refusal = f"dblock has {of} to run this test on. {error}"
        if refusal:
            # Without a traceback, because every test that uses a fixture shows the message.
            pytest.fail(refusal, pytrace=False)
        yield database


@pytest.fixture
def _dblock_watch(request: pytest.FixtureRequest, _dblock_database: PrivateDatabase) -> Iterator[Watch]:
    """Watch the clients of this test; afterwards clean the rows, and fail if the test has left something behind."""
    from dblock.testing.leaks import Watch, watching
    from dblock.testing.warm_client import threads_of

    with watching(Watch()) as watch:
        yield watch
    watch.note_calls()
    watch.close_clients()
    watch.note_threads(threads_of(watch.lent))
    _dblock_database.note_left(watch)
    _dblock_database.clean(watch)
    if watch.left:
        pytest.fail("\n  ".join([f"{request.node.name} has left behind:", *watch.left]), pytrace=False)


@pytest.fixture
def dblock_dsn(_dblock_database: PrivateDatabase, _dblock_watch: Watch) -> str:
    """The DSN of a database with dblock installed, without any locks.

    For `--dblock-dsn`, give your own clients `schema=dblock_schema` too.
    """
    return _dblock_database.dsn


@pytest.fixture
def dblock_schema(_dblock_database: PrivateDatabase, _dblock_watch: Watch) -> str:
    """The schema of dblock in the database of `dblock_dsn`: `dblock`, or a private one with `--dblock-dsn`."""
    return _dblock_database.schema


@pytest.fixture(scope="session")
def _dblock_warm_client(_dblock_database: PrivateDatabase) -> Iterator[WarmClient]:
    from dblock.testing.warm_client import WarmClient

    warm = WarmClient(_dblock_database)
    yield warm
    warm.close()


@pytest.fixture
def dblock_client(dblock_dsn: str, _dblock_warm_client: WarmClient, _dblock_watch: Watch) -> Iterator[Client]:
    """A client of the test's database, without any leases."""
    yield _dblock_warm_client.lend(_dblock_watch)
    _dblock_watch.note_calls()
    _dblock_warm_client.take_back(_dblock_watch)


@pytest.fixture(scope="session")
def _dblock_warm_connections(_dblock_database: PrivateDatabase) -> Iterator[WarmConnections]:
    from dblock.testing.warm_connections import WarmConnections

    warm = WarmConnections(_dblock_database.dsn)
    yield warm
    warm.close()


@pytest.fixture
def dblock_async_client(
    dblock_schema: str, _dblock_warm_connections: WarmConnections, _dblock_watch: Watch
) -> Iterator[AsyncClient]:
    """An AsyncClient of the test's database, closed at the end of the test.

    It belongs to the event loop of its first call, so it works with every plugin that runs asynchronous tests. It has
    no presence, because opening its session takes longer than most tests.
    """
    from dblock.async_client import AsyncClient
    from dblock.testing.leaks import close

    warm = _dblock_warm_connections
    client = AsyncClient(warm, schema=dblock_schema, presence=None)  # type: ignore[arg-type]
    yield client
    _dblock_watch.note_calls()  # before the client is closed, which releases its leases
    if _dblock_watch.left or _dblock_watch.disturbed:
        warm.close()
    else:
        warm.take_back(client)
    close(client)


@pytest.fixture
def chaos(
    _dblock_database: PrivateDatabase,
    _dblock_warm_client: WarmClient,
    _dblock_warm_connections: WarmConnections,
    _dblock_watch: Watch,
) -> Iterator[Chaos]:
    """The chaos verbs for the clients of this test. The end of the test undoes them."""
    from dblock.testing.chaos import PostgresChaos

    # So that the verbs neither disturb nor count connections that this test does not use.
    closed = _dblock_warm_connections.close()
    if not _dblock_watch.lent:
        closed += _dblock_warm_client.close()
    _dblock_database.wait_for_end(closed)
    made = PostgresChaos(_dblock_database, _dblock_watch)
    yield made
    made.undo()


def _folder(config: pytest.Config) -> Path:
    """Return the folder of this run's server, the same in all its processes. It may not exist."""
    if _FOLDER not in config.stash:
        from dblock.testing.shared_server import new_folder

        given = getattr(config, "workerinput", {}).get("dblock_folder")
        config.stash[_FOLDER] = Path(given) if given else new_folder()
    return config.stash[_FOLDER]
