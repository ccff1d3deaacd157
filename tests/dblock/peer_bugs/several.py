"""Mistakes of several locks that are acquired together."""

from __future__ import annotations

from tests.dblock.peer_bugs import PeerBug
from tests.dblock.sql.test_several import (
    test_abandon_gives_everything_back_in_one_call,
    test_bad_arguments_are_refused,
)
from tests.robustness.mutations import Edit

ORDER, ABANDON = "01_order.sql", "12_abandon_all.sql"

BUGS = (
    PeerBug(
        ("redisson#4456",),
        "A caller that is interrupted gives back some of the locks, and the others stay held.",
        test_abandon_gives_everything_back_in_one_call,
        edits=(Edit(ABANDON, "ORDER BY 1 LOOP", "ORDER BY 1 LIMIT 1 LOOP"),),
    ),
    PeerBug(
        ("redisson#1160", "madelson#236", "madelson#248"),
        "Each caller acquires the locks in its own order, so two callers wait for each other.",
        test_bad_arguments_are_refused,
        arguments={"call": "acquire_all('{b,a}', attempt => gen_random_uuid())", "message": "sorted"},
        edits=(Edit(ORDER, "    IF sorted AND names <>", "    IF false AND names <>"),),
    ),
)
