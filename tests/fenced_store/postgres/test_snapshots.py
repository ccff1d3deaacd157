"""A statement that waited at a fence must not work on data from before the transaction that it waited for."""

from __future__ import annotations

import psycopg
import pytest

import fenced_store
from tests.support.sessions import Session, Sessions

DEPOSIT = "INSERT INTO public.ledger SELECT max(id) + 1, max(balance) + %s FROM public.ledger"


@pytest.fixture
def pair(sessions: Sessions, owner: psycopg.Connection) -> tuple[Session, Session]:
    """Two sessions and a table: the first session is the older holder's, the second the newer holder's."""
    owner.execute("CREATE TABLE public.ledger (id int PRIMARY KEY, balance int)")
    owner.execute("INSERT INTO public.ledger VALUES (1, 100)")
    return sessions.open("older"), sessions.open("newer")


def begin(session: Session, token: int) -> None:
    session.do("BEGIN ISOLATION LEVEL READ COMMITTED")
    session.do("SELECT set_config('fenced_store.token', %s, true)", str(token))


def balance(session: Session) -> int:
    return int(session.do("SELECT max(balance) FROM public.ledger")[0])


@pytest.mark.parametrize("known", [False, True], ids=["first write", "written before"])
@pytest.mark.parametrize("token", [7, 8], ids=["the same holder", "the next holder"])
def test_statement_that_waited_at_the_fence_of_a_table_is_not_lost(
    pair: tuple[Session, Session], dsn: str, known: bool, token: int
) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "ledger", per="table")
    if known:
        newer.do("SELECT fenced_store.raise_fence('public.ledger', 6)")
    begin(older, 7)
    older.do(DEPOSIT, 30)
    begin(newer, token)
    waiting = newer.start(DEPOSIT, 50)  # the snapshot is taken here
    newer.wait_until_blocked()
    older.do("COMMIT")
    with pytest.raises(psycopg.errors.SerializationFailure, match="Retry") as caught:
        waiting.result(60)
    assert "fenced_store.raise_fence" in str(caught.value.diag.message_hint)
    newer.do("ROLLBACK")
    begin(newer, token)
    newer.do(DEPOSIT, 50)
    newer.do("COMMIT")
    assert balance(newer) == 180


def test_statement_that_waited_for_a_rollback_continues(pair: tuple[Session, Session], dsn: str) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "ledger", per="table")
    begin(older, 7)
    older.do(DEPOSIT, 30)
    begin(newer, 8)
    waiting = newer.start(DEPOSIT, 50)
    newer.wait_until_blocked()
    older.do("ROLLBACK")
    waiting.result(60)
    newer.do("COMMIT")
    assert balance(newer) == 150


def test_fence_taken_first_in_a_statement_of_its_own_needs_no_retry(pair: tuple[Session, Session], dsn: str) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "ledger", per="table")
    begin(older, 7)
    older.do(DEPOSIT, 30)
    begin(newer, 8)
    waiting = newer.start("SELECT fenced_store.raise_fence('public.ledger', 8)")
    newer.wait_until_blocked()
    older.do("COMMIT")
    waiting.result(60)
    newer.do(DEPOSIT, 50)
    newer.do("COMMIT")
    assert balance(newer) == 180


@pytest.mark.parametrize("partitioned", [False, True])
def test_statements_of_one_transaction_do_not_conflict_with_each_other(
    sessions: Sessions, owner: psycopg.Connection, dsn: str, partitioned: bool
) -> None:
    """Not inside savepoints either, whose row versions belong to other transaction numbers."""
    kind = "PARTITION BY HASH (id)" if partitioned else ""
    owner.execute(f"CREATE TABLE public.ledger (id int PRIMARY KEY, balance int) {kind}".encode())
    if partitioned:
        for part in (0, 1):
            owner.execute(
                f"CREATE TABLE public.ledger_{part} PARTITION OF public.ledger"
                f" FOR VALUES WITH (MODULUS 2, REMAINDER {part})".encode()
            )
    owner.execute("INSERT INTO public.ledger VALUES (1, 100)")
    fenced_store.protect(dsn, "ledger", per="table")
    session = sessions.open()
    begin(session, 7)
    many = "INSERT INTO public.ledger SELECT {0} + n, {0} + n FROM generate_series(1, 3) AS n"
    session.do("SAVEPOINT a")
    session.do(many.format(1000))
    session.do("SAVEPOINT b")
    session.do(many.format(2000))
    session.do("RELEASE b")
    session.do(many.format(3000))
    session.do("ROLLBACK TO a")
    session.do(many.format(4000))
    session.do("RELEASE a")
    session.do("SELECT set_config('fenced_store.token', '8', true)")
    session.do(many.format(5000))
    session.do("SAVEPOINT c")
    session.do(many.format(6000))
    session.do("COMMIT")
    assert session.do("SELECT count(*), max(balance) FROM public.ledger") == (10, 6003)


def test_fence_that_only_warns_fails_no_statement(pair: tuple[Session, Session], dsn: str) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "ledger", per="table", warn_only=True)
    begin(older, 7)
    older.do(DEPOSIT, 30)
    begin(newer, 8)
    waiting = newer.start("INSERT INTO public.ledger VALUES (5, 0)")
    newer.wait_until_blocked()
    older.do("COMMIT")
    waiting.result(60)
    newer.do("COMMIT")


