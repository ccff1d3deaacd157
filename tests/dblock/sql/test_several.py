"""Several locks in SQL: all or nothing, one order, exactly one of any, and the interleavings that could break that."""

from __future__ import annotations

import uuid
from concurrent import futures
from typing import Any

import psycopg
import pytest

from tests.support import mutants
from tests.support.sessions import Session, Sessions

HERE, THERE = uuid.UUID(int=0xC1), uuid.UUID(int=0xC2)
FIRST, SECOND, THIRD = (uuid.UUID(int=number) for number in (0xA1, 0xA2, 0xA3))

TRY_ALL = "SELECT cardinality(tokens), refused FROM acquire_all(%s, attempt => %s)"
ALL = "SELECT cardinality(tokens), refused, ticket FROM acquire_all(%s, attempt => %s, client => %s)"
TRY_ANY = "SELECT name FROM acquire_any(%s, attempt => %s)"
ANY = "SELECT name, left_queues, tickets FROM acquire_any(%s, attempt => %s, client => %s)"
ANY_AGAIN = "SELECT name, left_queues FROM acquire_any(%s, attempt => %s, client => %s, had_tickets => true)"
HELD = "SELECT array_agg(name ORDER BY name) FROM distributed_locks WHERE expires_at > clock_timestamp()"
TICKETS = "SELECT array_agg(name ORDER BY name) FROM lock_tickets WHERE attempt = %s"


def free(session: Session, name: str) -> None:
    """Release a lock, whichever grant holds it."""
    session.do("SELECT release(%s, (SELECT token FROM distributed_locks WHERE name = %s), false)", name, name)


def held(session: Session) -> Any:
    """Return the names of the locks that are held, None if there is none."""
    return session.do(HELD)[0]


