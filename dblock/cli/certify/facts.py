"""What the server says about itself: its engine, the way to it, and how durable its commits are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dblock._runtime.error_mapping import translated
from dblock._runtime.target import Target
from dblock.admin.probe import Outcome

SERVICES = {
    "rds.": "Amazon RDS",
    "cloudsql.": "Google Cloud SQL",
    "alloydb.": "AlloyDB",
    "azure.": "Azure",
    "neon.": "Neon",
    "citus.": "Citus",
    "yb_": "YugabyteDB",
}
"""How the names of settings begin that a managed service or a derived engine adds."""


@dataclass(frozen=True)
class Facts:
    """The server, as it describes itself."""

    engine: str
    version: str
    service: str | None
    """The managed service or derived engine, by the names of its settings; None for plain Postgres."""
    connection: str
    """One of: direct, pooler, address translation, standby."""
    over: str
    """One of: TCP, Unix socket."""
    fsync: bool
    synchronous_commit: str
    standbys: list[str]
    """Each attached standby with its sync_state; those that the login may not see are left out."""
    synchronous_standby_names: str
    clients_encrypted: bool


def read_facts(target: Target) -> Facts:
    """Read the facts over a connection of its own."""
    with translated("dblock"), target.connect() as connection:
        connection.prepare_threshold = None

        def value(sql: str) -> Any:
            row = connection.execute(sql.encode()).fetchone()
            return row[0] if row else None

        names = {str(name) for (name,) in connection.execute("SELECT name FROM pg_catalog.pg_settings")}
        service = next((label for start, label in SERVICES.items() if any(n.startswith(start) for n in names)), None)
        if value("SELECT to_regproc('pg_catalog.aurora_version') IS NOT NULL"):
            service = "Amazon Aurora"
        engine = str(value("SELECT version()"))
        backend = value("SELECT pg_backend_pid()")
        mode = "pooler" if backend != connection.info.backend_pid else "direct"
        if value("SELECT pg_is_in_recovery()"):
            mode = "standby"
        return Facts(
            engine=engine.split(" on ")[0].split(" (")[0],
            version=str(value("SELECT current_setting('server_version')")),
            service=service,
            connection=mode,
            over="Unix socket" if connection.info.host.startswith("/") else "TCP",
            fsync=value("SELECT current_setting('fsync')") == "on" if "fsync" in names else True,
            synchronous_commit=str(value("SELECT current_setting('synchronous_commit')")),
            standbys=[
                f"{name} ({state})"
                for name, state in connection.execute(
                    "SELECT application_name, sync_state FROM pg_catalog.pg_stat_replication"
                    " WHERE state IN ('streaming', 'catchup')"
                )
            ],
            synchronous_standby_names=str(value("SELECT current_setting('synchronous_standby_names', true)") or ""),
            clients_encrypted=bool(connection.pgconn.ssl_in_use),
        )


def way_to(facts: Facts, outcomes: list[Outcome]) -> str:
    """Return the way to the server, which the probe may know better than the server."""
    translated_addresses = any(one.id == "direct-connection" and one.holds is False for one in outcomes)
    if facts.connection == "direct" and translated_addresses:
        return "address translation"
    return facts.connection
