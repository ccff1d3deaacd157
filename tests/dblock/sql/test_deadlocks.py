"""Deadlocks in SQL: which waits are a cycle, who is the victim, and waits that lead through Postgres' own locks."""

from __future__ import annotations

import random
import time
import uuid
from concurrent import futures
from typing import Any

import psycopg
import pytest

from tests.support import mutants
from tests.support.eventually import eventually
from tests.support.random_graphs import CLIENT, check_random_graphs
from tests.support.sessions import Session, Sessions
from tests.support.waits import Participant, WaitGraph


@pytest.fixture
def graph(owner: psycopg.Connection) -> WaitGraph:
    return WaitGraph(owner)


def look_in(session: Session, participant: Participant) -> Any:
    statement, args = participant.request
    return session.do(statement, *args)


def start_look(session: Session, participant: Participant) -> futures.Future[Any]:
    statement, args = participant.request
    return session.start(statement, *args)


def victims(participants: list[Participant]) -> list[str]:
    """Let every participant look, and return the names of the victims."""
    return [participant.name for participant in participants if participant.look()[0]]


# Cycles.


def test_victim_is_the_youngest_and_learns_the_whole_cycle(graph: WaitGraph) -> None:
    a = graph.add("a").hold("x")
    b = graph.add("b").hold("y")
    a.wait("y")
    assert a.look() == (False, None)
    b.wait("x")
    victim, cycle = b.look()
    assert victim
    assert cycle == [
        {"waiter": "b", "lock": "x", "holder": "a", "token": a.tokens[0], "session": None, "blocker": None},
        {"waiter": "a", "lock": "y", "holder": "b", "token": b.tokens[0], "session": None, "blocker": None},
    ]
    assert not b.waits
    assert a.waits
    assert a.look() == (False, None), "the cycle is broken"
    assert graph.one("SELECT count(*) FROM waiting_holds") == (1,), "the victim's note is gone"


@pytest.mark.parametrize("size", [2, 3, 7, pytest.param(50, marks=pytest.mark.second_stage)])
def test_every_cycle_has_exactly_one_victim_whoever_looks_first(graph: WaitGraph, size: int) -> None:
    ring = graph.ring(size)
    youngest = ring[-1].name
    looking = [*ring, *ring]
    random.Random(size).shuffle(looking)
    assert victims(looking + ring) == [youngest]
    assert sum(participant.waits for participant in ring) == size - 1


def test_cycle_names_the_holders_of_shares_and_not_the_heads(owner: psycopg.Connection, graph: WaitGraph) -> None:
    a = graph.add("a").hold_share("x", "write")
    b = graph.add("b").hold_share("y", "write")
    a.wait_for_share("y", "write")
    b.wait_for_share("x", "write")
    # The heads come before the shares in the table, as they do once a lock has been used for a while.
    owner.execute("VACUUM distributed_locks")
    owner.execute("UPDATE distributed_locks SET meta = NULL WHERE head IS NULL")
    assert a.look() == (False, None)
    victim, cycle = b.look()
    assert victim
    assert cycle is not None
    assert [one["holder"] for one in cycle] == ["a", "b"]


def test_attempt_that_waits_for_another_lock_since_is_followed(graph: WaitGraph) -> None:
    """As a caller of acquire_all() does, which waits for one lock after the other."""
    a = graph.add("a").hold("x")
    b = graph.add("b").hold("y")
    c = graph.add("c").hold("z")
    a.wait("z")
    assert a.look() == (False, None)
    attempt = a.attempt
    assert attempt is not None
    graph.one("SELECT abandon('z', %s)", attempt)
    a.wait("y")
    graph.one("UPDATE lock_tickets SET attempt = %s WHERE attempt = %s RETURNING 1", attempt, a.attempt)
    a.attempt = attempt
    assert a.look() == (False, None)
    b.wait("x")
    assert b.look()[0]
    assert c.attempt is None


