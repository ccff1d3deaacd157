"""dblock's schema in a database: install it, remove it, tell its state, let a role use it.

Guarantee: an install or uninstall happens whole or not at all, and any number may run at once. All of it is one
transaction, behind an advisory lock that other installs of the same schema wait for.

The schema is ours alone. That is why an install refuses a schema in which something else already lives, and
why an uninstall can be sure of what it drops.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dblock._core.options import is_text, literal, quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, REVISION, check_name, check_revision
from dblock._runtime.error_mapping import translated
from dblock._runtime.target import Target, resolve
from dblock.admin.privileges import PRIVILEGES, functions, grant_statements
from dblock.errors import (
    AccessDenied,
    InvalidArgument,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
)

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection

    from dblock._runtime.target import Where

VERSION_TABLE = "installed_revision"

PACKAGE = Path(__file__).parents[1]

REFUSED = "DBL01"
"""The SQLSTATE of a schema that dblock will not have."""


@dataclass(frozen=True)
class Status:
    """What a database says about the dblock in it."""

    database: str
    server: str
    schema: str
    revision: str | None
    """None when it is not installed."""
    standby: bool
    whole: bool = True
    """Whether none of the functions that applications call is missing."""

    @property
    def state(self) -> str:
        """One of: missing, outdated, current, too new."""
        if self.revision is None:
            return "missing"
        if self.revision == REVISION:
            return "current"
        return "outdated" if self.revision < REVISION else "too new"

    def check(self) -> None:
        """Raise the SchemaError that says why this client cannot use the schema, if it cannot."""
        check_revision(self.schema, self.revision)


def install(target: Target | Where, schema: str = DEFAULT_SCHEMA, *, repair: bool = False) -> str | None:
    """Bring the schema to this version's revision; return the revision it had before, None for none.

    Where there is nothing to do, any role that may use the schema may call this, at every start of a program say. With
    `repair` there always is, and where functions are missing: they are made anew, as this version has them. Tables and
    grants stay.
    """
    check_name(schema)
    target = resolve(target)
    found = status(target, schema)
    if not repair and found.revision == REVISION and found.whole:
        return REVISION
    with translated(schema), _transaction(target, schema) as connection:
        before = _revision(connection, schema)
        if before == REVISION and not repair and found.whole:
            return before
        if before is not None and before > REVISION:
            raise SchemaTooNew(schema, before, REVISION)
        if before is None:
            _make_schema(connection, schema)
        else:
            _act_as_owner(connection, schema)
        _migrate(connection, schema, "head")
    return before


def _act_as_owner(connection: Connection, schema: str) -> None:
    """Make what is new the schema owner's, whoever brings it up to date.

    A function of a superuser's that calls one of the owner's would hand the owner a superuser's rights.
    """
    from sqlalchemy import text

    owner, is_ours = connection.execute(
        text(
            "SELECT r.rolname, r.rolname = current_user FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner"
            " WHERE n.nspname = :schema"
        ),
        {"schema": schema},
    ).one()
    if not is_ours:
        _run(connection, f"SET LOCAL ROLE {quoted(owner)}")


def uninstall(target: Target | Where, schema: str = DEFAULT_SCHEMA) -> int:
    """Remove the schema and all that is in it; return the highest token it had handed out.

    A later install counts from 1 again. Where resources remember tokens, raise them above the number returned here.
    """
    check_name(schema)
    with translated(schema), _transaction(resolve(target), schema) as connection:
        revision = _revision(connection, schema)
        if revision is None:
            raise SchemaMissing(schema)
        if revision > REVISION:
            raise SchemaTooNew(schema, revision, REVISION)
        # From here on nobody is granted anything, so the highest token is the last.
        connection.exec_driver_sql("LOCK TABLE distributed_locks IN ACCESS EXCLUSIVE MODE")
        last = connection.exec_driver_sql("SELECT highest FROM show_tokens()").scalar_one()
        _migrate(connection, schema, "base")
        connection.exec_driver_sql(f"DROP TABLE {VERSION_TABLE}")
        _run(connection, f"DROP SCHEMA {quoted(schema)}")
    return int(last)


def ddl(schema: str = DEFAULT_SCHEMA) -> str:
    """Return the statements that `install` would run on a database without dblock, for a DBA to read and run."""
    check_name(schema)
    output = io.StringIO()
    _migrate(None, schema, "head", output)
    return output.getvalue()


def grant(target: Target | Where, role: str, schema: str = DEFAULT_SCHEMA, may: Iterable[str] = ("lock",)) -> None:
    """Let a role lock and unlock, `see` what goes on, `force-release` a lock: EXECUTE on functions, and no table.

    It may that and no more: what an earlier call has granted goes.
    """
    check_name(schema)
    may = list(may)
    unknown = [right for right in may if right not in PRIVILEGES]
    if unknown or not may:
        raise InvalidArgument(
            f"A role may be allowed to {', '.join(PRIVILEGES)}; got {', '.join(unknown) or 'nothing'}."
        )
    with translated(schema), resolve(target).connect() as connection:
        status_of(connection, schema).check()
        if not is_text(role):
            raise InvalidArgument(f"A role's name is text without NUL; got {role!a}.")
        found = connection.execute(
            "SELECT n.nspowner = r.oid, has_schema_privilege(r.oid, n.oid, 'CREATE') AND NOT r.rolsuper"
            " AND NOT pg_has_role(r.oid, n.nspowner, 'MEMBER')"
            " FROM pg_roles AS r, pg_namespace AS n WHERE r.rolname = %s AND n.nspname = %s",
            [role, schema],
        ).fetchone()
        if not found:
            raise InvalidArgument(f"There is no role {role!r} in this cluster. Create it first: CREATE ROLE …")
        is_owner, may_create = found
        if is_owner:
            return  # it may do all this and more
        if may_create:
            raise AccessDenied(
                f"Role {role!r} was granted nothing: it may create objects in schema {schema!r}, and so could reach "
                "the locks with their owner's rights. Revoke that first."
            )
        with connection.transaction():
            for statement in grant_statements(role, schema, may):
                connection.execute(statement.encode())
            refused = connection.execute(
                "SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = %s::regnamespace"
                " AND p.proname = ANY(%s) AND NOT has_function_privilege(%s, p.oid, 'EXECUTE')",
                [quoted(schema), functions(may), role],
            ).fetchall()
            if refused:
                # A GRANT by someone without the right to give it is only a warning to Postgres.
                raise AccessDenied(
                    f"Role {role!r} was granted nothing: this login may not grant on schema {schema!r}. "
                    "Run dblock grant as the role that ran dblock install."
                )
            touched = connection.execute(
                "SELECT c.relname FROM pg_class AS c, pg_roles AS r"
                " WHERE c.relnamespace = %s::regnamespace AND c.relkind = ANY('{r,S}') AND r.rolname = %s"
                " AND NOT r.rolsuper AND NOT pg_has_role(r.oid, c.relowner, 'MEMBER')"
                " AND (CASE c.relkind WHEN 'S' THEN has_sequence_privilege(r.oid, c.oid, 'USAGE, SELECT, UPDATE')"
                " ELSE has_table_privilege(r.oid, c.oid, %s) END)",
                [quoted(schema), role, "SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER"],
            ).fetchone()
            if touched:
                raise AccessDenied(
                    f"Role {role!r} was granted nothing: it could touch {touched[0]!r} directly, by a right of "
                    "PUBLIC or of a role that it is a member of. Revoke that first."
                )


def status(target: Target | Where, schema: str = DEFAULT_SCHEMA) -> Status:
    """Ask the database what is installed in it."""
    check_name(schema)
    with translated(schema), resolve(target).connect() as connection:
        return status_of(connection, schema)


def status_of(connection: psycopg.Connection[Any], schema: str) -> Status:
    """Ask over a connection that is already open."""
    database, server, standby, installed = connection.execute(
        "SELECT current_database(), current_setting('server_version'), pg_is_in_recovery(),"
        " to_regprocedure(%s) IS NOT NULL",
        [f"{quoted(schema)}.schema_revision()"],
    ).fetchone() or ("", "", False, False)
    revision, whole = None, True
    if installed:
        row = connection.execute(f"SELECT {quoted(schema)}.schema_revision()".encode()).fetchone()
        revision = row[0] if row else None
        named = connection.execute(
            "SELECT count(DISTINCT p.proname) FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
            " WHERE n.nspname = %s AND p.proname = ANY(%s)",
            [schema, functions(PRIVILEGES)],
        ).fetchone()
        whole = named == (len(functions(PRIVILEGES)),)
    return Status(database, server, schema, revision, standby, whole)


def function_files() -> list[Path]:
    """Return the files with the functions' current bodies, in the order in which they run."""
    return sorted((PACKAGE / "sql").glob("*.sql"))


