"""Check that acknowledged grants survive a crash or a failover."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dblock.admin.doctor.patient import MONITOR, CannotCheck, Check, Finding, Patient, server_check
from dblock.admin.doctor.settings import effective_settings, fix_for


@server_check
def fsync(patient: Patient) -> Iterator[Finding]:
    """Check that the server waits for its disk."""
    setting = patient.setting("fsync")
    if setting.value == "off":
        yield Finding(
            "error",
            "The server runs with fsync = off.",
            "A crash of the machine can lose acknowledged grants and tokens, and damage the whole cluster. dblock "
            "cannot prevent that.",
            fix_for(patient, setting, "on"),
        )


@server_check
def full_page_writes(patient: Patient) -> Iterator[Finding]:
    """Check that half-written pages can be restored."""
    setting = patient.setting("full_page_writes")
    if setting.value == "off":
        yield Finding(
            "error",
            "The server runs with full_page_writes = off.",
            "A page that was half written when the machine crashed stays damaged, including those of locks and tokens, "
            "unless the file system itself writes pages atomically.",
            fix_for(patient, setting, "on"),
        )


@server_check
def synchronous_commit(patient: Patient) -> Iterator[Finding]:
    """Check that commits are waited for."""
    standbys = patient.setting("synchronous_standby_names").value
    for where, setting in effective_settings(patient, "synchronous_commit"):
        is_off = setting.value.lower() in ("off", "false", "no", "0")
        # Without synchronous standbys `local` is no less than `on`.
        if is_off or (setting.value.lower() == "local" and standbys):
            what = "the disk" if is_off else "the standbys"
            yield Finding(
                "warning",
                f"synchronous_commit is {setting.value} {where}.",
                f"Grants and renewals still wait for {what}, because dblock makes them wait. The application's own "
                "writes under a lock do not, and may be lost in a crash that the grant survives.",
                fix_for(patient, setting, "on"),
            )


@server_check
def async_standbys(patient: Patient) -> Iterator[Finding]:
    """Find standbys that commits do not wait for."""
    if patient.setting("synchronous_standby_names").value:
        return
    names = [
        name
        for name, is_standby in _standbys(patient)
        # Not a backup, a WAL archive or a subscriber: a failover does not go to those.
        if is_standby
    ]
    if names:
        yield Finding(
            "warning",
            f"Standbys are attached, but no commit waits for any of them (synchronous_standby_names is empty): "
            f"{', '.join(map(repr, names))}.",
            "A failover may lose acknowledged grants. Tokens follow the clock, so none repeats. But two clients may "
            "believe that they hold the same lock until the older lease has expired, and only a fence tells them "
            "apart.",
            "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'; SELECT pg_reload_conf(); with at least two "
            "standbys, so that commits do not hang when one is away.",
        )


@server_check
def sync_standby_missing(patient: Patient) -> Iterator[Finding]:
    """Check that the standbys that commits wait for are connected."""
    names = patient.setting("synchronous_standby_names").value
    if not names:
        return
    counted = re.match(r"\s*(?:FIRST\s+|ANY\s+)?(\d+)\s*\(", names, re.IGNORECASE)
    needed = int(counted[1]) if counted else 1
    states = [state for (state,) in patient.rows("SELECT sync_state FROM pg_stat_replication")]
    if None in states:
        raise CannotCheck(MONITOR)
    there = sum(state in ("sync", "quorum") for state in states)
    if there < needed:
        yield Finding(
            "error",
            f"Commits wait for {needed} synchronous standby{'s' * (needed > 1)} "
            f"(synchronous_standby_names = {names!r}), but {there or 'none'} "
            f"{'are' if there > 1 else 'is'} connected.",
            "Every grant and renewal hangs at its commit until a standby connects, so leases are lost.",
            "ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf(); if you cannot start a standby "
            "soon.",
        )


def unlogged(patient: Patient) -> Iterator[Finding]:
    """Find tables that a crash would empty."""
    for name, kind in patient.rows(
        "SELECT c.relname::text, CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END FROM pg_class AS c"
        " WHERE c.relnamespace = $1 AND c.relkind IN ('r', 'S') AND c.relpersistence = 'u'"
        " AND c.relname NOT IN ('lock_presence', 'lock_queues', 'barrier_waiters', 'waiting_holds') ORDER BY 1",
        patient.oid,
    ):
        yield Finding(
            "error",
            f"{kind.capitalize()} {name} is UNLOGGED.",
            "A crash empties it, and a standby does not have it: grants or tokens are lost.",
            f"ALTER {kind} {patient.within(name)} SET LOGGED;",
        )


def _standbys(patient: Patient) -> list[tuple[str, bool]]:
    rows = patient.rows(
        "SELECT coalesce(r.application_name, ''), r.state, r.state IN ('streaming', 'catchup')"
        " AND r.replay_lsn IS NOT NULL AND NOT EXISTS ("
        "  SELECT FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')"
        " FROM pg_stat_replication AS r ORDER BY 1"
    )
    if any(state is None for _, state, _ in rows):
        raise CannotCheck(MONITOR)
    return [(name, bool(is_standby)) for name, _, is_standby in rows]


CHECKS = (
    fsync,
    full_page_writes,
    synchronous_commit,
    async_standbys,
    sync_standby_missing,
    Check(unlogged),
)