def test_wait_of_a_session_under_a_share_is_listed_once(sessions: Sessions, graph: WaitGraph) -> None:
    a = graph.add("a").hold_share("x", "write")
    b = graph.add("b").hold_share("y", "write")
    holder, waiter = sessions.open(), sessions.open()
    holder.do("BEGIN")
    holder.do("SELECT bind_transaction('y#writer', %s)", b.tokens[0])
    holder.do("SELECT pg_advisory_xact_lock(1)")
    waiter.do("BEGIN")
    waiter.do("SELECT bind_transaction('x#writer', %s)", a.tokens[0])
    waiting = waiter.start("SELECT pg_advisory_xact_lock(1)")
    waiter.wait_until_blocked()
    assert graph.one("SELECT array_agg((waiter, holder)::text) FROM wait_graph()") == (["(a,b)"],)
    holder.do("COMMIT")
    waiting.result(60)


def test_look_of_another_member_wakes_the_victim_and_ends_nothing(sessions: Sessions, graph: WaitGraph) -> None:
    older, younger = graph.ring(2)
    listener = sessions.open()
    listener.do(f"LISTEN dblock_{younger.client.hex}")
    younger.note()
    victim, cycle = older.look()
    assert not victim
    assert cycle is not None
    assert [one["waiter"] for one in cycle] == ["p0", "p1"]
    assert older.waits
    assert younger.waits
    listener.do("SELECT 1")
    assert [one.payload for one in listener.connection.notifies(timeout=60, stop_after=1)] == [
        f"deadlock {younger.attempt}"
    ]


def test_wait_for_an_own_lock_is_a_cycle_of_one(graph: WaitGraph) -> None:
    alone = graph.add("alone").hold("x").wait("x")
    victim, cycle = alone.look()
    assert victim
    assert cycle is not None
    assert [(one["waiter"], one["lock"], one["holder"]) for one in cycle] == [("alone", "x", "alone")]


# Waits that are no cycle.


def test_converging_waits_are_no_cycle(graph: WaitGraph) -> None:
    """Two waiters wait for one holder, and one waiter for both of them in turn: every path ends at the holder."""
    end = graph.add("end").hold("x")
    left = graph.add("left").hold("y").wait("x")
    right = graph.add("right").hold("z").wait("x")
    first, second = graph.add("first").hold("f").wait("y"), graph.add("second").hold("s").wait("z")
    assert victims([left, right, first, second] * 2) == []
    assert end.tokens


def test_ways_that_part_and_meet_again_are_no_cycle(graph: WaitGraph) -> None:
    """A writer waits for two readers. Both wait for one lock, whose holder waits for a holder that works."""
    end = graph.add("end").hold("e")
    middle = graph.add("middle").hold("m").wait("e")
    readers = [graph.add(name).hold_share("rw", "read") for name in ("left", "right")]
    for reader in readers:
        reader.wait("m")
    writer = graph.add("writer").hold("w").wait_for_share("rw", "write")
    everyone = [middle, *readers, writer]
    for participant in everyone:
        participant.note()
    assert [participant.look() for participant in everyone] == [(False, None)] * 4
    assert end.tokens


def test_waiter_outside_a_cycle_is_no_victim_and_its_look_ends(graph: WaitGraph) -> None:
    ring = graph.ring(3)
    tail = graph.add("tail").hold("t").wait("l0")
    end_of_tail = graph.add("end of tail").hold("u").wait("t")
    for participant in (*ring, tail, end_of_tail):
        participant.note()
    assert tail.look() == (False, None)
    assert end_of_tail.look() == (False, None)
    assert victims([tail, end_of_tail, *ring, tail, end_of_tail]) == ["p2"]


def test_lease_that_has_expired_holds_nothing(graph: WaitGraph) -> None:
    a, b = graph.ring(2)
    a.look()
    graph.one("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = 'l0' RETURNING 1")
    assert b.look() == (False, None)


def test_lease_that_is_not_renewed_any_more_ends_by_itself(graph: WaitGraph) -> None:
    a, b = graph.add("a").hold("x"), graph.add("b").hold("y")
    a.wait("y").look()
    b.wait("x")
    graph.one("SELECT force_release('x', %s)", *a.tokens)
    assert b.look() == (False, None)


def test_ticket_of_a_dead_client_is_no_edge(graph: WaitGraph) -> None:
    a, b = graph.add("a").hold("x"), graph.add("b").hold("y")
    a.wait("y").look()
    b.wait("x")
    graph.one("UPDATE lock_clients SET seen_until = '-infinity' WHERE client = %s RETURNING 1", a.client)
    assert b.look() == (False, None)
    graph.one("SELECT heartbeat(%s, '{}')", a.client)
    assert b.look()[0]


