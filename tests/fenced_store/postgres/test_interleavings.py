"""Two sessions, one stopped at the critical step: a fence, claim or write of a newer holder meets that of an older."""

from __future__ import annotations

import psycopg
import pytest

import fenced_store
from tests.support.sessions import Session, Sessions
from tests.support.stages import first


@pytest.fixture
def pair(sessions: Sessions, owner: psycopg.Connection) -> tuple[Session, Session]:
    """Two sessions and a table: the first session is the older holder's, the second the newer holder's."""
    owner.execute("CREATE TABLE public.orders (id int PRIMARY KEY, v text)")
    owner.execute("INSERT INTO public.orders VALUES (1, 'old')")
    return sessions.open("older"), sessions.open("newer")


def begin(session: Session, token: int, isolation: str = "READ COMMITTED") -> None:
    session.do(f"BEGIN ISOLATION LEVEL {isolation}")
    session.do("SELECT set_config('fenced_store.token', %s, true)", str(token))


def take(token: int) -> str:
    return f"SELECT fenced_store.raise_fence('ledger', {token})"


CLAIM = "SELECT fenced_store.claim(ARRAY[%s], 8)"
ISOLATIONS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


def test_two_holders_run_one_after_the_other(pair: tuple[Session, Session]) -> None:
    older, newer = pair
    older.do("BEGIN")
    older.do(take(7))
    newer.do("BEGIN")
    waiting = newer.start(take(8))
    newer.wait_until_blocked()
    older.do("UPDATE public.orders SET v = 'by the older'")
    older.do("COMMIT")
    waiting.result(60)
    assert newer.do("SELECT v FROM public.orders") == ("by the older",)
    newer.do("COMMIT")


def test_older_holder_that_comes_second_waits_and_is_refused(pair: tuple[Session, Session]) -> None:
    older, newer = pair
    newer.do("BEGIN")
    newer.do(take(8))
    waiting = older.start(take(7))
    older.wait_until_blocked()
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


def test_older_holder_continues_if_the_newer_rolls_back(pair: tuple[Session, Session]) -> None:
    older, newer = pair
    newer.do("BEGIN")
    newer.do(take(8))
    waiting = older.start(take(7))
    older.wait_until_blocked()
    newer.do("ROLLBACK")
    waiting.result(60)


@pytest.mark.parametrize("isolation", ISOLATIONS[1:])
@pytest.mark.parametrize("first", [7, 8], ids=["another holder", "the same holder"])
def test_holder_with_an_old_snapshot_is_refused(pair: tuple[Session, Session], isolation: str, first: int) -> None:
    """A transaction with an old snapshot must not get the fence after another holder has had it."""
    one, other = pair
    one.do(take(first))
    one.do("BEGIN")
    one.do(take(first))
    other.do(f"BEGIN ISOLATION LEVEL {isolation}")
    waiting = other.start(take(8))  # the snapshot is taken here
    other.wait_until_blocked()
    one.do("UPDATE public.orders SET v = 'unseen'")
    one.do("COMMIT")
    with pytest.raises(psycopg.errors.SerializationFailure):
        waiting.result(60)


@pytest.mark.parametrize("resource", ["public.orders:1", "public.orders"])
def test_claim_waits_for_a_writer_that_is_past_the_fence(
    pair: tuple[Session, Session], dsn: str, resource: str
) -> None:
    """A write of the older holder that is in progress during the claim is stored before the claim, or never."""
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    begin(older, 7)
    older.do("UPDATE public.orders SET v = 'by the older' WHERE id = 1")
    waiting = newer.start(CLAIM, resource)
    newer.wait_until_blocked()
    older.do("COMMIT")
    waiting.result(60)
    assert newer.do("SELECT v FROM public.orders") == ("by the older",)
    begin(older, 7)
    with pytest.raises(psycopg.Error) as caught:
        older.do("UPDATE public.orders SET v = 'stale' WHERE id = 1")
    assert caught.value.sqlstate == "FEN01"


@pytest.mark.parametrize("resource", ["public.orders:2", "public.orders"])
def test_claim_waits_for_a_row_that_is_being_inserted(pair: tuple[Session, Session], dsn: str, resource: str) -> None:
    """There is no row yet whose lock the claim could wait for."""
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    begin(older, 7)
    older.do("INSERT INTO public.orders VALUES (2, 'by the older')")
    waiting = newer.start(CLAIM, resource)
    newer.wait_until_blocked()
    older.do("COMMIT")
    waiting.result(60)


