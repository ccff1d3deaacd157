"""dblock doctor: each trouble is made and found, alone; what it says mends it; and a healthy database has none."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import dblock
import fenced_store
from dblock import cli
from dblock._core.options import quoted
from dblock._runtime import target
from dblock.admin import schema
from dblock.admin.doctor import CHECKS, Finding, Limits, clocks, examine, link, patient, snapshots
from dblock.admin.doctor.bodies import bodies
from dblock.admin.doctor.patient import Sample
from dblock.embedded import Server
from tests.support.pooler import needs_pgbouncer, pooled
from tests.support.proxy import Proxy
from tests.support.servers import major, private_server
from tests.support.shell import Shell, ended, until
from tests.support.stages import first
from tests.support.standby import copy_of
from tests.support.terminal import Terminal

_numbers = itertools.count()

SETTINGS = {
    "max_connections": "25",
    "max_prepared_transactions": "2",
    "wal_level": "logical",
    # On, and never at work: what a test has made stays as it is.
    "autovacuum_naptime": "1d",
}


@pytest.fixture(scope="module")
def healthy() -> Iterator[Server]:
    """A server that waits for its disk, with a database to be cloned; small, so that it is soon full."""
    small = {"max_notify_queue_pages": "64"} if major() >= 17 else {}
    with private_server(SETTINGS | small, in_memory=True) as server:
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("CREATE DATABASE template")
        template = conninfo.make_conninfo(server.url, dbname="template")
        schema.install(target.resolve(template))
        fenced_store.install(template)
        yield server


@pytest.fixture
def dsn(healthy: Server) -> Iterator[str]:
    """A database of its own for each test."""
    name = f"test_{next(_numbers)}"
    with psycopg.connect(healthy.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template")
        yield conninfo.make_conninfo(healthy.url, dbname=name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def role(healthy: Server) -> str:
    name = f"app_{next(_numbers)}"
    with psycopg.connect(healthy.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN")
    return name


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where what is looked for is not a clock, no time is spent on clocks."""
    monkeypatch.setattr(clocks, "SAMPLE", 0.0)


def found(dsn: str, name: str = "dblock", *, age: float = 300, listeners: int = 300) -> list[Finding]:
    return examine(target.resolve(dsn), name, limits=Limits(age, listeners)).findings


def only(dsn: str, check: str, level: str, **options: Any) -> Finding:
    """Return the one finding that there is."""
    findings = found(dsn, **options)
    assert [(one.id, one.level) for one in findings] == [(check, level)], findings
    assert all((findings[0].what, findings[0].why, findings[0].command))
    return findings[0]


def mend(dsn: str, finding: Finding) -> None:
    """Run what a finding says: commands of dblock's, or the statements that it begins with."""
    if finding.command.startswith("dblock "):
        words = shlex.split(finding.command)
        assert cli.main(["--dsn", dsn, *words[1:]]) == 0
        return
    with psycopg.connect(dsn, autocommit=True) as owner:
        for statement in re.findall(r"[A-Z][^;]*;", finding.command):
            owner.execute(statement.encode())


