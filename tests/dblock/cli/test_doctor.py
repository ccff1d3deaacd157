"""`dblock doctor`: each trouble is found alone, its fix works, and a healthy database has no findings."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
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
from dblock.admin import link, schema, tokens
from dblock.admin.doctor import CHECKS, Finding, Limits, clocks, examine, patient, snapshots
from dblock.admin.doctor.bodies import bodies
from dblock.admin.doctor.patient import Sample
from dblock.embedded import Server
from tests.support import mutants
from tests.support.eventually import eventually
from tests.support.pooler import needs_pgbouncer, pooled
from tests.support.pretender import ADVISORY, NO_TIMELINE, pretend
from tests.support.proxy import Proxy
from tests.support.servers import major, private_server
from tests.support.shell import Shell, ended
from tests.support.stages import first
from tests.support.standby import copy_of
from tests.support.terminal import Terminal

_numbers = itertools.count()

SETTINGS = {
    "max_connections": "25",
    "max_prepared_transactions": "2",
    "wal_level": "logical",
    # On, but it never runs during the tests.
    "autovacuum_naptime": "1d",
}


@pytest.fixture(scope="module")
def healthy() -> Iterator[Server]:
    """A server with fsync and a template database; its limits are low, so that tests can exhaust them."""
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
    """A new database for each test."""
    name = f"test_{next(_numbers)}"
    with psycopg.connect(healthy.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template")
        yield conninfo.make_conninfo(healthy.url, dbname=name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def role(healthy: Server) -> str:
    return new_role(healthy)


def new_role(healthy: Server) -> str:
    name = f"app_{next(_numbers)}"
    with psycopg.connect(healthy.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN")
    return name


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spend no time on sampling clocks in this process."""
    monkeypatch.setattr(clocks, "SAMPLE", 0.0)


def found(dsn: str, name: str = "dblock", *, age: float = 300, listeners: int = 300) -> list[Finding]:
    return examine(target.resolve(dsn), name, limits=Limits(age, listeners)).findings


def only(dsn: str, check: str, level: str, **options: Any) -> Finding:
    """Return the finding, after checking that it is the only one."""
    findings = found(dsn, **options)
    assert [(one.id, one.level) for one in findings] == [(check, level)], findings
    assert all((findings[0].what, findings[0].why, findings[0].command))
    return findings[0]


def apply_fix(dsn: str, finding: Finding) -> None:
    """Run a finding's fix: a dblock command, or the SQL statements that it starts with."""
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
    """Change a server setting, and restore it at the end."""

    before = current(dsn, name)
    try:
        set_server(dsn, name, value)
        yield
    finally:
        set_server(dsn, name, before)
        play(dsn, f"ALTER SYSTEM RESET {name}")


def set_server(dsn: str, name: str, value: str) -> None:
    play(dsn, f"ALTER SYSTEM SET {name} = '{value}'", "SELECT pg_reload_conf()")
    eventually(lambda: current(dsn, name) == value, f"{name} = {value}")


def current(dsn: str, name: str) -> str:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
        assert row is not None
        return str(row[0])


# A healthy database.


def test_healthy_database_has_no_findings(shell: Shell, dsn: str, client: dblock.Client) -> None:
    client.lock("held", ttl=60).acquire()
    client.lock("free").acquire().release()
    done = shell.run("doctor")
    assert (done.code, done.out, done.err) == (0, f"{len(CHECKS)} checks, no findings.\n", "")
    data = shell.run("doctor", "--json").json
    assert data["findings"] == []
    assert data["checked"] == [check.id for check in CHECKS]
    assert len(set(data["checked"])) == len(CHECKS) > 30
    assert database(dsn) in data["database"]


