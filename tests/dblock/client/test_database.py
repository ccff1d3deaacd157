"""How a client handles a database that fails, is slow, refuses, or is configured in an unusual way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import dblock
from dblock._core.schema_version import REVISION
from dblock._core.timings import Timings
from dblock._runtime import target
from dblock.admin import schema
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.forks import run_in_fork
from tests.support.proxy import Proxy
from tests.support.servers import private_server
from tests.support.sessions import Sessions
from tests.support.stages import first, sync_first
from tests.support.tokens import T1
from tests.support.warm_start import Program

WAITS = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
"""Finds a session that waits for a lock of Postgres."""


def set_patience(client: Any, seconds: float) -> None:
    """Change how long an open client waits for a reply: what comes before may take longer on a slow machine."""
    getattr(client, "_inner", client)._runtime.runner.reply_within = seconds


async def test_missing_schema_error_names_the_command_to_run(clients: Clients, bare_dsn: str) -> None:
    with pytest.raises(dblock.SchemaMissing, match="no dblock in schema 'dblock' .* Run: dblock install$"):
        await clients(bare_dsn).lock("a").try_acquire()


async def test_advice_names_the_schema_in_use(clients: Clients) -> None:
    with pytest.raises(dblock.SchemaMissing, match="Run: dblock install --schema elsewhere$"):
        await clients(schema="elsewhere").lock("a").try_acquire()


@pytest.mark.parametrize(
    ("revision", "error", "advice"),
    [("0000", dblock.SchemaOutdated, "Run: dblock install$"), ("9999", dblock.SchemaTooNew, "pip install --upgrade")],
)
async def test_older_and_newer_schema_raise_different_errors(
    clients: Clients, owner: psycopg.Connection, revision: str, error: type[Exception], advice: str
) -> None:
    owner.execute("UPDATE installed_revision SET version_num = %s", [revision])
    with pytest.raises(error, match=f"is at revision {revision}; .* needs {REVISION}. .*{advice}"):
        await clients().lock("a").try_acquire()


@pytest.mark.second_stage
async def test_unreachable_database_is_an_error_at_once(clients: Clients) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen, so that no other program has this port
        port = deaf.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(dblock.Unavailable, match="could not be asked"):
            await clients(f"postgresql://u:hunter2@127.0.0.1:{port}/db").lock("a").try_acquire()
        assert time.monotonic() - started < 15


async def test_wrong_role_is_named_in_the_error_without_the_password(clients: Clients) -> None:
    wrong = conninfo.make_conninfo(clients.dsn, user="no_such_role", password="hunter2")
    with pytest.raises(dblock.LoginRefused, match="no_such_role") as caught:
        await clients(wrong).lock("a").try_acquire()
    assert "hunter2" not in repr(caught.value)


async def test_read_only_server_raises_not_writable(clients: Clients, owner: psycopg.Connection) -> None:
    owner.execute(
        sql.SQL("ALTER DATABASE {} SET default_transaction_read_only TO on").format(sql.Identifier(owner.info.dbname))
    )
    with pytest.raises(dblock.NotWritable, match="target_session_attrs=read-write"):
        await clients().lock("a").try_acquire()


async def test_terminated_backends_are_replaced_without_the_caller_noticing(
    clients: Clients, owner: psycopg.Connection
) -> None:
    client = clients(presence=20)  # seconds in which a slow machine reports that the client is alive
    leases = await asyncio.gather(*(client.lock(f"lock {n}").acquire() for n in range(8)))
    owner.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dblock'")
    for lease in leases:
        await lease.renew()
        assert await lease.release()


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, ValueError])
def test_body_left_over_a_dead_connection_still_releases(
    dsn: str, owner: psycopg.Connection, error: type[BaseException]
) -> None:
    with dblock.Client(dsn, presence=20) as client:
        with pytest.raises(error), client.lock("a", ttl=600):
            owner.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dblock'")
            raise error
        assert client.lock("a").holder() is None


CLIENT_SESSIONS = "application_name = 'dblock' AND datname = current_database()"
NEW_SESSION = "SELECT 1 FROM pg_stat_activity WHERE " + CLIENT_SESSIONS + " AND NOT pid = ANY(%s)"


async def test_grant_whose_reply_was_lost_is_found_by_the_retry(clients: Clients) -> None:
    """The grant commits, and the connection is cut before the reply arrives. The retry must find its own grant."""
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        await (await client.lock("warm").acquire()).release()
        proxy.lose_reply_to(b"the lock in question")
        lease = await client.lock("the lock in question").try_acquire()
        assert proxy.lost == 1
        assert lease is not None
        assert (await clients().lock("the lock in question").holder()).token == lease.token
        await client.close()


async def test_call_whose_reply_is_lost_twice_raises_unavailable(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn, presence=None)  # so that only this call names the lock
        lease = await client.lock("the lock in question").acquire()
        proxy.lose_reply_to(b"the lock in question", times=10)
        with pytest.raises(dblock.Unavailable):
            await lease.renew()
        assert proxy.lost == 2
        await client.close()


async def test_release_whose_reply_was_lost_is_no_lost_lease(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        async with client.lock("the lock in question"):
            proxy.lose_reply_to(b"the lock in question")
        assert proxy.lost == 1
        assert await clients().lock("the lock in question").holder() is None
        await client.close()


async def test_retried_release_does_not_free_the_lock_of_the_next_holder(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy, dblock.Client(clients.dsn) as other:
        client = clients(proxy.dsn)
        proxy.before_cut = other.lock("the lock in question").acquire
        async with client.lock("the lock in question"):
            proxy.lose_reply_to(b"the lock in question")
        assert proxy.lost == 1
        assert other.lock("the lock in question").holder() is not None
        await client.close()


@pytest.mark.second_stage
@sync_first
@pytest.mark.usefixtures("known_tokens")
async def test_call_without_a_reply_is_given_up_and_undone(
    clients: Clients, sessions: Sessions, owner: psycopg.Connection
) -> None:
    """Another session has locked the table, and keeps the lock."""
    client = clients(pool_size=1, timings=Timings())
    await client.lock("warm").holder()
    keeper = sessions.open()
    keeper.do("BEGIN")
    keeper.do("LOCK TABLE distributed_locks")
    started = time.monotonic()
    with pytest.raises(dblock.Unavailable, match="has not answered for 1 s"):
        await client.lock("a").acquire(timeout=0)
    assert time.monotonic() - started < 15
    keeper.do("COMMIT")
    assert await client.lock("a").holder() is None
    # The listener may have connected to retry a cleanup that failed at once.
    assert owner.execute("SELECT count(*) FROM pg_stat_activity WHERE " + CLIENT_SESSIONS).fetchone() in ((1,), (2,)), (
        "the connection was closed, or leaked"
    )
    assert (await client.lock("a").try_acquire()).token == T1


@pytest.mark.second_stage
async def test_server_that_stops_replying_after_the_login_is_an_error_in_bounded_time(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        proxy.fall_silent_at(b"pg_backend_pid")
        client = clients(proxy.dsn, patience=1, timings=Timings())
        started = time.monotonic()
        with pytest.raises(dblock.Unavailable):
            await client.lock("a").acquire()
        await client.close()
        assert time.monotonic() - started < 15


@sync_first
@pytest.mark.second_stage
async def test_silent_network_is_an_error_in_bounded_time(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        lease = await client.lock("a").acquire()
        proxy.fall_silent()
        set_patience(client, 1)
        started = time.monotonic()
        with pytest.raises(dblock.Unavailable, match="has not answered"):
            await lease.renew()
        assert time.monotonic() - started < 15
        set_patience(client, 5)
        proxy.flow()
        await lease.renew()
        await client.close()


async def test_cancelled_acquire_gives_back_a_grant_that_still_arrives(
    dsn: str, sessions: Sessions, owner: psycopg.Connection
) -> None:
    """The task is cancelled while its grant waits for another session that has locked the table."""
    async with dblock.AsyncClient(dsn) as client:
        await (await client.lock("warm").acquire()).release()
        keeper = sessions.open()
        keeper.do("BEGIN")
        keeper.do("LOCK TABLE distributed_locks")
        leaving = asyncio.ensure_future(client.lock("a").try_acquire())
        await eventually_async(lambda: owner.execute(WAITS).fetchone(), "the grant waits")
        leaving.cancel()
        keeper.do("COMMIT")
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await client.lock("a").holder() is None


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.second_stage)])
async def test_acquiring_cancelled_at_any_moment_leaves_no_lock_and_no_connection(
    dsn: str, owner: psycopg.Connection, times: int
) -> None:
    """Cancel after 0, 1, 2, … 39 turns of the event loop, several times each."""
    async with dblock.AsyncClient(dsn, pool_size=2) as client:
        finished = 0
        for turns in range(40 * times):
            acquiring = asyncio.ensure_future(client.lock(f"lock {turns}").acquire())
            for _ in range(turns % 40):
                await asyncio.sleep(0)
            acquiring.cancel()
            try:
                lease = await acquiring
            except asyncio.CancelledError:
                assert await client.lock(f"lock {turns}").holder() is None, turns
            else:
                finished += 1
                assert await lease.release()
        assert (await client.lock("after").acquire()).token
        assert finished < 40 * times
    left = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'dblock'"
    eventually(lambda: owner.execute(left).fetchone() is None, "the end of all sessions")


async def test_client_closed_while_it_opens_stays_closed(dsn: str) -> None:
    client = dblock.AsyncClient(dsn)
    opening = asyncio.ensure_future(client.lock("a").try_acquire())
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(dblock.ClientClosed):
        await opening
    with pytest.raises(dblock.ClientClosed):
        await client.lock("a").try_acquire()


def test_garbage_collected_client_leaves_no_connection(dsn: str, owner: psycopg.Connection) -> None:
    client = dblock.Client(dsn)
    client.lock("a").holder()
    del client
    gc.collect()
    left = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'dblock'"
    eventually(lambda: not owner.execute(left).fetchone(), "the end of all sessions")


def test_ctrl_c_during_acquire_leaves_no_lock(dsn: str, sessions: Sessions, owner: psycopg.Connection) -> None:
    keeper = sessions.open()
    keeper.do("BEGIN")
    keeper.do("LOCK TABLE distributed_locks")
    script = "import dblock, sys; dblock.Client(sys.argv[1]).lock('a', ttl=600).acquire()"
    leaving = Program([sys.executable, "-c", script, dsn], stderr=subprocess.PIPE)

    def waits() -> Any:
        assert leaving.poll() is None
        return owner.execute(WAITS).fetchone()

    eventually(waits, "the acquire waits")
    leaving.send_signal(signal.SIGINT)
    keeper.do("COMMIT")
    leaving.communicate(timeout=20)
    assert leaving.returncode == -signal.SIGINT
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


@sync_first
@pytest.mark.parametrize("isolation", first(1, ["repeatable read", "serializable"]))
async def test_stricter_default_isolation_changes_nothing(
    clients: Clients, owner: psycopg.Connection, isolation: str
) -> None:
    owner.execute(
        sql.SQL("ALTER DATABASE {} SET default_transaction_isolation TO {}").format(
            sql.Identifier(owner.info.dbname), sql.Literal(isolation)
        )
    )
    inside = 0
    tokens: list[int] = []

    async def work(lock: dblock.AsyncLock[dblock.AsyncLease]) -> None:
        nonlocal inside
        for _ in range(10):
            async with lock as lease:
                inside += 1
                assert inside == 1
                tokens.append(lease.token)
                await asyncio.sleep(0)
                inside -= 1

    await asyncio.gather(*(work(clients().lock("a", timeout=60)) for _ in range(6)))
    assert len(tokens) == 60
    assert tokens == sorted(set(tokens))


async def test_odd_settings_of_the_session_change_nothing(clients: Clients, owner: psycopg.Connection) -> None:
    database = sql.Identifier(owner.info.dbname)
    for setting in ("datestyle TO 'German'", "intervalstyle TO 'sql_standard'", "timezone TO 'Asia/Kathmandu'"):
        owner.execute(sql.SQL("ALTER DATABASE {} SET " + setting).format(database))
    client = clients(presence=None)  # so that no renewal comes in between
    lease = await client.lock("a", ttl=90).acquire()
    holder = await client.lock("a").holder()
    assert holder.expires_at == lease.expires_at
    assert 80 < (lease.expires_at.timestamp() - time.time()) < 100


async def test_application_role_can_lock_and_touch_no_table(clients: Clients, role: str) -> None:
    app = conninfo.make_conninfo(clients.dsn, user=role, password="app")
    with pytest.raises(dblock.AccessDenied, match="dblock grant ROLE"):
        await clients(app).lock("a").try_acquire()

    schema.grant(target.resolve(clients.dsn), role)

    lock = clients(app).lock("a")
    lease = await lock.try_acquire()
    await lease.renew()
    assert (await lock.holder()).token == lease.token
    assert await lease.release()

    with psycopg.connect(app, autocommit=True) as connection:
        relations = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'dblock'::regnamespace AND relkind IN ('r', 'S')"
        ).fetchall()
        assert {name for (name,) in relations} == {
            "distributed_locks", "lock_clients", "lock_presence", "waiting_holds", "lock_queues", "lock_tickets",
            "lock_history", "lock_history_number_seq",
            "token_sequence", "token_server_start", "installed_revision", "token_clock",
            "migration_runs", "migration_runs_run_seq", "ddl_guards", "terms", "candidates", "schedules", "slot_runs",
            "slot_runs_run_seq", "schedule_events", "schedule_events_number_seq",
            "barriers", "barrier_passes", "barrier_waiters", "latches", "latch_counts",
        }  # fmt: skip
        for (name,) in relations:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(sql.SQL("SELECT * FROM dblock.{}").format(sql.Identifier(name)))
        for statement in (
            "DELETE FROM dblock.distributed_locks",
            "UPDATE dblock.distributed_locks SET token = 1",
            "SELECT nextval('dblock.token_sequence')",
            "SELECT setval('dblock.token_sequence', 1)",
            "CREATE TABLE dblock.mine ()",
            "SELECT dblock.commit_durably()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


def test_granting_to_an_unknown_role_names_the_role(dsn: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match="no role 'ghost'"):
        schema.grant(target.resolve(dsn), "ghost")


def test_granting_without_the_privilege_to_grant_is_access_denied(dsn: str, role: str) -> None:
    schema.grant(target.resolve(dsn), role)
    app = target.resolve(conninfo.make_conninfo(dsn, user=role, password="app"))
    with pytest.raises(dblock.AccessDenied):
        schema.grant(app, "pg_monitor")


def test_temporary_objects_cannot_replace_the_schemas_objects(dsn: str, role: str) -> None:
    """A SECURITY DEFINER function is only as safe as the names that it looks up."""
    schema.grant(target.resolve(dsn), role)
    with psycopg.connect(conninfo.make_conninfo(dsn, user=role, password="app"), autocommit=True) as app:
        app.execute("CREATE TEMP TABLE distributed_locks (name text, token bigint, expires_at timestamptz)")
        app.execute("SET search_path TO pg_temp, dblock")
        app.execute("SELECT dblock.try_acquire('a')")
        assert app.execute("SELECT count(*) FROM pg_temp.distributed_locks").fetchone() == (0,)


async def test_exhausted_pool_is_an_error_that_names_its_size(clients: Clients, owner: psycopg.Connection) -> None:
    # Without a lasting lease: the keep-alive would take the pool's connection for itself.
    client = clients(pool_size=1, patience=20, timings=replace(clients.timings, lasting=1000.0))
    await client.lock("warm").acquire()
    getattr(client, "_inner", client)._runtime.runner._pool._patience = 0.3
    with psycopg.connect(clients.dsn) as blocker:
        blocker.execute("LOCK TABLE dblock.distributed_locks IN ACCESS EXCLUSIVE MODE")
        stuck = asyncio.ensure_future(client.lock("a").try_acquire())
        await asyncio.sleep(0)
        await eventually_async(lambda: owner.execute(WAITS).fetchone(), "the grant waits")
        with pytest.raises(dblock.Unavailable, match="All 1 connections .* busy for 0.3 s"):
            await client.lock("b").try_acquire()
        blocker.rollback()
    assert await stuck


async def test_statement_that_the_server_cancels_is_no_grant(clients: Clients, owner: psycopg.Connection) -> None:
    database = sql.Identifier(owner.info.dbname)
    owner.execute(sql.SQL("ALTER DATABASE {} SET lock_timeout TO '100ms'").format(database))
    with psycopg.connect(clients.dsn) as blocker:
        blocker.execute("LOCK TABLE dblock.distributed_locks IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(dblock.DatabaseError, match="lock timeout"):
            await clients().lock("a").try_acquire()
    assert await clients().lock("a").try_acquire()


async def test_held_locks_take_no_connection_and_no_transaction(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients(pool_size=2)
    for n in range(50):
        await client.lock(f"lock {n}").acquire()

    def transactions() -> set[tuple[Any, ...]]:
        sessions = owner.execute(
            "SELECT pid, xact_start FROM pg_stat_activity WHERE application_name = 'dblock' AND datname = %s",
            [owner.info.dbname],
        ).fetchall()
        assert 1 <= len(sessions) <= 3, "one for calls, one of the keep-alive and one of the listener"
        return {session for session in sessions if session[1] is not None}

    # A renewal may be in flight at any moment. A held lock that needed a transaction would still have it later.
    before = transactions()
    await asyncio.sleep(0.5)
    await eventually_async(lambda: not before & transactions())


def test_client_opens_nothing_before_the_first_call(dsn: str, owner: psycopg.Connection) -> None:
    def connections() -> int:
        # A vacuum that the server starts by itself has the name of the database too.
        row = owner.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'",
            [owner.info.dbname],
        ).fetchone()
        assert row is not None
        return int(row[0])

    before, others = connections(), set(threading.enumerate())

    def started() -> set[str]:
        # Not their number, because a thread of an earlier test may end.
        return {thread.name for thread in set(threading.enumerate()) - others}

    with dblock.Client(dsn) as client:
        lock = client.lock("a")
        assert (started(), connections()) == (set(), before)
        lock.holder()
        assert (started(), connections()) == (set(), before + 1)
        lock.try_acquire()
        assert started() - {"dblock connecting"} == {"dblock keep-alive", "dblock listener"}
        assert connections() <= before + 3


async def test_logging_is_quiet_and_never_shows_the_password(
    clients: Clients, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema.grant(target.resolve(clients.dsn), role)
    caplog.set_level(logging.DEBUG)
    client = clients(conninfo.make_conninfo(clients.dsn, user=role, password="app-s3cret"))
    try:
        await client.lock("a").acquire()
    except dblock.Unavailable as error:  # if the server asks for passwords, this password is wrong
        assert "s3cret" not in repr(error)
    assert "s3cret" not in caplog.text
    assert "s3cret" not in repr(client)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.second_stage
def test_client_used_after_fork_opens_connections_of_its_own(dsn: str, owner: psycopg.Connection) -> None:
    def backends() -> set[int]:
        found = owner.execute("SELECT pid FROM pg_stat_activity WHERE " + CLIENT_SESSIONS).fetchall()
        return {pid for (pid,) in found}

    with dblock.Client(dsn) as client:
        mine = client.lock("a").acquire()
        # The parent itself replaces the connection of its listener if it forks while that connection is being opened.
        eventually(lambda: client._runtime.listener._newest)
        parents = backends()

        def body() -> bool:
            free, held = client.lock("b").try_acquire(), client.lock("a").try_acquire()
            with psycopg.connect(dsn) as watching:
                new = watching.execute(NEW_SESSION, [list(parents)]).fetchone()
            return free is not None and held is None and new is not None

        assert run_in_fork(body) == 0
        mine.renew()
        assert parents <= backends(), "the child has closed its parent's connection"
        assert mine.release()


@pytest.mark.second_stage
def test_child_leaves_its_parents_lease_alone(dsn: str) -> None:
    with dblock.Client(dsn) as client, client.lock("a") as lease:

        def body() -> bool:
            lease.__exit__(None, None, None)
            with pytest.raises(dblock.LeaseLost):
                lease.renew()
            return lease.remaining() == 0 and not lease.release()

        assert run_in_fork(body) == 0
        lease.renew()


@pytest.mark.second_stage
@pytest.mark.parametrize("held", ["the client's", "the pool's", "the keep-alive's"])
def test_thread_lock_that_was_held_at_the_fork_does_not_hang_the_child(dsn: str, held: str) -> None:
    with dblock.Client(dsn) as client, client.lock("parent's"):
        assert client._runtime.runner is not None
        locks: dict[str, Any] = {
            "the client's": client._runtime.opening,
            "the pool's": client._runtime.runner._pool._lock,
            "the keep-alive's": client._runtime.keepalive._starting,
        }
        runner = client._runtime.runner
        if held == "the client's":
            client._runtime.runner = None
        with locks[held]:
            assert run_in_fork(lambda: client.lock("child's").acquire().release()) == 0
        client._runtime.runner = runner


@pytest.mark.second_stage
@pytest.mark.parametrize("forks", [4, pytest.param(20, marks=pytest.mark.second_stage)])
def test_fork_while_other_threads_use_the_client_does_not_hang_the_child(dsn: str, forks: int) -> None:
    """At the fork the other threads may hold any of the client's locks. None of these threads exists in the child."""
    with dblock.Client(dsn, pool_size=2) as client:
        stop = threading.Event()

        def work(number: int) -> None:
            while not stop.is_set():
                client.lock(f"{number}").acquire().release()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(forks):
                assert run_in_fork(lambda: client.lock("of a child", ttl=20).acquire().release()) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()


