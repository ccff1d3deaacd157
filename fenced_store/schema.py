"""Install fenced_store's schema in a database, remove it, and grant a role access.

Guarantee: an install is atomic, and concurrent installs are safe. The tables come from numbered files, each of which
runs once in the life of a database. The functions are replaced by their current bodies on every install that changes
the revision. All of it is plain SQL, so that a DBA can read it and run it without Python.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from fenced_store._postgres.engines import Database, transaction
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_schema, how_to_install, quoted
from fenced_store.errors import AccessDenied, InvalidArgument, NotInstalled, sqlstate

REVISION = 1
"""The revision that this version needs: the number of the newest file with tables."""

COLLISIONS = ("23505", "42P06", "42P01")
"""The SQLSTATEs of an install that waited for another install or uninstall: the schema exists now, or no longer."""

API = (
    "raise_fence",
    "claim",
    "write",
    "read",
    "history",
    "guard_truncate",
    "guard_table_trigger",
    "preserve_fence",
    "current_fence",
    "highest_fence",
    "key_expression",
    "has_fence_columns",
    "highest_token",
    "guard_truncate_trigger",
    "guard_function_name",
    "is_plain_type",
    "lock_table",
    "resource_of",
    "reserve_resource",
    "create_guard",
    "record_protection",
    "record_unprotection",
    "owns_fence_columns",
    "row_key",
    "protect_table",
    "unprotect_table",
    "protected_tables",
    "record_rejection",
    "revision",
)
"""The functions that `grant` lets a role call."""


def install(database: Database, schema: str = DEFAULT_SCHEMA) -> bool:
    """Upgrade the schema to this version's revision; return False if it was current."""
    check_schema(schema)
    try:
        return _install(database, schema)
    except DBAPIError as error:
        if sqlstate(error) not in COLLISIONS:
            raise
    # Another install or uninstall has just committed. This one waited for it.
    return _install(database, schema)


def _install(database: Database, schema: str) -> bool:
    with transaction(database, schema) as connection:
        before = _installed_revision(connection, schema)
        if before not in (0, REVISION):
            _lock_revision(connection, schema)
            before = _installed_revision(connection, schema)
        if before == REVISION:
            return False  # without the lock, so that any role that may use the fences can ask for this
        if before > REVISION:
            raise NotInstalled(_too_new_message(schema, before))
        for statement in install_statements(schema, before):
            connection.exec_driver_sql(statement.replace("%", "%%"))
    return True


def uninstall(database: Database, schema: str = DEFAULT_SCHEMA) -> None:
    """Drop the schema with every fence and every stored value, unless a table is still protected."""
    check_schema(schema)
    with transaction(database, schema) as connection:
        if _installed_revision(connection, schema):
            _lock_revision(connection, schema)
        else:
            raise NotInstalled(f"There is no fenced_store in schema {schema!r} of this database.")
        tables = (
            connection.execute(text(f"SELECT resource FROM {quoted_for_text(schema)}.protected_tables()"))
            .scalars()
            .all()
        )
        if tables:
            raise InvalidArgument(
                f"These tables are still protected: {', '.join(tables)}. Remove their "
                "fences first: dblock fence remove TABLE (or fenced_store.unprotect(...) from Python)."
            )
        connection.exec_driver_sql(f"DROP SCHEMA {quoted(schema)} CASCADE".replace("%", "%%"))


def ddl(schema: str = DEFAULT_SCHEMA) -> str:
    """Return the SQL that `install` runs on a database without fenced_store, for a DBA to read and run."""
    return (
        "BEGIN;\n"
        + "\n".join(f"{statement.rstrip().rstrip(';')};" for statement in install_statements(check_schema(schema)))
        + "\nCOMMIT;\n"
    )