def test_ticket_whose_presence_has_ended_is_no_edge(sessions: Sessions, graph: WaitGraph) -> None:
    dying, presence = sessions.open(), uuid.uuid4()
    dying.do("SELECT register_presence(%s, '60 s')", presence)
    a, b = graph.add("a").hold("x", presence=presence), graph.add("b").hold("y")
    a.wait("y", presence=presence).look()
    b.wait("x")
    pid = dying.connection.info.backend_pid
    dying.connection.close()
    listed = "SELECT count(*) FROM pg_stat_get_activity(%s)"
    eventually(lambda: graph.one(listed, pid) == (0,), "the end of the session")
    assert b.look() == (False, None)


def test_note_without_a_ticket_is_no_edge(graph: WaitGraph) -> None:
    a, b = graph.ring(2)
    a.look()
    graph.one("DELETE FROM lock_tickets WHERE attempt = %s RETURNING 1", a.attempt)
    assert b.look() == (False, None)


def test_snapshot_that_may_be_old_decides_nothing(owner: psycopg.Connection, graph: WaitGraph) -> None:
    a, b = graph.ring(2)
    a.look()
    with owner.transaction():
        owner.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert b.look() == (False, None)
    assert b.look()[0]


# Shared locks.


def test_writer_waits_for_every_reader(graph: WaitGraph) -> None:
    reader, other = graph.add("reader").hold_share("rw", "read"), graph.add("other").hold_share("rw", "read")
    writer = graph.add("writer").hold("x").wait_for_share("rw", "write")
    assert writer.look() == (False, None)
    reader.wait("x")
    victim, cycle = reader.look()
    assert victim
    assert cycle is not None
    assert [(one["waiter"], one["lock"], one["holder"]) for one in cycle] == [
        ("reader", "x", "writer"),
        ("writer", "rw", "reader"),
    ]
    assert other.tokens


def test_reader_waits_for_readers_only_behind_a_write(graph: WaitGraph, owner: psycopg.Connection) -> None:
    """A holder waits for a reader that waits behind a writer that waits for the holder."""
    holder = graph.add("holder").hold_share("rw", "read")
    writer = graph.add("writer").wait_for_share("rw", "write")
    reader = graph.add("reader").hold("x").wait_for_share("rw", "read")
    holder.wait("x")
    reader.look()
    owner.execute("UPDATE lock_clients SET seen_until = '-infinity' WHERE client = %s", [writer.client])
    assert holder.look() == (False, None), "the writer is dead, so the reader can be granted the lock"
    owner.execute("SELECT heartbeat(%s, '{}')", [writer.client])
    assert holder.look()[0]


def test_wait_for_a_permit_is_stuck_only_if_one_waiter_holds_all(graph: WaitGraph) -> None:
    hog, worker = graph.add("hog").hold_share("s", None, 2), graph.add("worker").hold_share("s", None)
    waiter = graph.add("waiter").hold("x").wait_for_share("s", None)
    waiter.look()
    hog.wait("x")
    assert hog.look() == (False, None), "the worker may release its permit"
    graph.one("SELECT release(name, token) FROM distributed_locks WHERE token = %s", *worker.tokens)
    graph.one("DELETE FROM lock_tickets WHERE attempt = %s RETURNING 1", hog.attempt)
    graph.one("DELETE FROM lock_tickets WHERE attempt = %s RETURNING 1", waiter.attempt)
    hog.hold_share("s", None)
    waiter.wait_for_share("s", None).look()
    assert hog.wait("x").look()[0]


# Random graphs, compared with a plain model.


@pytest.fixture
def one_client(owner: psycopg.Connection) -> psycopg.Connection:
    """A connection of the owner, to a database in which the client of all participants is alive."""
    owner.execute("INSERT INTO lock_clients VALUES (%s, 'infinity')", [CLIENT])
    return owner


def test_random_graphs_have_the_victims_of_the_model(one_client: psycopg.Connection) -> None:
    assert check_random_graphs(one_client, range(12), random.Random(1)) > 0


