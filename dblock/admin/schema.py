"""Install dblock's schema in a database, remove it, report its state, and grant roles access to it.

Guarantee: an install or uninstall is atomic, and any number may run at once. Each is one transaction, behind a lock
that other installs of the same schema wait for. The lock is on a table of the schema's owner, so no other role can take
it. A first install has no table yet: there an advisory lock, and the creation of the schema, make the others wait.

The schema belongs to dblock alone. So an install refuses a schema that holds other objects, and an uninstall knows that
everything it drops is dblock's.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dblock._core.options import is_text, literal, quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, REVISION, check_name, check_revision
from dblock._runtime.error_mapping import translated
from dblock._runtime.target import Target, resolve
from dblock.admin.install_locks import lock_empty_schema, run, wait_for_other_first_installs
from dblock.admin.privileges import PRIVILEGES, chosen, functions, grant_statements, granted_to, privileges_of
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

_LOCK_FOLDERS = ("locks", "shared_locks", "deadlocks", "several")
_SQL_FOLDERS = (*_LOCK_FOLDERS, "migrations", "schedules", "elections", "barriers", "metrics", ".")
"""The folders of functions. Each may use those of the folders before it. Only the locks and the shared locks use each
other: a shared lock is made of locks. And reap() calls a function of the barriers."""

COLLISIONS = ("23505", "42P06", "42P07", "42P01")
"""The SQLSTATEs of an install that waited for another install or uninstall: the schema exists now, or no longer."""

REFUSED = "DBL01"
"""The SQLSTATE of the error for a schema that dblock cannot use."""


@dataclass(frozen=True)
class Status:
    """The state of dblock's schema in a database."""

    database: str
    server: str
    schema: str
    revision: str | None
    """None if dblock is not installed."""
    standby: bool
    complete: bool = True
    """Whether all functions that applications call exist."""

    @property
    def state(self) -> str:
        """One of: missing, outdated, current, too new."""
        if self.revision is None:
            return "missing"
        if self.revision == REVISION:
            return "current"
        return "outdated" if self.revision < REVISION else "too new"

    def check(self) -> None:
        """Raise a SchemaError if this client cannot use the schema."""
        check_revision(self.schema, self.revision)


def install(target: Target | Where, schema: str = DEFAULT_SCHEMA, *, repair: bool = False) -> str | None:
    """Install the schema or upgrade it to this version's revision; return the revision before, None for none.

    If there is nothing to do, any role that may use the schema may call this, for example at every start of a program.
    With `repair`, or if functions are missing, all functions are created again as this version has them. Tables and
    grants stay.
    """
    check_name(schema)
    target = resolve(target)
    found = status(target, schema)
    if not repair and found.revision == REVISION and found.complete:
        return REVISION
    if found.revision is None and not found.standby and not target.embedded:
        from dblock.admin import probe

        probe.require(target, schema)
    from sqlalchemy.exc import DBAPIError

    with translated(schema):
        try:
            return _install(target, schema, found, repair)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in COLLISIONS:
                raise
        # Another install or uninstall has just committed. This one waited for it.
        return _install(target, schema, found, repair)


def _install(target: Target, schema: str, found: Status, repair: bool) -> str | None:
    with _transaction(target, schema, first=found.revision is None) as connection:
        before = _revision(connection, schema)
        if before == REVISION and not repair and found.complete:
            return before
        if before is not None and before > REVISION:
            raise SchemaTooNew(schema, before, REVISION)
        if before is None:
            _create_schema(connection, schema)
        else:
            _act_as_owner(connection, schema)
        _migrate(connection, schema, "head")
    return before


