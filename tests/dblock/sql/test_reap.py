"""The reaper never removes a lock that is in use, and never lowers a token."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock import cli
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.reaper import Reaper
from tests.support import mutants
from tests.support.eventually import eventually
from tests.support.sessions import Sessions
from tests.support.tokens import T2
from tests.support.warm_start import Program

ALL = "SELECT reap('0 s')"


def names(owner: psycopg.Connection) -> set[str]:
    return {name for (name,) in owner.execute("SELECT name FROM distributed_locks")}


def test_reaper_removes_only_locks_that_are_free_and_long_idle(owner: psycopg.Connection) -> None:
    # By SQL: a client may renew a lease at any moment, and the reaper skips a row that is locked.
    for name in ("released long ago", "expired long ago", "released just now", "held since long"):
        owner.execute("SELECT try_acquire(%s, '600 s')", [name])
        if name.startswith("released"):
            owner.execute("SELECT release(l.name, l.token) FROM distributed_locks AS l WHERE l.name = %s", [name])
    owner.execute(
        "UPDATE distributed_locks SET granted_at = granted_at - interval '3 days',"
        " released_at = CASE WHEN name LIKE '%now' THEN released_at ELSE released_at - interval '3 days' END"
    )
    owner.execute(
        "UPDATE distributed_locks SET expires_at = clock_timestamp() - interval '2 days' WHERE name LIKE 'expired%'"
    )
    assert owner.execute("SELECT reap()").fetchone() == (2,)
    assert names(owner) == {"released just now", "held since long"}


def test_tokens_keep_rising_after_rows_were_reaped(owner: psycopg.Connection, client: dblock.Client) -> None:
    before = client.lock("a").acquire()
    before.release()
    assert owner.execute(ALL).fetchone() == (1,)
    assert client.lock("a").acquire().token > before.token


def test_reaper_skips_a_row_with_an_uncommitted_grant(sessions: Sessions, owner: psycopg.Connection) -> None:
    granting, reaping = sessions.open(), sessions.open()
    granting.do("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    granting.do("BEGIN")
    granting.do("SELECT try_acquire('a')")
    assert reaping.do(ALL) == (0,)
    granting.do("COMMIT")
    assert reaping.do(ALL) == (0,)
    assert names(owner) == {"a"}


@pytest.mark.usefixtures("known_tokens")
def test_try_during_a_reap_does_not_wait_and_the_next_try_is_granted(sessions: Sessions) -> None:
    """The reaper stops just before it deletes a row. One try comes then, another after the delete."""
    granting, reaping = sessions.open(), sessions.open("held")
    granting.do("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    gate = sessions.gate("DELETE")
    waiting = reaping.start(ALL)
    reaping.wait_until_blocked()
    assert granting.do("SELECT granted, remaining FROM try_acquire('a')") == (False, 0.0)
    gate.open()
    assert waiting.result(60) == (1,)
    assert granting.do("SELECT granted, token FROM try_acquire('a')") == (True, T2)


def test_reaper_works_in_batches(owner: psycopg.Connection, dsn: str) -> None:
    owner.execute("SELECT release(n::text, (SELECT token FROM try_acquire(n::text))) FROM generate_series(1, 25) AS n")
    assert owner.execute("SELECT reap('0 s', 10)").fetchone() == (10,)
    assert Reaper(resolve(dsn), idle=0, batch=4).once() == 15
    assert names(owner) == set()


def test_two_reapers_do_not_wait_for_each_other(sessions: Sessions) -> None:
    one, other = sessions.open(), sessions.open()
    one.do("SELECT release(n::text, (SELECT token FROM try_acquire(n::text))) FROM generate_series(1, 20) AS n")
    one.do("BEGIN")
    assert one.do("SELECT reap('0 s', 10)") == (10,)
    assert other.do("SELECT reap('0 s', 100)") == (10,)
    one.do("COMMIT")


def test_reaper_test_catches_a_reaper_that_removes_held_locks(owner: psycopg.Connection) -> None:
    mutants.replace(owner, mutants.altered("93_reap.sql", "l.expires_at <= clock_timestamp() - idle", "true"))
    owner.execute("SELECT try_acquire('a')")
    assert owner.execute(ALL).fetchone() == (1,)


@pytest.mark.parametrize("call", ["reap('-1 s')", "reap(NULL)", "reap('1 s', 0)", "reap('1 s', NULL)"])
def test_database_refuses_arguments_outside_the_limits(owner: psycopg.Connection, call: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        owner.execute(f"SELECT {call}".encode())


@pytest.mark.parametrize("options", [{"idle": -1}, {"interval": 0}, {"batch": 0}, {"batch": "x"}, {"idle": "day"}])
def test_reaper_class_refuses_arguments_outside_the_limits(dsn: str, options: dict[str, Any]) -> None:
    with pytest.raises(dblock.InvalidArgument):
        Reaper(resolve(dsn), **options)


def test_application_role_may_not_reap(dsn: str, role: str) -> None:
    schema.grant(resolve(dsn), role)
    with pytest.raises(dblock.AccessDenied):
        Reaper(resolve(conninfo.make_conninfo(dsn, user=role, password="app"))).once()


def test_running_reaper_survives_an_unreachable_database(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    away = Reaper(resolve("postgresql://127.0.0.1:1/nothing"), interval=0.01)
    running = threading.Thread(target=away.run, args=[stop])
    running.start()
    eventually(lambda: caplog.text.count("retrying in") >= 3, "three retries")
    stop.set()
    running.join(60)
    assert not running.is_alive()


def test_command_line_reaps_once(dsn: str, client: dblock.Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.lock("a").acquire().release()
    assert cli.main(["reaper", "--once", "--idle", "0", "--dsn", dsn]) == 0
    assert "1 idle locks" in capsys.readouterr().out


def test_command_line_reaps_until_interrupted(dsn: str, owner: psycopg.Connection, client: dblock.Client) -> None:
    client.lock("a").acquire().release()
    command = [sys.executable, "-m", "dblock.cli", "reaper", "--idle", "0", "--interval", "0.05", "--dsn", dsn]
    job = Program(command, stderr=subprocess.PIPE, text=True)
    assert job.stderr is not None
    assert "reaper deleted 1 idle locks" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 130
    job.stderr.close()


@pytest.mark.second_stage
@pytest.mark.usefixtures("needs_presence")
def test_reaper_removes_any_number_of_dead_presences(owner: psycopg.Connection, client: dblock.Client) -> None:
    """Each dead client leaves a presence with an advisory key. The server's lock table holds only a few thousand."""
    client.lock("a").acquire()
    eventually(lambda: owner.execute("SELECT count(*) FROM lock_presence").fetchone() == (1,), "a presence")
    owner.execute(
        "INSERT INTO lock_presence SELECT gen_random_uuid(), number, 0, pg_postmaster_start_time(), '150 ms'"
        " FROM generate_series(1, 60000) AS number"
    )
    owner.execute(ALL)
    noted = "SELECT count(*) FROM lock_presence WHERE gone_since IS NOT NULL"
    assert owner.execute(noted).fetchone() == (60_000,), "every dead presence, and not the live one"
    owner.execute("UPDATE lock_presence SET gone_since = gone_since - interval '2 minutes'")
    owner.execute(ALL)
    assert owner.execute("SELECT count(*) FROM lock_presence").fetchone() == (1,)


