"""Measure many clients: what each costs the server and its process, and what happens if there are too many."""

from __future__ import annotations

import time
from collections import Counter

import psycopg
from psycopg import conninfo

from dblock.admin import schema
from tests.robustness.limits import Failure, Measured, Progress, server_with
from tests.robustness.limits.crowds import Crowds
from tests.robustness.soak.measures import _own_memory
from tests.support.eventually import eventually

CONNECTIONS = 2
"""Connections of a client that holds a lock: the listener's, and one for calls or for renewals. At work it has both."""

APP = "app"


def measure(
    processes: int = 5, clients: int = 100, durable: bool = True, progress: Progress = lambda _: None
) -> Measured:
    """Let this number of clients hold a lock each, on a server with enough connections for all."""
    total = processes * clients
    found = Measured(f"{total} clients in {processes} processes")
    with server_with(durable, max_connections=str(total * (CONNECTIONS + 1) + 20)) as server:
        dsn = prepare_application(server.url)
        with Crowds(dsn, processes, clients, ttl=30) as crowds, psycopg.connect(server.url, autocommit=True) as owner:
            progress(f"{total} clients begin")
            began = time.monotonic()
            took = crowds.all("take")
            begun = time.monotonic() - began
            count = "SELECT pid FROM pg_stat_activity WHERE usename = 'app'"
            eventually(lambda: len(owner.execute(count).fetchall()) >= total * CONNECTIONS, "all clients are connected")
            pids = [pid for (pid,) in owner.execute(count).fetchall()]
            memory = sum(map(_own_memory, pids)) / len(pids)
            progress("all wait for one lock")
            began = time.monotonic()
            served = crowds.all("serve")
            serving = time.monotonic() - began
            checked = crowds.all("check")
            crowds.all("close_all")
            eventually(lambda: not owner.execute(count).fetchall(), "all clients are disconnected")
            left = [
                owner.execute(f"SELECT count(*) FROM dblock.{table}".encode()).fetchone()
                for table in ("lock_presence", "lock_tickets", "lock_clients")
            ]
    found.numbers |= {"connections": len(pids) / total, "memory": took["memory"] / total}
    found.figures |= {
        "connections of each client": f"{len(pids) / total:.2f}",
        "memory of each client, in its process": f"{took['memory'] / total:.0f} kB",
        "memory of each connection, in the server": f"{memory:.1f} MB, without shared memory",
        "all clients have their first lock": f"after {begun:.1f} s",
        "all have held one and the same lock": f"after {serving:.1f} s, {total / serving:.0f} hand-overs per second",
    }
    found.claims |= {
        "every client has its own lock": took["holds"] == total and not took["errors"],
        "every client was served": served["served"] == total and not served["errors"],
        "no lease was lost": checked["holds"] == total,
        "nothing is left of the clients after they have closed": left == [(0,)] * 3,
    }
    if took["errors"] or served["errors"]:
        found.figures["errors"] = str((took["errors"] + served["errors"]).most_common(3))
    return found


def measure_beyond_limit(
    processes: int = 4, clients: int = 25, room: int = 100, ttl: float = 3.0, progress: Progress = lambda _: None
) -> Measured:
    """Start more clients than the server has connections for, then close some of them."""
    total = processes * clients
    found = Measured(f"{total} clients on a server with max_connections = {room}")
    with server_with(True, max_connections=str(room)) as server:
        dsn = prepare_application(server.url)
        with Crowds(dsn, processes, clients, ttl) as crowds:
            progress(f"{total} clients begin")
            first = crowds.all("take")
            time.sleep(2 * ttl)  # so that leases have to be renewed several times
            progress("the clients without a lock try again")
            again = crowds.all("take")
            kept = crowds.all("check")
            progress("half of the processes close their clients")
            crowds.all("close_all", only=processes // 2)
            newcomer = Crowds(dsn, 1, 1, ttl)
            with newcomer:
                began = time.monotonic()
                eventually(lambda: newcomer.all("take")["holds"] == 1, "there is a free connection")
                recovered = time.monotonic() - began
                newcomer.all("close_all")
            crowds.all("close_all")
    errors: Counter[str] = first["errors"] + again["errors"]
    messages = sorted(errors)
    found.numbers |= {"held": first["holds"], "refused": sum(first["errors"].values())}
    found.figures |= {
        "clients with a lock": f"{first['holds']} of {total}",
        "error of the other clients": "; ".join(f"`{one}`" for one in messages[:4]),
        f"leases held {2 * ttl:g} s later, ttl {ttl:g} s": f"{kept['holds']}; lost: {dict(kept['lost']) or 0}",
        "a new client has a lock once others have closed": f"after {recovered:.2f} s",
    }
    found.claims |= {
        "clients that cannot connect get a clear error": bool(errors) and all(_is_clear(one) for one in errors),
        "no lease was lost": not kept["lost"],
        "a new client can connect as soon as there is a free connection": recovered < 10,
    }
    found.failures.append(
        Failure(
            "connections: two for each client", "clients that come too late get an error at once", f"`{messages[0]}`"
        )
        if messages
        else Failure("connections", "not reached", "")
    )
    return found


def prepare_application(server: str) -> str:
    """Install what an application needs, and return the DSN of its role, which may not use reserved connections."""
    schema.install(server)
    with psycopg.connect(server, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {APP} LOGIN")
    schema.grant(server, APP)
    return conninfo.make_conninfo(server, user=APP)


def _is_clear(error: str) -> bool:
    return error.startswith("Unavailable: ") and ("too many clients" in error or "connection slots" in error)