@pytest.mark.second_stage
def test_more_random_graphs_have_the_victims_of_the_model(one_client: psycopg.Connection) -> None:
    chance = random.Random(2)
    for start in range(0, 400, 5):
        check_random_graphs(one_client, range(start, start + 5), chance)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_hundred_thousand_random_graphs_have_the_victims_of_the_model(one_client: psycopg.Connection) -> None:
    chance = random.Random()
    victims = 0
    for start in range(0, 100_000, 5):
        victims += check_random_graphs(one_client, range(start, start + 5), chance)
    assert victims > 20_000


# Looks at the same time.


def test_look_beside_the_victims_look_ends_no_second_wait(sessions: Sessions, graph: WaitGraph) -> None:
    older, younger = graph.ring(2)
    older.note()
    younger.note()
    held, other = sessions.open("held"), sessions.open()
    gate = sessions.gate("DELETE", "dblock.lock_tickets")
    deciding = start_look(held, younger)
    held.wait_until_blocked()
    victim, cycle = look_in(other, older)
    assert not victim
    assert cycle is not None, "the victim's ticket is still there for this look"
    gate.open()
    assert deciding.result(60)[0]
    assert look_in(other, older) == (False, None)
    assert older.waits


def shared_ticket(graph: WaitGraph) -> tuple[Participant, Participant, Participant]:
    """Return a ticket in two cycles, with the other ticket of each: the youngest of the first, not of the second."""
    old, shared, young = (graph.add(name) for name in ("old", "shared", "young"))
    old.hold("o")
    young.tokens = old.tokens  # two waits under one token, as of two tasks that share a lease
    shared.hold("s", "t")
    old.wait("s")
    shared.wait("o")
    young.wait("t")
    return old, shared, young


def test_victim_of_one_cycle_spares_the_victim_of_another_that_shares_its_ticket(
    sessions: Sessions, graph: WaitGraph
) -> None:
    old, shared, young = shared_ticket(graph)
    for participant in (old, shared, young):
        participant.note()
    # In the first cycle the shared ticket is the youngest, in the second one the young ticket is.
    held, other = sessions.open("held"), sessions.open()
    gate = sessions.gate("DELETE", "dblock.lock_tickets")
    deciding = start_look(held, shared)
    held.wait_until_blocked()
    assert look_in(other, young) == (False, None), "the shared ticket is locked while its look decides"
    gate.open()
    assert deciding.result(60)[0]
    assert look_in(other, young) == (False, None)
    assert young.waits
    assert old.waits


def test_look_that_waited_for_another_look_searches_again(
    sessions: Sessions, graph: WaitGraph, owner: psycopg.Connection
) -> None:
    # With the usual limit of 100 ms it would give up before this test sees it wait.
    mutants.replace(owner, mutants.altered("10_look_for_deadlock.sql", "'100ms'", "'60s'"))
    old, shared, young = shared_ticket(graph)
    for participant in (old, shared, young):
        participant.note()
    held, other = sessions.open("held"), sessions.open()
    gate = sessions.gate("DELETE", "dblock.lock_tickets")
    deciding = start_look(held, shared)
    held.wait_until_blocked()
    beside = start_look(other, young)
    other.wait_until_blocked()
    gate.open()
    assert deciding.result(60)[0]
    assert beside.result(60) == (False, None), "the shared ticket is gone, and with it both cycles"
    assert young.waits


def test_ticket_that_was_redeemed_meanwhile_is_no_victim(sessions: Sessions, graph: WaitGraph) -> None:
    """The holder's lease ends and the youngest is granted the lock, while its look is about to delete the ticket."""
    older, younger = graph.ring(2)
    older.look()
    granting, looking = sessions.open(), sessions.open()
    granting.do("BEGIN")
    granting.do("UPDATE distributed_locks SET expires_at = '-infinity' WHERE name = 'l0'")
    assert granting.do("SELECT granted FROM try_acquire('l0', attempt => %s, ticket => 1)", younger.attempt) == (True,)
    assert look_in(looking, younger) == (False, None)
    granting.do("COMMIT")
    assert look_in(looking, younger) == (False, None)
    assert graph.one("SELECT attempt FROM distributed_locks WHERE name = 'l0'") == (younger.attempt,)