@contextmanager
def _transaction(target: Target, schema: str) -> Iterator[Connection]:
    from sqlalchemy import NullPool, create_engine, text

    engine = create_engine("postgresql+psycopg://", creator=target.connect, poolclass=NullPool)
    # A connection that comes in autocommit would otherwise stay so.
    engine = engine.execution_options(isolation_level="READ COMMITTED")
    with engine.begin() as connection:
        key = f"dblock schema {schema}"
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": key})
        _run(connection, _search_path(schema))
        yield connection


def _run(connection: Connection, statement: str) -> None:
    """Run a statement with a name in it, which may hold what the driver takes for a placeholder."""
    connection.exec_driver_sql(statement.replace("%", "%%"))


def _search_path(schema: str) -> str:
    # The functions keep this path for themselves, with pg_temp last so that no temporary object can shadow ours.
    return f"SET LOCAL search_path TO {quoted(schema)}, pg_temp"


def _revision(connection: Connection, schema: str) -> str | None:
    from sqlalchemy import text

    table = {"table": f"{quoted(schema)}.{VERSION_TABLE}"}
    if not connection.execute(text("SELECT to_regclass(:table)"), table).scalar():
        return None
    revision: str | None = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()
    return revision


def _make_schema(connection: Connection, schema: str) -> None:
    from sqlalchemy.exc import DBAPIError

    try:
        _run(connection, making(schema))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != REFUSED:
            raise
        said: Any = error.orig
        raise SchemaError(said.diag.message_primary) from None