def grant(database: Database, role: str, schema: str = DEFAULT_SCHEMA) -> None:
    """Let a role write through fences and protect tables that it owns. It gets no access to fenced_store's tables."""
    check_schema(schema)
    if not isinstance(role, str) or not role or "\0" in role:
        raise InvalidArgument(f"The name of a role is text without NUL; got {role!a:.80}.")
    with transaction(database, schema) as connection:
        if not connection.execute(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}).scalar():
            raise InvalidArgument(f"There is no role {role!r} in this cluster. Check its name, or CREATE ROLE first.")
        functions = ", ".join(f"{quoted(schema)}.{function}" for function in API)
        for statement in (
            f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(role)}",
            f"GRANT EXECUTE ON FUNCTION {functions} TO {quoted(role)}",
        ):
            connection.exec_driver_sql(statement.replace("%", "%%"))
        refused = connection.execute(
            text(
                "SELECT count(*) FROM pg_proc AS p WHERE p.pronamespace = CAST(:schema AS regnamespace)"
                " AND p.proname = ANY(:names) AND NOT has_function_privilege(:role, p.oid, 'EXECUTE')"
                " OR NOT has_schema_privilege(:role, CAST(:schema AS regnamespace), 'USAGE')"
            ),
            {"schema": quoted(schema), "names": list(API), "role": role},
        ).scalar_one()
        if refused:
            # Postgres only warns if the grantor lacks the grant option.
            raise AccessDenied(
                f"Role {role!r} was granted nothing: this login may not grant on schema {schema!r}. Run dblock fence "
                "grant as the role that ran dblock fence setup."
            )


def install_statements(schema: str, before: int = 0) -> list[str]:
    """Return the statements that upgrade a schema from revision `before` to the newest, in order."""
    folder = Path(__file__).parent / "sql"
    tables = sorted(folder.glob("[0-9][0-9][0-9][0-9]_*.sql"))
    functions = sorted(folder.glob("[0-9][0-9]_*.sql"))
    assert int(tables[-1].name[:4]) == REVISION
    return [
        *([f"CREATE SCHEMA {quoted(schema)}", "SET LOCAL fenced_store.first_install = 'on'"] if not before else []),
        # The functions keep this search_path. pg_temp is last, so that no temporary object can shadow the schema's own.
        f"SET LOCAL search_path TO {quoted(schema)}, pg_temp",
        *(file.read_text(encoding="utf-8") for file in tables if int(file.name[:4]) > before),
        "CREATE TABLE IF NOT EXISTS installed_revision (number integer NOT NULL)",
        "DELETE FROM installed_revision",
        f"INSERT INTO installed_revision VALUES ({REVISION})",
        *(file.read_text(encoding="utf-8") for file in functions),
    ]


def check_installed(connection: Connection, schema: str) -> None:
    """Raise NotInstalled unless the schema has the revision that this version needs."""
    found = _installed_revision(connection, schema)
    if found != REVISION:
        raise NotInstalled(
            _too_new_message(schema, found)
            if found > REVISION
            else f"There is no fenced_store of revision {REVISION} in schema {schema!r} of this database. "
            + how_to_install(schema)
        )


def quoted_for_text(schema: str) -> str:
    """Return the quoted name of a schema for sqlalchemy.text(), which reads :name as a parameter."""
    return quoted(schema).replace(":", r"\:")


def _installed_revision(connection: Connection, schema: str) -> int:
    """Return the installed revision, 0 for none."""
    name = {"name": f"{quoted(schema)}.revision()"}
    if not connection.execute(text("SELECT to_regprocedure(:name)"), name).scalar():
        if connection.execute(text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": schema}).scalar():
            raise InvalidArgument(f"Schema {schema!r} exists and is not fenced_store's. Choose another name.")
        return 0
    return int(connection.execute(text(f"SELECT {quoted_for_text(schema)}.revision()")).scalar_one())


def _lock_revision(connection: Connection, schema: str) -> None:
    """Make other installs and uninstalls of this schema wait until this transaction ends.

    The table is the owner's, so no other role can take this lock. A first install has no table yet: there the creation
    of the schema itself makes the others wait.
    """
    connection.exec_driver_sql(
        f"LOCK TABLE {quoted(schema)}.installed_revision IN SHARE ROW EXCLUSIVE MODE".replace("%", "%%")
    )


def _too_new_message(schema: str, found: int) -> str:
    return (
        f"The fenced_store in schema {schema!r} has revision {found}; this version knows {REVISION}. "
        "Upgrade the Python package."
    )
