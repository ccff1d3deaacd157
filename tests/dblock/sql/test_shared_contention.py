"""Shared locks in SQL under contention: many sessions try and wait at once, many readers wait behind one writer."""

from __future__ import annotations

import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.support.sessions import Sessions

READERS = 1_000


class Watch:
    """Notes who is inside, and fails as soon as too many are."""

    def __init__(self, permits: int | None) -> None:
        self._permits = permits
        self._lock = threading.Lock()
        self._inside: list[str] = []
        self._highest = 0
        self._seen: dict[str, int] = {}
        self.grants = 0

    def enter(self, share: str, token: int) -> None:
        with self._lock:
            assert share not in self._inside, f"{share} was granted twice"
            self._inside.append(share)
            self.grants += 1
            if self._permits is not None:
                assert len(self._inside) <= self._permits
            elif share.endswith("#writer"):
                assert self._inside == [share], "a writer is alone"
                assert token > self._highest, "every share that was held before has a lower token"
            else:
                assert not any(one.endswith("#writer") for one in self._inside)
            assert token > self._seen.get(share, 0), "the tokens of a share are in the order of its grants"
            self._seen[share] = token
            self._highest = max(self._highest, token)

    def leave(self, share: str) -> None:
        with self._lock:
            self._inside.remove(share)


def work(dsn: str, kind: str, seed: int, watch: Watch, until: float) -> None:
    """Try or wait for the lock again and again, hold it for a moment, and release it."""
    chance, client = random.Random(seed), uuid.uuid4()
    with psycopg.connect(dsn, autocommit=True) as connection:
        while time.monotonic() < until:
            mode = chance.choice(["read", "read", "write"]) if kind == "read-write" else None
            waits, attempt, had_ticket = chance.random() < 0.7, uuid.uuid4(), False
            while True:
                row = connection.execute(
                    "SELECT granted, share, token, ticket FROM dblock.acquire_shared('a', %s, %s, %s, attempt => %s,"
                    " client => %s, had_ticket => %s)",
                    [kind, mode, 3 if mode is None else None, attempt, client if waits else None, had_ticket],
                ).fetchone()
                assert row is not None
                granted, share, token, ticket = row
                had_ticket = ticket is not None
                if granted or not waits:
                    break
                time.sleep(chance.uniform(0.001, 0.01))
            if granted:
                watch.enter(share, token)
                time.sleep(chance.uniform(0, 0.003))
                watch.leave(share)
                done = connection.execute("SELECT dblock.release(%s, %s, false)", [share, token]).fetchone()
                assert done == (True,)


@pytest.mark.second_stage
@pytest.mark.parametrize(("kind", "permits"), [("semaphore", 3), ("read-write", None)])
def test_shares_exclude_each_other_with_tries_and_waits_mixed(dsn: str, kind: str, permits: int | None) -> None:
    watch, until = Watch(permits), time.monotonic() + 3
    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(work, dsn, kind, seed, watch, until) for seed in range(6)]:
            done.result()
    assert watch.grants > 20


@pytest.mark.second_stage
def test_writers_never_enter_between_a_writer_and_its_downgrade(dsn: str) -> None:
    """Two sessions write and downgrade, as fast as they can. No token lies between those of a downgrade."""
    entered: list[tuple[int, int]] = []
    until = time.monotonic() + 3

    def write_and_downgrade() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            call = connection.execute
            while time.monotonic() < until:
                row = call("SELECT token FROM dblock.acquire_shared('a', 'read-write', 'write')").fetchone()
                if row is None or row[0] is None:
                    continue
                reader = None
                while reader is None or reader[1] is None:
                    reader = call("SELECT token, granted, share FROM dblock.downgrade('a', %s)", [row[0]]).fetchone()
                assert reader[1], "the writer holds the lock until it is downgraded"
                entered.append((row[0], reader[0]))
                call("SELECT dblock.release(%s, %s, false)", [reader[2], reader[0]])

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(write_and_downgrade) for _ in range(3)]:
            done.result()
    tokens = [token for pair in sorted(entered) for token in pair]
    assert tokens == sorted(tokens)
    assert len(entered) > 20


def test_reader_looks_at_no_reader_that_waits(sessions: Sessions) -> None:
    """Joining, asking again and the heartbeat cost as much behind a thousand waiting readers as behind one."""
    session, client = sessions.open(), uuid.UUID(int=0xC1)
    session.do("INSERT INTO lock_clients VALUES (%s, 'infinity'), (%s, 'infinity')", client, uuid.UUID(int=0xC2))
    session.do("SELECT acquire_shared('a', 'read-write', 'write')")
    ask = (
        "SELECT granted, first FROM acquire_shared('a', 'read-write', 'read', attempt => %s, client => %s,"
        " had_ticket => %s)"
    )
    assert session.do(ask, uuid.UUID(int=1), client, False) == (False, True)
    session.do(
        "INSERT INTO lock_tickets (name, number, attempt, client, holder, since, mode)"
        " SELECT 'a', n, gen_random_uuid(), %s, 'other', now(), 'read' FROM generate_series(2, %s) AS n",
        uuid.UUID(int=0xC2), READERS,
    )  # fmt: skip
    session.do("UPDATE lock_queues SET last_ticket = %s", READERS)
    session.do("BEGIN")
    assert session.do(ask, uuid.UUID(int=2), client, False) == (False, True)
    assert session.do(ask, uuid.UUID(int=2), client, True) == (False, True)
    assert session.do("SELECT firsts FROM heartbeat(%s, '{a}')", client) == ([uuid.UUID(int=1)],)
    (read,) = session.do(
        "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'lock_tickets'"
    )
    assert read < 30
    session.do("ROLLBACK")
