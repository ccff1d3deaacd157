"""A caller cannot change what the functions do, neither with objects of its own nor with settings of its session.

An attacker fills three schemas (one of its own, public, and its session's pg_temp) with tables, functions, operators
and types under the names that the functions use. It puts these schemas before pg_catalog in its search_path, and calls
every SECURITY DEFINER function. Each of the attacker's functions increments a sequence, which no rollback undoes, and
then fails the call.

The shadowed names come from the catalogue: every name of pg_catalog that occurs in the body of a function.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.security.conftest import Connect
from tests.support.tokens import T1, T2

DEFINERS = (
    "SELECT pronamespace::regnamespace::text, proname, oid::regprocedure::text, proconfig, prosrc FROM pg_proc"
    " WHERE pronamespace IN ('dblock'::regnamespace, 'fenced_store'::regnamespace) AND prosecdef ORDER BY 1, 2"
)

TYPES = (
    "text", "uuid", "timestamptz", "jsonb", "json", "regclass", "regnamespace", "regprocedure", "oid", "bytea", "name",
)  # fmt: skip
"""Types that have no keyword in SQL, so that they are looked up in the search_path."""

OPERATED = (
    "text", "bigint", "integer", "double precision", "timestamptz", "interval", "uuid", "jsonb", "name", "bytea",
    "boolean", "oid", "numeric", '"char"',
)  # fmt: skip

HOSTILE_SETTINGS = {
    "search_path": "pg_temp, evil, public, pg_catalog, dblock, fenced_store",
    "quote_all_identifiers": "on",
    "transform_null_equals": "on",
    "array_nulls": "off",
    "extra_float_digits": "-15",
    "IntervalStyle": "sql_standard",
    "DateStyle": "ISO, DMY",
    "TimeZone": "'Pacific/Kiritimati'",
    "bytea_output": "escape",
    "row_security": "off",
    "default_transaction_deferrable": "on",
    "synchronous_commit": "off",
    "enable_indexscan": "off",
}

ATTEMPT, CLIENT, PRESENCE = (str(uuid.UUID(int=number)) for number in (1, 2, 3))

Check = Callable[[list[tuple[Any, ...]]], bool]


def one(*row: object) -> Check:
    """Return a check that the result is this one row. `...` matches any value but NULL."""
    return lambda got: (
        len(got) == 1 and all(a == b or (b is ... and a is not None) for a, b in zip(got[0], row, strict=True))
    )


def anything(got: list[tuple[Any, ...]]) -> bool:
    return len(got) == 1


CALLS: dict[str, dict[str, list[tuple[str, Check]]]] = {
    "dblock": {
        "schema_revision": [("schema_revision()", one("0001"))],
        "installation": [("installation()", one(...))],
        "register_presence": [(f"register_presence('{PRESENCE}', '1 s')", anything)],
        "try_acquire": [
            (f"try_acquire('a', '30 s', 'me', '{{}}', '{ATTEMPT}', presence => '{PRESENCE}')",
             one(True, T1, ..., 30.0, False)),
            (f"try_acquire('a', '30 s', 'me', '{{}}', '{ATTEMPT}', retry => true)",
             one(True, T1, ..., ..., False)),
            ("try_acquire('b', durable => false)", one(True, ..., ..., 30.0, False)),
        ],
        "acquire": [(f"acquire('a', attempt => '{CLIENT}', client => '{CLIENT}')",
                     one(False, None, ..., ..., 1, True, True, True))],
        "acquire_all": [
            (f"acquire_all('{{m,n}}', attempt => '{PRESENCE}')", one(..., ..., ..., *[None] * 9)),
        ],
        "acquire_any": [
            (f"acquire_any('{{o,p}}', attempt => '{PRESENCE}')", one("o", ..., ..., 30.0, 0, False, *[None] * 5)),
        ],
        "abandon_all": [(f"abandon_all('{{m,n,o}}', '{PRESENCE}')", one(3))],
        "give_way": [(f"give_way('{{m,n}}', '{PRESENCE}', '{CLIENT}', '{CLIENT}')", one(None))],
        "wake_set": [("wake_set('a')", one(False))],
        "heartbeat": [(f"heartbeat('{CLIENT}', '{{a}}')", one(1, [uuid.UUID(CLIENT)], ..., [True]))],
        "keep_ticket": [(f"keep_ticket('a', '{CLIENT}', '{CLIENT}', '3 s')", one(True))],
        "queue": [("queue('a')", one(...))],
        "holder": [("holder('a')", one(T1, "me", {}, ..., ..., ...))],
        "renew": [(f"renew('a', {T1}, '30 s')", one(..., 30.0))],
        "renew_all": [(f"renew_all('{{a,x}}', '{{{T1},7}}', '{{30 s,30 s}}')", one(..., [2], ["superseded"]))],
        "assert_held": [(f"assert_held('a', {T1})", one(True)), (f"assert_held('a', {T2})", one(False))],
        "bind_transaction": [(f"bind_transaction('a', {T1})", one(True)), (f"bind_transaction('a', {T2})", one(False))],
        "look_for_deadlock": [(f"look_for_deadlock('a', '{CLIENT}', '{{7}}')", one(False, None))],
        "wait_graph": [("wait_graph()", one(..., "a", "me", T1, ..., None, None, None))],
        "withdraw_presence": [(f"withdraw_presence('{PRESENCE}', '{{a,x}}', '{{{T1},7}}')", one([2]))],
        "list_locks": [("list_locks('%', 'a')", one("a", T1, "me", {}, ..., ..., None, None, ..., 1, *[None] * 4))],
        "list_waiters": [("list_waiters('a')", one("a", 1, ..., ..., ..., None))],
        "list_history": [("list_history('a')", lambda got: got == [])],
        "lock_metrics": [("lock_metrics(max_groups => 0)", one("other", ..., ..., 1, ..., 0))],
        "list_presence": [("list_presence('a')", lambda got: got == [])],
        "grants_are_recorded": [("grants_are_recorded()", one(False))],
        "migration_state": [("migration_state('a', '1')", one(False, None, 0, None, ...))],
        "begin_migration": [(f"begin_migration('a', {T1}, '1')", one("run", 1, ..., None))],
        "note_revision": [(f"note_revision(1, {T1}, 'r')", one(True))],
        "list_migrations": [("list_migrations('a')", anything)],
        "end_migration": [(f"end_migration(1, {T1}, 'failed', 'no')", one("failed"))],
        "retry_migration": [("retry_migration('a')", one(1))],
        "migration_sessions": [("migration_sessions('a')", lambda got: got == [])],
        "discard_restored_grant": [("discard_restored_grant('a')", one(False))],
        "invalid_indexes": [("invalid_indexes()", lambda got: got == [])],
        "list_guards": [("list_guards()", lambda got: got == [])],
        "claim_slot": [
            ("claim_slot('job', every => '100 ms', catch_up => 'latest')", lambda got: got[0][0] == "run"),
        ],
        "end_slot": [("end_slot('job', 7, 'failed')", one(None))],
        "slot_outcome": [("slot_outcome('job', '2020-01-01')", lambda got: got == [])],
        "list_schedules": [("list_schedules('job')", anything)],
        "list_schedule_events": [("list_schedule_events('job')", anything)],
        "pause_schedule": [("pause_schedule('job', 'x', 'y')", one(True))],
        "resume_schedule": [("resume_schedule('job', 'x', 'y')", one(True))],
        "run_schedule": [("run_schedule('job', 'x', 'y')", one(True))],
        "delete_schedule": [("delete_schedule('job', 'x', 'y')", one(True))],
        "join_election": [(f"join_election('e', '{ATTEMPT}', 'me', '{{1}}')", anything)],
        "leave_election": [(f"leave_election('e', '{ATTEMPT}')", one(True))],
        "begin_term": [("begin_term('e', (SELECT token FROM dblock.try_acquire('election:e')))", one("lead"))],
        "term_demand": [("term_demand('e', (SELECT token FROM dblock.election_leader('e')))", one(None))],
        "publish_value": [("publish_value('e', (SELECT token FROM dblock.election_leader('e')), '1')", one(True))],
        "transfer_term": [("transfer_term('e', (SELECT token FROM dblock.election_leader('e')), 'x')", one("absent"))],
        "election_leader": [("election_leader('e')", one(..., ..., 1, ..., None))],
        "list_candidates": [("list_candidates('e')", lambda got: got == [])],
        "end_term": [("end_term('e', (SELECT token FROM dblock.election_leader('e')))", one(True))],
        "list_terms": [("list_terms('e')", one(..., False))],
        "arrive_barrier": [
            (f"arrive_barrier('b', 2, '{ATTEMPT}', '{CLIENT}', 'me', '{PRESENCE}')",
             one(False, None, None, False, True, None)),
            (f"arrive_barrier('b', 2, '{CLIENT}', '{CLIENT}')", one(True, 1, 1, True, True, None)),
        ],
        "wake_waiters": [("wake_waiters('barrier', 'b')", one(1))],
        "leave_barrier": [(f"leave_barrier('b', '{ATTEMPT}')", one(0))],
        "await_latch": [(f"await_latch('l', 2, '{ATTEMPT}', '{CLIENT}')", one(2, True))],
        "count_down": [("count_down('l', 2)", one(1, False))],
        "latch_remaining": [("latch_remaining('l', 2)", one(1))],
        "list_barriers": [("list_barriers('b')", one("barrier", "b", 2, 2, 1, [], ...))],
        "delete_barrier": [("delete_barrier('b')", one(True))],
        "delete_latch": [("delete_latch('l')", one(True))],
        "abandon": [(f"abandon('a', '{CLIENT}')", one(True))],
        "acquire_shared": [
            (f"acquire_shared('rw', 'read-write', 'write', attempt => '{ATTEMPT}')", lambda got: got[0][1] is True),
            (f"acquire_shared('s', 'semaphore', permits => 1, attempt => '{ATTEMPT}')", lambda got: got[0][1] is True),
            (f"acquire_shared('s', 'semaphore', attempt => '{ATTEMPT[:-1]}7', client => '{CLIENT}')",
             lambda got: got[0][:2] == (1, False)),
        ],
        "downgrade": [
            ("downgrade('rw', (SELECT token FROM dblock.holder('rw#writer')))", lambda got: got[0][1] is True),
        ],
        "resize_semaphore": [("resize_semaphore('s', 2)", one(1))],
        "shared_state": [("shared_state('s')", one("semaphore", 2, 1, ...))],
        "leave_queue": [(f"leave_queue('{CLIENT}', '{PRESENCE}')", anything)],
        "wake_queue": [("wake_queue('a')", anything)],
        "force_release": [(f"force_release('a', {T1}, 'x', 'y')", one(True))],
        "delete_lock": [("delete_lock('a')", one(False)), ("delete_lock('missing')", one(False))],
        "release": [(f"release('a', {T1})", one(True)), (f"release('a', {T1})", one(False))],
        "release_all": [("release_all('{a,b}', '{1,1}')", one(0, None))],
    },
    "fenced_store": {
        "revision": [("revision()", one(1))],
        "raise_fence": [("raise_fence('r', 5)", anything), ("raise_fence('public.rows:1', 5)", anything)],
        "claim": [("claim('{r,s,public.rows,public.rows:1}', 6, patience => 1)", anything)],
        "write": [
            ("write('k', 5, 1, '{\"a\": 1}', NULL)", one("stored", 1, 5, 1, ...)),
            ("write('k', 4, 1, '1', NULL)", one("stale", 1, 5, 1, ...)),
        ],
        "read": [("read('k')", one({"a": 1}, None, 1, 5, ..., None))],
        "history": [("history('k')", one({"a": 1}, None, 1, 5, ..., None))],
        "guard_truncate": [("guard_truncate('public.rows', 0, false, false)", anything)],
        "preserve_fence": [("preserve_fence('left', 9)", anything)],
        "current_fence": [("current_fence('left')", one(9))],
        "highest_fence": [("highest_fence('left')", one(9))],
        "resource_of": [("resource_of('public.whole')", one("public.whole"))],
        "reserve_resource": [("reserve_resource('public.rows')", one("public.rows"))],
        "create_guard": [("create_guard('public.rows', '{id}')", one(...))],
        "record_protection": [("record_protection('public.whole')", one("public.whole"))],
        "record_unprotection": [("record_unprotection('public.plain')", anything)],
        "owns_fence_columns": [("owns_fence_columns('public.rows')", one(True))],
        "protected_tables": [("protected_tables()", lambda got: got == [("public.rows",), ("public.whole",)])],
        "record_rejection": [("record_rejection('k', 1, 2, NULL, NULL)", anything)],
    },
}  # fmt: skip
"""Calls of each SECURITY DEFINER function, with a check of the result, in this order."""

TRIGGERS = {("fenced_store", "guard_table_trigger"), ("dblock", "guard_ddl")}
"""The functions that a write to a protected table and a change of a guarded schema call."""


@pytest.fixture
def attacker(connect: Connect, owner: psycopg.Connection, kinds: dict[str, str]) -> Iterator[psycopg.Connection]:
    """Open a session of a role that has every privilege, and create its hostile objects."""
    role = kinds["lock"]
    for statement in (
        "CREATE TABLE public.rows (id int PRIMARY KEY, v text)", "CREATE TABLE public.whole (id int)",
        "CREATE TABLE public.plain (id int)", "SELECT fenced_store.protect_table('public.rows')",
        "SELECT fenced_store.protect_table('public.whole', per => 'table')",
        f"GRANT ALL ON public.rows, public.whole TO {role}", f"CREATE SCHEMA evil AUTHORIZATION {role}",
        f"GRANT CREATE ON SCHEMA public TO {role}",
        f"GRANT {kinds['fence']}, {kinds['see']}, {kinds['force-release']} TO {role}",
    ):  # fmt: skip
        owner.execute(statement.encode())
    session = connect("lock")
    create_hostile_objects(session, shadowed(owner))
    yield session
    owner.execute(f"REVOKE {kinds['fence']}, {kinds['see']}, {kinds['force-release']} FROM {role}".encode())


def shadowed(owner: psycopg.Connection) -> list[str]:
    """Return the statements that create the attacker's objects in a schema, written `@@`."""
    bodies = owner.execute(
        "SELECT string_agg(prosrc, ' ') FROM pg_proc"
        " WHERE pronamespace IN ('dblock'::regnamespace, 'fenced_store'::regnamespace)"
    ).fetchone()
    words = sorted(set(re.findall(r"[a-z_][a-z0-9_]+", bodies[0] if bodies else "")))
    statements = []
    for schema in ("dblock", "fenced_store"):
        tables = owner.execute(
            "SELECT relname, string_agg(format('%%I %%s', attname, format_type(atttypid, NULL)), ', ')"
            " FROM pg_class AS c"
            " JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
            " WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r' GROUP BY 1",
            [schema],
        ).fetchall()
        statements += [f"CREATE TABLE IF NOT EXISTS @@.{name} ({columns})" for name, columns in tables]
        sequences = owner.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'S'", [schema]
        )
        statements += [f"CREATE SEQUENCE IF NOT EXISTS @@.{name}" for (name,) in sequences.fetchall()]
    # Name the schema of a table's row type in the arguments.
    owner.execute("SET search_path TO pg_catalog")
    functions = owner.execute(
        "SELECT DISTINCT proname, pg_get_function_arguments(oid), pg_get_function_result(oid)"
        " FROM pg_proc WHERE prokind = 'f' AND prorettype <> ALL ('{trigger,internal,cstring}'::regtype[])"
        " AND proname = ANY(%s) AND pronamespace = ANY('{pg_catalog,dblock,fenced_store}'::regnamespace[])"
        # Not the types that only built-in functions can take: internal, cstring, and "any".
        " AND NOT proargtypes::oid[] && '{2281,2275,2276}'::oid[] AND NOT proretset",
        [words],
    ).fetchall()
    owner.execute("SET search_path TO dblock, public")
    body = "LANGUAGE plpgsql AS 'BEGIN PERFORM pg_catalog.nextval(''evil.tripwire''); RAISE ''tripped by {}''; END'"
    for name, arguments, result in functions:
        # With OUT parameters, these declare the result.
        returns = "" if "OUT " in arguments else f" RETURNS {result}"
        statements.append(f'CREATE FUNCTION @@."{name}"({arguments}){returns} {body.format(name)}')
    operators = owner.execute(
        "SELECT DISTINCT oprname, format_type(oprleft, NULL), format_type(oprright, NULL), format_type(oprresult, NULL)"
        " FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprleft = ANY(%s::regtype[])"
        " AND oprright = ANY(%s::regtype[]) AND oprname = ANY('{=,<>,<,<=,>,>=,||,+,-,*,/,<<,&,~~,~,!~}')",
        [list(OPERATED), list(OPERATED)],
    ).fetchall()
    for number, (name, left, right, result) in enumerate(operators):
        statements += [
            f"CREATE FUNCTION @@.operate_{number}({left}, {right}) RETURNS {result} {body.format('an operator')}",
            f"CREATE OPERATOR @@.{name} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = @@.operate_{number})",
        ]
    return statements