def test_writer_waits_for_an_uncommitted_claim(pair: tuple[Session, Session], dsn: str) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    newer.do("BEGIN")
    newer.do(CLAIM, "public.orders:1")
    begin(older, 7)
    waiting = older.start("UPDATE public.orders SET v = 'stale' WHERE id = 1")
    older.wait_until_blocked()
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


@pytest.mark.parametrize("per", ["row", "table", "row, all of them"])
@pytest.mark.parametrize("isolation", first(1, ISOLATIONS))
@pytest.mark.parametrize("known", [False, True], ids=["first claim", "claimed before"])
def test_claim_binds_transactions_that_began_before_it(
    pair: tuple[Session, Session], dsn: str, per: str, isolation: str, known: bool
) -> None:
    """The older holder is stopped with an open transaction and a snapshot, and continues after the claim."""
    older, newer = pair
    fenced_store.protect(dsn, "orders", per="table" if per == "table" else "row")
    resource = "public.orders:1" if per == "row" else "public.orders"
    if known:
        newer.do("SELECT fenced_store.claim(ARRAY[%s], 5)", resource)
    begin(older, 7, isolation)
    older.do("SELECT v FROM public.orders")
    newer.do(CLAIM, resource)
    with pytest.raises(psycopg.Error) as caught:
        older.do("UPDATE public.orders SET v = 'stale' WHERE id = 1")
    assert caught.value.sqlstate in (("FEN01",) if isolation == "READ COMMITTED" else ("FEN01", "40001"))
    older.do("ROLLBACK")
    assert newer.do("SELECT v FROM public.orders") == ("old",)


def test_writer_that_waited_for_a_row_reads_its_new_fence(pair: tuple[Session, Session], dsn: str) -> None:
    """The older holder passes the first check of the row's fence, waits for the row, and must be checked again."""
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    begin(newer, 8)
    newer.do("UPDATE public.orders SET v = 'by the newer' WHERE id = 1")
    begin(older, 7)
    waiting = older.start("UPDATE public.orders SET v = 'stale' WHERE id = 1")
    older.wait_until_blocked()
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO public.orders VALUES (1, 'stale')",
        "INSERT INTO public.orders VALUES (1, 'stale') ON CONFLICT (id) DO UPDATE SET v = excluded.v",
        "UPDATE public.orders SET id = 1 WHERE id = 2",
    ],
)
def test_stale_insert_after_a_concurrent_delete_is_refused(
    pair: tuple[Session, Session], dsn: str, statement: str
) -> None:
    """The older holder passes the fence and then waits for the deletion of a row with the same key."""
    older, newer = pair
    older.do("INSERT INTO public.orders VALUES (2, 'another')")
    fenced_store.protect(dsn, "orders")
    begin(newer, 8)
    newer.do("DELETE FROM public.orders WHERE id = 1")
    begin(older, 7)
    waiting = older.start(statement)
    older.wait_until_blocked()
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


def test_table_fence_blocks_other_writers_until_the_end(pair: tuple[Session, Session], dsn: str) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "orders", per="table")
    begin(newer, 8)
    newer.do("UPDATE public.orders SET v = 'by the newer'")
    begin(older, 7)
    waiting = older.start("INSERT INTO public.orders VALUES (2, 'stale')")
    older.wait_until_blocked()
    newer.do("UPDATE public.orders SET v = 'by the newer again'")
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


def test_put_that_waited_for_a_newer_put_is_refused(pair: tuple[Session, Session]) -> None:
    older, newer = pair
    newer.do("BEGIN")
    assert newer.do("SELECT outcome FROM fenced_store.write('k', 8, 1, '1', NULL)") == ("stored",)
    waiting = older.start("SELECT outcome, stored_token FROM fenced_store.write('k', 7, 2, '2', NULL)")
    older.wait_until_blocked()
    newer.do("COMMIT")
    assert waiting.result(60) == ("stale", 8)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("public.orders:1", "public.orders:2")])
