"""Install wrong versions of the functions, each with one defect, to prove that the tests of a guarantee can fail."""

from __future__ import annotations

from pathlib import Path

import psycopg

import fenced_store
from dblock.admin.schema import function_files

TOKEN_IN_VALUES = """
CREATE OR REPLACE FUNCTION try_acquire(
    name text, ttl interval DEFAULT '30 seconds', holder text DEFAULT NULL, meta jsonb DEFAULT NULL,
    attempt uuid DEFAULT NULL, durable boolean DEFAULT true,
    retry boolean DEFAULT false, presence uuid DEFAULT NULL, fair boolean DEFAULT true,
    ticket bigint DEFAULT NULL,
    OUT granted boolean, OUT token bigint, OUT expires_at timestamptz, OUT remaining double precision,
    OUT waiting boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO distributed_locks AS l (name, token, holder, granted_at, expires_at)
    VALUES (try_acquire.name, nextval('token_sequence'), try_acquire.holder,
            clock_timestamp(), clock_timestamp() + try_acquire.ttl)
    ON CONFLICT (name) DO UPDATE
    SET token = excluded.token, holder = excluded.holder,
        granted_at = excluded.granted_at, expires_at = excluded.expires_at
    WHERE l.expires_at <= clock_timestamp()
    RETURNING true, l.token, l.expires_at, extract(epoch FROM try_acquire.ttl)
    INTO granted, token, expires_at, remaining;
    granted := coalesce(granted, false);
    remaining := coalesce(remaining, 0);
END $$;
"""


def replace(owner: psycopg.Connection, body: str) -> None:
    """Replace a function with a wrong version, in this test's database."""
    with owner.transaction():
        owner.execute("SET LOCAL search_path TO dblock, pg_temp")
        owner.execute(body.encode())


def altered(file: str, right: str, wrong: str) -> str:
    """Return a function's file with one fragment replaced.

    The file must contain the fragment. Otherwise the mutant would equal the function, and would prove nothing.
    """
    (path,) = (path for path in function_files() if path.name == file)
    text = path.read_text()
    assert right in text, f"{file} no longer contains {right!r}: alter a fragment that it contains"
    return text.replace(right, wrong)


def altered_fence(file: str, right: str, wrong: str) -> str:
    """Return a file of fenced_store's functions with one fragment replaced, which the file must contain."""
    text = (Path(fenced_store.__file__).parent / "sql" / file).read_text()
    assert right in text, f"{file} no longer contains {right!r}: alter a fragment that it contains"
    return text.replace(right, wrong)


def tokens_that_ignore_the_clock(leap: int) -> list[str]:
    """Return the minting of tokens with a leap at each start of a server, whatever the clock."""
    moved = altered("03_token_clock.sql", "highest < clock - second OR (highest < clock AND NOT started)", "false")
    return [
        moved.replace("highest + second;", f"highest + {leap};"),
        altered("10_try_acquire.sql", " AND minted >= date_part('epoch', moment) * 1000000 - 1000000", ""),
    ]
