"""Mistakes of semaphores, and of names that are used as two kinds of lock."""

from __future__ import annotations

from tests.dblock.peer_bugs import PeerBug
from tests.dblock.sql.test_shared_locks import (
    ASK_PERMIT,
    TRY_PERMIT,
    test_clients_that_disagree_on_the_permits_receive_both_numbers,
    test_name_has_one_kind,
    test_semaphore_grants_its_permits_by_number_and_in_order,
    test_semaphore_made_larger_wakes_its_waiters,
)
from tests.robustness.mutations import Edit
from tests.robustness.mutations.shared_locks import BUGS as SEEDED
from tests.support.sessions import Sessions
from tests.support.shared_locks import EXPIRE, HERE, attempt

ACQUIRE, QUEUE, RESIZE, ABANDON = (
    "10_acquire_shared.sql",
    "04_share_queue.sql",
    "12_resize_semaphore.sql",
    "14_abandon.sql",
)
AVAILABLE = "SELECT available FROM shared_state('s')"

DISAGREE = "    IF asked <> head.permits AND ticket IS NULL AND NOT acquire_shared.had_ticket THEN"


def check_permit_of_a_dead_holder_comes_back(sessions: Sessions) -> None:
    session = sessions.open()
    for number in (1, 2):
        assert session.do(ASK_PERMIT, 2, attempt(number), HERE)[0]
    session.do(EXPIRE, "s#0")
    assert session.do(AVAILABLE) == (1,)
    assert session.do(TRY_PERMIT) == (True,)


def check_try_is_refused_when_all_permits_are_held(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do(TRY_PERMIT) == session.do(TRY_PERMIT) == (True,)
    assert session.do(TRY_PERMIT) == (False,)


def check_abandoned_attempt_gives_its_permit_back(sessions: Sessions) -> None:
    """The caller was interrupted after the grant and before the reply."""
    session = sessions.open()
    assert session.do(ASK_PERMIT, 2, attempt(1), HERE)[0]
    session.do("SELECT abandon('s', %s)", attempt(1))
    assert session.do(AVAILABLE) == (2,)


BUGS = (
    PeerBug(
        ("prefect#17415", "prefect#9895", "redisson#2045"),
        "A permit counts as held until it is released, also if its holder is dead.",
        check_permit_of_a_dead_holder_comes_back,
        edits=next(bug.edits for bug in SEEDED if bug.name == "permits of the dead kept"),
        elsewhere="permits of the dead kept",
    ),
    PeerBug(
        ("prefect#21794", "prefect#18991"),
        "The number of held permits is a stored counter, which drifts away from the holders.",
        elsewhere="stored_count_of_permits",
    ),
    PeerBug(
        ("prefect#23183",),
        "A release wakes no waiter, so the permit stays unused until a waiter asks again by itself.",
        test_semaphore_grants_its_permits_by_number_and_in_order,
        edits=(
            Edit(
                QUEUE,
                "    RETURN current_setting('synchronous_commit') = 'off' AND lock_row_briefly(wake_shared.head)\n"
                "        AND notify_shared(wake_shared.head);",
                "    RETURN true;",
            ),
        ),
        elsewhere="release_wakes_no_waiter",
    ),
    PeerBug(
        ("redisson#4678",),
        "A client that names another number of permits overwrites the number instead of being refused.",
        test_clients_that_disagree_on_the_permits_receive_both_numbers,
        edits=(
            Edit(
                ACQUIRE,
                DISAGREE,
                "    UPDATE distributed_locks AS l SET permits = asked\n"
                "    WHERE l.name = acquire_shared.name AND asked <> l.permits;\n"
                "    IF false THEN",
            ),
        ),
    ),
    PeerBug(
        ("kazoo#213",),
        "A try that does not wait is granted one permit more than there are.",
        check_try_is_refused_when_all_permits_are_held,
        edits=(
            Edit(
                ACQUIRE,
                "THEN greatest(head.permits - shares.held, 0)",
                "THEN greatest(head.permits + (acquire_shared.client IS NULL)::integer - shares.held, 0)",
            ),
            Edit(
                ACQUIRE,
                "lowest_free_share(acquire_shared.name, 'permit', head.permits)",
                "lowest_free_share(acquire_shared.name, 'permit', head.permits + 1)",
            ),
        ),
        elsewhere="try_beyond_the_permits",
    ),
    PeerBug(
        ("curator#596",),
        "Waiters do not notice that the semaphore was made larger.",
        test_semaphore_made_larger_wakes_its_waiters,
        edits=(Edit(RESIZE, "        ready := notify_shared(resize_semaphore.name);", "        ready := true;"),),
        elsewhere="resize_unseen",
    ),
    PeerBug(
        ("curator#982",),
        "A caller that is interrupted while it acquires leaves a permit behind.",
        check_abandoned_attempt_gives_its_permit_back,
        edits=(Edit(ABANDON, "WHERE (l.name = abandon.name OR l.head = abandon.name)", "WHERE l.name = abandon.name"),),
        elsewhere="share_kept_after_giving_up",
    ),
    PeerBug(
        ("hazelcast#20387",),
        "Names have no kind: a lock's name is used as a semaphore too, and the caller waits for ever.",
        test_name_has_one_kind,
        sql="CREATE OR REPLACE FUNCTION refuse_kind(name text, asked text) RETURNS boolean"
        " LANGUAGE sql STABLE AS 'SELECT true'",
    ),
)