def test_try_grants_all_or_none(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do(TRY_ALL, ["a", "b", "c"], FIRST) == (3, None)
    free(session, "a")
    assert session.do(TRY_ALL, ["a", "c", "d"], SECOND) == (0, 2)
    assert held(session) == ["b", "c"], "the grant of a was undone"
    assert session.do("SELECT count(*) FROM lock_tickets") == (0,)


@pytest.mark.parametrize("place", [-1, 2, 1000])
def test_place_of_a_queue_that_has_begun_again_is_not_taken(sessions: Sessions, place: int) -> None:
    """After a crash the numbers of a queue may begin again. No later ticket may meet the same number."""
    session = sessions.open()
    assert session.do(TRY_ALL, ["a"], FIRST) == (1, None)
    placed = ALL.replace("client => %s", "client => %s, places => %s")
    assert session.do(placed, ["a"], SECOND, HERE, [place]) == (0, 1, 1)
    assert session.do(ALL, ["a"], THIRD, THERE) == (0, 1, 2)


def test_giving_way_does_not_free_the_lock_of_the_next_holder(sessions: Sessions) -> None:
    """The lease has expired before the call, and the lock was granted again."""
    session = sessions.open()
    assert session.do(TRY_ALL, ["a"], FIRST) == (1, None)
    assert session.do(ALL, ["a"], SECOND, HERE) == (0, 1, 1)
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert session.do("SELECT granted FROM try_acquire('a', attempt => %s, fair => false)", THIRD) == (True,)
    assert session.do("SELECT give_way('{a}', %s, waiter => %s, client => %s)", FIRST, SECOND, THERE) == (None,)
    assert session.do("SELECT attempt FROM distributed_locks WHERE expires_at > clock_timestamp()") == (THIRD,)
    assert session.do(TICKETS, FIRST) == (None,)


def test_tokens_rise_in_the_order_of_the_names(sessions: Sessions) -> None:
    session = sessions.open()
    (tokens,) = session.do("SELECT tokens FROM acquire_all('{a,b,c}', attempt => gen_random_uuid())")
    assert tokens == sorted(tokens)
    assert session.do("SELECT token FROM distributed_locks WHERE name = 'b'") == (tokens[1],)


def test_waiter_holds_the_names_before_and_has_one_ticket(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire('c')")
    assert session.do(ALL, ["a", "b", "c", "d"], FIRST, HERE) == (2, 3, 1)
    assert held(session) == ["a", "b", "c"]
    assert session.do(TICKETS, FIRST) == (["c"],)
    free(session, "c")
    again = "SELECT cardinality(tokens), refused FROM acquire_all('{c,d}', attempt => %s, client => %s, redeem => 1)"
    assert session.do(again, FIRST, HERE) == (2, None)
    assert held(session) == ["a", "b", "c", "d"]
    assert session.do(TICKETS, FIRST) == (None,)


def test_waiter_that_does_not_say_whether_it_is_ordered_is_not(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire('a')")
    waits = "SELECT ticket FROM acquire_all('{a}', attempt => %s, client => %s, ordered => NULL)"
    assert session.do(waits, FIRST, uuid.uuid4()) == (1,)
    assert session.do("SELECT ordered FROM lock_tickets") == (False,)


def test_retry_finds_its_own_grants_and_mints_no_token(sessions: Sessions) -> None:
    session = sessions.open()
    first = session.do("SELECT tokens FROM acquire_all('{a,b}', attempt => %s)", FIRST)
    assert session.do("SELECT tokens FROM acquire_all('{a,b}', attempt => %s, retry => true)", FIRST) == first
    session.do("SELECT try_acquire('d')")
    before = session.do("SELECT tokens, ticket FROM acquire_all('{c,d}', attempt => %s, client => %s)", FIRST, HERE)
    assert before == session.do(
        "SELECT tokens, ticket FROM acquire_all('{c,d}', attempt => %s, client => %s)", FIRST, HERE
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("acquire_all('{b,a}', attempt => gen_random_uuid())", "sorted"),
        ("acquire_all('{a,a}', attempt => gen_random_uuid())", "differ"),
        ("acquire_all('{a,NULL}', attempt => gen_random_uuid())", "without NULL"),
        ("acquire_all(NULL, attempt => gen_random_uuid())", "without NULL"),
        ("acquire_all('{a}')", "needs an attempt"),
        ("acquire_all('{a}', '1 ms', attempt => gen_random_uuid())", "100 ms"),
        ("acquire_any('{}', attempt => gen_random_uuid())", "at least one name"),
        ("acquire_any('{a}')", "needs an attempt"),
        ("acquire_any('{a,a}', attempt => gen_random_uuid())", "differ"),
        ("acquire_any('{a,\"\"}', attempt => gen_random_uuid())", "1 to 512 bytes"),
    ],
)
def test_bad_arguments_are_refused(owner: psycopg.Connection, call: str, message: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
        owner.execute(f"SELECT {call}".encode())


def test_names_are_sorted_by_bytes(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do(TRY_ALL, sorted(["a", "B", "é", "z", "\uffff", "\U0001f512"]), FIRST) == (6, None)


def of(owner: int, number: int) -> uuid.UUID:
    """Return an attempt of this thread or task: they have the same first eight bytes."""
    return uuid.UUID(int=(owner << 64) + number)


LOOK = (
    "SELECT cycle, waiter, wanted"
    " FROM acquire_all('{c}', attempt => %s, client => %s, redeem => 1, held => '{a,b}', ordered => true)"
)


def waiting_set(session: Session) -> uuid.UUID:
    """Let thread 9 hold c, and thread 1 hold a and b and wait for c. Return the attempt of thread 1."""
    session.do("SELECT try_acquire('c', attempt => %s)", of(9, 1))
    assert session.do(ALL, ["a", "b", "c"], of(1, 1), HERE) == (2, 3, 1)
    assert session.do(LOOK, of(1, 1), HERE) == (None, None, None)
    return of(1, 1)


def wait_for(session: Session, name: str, attempt: uuid.UUID) -> None:
    session.do("SELECT acquire(%s, attempt => %s, client => %s)", name, attempt, THERE)


def test_waiter_that_holds_what_the_set_waits_for_closes_a_cycle(sessions: Sessions) -> None:
    session = sessions.open()
    mine = waiting_set(session)
    session.do("SELECT acquire_all('{b,z}', attempt => %s, client => %s, ordered => true)", of(2, 1), THERE)
    assert session.do(LOOK, mine, HERE) == (None, None, None), "a caller that takes its locks in order"
    wait_for(session, "b", of(3, 1))
    assert session.do(LOOK, mine, HERE) == (None, None, 2), "a waiter that holds nothing"
    wait_for(session, "b", of(9, 2))
    assert session.do(LOOK, mine, HERE) == (2, of(9, 2), 2)
    session.do("UPDATE lock_clients SET seen_until = '-infinity' WHERE client = %s", THERE)
    assert session.do(LOOK, mine, HERE) == (None, None, None), "the waiters are dead"


def test_cycle_leads_over_several_waiters(sessions: Sessions) -> None:
    session = sessions.open()
    mine = waiting_set(session)
    session.do("SELECT try_acquire('x', attempt => %s)", of(8, 1))
    wait_for(session, "x", of(9, 2))
    wait_for(session, "y", of(7, 1))
    assert session.do(LOOK, mine, HERE)[0] is None
    wait_for(session, "a", of(8, 2))
    assert session.do(LOOK, mine, HERE) == (1, of(8, 2), 1)


def test_cycle_of_others_ends_the_search(sessions: Sessions) -> None:
    session = sessions.open()
    mine = waiting_set(session)
    session.do("SELECT try_acquire('x', attempt => %s)", of(8, 1))
    wait_for(session, "x", of(9, 2))
    wait_for(session, "c", of(8, 2))
    assert session.do(LOOK, mine, HERE) == (None, None, None)


def test_waiter_for_any_of_several_locks_closes_no_cycle(sessions: Sessions) -> None:
    session = sessions.open()
    mine = waiting_set(session)
    session.do("SELECT try_acquire('d')")
    session.do(ANY, ["a", "d"], of(9, 2), THERE)
    assert session.do(LOOK, mine, HERE) == (None, None, 1)


GIVE_WAY = "SELECT give_way('{b,c}', %s, %s, %s, ordered => true)"
QUEUE = "SELECT array_agg(attempt ORDER BY number) FROM lock_tickets WHERE name = 'b'"


def test_giving_way_lets_the_waiter_pass_and_queues_behind_it(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    mine = waiting_set(session)
    session.do("SELECT acquire_all('{b,z}', attempt => %s, client => %s, ordered => true)", of(2, 1), THERE)
    wait_for(session, "b", of(3, 1))
    wait_for(session, "b", of(9, 2))
    wait_for(session, "b", of(4, 1))
    listener.do(f"LISTEN dblock_{THERE.hex}")
    (number,) = session.do(GIVE_WAY, mine, of(9, 2), HERE)
    assert session.do(QUEUE) == ([of(3, 1), of(9, 2), mine, of(2, 1), of(4, 1)],)
    assert session.do("SELECT number FROM lock_tickets WHERE attempt = %s", mine) == (number,)
    assert held(session) == ["a", "c"]
    assert session.do(TICKETS, mine) == (["b"],)
    listener.do("SELECT 1")
    assert [one.payload for one in listener.connection.notifies(timeout=60, stop_after=1)] == [str(of(3, 1))]
    assert session.do("SELECT granted FROM try_acquire('b', attempt => %s, ticket => %s)", mine, number) == (False,)


def test_waiters_with_changed_numbers_are_served_in_the_new_order(sessions: Sessions) -> None:
    session = sessions.open()
    mine = waiting_set(session)
    wait_for(session, "b", of(4, 1))
    wait_for(session, "b", of(9, 2))
    session.do(GIVE_WAY, mine, of(9, 2), HERE)
    for attempt in (of(4, 1), of(9, 2), mine):
        again = "SELECT granted FROM acquire('b', attempt => %s, client => %s, had_ticket => true)"
        assert session.do(again, attempt, THERE) == (True,)
        free(session, "b")


def test_giving_way_without_the_lock_leaves_no_ticket(sessions: Sessions) -> None:
    session = sessions.open()
    mine = waiting_set(session)
    wait_for(session, "b", of(9, 2))
    free(session, "b")
    assert session.do(GIVE_WAY, mine, of(9, 2), HERE) == (None,)
    assert session.do(TICKETS, mine) == (None,)


def test_caller_that_gave_way_gets_its_position_back(sessions: Sessions) -> None:
    session = sessions.open()
    mine = waiting_set(session)
    wait_for(session, "c", of(4, 1))
    wait_for(session, "b", of(9, 2))
    session.do(GIVE_WAY, mine, of(9, 2), HERE)
    again = "SELECT ticket FROM acquire_all('{c}', attempt => %s, client => %s, places => '{1}')"
    assert session.do(again, mine, HERE) == (1,)
    taken = "SELECT ticket FROM acquire_all('{c}', attempt => %s, client => %s, places => '{1}')"
    assert session.do(taken, of(5, 1), HERE)[0] > 2, "another ticket has that number"


def test_waiter_that_holds_a_lock_wakes_the_set_in_its_way(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    mine = waiting_set(session)
    listener.do(f"LISTEN dblock_{HERE.hex}")
    wait_for(session, "b", of(9, 2))
    assert session.do("SELECT wake_set('b')") == (True,)
    listener.do("SELECT 1")
    assert [one.payload for one in listener.connection.notifies(timeout=60, stop_after=1)] == [str(mine)]
    assert session.do("SELECT wake_set('z')") == (False,)


def test_any_takes_the_first_free_lock_in_the_order_given(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do(TRY_ANY, ["c", "a", "b"], FIRST) == ("c",)
    assert session.do(TRY_ANY, ["c", "b", "a"], SECOND) == ("b",)
    assert session.do(TRY_ANY, ["b", "c"], THIRD) == (None,)
    assert held(session) == ["b", "c"]


def test_any_waits_in_every_queue_and_leaves_the_others_with_its_grant(sessions: Sessions) -> None:
    session = sessions.open()
    session.do(TRY_ALL, ["a", "b", "c"], FIRST)
    assert session.do(ANY, ["c", "a", "b"], SECOND, HERE) == (None, 0, [1, 1, 1])
    assert session.do(TICKETS, SECOND) == (["a", "b", "c"],)
    free(session, "b")
    assert session.do(ANY_AGAIN, ["c", "a", "b"], SECOND, HERE) == ("b", 2)
    assert session.do(TICKETS, SECOND) == (None,)


def test_any_does_not_pass_a_waiter_that_came_first(sessions: Sessions) -> None:
    session = sessions.open()
    session.do(TRY_ALL, ["a", "b"], FIRST)
    session.do("SELECT acquire('a', attempt => %s, client => %s)", THIRD, THERE)
    session.do(ANY, ["a", "b"], SECOND, HERE)
    free(session, "a")
    assert session.do(ANY_AGAIN, ["a", "b"], SECOND, HERE) == (None, 0)
    free(session, "b")
    assert session.do(ANY_AGAIN, ["a", "b"], SECOND, HERE) == ("b", 1)


def test_retry_of_any_finds_its_grant_though_an_earlier_name_is_free_now(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire('a')")
    assert session.do(TRY_ANY, ["a", "b"], FIRST) == ("b",)
    free(session, "a")
    assert session.do(TRY_ANY, ["a", "b"], FIRST) == ("b",)
    assert held(session) == ["b"]


RETRY_ANY = "SELECT name FROM acquire_any('{a,b}', attempt => %s, retry => true)"


def retry_beside_the_first_call(sessions: Sessions) -> list[str]:
    """Retry a call of lock_any while its first call is held just before it grants b; return what is held then."""
    keeper, first, second = sessions.open(), sessions.open("held"), sessions.open()
    keeper.do("SELECT try_acquire('b')")
    free(keeper, "b")
    keeper.do("SELECT try_acquire('a')")
    gate = sessions.gate("UPDATE")
    calls = [first.start(TRY_ANY, ["a", "b"], FIRST)]
    first.wait_until_blocked()
    free(keeper, "a")
    calls.append(second.start(RETRY_ANY, FIRST))
    futures.wait(calls, timeout=0.3)
    gate.open()
    for call in calls:
        call.result(60)
    names: list[str] = held(keeper)
    return names


@pytest.mark.second_stage
def test_retry_of_any_beside_its_first_call_is_granted_one_lock(sessions: Sessions) -> None:
    assert retry_beside_the_first_call(sessions) == ["b"]


@pytest.mark.second_stage
def test_retry_of_any_would_be_granted_two_without_the_queue(sessions: Sessions, owner: psycopg.Connection) -> None:
    mutants.replace(
        owner, mutants.altered("11_acquire_any.sql", "IF lock_queue(one, milliseconds) THEN", "IF true THEN")
    )
    assert retry_beside_the_first_call(sessions) == ["a", "b"]


def test_abandon_gives_everything_back_in_one_call(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire('c')")
    session.do(ALL, ["a", "b", "c"], FIRST, HERE)
    assert session.do("SELECT abandon_all('{a,b,c,d}', %s)", FIRST) == (3,)
    assert held(session) == ["c"]
    assert session.do(TICKETS, FIRST) == (None,)


def test_waiters_behind_a_ticket_that_any_gave_up_are_woken(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    session.do(TRY_ALL, ["a", "b"], FIRST)
    session.do(ANY, ["a", "b"], SECOND, HERE)
    session.do("SELECT acquire('b', attempt => %s, client => %s)", THIRD, THERE)
    free(session, "a")
    free(session, "b")
    assert session.do(ANY_AGAIN, ["a", "b"], SECOND, HERE) == ("a", 1)
    listener.do(f"LISTEN dblock_{THERE.hex}")
    session.do("SELECT abandon_all('{b}', %s, only_tickets => true)", SECOND)
    listener.do("SELECT 1")
    assert [one.payload for one in listener.connection.notifies(timeout=60, stop_after=1)] == [str(THIRD)]
    assert held(session) == ["a"]


def test_calls_in_opposite_orders_do_not_wait_for_each_other(sessions: Sessions) -> None:
    one, other = sessions.open(), sessions.open()
    one.do(TRY_ALL, ["a", "b"], FIRST)
    one.do("BEGIN")
    other.do("BEGIN")
    assert one.do(ANY, ["a", "b"], SECOND, HERE)[0] is None
    name, _, tickets = other.do(ANY, ["b", "a"], THIRD, THERE)
    assert (name, tickets) == (None, None), "the first queue is locked: nothing was decided"
    one.do("COMMIT")
    assert other.do(ANY, ["b", "a"], THIRD, THERE)[2] == [2, 2]
    other.do("COMMIT")
