"""`dblock barriers` shows barriers and latches with what is missing, and deletes them."""

from __future__ import annotations

import psycopg

from tests.support.shell import Shell


def test_barriers_are_shown_with_what_is_missing_and_deleted(shell: Shell, owner: psycopg.Connection) -> None:
    assert "There is no barrier and no latch" in shell.run_here("barriers").err
    owner.execute("SELECT arrive_barrier('step', 3, gen_random_uuid(), gen_random_uuid(), 'web-1')")
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
    owner.execute("SELECT count_down('loaded', 5, 2), count_down('done', 1)")
    rows = [line.split() for line in shell.run_here("barriers").out.splitlines()]
    assert [row[:6] for row in rows[1:]] == [
        ["done", "latch", "1", "open", "-", "-"],
        ["loaded", "latch", "5", "3", "-", "-"],
        ["step", "barrier", "3", "2", "0", "web-1"],
    ]
    (done, _, step) = shell.run_here("barriers", "--json").json["barriers"]
    assert (done["kind"], done["remaining"], step["waiters"][0]["holder"]) == ("latch", 0, "web-1")
    assert shell.run_here("barriers", "delete", "latch", "loaded").out == "Latch 'loaded' is deleted.\n"
    deleted = shell.run_here("barriers", "delete", "barrier", "step")
    assert deleted.out == "Barrier 'step' is deleted. Clients that still wait create it again: 1 of them waited.\n"
    again = shell.run_here("barriers", "delete", "barrier", "step")
    assert (again.code, "There is no barrier 'step'" in again.err) == (1, True)
    assert shell.run_here("barriers", "delete", "lock", "step").code == 2
