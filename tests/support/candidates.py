"""A process with several candidates of one election, for tests that kill, freeze and cut off leaders.

    python -m tests.support.candidates '{"dsn": …, "direct": …, "process": "p0", "candidates": 4, "ttl": 2.0}'

Each candidate has a client of its own. Its body records each moment at which `is_leader()` is true, and writes under
the fence over a connection that no fault of the network reaches. All times are from the machine's one monotonic clock.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import psycopg

import dblock
from tests.support.orphans import die_with_parent

ELECTION = "e"
LOCK = f"election:{ELECTION}"

TABLES = """
CREATE TABLE public.accepted (number bigserial, token bigint NOT NULL);
CREATE TABLE public.believed (token bigint PRIMARY KEY, since float8, until float8);
"""


def lead(election: dblock.Election, direct: str, term: dblock.Term) -> None:
    """Write while the term is believed, and report from when to when that was."""
    with psycopg.connect(direct, autocommit=True) as connection:
        while not term.ending.is_set():
            before = time.monotonic()
            if not election.is_leader():
                return
            after = time.monotonic()
            # The first true reply came before `after`, the last one after `before`.
            connection.execute(
                "INSERT INTO public.believed VALUES (%s, %s, %s)"
                " ON CONFLICT (token) DO UPDATE SET until = excluded.until",
                [term.token, after, before],
            )
            with connection.transaction():
                try:
                    term.fence(connection)
                except dblock.LeaseLost:
                    return
                connection.execute("INSERT INTO public.accepted (token) VALUES (%s)", [term.token])
            term.wait(0.02)


def main() -> None:
    """Run the candidates until standard input ends."""
    die_with_parent()
    config: dict[str, Any] = json.loads(sys.argv[1])
    elections = []
    for number in range(config["candidates"]):
        client = dblock.Client(config["dsn"], holder=f"{config['process']}.{number}", patience=2.0, pool_size=2)
        election = client.election(ELECTION, ttl=config["ttl"])
        elections.append(election)

        def body(term: dblock.Term, election: dblock.Election = election) -> None:
            lead(election, config["direct"], term)

        threading.Thread(target=election.run, args=(body,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    for election in elections:
        election.stop()


if __name__ == "__main__":
    main()
