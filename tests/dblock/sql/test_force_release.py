"""Force-release: the holder's next renewal fails, and the lock is free when it releases or its deadline passes.

With `now` the lock is free at once.
"""

from __future__ import annotations

import uuid

import psycopg
import pytest
from psycopg import conninfo

from dblock.admin import privileges, schema
from tests.support import mutants
from tests.support.sessions import Session, Sessions
from tests.support.still_clock import StillClock
from tests.support.tokens import T1, T2

pytestmark = pytest.mark.usefixtures("known_tokens")

RENEW = "SELECT failed, reasons FROM renew_all(ARRAY['a'], ARRAY[%s::bigint], ARRAY['60 s'::interval])"
FORCE = "SELECT force_release('a', %s, 'ann@desk', 'stuck since noon')"


def held(sessions: Sessions) -> Session:
    session = sessions.open()
    assert session.do("SELECT granted, token FROM try_acquire('a', '1 hour', 'worker')") == (True, T1)
    return session


def test_forced_holder_cannot_renew_and_keeps_its_deadline(sessions: Sessions) -> None:
    session = held(sessions)
    deadline = session.do("SELECT expires_at FROM holder('a')")
    assert session.do(FORCE, T1) == (True,)
    assert session.do(RENEW, T1) == ([1], ["forced"])
    assert session.do(f"SELECT * FROM renew('a', {T1}, '60 s')") is None
    assert session.do("SELECT expires_at FROM holder('a')") == deadline
    assert session.do("SELECT granted FROM try_acquire('a')") == (False,), "the holder has not released yet"


def test_forced_lock_is_free_when_the_holder_releases(sessions: Sessions) -> None:
    session = held(sessions)
    session.do(FORCE, T1)
    assert session.do(f"SELECT release('a', {T1})") == (True,)
    assert session.do("SELECT granted, token FROM try_acquire('a')") == (True, T2)


def test_forced_lock_is_free_after_its_deadline_and_the_next_holder_can_renew(sessions: Sessions) -> None:
    session = held(sessions)
    session.do(FORCE, T1)
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert session.do("SELECT granted, token FROM try_acquire('a')") == (True, T2)
    assert session.do(RENEW, T2) == (None, None), "the next holder is forced too"


def test_lock_forced_now_is_free_at_once(sessions: Sessions) -> None:
    session = held(sessions)
    assert session.do(f"SELECT force_release('a', {T1}, now => true)") == (True,)
    assert session.do("SELECT granted, token FROM try_acquire('a')") == (True, T2)
    assert session.do(RENEW, T1) == ([1], ["superseded"])
    assert session.do(f"SELECT release('a', {T1})") == (False,), "the old holder freed the next holder's lock"


@pytest.mark.parametrize("now", [False, True])
def test_force_release_acts_on_the_exact_grant(sessions: Sessions, now: bool) -> None:
    session = held(sessions)
    statement = "SELECT force_release(%s, %s, now => %s)"
    assert session.do(statement, "a", T2, now) == (False,)
    assert session.do(statement, "b", T1, now) == (False,)
    session.do(f"SELECT release('a', {T1})")
    assert session.do(statement, "a", T1, now) == (False,), "the lock was free"
    assert session.do("SELECT count(*) FROM lock_history") == (0,), "the history has no event"


def test_efficiency_grant_is_forced_by_its_number(sessions: Sessions) -> None:
    session = held(sessions)
    session.do("SELECT try_acquire('b', durable => false)")
    (number,) = session.do("SELECT token FROM list_locks(name => 'b')")
    assert number < 0
    assert session.do("SELECT force_release('b', NULL, now => true)") == (False,)
    assert session.do("SELECT force_release('b', %s, now => true)", number) == (True,)
    session.do("SELECT try_acquire('b', durable => false)")
    assert session.do("SELECT force_release('b', %s, now => true)", number) == (False,), (
        "the number belonged to another grant"
    )


def test_force_release_waits_for_a_renewal_in_progress_and_then_ends_the_lease(sessions: Sessions) -> None:
    session, forcing = held(sessions), sessions.open()
    session.do("BEGIN")
    session.do(RENEW, T1)
    forced = forcing.start(FORCE, T1)
    forcing.wait_until_blocked()
    session.do("COMMIT")
    assert forced.result(60) == (True,)
    assert session.do(RENEW, T1) == ([1], ["forced"])


def renew_behind_a_force_release(sessions: Sessions) -> object:
    session, forcing = held(sessions), sessions.open()
    forcing.do("BEGIN")
    forcing.do(FORCE, T1)
    renewed = session.start(f"SELECT remaining > 50 FROM renew('a', {T1}, '60 s')")
    session.wait_until_blocked()
    forcing.do("COMMIT")
    return renewed.result(60)


def test_renewal_that_waits_for_a_force_release_fails(sessions: Sessions) -> None:
    assert renew_behind_a_force_release(sessions) is None