# Cost.


def test_repeated_look_writes_nothing(owner: psycopg.Connection, graph: WaitGraph) -> None:
    a = graph.add("a").hold("x", "y")
    graph.add("b").hold("z")
    a.wait("z")
    for expected in (False, True):
        with owner.transaction():
            a.look()
            assert graph.one("SELECT pg_current_xact_id_if_assigned() IS NULL") == (expected,)


def test_notes_of_ended_waits_are_deleted(graph: WaitGraph) -> None:
    first, second = graph.ring(2)
    first.look()
    graph.one("SELECT abandon(%s, %s)", first.lock, first.attempt)
    graph.one("SELECT look_for_deadlock(%s, %s, %s, %s)", second.lock, second.attempt, second.tokens, [first.attempt])
    assert graph.one("SELECT array_agg(attempt) FROM waiting_holds") == ([second.attempt],)
    graph.one("SELECT reap()")
    assert graph.one("SELECT count(*) FROM waiting_holds") == (1,), "the reaper takes no note of a waiter"
    graph.one("SELECT abandon(%s, %s)", second.lock, second.attempt)
    graph.one("SELECT reap()")
    assert graph.one("SELECT count(*) FROM waiting_holds") == (0,)


def test_holds_that_change_are_noted_again(graph: WaitGraph) -> None:
    a = graph.add("a").hold("x", "y")
    graph.add("b").hold("z")
    a.wait("z").look()
    del a.tokens[0]
    a.look()
    assert graph.one("SELECT array_agg(token) FROM waiting_holds") == (a.tokens,)


@pytest.mark.second_stage
@pytest.mark.parametrize("shape", ["chain", "crowd"])
def test_look_among_ten_thousand_waiters_takes_less_than_50_ms(owner: psycopg.Connection, shape: str) -> None:
    """In a chain each waits for the next. In a crowd all wait for one lock, whose holder waits too."""
    target = "least(n + 1, 10000)" if shape == "chain" else "CASE n WHEN 1 THEN 10001 ELSE 1 END"
    owner.execute("INSERT INTO lock_clients VALUES (%s, 'infinity')", [uuid.UUID(int=7)])
    owner.execute(
        "INSERT INTO distributed_locks (name, token, expires_at, holder)"
        " SELECT 'l' || n, n, 'infinity', 'p' || n FROM generate_series(1, 10001) AS n"
    )
    owner.execute(
        "INSERT INTO lock_tickets (name, number, attempt, client, holder, since)"
        f" SELECT 'l' || {target}, n, lpad(to_hex(n), 32, '0')::uuid, %s, 'p' || n, now()"
        " FROM generate_series(1, 10000) AS n",
        [uuid.UUID(int=7)],
    )
    owner.execute("INSERT INTO waiting_holds SELECT attempt, number, name FROM lock_tickets")
    owner.execute("ANALYZE")
    took = []
    for number in (2, 5000, 9000):
        for _ in range(3):
            began = time.monotonic()
            row = owner.execute(
                "SELECT victim FROM look_for_deadlock((SELECT name FROM lock_tickets WHERE number = %s), %s, %s)",
                [number, uuid.UUID(int=number), [number]],
            ).fetchone()
            took.append(time.monotonic() - began)
            assert row == (False,)
    assert min(took) < 0.05, took


# Waits that lead through sessions.