def test_claims_of_the_same_resources_in_any_order_do_not_deadlock(
    pair: tuple[Session, Session], sessions: Sessions, owner: psycopg.Connection, dsn: str, first: str, second: str
) -> None:
    """One claim is stopped between its two resources. The other, given them in reverse, must lock in the same order."""
    fenced_store.protect(dsn, "orders")
    # A claim locks its resources in the order of their gates.
    slots = "SELECT r FROM unnest(ARRAY[%s, %s]) AS r ORDER BY hashtext(r) & 31"
    (first,), (second,) = owner.execute(slots, [first, second]).fetchall()
    _, other = pair
    owner.execute("SELECT pg_advisory_lock(4711)")
    owner.execute(
        f"""
        CREATE FUNCTION public.stop() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF current_setting('application_name') = 'held' AND NEW.resource = '{second}' THEN
                PERFORM pg_advisory_xact_lock_shared(4711);
            END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER stop BEFORE INSERT ON fenced_store.fences FOR EACH ROW EXECUTE FUNCTION public.stop();
        """.encode()
    )
    held = sessions.open("held")
    claiming = held.start("SELECT fenced_store.claim(%s, 8)", [first, second])
    held.wait_until_blocked()
    waiting = other.start("SELECT fenced_store.claim(%s, 9)", [second, first])
    other.wait_until_blocked()
    owner.execute("SELECT pg_advisory_unlock(4711)")
    claiming.result(60)
    waiting.result(60)


def test_protect_waits_for_a_claim_in_progress(pair: tuple[Session, Session]) -> None:
    """The claim does not know of a fence that does not exist yet, so the fence must come after it."""
    newer, protecting = pair
    newer.do("BEGIN")
    newer.do(CLAIM, "public.orders:1")
    waiting = protecting.start("SELECT fenced_store.protect_table('public.orders')")
    protecting.wait_until_blocked()
    newer.do("COMMIT")
    waiting.result(60)
    begin(newer, 7)
    with pytest.raises(psycopg.Error) as caught:
        newer.do("UPDATE public.orders SET v = 'stale'")
    assert caught.value.sqlstate == "FEN01"


def test_claim_keeps_the_callers_lock_timeout(pair: tuple[Session, Session]) -> None:
    session, _ = pair
    session.do("BEGIN")
    session.do("SET LOCAL lock_timeout = '7 s'")
    session.do("SELECT fenced_store.claim('{a}', 8, patience => 0.5)")
    assert session.do("SHOW lock_timeout") == ("7s",)


@pytest.mark.parametrize("isolation", ISOLATIONS[1:])
def test_writers_of_different_rows_do_not_wait_for_each_other(
    pair: tuple[Session, Session], dsn: str, isolation: str
) -> None:
    one, other = pair
    one.do("INSERT INTO public.orders VALUES (2, 'two')")
    fenced_store.protect(dsn, "orders")
    begin(one, 7, isolation)
    begin(other, 8, isolation)
    one.do("UPDATE public.orders SET v = 'x' WHERE id = 1")
    other.do("SET LOCAL lock_timeout = '1 s'")
    other.do("UPDATE public.orders SET v = 'y' WHERE id = 2")
    one.do("COMMIT")
    other.do("COMMIT")


@pytest.mark.second_stage
def test_statement_that_writes_many_rows_holds_few_locks(pair: tuple[Session, Session], dsn: str) -> None:
    """The shared lock table is small; a statement on a million rows must not fill it."""
    session, _ = pair
    fenced_store.protect(dsn, "orders")
    begin(session, 7)
    session.do("INSERT INTO public.orders SELECT n, '' FROM generate_series(2, 20000) AS n")
    (held,) = session.do("SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()")
    assert 33 <= held <= 50
    session.do("COMMIT")


def test_claim_waits_for_a_truncate(pair: tuple[Session, Session], dsn: str) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    begin(older, 7)
    older.do("TRUNCATE public.orders")
    waiting = newer.start(CLAIM, "public.orders:1")
    newer.wait_until_blocked()
    older.do("COMMIT")
    waiting.result(60)


def test_claim_of_another_resource_does_not_wait(pair: tuple[Session, Session], dsn: str) -> None:
    """Not even for a writer of every row of a table."""
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    begin(older, 7)
    older.do("INSERT INTO public.orders SELECT n, '' FROM generate_series(2, 1000) AS n")
    newer.do("SET lock_timeout = '1 s'")
    for name in ("ledger", "public.orders2:1", "public.order", "orders:1"):
        newer.do(CLAIM, name)
    older.do("ROLLBACK")


