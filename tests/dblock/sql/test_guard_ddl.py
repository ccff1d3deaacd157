"""The guard refuses DDL in its schemas outside a migration that holds the lock, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

REFUSED = "DBL02"

REFUSED_STATEMENTS = [
    "ALTER TABLE orders ADD COLUMN m int",
    "CREATE INDEX CONCURRENTLY by_day ON orders (day)",
    "DROP TABLE orders",
    "CREATE TABLE more (n int)",
    "CREATE TABLE copied AS SELECT * FROM orders",
    "SELECT * INTO copied FROM orders",
    "CREATE INDEX ON orders (day)",
    "CREATE VIEW days AS SELECT day FROM orders",
    "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE TYPE mood AS ENUM ('good')",
    "CREATE TRIGGER t BEFORE UPDATE ON orders EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "CREATE POLICY mine ON orders USING (n = 1)",
    "CREATE RULE r AS ON DELETE TO orders DO INSTEAD NOTHING",
    "COMMENT ON TABLE orders IS 'x'",
    "ALTER TABLE orders SET SCHEMA other",
    "ALTER TABLE other.parts SET SCHEMA public",
    "ALTER SCHEMA public RENAME TO old",
    "DROP SCHEMA public CASCADE",
    "DO $$ BEGIN ALTER TABLE orders ADD COLUMN m int; END $$",
    "/* by hand */ CREATE INDEX -- quick\n CONCURRENTLY by_day ON orders (day) /* once */",
    'create unique index concurrently "by day" on "public" . "orders" (day)',
    "ALTER TABLE ONLY Public.Orders DROP COLUMN day",
]
"""Statements that change schema public."""

ALLOWED_STATEMENTS = [
    "CREATE TEMPORARY TABLE t (id serial PRIMARY KEY); CREATE INDEX ON t (id); DROP TABLE t",
    "CREATE TEMPORARY TABLE t ON COMMIT DROP AS SELECT 1 AS n",
    "CREATE TABLE other.t (n int); ALTER TABLE other.t ADD COLUMN m int; DROP TABLE other.t",
    "CREATE INDEX CONCURRENTLY by_n ON other.parts (n)",
    "CREATE SCHEMA more",
    "DO $$ BEGIN CREATE INDEX ON other.parts (n); END /* not concurrently, and not on orders */ $$",
    "INSERT INTO public.orders VALUES (now(), 1)",
    "TRUNCATE public.orders",
    "VACUUM public.orders",
    "REINDEX TABLE public.orders",
    "REINDEX TABLE CONCURRENTLY public.orders",
    "SELECT dblock.record_grants(true)",
]
"""Statements that change nothing in schema public, or are no DDL."""

Connect = Callable[..., psycopg.Connection]


@pytest.fixture
def connect(dsn: str, owner: psycopg.Connection) -> Iterator[Connect]:
    """Opens sessions in a database whose schema public is guarded: migration m may change it."""
    owner.execute("CREATE TABLE public.orders (day date, n int); CREATE SCHEMA other; CREATE TABLE other.parts (n int)")
    owner.execute("SELECT guard_schema('public', '{m}')")
    with ExitStack() as stack:

        def opened(mark: str = "psql", **options: Any) -> psycopg.Connection:
            made = psycopg.connect(dsn, autocommit=True, application_name=mark, **options)
            return stack.enter_context(made)

        yield opened


def begun(owner: psycopg.Connection, name: str = "m") -> tuple[int, str]:
    """Begin a migration, and return its token and the mark of its sessions."""
    ((token, mark),) = owner.execute(
        "SELECT t.token, b.mark FROM try_acquire(%s, '1 hour') AS t, begin_migration(%s, t.token) AS b",
        [name, name],
    ).fetchall()
    return token, mark


def is_refused(session: psycopg.Connection, statement: str) -> bool:
    """Return whether the guard refuses a statement."""
    try:
        session.execute(statement.encode())
    except psycopg.Error as error:
        assert error.sqlstate == REFUSED, error
        return True
    return False


def test_ddl_outside_a_migration_is_refused_and_leaves_nothing(connect: Connect, owner: psycopg.Connection) -> None:
    listed = "SELECT oid, relname, relnamespace FROM pg_class WHERE oid >= 16384 AND relkind <> 't' ORDER BY 1"
    before, session = owner.execute(listed).fetchall(), connect()
    for statement in REFUSED_STATEMENTS:
        assert is_refused(session, statement), statement
        assert owner.execute(listed).fetchall() == before, statement


def test_everything_else_is_allowed(connect: Connect) -> None:
    session = connect()
    for statement in ALLOWED_STATEMENTS:
        assert not is_refused(session, statement), statement


def test_refusal_says_what_it_needs_and_what_to_do(connect: Connect) -> None:
    with pytest.raises(psycopg.Error) as refusal:
        connect().execute("ALTER TABLE orders ADD COLUMN m int")
    said = refusal.value.diag
    assert said.message_primary == (
        "ALTER TABLE of public.orders is refused: DDL in schema public needs a migration that holds the lock 'm'. "
        "This session belongs to no migration."
    )
    assert said.message_hint == (
        "Run it in a migration, for example: dblock migrate --name 'm' -- COMMAND. In an emergency: "
        "SET dblock.allow_ddl = 'the reason'; and try again. To remove the guard: dblock guard remove public"
    )


def test_session_of_the_holder_may_do_everything(connect: Connect, owner: psycopg.Connection) -> None:
    _, mark = begun(owner)
    session = connect(mark)
    for statement in (
        "ALTER TABLE orders ADD COLUMN m int",
        "CREATE INDEX CONCURRENTLY by_day ON orders (day)",
        "DROP INDEX CONCURRENTLY by_day",
        "BEGIN; CREATE TABLE more (n int); COMMIT",
        "BEGIN ISOLATION LEVEL SERIALIZABLE; ALTER TABLE more ADD COLUMN m int; COMMIT",
        "DROP TABLE more",
        "ALTER TABLE orders SET SCHEMA other",
    ):
        assert not is_refused(session, statement)
    assert owner.execute("SELECT to_regclass('other.orders') IS NOT NULL").fetchone() == (True,)


def test_session_of_a_stale_holder_is_refused(connect: Connect, owner: psycopg.Connection) -> None:
    token, mark = begun(owner)
    stale = connect(mark)
    assert not is_refused(stale, "ALTER TABLE orders ADD COLUMN m int")
    owner.execute("SELECT release('m', %s)", [token])
    assert is_refused(stale, "CREATE INDEX CONCURRENTLY by_day ON orders (day)"), "released"
    begun(owner)
    assert is_refused(stale, "CREATE INDEX CONCURRENTLY by_day ON orders (day)"), "superseded"
    assert is_refused(stale, "ALTER TABLE orders DROP COLUMN m")
    assert owner.execute("SELECT to_regclass('public.by_day')").fetchone() == (None,), "not even an invalid index"


def test_session_of_an_expired_holder_is_refused(connect: Connect, owner: psycopg.Connection) -> None:
    _, mark = begun(owner)
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    with pytest.raises(psycopg.Error, match="which does not hold it"):
        connect(mark).execute("ALTER TABLE orders ADD COLUMN m int")
    assert is_refused(connect(mark), "CREATE INDEX CONCURRENTLY by_day ON orders (day)")


@pytest.mark.second_stage
def test_session_of_another_migration_or_another_role_is_refused(
    connect: Connect, owner: psycopg.Connection, role: str
) -> None:
    _, other = begun(owner, "n")
    assert is_refused(connect(other), "ALTER TABLE orders ADD COLUMN m int")
    assert not is_refused(connect(other), "CREATE INDEX CONCURRENTLY by_n ON other.parts (n)")
    owner.execute(f"GRANT ALL ON SCHEMA public, dblock TO {role}".encode())
    owner.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA dblock TO {role}".encode())
    as_role = connect(user=role, password="app")
    as_role.execute("SET search_path TO dblock")
    _, mark = begun(as_role)
    assert not is_refused(connect(mark, user=role, password="app"), "CREATE TABLE mine (n int)")
    assert is_refused(connect(mark), "CREATE TABLE theirs (n int)"), "a role that the run's role may not act as"


def test_ddl_keeps_the_lock_until_its_transaction_ends(connect: Connect, owner: psycopg.Connection) -> None:
    token, mark = begun(owner)
    session = connect(mark)
    session.execute("BEGIN")
    session.execute("ALTER TABLE orders ADD COLUMN m int")
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert owner.execute("SELECT granted FROM try_acquire('m')").fetchone() == (False,)
    session.execute("COMMIT")
    assert owner.execute("SELECT token > %s FROM try_acquire('m')", [token]).fetchone() == (True,)


def test_reason_allows_ddl_for_one_session(connect: Connect) -> None:
    session = connect()
    session.execute("SET dblock.allow_ddl = ''")
    assert is_refused(session, "ALTER TABLE orders ADD COLUMN m int"), "a reason is text"
    session.execute("SET dblock.allow_ddl = 'disk is full, ticket 812'")
    assert not is_refused(session, "ALTER TABLE orders ADD COLUMN m int")
    assert not is_refused(session, "CREATE INDEX CONCURRENTLY by_day ON orders (day)")
    assert is_refused(connect(), "DROP TABLE orders")


@pytest.mark.second_stage
def test_role_without_privileges_uses_temporary_tables_and_its_own_schema(
    connect: Connect, owner: psycopg.Connection, role: str
) -> None:
    owner.execute(f"CREATE SCHEMA mine AUTHORIZATION {role}".encode())
    session = connect(user=role, password="app")
    assert not is_refused(session, "CREATE TEMPORARY TABLE t (n int)")
    assert not is_refused(session, "CREATE TABLE mine.t (n int); DROP TABLE mine.t")


def test_several_migrations_may_change_one_schema(connect: Connect, owner: psycopg.Connection) -> None:
    owner.execute("SELECT guard_schema('public', '{m,n}')")
    owner.execute("SELECT guard_schema('other', '{p}')")
    guards = "SELECT * FROM list_guards()"
    assert owner.execute(guards).fetchall() == [("other", ["p"], True), ("public", ["m", "n"], True)]
    assert not is_refused(connect(begun(owner, "n")[1]), "ALTER TABLE orders ADD COLUMN m int")
    assert is_refused(connect(begun(owner, "m")[1]), "ALTER TABLE other.parts ADD COLUMN m int")


def test_guard_that_is_broken_lets_ddl_pass_and_warns(connect: Connect, owner: psycopg.Connection) -> None:
    owner.execute("DROP TABLE ddl_guards")
    session, warnings = connect(), []
    session.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))
    assert not is_refused(session, "ALTER TABLE orders ADD COLUMN m int")
    assert warnings == [
        'The guard of dblock cannot check ALTER TABLE and lets it pass: relation "ddl_guards" does not exist'
    ]


def test_event_triggers_go_with_the_last_guard_or_with_the_schema(connect: Connect, owner: psycopg.Connection) -> None:
    triggers = "SELECT count(*) FROM pg_event_trigger"
    owner.execute("SELECT guard_schema('other')")
    owner.execute("SELECT unguard_schema('public')")
    assert owner.execute(triggers).fetchone() == (3,)
    assert not is_refused(connect(), "ALTER TABLE orders ADD COLUMN m int")
    assert owner.execute("SELECT unguard_schema()").fetchone() == ([],)
    assert owner.execute(triggers).fetchone() == (0,)
    owner.execute("SELECT guard_schema('public')")
    connect().execute("DROP SCHEMA dblock CASCADE")
    assert owner.execute(triggers).fetchone() == (0,)
    assert not is_refused(connect(), "DROP TABLE orders")


def test_guard_needs_a_schema_of_yours_and_a_name(owner: psycopg.Connection) -> None:
    for call, said in {
        "guard_schema('dblock')": "belongs to dblock or to Postgres",
        "guard_schema('pg_catalog')": "belongs to dblock or to Postgres",
        "guard_schema('none')": "There is no schema 'none'",
        "guard_schema(NULL)": "There is no schema NULL",
        "guard_schema('public', '{}')": "needs the name of a migration",
        "guard_schema('public', '{NULL}')": "A lock's name takes 1 to 512 bytes",
    }.items():
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=said):
            owner.execute(f"SELECT {call}".encode())
    assert owner.execute("SELECT count(*) FROM pg_event_trigger").fetchone() == (0,)


def test_disabled_guard_is_shown_and_enabled_again(connect: Connect, owner: psycopg.Connection) -> None:
    owner.execute("ALTER EVENT TRIGGER dblock_guard_end DISABLE")
    assert owner.execute("SELECT active FROM list_guards()").fetchone() == (False,)
    assert not is_refused(connect(), "ALTER TABLE orders ADD COLUMN m int")
    owner.execute("SELECT guard_schema('public', '{m}')")
    assert is_refused(connect(), "DROP TABLE orders")
    assert owner.execute("SELECT active FROM list_guards()").fetchone() == (True,)


@pytest.mark.second_stage
def test_owner_who_may_not_drop_event_triggers_empties_the_guard(
    connect: Connect, owner: psycopg.Connection, role: str, dsn: str
) -> None:
    for kind in ("TABLE ddl_guards", "FUNCTION unguard_schema", "FUNCTION list_guards"):
        owner.execute(f"ALTER {kind} OWNER TO {role}".encode())
    owner.execute(f"GRANT USAGE ON SCHEMA dblock TO {role}".encode())
    with psycopg.connect(conninfo.make_conninfo(dsn, user=role, password="app"), autocommit=True) as session:
        (kept,) = session.execute("SELECT dblock.unguard_schema()").fetchone() or ([],)
    assert kept == ["dblock_guard_drop", "dblock_guard_end", "dblock_guard_start"]
    assert not is_refused(connect(), "ALTER TABLE orders ADD COLUMN m int")