def test_role_with_few_privileges_learns_which_checks_did_not_run(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(dsn, role, may=["lock", "see"])
    done = shell.run("doctor", "--json", dsn=conninfo.make_conninfo(dsn, user=role))
    assert done.code == 0
    assert {(one["level"], one["id"]) for one in done.json["findings"]} == {("note", "cannot-check")}
    text = " ".join(one["what"] for one in done.json["findings"])
    for check in ("token-below-locks", "clock-set-back", "listeners", "old-snapshot", "token-below-store"):
        assert check in text
        assert check not in done.json["checked"]
    assert "pg_monitor" in text
    assert "owner" in text
    assert {"token-cache", "schema-functions", "schema-tables", "direct-privileges", "fsync"} <= set(
        done.json["checked"]
    )


def test_login_without_privileges_gets_only_notes(dsn: str, role: str) -> None:
    findings = found(conninfo.make_conninfo(dsn, user=role))
    assert {one.level for one in findings} == {"note"}
    assert {one.id for one in findings} == {"may-not-lock", "cannot-check"}


def test_login_that_may_only_see_learns_that_it_may_not_lock(dsn: str, role: str) -> None:
    schema.grant(dsn, role, may=["see"])
    findings = found(conninfo.make_conninfo(dsn, user=role))
    (note,) = [one for one in findings if one.id != "cannot-check"]
    assert (note.id, note.level, note.command) == ("may-not-lock", "note", f"dblock grant {role}")


@pytest.mark.second_stage
@pytest.mark.parametrize("name", first(1, ['a%s"$1', "Quoted Name", "ünï:code"]))
def test_any_schema_name_is_healthy(dsn: str, name: str) -> None:
    schema.install(dsn, name)
    assert found(dsn, name) == []
    play(dsn, f"ALTER SEQUENCE {quoted(name)}.token_sequence CYCLE")
    apply_fix(dsn, only(dsn, "token-cycle", "error", name=name))
    assert found(dsn, name) == []


# Troubles that SQL can make and that a fix can end.

TROUBLES = {
    "sequence cached": ("token-cache", "error", "ALTER SEQUENCE dblock.token_sequence CACHE 20"),
    "sequence cycles": ("token-cycle", "error", "ALTER SEQUENCE dblock.token_sequence CYCLE"),
    "sequence in fives": ("token-increment", "error", "ALTER SEQUENCE dblock.token_sequence INCREMENT 5"),
    "sequence ends": ("token-maximum", "error", "ALTER SEQUENCE dblock.token_sequence MAXVALUE 1000000"),
    "sequence of integers": ("token-maximum", "error", "ALTER SEQUENCE dblock.token_sequence AS integer MAXVALUE 1000"),
    "token ahead of the sequence": (
        "token-below-locks", "error",
        "INSERT INTO dblock.distributed_locks"
        " VALUES ('a', (date_part('epoch', clock_timestamp() + interval '30 s') * 1000000)::bigint, '-infinity')",
    ),
    "function dropped": ("schema-functions", "error", "DROP FUNCTION dblock.queue(text)"),
    "function that tells the revision": ("schema-functions", "error", "DROP FUNCTION dblock.schema_revision()"),
    "function changed": (
        "schema-functions", "error",
        "CREATE OR REPLACE FUNCTION dblock.commit_durably() RETURNS boolean LANGUAGE sql AS 'SELECT true'",
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
    "a privilege in part": ("incomplete-grant", "error", "REVOKE EXECUTE ON FUNCTION dblock.renew FROM {role}"),
    "no way into the schema": ("no-usage", "error", "REVOKE USAGE ON SCHEMA dblock FROM {role}"),
    "may create": ("direct-privileges", "error", "GRANT CREATE ON SCHEMA dblock TO {role}"),
    "may read a table": ("direct-privileges", "error", "GRANT SELECT ON dblock.distributed_locks TO {role}"),
    "may write a column": ("direct-privileges", "error", "GRANT UPDATE (token) ON dblock.distributed_locks TO {role}"),
    "may use the sequence": ("direct-privileges", "error", "GRANT USAGE ON SEQUENCE dblock.token_sequence TO {role}"),
    "guard without its event triggers": (
        "ddl-guard", "warning",
        "DO $$ BEGIN PERFORM dblock.guard_schema('public', '{{m,n}}'); DROP EVENT TRIGGER dblock_guard_end; END $$",
    ),
    "guard of a schema that is gone": (
        "ddl-guard", "warning", "INSERT INTO dblock.ddl_guards VALUES ('gone', 'm')",
    ),
    "all may read": ("direct-privileges", "error", "GRANT SELECT ON dblock.lock_history TO PUBLIC"),
}  # fmt: skip


CUT_OFF = "statements cut off"
"""The trouble that would end the fixes of other troubles."""


@pytest.mark.second_stage
def test_troubles_of_many_checks_are_found_together_and_their_fixes_work(dsn: str, healthy: Server) -> None:
    """The first trouble of each check. The second stage makes each trouble alone."""
    made = {check: name for name, (check, *_) in reversed(TROUBLES.items()) if name != CUT_OFF}.values()
    blamed: dict[str, str] = {}
    for trouble in made:
        statement = TROUBLES[trouble][2]
        name = ""
        if "{role}" in statement:
            blamed[TROUBLES[trouble][0]] = name = new_role(healthy)
            schema.grant(dsn, name, may=["lock", "see"])
        play(dsn, statement.format(database=database(dsn), role=name))
    findings = found(dsn)
    assert sorted((one.id, one.level) for one in findings) == sorted(TROUBLES[trouble][:2] for trouble in made)
    for finding in findings:
        assert blamed.get(finding.id, "") in finding.what
        apply_fix(dsn, finding)
    assert found(dsn) == []


@pytest.mark.parametrize("trouble", first(1, sorted(TROUBLES, key=lambda trouble: trouble != CUT_OFF)))
@pytest.mark.second_stage
def test_trouble_is_found_alone_and_its_fix_works(dsn: str, role: str, trouble: str) -> None:
    schema.grant(dsn, role, may=["lock", "see"])
    check, level, statement = TROUBLES[trouble]
    play(dsn, statement.format(database=database(dsn), role=role))
    finding = only(dsn, check, level)
    if "{role}" in statement:
        assert role in finding.what
    apply_fix(dsn, finding)
    assert found(dsn) == []


def test_expected_functions_match_the_catalog(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        ours = "SELECT proname FROM pg_proc WHERE pronamespace = 'dblock'::regnamespace"
        named = connection.execute(ours).fetchall()
    assert set(bodies()) == {name for (name,) in named}


def test_repair_keeps_locks_and_grants(dsn: str, role: str, shell: Shell) -> None:
    schema.grant(dsn, role)
    with dblock.Client(dsn) as client:
        lease = client.lock("a", ttl=60).acquire()
        play(dsn, "DROP FUNCTION dblock.renew")
        repaired = shell.run("install", "--repair")
        assert (repaired.code, "Repaired" in repaired.out) == (0, True)
        lease.renew()
    assert found(dsn) == []
    with dblock.Client(conninfo.make_conninfo(dsn, user=role)) as application:
        application.lock("b").acquire().release()
    assert shell.run("install", "--repair", "--sql").code == 2


# The installation.


def test_missing_schema_is_an_error_and_only_the_server_is_checked(shell: Shell, dsn: str) -> None:
    done = shell.run("doctor", "--schema", "elsewhere", "--json")
    assert done.code == 4
    assert [one["id"] for one in done.json["findings"]] == ["schema-missing"]
    assert done.json["findings"][0]["command"] == "dblock install --schema elsewhere"
    assert "fsync" in done.json["checked"]
    assert not {"token-cache", "schema-tables", "bloat"} & set(done.json["checked"])


@pytest.mark.parametrize(
    ("revision", "says"),
    [("0000", "dblock install"), ("9999", "pip install --upgrade dblock (in a checkout: git pull)")],
)
def test_other_revision_is_an_error(dsn: str, revision: str, says: str) -> None:
    play(dsn, f"UPDATE dblock.installed_revision SET version_num = '{revision}'", "DROP TABLE dblock.lock_history")
    assert only(dsn, "schema-revision", "error").command == says


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("ALTER TABLE dblock.distributed_locks DROP COLUMN meta", "column distributed_locks.meta is missing"),
        ("ALTER TABLE dblock.lock_tickets ALTER number TYPE integer", "number is integer, not bigint"),
        ("DROP TABLE dblock.lock_history", "table lock_history is missing"),
        ("DROP SEQUENCE dblock.token_sequence", "sequence token_sequence is missing"),
        (
            "ALTER TABLE dblock.distributed_locks DROP CONSTRAINT distributed_locks_pkey",
            "distributed_locks has no unique index on (name)",
        ),
    ],
)
def test_altered_tables_are_an_error(dsn: str, statement: str, what: str) -> None:
    play(dsn, statement)
    finding = only(dsn, "schema-tables", "error")
    assert what in finding.what
    assert "Restore" in finding.command


# Durability.


@pytest.mark.parametrize(
    ("name", "value", "check", "level"),
    [
        ("fsync", "off", "fsync", "error"),
        *(
            pytest.param(*case, marks=pytest.mark.second_stage)
            for case in (
                ("full_page_writes", "off", "full-page-writes", "error"),
                ("synchronous_commit", "off", "synchronous-commit", "warning"),
                ("autovacuum", "off", "autovacuum", "warning"),
                ("idle_session_timeout", "1h", "idle-session-timeout", "warning"),
            )
        ),
    ],
)
def test_server_setting_is_found_and_its_fix_works(dsn: str, name: str, value: str, check: str, level: str) -> None:
    with server_set(dsn, name, value):
        finding = only(dsn, check, level)
        apply_fix(dsn, finding)
        eventually(lambda: found(dsn) == [], "the fixed setting")


def test_local_commit_is_fine_without_synchronous_standbys(dsn: str) -> None:
    play(dsn, f"ALTER DATABASE {database(dsn)} SET synchronous_commit = local")
    assert found(dsn) == []


@pytest.mark.second_stage
def test_standbys_are_checked_in_every_state(healthy: Server, dsn: str) -> None:
    """Attached but not waited for; waited for and connected; waited for and gone; and examined itself."""
    with copy_of(healthy, "--write-recovery-conf") as standby:
        with open(standby.data / "postgresql.auto.conf", "a") as settings:
            settings.write(f"max_prepared_transactions = {SETTINGS['max_prepared_transactions']}\n")
        standby.start()
        following = conninfo.make_conninfo(standby.url, dbname=database(dsn))
        finding = only(following, "standby", "error")
        assert "primary" in finding.command
        assert "'walreceiver'" in eventually(lambda: attached(dsn), "a standby that replays").what
        with server_set(dsn, "synchronous_standby_names", "*"):
            eventually(lambda: found(dsn) == [], "a synchronous standby")
            setting = f"SET synchronous_commit = local; ALTER DATABASE {database(dsn)}"
            play(dsn, f"{setting} SET synchronous_commit = local")
            assert "standbys" in only(dsn, "synchronous-commit", "warning").why
            play(dsn, f"{setting} RESET synchronous_commit")
            set_server(dsn, "synchronous_standby_names", "FIRST 2 (*)")
            assert "wait for 2" in only(dsn, "sync-standby-missing", "error").what
            set_server(dsn, "synchronous_standby_names", "*")
            standby.stop()
            missing = eventually(lambda: [one for one in found(dsn) if one.id == "sync-standby-missing"], "the finding")
            assert [one.id for one in found(dsn)] == ["sync-standby-missing"]
            assert "none is connected" in missing[0].what
            apply_fix(dsn, missing[0])
            eventually(lambda: found(dsn) == [], "a server that waits for no standby")


def attached(dsn: str) -> Finding | None:
    findings = found(dsn)
    if not findings:
        return None
    assert [(one.id, one.level) for one in findings] == [("async-standbys", "warning")]
    return findings[0]


# Connections.


@needs_pgbouncer
@pytest.mark.parametrize("way", ["option", pytest.param("setting", marks=pytest.mark.second_stage)])
def test_accepted_finding_is_shown_and_does_not_count(shell: Shell, dsn: str, way: str) -> None:
    with pooled(dsn) as through:
        environment = {"DBLOCK_ACCEPT": "listeners, pooler"} if way == "setting" else {}
        options = ["--accept", "pooler"] if way == "option" else []
        assert examine(target.resolve(through)).worst == "warning"
        done = shell.run("doctor", "--dsn", through, *options, env=environment)
        assert done.code == 0, done.out
        assert "warning  pooler  (accepted)" in done.out
        assert done.out.endswith(" checks, 1 finding (1 accepted).\n")
        play(dsn, "ALTER SEQUENCE dblock.token_sequence CYCLE")
        report = examine(target.resolve(through), accept=["pooler"])
        assert report.worst == "error", "others still count"
        assert [(one.id, one.accepted) for one in report.findings] == [("token-cycle", False), ("pooler", True)]


@pytest.mark.second_stage
def test_proxy_on_the_path_is_found(dsn: str) -> None:
    with Proxy(dsn) as proxy:
        finding = only(proxy.dsn, "address-translation", "warning")
    assert "the server sees" in finding.what
    assert "Presence is off" in finding.why


def test_server_that_only_pretends_is_found(dsn: str) -> None:
    pretend(dsn, dict(ADVISORY))
    findings = found(dsn)
    assert {(finding.id, finding.level) for finding in findings} == {("behaviour", "error")}
    assert "two sessions held the same advisory lock" in findings[0].what


def test_server_without_wal_of_its_own_is_healthy(dsn: str) -> None:
    pretend(dsn, dict(NO_TIMELINE))
    assert found(dsn) == []


def test_accepted_check_must_exist(shell: Shell, dsn: str) -> None:
    done = shell.run("doctor", "--accept", "poolr")
    assert done.code == 2
    assert done.err == "dblock: The doctor has no check 'poolr' to accept. Did you mean 'pooler'?\n"


@needs_pgbouncer
def test_pooler_on_the_path_is_found(dsn: str) -> None:
    with pooled(dsn) as through:
        assert "listen_dsn" in only(through, "pooler", "warning").command
        with psycopg.connect(through, autocommit=True) as connection:
            shown = connection.execute("SELECT current_setting('statement_timeout'), current_setting('search_path')")
            assert shown.fetchone() == ("0", '"$user", public'), "sessions in the pool are left as they were"


@pytest.mark.second_stage
def test_shortage_of_connections_is_found(dsn: str) -> None:
    with ExitStack() as opened:
        for _ in range(22):
            opened.enter_context(psycopg.connect(dsn))
        finding = only(dsn, "connections", "warning")
    assert re.search(r"2[345] of 25 connections", finding.what)
    eventually(lambda: found(dsn) == [], "room")


@pytest.mark.second_stage
def test_only_live_listeners_count_against_the_limit(dsn: str) -> None:
    with ExitStack() as opened:
        sessions = [opened.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in range(3)]
        for session in sessions:
            session.execute("SELECT dblock.register_presence(gen_random_uuid(), '1 s')")
        finding = only(dsn, "listeners", "warning", listeners=2)
        assert finding.what.startswith("3 clients")
        assert found(dsn) == []
        sessions[0].close()
        eventually(lambda: found(dsn, listeners=2) == [], "the end of a session")


def test_full_notification_queue_is_found(dsn: str) -> None:
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


@pytest.mark.second_stage
def test_fence_with_a_higher_token_is_found(dsn: str) -> None:
    store = fenced_store.FencedStore(dsn)
    store.put("invoice:41", {"total": 1}, fence=4711)
    assert found(dsn) == [], "the clock has passed that token"
    seen = int((time.time() + 30) * 1_000_000)
    store.put("invoice:42", {"total": 1}, fence=seen)
    finding = only(dsn, "token-below-store", "error")
    assert finding.command == f"dblock token raise --above {seen}"
    apply_fix(dsn, finding)
    assert found(dsn) == []
    with dblock.Client(dsn) as client:
        assert client.lock("a").acquire().token == seen + 1
    store.close()


def test_tokens_far_ahead_of_the_clock_are_found(dsn: str) -> None:
    tokens.raise_above(target.resolve(dsn), int((time.time() + 7200) * 1_000_000))
    assert "120 minutes ahead of the server's clock" in only(dsn, "token-ahead", "warning").what


@pytest.mark.second_stage
def test_grant_that_did_not_follow_the_clock_is_found(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as owner:
        for body in mutants.tokens_that_ignore_the_clock(leap=0):
            mutants.replace(owner, body)
    with dblock.Client(dsn) as client:
        client.lock("a").acquire().release()
    findings = {one.id: one for one in found(dsn)}
    assert set(findings) == {"schema-functions", "token-behind"}
    apply_fix(dsn, findings["token-behind"])
    assert [one.id for one in found(dsn)] == ["token-behind"], "until the lock is granted again"
    with dblock.Client(dsn) as client:
        client.lock("a").acquire().release()
    assert found(dsn) == []


@pytest.mark.second_stage
def test_fix_of_the_token_cache_drops_cached_tokens(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as hoarder:
        play(dsn, "ALTER SEQUENCE dblock.token_sequence CACHE 20")
        granted = "SELECT token FROM dblock.try_acquire(%s)"
        (first,) = hoarder.execute(granted, ["a"]).fetchone() or (0,)
        apply_fix(dsn, only(dsn, "token-cache", "error"))
        assert found(dsn) == []
        (second,) = hoarder.execute(granted, ["b"]).fetchone() or (0,)
        assert second >= first + 20, "the cached tokens are not issued any more"


# Tables.

UPDATE = """
    DO $$ BEGIN FOR i IN 1..1200 LOOP
        UPDATE dblock.distributed_locks SET expires_at = clock_timestamp() WHERE name = (i % 10)::text; COMMIT;
    END LOOP; END $$
"""
TEN = "INSERT INTO dblock.distributed_locks SELECT i, 0, '-infinity' FROM generate_series(0, 9) AS i"


def test_hot_updates_have_no_finding(dsn: str) -> None:
    play(dsn, "SET synchronous_commit = off", TEN, UPDATE)
    assert found(dsn) == []


@pytest.mark.second_stage
def test_updates_hindered_by_an_index_are_found(dsn: str) -> None:
    index = "CREATE INDEX by_deadline ON dblock.distributed_locks (expires_at)"
    play(dsn, "SET synchronous_commit = off", index, TEN, UPDATE)
    finding = only(dsn, "hot-updates", "warning")
    assert "by_deadline" in finding.what
    assert "1200 updates" in finding.what
    apply_fix(dsn, finding)
    assert found(dsn) == []


@pytest.mark.second_stage
def test_updates_hindered_by_the_fillfactor_are_found(dsn: str) -> None:
    many = "INSERT INTO dblock.distributed_locks SELECT i, 0, '-infinity' FROM generate_series(1, 5000) AS i"
    play(dsn, "ALTER TABLE dblock.distributed_locks SET (fillfactor = 100)", many)
    play(dsn, "UPDATE dblock.distributed_locks SET token = token")
    finding = only(dsn, "hot-updates", "warning")
    assert "fillfactor=100, not fillfactor=50" in finding.what
    apply_fix(dsn, finding)
    assert found(dsn) == []


@pytest.mark.second_stage
def test_dead_rows_are_found(dsn: str) -> None:
    play(
        dsn,
        "SET synchronous_commit = off",
        "INSERT INTO dblock.lock_history (at, name, event) SELECT now(), 'a', 'x' FROM generate_series(1, 60000)",
        "DELETE FROM dblock.lock_history WHERE number > 100",
    )
    finding = only(dsn, "bloat", "warning")
    assert "59900 dead row versions to 100 rows" in finding.what
    apply_fix(dsn, finding)
    assert found(dsn) == []


@pytest.mark.second_stage
def test_mostly_empty_table_is_found(dsn: str) -> None:
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
    apply_fix(dsn, finding)
    assert found(dsn) == []


# Old snapshots.


@pytest.mark.second_stage
def test_old_snapshot_is_found(dsn: str) -> None:
    with closing(psycopg.connect(dsn, autocommit=True, application_name="report")) as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        old.execute(f"SELECT '{'x' * 200}'")
        assert found(dsn) == []
        finding = only(dsn, "old-snapshot", "warning", age=0)
        assert f"Process {old.info.backend_pid} 'report'" in finding.what
        assert finding.what.endswith("x" * (100 - len("SELECT '")) + "…")
        apply_fix(dsn, finding)
        eventually(lambda: found(dsn, age=0) == [], "its end")


@pytest.mark.second_stage
def test_transactions_that_do_not_hold_back_vacuum_are_not_reported(dsn: str, healthy: Server) -> None:
    """A transaction without a snapshot, and a read-only snapshot in another database."""
    with psycopg.connect(dsn) as idle, psycopg.connect(healthy.url) as elsewhere:
        idle.execute("SELECT 1")
        elsewhere.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        elsewhere.execute("SELECT 1")
        assert found(dsn, age=0) == []
        elsewhere.rollback()
        elsewhere.execute("SELECT pg_current_xact_id()")
        assert repr("postgres") in only(dsn, "old-snapshot", "warning", age=0).what


@pytest.mark.second_stage
def test_forgotten_prepared_transaction_is_found(dsn: str) -> None:
    play(dsn, "BEGIN; CREATE TABLE t (); PREPARE TRANSACTION 'it''s'")
    assert found(dsn) == []
    apply_fix(dsn, only(dsn, "prepared-transaction", "warning", age=0))
    assert found(dsn, age=0) == []


@pytest.mark.second_stage
def test_unused_replication_slot_is_found_by_its_lag(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers before Postgres 17 do not record since when a slot is unused."""
    before = property(lambda _: 160_000, lambda *_: None)
    monkeypatch.setattr(patient.Patient, "version", before, raising=False)
    play(dsn, "SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')")
    try:
        assert found(dsn) == []
        monkeypatch.setattr(snapshots, "SLOT_UNUSED", 0)
        assert "is not in use" in only(dsn, "replication-slot", "warning").what
    finally:
        play(dsn, "SELECT pg_drop_replication_slot('forgotten')")


@pytest.mark.second_stage
def test_unused_replication_slot_is_found_by_its_age(dsn: str) -> None:
    if major() < 17:
        pytest.skip("servers before Postgres 17 do not record since when a slot is unused")
    play(dsn, "SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')")
    assert found(dsn) == []
    apply_fix(dsn, only(dsn, "replication-slot", "warning", age=0))
    assert found(dsn, age=0) == []


# Privileges.


@pytest.mark.second_stage
def test_privileges_by_membership_count(dsn: str, role: str, healthy: Server) -> None:
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


@pytest.mark.second_stage
def test_clock_set_back_is_found(dsn: str) -> None:
    with dblock.Client(dsn) as client:
        client.lock("a", ttl=60).acquire()
        assert found(dsn) == []
        play(dsn, "UPDATE dblock.distributed_locks SET expires_at = expires_at + interval '1 hour'")
        assert "dblock force-release a" in only(dsn, "clock-set-back", "warning").command
        play(dsn, "UPDATE dblock.distributed_locks SET expires_at = now(), released_at = now() + interval '1 h'")
        assert "none of them held" in only(dsn, "clock-set-back", "warning").what


@pytest.mark.parametrize(
    ("clock", "change", "check", "code"),
    [
        ("time.time", lambda now: now - 60, "clock-difference", 0),
        # So fast or so slow that the time of a slow reply does not explain it.
        ("dblock._core.clock.now", lambda now: 2000 * now, "clock-steps", 3),
        ("dblock._core.clock.now", lambda now: now / 20, "clock-steps", 3),
    ],
)
def test_disagreeing_clocks_are_found(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, clock: str, change: Callable[[float], float], check: str, code: int
) -> None:
    """It does not matter which of the two clocks is wrong."""
    monkeypatch.setattr(clocks, "SAMPLE", 0.3)
    module, _, name = clock.rpartition(".")
    now = getattr(import_module(module), name)
    monkeypatch.setattr(clock, lambda: change(now()))
    done = shell.run("doctor", "--json")
    assert [one["id"] for one in done.json["findings"]] == [check]
    assert done.code == code


@pytest.mark.second_stage
def test_nodes_whose_clocks_differ_are_found(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = twice(dsn)
    assert found(both) == [], "both hosts are the same server"
    asked: list[str] = []

    def offset(parameters: dict[str, Any]) -> Any:
        found = read(parameters)
        assert found is not None
        asked.append(parameters["host"])
        return found._replace(seconds=3.0 * len(asked), doubt=0.1, host=f"node {len(asked)}")

    read = clocks._offset
    monkeypatch.setattr(clocks, "_offset", offset)
    finding = only(both, "node-clocks", "warning")
    assert "node 2 is 3.0 s ahead of that of node 1" in finding.what
    assert len(asked) == 2
    assert found(dsn) == [], "a DSN with one host has no other nodes"


@pytest.mark.second_stage
def test_node_that_does_not_reply_is_no_finding(dsn: str) -> None:
    given = conninfo.conninfo_to_dict(dsn)
    port = str(given.get("port") or 5432)
    away = conninfo.make_conninfo(dsn, host=f"{given['host']},127.0.0.1", port=f"{port},1")
    assert found(away) == []


def twice(dsn: str) -> str:
    """Return a DSN that names the same host twice."""
    given = conninfo.conninfo_to_dict(dsn)
    port = str(given.get("port") or 5432)
    return conninfo.make_conninfo(dsn, host=f"{given['host']},{given['host']}", port=f"{port},{port}")


def test_slow_reply_is_no_step_of_a_clock() -> None:
    first, slow = Sample(0.0, 100.0, 0.01, 0.0), Sample(0.3, 102.2, 2.5, 0.0)
    assert clocks.deviation(first, slow) == 0
    assert clocks.deviation(first, slow._replace(server=103.0)) == pytest.approx(0.5)
    assert clocks.deviation(first, slow._replace(server=99.0)) == pytest.approx(-1.29)


# The command.


def test_findings_are_printed_with_their_exit_code(shell: Shell, dsn: str) -> None:
    play(dsn, f"ALTER DATABASE {database(dsn)} SET synchronous_commit = off")
    warned = shell.run("doctor")
    assert warned.code == 3
    assert warned.out.startswith(
        "warning  synchronous-commit\n  synchronous_commit is off for this login (database).\n"
    )
    assert f'  fix  ALTER DATABASE "{database(dsn)}" RESET synchronous_commit;\n' in warned.out
    assert warned.out.endswith("checks, 1 finding.\n")
    play(dsn, "ALTER SEQUENCE dblock.token_sequence CYCLE")
    worse = shell.run("doctor")
    assert worse.code == 4
    assert worse.out.index("token-cycle") < worse.out.index("synchronous-commit"), "the worst finding comes first"


def test_hostile_query_moves_no_cursor(shell: Shell, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, application_name="x") as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT '\x1b[2J\u202e'")
        out = shell.run("doctor", "--snapshot-age", "0").out
    assert "\\x1b[2J\\u202e" in out
    assert not set(out) & {"\x1b", "\u202e"}


def test_unreachable_database_is_exit_code_69(shell: Shell) -> None:
    done = shell.run("doctor", dsn="host=127.0.0.1 port=1 user=x")
    assert (done.code, done.out) == (69, "")
    assert done.err.count("\n") == 1


@pytest.mark.second_stage
@pytest.mark.parametrize("when", first(1, [b"pg_settings", b"pg_stat_replication", b"distributed_locks", b"ROLLBACK"]))
def test_database_that_dies_during_the_examination_is_exit_code_69(shell: Shell, dsn: str, when: bytes) -> None:
    with Proxy(dsn) as proxy:
        proxy.fall_silent_at(when)
        process = shell.start("doctor", dsn=proxy.dsn)
        eventually(lambda: not proxy._flowing.is_set(), "the silence")
    done = ended(process)
    assert (done.code, done.out) == (69, "")
    assert done.err.count("\n") == 1


@pytest.mark.second_stage
def test_ctrl_c_is_reported_in_one_line(shell: Shell, dsn: str) -> None:
    with Proxy(dsn) as proxy:
        proxy.fall_silent_at(b"pg_stat_activity")
        process = shell.start("doctor", dsn=proxy.dsn)
        eventually(lambda: not proxy._flowing.is_set(), "the silence")
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert (done.code, done.out) == (130, "")
    assert done.err == "dblock: interrupted\n"


def test_doctor_gives_up_on_a_database_that_stops_replying(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = link.Link.query

    def limited(self: link.Link, sql: bytes, arguments: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Be impatient only with the query that gets no reply."""
        monkeypatch.setattr(link, "REPLY_TIMEOUT", 0.3 if b"pg_stat_activity" in sql else 15.0)
        return query(self, sql, arguments)

    monkeypatch.setattr(link.Link, "query", limited)
    with Proxy(dsn) as proxy:
        proxy.fall_silent_at(b"pg_stat_activity")
        with pytest.raises(dblock.Unavailable, match="did not reply within 0.3 s"):
            found(proxy.dsn)


def test_check_that_waits_too_long_is_left_out_and_the_others_run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "BEGIN", patient.BEGIN.replace("lock_timeout TO 2000", "lock_timeout TO 20"))
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE dblock.distributed_locks")
        report = examine(target.resolve(dsn))
    assert {(one.level, one.id) for one in report.findings} == {("note", "cannot-check")}
    assert any("token-below-locks" in one.what and "lock timeout" in one.what for one in report.findings)
    assert {"token-below-store", "clock-difference"} <= set(report.checked)


def test_examination_writes_nothing(dsn: str) -> None:
    """Every check runs in a read-only transaction."""
    assert patient.BEGIN.startswith("BEGIN READ ONLY")
    with psycopg.connect(dsn) as connection:
        before = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        connection.rollback()
        assert before is not None
        found(dsn)
        assert connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone() == (before[0] + 1,)


@pytest.mark.second_stage
def test_terminal_shows_the_running_check(shell: Shell, dsn: str, tmp_path: Path) -> None:
    with Proxy(dsn, tmp_path) as proxy:
        proxy.delay = 0.02
        play(dsn, "ALTER SEQUENCE dblock.token_sequence CYCLE")
        with Terminal(shell.command("doctor", dsn=proxy.dsn), columns=60) as terminal:
            terminal.wait_for("Checking ")
            assert terminal.ended() == 4
            lines = terminal.lines()
    assert lines[0] == "error  token-cycle"
    assert "Checking" not in terminal.text
    assert any(re.fullmatch(r"\d+ checks, 1 finding\.", line) for line in lines)
    assert os.fsencode("\x1b[31m") in terminal.raw


def test_every_check_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "doctor.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted([*(check.id for check in CHECKS), "cannot-check"])
