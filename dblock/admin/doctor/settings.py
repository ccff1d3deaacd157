"""Find where a server setting comes from, and how to change it there."""

from __future__ import annotations

from collections.abc import Iterator

from dblock._core.options import quoted
from dblock.admin.doctor.patient import Patient, Setting


def effective_settings(patient: Patient, name: str) -> Iterator[tuple[str, Setting]]:
    """Yield the values of a setting for this login and for the roles that use dblock's schema.

    Each comes with a text that says to which login or role it applies.
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
        # The roles that use the schema: its owner, and every role that was granted a function.
        " AND (r.oid = (SELECT n.nspowner FROM pg_namespace AS n WHERE n.oid = $2) OR EXISTS ("
        "  SELECT FROM pg_proc AS p, aclexplode(p.proacl) AS a WHERE p.pronamespace = $2 AND a.grantee = r.oid))"
        " ORDER BY 1",
        name,
        patient.oid,
    ):
        where = f" in database {patient.database!r}" if database else ""
        command = f"ALTER ROLE {quoted(role)}{f' IN DATABASE {quoted(patient.database)}' * database} RESET {name};"
        yield f"for role {role!r}{where}", Setting(name, value, command)


def fix_for(patient: Patient, setting: Setting, value: str) -> str:
    """Return the command that changes a setting where it was set."""
    name, role, database = setting.name, quoted(patient.user), quoted(patient.database)
    anywhere = f"ALTER SYSTEM SET {name} = {value}; SELECT pg_reload_conf();"
    by_source = {
        "database": f"ALTER DATABASE {database} RESET {name};",
        "user": f"ALTER ROLE {role} RESET {name};",
        "database user": f"ALTER ROLE {role} IN DATABASE {database} RESET {name};",
        "global": f"ALTER ROLE ALL RESET {name};",
        "client": f"Remove {name} from the DSN's options or from $PGOPTIONS.",
        "command line": f"Start the server without -c {name}.",
    }
    if setting.source.startswith("ALTER "):
        return setting.source
    return by_source.get(setting.source, anywhere)