def making(schema: str) -> str:
    """Return the statement that makes the schema, or takes one that a DBA has made for us and for nobody else.

    Whoever may create in the schema could put a function there that ours would call with their owner's rights.
    """
    tag = "$make$"
    while tag in schema:
        tag = f"${tag.strip('$')}_$"
    return f"""
        DO {tag}
        DECLARE
            space pg_catalog.pg_namespace;
            stranger pg_catalog.text;
        BEGIN
            SELECT * INTO space FROM pg_catalog.pg_namespace WHERE nspname = {literal(schema)};
            IF NOT FOUND THEN
                CREATE SCHEMA {quoted(schema)};
                FOR stranger IN
                    SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::pg_catalog.regrole::pg_catalog.text END
                    FROM pg_catalog.pg_namespace, pg_catalog.aclexplode(nspacl)
                    WHERE nspname = {literal(schema)} AND grantee <> nspowner
                LOOP
                    -- What ALTER DEFAULT PRIVILEGES has given away.
                    EXECUTE pg_catalog.format('REVOKE ALL ON SCHEMA %I FROM ', {literal(schema)}) || stranger;
                END LOOP;
                RETURN;
            END IF;
            SELECT relname INTO stranger FROM pg_catalog.pg_class WHERE relnamespace = space.oid;
            IF NOT FOUND THEN
                SELECT proname INTO stranger FROM pg_catalog.pg_proc WHERE pronamespace = space.oid;
            END IF;
            IF FOUND THEN
                RAISE EXCEPTION 'Schema % already holds %, which is not dblock''s. '
                    'dblock wants a schema of its own: give another name with --schema.',
                    quote_literal(space.nspname), quote_literal(stranger)
                    USING ERRCODE = '{REFUSED}';
            END IF;
            IF space.nspowner <> (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user)
                OR EXISTS (
                    SELECT FROM pg_catalog.aclexplode(space.nspacl)
                    WHERE privilege_type = 'CREATE' AND grantee <> space.nspowner
                )
            THEN
                RAISE EXCEPTION 'Others than role % may create objects in schema %, and so could reach the '
                    'locks with its rights. Make it that role''s own, or let the install create it.',
                    quote_literal(current_user), quote_literal(space.nspname)
                    USING ERRCODE = '{REFUSED}';
            END IF;
        END
        {tag}
        """


def _migrate(connection: Connection | None, schema: str, revision: str, output: io.StringIO | None = None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    offline = connection is None
    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    config.attributes["upgrading"] = revision != "base"
    config.attributes["preamble"] = [making(schema), _search_path(schema)]
    try:
        (command.downgrade if revision == "base" else command.upgrade)(config, revision, sql=offline)
    except CommandError as error:
        raise SchemaError(
            f"Schema {schema!r} cannot be migrated: {error}. It was installed by another version of dblock; "
            "use that version to uninstall it."
        ) from error


def migrations() -> Path:
    """Return the folder of the migrations: inside the installed package, or beside it in a checkout."""
    installed = PACKAGE / "migrations"
    return installed if installed.is_dir() else PACKAGE.parent / "alembic"
