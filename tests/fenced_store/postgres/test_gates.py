"""What a fence may stop: neither a role without privileges, nor a protection, nor a waiting claim stalls other work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo

import fenced_store
from dblock._runtime import target
from dblock.admin import schema
from tests.support.machine import soon
from tests.support.sessions import Session, Sessions

KEYS = (
    "SELECT pg_advisory_lock(hashtext(r), n) FROM unnest(ARRAY['public.orders', 'public.plain']) AS r,"
    " generate_series(0, 64) AS n",
    "SELECT pg_advisory_lock(hashtextextended(k, 0)) FROM unnest(ARRAY['fenced_store fenced_store',"
    " 'dblock schema dblock']) AS k",
)
"""The keys of all advisory locks that can be derived from names."""


@pytest.fixture
def orders(owner: psycopg.Connection, dsn: str) -> fenced_store.Protection:
    owner.execute("CREATE TABLE public.orders (id int PRIMARY KEY, v text)")
    owner.execute("INSERT INTO public.orders SELECT n, 'old' FROM generate_series(1, 1000) AS n")
    owner.execute("CREATE TABLE public.plain (id int PRIMARY KEY, v text)")
    return fenced_store.protect(dsn, "orders")


@pytest.fixture
def outsider(dsn: str, role: str) -> Iterator[psycopg.Connection]:
    """A session of a role that may connect and nothing else."""
    where = conninfo.make_conninfo(dsn, user=role, password="app")
    with psycopg.connect(where, autocommit=True) as session:
        yield session


def take_every_key(outsider: psycopg.Connection) -> None:
    """Lock every key that can be guessed, and every key that pg_locks shows."""
    for statement in KEYS:
        outsider.execute(statement.encode())
    outsider.execute("SET lock_timeout = '10 ms'")
    shown = outsider.execute(
        "SELECT DISTINCT classid, objid, objsubid FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
    ).fetchall()
    for high, low, kind in shown:
        with contextlib.suppress(psycopg.errors.LockNotAvailable):
            if kind == 1:
                outsider.execute("SELECT pg_advisory_lock((%s::bigint << 32) | %s::bigint)", [high, low])
            else:
                outsider.execute("SELECT pg_advisory_lock(%s::bit(32)::int, %s::bit(32)::int)", [high, low])


def begin(session: Session, token: int, isolation: str = "READ COMMITTED") -> None:
    session.do(f"BEGIN ISOLATION LEVEL {isolation}")
    session.do("SELECT set_config('fenced_store.token', %s, true)", str(token))


def test_role_without_privileges_stalls_no_fence(
    orders: fenced_store.Protection, sessions: Sessions, dsn: str, outsider: psycopg.Connection
) -> None:
    """It takes every advisory lock it can, in the middle of a transaction that has passed the fence."""
    writer, claimer = sessions.open(), sessions.open()
    for one in (writer, claimer):
        one.do("SET statement_timeout = '60 s'")
    begin(writer, 7)
    writer.do("UPDATE public.orders SET v = 'x' WHERE id = 1")
    take_every_key(outsider)
    writer.do("UPDATE public.orders SET v = 'x' WHERE id IN (1, 2, 3)")
    writer.do("COMMIT")
    begin(writer, 7)
    writer.do("UPDATE public.orders SET v = 'y'")
    writer.do("COMMIT")
    claimer.do("SELECT fenced_store.claim(ARRAY['public.orders', 'public.orders:1'], 8)")
    claimer.do("SELECT fenced_store.raise_fence('public.orders', 8)")
    claimer.do("SELECT fenced_store.protect_table('public.plain')")
    begin(writer, 9)
    writer.do("TRUNCATE public.orders")
    writer.do("COMMIT")
    hurried = conninfo.make_conninfo(dsn, options="-c statement_timeout=60s")
    assert len(fenced_store.protected(hurried)) == 2
    fenced_store.unprotect(hurried, "plain")
    assert fenced_store.install(hurried) is False
    schema.install(target.resolve(hurried), repair=True)


def test_role_without_privileges_stalls_no_first_install(bare_dsn: str, role: str) -> None:
    where = conninfo.make_conninfo(bare_dsn, user=role, password="app")
    hurried = conninfo.make_conninfo(bare_dsn, options="-c statement_timeout=60s")
    with psycopg.connect(where, autocommit=True) as outsider:
        outsider.execute(KEYS[1].encode())
        assert fenced_store.install(hurried) is True
        assert schema.install(target.resolve(hurried)) is None
        fenced_store.uninstall(hurried)
        schema.uninstall(target.resolve(hurried))


def test_protecting_a_table_stops_no_other_claim(orders: fenced_store.Protection, sessions: Sessions) -> None:
    """A migration protects one table and continues for an hour."""
    migration, other = sessions.open(), sessions.open()
    migration.do("BEGIN")
    migration.do("SELECT fenced_store.protect_table('public.plain')")
    for one in ("ledger", "public.orders", "public.orders:1", "public.unknown:1", "example.com"):
        other.do("SELECT fenced_store.claim(ARRAY[%s], 8, patience => 1)", one)
    other.do("SELECT fenced_store.raise_fence('public.orders:2', 8)")
    begin(other, 9)
    other.do("UPDATE public.orders SET v = 'x' WHERE id = 1")
    other.do("COMMIT")
    for one in ("public.plain", "public.plain:1"):
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.do("SELECT fenced_store.claim(ARRAY[%s], 8, patience => 0.1)", one)
    migration.do("COMMIT")
    other.do("SELECT fenced_store.claim(ARRAY['public.plain:1'], 8, patience => 1)")


KNOWN = pytest.mark.parametrize("known", [False, True], ids=["first fence", "fenced before"])


@KNOWN
@pytest.mark.parametrize("call", ["claim(ARRAY['public.plain:1'], 8)", "raise_fence('public.plain:1', 8)"])
def test_protect_waits_for_a_fence_of_the_table_in_progress(
    orders: fenced_store.Protection, sessions: Sessions, call: str, known: bool
) -> None:
    """The fence was taken without a gate, so the table must not be protected before that transaction ends."""
    newer, protecting, older = sessions.open(), sessions.open(), sessions.open()
    if known:
        newer.do("SELECT fenced_store.raise_fence('public.plain', 5)")
    newer.do("BEGIN")
    newer.do(f"SELECT fenced_store.{call}")
    waiting = protecting.start("SELECT fenced_store.protect_table('public.plain')")
    protecting.wait_until_blocked()
    begin(older, 7)
    # No transaction with an older token gets between the two.
    older.do("INSERT INTO public.plain VALUES (1, 'before the fence')")
    older.do("COMMIT")
    newer.do("COMMIT")
    waiting.result(60)
    begin(older, 7)
    with pytest.raises(psycopg.Error) as caught:
        older.do("UPDATE public.plain SET v = 'stale'")
    assert caught.value.sqlstate == "FEN01"


@KNOWN
def test_fence_that_waited_for_protect_passes_its_gates(
    orders: fenced_store.Protection, sessions: Sessions, known: bool
) -> None:
    """A fence is taken while the table is being protected: it must exclude the writers that the new fence lets in."""
    protecting, newer, older = sessions.open(), sessions.open(), sessions.open()
    if known:
        newer.do("SELECT fenced_store.raise_fence('public.plain', 5)")
    protecting.do("BEGIN")
    protecting.do("SELECT fenced_store.protect_table('public.plain')")
    newer.do("BEGIN")
    waiting = newer.start("SELECT fenced_store.raise_fence('public.plain:1', 8)")
    newer.wait_until_blocked()
    protecting.do("COMMIT")
    waiting.result(60)
    begin(older, 7)
    writing = older.start("INSERT INTO public.plain VALUES (1, 'stale')")
    older.wait_until_blocked()
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        writing.result(60)
    assert caught.value.sqlstate == "FEN01"


@pytest.mark.parametrize("call", ["claim(ARRAY['public.plain:1'], 8)", "raise_fence('public.plain:1', 8)"])
@KNOWN
def test_fence_with_a_snapshot_from_before_protect_conflicts(
    orders: fenced_store.Protection, sessions: Sessions, known: bool, call: str
) -> None:
    """It does not see that the table is protected, so it would not wait for a writer that has passed the new fence."""
    newer, protecting, older = sessions.open(), sessions.open(), sessions.open()
    if known:
        newer.do("SELECT fenced_store.raise_fence('public.plain', 5)")
    newer.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    newer.do("SELECT count(*) FROM public.orders")  # the snapshot is taken here
    protecting.do("SELECT fenced_store.protect_table('public.plain')")
    begin(older, 7)
    older.do("INSERT INTO public.plain VALUES (1, 'stale')")
    with pytest.raises(psycopg.errors.SerializationFailure):
        newer.do(f"SELECT fenced_store.{call}")


@pytest.mark.parametrize("settings", [[], ["SET fenced_store.token = ''"]], ids=["never set", "empty"])
@pytest.mark.parametrize("write", ["INSERT INTO {} VALUES (0)", "UPDATE {} SET id = 0 WHERE id = 1", "DELETE FROM {}"])
def test_write_without_a_token_passes_no_gate(
    orders: fenced_store.Protection, sessions: Sessions, write: str, settings: list[str]
) -> None:
    newer, writer, claimer = sessions.open(), sessions.open(), sessions.open()
    newer.do("BEGIN")
    newer.do("SELECT fenced_store.raise_fence('public.orders', 8)")
    for setting in ["SET lock_timeout = '1 s'", *settings, "BEGIN"]:
        writer.do(setting)
    writer.do(write.format("public.orders"))  # does not wait for the fence
    newer.do("COMMIT")
    claimer.do("SELECT fenced_store.claim(ARRAY['public.orders:77'], 9, patience => 1)")  # nor does a claim wait for it


@pytest.mark.second_stage
def test_claim_that_waited_at_a_gate_has_only_the_rest_of_its_patience(
    orders: fenced_store.Protection, sessions: Sessions, owner: psycopg.Connection
) -> None:
    """The first wait is for a writer of another row at the same gate, the second for the row's own fence."""
    writer, deleter, claimer = sessions.open(), sessions.open(), sessions.open()
    neighbour = owner.execute(
        "SELECT id FROM public.orders"
        " WHERE id > 1 AND hashtext('public.orders:' || id) & 31 = hashtext('public.orders:1') & 31 LIMIT 1"
    ).fetchone()
    assert neighbour is not None
    begin(deleter, 7)
    deleter.do("UPDATE public.orders SET v = 'x' WHERE id = 1")
    deleter.do("COMMIT")
    deleter.do("BEGIN")
    deleter.do("DELETE FROM public.orders WHERE id = 1")  # has the row's fence, and passes no gate
    begin(writer, 7)
    writer.do(f"UPDATE public.orders SET v = 'x' WHERE id = {neighbour[0]}")
    with soon(1.3):
        waiting = claimer.start("SELECT fenced_store.claim(ARRAY['public.orders:1'], 8, patience => 1)")
        claimer.wait_until_blocked()
        time.sleep(0.7)
        writer.do("COMMIT")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            waiting.result(60)


