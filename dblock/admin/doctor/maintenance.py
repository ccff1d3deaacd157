"""Check that dblock's tables stay small: updates within a page, vacuum running, no bloat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dblock.admin.doctor.patient import Check, Finding, Patient, server_check

UPDATES, HOT = 1000, 0.9
"""After this many updates of a table, at least this part of them should have stayed within their page."""

MADE_FOR_HOT = {"distributed_locks": 50, "lock_clients": 50, "lock_presence": 50, "lock_queues": 50}
"""The tables whose updates can all stay within their page, and their original fillfactor."""

DEAD, DEAD_TO_LIVE = 50_000, 5
"""This many dead row versions are too many, if they are also this many times the live rows."""

BYTES, BYTES_A_ROW = 16 * 2**20, 8192
"""A table above this size should take less than a page per row. A row takes at most half a page."""


class _Table(NamedTuple):
    name: str
    updates: int
    hot: int
    dead: int
    live: int
    """-1 if unknown."""
    size: int
    options: list[str]
    indexes: list[str]
    """The indexes other than the primary key and the one of shares."""


def hot_updates(patient: Patient) -> Iterator[Finding]:
    """Check that updates stay within their page."""
    for table in _tables(patient):
        if table.name not in MADE_FOR_HOT or table.updates < UPDATES or table.hot >= HOT * table.updates:
            continue
        name = patient.within(table.name)
        expected = f"fillfactor={MADE_FOR_HOT[table.name]}"
        reset = f"SELECT pg_stat_reset_single_table_counters('{name.replace(chr(39), chr(39) * 2)}'::regclass);"
        if table.indexes:
            cause = f"It has indexes that are not dblock's: {', '.join(table.indexes)}."
            command = " ".join(f"DROP INDEX {patient.within(index)};" for index in table.indexes)
        elif expected not in table.options:
            given = next((one for one in table.options if one.startswith("fillfactor=")), "fillfactor=100")
            cause = f"It has {given}, not {expected}."
            command = f"ALTER TABLE {name} SET ({expected}); VACUUM FULL {name};"
        else:
            cause = "It is unaltered, so its pages must have been full because of an old snapshot, past or present."
            command = f"VACUUM {name};"
        yield Finding(
            "warning",
            f"Of {table.updates} updates of {table.name} {table.hot / table.updates:.0%} stayed within their page; "
            f"{HOT:.0%} or more should. {cause}",
            "Each of the others writes to every index and leaves work for vacuum: grants get slower and the table "
            "grows.",
            f"{command} {reset}",
        )


def bloat(patient: Patient) -> Iterator[Finding]:
    """Find tables that are mostly dead rows, or mostly empty."""
    for table in _tables(patient):
        name = patient.within(table.name)
        if table.dead >= DEAD and table.live >= 0 and table.dead > DEAD_TO_LIVE * table.live:
            yield Finding(
                "warning",
                f"{table.name} has {table.dead} dead row versions to {table.live} rows.",
                "Every search for a lock's row reads past them. Vacuum has not run, or could not remove them because "
                "of an old snapshot.",
                f"VACUUM {name};",
            )
        elif table.live >= 0 and table.size > BYTES and table.size > BYTES_A_ROW * table.live:
            yield Finding(
                "warning",
                f"{table.name} takes {table.size / 2**20:.0f} MB for {table.live} rows.",
                "Listing and reaping read all of it.",
                f"VACUUM FULL {name}; at a quiet time, because all calls wait for its end.",
            )


@server_check
def autovacuum(patient: Patient) -> Iterator[Finding]:
    """Check that autovacuum runs."""
    why = "Nothing cleans up after updates that did not stay within their page, so tables only grow."
    for name in ("autovacuum", "track_counts"):
        if patient.setting(name).value == "off":
            yield Finding(
                "warning",
                f"The server runs with {name} = off.",
                why,
                f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf();",
            )
    for table in _tables(patient) if patient.usable else []:
        off = [one for one in table.options if one.startswith("autovacuum_enabled=")]
        if off and off[0].partition("=")[2].lower() in ("off", "false", "no", "0", "f", "n", "of"):
            yield Finding(
                "warning",
                f"Table {table.name} has {off[0]}.",
                why,
                f"ALTER TABLE {patient.within(table.name)} RESET (autovacuum_enabled);",
            )


def _tables(patient: Patient) -> list[_Table]:
    rows = patient.rows(
        "SELECT c.relname::text, coalesce(s.n_tup_upd, 0), coalesce(s.n_tup_hot_upd, 0), coalesce(s.n_dead_tup, 0),"
        # After a crash the counters start again; vacuum's last count is then the better estimate, if there is one.
        " CASE WHEN coalesce(s.n_live_tup, 0) = 0 THEN c.reltuples::bigint ELSE s.n_live_tup END,"
        " pg_relation_size(c.oid), coalesce(c.reloptions, '{}'),"
        " ARRAY(SELECT x.relname::text FROM pg_index AS i JOIN pg_class AS x ON x.oid = i.indexrelid"
        "  WHERE i.indrelid = c.oid AND NOT i.indisprimary AND x.relname <> 'distributed_locks_head_idx' ORDER BY 1)"
        " FROM pg_class AS c LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid"
        " WHERE c.relnamespace = $1 AND c.relkind = 'r' ORDER BY 1",
        patient.oid,
    )
    return [_Table(*row) for row in rows]


CHECKS = (Check(hot_updates), Check(bloat), autovacuum)
