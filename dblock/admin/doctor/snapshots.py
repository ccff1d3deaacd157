"""Find what holds back vacuum from dblock's tables: old transactions, prepared ones, replication slots.

Only real causes are reported. A read-only snapshot counts only in its own database. A transaction that has written
holds back vacuum in all databases. A session that is in a transaction without a snapshot holds back nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from dblock._core.options import literal
from dblock.admin.doctor.patient import MONITOR, CannotCheck, Finding, Patient, server_check

LONGEST_QUERY = 100

MANY = 1_000
"""The number of transactions since a snapshot was taken from which one in a busy session counts as old."""

SLOT_UNUSED, SLOT_IN_USE = 10_000, 1_000_000
"""Transactions that a slot may lag: unused, on a server that does not record since when; and in use."""

WHY = "Row versions that it might still need are kept, and every grant leaves some: tables grow, and grants get slower."


@server_check
def old_snapshot(patient: Patient) -> Iterator[Finding]:
    """Find the oldest transactions."""
    limit = patient.limits.snapshot_age
    for pid, role, application, database, state, age, query in patient.rows(
        "SELECT a.pid, a.usename::text, a.application_name, a.datname::text, a.state,"
        " date_part('epoch', clock_timestamp() - a.xact_start),"
        " left(regexp_replace(a.query, '\\s+', ' ', 'g'), 101)"
        " FROM pg_stat_activity AS a"
        " WHERE a.pid <> pg_backend_pid() AND a.xact_start < clock_timestamp() - make_interval(secs => $1)"
        " AND a.backend_type NOT IN ('autovacuum worker', 'autovacuum launcher', 'walsender', 'parallel worker')"
        # Vacuum does not hold back vacuum.
        " AND a.pid NOT IN (SELECT v.pid FROM pg_stat_progress_vacuum AS v)"
        " AND (a.backend_xid IS NOT NULL OR (a.backend_xmin IS NOT NULL AND a.datname = current_database() AND ("
        #   Between two statements, or in a long one, the snapshot is old. In a short one it may be new.
        "   a.state <> 'active' OR a.query_start < clock_timestamp() - make_interval(secs => $1)"
        "   OR (age(a.backend_xmin) > $2 AND NOT EXISTS ("
        "    SELECT FROM pg_stat_activity AS o WHERE o.pid <> a.pid AND o.backend_xid = a.backend_xmin)))))"
        " ORDER BY a.xact_start LIMIT 5",
        limit,
        MANY,
    ):
        cut = query if len(query) <= LONGEST_QUERY else f"{query[:LONGEST_QUERY]}…"
        named = f" {application!r}" if application else ""
        yield Finding(
            "warning",
            f"Process {pid}{named} of role {role!r}, in database {database!r}, has been in a transaction for "
            f"{age:.0f} s ({state}): {cut}",
            WHY,
            f"SELECT pg_terminate_backend({pid});",
        )
    hidden = patient.rows(
        "SELECT 1 FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND usesysid <> 0 AND backend_type IS NULL LIMIT 1"
    )
    if hidden:
        raise CannotCheck(MONITOR)


@server_check
def prepared_transaction(patient: Patient) -> Iterator[Finding]:
    """Find transactions that were prepared and never ended."""
    for gid, owner, database, age in patient.rows(
        "SELECT p.gid, p.owner::text, p.database::text, date_part('epoch', clock_timestamp() - p.prepared)"
        " FROM pg_prepared_xacts AS p WHERE p.prepared < clock_timestamp() - make_interval(secs => $1)"
        " ORDER BY p.prepared LIMIT 5",
        patient.limits.snapshot_age,
    ):
        yield Finding(
            "warning",
            f"Transaction {gid!r} of role {owner!r} in database {database!r} was prepared {age:.0f} s ago and has "
            "not ended.",
            WHY + " It also keeps its locks, and survives a restart.",
            f"ROLLBACK PREPARED {literal(gid)}; in database {database!r}, or COMMIT PREPARED, as its coordinator says.",
        )


@server_check
def replication_slot(patient: Patient) -> Iterator[Finding]:
    """Find replication slots that hold back vacuum."""
    # Servers before 17 do not record since when a slot is inactive.
    moment = "s.inactive_since" if patient.version >= 170_000 else "NULL::timestamptz"
    since = f"date_part('epoch', clock_timestamp() - {moment})"
    for name, kind, active, behind, unused in patient.rows(
        f"SELECT s.slot_name::text, s.slot_type, s.active, greatest(age(s.xmin), age(s.catalog_xmin)), {since}"
        " FROM pg_replication_slots AS s WHERE coalesce(s.xmin, s.catalog_xmin) IS NOT NULL ORDER BY 4 DESC"
    ):
        if active:
            is_old = behind >= SLOT_IN_USE
        else:
            is_old = unused > patient.limits.snapshot_age if unused is not None else behind >= SLOT_UNUSED
        if not is_old:
            continue
        use = "is in use" if active else "is not in use"
        if not active and unused is not None:
            use = f"has not been in use for {unused:.0f} s"
        whose = "of dblock's tables and of the catalogs" if kind == "physical" else "of the server's catalogs"
        yield Finding(
            "warning",
            f"Replication slot {name!r} ({kind}) {use} and holds back vacuum by {behind} transactions.",
            f"Row versions {whose} are kept, and so is the WAL since then, until the disk is full.",
            "End the long query on the standby, or turn hot_standby_feedback off there."
            if active
            else f"SELECT pg_drop_replication_slot({literal(name)}); if no consumer needs it any more.",
        )


CHECKS = (old_snapshot, prepared_transaction, replication_slot)