def play(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as owner:
        for statement in statements:
            owner.execute(statement.encode())


def database(dsn: str) -> str:
    return str(conninfo.conninfo_to_dict(dsn)["dbname"])


@contextmanager
def server_set(dsn: str, name: str, value: str) -> Iterator[None]:
    """Change a setting of the whole server, for a while."""

    before = current(dsn, name)
    try:
        set_server(dsn, name, value)
        yield
    finally:
        set_server(dsn, name, before)
        play(dsn, f"ALTER SYSTEM RESET {name}")


def set_server(dsn: str, name: str, value: str) -> None:
    play(dsn, f"ALTER SYSTEM SET {name} = '{value}'", "SELECT pg_reload_conf()")
    until(lambda: current(dsn, name) == value, f"{name} = {value}")


def current(dsn: str, name: str) -> str:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
        assert row is not None
        return str(row[0])


# A healthy one.


def test_a_healthy_database_has_nothing_said_of_it(shell: Shell, dsn: str, client: dblock.Client) -> None:
    client.lock("held", ttl=60).acquire()
    client.lock("free").acquire().release()
    done = shell.run("doctor")
    assert (done.code, done.out, done.err) == (0, f"{len(CHECKS)} checks, nothing found.\n", "")
    facts = shell.run("doctor", "--json").json
    assert facts["findings"] == []
    assert facts["checked"] == [check.id for check in CHECKS]
    assert len(set(facts["checked"])) == len(CHECKS) > 30
    assert database(dsn) in facts["database"]


def test_a_role_that_may_only_lock_and_see_is_told_what_it_cannot_check(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(dsn, role, may=["lock", "see"])
    done = shell.run("doctor", "--json", dsn=conninfo.make_conninfo(dsn, user=role))
    assert done.code == 0
    assert {(one["level"], one["id"]) for one in done.json["findings"]} == {("note", "cannot-check")}
    said = " ".join(one["what"] for one in done.json["findings"])
    for check in ("token-below-locks", "clock-set-back", "listeners", "old-snapshot", "token-below-store"):
        assert check in said
        assert check not in done.json["checked"]
    assert "pg_monitor" in said
    assert "owner" in said
    assert {"token-cache", "schema-functions", "schema-tables", "direct-rights", "fsync"} <= set(done.json["checked"])


def test_a_login_that_may_do_nothing_at_all_has_notes(dsn: str, role: str) -> None:
    findings = found(conninfo.make_conninfo(dsn, user=role))
    assert {one.level for one in findings} == {"note"}
    assert {one.id for one in findings} == {"may-not-lock", "cannot-check"}


def test_one_that_only_looks_on_is_told_that_it_may_not_lock(dsn: str, role: str) -> None:
    schema.grant(dsn, role, may=["see"])
    findings = found(conninfo.make_conninfo(dsn, user=role))
    (note,) = [one for one in findings if one.id != "cannot-check"]
    assert (note.id, note.level, note.command) == ("may-not-lock", "note", f"dblock grant {role}")


@pytest.mark.parametrize("name", first(1, ['a%s"$1', "Quoted Name", "ünï:code"]))
def test_any_schema_name_is_healthy(dsn: str, name: str) -> None:
    schema.install(dsn, name)
    assert found(dsn, name) == []
    play(dsn, f"ALTER SEQUENCE {quoted(name)}.token_sequence CYCLE")
    mend(dsn, only(dsn, "token-cycle", "error", name=name))
    assert found(dsn, name) == []


# What is made with SQL alone, found alone, and mended by what is said.

TROUBLES = {
    "sequence cached": ("token-cache", "error", "ALTER SEQUENCE dblock.token_sequence CACHE 20"),
    "sequence cycles": ("token-cycle", "error", "ALTER SEQUENCE dblock.token_sequence CYCLE"),
    "sequence in fives": ("token-increment", "error", "ALTER SEQUENCE dblock.token_sequence INCREMENT 5"),
    "sequence ends": ("token-maximum", "error", "ALTER SEQUENCE dblock.token_sequence MAXVALUE 1000000"),
    "sequence of integers": ("token-maximum", "error", "ALTER SEQUENCE dblock.token_sequence AS integer"),
    "token ahead of the sequence": (
        "token-below-locks", "error", "INSERT INTO dblock.distributed_locks VALUES ('a', 900, '-infinity')",
    ),
    "function dropped": ("schema-functions", "error", "DROP FUNCTION dblock.queue(text)"),
    "function that tells the revision": ("schema-functions", "error", "DROP FUNCTION dblock.schema_revision()"),
    "function changed": (
        "schema-functions", "error",
        "CREATE OR REPLACE FUNCTION dblock.current_timeline() RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'",
    ),
    "function without its owner's rights": (
        "schema-functions", "error", "ALTER FUNCTION dblock.queue(text) SECURITY INVOKER",
    ),
    "function without its path": ("schema-functions", "error", "ALTER FUNCTION dblock.queue(text) RESET search_path"),
    "function with a namesake": (
        "schema-functions", "error",
        "CREATE FUNCTION dblock.queue(name text, most integer) RETURNS json LANGUAGE sql AS 'SELECT NULL::json'",
    ),
    "table unlogged": ("unlogged", "error", "ALTER TABLE dblock.distributed_locks SET UNLOGGED"),
    "sequence unlogged": ("unlogged", "error", "ALTER SEQUENCE dblock.token_sequence SET UNLOGGED"),
    "table not vacuumed": ("autovacuum", "warning", "ALTER TABLE dblock.lock_tickets SET (autovacuum_enabled = off)"),
    "commits not waited for": (
        "synchronous-commit", "warning", "ALTER DATABASE {database} SET synchronous_commit = off",
    ),
    "commits of a role not waited for": (
        "synchronous-commit", "warning", "ALTER ROLE {role} SET synchronous_commit = off",
    ),
    "idle sessions ended": (
        "idle-session-timeout", "warning", "ALTER DATABASE {database} SET idle_session_timeout = '10min'",
    ),
    "statements cut off": ("statement-timeout", "warning", "ALTER DATABASE {database} SET statement_timeout = 900"),
    "statements of a role cut off": (
        "statement-timeout", "warning", "ALTER ROLE {role} IN DATABASE {database} SET statement_timeout = '0.5s'",
    ),
    "a right in part": ("incomplete-grant", "error", "REVOKE EXECUTE ON FUNCTION dblock.renew FROM {role}"),
    "no way into the schema": ("no-usage", "error", "REVOKE USAGE ON SCHEMA dblock FROM {role}"),
    "may create": ("direct-rights", "error", "GRANT CREATE ON SCHEMA dblock TO {role}"),
    "may read a table": ("direct-rights", "error", "GRANT SELECT ON dblock.distributed_locks TO {role}"),
    "may write a column": ("direct-rights", "error", "GRANT UPDATE (token) ON dblock.distributed_locks TO {role}"),
    "may use the sequence": ("direct-rights", "error", "GRANT USAGE ON SEQUENCE dblock.token_sequence TO {role}"),
    "all may read": ("direct-rights", "error", "GRANT SELECT ON dblock.lock_history TO PUBLIC"),
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_trouble_is_found_alone_and_mended_by_what_is_said(dsn: str, role: str, trouble: str) -> None:
    schema.grant(dsn, role, may=["lock", "see"])
    check, level, statement = TROUBLES[trouble]
    play(dsn, statement.format(database=database(dsn), role=role))
    finding = only(dsn, check, level)
    if "{role}" in statement:
        assert role in finding.what
    mend(dsn, finding)
    assert found(dsn) == []


def test_every_function_in_the_files_is_known_to_the_catalog(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        ours = "SELECT proname FROM pg_proc WHERE pronamespace = 'dblock'::regnamespace"
        named = connection.execute(ours).fetchall()
    assert set(bodies()) == {name for (name,) in named}


def test_a_repair_keeps_locks_and_grants(dsn: str, role: str, shell: Shell) -> None:
    schema.grant(dsn, role)
    with dblock.Client(dsn) as client:
        lease = client.lock("a", ttl=60).acquire()
        play(dsn, "DROP FUNCTION dblock.renew")
        repaired = shell.run("install", "--repair")
        assert (repaired.code, "anew" in repaired.out) == (0, True)
        lease.renew()
    assert found(dsn) == []
    with dblock.Client(conninfo.make_conninfo(dsn, user=role)) as application:
        application.lock("b").acquire().release()
    assert shell.run("install", "--repair", "--sql").code == 2


# What is installed.


def test_not_installed_is_an_error_and_only_the_server_is_looked_at(shell: Shell, dsn: str) -> None:
    done = shell.run("doctor", "--schema", "elsewhere", "--json")
    assert done.code == 4
    assert [one["id"] for one in done.json["findings"]] == ["schema-missing"]
    assert done.json["findings"][0]["command"] == "dblock install --schema elsewhere"
    assert "fsync" in done.json["checked"]
    assert not {"token-cache", "schema-tables", "bloat"} & set(done.json["checked"])


@pytest.mark.parametrize(("revision", "says"), [("0000", "dblock install"), ("9999", "pip install --upgrade dblock")])
def test_another_revision(dsn: str, revision: str, says: str) -> None:
    play(dsn, f"UPDATE dblock.installed_revision SET version_num = '{revision}'", "DROP TABLE dblock.lock_history")
    assert only(dsn, "schema-revision", "error").command == says


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("ALTER TABLE dblock.distributed_locks DROP COLUMN meta", "column distributed_locks.meta is missing"),
        ("ALTER TABLE dblock.lock_tickets ALTER number TYPE integer", "number is integer and not bigint"),
        ("DROP TABLE dblock.lock_history", "table lock_history is missing"),
        ("DROP SEQUENCE dblock.token_sequence", "sequence token_sequence is missing"),
        (
            "ALTER TABLE dblock.distributed_locks DROP CONSTRAINT distributed_locks_pkey",
            "distributed_locks has no unique index on (name)",
        ),
    ],
)
def test_tables_that_are_not_what_the_revision_says(dsn: str, statement: str, what: str) -> None:
    play(dsn, statement)
    finding = only(dsn, "schema-tables", "error")
    assert what in finding.what
    assert "Restore" in finding.command


# Durability.


@pytest.mark.parametrize(
    ("name", "value", "check", "level"),
    [
        ("fsync", "off", "fsync", "error"),
        ("full_page_writes", "off", "full-page-writes", "error"),
        ("synchronous_commit", "off", "synchronous-commit", "warning"),
        ("autovacuum", "off", "autovacuum", "warning"),
        ("idle_session_timeout", "1h", "idle-session-timeout", "warning"),
    ],
)
def test_a_setting_of_the_whole_server(dsn: str, name: str, value: str, check: str, level: str) -> None:
    with server_set(dsn, name, value):
        finding = only(dsn, check, level)
        mend(dsn, finding)
        until(lambda: found(dsn) == [], "the mended setting")


def test_local_commits_are_as_good_as_any_without_synchronous_standbys(dsn: str) -> None:
    play(dsn, f"ALTER DATABASE {database(dsn)} SET synchronous_commit = local")
    assert found(dsn) == []


def test_standbys(healthy: Server, dsn: str) -> None:
    """Attached and not waited for; awaited and there; awaited and gone; and asked itself."""
    with copy_of(healthy, "--write-recovery-conf") as standby:
        with open(standby.data / "postgresql.auto.conf", "a") as settings:
            settings.write(f"max_prepared_transactions = {SETTINGS['max_prepared_transactions']}\n")
        standby.start()
        following = conninfo.make_conninfo(standby.url, dbname=database(dsn))
        finding = only(following, "standby", "error")
        assert "primary" in finding.command
        assert "'walreceiver'" in until(lambda: attached(dsn), "a standby that replays").what
        with server_set(dsn, "synchronous_standby_names", "*"):
            until(lambda: found(dsn) == [], "a synchronous standby")
            setting = f"SET synchronous_commit = local; ALTER DATABASE {database(dsn)}"
            play(dsn, f"{setting} SET synchronous_commit = local")
            assert "standbys" in only(dsn, "synchronous-commit", "warning").why
            play(dsn, f"{setting} RESET synchronous_commit")
            set_server(dsn, "synchronous_standby_names", "FIRST 2 (*)")
            assert "wait for 2" in only(dsn, "sync-standby-missing", "error").what
            set_server(dsn, "synchronous_standby_names", "*")
            standby.stop()
            missing = until(lambda: [one for one in found(dsn) if one.id == "sync-standby-missing"], "the finding")
            assert [one.id for one in found(dsn)] == ["sync-standby-missing"]
            assert "none is connected" in missing[0].what
            mend(dsn, missing[0])
            until(lambda: found(dsn) == [], "a server that waits for nobody")


def attached(dsn: str) -> Finding | None:
    findings = found(dsn)
    if not findings:
        return None
    assert [(one.id, one.level) for one in findings] == [("async-standbys", "warning")]
    return findings[0]


# Connections.


@needs_pgbouncer
def test_a_pooler_in_between(dsn: str) -> None:
    with pooled(dsn) as through:
        assert "listen_dsn" in only(through, "pooler", "warning").command
        with psycopg.connect(through, autocommit=True) as connection:
            shown = connection.execute("SELECT current_setting('statement_timeout'), current_setting('search_path')")
            assert shown.fetchone() == ("0", '"$user", public'), "the sessions of others are left as they were"


def test_few_connections_left(dsn: str) -> None:
    with ExitStack() as opened:
        for _ in range(22):
            opened.enter_context(psycopg.connect(dsn))
        finding = only(dsn, "connections", "warning")
    assert re.search(r"2[345] of 25 connections", finding.what)
    until(lambda: found(dsn) == [], "room")


def test_more_listeners_than_are_wanted_and_only_those_alive(dsn: str) -> None:
    with ExitStack() as opened:
        sessions = [opened.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in range(3)]
        for session in sessions:
            session.execute("SELECT dblock.register_presence(gen_random_uuid(), '1 s')")
        finding = only(dsn, "listeners", "warning", listeners=2)
        assert finding.what.startswith("3 clients")
        assert found(dsn) == []
        sessions[0].close()
        until(lambda: found(dsn, listeners=2) == [], "the end of a session")


def test_notifications_that_nobody_takes(dsn: str) -> None:
    if major() < 17:
        pytest.skip("before Postgres 17 the queue holds too much to be filled in a test")
    with psycopg.connect(dsn, autocommit=True) as lazy:
        lazy.execute("LISTEN something")
        lazy.execute("BEGIN")
        notify = "SELECT pg_notify('something', {} || repeat('x', 7900)) FROM generate_series(1, {})"
        play(dsn, notify.format("'a' || generate_series", 20))
        assert "full" in only(dsn, "notification-queue", "warning").what
        play(dsn, notify.format("'b' || generate_series", 32))
        only(dsn, "notification-queue", "error")


# Tokens.


def test_a_store_that_has_seen_higher_tokens(dsn: str) -> None:
    store = fenced_store.FencedStore(dsn)
    store.put("invoice:42", {"total": 1}, fence=4711)
    finding = only(dsn, "token-below-store", "error")
    assert finding.command == "dblock token raise --above 4711"
    mend(dsn, finding)
    assert found(dsn) == []
    with dblock.Client(dsn) as client:
        assert client.lock("a").acquire().token == 4712
    store.close()


def test_tokens_that_a_session_has_hoarded_are_gone_once_it_is_mended(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as hoarder:
        play(dsn, "ALTER SEQUENCE dblock.token_sequence CACHE 20")
        granted = "SELECT token FROM dblock.try_acquire(%s)"
        assert hoarder.execute(granted, ["a"]).fetchone() == (1,)
        finding = only(dsn, "token-cache", "error")
        mend(dsn, finding)
        assert cli.main(["--dsn", dsn, *shlex.split(finding.command.partition("dblock ")[2])]) == 0
        row = hoarder.execute(granted, ["b"]).fetchone()
        assert row is not None
        assert row[0] > 20, "what it had kept is not handed out any more"


# Tables.

UPDATE = """
    DO $$ BEGIN FOR i IN 1..1200 LOOP
        UPDATE dblock.distributed_locks SET expires_at = clock_timestamp() WHERE name = (i % 10)::text; COMMIT;
    END LOOP; END $$
"""
TEN = "INSERT INTO dblock.distributed_locks SELECT i, 0, '-infinity' FROM generate_series(0, 9) AS i"


def test_updates_as_they_should_be(dsn: str) -> None:
    play(dsn, "SET synchronous_commit = off", TEN, UPDATE)
    assert found(dsn) == []


def test_updates_that_an_index_keeps_from_staying_in_their_page(dsn: str) -> None:
    index = "CREATE INDEX by_deadline ON dblock.distributed_locks (expires_at)"
    play(dsn, "SET synchronous_commit = off", index, TEN, UPDATE)
    finding = only(dsn, "hot-updates", "warning")
    assert "by_deadline" in finding.what
    assert "1200 updates" in finding.what
    mend(dsn, finding)
    assert found(dsn) == []


def test_updates_that_find_no_room_in_their_page(dsn: str) -> None:
    many = "INSERT INTO dblock.distributed_locks SELECT i, 0, '-infinity' FROM generate_series(1, 5000) AS i"
    play(dsn, "ALTER TABLE dblock.distributed_locks SET (fillfactor = 100)", many)
    play(dsn, "UPDATE dblock.distributed_locks SET token = token")
    finding = only(dsn, "hot-updates", "warning")
    assert "fillfactor=100 and not fillfactor=50" in finding.what
    mend(dsn, finding)
    assert found(dsn) == []


def test_dead_rows_that_nobody_clears_away(dsn: str) -> None:
    play(
        dsn,
        "SET synchronous_commit = off",
        "INSERT INTO dblock.lock_history (at, name, event) SELECT now(), 'a', 'x' FROM generate_series(1, 60000)",
        "DELETE FROM dblock.lock_history WHERE number > 100",
    )
    finding = only(dsn, "bloat", "warning")
    assert "59900 dead row versions to 100 rows" in finding.what
    mend(dsn, finding)
    assert found(dsn) == []


def test_a_table_that_is_mostly_empty(dsn: str) -> None:
    play(
        dsn,
        "SET synchronous_commit = off",
        "INSERT INTO dblock.lock_history (at, name, event, reason)"
        " SELECT now(), 'a', 'x', repeat('x', 1000) FROM generate_series(1, 20000)",
        "DELETE FROM dblock.lock_history WHERE number < 20000",
        "VACUUM dblock.lock_history",
    )
    finding = only(dsn, "bloat", "warning")
    assert re.search(r"\d\d MB for [12] rows", finding.what)
    mend(dsn, finding)
    assert found(dsn) == []


# Old snapshots.


def test_an_old_snapshot(dsn: str) -> None:
    with closing(psycopg.connect(dsn, autocommit=True, application_name="report")) as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        old.execute(f"SELECT '{'x' * 200}'")
        assert found(dsn) == []
        finding = only(dsn, "old-snapshot", "warning", age=0)
        assert f"Process {old.info.backend_pid} 'report'" in finding.what
        assert finding.what.endswith("x" * (100 - len("SELECT '")) + "…")
        mend(dsn, finding)
        until(lambda: found(dsn, age=0) == [], "its end")


def test_what_holds_nothing_back_is_not_to_blame(dsn: str, healthy: Server) -> None:
    """In a transaction without a snapshot; or with one that only reads, in another database."""
    with psycopg.connect(dsn) as idle, psycopg.connect(healthy.url) as elsewhere:
        idle.execute("SELECT 1")
        elsewhere.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        elsewhere.execute("SELECT 1")
        assert found(dsn, age=0) == []
        elsewhere.rollback()
        elsewhere.execute("SELECT pg_current_xact_id()")
        assert repr("postgres") in only(dsn, "old-snapshot", "warning", age=0).what


def test_a_transaction_that_was_prepared_and_forgotten(dsn: str) -> None:
    play(dsn, "BEGIN; CREATE TABLE t (); PREPARE TRANSACTION 'it''s'")
    assert found(dsn) == []
    mend(dsn, only(dsn, "prepared-transaction", "warning", age=0))
    assert found(dsn, age=0) == []


def test_a_replication_slot_that_nobody_reads_by_how_far_it_is_behind(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Postgres 17 nobody knows since when it is not in use."""
    before = property(lambda _: 160_000, lambda *_: None)
    monkeypatch.setattr(patient.Patient, "version", before, raising=False)
    play(dsn, "SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')")
    try:
        assert found(dsn) == []
        monkeypatch.setattr(snapshots, "SLOT_UNUSED", 0)
        assert "is not in use" in only(dsn, "replication-slot", "warning").what
    finally:
        play(dsn, "SELECT pg_drop_replication_slot('forgotten')")


def test_a_replication_slot_that_nobody_reads(dsn: str) -> None:
    if major() < 17:
        pytest.skip("before Postgres 17 nobody knows since when a slot is not in use")
    play(dsn, "SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')")
    assert found(dsn) == []
    mend(dsn, only(dsn, "replication-slot", "warning", age=0))
    assert found(dsn, age=0) == []


# Rights.


def test_what_a_role_has_by_membership_it_has(dsn: str, role: str, healthy: Server) -> None:
    schema.grant(dsn, role)
    play(
        dsn,
        f"CREATE ROLE member_of_{role} IN ROLE {role}",
        f"GRANT EXECUTE ON FUNCTION dblock.renew TO member_of_{role}",
    )
    assert found(dsn) == []
    play(dsn, f"REVOKE {role} FROM member_of_{role}")
    assert [one.id for one in found(dsn)] == ["incomplete-grant", "no-usage"]


# Clocks.


def test_a_clock_that_was_set_back(dsn: str) -> None:
    with dblock.Client(dsn) as client:
        client.lock("a", ttl=60).acquire()
        assert found(dsn) == []
        play(dsn, "UPDATE dblock.distributed_locks SET expires_at = expires_at + interval '1 hour'")
        assert "dblock break a" in only(dsn, "clock-set-back", "warning").command
        play(dsn, "UPDATE dblock.distributed_locks SET expires_at = now(), released_at = now() + interval '1 h'")
        assert "none of them held" in only(dsn, "clock-set-back", "warning").what


@pytest.mark.parametrize(
    ("trick", "check", "code"),
    [
        ("import time; now = time.time; time.time = lambda: now() - 60", "clock-difference", 0),
        ("from dblock import clock; now = clock.now; clock.now = lambda: 2 * now()", "clock-steps", 3),
        ("from dblock import clock; now = clock.now; clock.now = lambda: now() / 2", "clock-steps", 3),
    ],
)
def test_clocks_that_do_not_agree(shell: Shell, dsn: str, trick: str, check: str, code: int) -> None:
    """It is all the same which of the two goes wrong."""
    import subprocess

    program = f"import sys; {trick}; from dblock.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "--dsn", dsn, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert [one["id"] for one in json.loads(done.stdout)["findings"]] == [check]
    assert done.returncode == code


def test_an_answer_that_took_long_is_no_step_of_a_clock() -> None:
    first, slow = Sample(0.0, 100.0, 0.01, 0.0), Sample(0.3, 102.2, 2.5, 0.0)
    assert clocks.deviation(first, slow) == 0
    assert clocks.deviation(first, slow._replace(server=103.0)) == pytest.approx(0.5)
    assert clocks.deviation(first, slow._replace(server=99.0)) == pytest.approx(-1.29)


# The command.


def test_words_and_exit_codes(shell: Shell, dsn: str) -> None:
    play(dsn, f"ALTER DATABASE {database(dsn)} SET synchronous_commit = off")
    warned = shell.run("doctor")
    assert warned.code == 3
    assert warned.out.startswith(
        "warning  synchronous-commit\n  synchronous_commit is off for this login (database).\n"
    )
    assert f'  mend  ALTER DATABASE "{database(dsn)}" RESET synchronous_commit;\n' in warned.out
    assert warned.out.endswith("checks, 1 finding.\n")
    play(dsn, "ALTER SEQUENCE dblock.token_sequence CYCLE")
    worse = shell.run("doctor")
    assert worse.code == 4
    assert worse.out.index("token-cycle") < worse.out.index("synchronous-commit"), "the worst first"


def test_what_others_have_written_moves_no_cursor(shell: Shell, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, application_name="x") as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT '\x1b[2J\u202e'")
        out = shell.run("doctor", "--snapshot-age", "0").out
    assert "\\x1b[2J\\u202e" in out
    assert not set(out) & {"\x1b", "\u202e"}


def test_a_database_that_cannot_be_reached(shell: Shell) -> None:
    done = shell.run("doctor", dsn="host=127.0.0.1 port=1 user=x")
    assert (done.code, done.out) == (69, "")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("when", [b"pg_settings", b"pg_stat_replication", b"distributed_locks", b"ROLLBACK"])
def test_a_database_that_dies_in_the_middle(shell: Shell, dsn: str, when: bytes) -> None:
    with Proxy(dsn) as proxy:
        proxy.fall_silent_at(when)
        process = shell.start("doctor", dsn=proxy.dsn)
        until(lambda: not proxy._flowing.is_set(), "the silence")
    done = ended(process)
    assert (done.code, done.out) == (69, "")
    assert done.err.count("\n") == 1


def test_ctrl_c_in_the_middle(shell: Shell, dsn: str) -> None:
    with Proxy(dsn) as proxy:
        proxy.fall_silent_at(b"pg_stat_activity")
        process = shell.start("doctor", dsn=proxy.dsn)
        until(lambda: not proxy._flowing.is_set(), "the silence")
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert (done.code, done.out) == (130, "")
    assert done.err == "dblock: interrupted\n"


def test_a_database_that_falls_silent_is_not_waited_for(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE", 0.3)
    with Proxy(dsn) as proxy:
        proxy.fall_silent_at(b"pg_stat_activity")
        with pytest.raises(dblock.Unavailable, match="did not answer within 0.3 s"):
            found(proxy.dsn)


def test_a_check_that_must_wait_too_long_is_left_out_and_the_others_are_made(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient, "BEGIN", patient.BEGIN.replace("lock_timeout TO 2000", "lock_timeout TO 20"))
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE dblock.distributed_locks")
        report = examine(target.resolve(dsn))
    assert {(one.level, one.id) for one in report.findings} == {("note", "cannot-check")}
    assert any("token-below-locks" in one.what and "lock timeout" in one.what for one in report.findings)
    assert {"token-below-store", "clock-difference"} <= set(report.checked)


def test_it_writes_nothing(dsn: str) -> None:
    """Each look is in a transaction that could not."""
    assert patient.BEGIN.startswith("BEGIN READ ONLY")
    with psycopg.connect(dsn) as connection:
        before = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        connection.rollback()
        assert before is not None
        found(dsn)
        assert connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone() == (before[0] + 1,)


def test_somebody_at_a_terminal_sees_what_takes_so_long(shell: Shell, dsn: str, tmp_path: Path) -> None:
    with Proxy(dsn) as proxy:
        proxy.delay = 0.02
        play(dsn, "ALTER SEQUENCE dblock.token_sequence CYCLE")
        with Terminal(shell.command("doctor", dsn=proxy.dsn), columns=60) as terminal:
            terminal.wait_for("Looking at ")
            assert terminal.ended() == 4
            lines = terminal.lines()
    assert lines[0] == "error  token-cycle"
    assert "Looking" not in terminal.text
    assert any(re.fullmatch(r"\d+ checks, 1 finding\.", line) for line in lines)
    assert os.fsencode("\x1b[31m") in terminal.raw


def test_every_check_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "doctor.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted([*(check.id for check in CHECKS), "cannot-check"])
