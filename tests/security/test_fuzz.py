"""Fuzz the functions that roles may call: the server survives, no lock is lost, and every refusal is an intended error.

Sessions of each kind of role concurrently call every function that they may call, with extreme arguments. Triggers
watch the tables, and a bystander holds a lock and a fenced key. At the end the server must not have crashed, every
error must be an intended one, no token may ever have been lowered, and the bystander's lock must be unchanged.

A failure prints its seed. Set DBLOCK_FUZZ_SEED to repeat it. With --nightly it runs for ten minutes
(DBLOCK_FUZZ_SECONDS).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from tests.security.conftest import Connect
from tests.security.fuzzing import HELD, INTENDED, Fuzzer

SEED = os.environ.get("DBLOCK_FUZZ_SEED") or secrets.token_hex(4)
MAX_SURPRISES = 5
"""The number of surprises after which a fuzzer stops."""
WATCHED = "the bystander"

GUARDS = """
CREATE TABLE public.violations (what text, was text, became text);
CREATE FUNCTION public.watch_lock() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path TO pg_catalog AS $$
DECLARE
    wrong text := CASE
        -- delete_lock() may delete a lock that is free.
        WHEN TG_OP = 'DELETE' THEN CASE WHEN OLD.expires_at > clock_timestamp() THEN 'a held lock was deleted' END
        WHEN OLD.token > 0 AND NEW.token > 0 AND NEW.token < OLD.token THEN 'a token was lowered'
        WHEN NEW.token = 0 AND NEW.expires_at > clock_timestamp() THEN 'held without a token'
        WHEN NEW.token <> OLD.token AND OLD.expires_at > clock_timestamp() THEN 'taken from its holder'
        WHEN NEW.token <> OLD.token AND NEW.expires_at <= NEW.granted_at THEN 'granted without a duration'
        WHEN NEW.token = OLD.token AND NEW.expires_at < OLD.expires_at AND NEW.expires_at > '-infinity'
            THEN 'a deadline was brought forward'
        WHEN NEW.expires_at > clock_timestamp() + interval '24:00:01' THEN 'held for more than a day'
        WHEN NEW.last_served_ticket < OLD.last_served_ticket THEN 'a ticket was served twice'
        WHEN OLD.name = 'held' AND OLD.token > 0 AND (
            to_jsonb(OLD) - '{waiting,last_served_ticket}'::text[]
            <> to_jsonb(NEW) - '{waiting,last_served_ticket}'::text[]
        ) THEN 'the bystander''s lock was changed'
    END;
BEGIN
    IF wrong IS NOT NULL THEN
        INSERT INTO public.violations VALUES (wrong, OLD::text, NEW::text);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER UPDATE OR DELETE ON dblock.distributed_locks
    FOR EACH ROW EXECUTE FUNCTION public.watch_lock();
CREATE FUNCTION public.watch_fence() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path TO pg_catalog AS $$
DECLARE
    wrong text := CASE
        WHEN TG_OP = 'DELETE' THEN 'a fence was deleted'
        WHEN (NEW.token, NEW.write_number) < (OLD.token, OLD.write_number) THEN 'a fence was lowered'
        WHEN NEW.token < 0 THEN 'a fence is below zero'
        WHEN octet_length(NEW.resource) NOT BETWEEN 1 AND 1024 THEN 'a resource has an invalid name'
        WHEN NEW.version < OLD.version THEN 'a version went back'
    END;
BEGIN
    IF wrong IS NOT NULL THEN
        INSERT INTO public.violations VALUES (wrong, OLD::text, NEW::text);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER INSERT OR UPDATE OR DELETE ON fenced_store.fences
    FOR EACH ROW EXECUTE FUNCTION public.watch_fence();