def test_force_release_test_catches_a_renewal_that_continues(sessions: Sessions, owner: psycopg.Connection) -> None:
    mutants.replace(owner, mutants.altered("20_renew.sql", "AND l.forced_at IS NULL", ""))
    assert renew_behind_a_force_release(sessions) == (True,)


def test_late_force_release_does_not_take_the_next_holders_lock(sessions: Sessions) -> None:
    session, forcing = held(sessions), sessions.open()
    session.do("BEGIN")
    session.do(f"SELECT release('a', {T1})")
    session.do("SELECT try_acquire('a')")
    forced = forcing.start(f"SELECT force_release('a', {T1}, now => true)")
    forcing.wait_until_blocked()
    session.do("COMMIT")
    assert forced.result(60) == (False,)
    assert session.do("SELECT token FROM holder('a')") == (T2,)


def test_force_release_of_a_lease_that_expired_while_it_waited_does_nothing(
    sessions: Sessions, clock: StillClock
) -> None:
    session, forcing = held(sessions), sessions.open()
    session.do("BEGIN")
    session.do("SELECT 1 FROM distributed_locks WHERE name = 'a' FOR UPDATE")
    forced = forcing.start(FORCE, T1)
    forcing.wait_until_blocked()
    clock.advance(3600)
    session.do("COMMIT")
    assert forced.result(60) == (False,)


def test_wake_queue_wakes_the_first_waiter_of_a_free_lock(sessions: Sessions, owner: psycopg.Connection) -> None:
    session = held(sessions)
    client = uuid.uuid4()
    owner.execute(f'LISTEN "dblock_{client.hex}"'.encode())
    session.do("SELECT ticket FROM acquire('a', attempt => gen_random_uuid(), client => %s)", client)
    session.do("SELECT wake_queue('a')")
    assert list(owner.notifies(timeout=0.05)) == [], "the lock is still held"
    session.do(f"SELECT force_release('a', {T1}, now => true)")
    session.do("SELECT wake_queue('a')")
    assert len(list(owner.notifies(timeout=60, stop_after=1))) == 1


def test_history_records_actor_and_reason_of_a_force_release(sessions: Sessions) -> None:
    session = held(sessions)
    session.do(FORCE, T1)
    event, token, holder, actor, reason = session.do(
        "SELECT event, token, holder, actor, reason FROM list_history('a')"
    )
    assert (event, token, holder, reason) == ("forced", T1, "worker", "stuck since noon")
    assert actor.startswith("ann@desk as ")
    session.do(f"SELECT force_release('a', {T1}, repeat('x', 9000), repeat('y', 9000), true)")
    event, actor, length = session.do("SELECT event, actor, length(reason) FROM list_history('a')")
    (login,) = session.do("SELECT session_user")
    assert (event, length) == ("forced_now", 2048)
    assert actor == f"{'x' * 400} as {login}", "a long actor cannot push the session's role out"


def test_roles_can_call_only_the_functions_of_their_privileges(dsn: str, role: str, owner: psycopg.Connection) -> None:
    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    owner.execute("SELECT try_acquire('a')")
    calls = {
        "lock": ["try_acquire('b')", "holder('a')"],
        "see": [
            "list_locks()",
            "list_waiters()",
            "list_history()",
            "list_presence()",
            "wait_graph()",
            "grants_are_recorded()",
        ],
        "force-release": [f"force_release('a', {T1})"],
        None: ["record_grants(true)", "reap()", f"record_event('a', {T1}, 'forced', 'x', now())", "raise_tokens(1)"],
    }
    for may in (["lock"], ["see"], ["lock", "see"], ["see", "force-release"], ["lock", "see", "force-release"]):
        schema.revoke(dsn, role)
        schema.grant(dsn, role, may=may)
        with psycopg.connect(as_role, autocommit=True) as connection:
            for privilege, functions in calls.items():
                for function in functions:
                    statement = f"SELECT dblock.{function}".encode()
                    if privilege in may:
                        connection.execute(statement)
                    else:
                        with pytest.raises(psycopg.errors.InsufficientPrivilege):
                            connection.execute(statement)


def test_new_function_is_granted_to_roles_that_had_its_kind(dsn: str, role: str, owner: psycopg.Connection) -> None:
    """An upgrade runs the function files again, and grants each role the functions of its privileges and no others."""
    for may, taken in (("see", "list_history"), ("lock", "queue"), ("force-release", "wake_queue")):
        schema.revoke(dsn, role)
        schema.grant(dsn, role, may=[may])
        owner.execute(f'REVOKE EXECUTE ON FUNCTION {taken} FROM "{role}"'.encode())
        schema.install(dsn, repair=True)
        found = owner.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'dblock'::regnamespace"
            " AND has_function_privilege(%s, oid, 'EXECUTE')",
            [role],
        ).fetchall()
        assert {name for (name,) in found} == {*privileges.PRIVILEGES[may]}
