"""The privileges that a role can be granted, and the statements that grant exactly these."""

from __future__ import annotations

from collections.abc import Iterable

from dblock._core.options import quoted

API = (
    "try_acquire",
    "acquire",
    "heartbeat",
    "register_presence",
    "withdraw_presence",
    "leave_queue",
    "queue",
    "abandon",
    "renew",
    "renew_all",
    "release",
    "release_all",
    "assert_held",
    "holder",
    "schema_revision",
    "installation",
)
"""The functions that an application's role may call."""

PRIVILEGES = {
    "lock": API,
    "see": ("list_locks", "list_waiters", "list_history", "grants_are_recorded", "schema_revision", "installation"),
    "force-release": ("force_release", "wake_queue", "schema_revision", "installation"),
}
"""Each privilege, and the functions that it allows a role to call."""


def functions(may: Iterable[str]) -> list[str]:
    """Return the functions that these privileges allow."""
    return sorted({function for privilege in may for function in PRIVILEGES[privilege]})


def grant_statements(role: str, schema: str, may: Iterable[str]) -> list[str]:
    """Return the statements that `grant` runs."""
    granted = ", ".join(f"{quoted(schema)}.{function}" for function in functions(may))
    all_of = [f"ALL {kind} IN SCHEMA {quoted(schema)}" for kind in ("TABLES", "SEQUENCES", "FUNCTIONS")]
    return [
        # Privileges that the role has from ALTER DEFAULT PRIVILEGES.
        *(f"REVOKE ALL ON {objects} FROM {quoted(role)}" for objects in all_of),
        f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(role)}",
        f"GRANT EXECUTE ON FUNCTION {granted} TO {quoted(role)}",
    ]
