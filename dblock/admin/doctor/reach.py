"""Whether clients can reach the server and stay connected: what stands between, what ends it, how full it is."""

from __future__ import annotations

from collections.abc import Iterator

from dblock.admin.doctor.patient import Check, Finding, Patient, of_server
from dblock.admin.doctor.settings import in_force, mending

CONNECTIONS = 0.9
"""The part of max_connections that may be in use."""

QUEUE, QUEUE_FULL = 0.25, 0.75
"""The part of the queue of notifications that may be in use; and that must not be."""

SHORT_STATEMENT = 1000
"""Milliseconds: a grant that waits for the disk, or for another's commit, may well take as long."""


@of_server
def pooler(patient: Patient) -> Iterator[Finding]:
    """Look whether something between us and the server hands us around."""
    ((backend,),) = patient.rows("SELECT pg_backend_pid()")
    if backend != patient.link.connection.info.backend_pid:
        yield Finding(
            "warning",
            f"A pooler stands in between: the session was called {patient.link.connection.info.backend_pid} and a "
            f"statement ran in backend {backend}.",
            "In transaction mode notifications do not come through, so waiters look several times a second instead, "
            "and a holder that dies keeps its lock until its lease runs out.",
            "Give clients a way past it for their listener: dblock.Client(dsn, listen_dsn='postgresql://…') "
            "(docs/concepts/waiting.md).",
        )


@of_server
def idle_session_timeout(patient: Patient) -> Iterator[Finding]:
    """Look whether sessions that are idle are ended."""
    for where, setting in in_force(patient, "idle_session_timeout"):
        if _milliseconds(setting.value):
            yield Finding(
                "warning",
                f"idle_session_timeout is {_in_ms(setting.value)} {where}.",
                "Sessions that wait are ended: a listener in another language hears no more, and a client's next "
                "call must connect anew. (Python's listeners turn it off for their own session.)",
                mending(patient, setting, "0"),
            )


@of_server
def statement_timeout(patient: Patient) -> Iterator[Finding]:
    """Look whether statements are given too little time."""
    for where, setting in in_force(patient, "statement_timeout"):
        limit = _milliseconds(setting.value)
        if limit is not None and 0 < limit < SHORT_STATEMENT:
            yield Finding(
                "warning",
                f"statement_timeout is {_in_ms(setting.value)} {where}, less than a second.",
                "A grant or renewal that waits for the disk, or for another transaction, is cancelled; leases may be "
                "lost.",
                mending(patient, setting, "0"),
            )


@of_server
def connections(patient: Patient) -> Iterator[Finding]:
    """Look whether there is room for more connections."""
    ((used,),) = patient.rows(
        # Without the right to see more of a session than that it is there, it counts as a client's.
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE coalesce(backend_type, 'client backend') = 'client backend' AND datid <> 0 AND usesysid <> 0"
    )
    most = int(patient.setting("max_connections").value)
    if used > CONNECTIONS * most:
        yield Finding(
            "warning",
            f"{used} of {most} connections are in use.",
            "When there is none left, clients that must connect anew cannot renew what they hold, and lose it.",
            "SELECT usename, application_name, count(*) FROM pg_stat_activity GROUP BY 1, 2 ORDER BY 3 DESC; "
            "shows whose they are. A pooler saves some; a higher max_connections, and a restart, makes room.",
        )


def listeners(patient: Patient) -> Iterator[Finding]:
    """Look how many sessions are there to listen."""
    ((count,),) = patient.rows(
        # A presence is alive while its session holds its mark.
        f"SELECT count(*) FROM {patient.within('lock_presence')} AS p"
        " WHERE p.incarnation = pg_postmaster_start_time() AND EXISTS (SELECT FROM pg_locks AS l"
        "  WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid = p.session"
        "  AND (l.classid::bigint << 32) | l.objid::bigint = p.advisory_key)"
    )
    if count > patient.limits.listeners:
        yield Finding(
            "warning",
            f"{count} clients have a session that listens, more than {patient.limits.listeners}.",
            "Every notification is looked at by every session that listens in this database, so that wake-ups get "
            "slower with their number.",
            "Let a process have one Client and share it; for those who only try, and never wait, "
            "dblock.Client(presence=None). --listeners N if this many are meant.",
        )


@of_server
def notification_queue(patient: Patient) -> Iterator[Finding]:
    """Look whether notifications pile up."""
    ((usage,),) = patient.rows("SELECT pg_notification_queue_usage()")
    if usage > QUEUE:
        yield Finding(
            "error" if usage > QUEUE_FULL else "warning",
            f"The server's queue of notifications is {usage:.0%} full.",
            "A session that listens sits in an open transaction and takes none. When the queue is full, every "
            "release that wakes somebody fails, in every database of the server.",
            "SELECT pid, state, xact_start, query FROM pg_stat_activity WHERE xact_start IS NOT NULL ORDER BY "
            "xact_start; and end the one that listens: SELECT pg_terminate_backend(PID);",
        )


def _milliseconds(value: str) -> float | None:
    """Return what a role's or the server's setting means; None for what only the server can read."""
    if not value:
        return None  # a server that does not have it
    units = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "us": 0.001, "": 1}
    number = value.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        return float(number) * units[value.strip()[len(number) :].strip()]
    except (ValueError, KeyError):
        return None


def _in_ms(value: str) -> str:
    return f"{value} ms" if value.isdigit() else value


CHECKS = (
    pooler,
    idle_session_timeout,
    statement_timeout,
    connections,
    notification_queue,
    Check(listeners),
)
