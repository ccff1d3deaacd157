"""Bugs in the tokens: minted too early, issued twice, issued out of order, or not durable."""

from __future__ import annotations

from tests.robustness.mutations import Bug, Edit
from tests.support.mutants import TOKEN_IN_VALUES

GRANT = "10_try_acquire.sql"
MINTING = "minted := pg_catalog.nextval('token_sequence'::pg_catalog.regclass);"
UNCHECKED = Edit(
    GRANT, "EXIT WHEN minted > last_token AND minted >= date_part('epoch', moment) * 1000000 - 1000000;", "EXIT;"
)
"""Grants under a token that is not above the last one of its lock, or far behind the clock."""
LEAP = (
    Edit("03_token_clock.sql", "highest < clock - second OR (highest < clock AND NOT started)", "false"),
    Edit("03_token_clock.sql", "target := highest + second;", "target := highest + (1::bigint << 40);"),
    Edit(GRANT, " AND minted >= date_part('epoch', moment) * 1000000 - 1000000", ""),
)
"""Moves the tokens by a fixed number at each start of a server, and otherwise not at all."""
FIRST_LOOK = "        SELECT l.token, l.minted_server_start, l.last_served_ticket"
CROWD = {"locks": 1, "tried": 0.7, "long": 0.0}

BUGS = (
    Bug(
        "token in VALUES",
        "mints the token in the VALUES of an upsert, before it is known whether the row is free",
        ("token order",),
        options=CROWD,
        sql=TOKEN_IN_VALUES.replace(
            "nextval('token_sequence'), try_acquire.holder,",
            "nextval('token_sequence'),"
            " try_acquire.holder || left(pg_sleep(0.1 * (random() < 0.3)::integer)::text, 0),",
        ),
    ),
    Bug(
        "token minted early",
        "mints the token before it has locked the lock's row",
        ("token order",),
        options=CROWD,
        slow_edits=(
            Edit(
                GRANT,
                "    LOOP\n" + FIRST_LOOK,
                "    PERFORM pg_sleep(0.1) WHERE random() < 0.3;\n    LOOP\n" + FIRST_LOOK,
            ),
        ),
        edits=(
            Edit(GRANT, "    ready boolean;\n", "    ready boolean;\n    early bigint := nextval('token_sequence');\n"),
            Edit(GRANT, MINTING, "minted := early;"),
            UNCHECKED,
        ),
    ),
    Bug(
        "row deleted on release",
        "counts the tokens in the lock's row, and deletes the row when the lock is released",
        ("token order",),
        workers=2,
        seconds=0.5,
        options=CROWD,
        edits=(
            Edit(GRANT, MINTING, "minted := last_token + 1;"),
            UNCHECKED,
            Edit(
                "30_release.sql",
                "        RETURN true;\n",
                "        DELETE FROM distributed_locks AS l WHERE l.name = release.name;\n        RETURN true;\n",
            ),
        ),
    ),
    *(
        Bug(
            f"leap at a {event}",
            f"leaps by 2^40 at each start of a server instead of following the clock ({event})",
            ("token order",),
            fault=fault,
            strikes=2,
            workers=3,
            options={"hold": 0, "locks": 16},
            edits=LEAP,
        )
        for event, fault in (("sibling promotion", "promotion-sibling"), ("flip-back", "flip-back"))
    ),
    Bug(
        "sequence with a cache",
        "lets every session cache twenty numbers of the sequence, and does not compare them with the lock's last token",
        ("token order",),
        edits=(UNCHECKED,),
        sql="ALTER SEQUENCE token_sequence CACHE 20",
    ),
)