def test_reaper_never_marks_a_living_presence_as_gone(owner: psycopg.Connection, dsn: str) -> None:
    """An advisory key is a random signed number, which pg_locks shows as two unsigned halves."""
    with psycopg.connect(dsn, autocommit=True) as living:
        living.execute("SELECT dblock.register_presence(gen_random_uuid(), '1 hour') FROM generate_series(1, 64)")
        owner.execute(ALL)
        gone = "SELECT count(*), count(gone_since) FROM lock_presence"
        assert owner.execute(gone).fetchone() == (64, 0)
        signs = (
            "SELECT count(DISTINCT (advisory_key < 0, advisory_key::bit(64) & x'0000000080000000' = 0::bit(64)))"
            " FROM lock_presence"
        )
        assert owner.execute(signs).fetchone() == (4,)
    held = "SELECT count(*) FROM pg_locks JOIN lock_presence ON advisory_key = (classid::bigint << 32) | objid::bigint"
    eventually(lambda: owner.execute(held).fetchone() == (0,), "the end of the sessions")
    owner.execute(ALL)
    assert owner.execute(gone).fetchone() == (64, 64)


@pytest.mark.parametrize("gone_since", [None, "2020-01-01"])
def test_reaper_does_not_wait_for_a_locked_presence(
    owner: psycopg.Connection, dsn: str, client: dblock.Client, gone_since: str | None
) -> None:
    """A session that finds a holder dead locks its presence until its transaction ends, which may take long."""
    client.lock("a").acquire().release()
    owner.execute(
        "INSERT INTO lock_presence SELECT gen_random_uuid(), number, 0, pg_postmaster_start_time(), '150 ms', %s"
        " FROM generate_series(1, 3) AS number",
        [gone_since],
    )
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM dblock.lock_presence WHERE advisory_key = 2 FOR UPDATE")
        owner.execute("SET lock_timeout = '1s'")
        assert owner.execute(ALL).fetchone() == (1,)
        left = owner.execute(
            "SELECT advisory_key FROM lock_presence WHERE gone_since IS NOT NULL ORDER BY 1"
        ).fetchall()
        assert left == ([(2,)] if gone_since else [(1,), (3,)])