@pytest.fixture
def rows(owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.accounts (id integer PRIMARY KEY, amount integer NOT NULL DEFAULT 0)")
    owner.execute("INSERT INTO public.accounts SELECT generate_series(1, 3)")


UPDATE = "UPDATE public.accounts SET amount = amount + 1 WHERE id = %s"


def bind(session: Session, participant: Participant, lock: str, function: str = "assert_held") -> None:
    session.do("BEGIN")
    assert session.do(f"SELECT {function}(%s, %s)", lock, participant.tokens[0]) == (True,)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("function", ["assert_held", "bind_transaction"])
def test_deadlock_across_a_row_and_a_lock_is_found(sessions: Sessions, graph: WaitGraph, function: str) -> None:
    a, b = graph.add("a").hold("x"), graph.add("b").hold("y")
    of_a, of_b = sessions.open(), sessions.open()
    bind(of_a, a, "x", function)
    bind(of_b, b, "y", function)
    of_b.do(UPDATE, 1)
    b.wait("x")
    assert b.look() == (False, None), "a works"
    updating = of_a.start(UPDATE, 1)
    of_a.wait_until_blocked()
    victim, cycle = b.look()
    assert victim
    pids = [session.connection.info.backend_pid for session in (of_a, of_b)]
    assert cycle == [
        {"waiter": "b", "lock": "x", "holder": "a", "token": a.tokens[0], "session": None, "blocker": None},
        {"waiter": "a", "lock": None, "holder": "b", "token": b.tokens[0], "session": pids[0], "blocker": pids[1]},
    ]
    of_b.do("ROLLBACK")
    updating.result(60)
    of_a.do("COMMIT")
    assert graph.one("SELECT count(*) FROM bound_sessions()") == (0,), "the marks end with the transactions"


@pytest.mark.usefixtures("rows")
def test_session_without_a_lease_in_between_is_followed(sessions: Sessions, graph: WaitGraph) -> None:
    """The session of a waits for a stranger, which waits for the session of b, which waits for a's lock."""
    a, b = graph.add("a").hold("x"), graph.add("b").hold("y")
    of_a, stranger, of_b = sessions.open(), sessions.open(), sessions.open()
    bind(of_a, a, "x")
    bind(of_b, b, "y")
    of_b.do(UPDATE, 1)
    stranger.do("BEGIN")
    stranger.do(UPDATE, 2)
    waiting = [stranger.start(UPDATE, 1)]
    stranger.wait_until_blocked()
    waiting.append(of_a.start(UPDATE, 2))
    of_a.wait_until_blocked()
    b.wait("x")
    victim, cycle = b.look()
    assert victim
    assert cycle is not None
    assert [(one["lock"], one["session"] is None) for one in cycle] == [("x", True), (None, False), (None, False)]
    assert cycle[1]["blocker"] == cycle[2]["session"] == stranger.connection.info.backend_pid
    of_b.do("ROLLBACK")
    waiting[0].result(60)
    stranger.do("ROLLBACK")
    waiting[1].result(60)


@pytest.mark.usefixtures("rows")
def test_waits_of_different_moments_are_no_cycle(
    sessions: Sessions, graph: WaitGraph, owner: psycopg.Connection
) -> None:
    """While a search has come as far as b, b stops waiting. Only then does c begin to wait for a."""
    a, b, c = graph.add("a").hold("z"), graph.add("b").hold("x"), graph.add("c").hold("y")
    b.wait("y").note()
    a.wait("x").note()
    # A session that works under a lease and waits. Without one, the search is one query.
    other, of_other, stranger = graph.add("other").hold("o"), sessions.open(), sessions.open()
    stranger.do("BEGIN")
    stranger.do(UPDATE, 1)
    bind(of_other, other, "o")
    updating = of_other.start(UPDATE, 1)
    of_other.wait_until_blocked()
    mutants.replace(
        owner,
        mutants.altered(
            "01_tokens_in_the_way.sql",
            "LANGUAGE sql STABLE\nAS $$\n    SELECT l.token",
            "LANGUAGE plpgsql STABLE\nAS $$ BEGIN\n"
            "IF of_lock = 'y' AND current_setting('application_name') = 'held' THEN\n"
            "PERFORM pg_advisory_xact_lock_shared(4711); END IF;\n RETURN QUERY SELECT l.token",
        ).replace("END\n$$", "END; END $$"),
    )
    held = sessions.open("held")
    owner.execute("SELECT pg_advisory_lock(4711)")
    looking = start_look(held, a)
    held.wait_until_blocked()
    graph.one("SELECT abandon(%s, %s)", b.lock, b.attempt)
    c.wait("z").note()
    owner.execute("SELECT pg_advisory_unlock(4711)")
    assert looking.result(60) == (False, None)
    stranger.do("ROLLBACK")
    updating.result(60)


@pytest.mark.usefixtures("rows")
def test_session_that_waits_for_a_stranger_is_no_cycle(sessions: Sessions, graph: WaitGraph) -> None:
    a, b = graph.add("a").hold("x"), graph.add("b").hold("y")
    of_a, stranger, of_b = sessions.open(), sessions.open(), sessions.open()
    bind(of_a, a, "x")
    bind(of_b, b, "y")
    stranger.do("BEGIN")
    stranger.do(UPDATE, 1)
    updating = of_a.start(UPDATE, 1)
    of_a.wait_until_blocked()
    b.wait("x")
    assert b.look() == (False, None)
    stranger.do("ROLLBACK")
    updating.result(60)


@pytest.mark.usefixtures("rows")
def test_outsider_that_locks_the_key_hides_the_wait_and_blocks_nothing(sessions: Sessions, graph: WaitGraph) -> None:
    a, b = graph.add("a").hold("x"), graph.add("b").hold("y")
    of_a, of_b, outsider = sessions.open(), sessions.open(), sessions.open()
    outsider.do("SELECT pg_advisory_lock(token_key(%s))", a.tokens[0])
    bind(of_a, a, "x")
    bind(of_b, b, "y")
    of_b.do(UPDATE, 1)
    updating = of_a.start(UPDATE, 1)
    of_a.wait_until_blocked()
    b.wait("x")
    assert b.look() == (False, None)
    of_b.do("ROLLBACK")
    updating.result(60)


@pytest.mark.parametrize("token", [1, 2**53 - 1, -1, -(2**52)])
def test_key_of_a_token_names_the_token(owner: psycopg.Connection, token: int) -> None:
    with owner.transaction():
        owner.execute("SELECT pg_try_advisory_xact_lock_shared(token_key(%s))", [token])
        assert owner.execute("SELECT session, token FROM bound_sessions()").fetchall() == [
            (owner.info.backend_pid, token)
        ]


def test_transaction_is_bound_only_to_a_lease_that_is_held(owner: psycopg.Connection, graph: WaitGraph) -> None:
    a = graph.add("a").hold("x")
    with owner.transaction():
        assert graph.one("SELECT bind_transaction('x', %s)", a.tokens[0] - 1) == (False,)
        assert graph.one("SELECT count(*) FROM bound_sessions()") == (0,)


# The whole graph.


@pytest.mark.usefixtures("rows")
def test_wait_graph_shows_every_wait_and_numbers_the_cycles(sessions: Sessions, graph: WaitGraph) -> None:
    ring = graph.ring(2)
    tail = graph.add("tail").hold("t").wait("l0")
    a, b = graph.add("a").hold("x"), graph.add("b").hold("y")
    of_a, of_b = sessions.open(), sessions.open()
    bind(of_a, a, "x")
    bind(of_b, b, "y")
    of_b.do(UPDATE, 1)
    updating = of_a.start(UPDATE, 1)
    of_a.wait_until_blocked()
    b.wait("x")
    statement = b"SELECT waiter, lock, holder, token, seconds >= 0, session IS NOT NULL, cycle FROM wait_graph()"
    rows = graph._owner.execute(statement).fetchall()
    assert {row[-1] for row in rows} == {None}, "no waiter has looked"
    for participant in (*ring, b, tail):
        participant.note()
    rows = graph._owner.execute(statement).fetchall()
    first = next(row[-1] for row in rows if row[0] == "p0")
    second = 3 - first
    assert sorted(rows, key=str) == sorted(
        [
            ("p0", "l1", "p1", ring[1].tokens[0], True, False, first),
            ("p1", "l0", "p0", ring[0].tokens[0], True, False, first),
            ("tail", "l0", "p0", ring[0].tokens[0], True, False, None),
            ("b", "x", "a", a.tokens[0], True, False, second),
            ("a", None, "b", b.tokens[0], None, True, second),
        ],
        key=str,
    )
    of_b.do("ROLLBACK")
    updating.result(60)


def test_presence_whose_key_looks_like_a_token_binds_no_session(sessions: Sessions, graph: WaitGraph) -> None:
    session = sessions.open()
    session.do("SELECT pg_advisory_lock(token_key(7))")  # the lock of a presence is exclusive
    assert graph.one("SELECT count(*) FROM bound_sessions()") == (0,)
    session.do("SELECT pg_advisory_unlock(token_key(7))")
    session.do("SELECT pg_advisory_lock_shared(token_key(7))")
    assert graph.one("SELECT token FROM bound_sessions()") == (7,)
