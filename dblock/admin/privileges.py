"""The privileges that a role can be granted, those that it has, and the statements that change them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock.errors import InvalidArgument

if TYPE_CHECKING:
    import psycopg

API = (
    "try_acquire",
    "acquire",
    "heartbeat",
    "register_presence",
    "withdraw_presence",
    "leave_queue",
    "queue",
    "abandon",
    "keep_ticket",
    "acquire_shared",
    "downgrade",
    "resize_semaphore",
    "shared_state",
    "wake_queue",
    "acquire_all",
    "acquire_any",
    "abandon_all",
    "give_way",
    "wake_set",
    "renew",
    "renew_all",
    "release",
    "release_all",
    "assert_held",
    "bind_transaction",
    "look_for_deadlock",
    "holder",
    "migration_state",
    "begin_migration",
    "note_revision",
    "end_migration",
    "migration_sessions",
    "retry_migration",
    "discard_restored_grant",
    "invalid_indexes",
    "join_election",
    "leave_election",
    "begin_term",
    "end_term",
    "publish_value",
    "transfer_term",
    "term_demand",
    "election_leader",
    "list_terms",
    "claim_slot",
    "end_slot",
    "slot_outcome",
    "list_schedules",
    "pause_schedule",
    "resume_schedule",
    "run_schedule",
    "delete_schedule",
    "arrive_barrier",
    "leave_barrier",
    "wake_waiters",
    "count_down",
    "await_latch",
    "latch_remaining",
    "list_barriers",
    "delete_barrier",
    "delete_latch",
    "schema_revision",
    "installation",
)
"""The functions that an application's role may call."""

PRIVILEGES = {
    "lock": API,
    "see": (
        "list_locks",
        "list_waiters",
        "list_history",
        "list_presence",
        "wait_graph",
        "grants_are_recorded",
        "list_migrations",
        "list_guards",
        "list_candidates",
        "list_schedule_events",
        "lock_metrics",
        "list_schedules",
        "slot_outcome",
        "migration_state",
        "invalid_indexes",
        "election_leader",
        "list_terms",
        "list_barriers",
        "schema_revision",
        "installation",
    ),
    "force-release": ("force_release", "wake_queue", "delete_lock", "schema_revision", "installation"),
}
"""Each privilege, and the functions that it allows a role to call."""


def functions(may: Iterable[str]) -> list[str]:
    """Return the functions that these privileges allow."""
    return sorted({function for privilege in may for function in PRIVILEGES[privilege]})


MARKS = {"lock": "try_acquire", "see": "list_locks", "force-release": "force_release"}
"""For each privilege the function whose own grant shows that a role has the privilege (as in 99_privileges.sql)."""


def chosen(may: Iterable[str]) -> list[str]:
    """Return the privileges in their usual order; raise InvalidArgument if one is unknown or there is none."""
    given = list(may)
    unknown = [privilege for privilege in given if privilege not in PRIVILEGES]
    if unknown or not given:
        raise InvalidArgument(
            f"A role may be allowed to {', '.join(PRIVILEGES)}; got {', '.join(unknown) or 'nothing'}."
        )
    return [privilege for privilege in PRIVILEGES if privilege in given]


def granted_to(connection: psycopg.Connection[Any], role: str, schema: str) -> list[str]:
    """Return the privileges that the role was granted by name."""
    rows = connection.execute(
        "SELECT p.proname FROM pg_proc AS p, aclexplode(p.proacl) AS a JOIN pg_roles AS r ON r.oid = a.grantee"
        " WHERE p.pronamespace = %s::regnamespace AND p.proname = ANY(%s) AND r.rolname = %s",
        [quoted(schema), list(MARKS.values()), role],
    ).fetchall()
    marks = {name for (name,) in rows}
    return [privilege for privilege, mark in MARKS.items() if mark in marks]


def privileges_of(connection: psycopg.Connection[Any], role: str, schema: str) -> list[str]:
    """Return the privileges that the role has: by name, by membership in another role, or by PUBLIC."""
    refused = {
        name
        for (name,) in connection.execute(
            "SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = %s::regnamespace AND NOT"
            " (has_function_privilege(%s, p.oid, 'EXECUTE') AND has_schema_privilege(%s, p.pronamespace, 'USAGE'))",
            [quoted(schema), role, role],
        ).fetchall()
    }
    return [privilege for privilege, calls in PRIVILEGES.items() if not refused & {*calls}]


def grant_statements(role: str, schema: str, may: Iterable[str]) -> list[str]:
    """Return the statements after which the role was granted these privileges by name, and no other."""
    granted = ", ".join(f"{quoted(schema)}.{function}" for function in functions(may))
    all_of = [f"ALL {kind} IN SCHEMA {quoted(schema)}" for kind in ("TABLES", "SEQUENCES", "FUNCTIONS")]
    return [
        # Also those that the role has from ALTER DEFAULT PRIVILEGES.
        *(f"REVOKE ALL ON {objects} FROM {quoted(role)}" for objects in all_of),
        *(
            [
                f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(role)}",
                f"GRANT EXECUTE ON FUNCTION {granted} TO {quoted(role)}",
            ]
            if granted
            else [f"REVOKE ALL ON SCHEMA {quoted(schema)} FROM {quoted(role)}"]
        ),
    ]
