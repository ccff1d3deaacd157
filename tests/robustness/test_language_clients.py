"""Each client of docs/languages that a program imports: what it promises about one lease, and about one wait."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest

import dblock
from tests.robustness.languages.conversation import Conversation
from tests.robustness.languages.programs import CLIENTS, command, missing, skip_without, standing_still, variables
from tests.support.eventually import eventually
from tests.support.machine import before_long, measured, not_judged, too_late_to_renew

# The compilers take a while, if other programs want the machine too.
pytestmark = [pytest.mark.second_stage, pytest.mark.timeout(300)]

LANGUAGES = ["node", "go", "java"]

NAME = """it's "a lock" of C:\\new; -- $1 %s :x é"""
"""Every test uses this name, which a client that builds its SQL from strings gets wrong."""


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request: pytest.FixtureRequest, tcp_dsn: str) -> Iterator[Conversation]:
    skip_without(request.param)
    with Conversation(request.param, tcp_dsn) as conversation:
        yield conversation


@pytest.fixture
def operator(tcp_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(tcp_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def client(tcp_dsn: str) -> Iterator[dblock.Client]:
    with dblock.Client(tcp_dsn) as client:
        yield client


def end_sessions(operator: psycopg.Connection, of: str = "%") -> int:
    """End the sessions whose last statement is like this, and return how many there were."""
    ended = operator.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND query LIKE %s",
        [of],
    )
    return len(ended.fetchall())


def tickets(operator: psycopg.Connection) -> int:
    ((number,),) = operator.execute("SELECT count(*) FROM dblock.lock_tickets").fetchall()
    return int(number)


def test_holder_has_the_lock_until_it_releases_it(
    program: Conversation, operator: psycopg.Connection, client: dblock.Client
) -> None:
    token = program.acquire(NAME, ttl=30)
    assert operator.execute("SELECT token FROM dblock.holder(%s)", [NAME]).fetchone() == (token,)
    assert client.lock(NAME).try_acquire() is None
    assert program.ask("held") == "true"
    assert program.ask("release") == "true"
    assert program.ask("held") == "false"
    lease = client.lock(NAME).try_acquire()
    assert lease is not None
    assert lease.token > token
    assert program.ask("release") == "false"  # and the next holder keeps the lock
    lease.raise_if_lost()
    assert lease.release()
    assert program.is_silent()


def test_lease_is_kept_past_its_ttl_and_the_end_of_all_connections(
    program: Conversation, operator: psycopg.Connection
) -> None:
    ttl = 3
    with measured() as lateness:
        program.acquire(NAME, ttl=ttl)
        assert end_sessions(operator) > 0
        time.sleep(ttl * 1.2)
        held, late = program.ask("held"), lateness()
    # To connect, the program and the server exchange four messages before the one that renews.
    if held != "true" and too_late_to_renew(late * 4, ttl):
        not_judged("to connect and renew")
    assert held == "true"
    assert program.ask("release") == "true"
    assert program.is_silent()


def test_forced_release_is_reported_as_a_loss(program: Conversation, operator: psycopg.Connection) -> None:
    token = program.acquire(NAME, ttl=1.5)
    operator.execute("SELECT dblock.force_release(%s, %s, now => true)", [NAME, token])
    assert program.hear() == "lost"
    assert program.ask("held") == "false"
    assert program.ask("release") == "false"


@contextmanager
def slow_renewals(operator: psycopg.Connection) -> Iterator[None]:
    """Let each renewal begin with a pause."""
    ((right,),) = operator.execute("SELECT pg_get_functiondef('dblock.renew'::regproc)").fetchall()
    operator.execute(right.replace("BEGIN\n", "BEGIN\n    PERFORM pg_sleep(0.5);\n", 1))
    try:
        yield
    finally:
        operator.execute(right)


def test_renewal_that_arrives_after_the_release_reports_no_loss(
    program: Conversation, operator: psycopg.Connection
) -> None:
    with slow_renewals(operator):
        program.acquire(NAME, ttl=3)
        eventually(lambda: under_way(operator, "%dblock.renew%"))
        assert program.ask("release") == "true"
        eventually(lambda: not under_way(operator, "%dblock.renew%"))
    assert program.ask("held") == "false"
    assert program.is_silent()


def under_way(operator: psycopg.Connection, statement: str) -> bool:
    found = operator.execute(
        "SELECT FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid() AND query LIKE %s", [statement]
    )
    return found.fetchone() is not None


def test_waiter_is_woken_by_the_release(
    program: Conversation, operator: psycopg.Connection, client: dblock.Client
) -> None:
    took = []
    for _ in range(3):
        with client.lock(NAME):
            program.tell("acquire", NAME, 30, 20)
            eventually(lambda: tickets(operator) == 1)
        began = time.monotonic()
        assert program.hear().startswith("granted ")
        took.append(time.monotonic() - began)
        assert program.ask("release") == "true"
    # A waiter that hears nothing asks a second after it has left its ticket.
    assert min(took) < 0.6


def test_waiter_that_misses_its_wake_up_asks_by_itself(
    program: Conversation, operator: psycopg.Connection, client: dblock.Client
) -> None:
    with client.lock(NAME):
        program.tell("acquire", NAME, 30, 20)
        eventually(lambda: tickets(operator) == 1)
        assert end_sessions(operator, "LISTEN%") > 0
    with before_long(2):
        assert program.hear().startswith("granted ")
    assert program.ask("release") == "true"


def test_waiter_stands_in_the_queue_and_keeps_its_place(
    program: Conversation, operator: psycopg.Connection, client: dblock.Client, tcp_dsn: str
) -> None:
    with dblock.Client(tcp_dsn) as late:
        with client.lock(NAME):
            program.tell("acquire", NAME, 30, 20)
            eventually(lambda: tickets(operator) == 1)
            time.sleep(3.5)  # a ticket without a heartbeat is passed over after three seconds
        assert late.lock(NAME).try_acquire() is None  # before or after the grant, the lock is not free
        assert program.hear().startswith("granted ")
    assert program.ask("release") == "true"


def test_waiter_that_gives_up_leaves_no_ticket(
    program: Conversation, operator: psycopg.Connection, client: dblock.Client
) -> None:
    with client.lock(NAME) as lease:
        assert program.ask("acquire", NAME, 30, 0.3) == "busy"
        assert tickets(operator) == 0
        lease.raise_if_lost()


def test_lease_is_lost_in_time_while_the_server_stands_still(tcp_dsn: str, operator: psycopg.Connection) -> None:
    """In all languages at once, because the server has to stand still for longer than the clients wait for a reply."""
    languages = [language for language in LANGUAGES if missing(language) is None]
    ttl = 2
    with ExitStack() as stack, measured() as lateness:
        programs = {one: stack.enter_context(Conversation(one, tcp_dsn)) for one in languages}
        for language, program in programs.items():
            program.acquire(f"{NAME} {language}", ttl)
        time.sleep(ttl / 2)  # renewals have taken place
        with standing_still(operator):
            began = time.monotonic()
            for program in programs.values():
                assert program.hear() == "lost"
                # The last request that got a reply was sent before, so the trust window has ended.
                # The program, the thread that reads and this test run one after another, and each may be late.
                assert time.monotonic() - began < ttl + 3 * lateness()
                assert program.ask("held") == "false"
            # A call fails, because the database does not answer.
            with before_long(10):
                for program in programs.values():
                    program.tell("acquire", NAME, 30, 1)
                for program in programs.values():
                    assert program.hear().startswith("failed ")
        # The next calls use other connections.
        for language, program in programs.items():
            program.acquire(f"{NAME} {language}", ttl)
            assert program.ask("release") == "true"
            assert program.is_silent()


@pytest.mark.parametrize("language", LANGUAGES)
def test_client_fails_to_open_without_the_database(language: str) -> None:
    skip_without(language)
    closed = "postgresql://postgres:secret@127.0.0.1:1/postgres"
    done = subprocess.run(command(language, "converse"), env=variables(closed), capture_output=True, timeout=30)
    assert done.returncode != 0
    assert done.stdout == b""


NODE = """
const { Locks } = require("./dblock.js");
Locks.open(process.env.DBLOCK_DSN, { presence: 0.2 }).then(async (locks) => {
  const lease = await locks.acquire("job", { ttl: Number(process.env.DBLOCK_TTL) });
  lease.lost.addEventListener("abort", () => { console.log(lease.lost.reason.message); process.exit(3); });
  console.log(lease.token);
});
"""


@pytest.fixture
def node_holder(request: pytest.FixtureRequest, tcp_dsn: str) -> Iterator[subprocess.Popen[str]]:
    """A program in Node.js that holds the lock with a presence."""
    skip_without("node")
    given = variables(tcp_dsn) | {"DBLOCK_TTL": getattr(request, "param", "30")}
    holder = subprocess.Popen(["node", "-e", NODE], env=given, stdout=subprocess.PIPE, text=True, cwd=CLIENTS)
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_lock_of_a_killed_node_process_is_free_after_its_grace(
    tcp_dsn: str, node_holder: subprocess.Popen[str]
) -> None:
    assert node_holder.stdout is not None
    token = int(node_holder.stdout.readline())
    with dblock.Client(tcp_dsn) as client:
        assert client.lock("job").try_acquire() is None
        node_holder.kill()
        with before_long(2):
            lease = client.lock("job").acquire(timeout=25)
        assert lease.token > token


def test_node_lease_is_lost_with_the_connection_of_its_presence(
    tcp_dsn: str, node_holder: subprocess.Popen[str]
) -> None:
    assert node_holder.stdout is not None
    node_holder.stdout.readline()
    with psycopg.connect(tcp_dsn, autocommit=True) as connection:
        ended = connection.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE '%register_presence%'"
            " AND pid <> pg_backend_pid()"
        ).fetchone()
    assert ended == (1,)
    assert node_holder.stdout.readline() == "The lease of job was lost: the presence has ended. Stop writing.\n"
    assert node_holder.wait(10) == 3


@pytest.mark.parametrize("node_holder", ["3"], indirect=True)
def test_node_lease_is_lost_when_it_is_force_released(tcp_dsn: str, node_holder: subprocess.Popen[str]) -> None:
    assert node_holder.stdout is not None
    token = int(node_holder.stdout.readline())
    with psycopg.connect(tcp_dsn, autocommit=True) as connection:
        connection.execute("SELECT dblock.force_release('job', %s, now => true)", [token])
    assert "another client may hold the lock" in node_holder.stdout.readline()
