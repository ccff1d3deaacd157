"""Mistakes of deadlock detectors."""

from __future__ import annotations

import math
import time
import uuid

import psycopg
import pytest

from dblock._core.deadlocks import DeadlockWatch
from tests.dblock.core.test_deadlocks import test_waiter_looks_after_half_a_second_and_again
from tests.dblock.peer_bugs import PeerBug
from tests.dblock.sql.test_deadlocks import (
    test_look_beside_the_victims_look_ends_no_second_wait,
    test_victim_is_the_youngest_and_learns_the_whole_cycle,
    test_ways_that_part_and_meet_again_are_no_cycle,
)
from tests.robustness.mutations import Edit
from tests.support.waits import WaitGraph

FIND, LOOK = "02_find_cycle.sql", "10_look_for_deadlock.sql"

NO_SHORT_CUT = Edit(FIND, "IF bound_sessions IS NULL AND NOT EXISTS (", "IF false AND NOT EXISTS (")
"""Leaves the search to the loop, where a mistake can be made. The query before it answers most calls."""

VISITED = "                CONTINUE WHEN seen.attempt = ANY (attempts);\n"


def check_look_of_a_waiter_outside_a_cycle_ends(owner: psycopg.Connection, graph: WaitGraph) -> None:
    """The server cancels a look that never ends. No client dies, which would end the search too."""
    ring = graph.ring(3)
    tail = graph.add("tail").hold("t").wait("l0")
    for participant in (*ring, tail):
        participant.note()
    owner.execute("UPDATE lock_clients SET seen_until = 'infinity'")
    owner.execute("SET statement_timeout = '5 s'")
    assert tail.look() == (False, None)


def check_look_costs_the_same_in_a_graph_ten_times_as_large(owner: psycopg.Connection) -> None:
    """Each waits for the next one. The first of 1,000 and the first of 10,000 look in turn."""
    client = uuid.uuid4()
    owner.execute("INSERT INTO lock_clients VALUES (%s, 'infinity')", [client])
    for prefix, size in (("a", 1_000), ("b", 10_000)):
        owner.execute(
            "INSERT INTO distributed_locks (name, token, expires_at, holder)"
            " SELECT %s || n, n + %s, 'infinity', 'p' || n FROM generate_series(1, %s) AS n",
            [prefix, size * 10, size],
        )
        owner.execute(
            "INSERT INTO lock_tickets (name, number, attempt, client, holder, since)"
            " SELECT %s || n + 1, n, lpad(to_hex(n + %s), 32, '0')::uuid, %s, 'p' || n, now()"
            " FROM generate_series(1, %s) AS n",
            [prefix, size * 10, client, size - 1],
        )
    owner.execute(
        "INSERT INTO waiting_holds SELECT t.attempt, l.token, t.name FROM lock_tickets AS t"
        " JOIN distributed_locks AS l ON l.name = left(t.name, 1) || t.number"
    )
    owner.execute("ANALYZE")
    took: dict[str, list[float]] = {"a": [], "b": []}
    for _ in range(5):
        for prefix, size in (("a", 1_000), ("b", 10_000)):
            began = time.monotonic()
            row = owner.execute(
                "SELECT victim FROM look_for_deadlock(%s, %s, %s)",
                [f"{prefix}2", uuid.UUID(int=size * 10 + 1), [size * 10 + 1]],
            ).fetchone()
            took[prefix].append(time.monotonic() - began)
            assert row == (False,)
    assert min(took["b"]) < 3 * min(took["a"]), took


def _looks_only_when_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadlockWatch, "seconds_left", lambda self: math.inf)
    monkeypatch.setattr(DeadlockWatch, "due", property(lambda self: self._waiter.must_look))


BUGS = (
    PeerBug(
        ("matrixone#26302",),
        "Waits that part and meet again are taken for a cycle.",
        test_ways_that_part_and_meet_again_are_no_cycle,
        edits=(
            NO_SHORT_CUT,
            Edit(
                FIND,
                VISITED,
                "                IF seen.attempt = ANY (attempts) THEN closing := seen.token; EXIT search; END IF;\n",
            ),
        ),
    ),
    PeerBug(
        ("matrixone#27542",),
        "Every waiter that finds the cycle ends its own wait, so both sides of a deadlock are victims.",
        test_look_beside_the_victims_look_ends_no_second_wait,
        edits=(
            Edit(LOOK, "IF found_cycle.youngest <> look_for_deadlock.attempt THEN", "IF false THEN"),
            Edit(
                LOOK, "        ORDER BY t.attempt, t.name\n        FOR UPDATE;", "        ORDER BY t.attempt, t.name;"
            ),
            Edit(LOOK, "IF found_cycle.youngest = look_for_deadlock.attempt THEN", "IF cycle IS NOT NULL THEN"),
        ),
    ),
    PeerBug(
        ("eloq#542",),
        "The search runs only when something else happens, so it stops when everything is blocked.",
        test_waiter_looks_after_half_a_second_and_again,
        patch=_looks_only_when_woken,
    ),
    PeerBug(
        ("muscle3#395",),
        "The search of a waiter outside the cycle runs around the cycle for ever.",
        check_look_of_a_waiter_outside_a_cycle_ends,
        edits=(
            NO_SHORT_CUT,
            Edit(FIND, VISITED, ""),
            Edit(FIND, "OR here > 500", ""),
        ),
        failures=(psycopg.errors.QueryCanceled,),
        second_stage=True,
    ),
    PeerBug(
        ("bernstein#4673",),
        "No call adds the holds to the graph, so it stays empty and no cycle is ever found.",
        test_victim_is_the_youngest_and_learns_the_whole_cycle,
        edits=(Edit(LOOK, "FROM unnest(noted) AS n\n", "FROM unnest(noted) AS n WHERE false\n"),),
    ),
    PeerBug(
        ("citus#3515",),
        "The search visits the whole graph of waits, however large it is.",
        check_look_costs_the_same_in_a_graph_ten_times_as_large,
        edits=(Edit(FIND, "FROM reached AS r LIMIT 500)", "FROM reached AS r)"),),
        second_stage=True,
    ),
)