def test_full_batch_does_not_read_the_whole_table(owner: psycopg.Connection, dsn: str) -> None:
    owner.execute(
        "INSERT INTO distributed_locks (name, token, expires_at)"
        " SELECT 'idle ' || number, number, '-infinity' FROM generate_series(1, 5000) AS number"
    )
    assert Reaper(dsn, idle=0, batch=50).once() == 5000
    read = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE schemaname = 'dblock' AND relname = 'distributed_locks'"
    # The session reports its counters when it ends.
    (rows,) = eventually(lambda: (found := owner.execute(read).fetchone()) and found[0] and found, "the counters")
    assert rows <= 10_000, "each row is read once, and not all rows again for each of a hundred batches"


def test_reaper_does_not_wait_for_history_that_another_transaction_deletes(
    owner: psycopg.Connection, dsn: str, client: dblock.Client
) -> None:
    """A grant deletes old history too, in a transaction that may take long. Until the reaper's transaction ends, no
    other session could take the rows that the reaper has locked.
    """
    client.lock("a").acquire().release()
    owner.execute(
        "INSERT INTO lock_history (at, name, event)"
        " SELECT clock_timestamp() - interval '40 days', 'b', 'expired' FROM generate_series(1, 101)"
    )
    with psycopg.connect(dsn) as other:
        other.execute("SET search_path = dblock")
        other.execute("SELECT record_event('b', 1, 'expired', NULL, clock_timestamp())")
        owner.execute("SET lock_timeout = '1s'")
        assert owner.execute(ALL).fetchone() == (1,)
        assert owner.execute("SELECT count(*) FROM lock_history").fetchone() == (2,), (
            "the events that the other transaction has locked or written"
        )
    owner.execute(ALL)
    assert owner.execute("SELECT count(*) FROM lock_history").fetchone() == (1,)


def test_reaper_leaves_a_free_lock_to_its_waiter(sessions: Sessions, owner: psycopg.Connection) -> None:
    """A reaper locks rows until the end of its transaction. A lock that is about to be granted is not among them."""
    reaper, waiter = sessions.open(), sessions.open()
    token = waiter.do("SELECT token FROM try_acquire('a')")[0]
    attempt, client = (str(uuid.uuid4()) for _ in range(2))
    ticket = waiter.do("SELECT ticket FROM acquire('a', attempt => %s, client => %s)", attempt, client)[0]
    waiter.do("SELECT release('a', %s)", token)
    reaper.do("BEGIN")
    assert reaper.do("SELECT reap()") == (0,)
    assert waiter.do("SELECT granted FROM try_acquire('a', attempt => %s, ticket => %s)", attempt, ticket) == (True,)


def test_reaper_does_not_wait_for_a_client_that_queues_again(sessions: Sessions, owner: psycopg.Connection) -> None:
    reaper, client = sessions.open(), sessions.open()
    client.do("SELECT try_acquire('a')")
    owner.execute("INSERT INTO lock_clients VALUES (%s, '-infinity')", [uuid.UUID(int=1)])
    client.do("BEGIN")
    client.do("SELECT ticket FROM acquire('a', attempt => gen_random_uuid(), client => %s)", uuid.UUID(int=1))
    assert reaper.do(ALL) == (0,)
    client.do("COMMIT")
    assert owner.execute("SELECT seen_until > now() FROM lock_clients").fetchone() == (True,)
