"""The ledger of migrations: which run may begin, which sessions are stale, and what is recorded of each end."""

from __future__ import annotations

import contextlib

import psycopg
import pytest

from tests.support.eventually import eventually
from tests.support.sessions import Session, Sessions
from tests.support.stages import first
from tests.support.still_clock import StillClock
from tests.support.tokens import T1, T2, T3

pytestmark = pytest.mark.usefixtures("known_tokens")

BEGIN = "SELECT decision, error FROM begin_migration('m', %s, %s, attempts => %s)"
EXPIRE = "UPDATE distributed_locks SET expires_at = clock_timestamp()"


def granted(session: Session) -> int:
    """Hold lock m in this session, and return the token."""
    token: int
    (token,) = session.do("SELECT token FROM try_acquire('m', '30 s', 'replica')") or (0,)
    assert token
    return token


def run(session: Session, outcome: str, version: str | None = "1", error: str | None = None) -> None:
    """Play one whole run: grant, begin, end, release."""
    token = granted(session)
    row = session.do("SELECT run FROM begin_migration('m', %s, %s, attempts => 9)", token, version)
    assert row is not None
    assert session.do("SELECT end_migration(%s, %s, %s, %s)", row[0], token, outcome, error) == (outcome,)
    assert session.do("SELECT release('m', %s)", token) == (True,)


def test_run_begins_only_under_the_lock(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do(BEGIN, T1, "1", 1) == ("lost", None), "there is no lock"
    assert granted(session) == T1
    assert session.do(BEGIN, T2, "1", 1) == ("lost", None), "another token"
    assert session.do(BEGIN, T1, "1", 1) == ("run", None)


def test_expired_holder_begins_nothing(sessions: Sessions) -> None:
    session = sessions.open()
    granted(session)
    session.do(EXPIRE)
    assert session.do(BEGIN, T1, "1", 1) == ("lost", None)


def test_version_that_succeeded_is_done_for_all(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do("SELECT done, newer, failures FROM migration_state('m', '1')") == (False, None, 0)
    run(session, "succeeded")
    assert session.do("SELECT done, newer, failures FROM migration_state('m', '1')") == (True, None, 0)
    assert session.do("SELECT done FROM migration_state('other', '1')") == (False,), "another migration"
    assert session.do("SELECT done FROM migration_state('m')") == (False,), "without a version nothing is known"
    token = granted(session)
    assert session.do(BEGIN, token, "1", 1) == ("done", None)
    assert session.do(BEGIN, token, "2", 1) == ("run", None)


def test_database_ahead_of_the_caller_names_the_newer_version(sessions: Sessions) -> None:
    session = sessions.open()
    run(session, "succeeded", "1")
    run(session, "succeeded", "2")
    run(session, "failed", "3", "no")
    assert session.do("SELECT done, newer FROM migration_state('m', '1')") == (True, "2")
    assert session.do("SELECT done, newer FROM migration_state('m', '2')") == (True, None), "a failed run is not ahead"


def test_failure_is_told_to_all_until_a_retry(sessions: Sessions) -> None:
    session = sessions.open()
    run(session, "failed", error="first")
    token = granted(session)
    assert session.do(BEGIN, token, "1", 1) == ("failed", "first")
    assert session.do(BEGIN, token, "1", 2) == ("run", None), "a second attempt is left"
    session.do("SELECT release('m', %s)", token)
    run(session, "failed", error="second")
    assert session.do("SELECT failures, error FROM migration_state('m', '1')") == (2, "first")
    token = granted(session)
    assert session.do(BEGIN, token, "1", 2) == ("failed", "first")
    assert session.do("SELECT retry_migration('m', 'ann', 'disk was full')") == (2,)
    assert session.do(BEGIN, token, "1", 1) == ("run", None)


def test_new_version_is_not_held_up_by_a_failed_one(sessions: Sessions) -> None:
    session = sessions.open()
    run(session, "failed", "1", "no")
    assert session.do(BEGIN, granted(session), "2", 1) == ("run", None)


def test_success_clears_the_failures_before_it(sessions: Sessions) -> None:
    session = sessions.open()
    run(session, "failed", "1", "no")
    run(session, "succeeded", "2")
    assert session.do("SELECT failures FROM migration_state('m', '1')") == (0,)


@pytest.mark.parametrize("outcome", ["killed", "lost"])
def test_run_that_was_ended_from_outside_is_no_failure(sessions: Sessions, outcome: str) -> None:
    session = sessions.open()
    run(session, outcome)
    assert session.do(BEGIN, granted(session), "1", 1) == ("run", None)


def test_without_a_version_only_those_that_waited_hear_of_a_failure(sessions: Sessions) -> None:
    session = sessions.open()
    (before,) = session.do("SELECT asked_at FROM migration_state('m')") or (None,)
    run(session, "failed", None, "no")
    (after,) = session.do("SELECT asked_at FROM migration_state('m')") or (None,)
    token = granted(session)
    begin = "SELECT decision, error FROM begin_migration('m', %s, since => %s)"
    assert session.do(begin, token, before) == ("failed", "no")
    assert session.do(begin, token, after) == ("run", None), "a replica that started later tries"


def test_blocked_run_stops_only_the_replicas_that_waited(sessions: Sessions) -> None:
    session = sessions.open()
    (before,) = session.do("SELECT asked_at FROM migration_state('m', '1')") or (None,)
    run(session, "blocked", "1", "a report was in the way")
    (after, failures) = session.do("SELECT asked_at, failures FROM migration_state('m', '1')") or (None, None)
    assert failures == 0
    token = granted(session)
    begin = "SELECT decision, error FROM begin_migration('m', %s, '1', since => %s)"
    assert session.do(begin, token, before) == ("failed", "a report was in the way")
    assert session.do(begin, token, after) == ("run", None), "a replica that started later tries"


def test_run_that_did_not_report_is_recorded_as_killed_by_the_next(sessions: Sessions) -> None:
    session = sessions.open()
    granted(session)
    (first,) = session.do("SELECT run FROM begin_migration('m', %s, '1')", T1) or (None,)
    session.do(EXPIRE)
    granted(session)
    assert session.do(BEGIN, T2, "1", 1) == ("run", None)
    assert session.do("SELECT outcome FROM migration_runs WHERE run = %s", first) == ("killed",)
    assert session.do("SELECT end_migration(%s, %s, 'succeeded')", first, T1) == ("killed",), "the end stays"


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "blocked"])
def test_success_or_failure_without_the_lock_is_recorded_as_lost(sessions: Sessions, outcome: str) -> None:
    session = sessions.open()
    granted(session)
    (number,) = session.do("SELECT run FROM begin_migration('m', %s, '1')", T1) or (None,)
    session.do(EXPIRE)
    assert session.do("SELECT end_migration(%s, %s, %s, 'cut off')", number, T1, outcome) == ("lost",)
    assert session.do("SELECT done, failures FROM migration_state('m', '1')") == (False, 0)