FORK_IN_AN_IMPORT = """
import asyncio, os, signal, sys, threading
import dblock

class Notices:
    began, forked = threading.Event(), threading.Event()
    def find_spec(self, name, *_):
        if name == "dblock._runtime.runner" and not self.began.is_set():
            self.began.set()
            self.forked.wait(1)  # or until the fork has happened, if it does not wait for the import

async def lock(client):
    return await (await client.lock("a").acquire()).release()

sys.meta_path.insert(0, Notices())
client = getattr(dblock, sys.argv[1])(sys.argv[2])
if sys.argv[1] == "Client":
    use = lambda: client.lock("a").acquire().release()
else:
    use = lambda: asyncio.run(lock(client))
opens = threading.Thread(target=use)
opens.start()
Notices.began.wait()
child = os.fork()
Notices.forked.set()
if child == 0:
    signal.alarm(10)
    os._exit(0 if use() else 1)
opens.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.second_stage
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_fork_while_another_thread_imports_a_module_of_the_client_does_not_hang_the_child(dsn: str, kind: str) -> None:
    """In the child, an import that another thread of the parent had begun would never end."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK_IN_AN_IMPORT, kind, dsn], timeout=60, check=False)
    assert done.returncode == 0


FORK_IN_AN_EARLIER_IMPORT = """
import os, signal, sys, threading
import dblock

class Notices:
    began, forked = threading.Event(), threading.Event()
    def find_spec(self, name, *_):
        if name == sys.argv[1] and not self.began.is_set():
            self.began.set()
            self.forked.wait(1)  # or until the fork has happened, if it does not wait for the import

sys.meta_path.insert(0, Notices())
use = lambda: dblock.Client("host=/nowhere").close()
opens = threading.Thread(target=use)
opens.start()
Notices.began.wait()
child = os.fork()
Notices.forked.set()
if child == 0:
    signal.alarm(10)
    use()
    os._exit(0)
opens.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.second_stage
@pytest.mark.parametrize("module", ["dblock.client", "dblock._core.schema_version", "psycopg"])
def test_fork_does_not_hang_while_a_thread_makes_the_first_client(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_IN_AN_EARLIER_IMPORT, module], timeout=60, check=False
    )
    assert done.returncode == 0


FORK_THROUGH_AN_INTERRUPT = """
import os, signal, sys, threading, time
import dblock
from dblock._runtime.forks import importing