MAKE = """
CREATE FUNCTION evil.make(statements text[]) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    one text;
    made integer := 0;
BEGIN
    FOREACH one IN ARRAY statements LOOP
        BEGIN
            EXECUTE one;
            made := made + 1;
        EXCEPTION WHEN syntax_error OR invalid_function_definition OR duplicate_function OR invalid_table_definition
            OR undefined_function
        THEN
            -- The name is a keyword of SQL, or no user-defined function can have such a result.
        END;
    END LOOP;
    RETURN made;
END $$
"""


def create_hostile_objects(session: psycopg.Connection, statements: list[str]) -> None:
    session.execute("CREATE SEQUENCE evil.tripwire")
    session.execute("GRANT USAGE ON SCHEMA evil TO PUBLIC")
    session.execute("GRANT ALL ON SEQUENCE evil.tripwire TO PUBLIC")
    session.execute("SET check_function_bodies = off")
    session.execute("CREATE TEMP TABLE makes_the_schema ()")
    session.execute(
        "CREATE FUNCTION evil.trip() RETURNS boolean LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_catalog.nextval(''evil.tripwire''); RETURN true; END'"
    )
    session.execute(MAKE)
    made = 0
    for schema in ("evil", "public", "pg_temp"):
        all_of = [statement.replace("@@", schema) for statement in statements]
        row = session.execute("SELECT evil.make(%s)", [all_of]).fetchone()
        made += row[0] if row else 0
    assert made > 1000, "too few hostile objects to prove anything"
    with session.transaction():
        for kind in TYPES:
            session.execute(f"CREATE DOMAIN evil.{kind} AS pg_catalog.{kind} CHECK (evil.trip())".encode())


