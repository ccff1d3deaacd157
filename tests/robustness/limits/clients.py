"""Many clients: what each takes of the server and of its process, and what happens when there is not room for all."""

from __future__ import annotations

import time
from collections import Counter

import psycopg
from psycopg import conninfo

from dblock.admin import schema
from tests.robustness.limits import Break, Measured, Progress, server_with, wait_until
from tests.robustness.limits.crowds import Crowds
from tests.robustness.soak.measures import _own_memory

CONNECTIONS = 3
"""That a client has from its first lease on: for calls, for the keep-alive, for the listener."""

APP = "app"


def measure(
    processes: int = 5, clients: int = 100, durable: bool = True, progress: Progress = lambda _: None
) -> Measured:
    """Have so many clients hold a lock each, on a server that has room for all."""
    total = processes * clients
    found = Measured(f"{total} clients in {processes} processes")
    with server_with(durable, max_connections=str(total * CONNECTIONS + 20)) as server:
        dsn = prepared(server.url)
        with Crowds(dsn, processes, clients, ttl=30) as crowds, psycopg.connect(server.url, autocommit=True) as owner:
            progress(f"{total} clients begin")
            began = time.monotonic()
            took = crowds.all("take")
            begun = time.monotonic() - began
            count = "SELECT pid FROM pg_stat_activity WHERE usename = 'app'"
            wait_until("all connected", lambda: len(owner.execute(count).fetchall()) >= total * CONNECTIONS)
            pids = [pid for (pid,) in owner.execute(count).fetchall()]
            memory = sum(map(_own_memory, pids)) / len(pids)
            progress("all wait for one lock")
            began = time.monotonic()
            served = crowds.all("serve")
            serving = time.monotonic() - began
            looked = crowds.all("look")
            crowds.all("go")
            wait_until("all gone", lambda: not owner.execute(count).fetchall())
            left = [
                owner.execute(f"SELECT count(*) FROM dblock.{table}".encode()).fetchone()
                for table in ("lock_presence", "lock_tickets", "lock_clients")
            ]
    found.numbers |= {"connections": len(pids) / total, "memory": took["memory"] / total}
    found.figures |= {
        "connections of each client": f"{len(pids) / total:.2f}",
        "memory of each client, in its process": f"{took['memory'] / total:.0f} kB",
        "memory of each connection, in the server": f"{memory:.1f} MB, besides what all share",
        "all have their first lock": f"after {begun:.1f} s",
        "all have had one and the same lock": f"after {serving:.1f} s, {total / serving:.0f} hand-offs a second",
    }
    found.claims |= {
        "all have a lock of their own": took["holds"] == total and not took["errors"],
        "all were served": served["served"] == total and not served["errors"],
        "no lease was lost": looked["holds"] == total,
        "nothing is left of them when they have gone": left == [(0,)] * 3,
    }
    if took["errors"] or served["errors"]:
        found.figures["errors"] = str((took["errors"] + served["errors"]).most_common(3))
    return found


def measure_without_room(
    processes: int = 4, clients: int = 25, room: int = 100, ttl: float = 3.0, progress: Progress = lambda _: None
) -> Measured:
    """Have more clients begin than the server has room for; then let some of them go."""
    total = processes * clients
    found = Measured(f"{total} clients on a server with max_connections = {room}")
    with server_with(True, max_connections=str(room)) as server:
        dsn = prepared(server.url)
        with Crowds(dsn, processes, clients, ttl) as crowds:
            progress(f"{total} clients begin")
            first = crowds.all("take")
            time.sleep(2 * ttl)  # what is held has to be renewed several times meanwhile
            progress("those without try again")
            again = crowds.all("take")
            kept = crowds.all("look")
            progress("half of the processes go")
            crowds.all("go", only=processes // 2)
            rest = Crowds(dsn, 1, 1, ttl)
            with rest:
                began = time.monotonic()
                wait_until("there is room", lambda: rest.all("take")["holds"] == 1, patience=30)
                recovered = time.monotonic() - began
                rest.all("go")
            crowds.all("go")
    errors: Counter[str] = first["errors"] + again["errors"]
    words = sorted(errors)
    found.numbers |= {"held": first["holds"], "refused": sum(first["errors"].values())}
    found.figures |= {
        "have a lock": f"{first['holds']} of {total}",
        "the others are told": "; ".join(f"`{one}`" for one in words[:4]),
        f"leases held after {2 * ttl:g} s of that, ttl {ttl:g} s": f"{kept['holds']}; lost: {dict(kept['lost']) or 0}",
        "a new client has a lock once others have gone": f"after {recovered:.2f} s",
    }
    found.claims |= {
        "those who cannot connect are told so": bool(errors) and all(_is_clear(one) for one in errors),
        "no lease was lost": not kept["lost"],
        "it is over as soon as there is room": recovered < 10,
    }
    found.breaks.append(
        Break("connections: three for each client", "those who come too late get an error at once", f"`{words[0]}`")
        if words
        else Break("connections", "not reached", "")
    )
    return found


def prepared(server: str) -> str:
    """Install what an application needs, and return the DSN of its role: one without the right to reserved room."""
    schema.install(server)
    with psycopg.connect(server, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {APP} LOGIN")
    schema.grant(server, APP)
    return conninfo.make_conninfo(server, user=APP)


def _is_clear(error: str) -> bool:
    return error.startswith("Unavailable: ") and ("too many clients" in error or "connection slots" in error)