@pytest.mark.second_stage
@pytest.mark.parametrize("resource", ["public.orders", "public.orders:1"])
def test_holder_that_locks_its_rows_after_the_fence_meets_no_deadlock(
    orders: fenced_store.Protection, sessions: Sessions, resource: str
) -> None:
    older, newer = sessions.open(), sessions.open()
    begin(newer, 8)
    newer.do("SELECT fenced_store.raise_fence(%s, 8)", resource)
    newer.do("SELECT FROM public.orders WHERE id = 1 FOR UPDATE")
    begin(older, 7)
    waiting = older.start("UPDATE public.orders SET v = 'stale' WHERE id = 1")
    older.wait_until_blocked()
    time.sleep(1.2)  # longer than deadlock_timeout
    newer.do("UPDATE public.orders SET v = 'new' WHERE id = 1")
    newer.do("COMMIT")
    with pytest.raises(psycopg.Error) as caught:
        waiting.result(60)
    assert caught.value.sqlstate == "FEN01"


@pytest.mark.second_stage
@pytest.mark.parametrize("resource", [pytest.param("public.orders", marks=pytest.mark.nightly), "public.orders:1"])
def test_waiting_claim_does_not_stall_writers(
    orders: fenced_store.Protection, owner: psycopg.Connection, sessions: Sessions, dsn: str, resource: str
) -> None:
    """One writer stays in its transaction. A claim waits for it, again and again, while others write other rows.

    Every write has a twin in a table without a claim, a moment later, so that both meet the same machine.
    """
    owner.execute("CREATE TABLE public.twin (id int PRIMARY KEY, v text)")
    owner.execute("INSERT INTO public.twin SELECT n, 'old' FROM generate_series(1, 1000) AS n")
    fenced_store.protect(dsn, "twin")
    writer, idle, claimer = sessions.open(), sessions.open(), sessions.open()

    def seconds_of_a_write(table: str, row: int) -> float:
        began = time.monotonic()
        begin(writer, 7)
        writer.do(f"UPDATE public.{table} SET v = 'x' WHERE id = {row}")
        writer.do("COMMIT")
        return time.monotonic() - began

    begin(idle, 7)
    idle.do("UPDATE public.orders SET v = 'x' WHERE id = 1")
    took = {"orders": 0.0, "twin": 0.0}
    for _ in range(12):
        claiming = claimer.start("SELECT fenced_store.claim(ARRAY[%s], 8, patience => 1)", resource)
        row, began = 50, time.monotonic()
        while time.monotonic() < began + 1:
            row = row % 900 + 51
            for table in took:
                took[table] += seconds_of_a_write(table, row)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            claiming.result(60)
    stalled = (took["orders"] - took["twin"]) / (took["orders"] + took["twin"])
    assert 1 - stalled > 0.8, f"seconds of the writes: {took}"


@pytest.mark.second_stage
def test_claim_gets_through_a_crowd_of_writers(
    orders: fenced_store.Protection, sessions: Sessions, owner: psycopg.Connection
) -> None:
    """There is no moment without a writer, yet the claim of the table is granted within its patience."""
    owner.execute(
        """
        CREATE PROCEDURE public.write_for_a_while(number int) LANGUAGE plpgsql AS $$
        BEGIN
            FOR i IN 1..1000 LOOP
                PERFORM set_config('fenced_store.token', '7', true);
                UPDATE public.orders SET v = 'x' WHERE id = number;
                PERFORM pg_sleep(0.004);
                COMMIT;
            END LOOP;
        END $$
        """
    )
    crowd = [sessions.open() for _ in range(4)]
    running = [one.start("CALL public.write_for_a_while(%s)", number) for number, one in enumerate(crowd, 1)]
    sessions.open().do("SELECT fenced_store.claim(ARRAY['public.orders'], 8, patience => 2)")
    for one in running:
        with pytest.raises(psycopg.Error) as caught:
            one.result(60)
        assert caught.value.sqlstate == "FEN01"