CREATE TABLE public.owned (id int PRIMARY KEY, v text);
CREATE TABLE public.parted (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE public.part PARTITION OF public.parted FOR VALUES FROM (0) TO (10);
CREATE VIEW public.seen AS SELECT 1 AS id;
CREATE TABLE public.mine (id int PRIMARY KEY, v text);
"""

AFTERWARDS = {
    "a lock held without a token": "SELECT * FROM dblock.distributed_locks"
    " WHERE token = 0 AND expires_at > clock_timestamp()",
    "a token above the sequence": "SELECT * FROM dblock.distributed_locks, dblock.show_tokens() WHERE token > highest",
    "two grants of one token": "SELECT token FROM dblock.distributed_locks"
    " WHERE token > 0 GROUP BY 1 HAVING count(*) > 1",
    "a ticket above the last number of its queue": "SELECT * FROM dblock.lock_tickets AS t"
    " JOIN dblock.lock_queues AS q ON q.name = t.name WHERE t.number > q.last_ticket",
    "two tickets of one number": "SELECT name, number FROM dblock.lock_tickets GROUP BY 1, 2 HAVING count(*) > 1",
    "a lock without a name": "SELECT * FROM dblock.distributed_locks WHERE octet_length(name) NOT BETWEEN 1 AND 512",
    "a ticket for no lock": "SELECT * FROM dblock.lock_tickets AS t"
    " WHERE NOT EXISTS (SELECT FROM dblock.distributed_locks AS l WHERE l.name = t.name AND l.waiting)",
    "a client that counts as alive for too long": "SELECT * FROM dblock.lock_clients"
    " WHERE seen_until > clock_timestamp() + interval '4 seconds'",
    "a grace without an end": "SELECT * FROM dblock.lock_presence WHERE grace > interval '1 day'",
    "a violation": "SELECT * FROM public.violations",
}
"""Rows that must not be in the tables, whatever was sent."""


def run(
    dsn: str, owner: psycopg.Connection, connect: Connect, kinds: dict[str, str], seed: str, steps: float
) -> list[Fuzzer]:
    """Fuzz with all kinds of roles at once, and return the fuzzers.

    Each fuzzer makes `steps` calls. If `steps` is negative, each runs for that many seconds instead.
    """
    owner.execute(GUARDS.encode())
    owner.execute(f"ALTER TABLE public.mine OWNER TO {kinds['fence']}".encode())
    owner.execute("SELECT raise_tokens(7000000000)")
    bystander = psycopg.connect(dsn, autocommit=True)
    attempt, presence = uuid4(), uuid4()
    bystander.execute("SELECT dblock.register_presence(%s, '1 s')", [presence])
    (token,) = bystander.execute(
        "SELECT token FROM dblock.try_acquire(%s, '1 hour', %s, NULL, %s, presence => %s)",
        [HELD, WATCHED, attempt, presence],
    ).fetchone() or (0,)
    bystander.execute("SELECT fenced_store.write(%s, %s, 1, '1', NULL)", [HELD, token])
    before = owner.execute(
        "SELECT to_jsonb(l) - 'waiting' - 'last_served_ticket' FROM distributed_locks AS l"
    ).fetchone()
    began = owner.execute("SELECT pg_postmaster_start_time()").fetchone()
    tables = [
        oid for (oid,) in owner.execute(
            "SELECT oid::bigint FROM pg_class WHERE relname IN ('owned', 'parted', 'part', 'seen', 'mine', 'mine_pkey',"
            " 'pg_class', 'distributed_locks', 'fences', 'token_sequence')"
        ).fetchall()
    ]  # fmt: skip
    fuzzers = []
    for number, kind in enumerate(("lock", "lock", "lock", "fence", "fence", "see", "force-release")):
        session = connect(kind)
        session.execute("SET statement_timeout = '10s'")
        fuzzers.append(Fuzzer(session, f"{seed}/{number}", tables, frozenset({token, attempt, presence})))
    ends = time.monotonic() - steps

    def work(fuzzer: Fuzzer) -> None:
        while (fuzzer.calls < steps if steps > 0 else time.monotonic() < ends) and len(
            fuzzer.surprises
        ) < MAX_SURPRISES:
            fuzzer.step()

    with ThreadPoolExecutor(len(fuzzers)) as threads:
        list(threads.map(work, fuzzers))
    with bystander:
        held = bystander.execute("SELECT dblock.assert_held(%s, %s)", [HELD, token]).fetchone()
        there = owner.execute("SELECT session FROM lock_presence WHERE presence = %s", [presence]).fetchone()
        assert (held, there) == ((True,), (bystander.info.backend_pid,)), (
            f"the bystander lost its lock or presence, DBLOCK_FUZZ_SEED={seed}"
        )
    after = owner.execute(
        "SELECT to_jsonb(l) - 'waiting' - 'last_served_ticket' FROM distributed_locks AS l WHERE name = %s", [HELD]
    )
    assert after.fetchone() == before, f"the bystander's lock was changed, DBLOCK_FUZZ_SEED={seed}"
    assert owner.execute("SELECT pg_postmaster_start_time()").fetchone() == began
    return fuzzers


def faults(owner: psycopg.Connection, fuzzers: list[Fuzzer], seed: str) -> str:
    """Return every violation as text, or an empty text."""
    found = [f"{one.seed}: {surprise}" for one in fuzzers for surprise in one.surprises]
    for what, question in AFTERWARDS.items():
        found += [f"{what}: {row}"[:400] for row in owner.execute(question.encode()).fetchmany(3)]
    found += crashes(owner)
    return "\n".join([f"DBLOCK_FUZZ_SEED={seed}", *found]) if found else ""


def crashes(owner: psycopg.Connection) -> list[str]:
    """Return the crashes in the server's log, if the log can be read."""
    (folder,) = owner.execute("SHOW data_directory").fetchone() or ("",)
    log = Path(folder).parent / "log"
    if not log.is_file():
        return []
    return re.findall(
        r"^.*(?:PANIC|TRAP|terminated by signal|was terminated|XX000).*$", log.read_text(errors="replace"), re.M
    )


@pytest.mark.second_stage
def test_functions_survive_random_arguments(
    dsn: str, owner: psycopg.Connection, connect: Connect, kinds: dict[str, str]
) -> None:
    fuzzers = run(dsn, owner, connect, kinds, SEED, 250)
    assert not (found := faults(owner, fuzzers, SEED)), found
    called = {(one.schema, one.name) for fuzzer in fuzzers for one in fuzzer.functions}
    assert len(called) > 40, "the functions that roles may call, of both schemas"
    assert sum(fuzzer.outcomes.get("done", 0) for fuzzer in fuzzers) > 200, "too few calls succeeded"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_functions_survive_ten_minutes_of_random_arguments(
    dsn: str, owner: psycopg.Connection, connect: Connect, kinds: dict[str, str]
) -> None:
    fuzzers = run(dsn, owner, connect, kinds, SEED, -float(os.environ.get("DBLOCK_FUZZ_SECONDS", "600")))
    assert not (found := faults(owner, fuzzers, SEED)), found
    print(sum(fuzzer.calls for fuzzer in fuzzers), "calls; seed", SEED)
    outcomes = {state for fuzzer in fuzzers for state in fuzzer.outcomes}
    assert {"done", "22023", "42501", "FEN01", "FEN03", "FEN04"} <= outcomes <= {"done", *INTENDED}