def _act_as_owner(connection: Connection, schema: str) -> None:
    """Create new objects as the schema's owner, whichever role runs the upgrade.

    A superuser's function that calls a function of the owner would give the owner a superuser's privileges.
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
        run(connection, f"SET LOCAL ROLE {quoted(owner)}")


def uninstall(target: Target | Where, schema: str = DEFAULT_SCHEMA) -> int:
    """Remove the schema and everything in it; return the highest token it had issued.

    The tokens of a later install follow the clock. If the number returned here is ahead of the clock, raise the tokens
    above it.
    """
    check_name(schema)
    with translated(schema), _transaction(resolve(target), schema) as connection:
        revision = _revision(connection, schema)
        if revision is None:
            raise SchemaMissing(schema)
        if revision > REVISION:
            raise SchemaTooNew(schema, revision, REVISION)
        # From here on nothing can be granted, so the highest token is the last.
        connection.exec_driver_sql("LOCK TABLE distributed_locks IN ACCESS EXCLUSIVE MODE")
        last = connection.exec_driver_sql("SELECT highest FROM show_tokens()").scalar_one()
        _migrate(connection, schema, "base")
        connection.exec_driver_sql(f"DROP TABLE {VERSION_TABLE}")
        run(connection, f"DROP SCHEMA {quoted(schema)}")
    return int(last)


def ddl(schema: str = DEFAULT_SCHEMA) -> str:
    """Return the statements that `install` would run on a database without dblock, for a DBA to review and run."""
    check_name(schema)
    output = io.StringIO()
    _migrate(None, schema, "head", output)
    return output.getvalue()


def grant(target: Target | Where, role: str, schema: str = DEFAULT_SCHEMA, may: Iterable[str] = ("lock",)) -> list[str]:
    """Let a role `lock`, `see` locks, or `force-release` them: EXECUTE on functions, and no access to tables.

    The privileges are added to those that the role has. Return all that it has afterwards.
    """
    added = chosen(may)
    with _changing_privileges(target, role, schema) as connection:
        if not _is_owner(connection, role, schema):  # the owner may do all this and more
            may = chosen([*granted_to(connection, role, schema), *added])
            for statement in grant_statements(role, schema, may):
                connection.execute(statement.encode())
            _check_granted(connection, role, schema, may)
            _check_no_direct_access(connection, role, schema)
        return privileges_of(connection, role, schema)


def revoke(
    target: Target | Where, role: str, schema: str = DEFAULT_SCHEMA, may: Iterable[str] = tuple(PRIVILEGES)
) -> list[str]:
    """Take privileges from a role, by default all. Return those that it has afterwards.

    A privilege that the role also has by membership in another role, or by PUBLIC, remains.
    """
    taken = chosen(may)
    with _changing_privileges(target, role, schema) as connection:
        if _is_owner(connection, role, schema):
            raise InvalidArgument(f"Role {role!r} owns schema {schema!r}. An owner keeps all privileges.")
        left = [privilege for privilege in granted_to(connection, role, schema) if privilege not in taken]
        for statement in grant_statements(role, schema, left):
            connection.execute(statement.encode())
        if granted_to(connection, role, schema) != left:
            # A REVOKE by a login without the grant option is only a warning in Postgres.
            raise AccessDenied(
                f"Role {role!r} was not changed: this login may not revoke on schema {schema!r}. "
                "Run dblock revoke as the role that ran dblock install."
            )
        return privileges_of(connection, role, schema)


@contextmanager
def _changing_privileges(target: Target | Where, role: str, schema: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection in a transaction that other grants, revokes and installs of this schema wait for."""
    check_name(schema)
    with translated(schema), resolve(target).connect() as connection:
        status_of(connection, schema).check()
        if not is_text(role):
            raise InvalidArgument(f"A role's name must be text without NUL; got {role!a}.")
        with connection.transaction():
            # Whatever the default: after the wait, the privileges must be seen as they are then.
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            if _may_lock(connection.execute(_LOCKABLE, [f"{quoted(schema)}.{VERSION_TABLE}"]).fetchone()):
                connection.execute(_lock_statement(schema).encode())
            yield connection


def _is_owner(connection: psycopg.Connection[Any], role: str, schema: str) -> bool:
    """Return whether the role owns the schema; raise if it does not exist or may create objects in the schema."""
    found = connection.execute(
        "SELECT n.nspowner = r.oid, has_schema_privilege(r.oid, n.oid, 'CREATE') AND NOT r.rolsuper"
        " AND NOT pg_has_role(r.oid, n.nspowner, 'MEMBER')"
        " FROM pg_roles AS r, pg_namespace AS n WHERE r.rolname = %s AND n.nspname = %s",
        [role, schema],
    ).fetchone()
    if not found:
        raise InvalidArgument(f"There is no role {role!r} in this cluster. Check its name, or CREATE ROLE first.")
    is_owner, may_create = found
    if may_create and not is_owner:
        raise AccessDenied(
            f"Role {role!r} was granted nothing: it may create objects in schema {schema!r}, and so could reach the "
            "locks with the owner's privileges. Revoke that first."
        )
    return bool(is_owner)


def _check_granted(connection: psycopg.Connection[Any], role: str, schema: str, may: list[str]) -> None:
    """Raise if the role may not call what was just granted.

    A GRANT by a login without the grant option is only a warning in Postgres.
    """
    refused = connection.execute(
        "SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = %s::regnamespace"
        " AND p.proname = ANY(%s) AND NOT has_function_privilege(%s, p.oid, 'EXECUTE')",
        [quoted(schema), functions(may), role],
    ).fetchall()
    if refused:
        raise AccessDenied(
            f"Role {role!r} was granted nothing: this login may not grant on schema {schema!r}. "
            "Run dblock grant as the role that ran dblock install."
        )


def _check_no_direct_access(connection: psycopg.Connection[Any], role: str, schema: str) -> None:
    """Raise if the role can access a table or sequence directly."""
    accessible = connection.execute(
        "SELECT c.relname FROM pg_class AS c, pg_roles AS r"
        " WHERE c.relnamespace = %s::regnamespace AND c.relkind = ANY('{r,S}') AND r.rolname = %s"
        " AND NOT r.rolsuper AND NOT pg_has_role(r.oid, c.relowner, 'MEMBER')"
        " AND (CASE c.relkind WHEN 'S' THEN has_sequence_privilege(r.oid, c.oid, 'USAGE, SELECT, UPDATE')"
        " ELSE has_table_privilege(r.oid, c.oid, %s) END)",
        [quoted(schema), role, "SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER"],
    ).fetchone()
    if accessible:
        raise AccessDenied(
            f"Role {role!r} was granted nothing: it can access {accessible[0]!r} directly, by a privilege of PUBLIC or "
            "of a role that it is a member of. Revoke that first."
        )