client = dblock.Client(sys.argv[1], presence=None)
lease = client.lock("a").acquire()
held, done = threading.Event(), threading.Event()

def hold():
    with importing:
        held.set()
        done.wait()

def interrupt(*_):
    raise KeyboardInterrupt

threading.Thread(target=hold, daemon=True).start()
held.wait()
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.2)
child = os.fork()
if child == 0:
    signal.alarm(10)
    os._exit(1 if client._runtime.runner._pool._idle else 0)
done.set()
lease.release()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.second_stage
def test_child_has_no_connection_of_its_parent_though_a_signal_interrupted_the_wait_of_the_fork(dsn: str) -> None:
    """Python forks even if a callback that runs before the fork raises."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_THROUGH_AN_INTERRUPT, dsn], timeout=60, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("kind", [dblock.Client, dblock.AsyncClient])
async def test_no_exception_in_the_chain_contains_the_password(dsn: str, kind: type) -> None:
    async def raised(where: str) -> BaseException:
        with pytest.raises(dblock.DblockError) as error:
            taken = kind(where).lock("a").try_acquire()
            if kind is dblock.AsyncClient:
                await taken
        return error.value

    for where in ("postgresql://u:s3cret@127.0.0.1:1/x", "postgresql://u:s3cret%zz@h/x", "password=s3cret nonsense=1"):
        error: BaseException | None = await raised(where)
        while error is not None:
            assert "s3cret" not in repr(error) + str(error)
            pgconn = getattr(error, "pgconn", None)
            assert pgconn is None
            error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "where",
    ["postgresql://u@a..b/x", f"postgresql://u@{'a' * 70}/x", "host=\udcff password=s3cret", "host=h dbname=a\0b"],
    ids=ascii,
)
async def test_dsn_that_libpq_cannot_read_is_an_invalid_argument(clients: Clients, where: str) -> None:
    with pytest.raises(dblock.InvalidArgument) as refused:
        await clients(where).lock("a").try_acquire()
    assert "s3cret" not in str(refused.value)


async def test_holder_with_an_infinite_deadline_can_be_read(clients: Clients, owner: psycopg.Connection) -> None:
    await clients(presence=None).lock("a").acquire()  # so that no renewal comes in between
    owner.execute("UPDATE distributed_locks SET expires_at = 'infinity'")
    holder = await clients().lock("a").holder()
    assert holder.expires_at.year == 9999


def test_pickling_a_client_is_refused_with_advice(dsn: str) -> None:
    with dblock.Client(dsn) as client, pytest.raises(TypeError, match="Make a client in the other one"):
        pickle.dumps(client.lock("a"))


@pytest.fixture
def unreplicated(request: pytest.FixtureRequest) -> Iterator[tuple[str, psycopg.Connection]]:
    """Start a server whose commits wait for a missing standby, and open a session that does not wait for it."""
    if request.config.getoption("--postgres") != "embedded":
        pytest.skip("changes settings of the server")
    with private_server(in_memory=True, installed=True) as own, psycopg.connect(own.url, autocommit=True) as owner:
        owner.execute("SET synchronous_commit = local")
        owner.execute("SET search_path TO dblock")
        owner.execute("ALTER SYSTEM SET synchronous_standby_names = 'missing'")
        owner.execute("SELECT pg_reload_conf()")
        eventually(lambda: waits_for_a_standby(own.url))
        yield own.url, owner


def waits_for_a_standby(url: str) -> bool:
    """Return whether a new session has the setting."""
    with psycopg.connect(url) as session:
        return session.execute("SHOW synchronous_standby_names").fetchone() == ("missing",)


@pytest.mark.second_stage
@sync_first
async def test_grant_that_arrives_after_patience_ends_is_given_back(
    clients: Clients, unreplicated: tuple[str, psycopg.Connection]
) -> None:
    """The grant waits for a standby. When its statement is cancelled, the grant is already committed."""
    url, owner = unreplicated
    client = clients(url)
    await client.lock("warm").holder()
    set_patience(client, 1)
    with pytest.raises(dblock.Unavailable, match="has not answered"):
        await client.lock("a", ttl=600).acquire()
    assert owner.execute("SELECT token > 0 FROM distributed_locks").fetchone() == (True,)
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)
    await client.close()


@pytest.mark.second_stage
@pytest.mark.parametrize("retry", ["false", "true"])
def test_grant_found_by_a_retry_is_as_durable_as_the_first_request(
    unreplicated: tuple[str, psycopg.Connection], retry: str
) -> None:
    """The first request was cut off while it waited for a standby. The retry must wait for a standby too."""
    url, owner = unreplicated
    attempt = "SELECT dblock.try_acquire('a', attempt => '0f1e2d3c4b5a69788796a5b4c3d2e1f0', retry => {})"
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    for sending in ("false", retry):
        session = psycopg.connect(url, autocommit=True)
        thread = threading.Thread(target=_quietly, args=(session, attempt.format(sending)))
        thread.start()

        def waits(thread: threading.Thread = thread) -> Any:
            assert thread.is_alive(), "the request returned without waiting for a standby"
            return owner.execute(waiting).fetchone()

        row = eventually(waits, "the request waits for a standby")
        owner.execute("SELECT pg_terminate_backend(%s)", row)
        thread.join()
        session.close()


def _quietly(session: psycopg.Connection, statement: str) -> None:
    with contextlib.suppress(psycopg.Error):
        session.execute(statement.encode())
