"""fenced_store's schema in a database: install it, remove it, let a role use it.

Guarantee: an install happens whole or not at all, and any number may run at once. The tables come from numbered files,
each of which runs once in the life of a database; the functions have no history worth replaying, and their current
bodies replace whatever was there. Plain SQL, so that a DBA can read it and run it without Python.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, text

from fenced_store._postgres.engines import Where, transaction
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_schema, literal, quoted
from fenced_store.errors import AccessDenied, InvalidArgument, NotInstalled

REVISION = 1
"""The revision that this version needs: the number of the newest file of tables."""

API = (
    "raise_fence",
    "claim",
    "write",
    "read",
    "history",
    "guard_row",
    "guard_table",
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
"""The functions that a role may call that was granted fenced_store."""


def install(where: Where, schema: str = DEFAULT_SCHEMA) -> bool:
    """Bring the schema to this version's revision; False when there was nothing to do."""
    check_schema(schema)
    with transaction(where, schema) as connection:
        before = _found(connection, schema)
        if before == REVISION:
            return False
        if before > REVISION:
            raise NotInstalled(_too_new(schema, before))
        for statement in statements(schema, before):
            connection.exec_driver_sql(statement.replace("%", "%%"))
    return True


def uninstall(where: Where, schema: str = DEFAULT_SCHEMA) -> None:
    """Remove the schema, every fence and every stored value with it, unless a table is still protected."""
    check_schema(schema)
    with transaction(where, schema) as connection:
        if not _found(connection, schema):
            raise NotInstalled(f"There is no fenced_store in schema {schema!r} of this database.")
        held = connection.execute(text(f"SELECT resource FROM {bindable(schema)}.protected_tables()")).scalars().all()
        if held:
            raise InvalidArgument(f"These tables are still protected: {', '.join(held)}. Unprotect them first.")
        connection.exec_driver_sql(f"DROP SCHEMA {quoted(schema)} CASCADE".replace("%", "%%"))


def ddl(schema: str = DEFAULT_SCHEMA) -> str:
    """Return the statements that `install` runs on a database without fenced_store, for a DBA to read and run."""
    return (
        "BEGIN;\n"
        + "\n".join(f"{one.rstrip().rstrip(';')};" for one in statements(check_schema(schema)))
        + "\nCOMMIT;\n"
    )


def grant(where: Where, role: str, schema: str = DEFAULT_SCHEMA) -> None:
    """Let a role write through fences, and protect tables that it owns. It touches no table of ours."""
    check_schema(schema)
    if not isinstance(role, str) or not role or "\0" in role:
        raise InvalidArgument(f"A role's name is text without NUL; got {role!a:.80}.")
    with transaction(where, schema) as connection:
        if not connection.execute(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}).scalar():
            raise InvalidArgument(f"There is no role {role!r} in this cluster. Create it first: CREATE ROLE …")
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
            # A GRANT by someone without the right to give it is only a warning to Postgres.
            raise AccessDenied(
                f"Role {role!r} was granted nothing: this login may not grant on schema {schema!r}. Run dblock fence "
                f"grant as "
                "the role that ran dblock fence setup."
            )


def statements(schema: str, before: int = 0) -> list[str]:
    """Return what brings a schema from one revision to the newest, in order."""
    folder = Path(__file__).parent / "sql"
    tables = sorted(folder.glob("[0-9][0-9][0-9][0-9]_*.sql"))
    functions = sorted(folder.glob("[0-9][0-9]_*.sql"))
    assert int(tables[-1].name[:4]) == REVISION
    return [
        f"SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended({literal('fenced_store ' + schema)}, 0))",
        *([f"CREATE SCHEMA {quoted(schema)}", "SET LOCAL fenced_store.first_install = 'on'"] if not before else []),
        # Kept by the functions for themselves, with pg_temp last so that no temporary object can shadow ours.
        f"SET LOCAL search_path TO {quoted(schema)}, pg_temp",
        *(file.read_text(encoding="utf-8") for file in tables if int(file.name[:4]) > before),
        "CREATE TABLE IF NOT EXISTS installed_revision (number integer NOT NULL)",
        "DELETE FROM installed_revision",
        f"INSERT INTO installed_revision VALUES ({REVISION})",
        *(file.read_text(encoding="utf-8") for file in functions),
    ]


def check_installed(connection: Connection, schema: str) -> None:
    """Raise NotInstalled unless the schema is of the revision that this version needs."""
    found = _found(connection, schema)
    if found != REVISION:
        raise NotInstalled(
            _too_new(schema, found)
            if found > REVISION
            else f"There is no fenced_store of revision {REVISION} in schema {schema!r} of this database. As its owner "
            "run: dblock fence setup (or fenced_store.install(...) from Python)."
        )


def bindable(schema: str) -> str:
    """Return the schema's name for a statement in which SQLAlchemy looks for parameters."""
    return quoted(schema).replace(":", r"\:")


def _found(connection: Connection, schema: str) -> int:
    """Return the revision installed, 0 for none; others who install wait until this transaction has ended."""
    key = {"key": f"fenced_store {schema}"}
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), key)
    name = {"name": f"{quoted(schema)}.revision()"}
    if not connection.execute(text("SELECT to_regprocedure(:name)"), name).scalar():
        if connection.execute(text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": schema}).scalar():
            raise InvalidArgument(f"Schema {schema!r} is there already, and is not fenced_store's. Give another name.")
        return 0
    return int(connection.execute(text(f"SELECT {bindable(schema)}.revision()")).scalar_one())


def _too_new(schema: str, found: int) -> str:
    return (
        f"The fenced_store in schema {schema!r} is of revision {found}; this version knows {REVISION}. "
        "Upgrade the Python package."
    )
