"""Barriers and latches in SQL: who counts, what a lost reply finds, and the interleavings that could break a trip."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.support.eventually import eventually
from tests.support.sessions import Session, Sessions
from tests.support.still_clock import StillClock

ARRIVE = "SELECT tripped, number, wake, fresh FROM arrive_barrier(%s, %s, %s, %s, 'me', %s)"
LEAVE = "SELECT leave_barrier('b', %s)"
AWAIT = "SELECT remaining, fresh FROM await_latch('l', %s, %s, %s)"
COUNT = "SELECT remaining, opened FROM count_down('l', %s, %s, %s)"

WAITS = (False, None, False, True)
"""The reply to a party that has arrived and waits."""
STILL_WAITS = (False, None, False, False)


class Party:
    """A party of barrier `b`, or a waiter of latch `l`, with a client of its own."""

    def __init__(self, session: Session, parties: int = 2, presence: UUID | None = None) -> None:
        self.session = session
        self.attempt, self.client = uuid4(), uuid4()
        self._arguments = ("b", parties, self.attempt, self.client, presence)

    def start(self) -> Any:
        return self.session.start(ARRIVE, *self._arguments)

    def arrives(self) -> Any:
        """Arrive, or ask again. Return whether the barrier has tripped, the number, whether to wake, and `fresh`."""
        reply = self.session.do(ARRIVE, *self._arguments)
        # A client sends a heartbeat each second, and a slow test does not.
        self.session.do(
            "UPDATE lock_clients SET seen_until = seen_until + interval '1 hour' WHERE client = %s", self.client
        )
        return reply

    def leaves(self) -> Any:
        return self.session.do(LEAVE, self.attempt)[0]

    def dies(self) -> None:
        """Send no heartbeat any more."""
        self.session.do("UPDATE lock_clients SET seen_until = clock_timestamp() WHERE client = %s", self.client)


def waiters(session: Session) -> int:
    count: int = session.do("SELECT count(*) FROM barrier_waiters WHERE NOT over")[0]
    return count


def end_presence(session: Session, presence: UUID) -> None:
    """Record a presence whose session has ended just now: no session has its advisory lock."""
    ended = "INSERT INTO lock_presence SELECT %s, 4711, 0, pg_postmaster_start_time(), '1 hour', clock_timestamp()"
    session.do(ended, presence)


def test_last_party_trips_the_barrier_for_all(sessions: Sessions) -> None:
    session = sessions.open()
    parties = [Party(session, 3) for _ in range(3)]
    assert [party.arrives() for party in parties[:2]] == [WAITS, WAITS]
    assert parties[0].arrives() == STILL_WAITS
    assert parties[2].arrives() == (True, 2, True, True)
    assert [party.arrives() for party in parties] == [(True, number, False, False) for number in range(3)]
    assert session.do("SELECT count(*) FROM barrier_waiters") == (0,)
    assert session.do("SELECT generation FROM list_barriers()") == (1,)


def test_party_whose_reply_was_lost_finds_its_number_and_counts_once(sessions: Sessions) -> None:
    session = sessions.open()
    first, last, fast = (Party(session) for _ in range(3))
    first.arrives()
    assert last.arrives()[:2] == (True, 1)
    assert fast.arrives() == WAITS, "the next generation"
    assert last.arrives() == (True, 1, False, False), "it does not count again"
    assert waiters(session) == 1
    assert last.leaves() == 1, "a timeout in the meantime does not hide it"


def test_fast_party_of_the_next_generation_does_not_meet_a_slow_one_of_the_last(sessions: Sessions) -> None:
    session = sessions.open()
    slow, last = Party(session), Party(session)
    slow.arrives()
    last.arrives()
    fast = Party(session)
    assert fast.arrives() == WAITS, "the slow party has not asked since the trip, and belongs to the last generation"
    assert Party(session).arrives()[:2] == (True, 1)
    assert fast.arrives()[:2] == (True, 0)
    assert slow.arrives()[:2] == (True, 0)
    assert slow.leaves() == 0


def test_parties_arrive_again_after_a_crash(sessions: Sessions) -> None:
    session = sessions.open()
    slow, last, waiting = (Party(session) for _ in range(3))
    slow.arrives()
    last.arrives()
    waiting.arrives()
    session.do("TRUNCATE barrier_waiters")  # what a crash or a failover leaves of an unlogged table
    assert slow.arrives() == (True, 0, False, False), "the trip is durable"
    assert waiting.arrives() == WAITS
    assert Party(session).arrives()[:2] == (True, 1)


def test_timeout_during_the_trip_learns_of_the_trip(sessions: Sessions) -> None:
    leaver, last = Party(sessions.open()), Party(sessions.open())
    leaver.arrives()
    last.session.do("BEGIN")
    assert last.arrives()[:2] == (True, 1)
    leaving = leaver.session.start(LEAVE, leaver.attempt)
    leaver.session.wait_until_blocked()
    last.session.do("COMMIT")
    assert leaving.result(60) == (0,), "the barrier has tripped with this party"


def test_last_arrival_during_a_timeout_does_not_count_the_leaver(sessions: Sessions) -> None:
    leaver, last = Party(sessions.open()), Party(sessions.open())
    leaver.arrives()
    leaver.session.do("BEGIN")
    assert leaver.leaves() is None
    arriving = last.start()
    last.session.wait_until_blocked()
    leaver.session.do("COMMIT")
    assert arriving.result(60) == WAITS


def test_second_of_two_last_arrivals_belongs_to_the_next_generation(sessions: Sessions) -> None:
    first, last, late = (Party(sessions.open()) for _ in range(3))
    first.arrives()
    last.session.do("BEGIN")
    assert last.arrives()[:2] == (True, 1)
    arriving = late.start()
    late.session.wait_until_blocked()
    last.session.do("COMMIT")
    assert arriving.result(60) == WAITS
    assert first.arrives()[:2] == (True, 0)


def test_retry_during_the_trip_finds_its_number_and_counts_once(sessions: Sessions) -> None:
    first, last = Party(sessions.open()), Party(sessions.open())
    first.arrives()
    arguments = ("b", 2, last.attempt, last.client, None)
    last.session.do("BEGIN")
    assert last.arrives()[:2] == (True, 1)
    retry = sessions.open()
    retrying = retry.start(ARRIVE, *arguments)  # the connection of the first call broke before its commit
    retry.wait_until_blocked()
    asking = first.start()
    first.session.wait_until_blocked()
    last.session.do("COMMIT")
    assert retrying.result(60) == (True, 1, False, False)
    assert asking.result(60) == (True, 0, False, False)
    assert waiters(retry) == 0


def test_two_first_arrivals_meet_at_one_barrier(sessions: Sessions) -> None:
    first, last = Party(sessions.open()), Party(sessions.open())
    first.session.do("BEGIN")
    assert first.arrives() == WAITS
    arriving = last.start()
    last.session.wait_until_blocked()
    first.session.do("COMMIT")
    assert arriving.result(60)[:2] == (True, 1)


def test_dead_party_does_not_count(sessions: Sessions) -> None:
    session = sessions.open()
    dead, alive, last = (Party(session) for _ in range(3))
    dead.arrives()
    dead.dies()
    assert alive.arrives() == WAITS
    assert waiters(session) == 1
    assert last.arrives()[:2] == (True, 1)
    assert dead.arrives() == WAITS, "it was only slow, and waits for the next generation"


def test_party_whose_presence_is_gone_does_not_count(sessions: Sessions) -> None:
    session, presence = sessions.open(), uuid4()
    process = psycopg.connect(session.connection.info.dsn, password=session.connection.info.password, autocommit=True)
    process.execute("SELECT dblock.register_presence(%s, '1 hour')", [presence])
    dead, alive = Party(session, presence=presence), Party(session)
    dead.arrives()
    pid = process.info.backend_pid
    process.close()
    listed = "SELECT FROM pg_stat_activity WHERE pid = %s"
    eventually(lambda: session.do(listed, pid) is None, "the end of the session")
    asks = "SELECT tripped, next_check FROM arrive_barrier('b', 2, %s, %s)"
    tripped, next_check = session.do(asks, alive.attempt, alive.client)
    assert not tripped
    assert 3000 < next_check <= 3600, "its grace is not over, so the other party asks again"
    session.do("UPDATE lock_presence SET gone_since = gone_since - interval '1 hour'")
    assert session.do(asks, alive.attempt, alive.client) == (False, None)
    assert waiters(session) == 1
    assert Party(session).arrives()[:2] == (True, 1)


def test_party_counts_again_once_its_presence_is_withdrawn(sessions: Sessions) -> None:
    session, presence = sessions.open(), uuid4()
    first, alive = Party(session, presence=presence), Party(session)
    end_presence(session, presence)
    first.arrives()
    assert alive.arrives() == WAITS
    session.do("DELETE FROM lock_presence WHERE presence = %s", presence)  # as withdraw_presence() does
    assert alive.arrives()[:2] == (True, 1)
    assert first.arrives()[:2] == (True, 0)


def test_presence_that_is_replaced_makes_its_party_count(sessions: Sessions) -> None:
    session, presence, other = sessions.open(), uuid4(), uuid4()
    end_presence(session, presence)
    sessions.open().do("SELECT register_presence(%s, '1 hour')", other)
    first, last = Party(session, presence=presence), Party(session)
    first.arrives()
    assert last.arrives() == WAITS
    assert session.do(ARRIVE, "b", 2, first.attempt, first.client, other)[:2] == (True, 0)


def test_party_that_is_being_abandoned_does_not_count(sessions: Sessions) -> None:
    leaver, last = Party(sessions.open()), Party(sessions.open())
    leaver.arrives()
    leaver.session.do("BEGIN")
    leaver.session.do("SELECT abandon('barrier:b', %s)", leaver.attempt)
    asks = "SELECT tripped, next_check FROM arrive_barrier('b', 2, %s, %s)"
    assert last.session.do(asks, last.attempt, last.client) == (False, 0.05), "it does not wait for the other's end"
    leaver.session.do("ROLLBACK")
    assert last.session.do(asks, last.attempt, last.client) == (True, None)


def test_all_parties_of_a_client_leave_with_it(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    kept, left = Party(session, 3), Party(session, 3)
    kept.client = left.client
    for party in (kept, left):
        session.do(ARRIVE, "b", 3, party.attempt, left.client, None)
    clock.advance(3)
    session.do("SELECT leave_queue(%s, keep => %s)", left.client, [kept.attempt])
    assert waiters(session) == 2, "the waiters are too new to be removed"
    clock.advance(0.001)
    session.do("SELECT leave_queue(%s, keep => %s)", left.client, [kept.attempt])
    assert session.do("SELECT array_agg(attempt) FROM barrier_waiters") == ([kept.attempt],)
    session.do("SELECT leave_queue(%s)", left.client)
    assert waiters(session) == 0


def test_stale_snapshot_cannot_arrive(sessions: Sessions) -> None:
    first, last = Party(sessions.open()), Party(sessions.open())
    Party(first.session, 2).arrives()
    last.session.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    last.session.do("SELECT FROM barriers")
    first.arrives()
    with pytest.raises(psycopg.errors.SerializationFailure):
        last.arrives()


def test_only_the_trip_waits_for_the_disk(sessions: Sessions) -> None:
    first, last = Party(sessions.open()), Party(sessions.open())
    first.session.do("BEGIN")
    first.arrives()
    assert first.session.do("SHOW synchronous_commit") == ("off",)
    first.session.do("COMMIT")
    last.session.do("SET synchronous_commit = off")
    last.session.do("BEGIN")
    last.arrives()
    assert last.session.do("SHOW synchronous_commit") == ("on",)
    last.session.do("ROLLBACK")
    last.session.do("BEGIN")
    last.session.do(COUNT, 1, 1, uuid4())
    assert last.session.do("SHOW synchronous_commit") == ("on",)


def test_clients_that_disagree_are_told_both_numbers(sessions: Sessions) -> None:
    session = sessions.open()
    Party(session, 2).arrives()
    with pytest.raises(psycopg.Error, match="Barrier 'b' has 2 parties, and this client gave 3") as refused:
        Party(session, 3).arrives()
    assert refused.value.sqlstate == "DBL12"
    session.do(COUNT, 5, 1, uuid4())
    for call in (
        "count_down('l', 4)",
        "latch_remaining('l', 4)",
        "await_latch('l', 4, gen_random_uuid(), gen_random_uuid())",
    ):
        with pytest.raises(psycopg.Error, match="Latch 'l' has a count of 5, and this client gave 4"):
            session.do(f"SELECT {call}")
    assert waiters(session) == 1


def test_attempt_that_has_passed_another_barrier_does_not_block_this_one(sessions: Sessions) -> None:
    session = sessions.open()
    used = uuid4()
    assert session.do(ARRIVE, "other", 1, used, uuid4(), None)[0]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="has passed another barrier"):
        session.do(ARRIVE, "b", 2, used, uuid4(), None)
    assert Party(session).arrives() == WAITS
    assert Party(session).arrives()[0]


def test_attempt_that_waits_elsewhere_is_refused(sessions: Sessions) -> None:
    session = sessions.open()
    waiting = uuid4()
    session.do(ARRIVE, "other", 2, waiting, uuid4(), None)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="waits at another barrier or latch"):
        session.do(AWAIT, 2, waiting, uuid4())
    assert waiters(session) == 1


def test_attempt_that_passes_another_barrier_at_this_moment_is_refused(sessions: Sessions) -> None:
    first, second = sessions.open(), sessions.open()
    used = uuid4()
    first.do("BEGIN")
    assert first.do(ARRIVE, "other", 1, used, uuid4(), None)[0]
    arrival = second.start(ARRIVE, "b", 2, used, uuid4(), None)
    second.wait_until_blocked()
    first.do("COMMIT")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="has passed another barrier"):
        arrival.result(60)


def test_attempt_that_passed_another_barrier_since_the_snapshot_is_refused_for_a_retry(sessions: Sessions) -> None:
    """Only a transaction with an older snapshot cannot see the other pass."""
    older, other = sessions.open(), sessions.open()
    attempt = uuid4()
    older.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    older.do("SELECT count(*) FROM barrier_passes")
    assert other.do(ARRIVE, "x", 1, attempt, uuid4(), None)[0] is True
    with pytest.raises(psycopg.errors.SerializationFailure):
        older.do(ARRIVE, "y", 1, attempt, uuid4(), None)
    older.do("ROLLBACK")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="has passed another barrier"):
        older.do(ARRIVE, "y", 1, attempt, uuid4(), None)


def test_bad_arguments_are_refused(sessions: Sessions) -> None:
    session = sessions.open()
    for call, said in (
        ("arrive_barrier('', 2, gen_random_uuid(), gen_random_uuid())", "name takes 1 to 512 bytes"),
        ("arrive_barrier('b', 0, gen_random_uuid(), gen_random_uuid())", "parties of barrier 'b' is from 1"),
        ("arrive_barrier('b', NULL, gen_random_uuid(), gen_random_uuid())", "got NULL"),
        ("arrive_barrier('b', 2, NULL, gen_random_uuid())", "needs an attempt and a client"),
        ("arrive_barrier('b', 2, gen_random_uuid(), NULL)", "needs an attempt and a client"),
        ("arrive_barrier('b', 2, gen_random_uuid(), gen_random_uuid(), repeat('x', 513))", "at most 512 bytes"),
        ("count_down(NULL, 1)", "name takes 1 to 512 bytes"),
        ("count_down('l', 0)", "count of latch 'l' is from 1"),
        ("count_down('l', 1, 0)", "by 1 or more"),
        ("await_latch('l', 1, NULL, gen_random_uuid())", "needs an attempt and a client"),
        ("latch_remaining('l', 0)", "count of latch 'l' is from 1"),
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=said):
            session.do(f"SELECT {call}")
    assert session.do("SELECT FROM list_barriers()") is None


def test_latch_opens_once_and_stays_open(sessions: Sessions) -> None:
    session, attempt = sessions.open(), uuid4()
    assert session.do("SELECT latch_remaining('l', 3)") == (3,)
    assert session.do(COUNT, 3, 1, attempt) == (2, False)
    assert session.do(COUNT, 3, 1, attempt) == (2, False), "a retry counts once"
    assert session.do(COUNT, 3, 5, uuid4()) == (0, True)
    assert session.do(COUNT, 3, 1, uuid4()) == (0, False)
    assert session.do(COUNT, 3, 1, attempt) == (0, False)
    assert session.do(AWAIT, 3, uuid4(), uuid4()) == (0, False)
    assert session.do("SELECT latch_remaining('l', 3)") == (0,)
    assert session.do("SELECT count(*) FROM barrier_waiters") == (0,)
    assert session.do("SELECT count(*) FROM latch_counts") == (0,)


def test_count_without_an_attempt_always_counts(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do("SELECT remaining FROM count_down('l', 3)") == (2,)
    assert session.do("SELECT remaining FROM count_down('l', 3)") == (1,)


def test_waiter_that_comes_during_the_opening_sees_the_open_latch(sessions: Sessions) -> None:
    counter, waiter = sessions.open(), sessions.open()
    counter.do(COUNT, 2, 1, uuid4())
    counter.do("BEGIN")
    assert counter.do(COUNT, 2, 1, uuid4()) == (0, True)
    waiting = waiter.start(AWAIT, 2, uuid4(), uuid4())
    waiter.wait_until_blocked()
    counter.do("COMMIT")
    assert waiting.result(60) == (0, False)


def test_opening_during_the_arrival_of_a_waiter_wakes_it(sessions: Sessions) -> None:
    counter, waiter, attempt, client = sessions.open(), sessions.open(), uuid4(), uuid4()
    waiter.do("BEGIN")
    assert waiter.do(AWAIT, 1, attempt, client) == (1, True)
    counting = counter.start(COUNT, 1, 1, uuid4())
    counter.wait_until_blocked()
    waiter.do("COMMIT")
    assert counting.result(60) == (0, True)
    assert counter.do("SELECT wake_waiters('latch', 'l')") == (1,)
    assert waiter.do(AWAIT, 1, attempt, client) == (0, False)


def test_two_counts_at_once_open_the_latch_once(sessions: Sessions) -> None:
    one, other = sessions.open(), sessions.open()
    one.do(COUNT, 3, 1, uuid4())
    one.do("BEGIN")
    assert one.do(COUNT, 3, 1, uuid4()) == (1, False)
    counting = other.start(COUNT, 3, 1, uuid4())
    other.wait_until_blocked()
    one.do("COMMIT")
    assert counting.result(60) == (0, True)


def test_retry_during_the_opening_opens_nothing_again(sessions: Sessions) -> None:
    one, retry, attempt = sessions.open(), sessions.open(), uuid4()
    one.do(COUNT, 2, 1, uuid4())
    one.do("BEGIN")
    assert one.do(COUNT, 2, 1, attempt) == (0, True)
    retrying = retry.start(COUNT, 2, 1, attempt)
    retry.wait_until_blocked()
    one.do("COMMIT")
    assert retrying.result(60) == (0, False)
    assert one.do("SELECT count(*) FROM latch_counts") == (0,)


def test_trip_notifies_each_waiting_client_and_never_in_a_durable_commit(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    first, last = Party(session), Party(session)
    listener.do(f"LISTEN dblock_{first.client.hex}")
    listener.do(f"LISTEN dblock_{last.client.hex}")
    first.arrives()
    assert session.do("SELECT wake_waiters('barrier', 'b')") == (0,), "nothing to wake yet"
    session.do("BEGIN")
    assert last.arrives()[2]
    assert session.do("SELECT wake_waiters('barrier', 'b')") == (0,), (
        "the commit of this transaction waits for the disk"
    )
    session.do("COMMIT")
    assert session.do("SELECT wake_waiters('barrier', 'b')") == (1,)
    listener.do("SELECT 1")
    got = [(one.channel, one.payload) for one in listener.connection.notifies(timeout=0.2)]
    assert got == [(f"dblock_{first.client.hex}", str(first.attempt))]


def test_heartbeat_tells_a_client_which_of_its_waits_are_over(sessions: Sessions) -> None:
    session, attempt = sessions.open(), uuid4()
    first, last = Party(session), Party(session)
    first.arrives()
    session.do(AWAIT, 1, attempt, first.client)
    beat = "SELECT tickets, firsts, next_check, watched FROM heartbeat(%s, '{}')"
    assert session.do(beat, first.client) == (2, None, None, None)
    last.arrives()
    assert session.do(beat, first.client) == (2, [first.attempt], [0.0], [False])
    session.do(COUNT, 1, 1, uuid4())
    tickets, firsts, *_ = session.do(beat, first.client)
    assert (tickets, {*firsts}) == (2, {first.attempt, attempt})


def test_reaper_deletes_only_what_is_not_used_any_more(sessions: Sessions) -> None:
    session = sessions.open()
    for name in ("old", "waited-for", "young"):
        session.do(ARRIVE, name, 1, uuid4(), uuid4(), None)
        session.do("SELECT count_down(%s, 2)", name)
    session.do(ARRIVE, "many", 2, uuid4(), uuid4(), None)
    client = uuid4()
    session.do("SELECT await_latch('waited-for', 2, %s, %s)", uuid4(), client)
    session.do(
        "INSERT INTO barrier_waiters SELECT gen_random_uuid(), 'barrier', 'waited-for', 7, %s, NULL, 'me', now()",
        client,
    )
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour' WHERE client = %s", client)
    for table, age in (("barriers", "2 minutes"), ("latches", "29 days")):
        session.do(f"UPDATE {table} SET used_at = used_at - interval '{age}' WHERE name <> 'young'")
    session.do("SELECT reap('0 seconds')")
    left = "SELECT array_agg(kind || ' ' || name ORDER BY kind, name) FROM list_barriers() WHERE name <> 'many'"
    latches = ["latch old", "latch waited-for", "latch young"]
    assert session.do(left) == (["barrier waited-for", "barrier young", *latches],)
    assert session.do("SELECT array_agg(name ORDER BY name) FROM barrier_passes") == (["waited-for", "young"],)
    session.do("UPDATE latches SET used_at = used_at - interval '2 days' WHERE name <> 'young'")
    session.do("SELECT reap('0 seconds')")
    assert session.do(left) == (["barrier waited-for", "barrier young", "latch waited-for", "latch young"],)
    assert session.do("SELECT array_agg(name ORDER BY name) FROM latch_counts") == (["waited-for", "young"],)


def test_reaper_skips_a_barrier_that_is_in_use_at_this_moment(sessions: Sessions) -> None:
    reaper, party = sessions.open(), Party(sessions.open())
    Party(reaper, 2).arrives()
    reaper.do("TRUNCATE barrier_waiters")
    reaper.do("UPDATE barriers SET used_at = used_at - interval '2 days'")
    party.session.do("BEGIN")
    party.arrives()
    reaper.do("SELECT reap()")
    party.session.do("COMMIT")
    assert Party(reaper).arrives()[:2] == (True, 1)


def test_old_passes_are_deleted_unless_a_party_still_needs_them(sessions: Sessions) -> None:
    session = sessions.open()
    slow, last = Party(session), Party(session)
    slow.arrives()
    last.arrives()
    age = "UPDATE barrier_passes SET tripped_at = tripped_at - interval '2 minutes'"
    session.do(age)
    session.do("UPDATE barriers SET generation = 99")
    for _ in range(2):
        Party(session).arrives()
    assert session.do("SELECT count(*) FROM barrier_passes") == (4,), "the newest hundred generations"
    for _ in range(2):
        Party(session).arrives()
    assert session.do("SELECT array_agg(attempt) FROM barrier_passes WHERE generation = 1") == ([slow.attempt],)
    assert slow.arrives()[:2] == (True, 0)


def test_deleted_barrier_is_created_again_by_the_parties_that_wait(sessions: Sessions) -> None:
    session = sessions.open()
    slow, last, waiting = (Party(session) for _ in range(3))
    assert session.do("SELECT delete_barrier('b')") == (False,)
    slow.arrives()
    last.arrives()
    waiting.arrives()
    assert session.do("SELECT delete_barrier('b')") == (True,)
    assert slow.arrives()[:2] == (True, 0), "it belongs to a generation that has tripped"
    assert waiting.arrives() == WAITS
    assert Party(session).arrives()[:2] == (True, 1)
    session.do(COUNT, 2, 1, uuid4())
    assert session.do("SELECT delete_latch('l')") == (True,)
    assert session.do("SELECT delete_latch('l')") == (False,)
    assert session.do("SELECT latch_remaining('l', 3)") == (3,)


def test_list_names_what_is_missing_and_the_live_waiters(sessions: Sessions) -> None:
    session = sessions.open()
    alive, dead = Party(session, 4), Party(session, 4)
    alive.arrives()
    dead.arrives()
    dead.dies()
    session.do(COUNT, 5, 2, uuid4())
    holders = "jsonb_path_query_array(waiters, '$[*].holder')"
    listed = f"SELECT kind, size, remaining, generation, {holders} FROM list_barriers(%s)"
    assert session.do(listed, "b") == ("barrier", 4, 3, 0, ["me"])
    assert session.do(listed, "l") == ("latch", 5, 3, None, [])