def check_all_results(session: psycopg.Connection) -> None:
    for schema, called in CALLS.items():
        for name, calls in called.items():
            for call, check in calls:
                statement = f"SELECT * FROM {schema}.{call}"
                if name == "protected_tables":
                    statement = statement.replace("*", "resource")
                got = session.execute(statement.encode()).fetchall()
                assert check(got), f"{call} returned {got}"


def tripped(owner: psycopg.Connection) -> bool:
    row = owner.execute("SELECT is_called FROM evil.tripwire").fetchone()
    return bool(row and row[0])


def prepare(session: psycopg.Connection) -> None:
    for name, value in HOSTILE_SETTINGS.items():
        session.execute(sql.SQL("SET {} TO {}").format(sql.SQL(name), sql.SQL(value)))


def test_every_definer_function_sets_its_search_path(owner: psycopg.Connection) -> None:
    """The path is the schema, then pg_temp, and nothing else. An unnamed pg_temp would be searched first."""
    owner.execute("CREATE TABLE public.rows (id int PRIMARY KEY)")
    owner.execute("SELECT fenced_store.protect_table('public.rows')")
    found = owner.execute(DEFINERS).fetchall()
    assert sum(name.startswith("guard_") and name not in CALLS[schema] for schema, name, *_ in found) == 3
    for schema, _, signature, settings, _ in found:
        assert f"search_path={schema}, pg_temp" in (settings or []), signature
    makers = owner.execute(
        "SELECT n.nspname FROM pg_namespace AS n,"
        " aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) AS a"
        " WHERE n.nspname IN ('dblock', 'fenced_store') AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner"
    ).fetchall()
    assert makers == [], "a role that may create in the first schema of the path could shadow anything"


