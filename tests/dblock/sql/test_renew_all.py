"""Many renewals in one statement: each acts on its exact grant, and none waits for another."""

from __future__ import annotations

import psycopg
import pytest

from tests.support import mutants
from tests.support.sessions import Sessions
from tests.support.stages import first
from tests.support.tokens import T1, T2, T3, T4

pytestmark = pytest.mark.usefixtures("known_tokens")

RENEW = "SELECT failed, reasons FROM renew_all(%s, %s, %s)"


def left(session: object, name: str) -> float:
    (seconds,) = session.do("SELECT remaining FROM holder(%s)", name)  # type: ignore[attr-defined]
    return float(seconds)


def test_renew_all_extends_held_leases_and_names_the_others_with_reasons(sessions: Sessions) -> None:
    session = sessions.open()
    for name in ("kept", "released", "expired", "taken over"):
        session.do("SELECT try_acquire(%s, '1 hour')", name)
    session.do(f"SELECT release('released', {T2})")
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name IN ('expired', 'taken over')")
    session.do("SELECT try_acquire('taken over', '1 hour')")
    names = ["kept", "released", "expired", "taken over", "never was"]
    assert session.do(RENEW, names, [T1, T2, T3, T4, 99], ["2 hours"] * 5) == (
        [2, 3, 4, 5],
        ["released", "expired", "superseded", "superseded"],
    )
    assert left(session, "kept") > 7000
    assert left(session, "taken over") <= 3600, "another holder's lease was extended"
    assert session.do("SELECT count(*) FROM holder('expired')") == (0,)


def renew_beside_a_busy_row(sessions: Sessions) -> object:
    keeper, session = sessions.open(), sessions.open()
    for name in ("busy", "other"):
        session.do("SELECT try_acquire(%s, '1 hour')", name)
    keeper.do("BEGIN")
    keeper.do("SELECT 1 FROM distributed_locks WHERE name = 'busy' FOR SHARE")
    session.do("SET lock_timeout = '500 ms'")
    reply = session.do(RENEW, ["busy", "other"], [T1, T2], ["2 hours", "2 hours"])
    assert left(session, "other") > 7000
    return reply


def test_busy_row_does_not_delay_the_other_renewals(sessions: Sessions) -> None:
    assert renew_beside_a_busy_row(sessions) == ([1], ["busy"])


def test_renew_all_test_catches_a_renewal_that_waits(sessions: Sessions, owner: psycopg.Connection) -> None:
    mutants.replace(owner, mutants.altered("21_renew_all.sql", "OF l SKIP LOCKED", "OF l"))
    with pytest.raises(psycopg.errors.LockNotAvailable):
        renew_beside_a_busy_row(sessions)


def test_renew_all_never_shortens_a_lease(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire('a', '2 hours')")
    assert session.do(RENEW, ["a"], [T1], ["1 hour"]) == (None, None)
    assert left(session, "a") > 7000


@pytest.mark.parametrize("name", first(3, ["{a,b}", '"', "\\", "{}", "a,b", "NULL", " ", "ünïcode", "%s"]))
def test_any_name_can_be_renewed(sessions: Sessions, name: str) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire(%s, '1 hour')", name)
    assert session.do(RENEW, [name, "another"], [T1, T1], ["2 hours", "2 hours"]) == ([2], ["superseded"])
    assert left(session, name) > 7000


def test_duplicate_lease_is_renewed_once(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire('a', '1 hour')")
    session.do(RENEW, ["a", "a"], [T1, T1], ["2 hours", "3 hours"])
    assert left(session, "a") > 7000


@pytest.mark.parametrize(
    "arguments",
    [(["a"], [1, 2], ["1 s"]), ([], [], ["1 s"]), (["a"], [1], ["1 ms"]), ([None], [1], ["1 s"]), (["a"], [1], [None])],
    ids=str,
)
def test_renew_all_refuses_invalid_arguments(sessions: Sessions, arguments: tuple[object, ...]) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        sessions.open().do(RENEW, *arguments)


def test_stale_renewal_does_not_lock_the_next_holders_row(sessions: Sessions) -> None:
    stale, current = sessions.open(), sessions.open()
    stale.do("SELECT try_acquire('a', '1 hour')")
    stale.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    current.do("SELECT try_acquire('a', '1 hour')")
    stale.do("BEGIN")
    assert stale.do(RENEW, ["a"], [T1], ["1 hour"]) == ([1], ["superseded"])
    assert current.do(RENEW, ["a"], [T2], ["1 hour"]) == (None, None)
    stale.do("COMMIT")


@pytest.mark.parametrize(
    "late",
    [
        f"SELECT renew('a', {T1})",
        f"SELECT renew_all('{{a}}', '{{{T1}}}', '{{1 hour}}')",
        f"SELECT release_all('{{a}}', '{{{T1}}}')",
        f"SELECT force_release('a', {T1})",
    ],
    ids=["renew", "renew_all", "release_all", "force_release"],
)
def test_late_request_for_a_released_lease_does_not_refuse_a_grant(sessions: Sessions, late: str) -> None:
    former, following = sessions.open(), sessions.open()
    former.do("SELECT try_acquire('a', '1 hour')")
    former.do(f"SELECT release('a', {T1})")
    former.do("BEGIN")
    former.do(late)
    assert following.do("SELECT granted FROM try_acquire('a')") == (True,)
    former.do("COMMIT")


@pytest.mark.parametrize(
    ("before", "tokens", "durability"),
    [
        ("SELECT 1", [T1, T1], "off"),
        ("SELECT 1", [T1, T2], "on"),
        ("SELECT pg_current_xact_id()", [T1, T1], "on"),
    ],
    ids=["nothing renewed", "one renewed", "nothing renewed after a write"],
)
def test_renewal_of_nothing_does_not_wait_for_the_disk(
    sessions: Sessions, before: str, tokens: list[int], durability: str
) -> None:
    """It may have locked a row that the next holder is waiting for."""
    session = sessions.open()
    for name in ("over", "held"):
        session.do("SELECT try_acquire(%s, '1 hour')", name)
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = 'over'")
    session.do("BEGIN")
    session.do(before)
    session.do(RENEW, ["over", "held"], tokens, ["1 hour", "1 hour"])
    assert session.do("SHOW synchronous_commit") == (durability,)
    session.do("COMMIT")
