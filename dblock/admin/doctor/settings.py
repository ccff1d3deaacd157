"""Where a setting of the server's comes from, and how to change it there."""

from __future__ import annotations

from collections.abc import Iterator

from dblock._core.options import quoted
from dblock.admin.doctor.patient import Patient, Setting


def in_force(patient: Patient, name: str) -> Iterator[tuple[str, Setting]]:
    """Yield a setting wherever it may matter to us: for this login, and for the roles that use our schema.

    With each, in words, for whom it is.
    """
    ours = patient.setting(name)
    yield f"for this login ({ours.source})", ours
    if not patient.oid:
        return
    for role, database, value in patient.rows(
        "SELECT r.rolname::text, s.setdatabase <> 0, split_part(one, '=', 2)"
        " FROM pg_db_role_setting AS s JOIN pg_roles AS r ON r.oid = s.setrole, unnest(s.setconfig) AS one"
        " WHERE split_part(one, '=', 1) = $1 AND r.rolname <> current_user"
        " AND s.setdatabase IN (0, (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))"
        # Those who use the schema: its owner, and whoever was granted.
        " AND (r.oid = (SELECT n.nspowner FROM pg_namespace AS n WHERE n.oid = $2) OR EXISTS ("
        "  SELECT FROM pg_proc AS p, aclexplode(p.proacl) AS a WHERE p.pronamespace = $2 AND a.grantee = r.oid))"
        " ORDER BY 1",
        name,
        patient.oid,
    ):
        where = f" in database {patient.database!r}" if database else ""
        command = f"ALTER ROLE {quoted(role)}{f' IN DATABASE {quoted(patient.database)}' * database} RESET {name};"
        yield f"for role {role!r}{where}", Setting(name, value, command)


def mending(patient: Patient, setting: Setting, right: str) -> str:
    """Return what gives a setting another value where it was given this one."""
    name, role, database = setting.name, quoted(patient.user), quoted(patient.database)
    anywhere = f"ALTER SYSTEM SET {name} = {right}; SELECT pg_reload_conf();"
    by_source = {
        "database": f"ALTER DATABASE {database} RESET {name};",
        "user": f"ALTER ROLE {role} RESET {name};",
        "database user": f"ALTER ROLE {role} IN DATABASE {database} RESET {name};",
        "global": f"ALTER ROLE ALL RESET {name};",
        "client": f"Take {name} out of the DSN's options or of $PGOPTIONS.",
        "command line": f"Start the server without -c {name}.",
    }
    if setting.source.startswith("ALTER "):
        return setting.source
    return by_source.get(setting.source, anywhere)