def test_every_definer_function_is_called_by_the_attacker(owner: psycopg.Connection) -> None:
    there = {(schema, name) for schema, name, *_ in owner.execute(DEFINERS).fetchall()}
    assert there == {(schema, name) for schema, called in CALLS.items() for name in called} | TRIGGERS


@pytest.mark.usefixtures("known_tokens")
@pytest.mark.second_stage
def test_attackers_objects_never_run_with_the_owners_privileges(
    attacker: psycopg.Connection, owner: psycopg.Connection
) -> None:
    prepare(attacker)
    check_all_results(attacker)
    # The trigger functions run when the attacker writes to protected tables.
    for table, statement in (
        ("rows", "INSERT INTO public.rows (id, v) VALUES (1, 'x')"),
        ("rows", "UPDATE public.rows SET v = 'y'"),
        ("rows", "DELETE FROM public.rows"),
        ("whole", "INSERT INTO public.whole VALUES (1)"),
    ):
        with attacker.transaction():
            attacker.execute("SET LOCAL fenced_store.token = '7'")
            attacker.execute(statement.encode())
        assert table
    owner.execute("SELECT dblock.guard_schema('public')")
    with pytest.raises(psycopg.Error) as refused:
        attacker.execute("CREATE TABLE public.guarded ()")
    assert refused.value.sqlstate == "DBL02"
    owner.execute("SELECT dblock.unguard_schema()")
    assert not tripped(owner)
    assert owner.execute("SELECT token FROM fenced_store.fences WHERE resource = 'public.rows:1'").fetchone() == (7,)
    for name in ("distributed_locks", "lock_tickets", "fences", "rejections"):
        for schema in ("evil", "public"):
            assert owner.execute(f"SELECT count(*) FROM {schema}.{name}".encode()).fetchone() == (0,)
        assert attacker.execute(f"SELECT pg_catalog.count(*) FROM pg_temp.{name}".encode()).fetchone() == (0,)

    # Prove that the hostile objects catch a function without a search_path of its own.
    attacker.execute("INSERT INTO pg_temp.distributed_locks (name, expires_at) VALUES ('b', 'infinity')")
    owner.execute("ALTER FUNCTION dblock.holder(text) RESET search_path")
    with pytest.raises(psycopg.Error, match="tripped by"):
        attacker.execute("SELECT dblock.holder('b')")
    assert tripped(owner)


def test_no_session_setting_changes_which_queue_is_locked(connect: Connect, owner: psycopg.Connection) -> None:
    """Two sessions that lock different rows would both believe that they have the queue locked."""
    owner.execute("SELECT try_acquire('a')")
    for settings in ({}, HOSTILE_SETTINGS):
        session = connect("lock")
        for name, value in settings.items():
            session.execute(sql.SQL("SET {} TO {}").format(sql.SQL(name), sql.SQL(value)))
        with session.transaction(force_rollback=True):
            session.execute(f"SELECT * FROM dblock.acquire('a', attempt => '{ATTEMPT}', client => '{CLIENT}')".encode())
            assert owner.execute("SELECT lock_queue('a', 1)").fetchone() == (False,)
            assert owner.execute("SELECT lock_queue('b', 1)").fetchone() == (True,)
        assert owner.execute("SELECT lock_queue('a', 1)").fetchone() == (True,)
