"""Check that each role has its privileges completely, and nothing beyond dblock's functions."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from dblock._core.options import quoted
from dblock.admin.doctor.patient import Check, Finding, Patient
from dblock.admin.privileges import PRIVILEGES

SHARED = {one for one, count in Counter(chain.from_iterable(PRIVILEGES.values())).items() if count > 1}
"""The functions that several privileges include, which therefore identify none."""

NOT_PRIVILEGED = " NOT r.rolsuper AND NOT pg_has_role(r.oid, n.nspowner, 'MEMBER')"
"""Superusers and members of the owner may do everything, whatever was granted."""


class _Role(NamedTuple):
    name: str
    enters: bool
    """Whether the role has USAGE on the schema."""
    given: list[str]
    """The functions that were granted to the role by name."""
    lacks: list[str]
    """The functions that the role may not call in any way."""


def incomplete_grant(patient: Patient) -> Iterator[Finding]:
    """Find roles that have only a part of a privilege."""
    for role in _roles(patient):
        lacking = {
            privilege: [name for name in functions if name in role.lacks]
            for privilege, functions in PRIVILEGES.items()
            if privilege in _intended(role)
        }
        if any(lacking.values()):
            missing = "; ".join(
                f"for {privilege} it lacks {', '.join(names)}" for privilege, names in lacking.items() if names
            )
            yield Finding(
                "error",
                f"Role {role.name!r} may call some functions of a privilege, but not all: {missing}.",
                "Clients with this role fail in the middle of their work (AccessDenied).",
                _grant(patient, role),
            )


def no_usage(patient: Patient) -> Iterator[Finding]:
    """Find roles that may call functions, but have no USAGE on the schema."""
    for role in _roles(patient):
        if not role.enters and _intended(role):
            yield Finding(
                "error",
                f"Role {role.name!r} may call functions in schema {patient.schema!r}, but has no USAGE on it.",
                "The role cannot reach them: every call raises AccessDenied.",
                _grant(patient, role),
            )


def direct_privileges(patient: Patient) -> Iterator[Finding]:
    """Find roles that can bypass dblock's functions."""
    found: dict[str, list[tuple[str, str, list[str]]]] = {}
    for role, kind, name, privileges in patient.rows(
        "WITH given AS ("
        " SELECT 'SCHEMA' AS kind, ''::name AS name, a.grantee, a.privilege_type"
        " FROM pg_namespace AS n, aclexplode(n.nspacl) AS a WHERE n.oid = $1 AND a.privilege_type = 'CREATE'"
        " UNION ALL"
        " SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.relname, a.grantee, a.privilege_type"
        " FROM pg_class AS c, aclexplode(c.relacl) AS a WHERE c.relnamespace = $1 AND c.relkind IN ('r', 'S')"
        " UNION ALL"
        " SELECT 'TABLE', c.relname, a.grantee, a.privilege_type || ' of ' || t.attname"
        " FROM pg_class AS c JOIN pg_attribute AS t ON t.attrelid = c.oid, aclexplode(t.attacl) AS a"
        " WHERE c.relnamespace = $1 AND c.relkind = 'r')"
        " SELECT coalesce(r.rolname::text, ''), g.kind, g.name::text, array_agg(g.privilege_type ORDER BY 1)"
        " FROM given AS g JOIN pg_namespace AS n ON n.oid = $1 LEFT JOIN pg_roles AS r ON r.oid = g.grantee"
        f" WHERE g.grantee = 0 OR ({NOT_PRIVILEGED}) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
        patient.oid,
    ):
        found.setdefault(role, []).append((kind, name, privileges))
    for role, objects in found.items():
        said, commands = [], []
        for kind, name, privileges in objects:
            grantee = quoted(role) if role else "PUBLIC"
            if kind == "SCHEMA":
                said.append(f"create objects in schema {patient.schema!r}")
                commands.append(f"REVOKE CREATE ON SCHEMA {quoted(patient.schema)} FROM {grantee};")
            else:
                said.append(f"{', '.join(privileges)} on {name}")
                commands.append(f"REVOKE ALL ON {kind} {patient.within(name)} FROM {grantee};")
        yield Finding(
            "error",
            f"{f'Role {role!r}' if role else 'Every role (PUBLIC)'} may {'; '.join(said)}.",
            "Access that bypasses the functions bypasses their guarantees: the role can change a lock, see other "
            "applications' locks, or have its own function called with the owner's privileges.",
            " ".join(commands),
        )


def may_not_lock(patient: Patient) -> Iterator[Finding]:
    """Check that this login itself may lock."""
    ((enters, lacks),) = patient.rows(
        "SELECT has_schema_privilege(n.oid, 'USAGE'), ARRAY(SELECT p.proname::text FROM pg_proc AS p"
        "  WHERE p.pronamespace = n.oid AND p.proname = ANY ($1) AND NOT has_function_privilege(p.oid, 'EXECUTE'))"
        " FROM pg_namespace AS n WHERE n.oid = $2",
        list(PRIVILEGES["lock"]),
        patient.oid,
    )
    if not enters or len(lacks) >= len(set(PRIVILEGES["lock"]) - SHARED):
        yield Finding(
            "note",
            f"This login, role {patient.user!r}, may not lock in schema {patient.schema!r}.",
            "A client with this DSN is refused (AccessDenied). For a login that only inspects locks, that is intended.",
            patient.run("grant", patient.user),
        )


def _roles(patient: Patient) -> list[_Role]:
    """Return the roles that were granted a function by name."""
    rows = patient.rows(
        "SELECT r.rolname::text, has_schema_privilege(r.oid, n.oid, 'USAGE'),"
        " array_agg(DISTINCT p.proname::text) FILTER (WHERE EXISTS (SELECT FROM aclexplode(p.proacl) AS a"
        "  WHERE a.grantee = r.oid AND a.privilege_type = 'EXECUTE')),"
        " coalesce(array_agg(DISTINCT p.proname::text)"
        "  FILTER (WHERE NOT has_function_privilege(r.oid, p.oid, 'EXECUTE')), '{}')"
        " FROM pg_namespace AS n JOIN pg_proc AS p ON p.pronamespace = n.oid, pg_roles AS r"
        " WHERE n.oid = $1 AND r.oid <> n.nspowner AND r.oid IN ("
        "  SELECT a.grantee FROM pg_proc AS g, aclexplode(g.proacl) AS a WHERE g.pronamespace = n.oid)"
        f" AND {NOT_PRIVILEGED} GROUP BY r.oid, r.rolname, n.oid ORDER BY 1",
        patient.oid,
    )
    return [_Role(*row) for row in rows]


def _intended(role: _Role) -> list[str]:
    """Return the privileges of which a role was granted at least a part."""
    return [privilege for privilege, functions in PRIVILEGES.items() if (set(functions) - SHARED) & set(role.given)]


def _grant(patient: Patient, role: _Role) -> str:
    may = " ".join(f"--may {privilege}" for privilege in _intended(role))
    return patient.run(f"grant {shlex.quote(role.name)} {may}")


CHECKS = tuple(Check(find) for find in (incomplete_grant, no_usage, direct_privileges, may_not_lock))