def test_no_grant_comes_between_the_check_and_the_record_of_a_success(sessions: Sessions, clock: StillClock) -> None:
    one, two = sessions.open(), sessions.open()
    token = granted(one)
    (number,) = one.do("SELECT run FROM begin_migration('m', %s, '1')", token) or (None,)
    one.do("BEGIN")
    assert one.do("SELECT end_migration(%s, %s, 'succeeded')", number, token) == ("succeeded",)
    clock.advance(30)
    assert two.do("SELECT granted FROM try_acquire('m')") == (False,), "the open transaction has proved its lease"
    one.do("COMMIT")
    assert two.do("SELECT granted, token > %s FROM try_acquire('m')", token) == (True, True)


def test_revision_is_noted_while_the_run_is_open(sessions: Sessions) -> None:
    session = sessions.open()
    token = granted(session)
    (number,) = session.do("SELECT run FROM begin_migration('m', %s, '1', revision => 'a')", token) or (None,)
    assert session.do("SELECT note_revision(%s, %s, 'b')", number, token) == (True,)
    assert session.do("SELECT note_revision(%s, %s, 'c')", number, token + 1) == (False,), "another token"
    session.do("SELECT end_migration(%s, %s, 'failed', 'no')", number, token)
    assert session.do("SELECT note_revision(%s, %s, 'd')", number, token) == (False,)
    shown = "SELECT from_revision, revision, error FROM migration_runs WHERE run = %s"
    assert session.do(shown, number) == ("a", "b", "no")