def test_writer_inside_a_fence_and_a_claim_of_both_do_not_deadlock(
    pair: tuple[Session, Session], dsn: str, owner: psycopg.Connection
) -> None:
    """The grant of a lock claims the resources in the order in which its holders lock them: fence, then row."""
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    begin(older, 7)
    older.do(take(7))
    waiting = newer.start("SELECT fenced_store.claim(ARRAY['public.orders:1', 'ledger'], 8)")
    newer.wait_until_blocked()
    older.do("UPDATE public.orders SET v = 'by the older' WHERE id = 1")
    older.do("COMMIT")
    waiting.result(60)
    assert owner.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone() == (0,)


def test_claim_waits_only_for_its_patience(pair: tuple[Session, Session]) -> None:
    older, newer = pair
    older.do("BEGIN")
    older.do(take(7))
    with pytest.raises(psycopg.errors.LockNotAvailable):
        newer.do("SELECT fenced_store.claim(ARRAY['before', 'ledger'], 8, patience => 0.1)")
    older.do("COMMIT")
    assert newer.do("SELECT count(*) FROM fenced_store.fences WHERE resource = 'before'") == (0,)


def test_recording_a_rejection_never_waits(pair: tuple[Session, Session], owner: psycopg.Connection) -> None:
    """However many rejections there are, and even while another session deletes the oldest."""
    older, newer = pair
    for key in "kl":
        owner.execute("SELECT fenced_store.write(%s, 9, 1, '1', NULL)", [key])
    owner.execute("SELECT fenced_store.write('k', 8, 1, '1', NULL)")
    owner.execute("ALTER TABLE fenced_store.rejections ALTER COLUMN id RESTART WITH 20000")
    older.do("BEGIN")
    older.do("SELECT fenced_store.write('k', 7, 1, '1', NULL)")
    newer.do("SET lock_timeout = '1 s'")
    assert newer.do("SELECT outcome FROM fenced_store.write('l', 6, 1, '1', NULL)") == ("stale",)
    older.do("COMMIT")


def test_warning_found_after_waiting_is_recorded(pair: tuple[Session, Session], dsn: str) -> None:
    older, newer = pair
    fenced_store.protect(dsn, "orders", per="table", warn_only=True)
    begin(newer, 8)
    newer.do("UPDATE public.orders SET v = 'by the newer'")
    begin(older, 7)
    waiting = older.start("UPDATE public.orders SET v = 'stale'")
    older.wait_until_blocked()
    newer.do("COMMIT")
    waiting.result(60)
    older.do("COMMIT")
    assert [(one.offered, one.stored, one.refused) for one in fenced_store.rejections(dsn)] == [(7, 8, False)]


def test_reply_is_durable_whatever_the_default(pair: tuple[Session, Session]) -> None:
    session, _ = pair
    for call in ("write('k', 7, 1, '1', NULL)", "claim('{k}', 8)"):
        session.do("BEGIN")
        session.do("SET LOCAL synchronous_commit = off")
        session.do(f"SELECT fenced_store.{call}")
        assert session.do("SHOW synchronous_commit") == ("on",)
        session.do("COMMIT")


def test_fence_taken_between_two_writes_disturbs_neither(pair: tuple[Session, Session]) -> None:
    """Both writes are under one token: the fence keeps the highest write number."""
    session, _ = pair
    session.do("SELECT fenced_store.write('k', 7, 5, '1', NULL)")
    session.do("SELECT fenced_store.raise_fence('k', 7, 3)")
    assert session.do("SELECT outcome FROM fenced_store.write('k', 7, 4, '2', NULL)") == ("stale",)
    assert session.do("SELECT outcome FROM fenced_store.write('k', 7, 6, '2', NULL)") == ("stored",)


def test_fence_of_a_row_blocks_writers_of_that_row(pair: tuple[Session, Session], dsn: str) -> None:
    """A row's fence, taken by name in a transaction, is the fence that the table's trigger checks."""
    older, newer = pair
    fenced_store.protect(dsn, "orders")
    newer.do("BEGIN")
    newer.do("SELECT fenced_store.raise_fence('public.orders:1', 8)")
    begin(older, 7)
    waiting = older.start("UPDATE public.orders SET v = 'stale' WHERE id = 1")
    older.wait_until_blocked()
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


def test_patience_covers_every_wait_of_a_claim(pair: tuple[Session, Session], dsn: str) -> None:
    protecting, newer = pair
    protecting.do("BEGIN")
    protecting.do("SELECT fenced_store.protect_table('public.orders')")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        newer.do("SELECT fenced_store.claim(ARRAY['public.orders:1'], 8, patience => 0.1)")
    protecting.do("ROLLBACK")