def test_truncate_that_waited_at_the_fence_continues(pair: tuple[Session, Session], dsn: str) -> None:
    """TRUNCATE reads no row, so no snapshot is too old for it."""
    older, newer = pair
    fenced_store.protect(dsn, "ledger", per="table")
    begin(older, 7)
    older.do("SELECT fenced_store.raise_fence('public.ledger', 7)")
    begin(newer, 8)
    waiting = newer.start("TRUNCATE public.ledger")
    newer.wait_until_blocked()
    older.do("COMMIT")
    waiting.result(60)
    newer.do("COMMIT")


def test_row_writer_that_waited_for_the_fence_of_its_table_is_not_lost(pair: tuple[Session, Session], dsn: str) -> None:
    """The older holder has taken the fence of all rows, in a transaction that also writes rows."""
    older, newer = pair
    fenced_store.protect(dsn, "ledger")
    begin(older, 7)
    older.do("SELECT fenced_store.raise_fence('public.ledger', 7)")
    older.do(DEPOSIT, 30)
    begin(newer, 8)
    waiting = newer.start("INSERT INTO public.ledger SELECT 9, max(balance) + 50 FROM public.ledger")
    newer.wait_until_blocked()
    older.do("COMMIT")
    with pytest.raises(psycopg.errors.SerializationFailure, match="Retry"):
        waiting.result(60)
    newer.do("ROLLBACK")
    begin(newer, 8)
    newer.do(DEPOSIT, 50)
    newer.do("COMMIT")
    assert balance(newer) == 180


def test_row_writer_that_waited_for_a_stale_fence_of_its_table_is_refused(
    pair: tuple[Session, Session], dsn: str
) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "ledger")
    newer.do("BEGIN")
    newer.do("SELECT fenced_store.raise_fence('public.ledger', 8)")
    begin(older, 7)
    waiting = older.start(DEPOSIT, 30)
    older.wait_until_blocked()
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


def test_holder_of_the_tables_fence_writes_rows_in_savepoints(pair: tuple[Session, Session], dsn: str) -> None:
    session, _ = pair
    fenced_store.protect(dsn, "ledger")
    begin(session, 7)
    session.do("SAVEPOINT a")
    session.do("SELECT fenced_store.raise_fence('public.ledger', 7)")
    session.do(DEPOSIT, 30)
    session.do("RELEASE a")
    session.do(DEPOSIT, 50)
    session.do(
        "WITH f AS (SELECT fenced_store.raise_fence('public.ledger', 7)) UPDATE public.ledger"
        " SET balance = balance + (SELECT count(*) FROM f)"
    )
    session.do("COMMIT")
    assert balance(session) == 181


def test_statement_in_a_savepoint_takes_the_fence_of_a_partitioned_table_once(
    sessions: Sessions, owner: psycopg.Connection, dsn: str
) -> None:
    """Its trigger fires for each row. Each version of the fence would make the next row slower."""
    owner.execute("CREATE TABLE public.parts (id int) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE public.part PARTITION OF public.parts FOR VALUES FROM (0) TO (1000)")
    fenced_store.protect(dsn, "parts", per="table")
    writer = sessions.open()
    begin(writer, 7)
    writer.do("SAVEPOINT a")
    for _ in range(2):
        writer.do("INSERT INTO public.parts SELECT generate_series(1, 50)")
    versions = writer.do(
        "SELECT pg_stat_get_xact_tuples_inserted(o) + pg_stat_get_xact_tuples_updated(o)"
        " FROM (SELECT 'fenced_store.fences'::regclass::oid) AS f (o)"
    )
    writer.do("COMMIT")
    assert versions[0] <= 2


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_row_written_under_a_stricter_isolation_leaves_no_fence(
    pair: tuple[Session, Session], dsn: str, isolation: str
) -> None:
    session, other = pair
    fenced_store.protect(dsn, "ledger")
    before = other.do("SELECT count(*) FROM fenced_store.fences")
    session.do(f"BEGIN ISOLATION LEVEL {isolation}")
    session.do("SELECT set_config('fenced_store.token', '7', true)")
    session.do("INSERT INTO public.ledger SELECT n, 0 FROM generate_series(2, 200) AS n")
    session.do("UPDATE public.ledger SET balance = 1")
    session.do("COMMIT")
    assert other.do("SELECT count(*) FROM fenced_store.fences") == before


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("act", ["SELECT 1", "SELECT fenced_store.claim('{public.ledger:1}', 8)"])
def test_stale_insert_with_an_old_snapshot_is_refused(
    pair: tuple[Session, Session], dsn: str, isolation: str, act: str
) -> None:
    """The fence of the row is newer than the snapshot, so only a conflict can reveal it."""
    older, newer = pair
    fenced_store.protect(dsn, "ledger")
    older.do(f"BEGIN ISOLATION LEVEL {isolation}")
    older.do("SELECT set_config('fenced_store.token', '7', true)")
    older.do("SELECT count(*) FROM public.ledger")
    begin(newer, 8)
    newer.do("DELETE FROM public.ledger WHERE id = 1")
    newer.do(act)
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        older.do("INSERT INTO public.ledger VALUES (1, 0)")
    assert caught.value.sqlstate in ("FEN01", "40001")
