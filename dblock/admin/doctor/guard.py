"""Check that the guards of schemas refuse what they should."""

from __future__ import annotations

from collections.abc import Iterator

from dblock.admin.doctor.patient import OWNER, CannotCheck, Check, Finding, Patient


def ddl_guard(patient: Patient) -> Iterator[Finding]:
    """Check that the guarded schemas exist, and that the event triggers of their guards are enabled."""
    ((may_ask,),) = patient.rows(
        "SELECT EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = $1 AND p.proname = 'list_guards'"
        " AND has_schema_privilege(p.pronamespace, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE'))",
        patient.oid,
    )
    if not may_ask:
        raise CannotCheck(OWNER)
    guards = patient.rows(
        "SELECT g.schema_name, g.names, g.active, n.oid IS NOT NULL"
        f" FROM {patient.within('list_guards')}() AS g LEFT JOIN pg_namespace AS n ON n.nspname = g.schema_name"
    )
    missing = [schema for schema, _, _, exists in guards if not exists]
    if missing:
        yield Finding(
            "warning",
            f"The guard names schemas that do not exist: {', '.join(missing)}.",
            "A schema that was renamed is not guarded under its new name.",
            patient.run("guard remove", *missing),
        )
    inactive = [(schema, names) for schema, names, active, exists in guards if exists and not active]
    if inactive:
        (schema, names), *_ = inactive
        options = [word for name in names for word in ("--name", name)]
        yield Finding(
            "warning",
            f"The guard of schema {', '.join(one for one, _ in inactive)} refuses nothing: its event triggers are "
            "missing or disabled, for example after a restore by a role that may not create them.",
            "DDL outside a migration is not refused.",
            patient.run("guard install", schema, *options),
        )


CHECKS = (Check(ddl_guard),)
