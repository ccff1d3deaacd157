"""The probe: a server that only pretends is refused, each missing behaviour is named, and nothing stays behind."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

import dblock
from dblock._runtime.target import resolve
from dblock.admin import probe as probing
from dblock.admin import schema
from dblock.admin.probe import BEHAVIOURS, Outcome, behaviours, probe, session_pair
from tests.support.emulator import EmulatingPooler
from tests.support.eventually import eventually
from tests.support.pooler import needs_pgbouncer, pooled
from tests.support.pretender import ADVISORY, NO_TIMELINE, pretend
from tests.support.proxy import Proxy
from tests.support.shell import Shell
from tests.support.stages import first

pytestmark = pytest.mark.usefixtures("needs_presence")  # each behaviour holds only over a direct connection

REWRITES = {
    "row-lock": (b" FOR UPDATE", b"           "),
    "table-lock": (b"IN SHARE UPDATE EXCLUSIVE MODE", b"IN ACCESS SHARE           MODE"),
    "read-committed": (b"ISOLATION LEVEL READ COMMITTED", b"ISOLATION LEVEL SERIALIZABLE  "),
    "definer-function": (b"LANGUAGE plpgsql SECURITY", b"LANGUAGE plnosql SECURITY"),
    "unlogged-table": (b"CREATE UNLOGGED TABLE", b"CREATE          TABLE"),
}
"""What to change in requests, so that the behaviour does not hold."""

PRETENDERS: dict[str, dict[str, str | None]] = {
    "advisory-lock": {"pg_try_advisory_lock(bigint)": ADVISORY["pg_try_advisory_lock(bigint)"]},
    "advisory-transaction": {"pg_try_advisory_xact_lock(bigint)": ADVISORY["pg_try_advisory_xact_lock(bigint)"]},
    "advisory-shared": {
        "pg_try_advisory_xact_lock_shared(bigint)": ADVISORY["pg_try_advisory_xact_lock_shared(bigint)"]
    },
    "sequence": {"nextval(regclass)": "RETURNS bigint LANGUAGE sql AS 'SELECT 7::bigint'"},
    "clock": {"clock_timestamp()": "RETURNS timestamptz LANGUAGE sql AS 'SELECT now()'"},
    "synchronous-commit": {"set_config(text, text, boolean)": "RETURNS text LANGUAGE sql AS 'SELECT $2'"},
    "notify-call": {"pg_notification_queue_usage()": None},
    "notification": {"pg_notify(text, text)": "RETURNS void LANGUAGE sql AS 'SELECT NULL::void'"},
    "server-start": {
        "pg_postmaster_start_time()": "RETURNS timestamptz LANGUAGE sql AS 'SELECT pg_catalog.clock_timestamp()'"
    },
}
"""What to replace in the catalog, so that the behaviour does not hold."""


@pytest.fixture(autouse=True)
def _needs_a_superuser(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn) as connection:
        if connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone() != (True,):
            pytest.skip("only a superuser can replace functions of the catalog")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a probe wait for a server that stands still."""
    monkeypatch.setattr(behaviours, "ARRIVES_WITHIN", 60.0)
    monkeypatch.setattr(session_pair, "SECOND_WITHIN", 60.0)
    monkeypatch.setattr(session_pair, "BEGIN", session_pair.BEGIN.replace("TO 5000", "TO 60000"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, _patient: None) -> None:
    """Let a probe find soon that something does not arrive."""
    monkeypatch.setattr(behaviours, "ARRIVES_WITHIN", 0.2)


def failing(outcomes: list[Outcome]) -> list[str]:
    return [one.id for one in outcomes if one.holds is False]


def left(dsn: str) -> object:
    """Return the names of everything that a probe or an install may have left in a database.

    The server ends a session a moment after its client has closed it, and with it the session's advisory locks.
    """
    advisory = (
        "SELECT objid::text FROM pg_locks WHERE locktype = 'advisory'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        eventually(lambda: not connection.execute(advisory).fetchone(), "the end of the sessions")
        return connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock%'"
            " UNION ALL SELECT relname FROM pg_class WHERE relname LIKE 'dblock_probe%'"
            f" UNION ALL SELECT proname FROM pg_proc WHERE proname LIKE 'dblock_probe%' UNION ALL {advisory}".encode()
        ).fetchall()


@pytest.mark.second_stage
@pytest.mark.alone
def test_postgres_behaves_and_keeps_nothing(bare_dsn: str) -> None:
    target = resolve(bare_dsn)
    probe(target)  # the first one also loads what it needs
    started = time.process_time()
    outcomes = probe(target)
    # Its longest waits are two pauses of some milliseconds. The rest is the work of both processes.
    assert time.process_time() - started < 0.25
    assert [one.id for one in outcomes] == [one.id for one in BEHAVIOURS]
    assert failing(outcomes) == []
    assert left(bare_dsn) == []


@pytest.mark.parametrize("behaviour", first(8, [one.id for one in BEHAVIOURS]))
def test_missing_behaviour_is_found_alone(
    request: pytest.FixtureRequest, bare_dsn: str, tmp_path: Path, behaviour: str
) -> None:
    if behaviour in ("session-end", "notification"):
        request.getfixturevalue("quick")
    if behaviour in PRETENDERS:
        pretend(bare_dsn, PRETENDERS[behaviour])
        outcomes = probe(resolve(bare_dsn))
    elif behaviour == "session-end":
        with EmulatingPooler(bare_dsn, tmp_path, b"pg_try_advisory_lock(", b"pg_advisory_unlock(") as pooler:
            outcomes = probe(resolve(pooler.dsn))
    elif behaviour == "direct-connection":
        with Proxy(bare_dsn) as proxy:
            outcomes = probe(resolve(proxy.dsn))
    else:
        with Proxy(bare_dsn, tmp_path) as proxy:
            proxy.rewrites = dict([REWRITES[behaviour]])
            outcomes = probe(resolve(proxy.dsn))
    also = {
        "advisory-lock": ["session-end"],
        "advisory-shared": ["session-end"],
        "advisory-transaction": ["advisory-shared"],
        # It passes on replies, and no notifications.
        "session-end": ["notification"],
    }
    assert failing(outcomes) == [behaviour, *also.get(behaviour, [])]
    (seen,) = [one.seen for one in outcomes if one.id == behaviour]
    assert seen
    assert left(bare_dsn) == []


def test_stub_that_grants_every_advisory_lock_is_refused(bare_dsn: str, tmp_path: Path) -> None:
    pretend(bare_dsn, dict(ADVISORY))
    with pytest.raises(dblock.UnsuitableServer) as refused:
        schema.install(bare_dsn)
    failed = [name for name, _, _ in refused.value.failed]
    assert failed == ["advisory-lock", "advisory-transaction", "advisory-shared"]
    assert "two sessions held the same advisory lock. A live client could be taken for dead, and two" in str(
        refused.value
    )
    assert left(bare_dsn) == [], "nothing was created"
    shell = Shell(None, tmp_path)
    done = shell.run("install", "--dsn", bare_dsn)
    shell.close()
    assert done.code == 78
    assert "does not behave as Postgres does" in done.err


def test_advisory_functions_that_are_missing_are_named(bare_dsn: str) -> None:
    pretend(bare_dsn, dict.fromkeys(ADVISORY))
    with pytest.raises(dblock.UnsuitableServer, match=r"pg_try_advisory_lock\(bigint\) does not exist \(42883\)"):
        schema.install(bare_dsn)


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick")
def test_install_goes_ahead_without_notifications(bare_dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    pretend(bare_dsn, PRETENDERS["notification"])
    assert schema.install(bare_dsn) is None
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "probe: notification: a notification had not arrived" in record.getMessage()
    assert "Wake-ups are off: waiters poll" in record.getMessage()


@pytest.mark.second_stage
def test_server_without_wal_of_its_own_needs_no_timeline(bare_dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Such a server refuses pg_current_wal_lsn(). Tokens follow its clock and its start instead."""
    pretend(bare_dsn, dict(NO_TIMELINE))
    assert schema.install(bare_dsn) is None
    assert caplog.records == []
    with dblock.Client(bare_dsn, presence=None) as client:
        first = client.lock("a").acquire()
        first.release()
        assert client.lock("a").acquire().token > first.token


@needs_pgbouncer
def test_pooler_hides_what_outlasts_a_transaction(bare_dsn: str) -> None:
    with pooled(bare_dsn) as through:
        outcomes = probe(resolve(through))
        assert failing(outcomes) == ["direct-connection"]
        assert [one.id for one in outcomes if one.holds is None] == ["session-end", "notification"]
        assert left(bare_dsn) == []
        assert schema.install(through) is None


@pytest.mark.second_stage
def test_role_that_may_create_no_schema_needs_only_its_own(bare_dsn: str, role: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE SCHEMA dblock AUTHORIZATION {}").format(sql.Identifier(role)))
    theirs = conninfo.make_conninfo(bare_dsn, user=role, password="app")
    assert failing(probe(resolve(theirs))) == []
    assert left(bare_dsn) == [("dblock",)]
    with ThreadPoolExecutor(4) as threads:
        befores = list(threads.map(lambda _: schema.install(theirs), range(4)))
    assert befores.count(None) == 1


def test_role_that_may_have_one_session_is_not_tried(
    bare_dsn: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT 1").format(sql.Identifier(role)))
        admin.execute(sql.SQL("CREATE SCHEMA dblock AUTHORIZATION {}").format(sql.Identifier(role)))
    theirs = conninfo.make_conninfo(bare_dsn, user=role, password="app")
    outcomes = probing.require(resolve(theirs))  # an install would go ahead
    assert {one.holds for one in outcomes} == {None}
    assert "could not be tried: there is no second session" in caplog.text


@needs_pgbouncer
def test_pooler_with_one_free_session_is_not_tried(bare_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_pair, "SECOND_WITHIN", 0.3)
    with pooled(bare_dsn) as through, psycopg.connect(through) as busy, psycopg.connect(through) as busier:
        for connection in (busy, busier):
            connection.execute("SELECT 1")  # two of its three sessions are in use
        assert {one.holds for one in probe(resolve(through))} == {None}
    assert left(bare_dsn) == []


def test_role_that_may_not_install_learns_it_from_the_probe(bare_dsn: str, role: str) -> None:
    theirs = conninfo.make_conninfo(bare_dsn, user=role, password="app")
    with pytest.raises(dblock.AccessDenied, match="it needs CREATE on the database, or an empty schema of its own"):
        schema.install(theirs)


def test_killed_probe_is_cleaned_up_by_the_next(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA dblock_probe_{int(time.time()) - 7200:x}_0badcafe".encode())
        admin.execute(f"CREATE SCHEMA dblock_probe_{int(time.time()) - 60:x}_0badcafe".encode())
        admin.execute("CREATE SCHEMA dblock_probe_of_mine")
    probe(resolve(bare_dsn))
    assert len(left(bare_dsn)) == 2, "one that may still run, and one that is no probe's"  # type: ignore[arg-type]


def test_interrupted_probe_leaves_nothing(bare_dsn: str) -> None:
    def interrupt(trial: str) -> None:
        if trial == "clock":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(resolve(bare_dsn), on_trial=interrupt)
    assert left(bare_dsn) == []


def test_read_only_probe_writes_nothing(bare_dsn: str) -> None:
    dsn = conninfo.make_conninfo(bare_dsn, options="-c default_transaction_read_only=on")
    outcomes = probe(resolve(dsn), read_only=True)
    assert failing(outcomes) == []
    assert {one.id for one in outcomes} == {one.id for one in BEHAVIOURS if not one.writes}


def test_installed_schema_is_not_probed_again(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "probe", lambda *args: pytest.fail("probed"))
    assert schema.install(dsn) is not None
