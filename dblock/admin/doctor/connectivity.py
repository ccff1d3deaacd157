"""Check that clients can connect and stay connected: poolers, timeouts, free connections, notifications."""

from __future__ import annotations

from collections.abc import Iterator

from dblock.admin.doctor.patient import Check, Finding, Patient, server_check
from dblock.admin.doctor.settings import effective_settings, fix_for

CONNECTIONS = 0.9
"""The part of max_connections that may be in use."""

QUEUE, QUEUE_FULL = 0.25, 0.75
"""The parts of the notification queue above which a warning, or an error, is reported."""

SHORT_STATEMENT = 1000
"""Milliseconds: a grant that waits for the disk, or for another commit, may take as long."""


@server_check
def pooler(patient: Patient) -> Iterator[Finding]:
    """Detect a pooler between this client and the server."""
    ((backend,),) = patient.rows("SELECT pg_backend_pid()")
    if backend != patient.link.connection.info.backend_pid:
        yield Finding(
            "warning",
            f"There is a pooler on the path: the connection reported backend "
            f"{patient.link.connection.info.backend_pid}, but a statement ran in backend {backend}.",
            "In transaction mode notifications do not get through. Waiters poll several times a second instead, and "
            "the lock of a holder that dies stays held until its lease expires.",
            "Give clients a direct connection for their listener: dblock.Client(dsn, listen_dsn='postgresql://…') "
            "(docs/concepts/waiting.md).",
        )


@server_check
def idle_session_timeout(patient: Patient) -> Iterator[Finding]:
    """Find settings that end idle sessions."""
    for where, setting in effective_settings(patient, "idle_session_timeout"):
        if _milliseconds(setting.value):
            yield Finding(
                "warning",
                f"idle_session_timeout is {_in_ms(setting.value)} {where}.",
                "Waiting sessions are ended: a listener in another language gets no more notifications, and a client's "
                "next call must reconnect. (Python's listeners turn the setting off for their own session.)",
                fix_for(patient, setting, "0"),
            )


@server_check
def statement_timeout(patient: Patient) -> Iterator[Finding]:
    """Find settings that give statements too little time."""
    for where, setting in effective_settings(patient, "statement_timeout"):
        limit = _milliseconds(setting.value)
        if limit is not None and 0 < limit < SHORT_STATEMENT:
            yield Finding(
                "warning",
                f"statement_timeout is {_in_ms(setting.value)} {where}, less than a second.",
                "A grant or renewal that waits for the disk, or for another transaction, is cancelled, so leases may "
                "be lost.",
                fix_for(patient, setting, "0"),
            )


@server_check
def connections(patient: Patient) -> Iterator[Finding]:
    """Check that there are free connections."""
    ((used,),) = patient.rows(
        # A session whose details this login may not see counts as a client's.
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE coalesce(backend_type, 'client backend') = 'client backend' AND datid <> 0 AND usesysid <> 0"
    )
    most = int(patient.setting("max_connections").value)
    if used > CONNECTIONS * most:
        yield Finding(
            "warning",
            f"{used} of {most} connections are in use.",
            "When none is left, clients that must reconnect cannot renew their leases, and lose them.",
            "SELECT usename, application_name, count(*) FROM pg_stat_activity GROUP BY 1, 2 ORDER BY 3 DESC; "
            "shows who uses them. A pooler saves connections; a higher max_connections needs a restart.",
        )


def listeners(patient: Patient) -> Iterator[Finding]:
    """Count the sessions that listen."""
    ((count,),) = patient.rows(
        # A presence is alive while its session holds its advisory lock.
        f"SELECT count(*) FROM {patient.within('lock_presence')} AS p"
        " WHERE p.incarnation = pg_postmaster_start_time() AND EXISTS (SELECT FROM pg_locks AS l"
        "  WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid = p.session"
        "  AND (l.classid::bigint << 32) | l.objid::bigint = p.advisory_key)"
    )
    if count > patient.limits.listeners:
        yield Finding(
            "warning",
            f"{count} clients have a listening session, more than {patient.limits.listeners}.",
            "Every listening session in this database reads every notification, so wake-ups get slower with their "
            "number.",
            "Share one Client per process. For processes that only try and never wait, use "
            "dblock.Client(presence=None). If this number is intended, pass --listeners N.",
        )


@server_check
def notification_queue(patient: Patient) -> Iterator[Finding]:
    """Check that notifications do not pile up."""
    ((usage,),) = patient.rows("SELECT pg_notification_queue_usage()")
    if usage > QUEUE:
        yield Finding(
            "error" if usage > QUEUE_FULL else "warning",
            f"The server's notification queue is {usage:.0%} full.",
            "A session listens inside an open transaction and takes no notifications. From 90 % on, releases wake no "
            "waiter: waiters find out by themselves, within a second. When the queue is full, every other NOTIFY "
            "fails, in every database of the server.",
            "SELECT pid, state, xact_start, query FROM pg_stat_activity WHERE xact_start IS NOT NULL ORDER BY "
            "xact_start; then end the session that listens: SELECT pg_terminate_backend(PID);",
        )


def _milliseconds(value: str) -> float | None:
    """Return a role's or the server's setting in milliseconds; None if only the server can parse it."""
    if not value:
        return None  # this server does not have the setting
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