def test_sessions_of_a_grant_that_does_not_hold_the_lock_are_stale(sessions: Sessions) -> None:
    migrator, other = sessions.open(), sessions.open()
    granted(other)
    (mark,) = other.do("SELECT mark FROM begin_migration('m', %s, '1')", T1) or ("",)
    assert mark == f"dblock-migrate:m:{T1}"
    migrator.do("SELECT set_config('application_name', %s, false)", mark)
    listed = "SELECT token, mark, stale FROM migration_sessions('m')"
    assert other.do(listed) == (T1, mark, False)
    other.do(EXPIRE)
    assert other.do(listed) == (T1, mark, True), "the lease has expired"
    granted(other)
    assert other.do(listed) == (T1, mark, True), "the lock was granted again"


def test_session_of_another_role_does_not_pass_for_a_migrator(sessions: Sessions, owner: psycopg.Connection) -> None:
    session = sessions.open()
    token = granted(session)
    (mark,) = session.do("SELECT mark FROM begin_migration('m', %s, '1')", token) or ("",)
    owner.execute("CREATE ROLE impostor LOGIN")
    try:
        with psycopg.connect(owner.info.dsn, user="impostor", application_name=mark):
            assert session.do("SELECT pid FROM migration_sessions('m')") is None
    finally:
        owner.execute("DROP ROLE impostor")


@pytest.mark.parametrize(
    "name",
    first(3, ["a", "x" * 25, "ü", "x" * 24, "x" * 512, "a:b", "a b", "alembic:public.alembic_version"]),
)
def test_mark_fits_an_application_name_and_tells_names_apart(sessions: Sessions, name: str) -> None:
    session = sessions.open()
    (mark,) = session.do("SELECT migration_mark(%s, %s)", name, 2**53 - 1) or ("",)
    session.do("SELECT set_config('application_name', %s, false)", mark)
    assert session.do("SELECT current_setting('application_name')") == (mark,)
    assert session.do("SELECT migration_mark(%s, %s)", name + "y", 2**53 - 1) != (mark,)


def test_grant_in_a_restored_copy_does_not_hold_up_the_migration(sessions: Sessions) -> None:
    session = sessions.open()
    token = granted(session)
    (number,) = session.do("SELECT run FROM begin_migration('m', %s, '1')", token) or (None,)
    assert session.do("SELECT discard_restored_grant('m')") == (False,), "the holder uses this database"
    session.do("UPDATE migration_runs SET database_identity = '7/7'")
    assert session.do("SELECT discard_restored_grant('m')") == (True,)
    assert session.do("SELECT outcome FROM migration_runs WHERE run = %s", number) == ("killed",)
    assert session.do("SELECT granted, token FROM try_acquire('m')") == (True, T2)
    assert session.do("SELECT discard_restored_grant('m')") == (False,)


def test_list_shows_phase_runs_and_sessions(sessions: Sessions) -> None:
    session, migrator = sessions.open(), sessions.open()
    listed = "SELECT phase, version, revision, waiting, jsonb_array_length(sessions), jsonb_array_length(runs)"
    assert session.do(f"{listed} FROM list_migrations()") is None
    token = granted(session)
    (number, mark) = session.do("SELECT run, mark FROM begin_migration('m', %s, '1')", token) or (0, "")
    migrator.do("SELECT set_config('application_name', %s, false)", mark)
    assert session.do(f"{listed} FROM list_migrations('m')") == ("migrating", "1", None, 0, 1, 1)
    session.do("SELECT end_migration(%s, %s, 'failed', 'no')", number, token)
    assert session.do("SELECT phase FROM list_migrations('m')") == ("starting",), "the lock is still held"
    session.do("SELECT release('m', %s)", token)
    assert session.do("SELECT phase, error FROM list_migrations('m')") == ("failed", "no")
    run(session, "succeeded", "2")
    assert session.do("SELECT phase, jsonb_array_length(runs) FROM list_migrations('m', 1)") == ("done", 1)
    granted(session)
    session.do("SELECT begin_migration('m', %s, '3')", T3)
    session.do(EXPIRE)
    assert session.do("SELECT phase FROM list_migrations('m')") == ("interrupted",)


