"""The session contract: what every session that runs DDL carries.

Postgres does not look at the client's socket while a statement runs, so killing a migrator does not stop its statement.
The contract makes the server look once a second, and marks the session with its grant, so that other replicas can find
it and end it.
"""

from __future__ import annotations

MIN_TTL, MAX_TTL = 2.0, 86_400.0
DEFAULT_TTL = 15.0

IDLE_TTLS = 10
"""A transaction that is idle for this many ttls is ended by the server itself, in case no replica is left to do it."""

LOCK_TIMEOUT = 5.0
"""Seconds that a statement in a transaction waits for a table. Traffic that comes later waits behind the statement."""


def session_settings(mark: str, ttl: float) -> dict[str, str]:
    """Return the settings of a session that runs DDL for the grant with this mark."""
    return {
        "application_name": mark,
        "client_connection_check_interval": "1s",
        "tcp_keepalives_idle": "5",
        "tcp_keepalives_interval": "2",
        "tcp_keepalives_count": "3",
        "idle_in_transaction_session_timeout": f"{int(ttl * IDLE_TTLS * 1000)}ms",
        # A role's statement_timeout would cut an index build.
        "statement_timeout": "0",
    }


def environment(mark: str, ttl: float, name: str, token: int, given: str | None, *, options: bool) -> dict[str, str]:
    """Return the variables that hand the contract down to a program that uses libpq.

    `given` is the PGOPTIONS of the caller, which stays and counts less. A pooler may refuse options: without them the
    program's sessions carry only their mark.
    """
    variables = {"PGAPPNAME": mark, "DBLOCK_LOCK": name, "DBLOCK_TOKEN": str(token)}
    if options:
        settings = session_settings(mark, ttl)
        del settings["application_name"]
        settings["dblock.migration"] = f"{token}"
        ours = " ".join(f"-c {key}={_escaped(value)}" for key, value in settings.items())
        variables["PGOPTIONS"] = f"{given} {ours}" if given else ours
    return variables


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")