def status(target: Target | Where, schema: str = DEFAULT_SCHEMA) -> Status:
    """Return the state of dblock's schema in a database."""
    check_name(schema)
    with translated(schema), resolve(target).connect() as connection:
        return status_of(connection, schema)


def status_of(connection: psycopg.Connection[Any], schema: str) -> Status:
    """Return the state of dblock's schema, over an open connection."""
    database, server, standby, installed = connection.execute(
        "SELECT current_database(), current_setting('server_version'), pg_is_in_recovery(),"
        " to_regprocedure(%s) IS NOT NULL",
        [f"{quoted(schema)}.schema_revision()"],
    ).fetchone() or ("", "", False, False)
    revision, complete = None, True
    if installed:
        row = connection.execute(f"SELECT {quoted(schema)}.schema_revision()".encode()).fetchone()
        revision = row[0] if row else None
        named = connection.execute(
            "SELECT count(DISTINCT p.proname) FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
            " WHERE n.nspname = %s AND p.proname = ANY(%s)",
            [schema, functions(PRIVILEGES)],
        ).fetchone()
        complete = named == (len(functions(PRIVILEGES)),)
    return Status(database, server, schema, revision, standby, complete)


def function_files() -> list[Path]:
    """Return the files with the functions' current bodies, in the order in which they run."""
    return [path for folder in _SQL_FOLDERS for path in sorted((PACKAGE / "sql" / folder).glob("*.sql"))]


@contextmanager
def _transaction(target: Target, schema: str, *, first: bool = False) -> Iterator[Connection]:
    from sqlalchemy import NullPool, create_engine

    def connect() -> psycopg.Connection[Any]:
        connection = target.connect()
        # A pooler gives the server's session, with all that was prepared in it, to other clients.
        connection.prepare_threshold = None
        return connection

    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
    # A connection in autocommit mode would otherwise stay so.
    engine = engine.execution_options(isolation_level="READ COMMITTED")
    with engine.begin() as connection:
        if first:
            wait_for_other_first_installs(connection, schema)
        name = f"{quoted(schema)}.{VERSION_TABLE}"
        if _may_lock(connection.exec_driver_sql(_LOCKABLE, (name,)).fetchone()):
            run(connection, _lock_statement(schema))
        else:
            lock_empty_schema(connection, schema)
        run(connection, _search_path(schema))
        yield connection


_LOCKABLE = "SELECT has_table_privilege(to_regclass(%s), 'UPDATE')"


def _may_lock(row: Any) -> bool:
    """Return whether the table of the revision exists and this login may lock it. Only such a login may change it."""
    return bool(row and row[0])


def _lock_statement(schema: str) -> str:
    return f"LOCK TABLE {quoted(schema)}.{VERSION_TABLE} IN SHARE ROW EXCLUSIVE MODE"


def _search_path(schema: str) -> str:
    # The functions keep this path. pg_temp comes last, so that no temporary object can shadow dblock's.
    return f"SET LOCAL search_path TO {quoted(schema)}, pg_temp"


def _revision(connection: Connection, schema: str) -> str | None:
    from sqlalchemy import text

    table = {"table": f"{quoted(schema)}.{VERSION_TABLE}"}
    if not connection.execute(text("SELECT to_regclass(:table)"), table).scalar():
        return None
    revision: str | None = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()
    return revision


def _create_schema(connection: Connection, schema: str) -> None:
    from sqlalchemy.exc import DBAPIError

    try:
        run(connection, creation_statement(schema))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != REFUSED:
            raise
        cause: Any = error.orig
        raise SchemaError(cause.diag.message_primary) from None


def creation_statement(schema: str) -> str:
    """Return the statement that creates the schema, or accepts one that a DBA has created for dblock alone."""
    tag = "$make$"
    while tag in schema:
        tag = f"${tag.strip('$')}_$"
    statement = (PACKAGE / "admin" / "create_schema.sql").read_text(encoding="utf-8")
    names = {"{name}": quoted(schema), "{literal}": literal(schema), "{sqlstate}": literal(REFUSED), "$make$": tag}
    return re.sub(r"\{\w+\}|\$make\$", lambda found: names[found[0]], statement)


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
    config.attributes["preamble"] = [creation_statement(schema), _search_path(schema)]
    try:
        (command.downgrade if revision == "base" else command.upgrade)(config, revision, sql=offline)
    except CommandError as error:
        raise SchemaError(
            f"Schema {schema!r} cannot be migrated: {error}. It was installed by another version of dblock. "
            "Use that version to uninstall it."
        ) from error


def migrations() -> Path:
    """Return the folder of the migrations: inside the installed package, or beside it in a checkout."""
    installed = PACKAGE / "migrations"
    return installed if installed.is_dir() else PACKAGE.parent / "alembic"