def test_ledger_keeps_five_hundred_runs_of_a_name(sessions: Sessions, owner: psycopg.Connection) -> None:
    session = sessions.open()
    run(session, "failed", "0", "no")
    session.do(
        "INSERT INTO migration_runs"
        " (name, token, version, migrator, holder, session_role, database_identity, started_at)"
        " SELECT 'm', 1, '0', '', '', '', '', now() FROM generate_series(1, 600)"
    )
    run(session, "succeeded")
    assert session.do("SELECT count(*) FROM migration_runs") == (500,)


def test_version_stays_done_after_five_hundred_later_runs(sessions: Sessions, owner: psycopg.Connection) -> None:
    session = sessions.open()
    run(session, "succeeded", "first")
    session.do(
        "INSERT INTO migration_runs"
        " (name, token, version, migrator, holder, session_role, database_identity, started_at, ended_at, outcome)"
        " SELECT 'm', 1, 'again', '', '', '', '', now(), now(), 'succeeded' FROM generate_series(1, 600)"
    )
    run(session, "succeeded", "last")
    assert session.do("SELECT done, newer FROM migration_state('m', 'first')") == (True, "last")
    assert session.do("SELECT count(*) FROM migration_runs") == (501,), "only the last success of a version is kept"


def test_session_of_another_role_that_the_caller_may_end_counts_if_asked_for(
    sessions: Sessions, dsn: str, role: str
) -> None:
    session = sessions.open()
    token = granted(session)
    (mark,) = session.do("SELECT mark FROM begin_migration('m', %s, '1')", token) or ("",)
    with psycopg.connect(dsn, user=role, password="app", application_name=mark) as migrator:
        listed = "SELECT pid FROM migration_sessions('m', %s)"
        assert session.do(listed, True) == (migrator.info.backend_pid,), "a superuser may end each session"
        assert session.do(listed, False) is None


def test_invalid_index_is_listed_and_one_that_is_being_built_is_not(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    session.do("CREATE TABLE public.people (name text)")
    try:
        session.do("INSERT INTO public.people VALUES ('a'), ('a')")
        with pytest.raises(psycopg.errors.UniqueViolation):
            session.do("CREATE UNIQUE INDEX CONCURRENTLY people_name ON public.people (name)")
        listed = "SELECT index_name, table_name FROM invalid_indexes()"
        assert session.do(listed) == ("public.people_name", "public.people")
        builder = sessions.open()
        builder.do("BEGIN")
        builder.do("LOCK TABLE public.people IN SHARE UPDATE EXCLUSIVE MODE")
        assert session.do(listed) is None
        builder.do("ROLLBACK")
    finally:
        session.do("DROP TABLE public.people")


def test_invalid_index_is_listed_while_its_table_is_vacuumed(
    dsn: str, sessions: Sessions, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    session.do("CREATE TABLE public.people AS SELECT 'a' AS name FROM generate_series(1, 20000)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        session.do("CREATE UNIQUE INDEX CONCURRENTLY people_name ON public.people (name)")
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as vacuum:
        vacuum.execute("SET vacuum_cost_delay = 100")
        vacuum.execute("SET vacuum_cost_limit = 1")
        vacuum.pgconn.send_query(b"VACUUM public.people")
        vacuumed = "SELECT 1 FROM pg_stat_progress_vacuum WHERE relid = 'public.people'::regclass"
        eventually(lambda: session.do(vacuumed), "the vacuum")
        assert session.do("SELECT index_name FROM invalid_indexes()") == ("public.people_name",)
        owner.execute("SELECT pg_terminate_backend(%s)", [vacuum.info.backend_pid])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("begin_migration('m', 1, repeat('x', 513))", "at most 512 bytes"),
        ("begin_migration('m', 1, attempts => 0)", "a number of attempts from 1"),
        ("begin_migration('m', 1, attempts => NULL)", "a number of attempts from 1"),
        ("end_migration(1, 1, 'fine')", "succeeded, failed, blocked, killed or lost"),
        ("end_migration(1, 1, NULL)", "succeeded, failed, blocked, killed or lost"),
    ],
)
def test_bad_arguments_are_refused(sessions: Sessions, call: str, message: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
        sessions.open().do(f"SELECT {call}")
