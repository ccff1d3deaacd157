"""Shared locks in SQL: which readers, writers and permits are granted, in which order, under which tokens."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from dblock._core.statements import Statements
from tests.support.sessions import Sessions
from tests.support.shared_locks import (
    HERE,
    attempt,
    free,
    keep_clients_alive,
    listen,
    notified,
)

READ = "SELECT granted, share, permit FROM acquire_shared('a', 'read-write', 'read', attempt => %s, client => %s)"
WRITE = "SELECT granted, share, permit FROM acquire_shared('a', 'read-write', 'write', attempt => %s, client => %s)"
TRY_READ = "SELECT granted FROM acquire_shared('a', 'read-write', 'read')"
TRY_WRITE = "SELECT granted FROM acquire_shared('a', 'read-write', 'write')"
ASK_PERMIT = (
    "SELECT granted, share, permit FROM acquire_shared('s', 'semaphore', NULL, %s, attempt => %s, client => %s)"
)
TRY_PERMIT = "SELECT granted FROM acquire_shared('s', 'semaphore', NULL, 2)"


@pytest.fixture(autouse=True)
def _clients_stay_alive(owner: psycopg.Connection) -> None:
    keep_clients_alive(owner)


def test_readers_share_the_lock_and_exclude_a_writer(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do(READ, attempt(1), HERE) == (True, "a#reader-0", 0)
    assert session.do(READ, attempt(2), HERE) == (True, "a#reader-1", 1)
    assert session.do(TRY_WRITE) == (False,)
    free(session, "a#reader-0")
    assert session.do(TRY_WRITE) == (False,)
    assert session.do(READ, attempt(3), HERE) == (True, "a#reader-0", 0), "the lowest number that is free"
    free(session, "a#reader-0")
    free(session, "a#reader-1")
    assert session.do(WRITE, attempt(4), HERE) == (True, "a#writer", None)
    assert session.do(TRY_READ) == session.do(TRY_WRITE) == (False,)


def test_reader_queues_behind_a_writer_that_came_before(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    assert session.do(READ, attempt(1), HERE)[0]
    assert not session.do(WRITE, attempt(2), HERE)[0]
    assert not session.do(READ, attempt(3), HERE)[0]
    assert not session.do(READ, attempt(4), HERE)[0]
    assert session.do(TRY_READ) == (False,)
    free(session, "a#reader-0")
    assert notified(listener) == [2]
    assert not session.do(READ, attempt(3), HERE)[0]
    assert session.do(WRITE, attempt(2), HERE) == (True, "a#writer", None)
    free(session, "a#writer")
    assert notified(listener) == [3, 4], "the readers enter together"
    assert session.do(READ, attempt(4), HERE)[0]
    assert session.do(READ, attempt(3), HERE)[0]
    assert session.do("SELECT waiting FROM distributed_locks WHERE name = 'a'") == (False,)


def test_semaphore_grants_its_permits_by_number_and_in_order(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    assert session.do(ASK_PERMIT, 2, attempt(1), HERE) == (True, "s#0", 0)
    assert session.do(ASK_PERMIT, 2, attempt(2), HERE) == (True, "s#1", 1)
    for number in (3, 4, 5):
        assert not session.do(ASK_PERMIT, None, attempt(number), HERE)[0]
    free(session, "s#1")
    assert notified(listener) == [3]
    assert session.do(TRY_PERMIT) == (False,), "the free permit is for the first waiter"
    assert not session.do(ASK_PERMIT, 2, attempt(4), HERE)[0]
    free(session, "s#0")
    assert notified(listener) == [3, 4]
    assert session.do(ASK_PERMIT, 2, attempt(4), HERE) == (True, "s#0", 0)
    assert session.do(ASK_PERMIT, 2, attempt(3), HERE) == (True, "s#1", 1)
    assert not session.do(ASK_PERMIT, 2, attempt(5), HERE)[0]


def test_every_grant_has_a_higher_token_than_all_before(sessions: Sessions) -> None:
    session = sessions.open()
    tokens = [
        session.do("SELECT token FROM acquire_shared('s', 'semaphore', NULL, 3, attempt => %s)", attempt(number))[0]
        for number in (1, 2, 3)
    ]
    free(session, "s#1")
    tokens += session.do("SELECT token FROM acquire_shared('s', 'semaphore', NULL, 3)")
    assert tokens == sorted(set(tokens))
    assert session.do("SELECT token FROM distributed_locks WHERE name = 's'") == (tokens[-1],)


def test_retry_after_a_lost_reply_finds_its_own_grant(sessions: Sessions) -> None:
    session = sessions.open()
    for _ in range(3):
        assert session.do(READ, attempt(1), HERE) == (True, "a#reader-0", 0)
        assert session.do(ASK_PERMIT, 2, attempt(1), HERE) == (True, "s#0", 0)


WRONG_KINDS: list[tuple[str, str, str]] = [
    ("SELECT try_acquire('x')", "SELECT acquire_shared('x', 'read-write', 'read')", "'x' is a plain lock"),
    ("SELECT acquire_shared('x', 'read-write', 'read')", "SELECT try_acquire('x')", "'x' is a read-write lock"),
    ("SELECT acquire_shared('x', 'read-write', 'read')", "SELECT try_acquire('x#reader-0')", "reader's share of"),
    ("SELECT acquire_shared('x', 'semaphore', NULL, 1)", "SELECT try_acquire('x#0')", "a permit of the semaphore 'x'"),
    (
        "SELECT acquire_shared('x', 'semaphore', NULL, 1)",
        f"SELECT acquire('x', attempt => '{attempt(1)}', client => '{HERE}')",
        "'x' is a semaphore",
    ),
    (
        "SELECT acquire_shared('x', 'semaphore', NULL, 1)",
        "SELECT acquire_shared('x', 'read-write', 'write')",
        "'x' is a semaphore",
    ),
    (
        "SELECT acquire_shared('x', 'semaphore', NULL, 1)",
        f"SELECT acquire('x#0', attempt => '{attempt(1)}', client => '{HERE}')",
        "a permit of the semaphore 'x'",
    ),
    ("SELECT try_acquire('x#writer')", "SELECT acquire_shared('x', 'read-write', 'write')", "'x#writer' is a plain"),
]


def test_name_has_one_kind(owner: psycopg.Connection) -> None:
    for before, then, says in WRONG_KINDS:
        owner.execute("DELETE FROM distributed_locks")
        owner.execute(before.encode())
        with pytest.raises(psycopg.Error, match=says) as refused:
            owner.execute(then.encode())
        assert refused.value.sqlstate == "DBL10", then


def test_clients_that_disagree_on_the_permits_receive_both_numbers(owner: psycopg.Connection) -> None:
    owner.execute("SELECT acquire_shared('s', 'semaphore', NULL, 2)")
    with pytest.raises(psycopg.Error, match="'s' has 2 permits, but this call asks for one with 3") as refused:
        owner.execute("SELECT acquire_shared('s', 'semaphore', NULL, 3)")
    assert refused.value.sqlstate == "DBL11"
    assert refused.value.diag.message_detail == '{"name" : "s", "permits" : 2, "asked" : 3}'


def test_attempt_that_has_a_grant_or_a_ticket_does_not_insist_on_the_permits(sessions: Sessions) -> None:
    """A retry after a lost reply would otherwise fail, and leave its grant or its ticket behind."""
    session = sessions.open()
    assert session.do(ASK_PERMIT, 1, attempt(1), HERE) == (True, "s#0", 0)
    assert not session.do(ASK_PERMIT, 1, attempt(2), HERE)[0]
    session.do("SELECT resize_semaphore('s', 2)")
    assert session.do(ASK_PERMIT, 1, attempt(1), HERE) == (True, "s#0", 0), "its grant"
    assert session.do(ASK_PERMIT, 1, attempt(2), HERE) == (True, "s#1", 1), "its ticket"
    with pytest.raises(psycopg.Error, match="'s' has 2 permits"):
        session.do(ASK_PERMIT, 1, attempt(3), HERE)
    pruned = ASK_PERMIT.replace("client => %s", "client => %s, had_ticket => true")
    assert session.do(pruned, 1, attempt(3), HERE) == (False, None, None), "its ticket was pruned"


def test_downgrade_keeps_a_waiting_writer_out(sessions: Sessions) -> None:
    session = sessions.open()
    (token,) = session.do("SELECT token FROM acquire_shared('a', 'read-write', 'write', attempt => %s)", attempt(1))
    assert not session.do(WRITE, attempt(2), HERE)[0]
    reader = session.do("SELECT granted, token, share FROM downgrade('a', %s, %s)", token, attempt(3))
    assert reader == (True, reader[1], "a#reader-0")
    assert reader[1] > token
    assert session.do("SELECT granted, token, share FROM downgrade('a#writer', %s, %s)", token, attempt(3)) == reader
    assert session.do("SELECT granted FROM downgrade('a', %s, %s)", token, attempt(4)) == (False,)
    assert not session.do(WRITE, attempt(2), HERE)[0]
    free(session, "a#reader-0")
    assert session.do(WRITE, attempt(2), HERE)[0]


def test_semaphore_made_larger_wakes_its_waiters(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    for number in range(5):
        session.do(ASK_PERMIT, 1, attempt(number), HERE)
    assert session.do("SELECT resize_semaphore('s', 3)") == (1,)
    assert notified(listener) == [1, 2]
    granted: list[Any] = [session.do(ASK_PERMIT, 3, attempt(number), HERE)[2] for number in (1, 2, 3)]
    assert granted == [1, 2, None]


def test_only_a_semaphore_has_permits(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do(READ, attempt(1), HERE)[0]
    assert session.do(ASK_PERMIT, 2, attempt(2), HERE)[0]
    state = "SELECT kind, permits, available FROM shared_state(%s)"
    assert session.do(state, "a") == ("read-write", None, None)
    assert session.do(state, "s") == ("semaphore", 2, 1)


def test_retry_says_whether_its_ticket_is_new(owner: psycopg.Connection) -> None:
    """The client checks the queue of a new ticket early, also if the first reply was lost."""
    again = Statements("dblock").acquire_shared_again.decode()
    arguments = ["a", "read-write", "write", None, "10 s", "me", None]
    owner.execute(TRY_READ)

    def ask() -> Any:
        row = psycopg.RawCursor(owner).execute(again, [*arguments, attempt(1), HERE, None, "f", "t"]).fetchone()
        assert row is not None
        return row[7]

    assert [ask(), ask()] == ["t", "f"]
