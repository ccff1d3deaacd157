"""Mistakes of read-write locks."""

from __future__ import annotations

from typing import Any

import pytest

import dblock
from tests.dblock.client.test_shared_stress import test_no_writer_enters_while_another_one_downgrades
from tests.dblock.peer_bugs import FAILURES, PeerBug
from tests.dblock.sql.test_shared_locks import (
    READ,
    WRITE,
    test_reader_queues_behind_a_writer_that_came_before,
)
from tests.robustness.mutations import Edit
from tests.support.sessions import Sessions
from tests.support.shared_locks import HERE, attempt, free, listen, notified, take

ACQUIRE, QUEUE, RENEW = "10_acquire_shared.sql", "04_share_queue.sql", "20_renew.sql"

DEADLINE = "SELECT expires_at FROM distributed_locks WHERE name = %s"


def check_reader_enters_before_a_later_writer(sessions: Sessions) -> None:
    """A reader waits behind a writer. Another writer comes after the reader, and waits for it."""
    session = sessions.open()
    take(session, "write")
    assert not session.do(READ, attempt(2), HERE)[0]
    assert not session.do(WRITE, attempt(3), HERE)[0]
    free(session, "a#writer")
    assert session.do(READ, attempt(2), HERE)[0], "the reader waits for a writer that waits for the reader"


def check_renewal_moves_the_deadline_of_one_reader(sessions: Sessions) -> None:
    session = sessions.open()
    token, share = take(session, "read", 1)
    _, other = take(session, "read", 2)
    before, before_other = session.do(DEADLINE, share), session.do(DEADLINE, other)
    assert session.do("SELECT count(*) FROM renew(%s, %s, '300 s')", share, token) == (1,)
    assert session.do(DEADLINE, share) > before, "the reader that renews"
    assert session.do(DEADLINE, other) == before_other, "the other reader, which may be dead"


def check_writer_that_waits_is_woken_by_the_release_of_a_writer(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    take(session, "write")
    assert not session.do(WRITE, attempt(2), HERE)[0]
    free(session, "a#writer")
    assert notified(listener) == [2]


def _downgrade_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from dblock._core import shared_acquire

    def downgrade(self: Any, state: Any, attempt: str) -> Any:
        state.let_go()
        yield from self.release(state.name, state.token, state.trusted_until)
        state.release_confirmed()
        options = shared_acquire.read_write_options("read", state.lock, state.ttl, None, None, True)
        return (yield from self.acquire(options, 0.3, attempt))

    monkeypatch.setattr(shared_acquire.SharedFlows, "downgrade", downgrade)


BUGS = (
    PeerBug(
        ("kazoo#649",),
        "A reader waits for every writer in the queue, also for one that came later and waits for the reader.",
        check_reader_enters_before_a_later_writer,
        edits=(
            Edit(
                ACQUIRE,
                "            ticket,\n            acquire_shared.had_ticket OR free > 0",
                "            CASE WHEN acquire_shared.mode = 'read' THEN NULL ELSE ticket END,\n"
                "            acquire_shared.had_ticket OR free > 0",
            ),
        ),
        elsewhere="reader_behind_a_later_writer",
    ),
    PeerBug(
        ("curator#796", "curator#1138"),
        "A downgrade releases the write lock and then acquires the read lock, so a waiting writer enters in between.",
        test_no_writer_enters_while_another_one_downgrades,
        arguments={"rounds": 1},
        patch=_downgrade_in_two_steps,
        failures=(*FAILURES, dblock.LeaseLost),
        elsewhere="downgrade_in_two_steps",
        second_stage=True,
    ),
    PeerBug(
        ("redisson#7098",),
        "The renewal of one reader extends the leases of all readers, so a dead reader keeps the lock for ever.",
        check_renewal_moves_the_deadline_of_one_reader,
        edits=(
            Edit(
                RENEW,
                "    IF FOUND THEN\n        RETURN QUERY",
                "    UPDATE distributed_locks AS l SET expires_at = clock_timestamp() + lease_time\n"
                "    WHERE l.kind = 'reader' AND l.expires_at > clock_timestamp() AND l.name <> renew.name\n"
                "      AND l.head = (SELECT s.head FROM distributed_locks AS s WHERE s.name = renew.name);\n"
                "    IF EXISTS (SELECT FROM distributed_locks AS l WHERE l.name = renew.name) THEN\n"
                "        RETURN QUERY",
            ),
        ),
        elsewhere="one_reader_renews_all",
    ),
    PeerBug(
        ("redisson#1604",),
        "The renewal extends the lock and not the reader's own lease, so readers lose it while they work.",
        check_renewal_moves_the_deadline_of_one_reader,
        edits=(
            Edit(
                RENEW,
                "greatest(least(l.expires_at, clock_timestamp() + l.ttl), clock_timestamp() + lease_time),",
                "l.expires_at,",
            ),
        ),
    ),
    PeerBug(
        ("redisson#1542",),
        "Readers that wait behind a writer enter one after the other, as if each of them were a writer.",
        test_reader_queues_behind_a_writer_that_came_before,
        edits=(Edit(ACQUIRE, "CASE WHEN acquire_shared.mode = 'read' THEN 'write' END,", "NULL,"),),
        elsewhere="only_one_reader_woken",
    ),
    PeerBug(
        ("redisson#3891",),
        "A writer that waits misses the release of another writer, and sleeps until a lease would have expired.",
        check_writer_that_waits_is_woken_by_the_release_of_a_writer,
        edits=(Edit(QUEUE, "        RETURN notify_waiter(next.client, next.attempt);", "        RETURN true;"),),
    ),
)
