"""Each role can do only what the tables below allow: every kind of role tries every object of both schemas.

The objects come from the catalogue, and their privileges from the tables below. The test fails for an object that is
in only one of the two, so a new object needs a decision here.

The tests do not protect roles that may lock from each other. A lock's token is no secret: `holder` shows it to all of
them, and any role with the token can renew and release like the holder. Attempts, clients and presences are secret,
because with them a role could impersonate another waiter or make a holder look dead.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

import dblock
from tests.security.conftest import KINDS, Connect
from tests.support.eventually import eventually

OWNER_ALONE: frozenset[str] = frozenset()
LOCK, SEE, FORCE, FENCE = (frozenset({kind}) for kind in KINDS[1:])

MAY_CALL = {
    "dblock": {
        **dict.fromkeys(
            (
                "try_acquire", "acquire", "heartbeat", "register_presence", "withdraw_presence", "leave_queue", "queue",
                "abandon", "keep_ticket", "acquire_all", "acquire_any", "abandon_all", "give_way", "wake_set",
                "renew", "renew_all", "release", "release_all", "assert_held", "holder",
                "acquire_shared", "downgrade", "resize_semaphore", "shared_state",
                "bind_transaction", "look_for_deadlock",
            ),
            LOCK,
        ),
        **dict.fromkeys(
            (
                "begin_migration", "note_revision", "end_migration", "migration_sessions", "retry_migration",
                "discard_restored_grant", "claim_slot", "end_slot", "pause_schedule", "resume_schedule",
                "run_schedule", "delete_schedule", "join_election", "leave_election", "begin_term", "end_term",
                "publish_value", "transfer_term", "term_demand", "arrive_barrier", "leave_barrier", "wake_waiters",
                "count_down", "await_latch", "latch_remaining", "delete_barrier", "delete_latch",
            ),
            LOCK,
        ),
        **dict.fromkeys(
            (
                "list_locks", "list_waiters", "list_history", "list_presence", "wait_graph", "grants_are_recorded",
                "list_migrations", "list_schedule_events", "list_candidates", "list_guards",
                "lock_metrics",
            ),
            SEE,
        ),
        **dict.fromkeys(
            (
                "migration_state", "invalid_indexes", "list_schedules", "slot_outcome", "election_leader", "list_terms",
                "list_barriers",
            ),
            LOCK | SEE,
        ),
        **dict.fromkeys(("force_release", "delete_lock"), FORCE),
        "wake_queue": LOCK | FORCE,
        **dict.fromkeys(("schema_revision", "installation"), LOCK | SEE | FORCE),
        **dict.fromkeys(
            (
                "check_request", "commit_durably", "commit_asynchronously", "free_lock",
                "check_snapshot", "describe_session",
                "catch_up_tokens", "record_event", "record_grant_end", "record_grant_change",
                "record_grants", "lock_queue", "lock_or_create_queue", "lock_row_briefly", "sees_latest_commits",
                "snapshot_is_fresh", "session_is_gone", "wake_past_the_dead", "notify_waiter",
                "remaining_grace", "presence_key", "presence_is_registered", "client_is_alive", "first_is_alive",
                "free_dead_holder", "first_in_queue", "queue_is_empty", "wake_next", "wake_if_free",
                "touch_client", "raise_tokens", "show_tokens", "reap",
                "token_key", "bound_sessions", "tokens_in_the_way", "find_cycle", "describe_cycle",
                "describe_kind", "refuse_kind", "is_unused", "lock_head", "check_shared_name", "mint_token",
                "look_at_shares", "share_name", "lock_free_shares", "lowest_free_share", "take_share", "grant_share",
                "live_tickets", "excluding_kinds", "wake_shared", "notify_shared", "look_at_shared_queue",
                "migration_mark", "database_identity", "failed_runs",
                "runs_migration", "identifier_of", "hides_its_objects", "guarded_names", "guarded_changes", "guard_ddl",
                "guard_schema", "unguard_schema",
                "check_schedule", "run_lock", "slots_between", "undecided_after", "slot_after", "slot_grace",
                "same_slots", "same_rules", "define_schedule", "plan_suffices", "extend_plan", "look_at_schedule",
                "run_is_over", "run_is_alive_for", "record_schedule_event", "record_unrun_slots", "moment_as_text",
                "run_as_json", "election_lock", "check_election", "live_candidates", "end_terms_below",
                "record_ended_term",
                "check_barrier", "check_same_size", "register_waiter", "trip_barrier", "reap_barriers",
                "record_ended_term", "check_names", "first_wanted", "owner_bound", "lock_in_cycle", "wait_of",
            ),
            OWNER_ALONE,
        ),
    },
    "fenced_store": {
        **dict.fromkeys(
            (
                "raise_fence", "claim", "write", "read", "history", "guard_truncate",
                "guard_table_trigger", "preserve_fence", "current_fence", "highest_fence", "key_expression",
                "has_fence_columns",
                "highest_token", "guard_truncate_trigger", "guard_function_name", "is_plain_type", "lock_table",
                "resource_of", "reserve_resource",
                "create_guard", "record_protection", "record_unprotection", "owns_fence_columns",
                "row_key", "protect_table",
                "unprotect_table", "protected_tables", "record_rejection", "revision",
            ),
            FENCE,
        ),
        **dict.fromkeys(
            (
                "check_resource", "check_token", "describe_session", "commit_durably", "insert_rejection", "refuse",
                "table_of", "gate_of", "create_gates", "drop_gates", "hold_protection", "lock_gate", "write_fence",
                "is_own_version", "check_snapshot", "guard_row", "guard_table", "carried_token", "high_water",
                "purge_deleted_fences", "purge_dropped_tables",
            ),
            OWNER_ALONE,
        ),
    },
}  # fmt: skip
"""The roles that may call each function. Functions of the owner alone are called by the others, as their definer."""

OWNERS_RELATIONS = {
    "dblock": {
        "distributed_locks", "lock_clients", "lock_history", "lock_history_number_seq", "lock_presence",
        "lock_queues", "lock_tickets", "waiting_holds", "migration_runs", "migration_runs_run_seq", "ddl_guards",
        "schedules", "slot_runs", "slot_runs_run_seq", "schedule_events", "schedule_events_number_seq",
        "terms", "candidates", "barriers", "barrier_passes", "barrier_waiters", "latches", "latch_counts",
        "installed_revision", "token_sequence", "token_server_start", "token_clock",
    },
    "fenced_store": {"fences", "versions", "protections", "rejections", "rejections_id_seq", "installed_revision"},
}  # fmt: skip
"""The tables and sequences. Only their owner may use them. A new one must be added here."""

CATALOGS = (
    ("pg_type", "typnamespace", "typrelid = 0 AND typcategory <> 'A'"), ("pg_operator", "oprnamespace", "true"),
    ("pg_collation", "collnamespace", "true"), ("pg_conversion", "connamespace", "true"),
    ("pg_opclass", "opcnamespace", "true"), ("pg_opfamily", "opfnamespace", "true"),
    ("pg_ts_config", "cfgnamespace", "true"), ("pg_ts_dict", "dictnamespace", "true"),
    ("pg_statistic_ext", "stxnamespace", "true"),
)  # fmt: skip
"""Kinds of objects that neither schema has. (The row type of a table belongs to the table.)"""


def functions(owner: psycopg.Connection, schema: str) -> list[tuple[str, str, int]]:
    return owner.execute(
        "SELECT proname, oid::regprocedure::text, pronargs::int FROM pg_proc WHERE pronamespace = %s::regnamespace"
        " ORDER BY 2",
        [schema],
    ).fetchall()


def relations(owner: psycopg.Connection, schema: str) -> dict[str, str]:
    rows = owner.execute(
        "SELECT relname, relkind::text FROM pg_class WHERE relnamespace = %s::regnamespace"
        " AND relkind NOT IN ('i', 'c')",
        [schema],
    )
    return dict(rows.fetchall())


@pytest.mark.parametrize("schema", MAY_CALL)
def test_every_object_has_a_decision_on_its_privileges(owner: psycopg.Connection, schema: str) -> None:
    there = [name for name, _, _ in functions(owner, schema)]
    assert sorted(there) == sorted(MAY_CALL[schema]), "each name once: an overload would need a decision of its own"
    found = relations(owner, schema)
    assert set(found) == OWNERS_RELATIONS[schema]
    assert set(found.values()) == {"r", "S"}, "a view runs with its owner's privileges"
    for catalog, column, which in CATALOGS:
        others = owner.execute(
            f"SELECT * FROM {catalog} WHERE {column} = %s::regnamespace AND {which}".encode(), [schema]
        ).fetchall()
        assert others == [], catalog


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schema", MAY_CALL)
def test_role_may_call_exactly_the_functions_of_its_kind(
    connect: Connect, owner: psycopg.Connection, kinds: dict[str, str], schema: str, kind: str
) -> None:
    session = connect(kind)
    for name, signature, arguments in functions(owner, schema):
        may = kind in MAY_CALL[schema].get(name, OWNER_ALONE)
        found = owner.execute("SELECT has_function_privilege(%s, %s, 'EXECUTE')", [kinds[kind], signature]).fetchone()
        assert found == (may,), f"{kind}: {signature}"
        if not may:
            with pytest.raises(InsufficientPrivilege):
                call = f"SELECT {schema}.{name}({', '.join(['NULL'] * arguments)})"
                session.execute(call.encode())


TOUCHES = {
    "r": (
        "SELECT FROM {}", "SELECT * FROM {}", "SELECT ctid FROM {} LIMIT 0", "TABLE {} FOR SHARE",
        "INSERT INTO {} DEFAULT VALUES", "DELETE FROM {}", "TRUNCATE {}",
        "BEGIN; LOCK TABLE {} IN ACCESS SHARE MODE", "COPY {} TO STDOUT", "ANALYZE {}",
        "CREATE TRIGGER t BEFORE INSERT ON {} EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "CREATE RULE r AS ON INSERT TO {} DO NOTHING", "CREATE INDEX ON {} ((1))",
        "ALTER TABLE {} DISABLE TRIGGER ALL", "CREATE POLICY p ON {}", "CREATE TEMP TABLE heir () INHERITS ({})",
        "COMMENT ON TABLE {} IS 'x'", "DROP TABLE {}", "GRANT ALL ON {} TO PUBLIC", "VACUUM {}",
        "REINDEX TABLE {}",
    ),
    "S": (
        "SELECT last_value FROM {}", "SELECT nextval('{}')", "SELECT setval('{}', 1)", "SELECT currval('{}')",
        "ALTER SEQUENCE {} RESTART", "DROP SEQUENCE {}", "GRANT ALL ON SEQUENCE {} TO PUBLIC",
    ),
}  # fmt: skip
"""Statements that use a table or a sequence without a function of the schema. Only the owner may run them."""

HARMLESS = ("ANALYZE", "VACUUM")
"""Statements that Postgres skips with a warning, instead of refusing them, on a table of another owner."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schema", MAY_CALL)
def test_application_roles_touch_no_table_or_sequence(
    connect: Connect, owner: psycopg.Connection, kinds: dict[str, str], schema: str, kind: str
) -> None:
    session, role = connect(kind), kinds[kind]
    for name, relkind in relations(owner, schema).items():
        full = f"{schema}.{name}"
        asked = ("has_any_column_privilege", "SELECT, INSERT, UPDATE, REFERENCES")
        if relkind == "S":
            asked = ("has_sequence_privilege", "USAGE, SELECT, UPDATE")
        assert owner.execute(f"SELECT {asked[0]}(%s, %s, %s)".encode(), [role, full, asked[1]]).fetchone() == (False,)
        for statement in TOUCHES[relkind]:
            if statement.startswith(HARMLESS):
                may_look = owner.execute("SELECT has_schema_privilege(%s, %s, 'USAGE')", [role, schema]).fetchone() == (
                    True,
                )
                with skipped(session) if may_look else pytest.raises(InsufficientPrivilege):
                    session.execute(statement.format(full).encode())
            else:
                with pytest.raises(InsufficientPrivilege):
                    session.execute(statement.format(full).encode())
                session.rollback()
    for statement in (
        f"CREATE TABLE {schema}.mine ()",
        f"CREATE FUNCTION {schema}.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        f"CREATE TYPE {schema}.mine AS (x int)",
        f"ALTER SCHEMA {schema} RENAME TO other",
        f"DROP SCHEMA {schema} CASCADE",
    ):
        with pytest.raises(InsufficientPrivilege):
            session.execute(statement.encode())


class skipped:
    """Check that Postgres reports a statement of the block as skipped."""

    def __init__(self, session: psycopg.Connection) -> None:
        self._session = session
        self._notices: list[str] = []

    def _record(self, notice: Any) -> None:
        self._notices.append(str(notice.message_primary))

    def __enter__(self) -> None:
        self._session.add_notice_handler(self._record)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._session.remove_notice_handler(self._record)
        assert kind is None
        assert any("skipping" in one or "permission denied" in one for one in self._notices), self._notices


def test_new_function_open_to_public_is_noticed(owner: psycopg.Connection) -> None:
    """Prove that the test above can fail."""
    for made in (
        "CREATE FUNCTION dblock.peek() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1'",
        "CREATE TABLE fenced_store.more ()",
    ):
        owner.execute(made.encode())
    for schema in MAY_CALL:
        with pytest.raises(AssertionError):
            test_every_object_has_a_decision_on_its_privileges(owner, schema)


FUNCTION_CALLS = {
    "lock": [
        "queue('held')", "holder('held')", "try_acquire('held')",
        "acquire('held', attempt => {mine}, client => {mine})", "heartbeat({mine}, '{{held}}')",
        "abandon('held', {mine})", "release('held', 0)", "assert_held('held', 0)", "bind_transaction('held', 0)",
        "look_for_deadlock('held', {mine}, '{{0}}')", "renew('held', 0)",
        "renew_all('{{held}}', '{{0}}', '{{30 s}}')", "release_all('{{held}}', '{{0}}')",
        "withdraw_presence({mine}, '{{held}}', '{{0}}')", "leave_queue({mine})", "register_presence({mine}, '1 s')",
        "acquire_shared('shared', 'read-write', 'read')", "downgrade('shared', 0)", "wake_queue('held')",
        "acquire_shared('full', 'semaphore', permits => 1)", "resize_semaphore('full', 2)", "shared_state('full')",
        "installation()",
        "schema_revision()",
    ],
    "see": [
        "list_locks(include_free => true)", "list_waiters()", "list_history()", "list_presence()", "wait_graph()",
        "grants_are_recorded()", "lock_metrics()",
    ],
    "force-release": ["force_release('held', 0)", "wake_queue('held')", "delete_lock('held')"],
    "none": [],
    "fence": [],
}  # fmt: skip
"""Every call that a role can make about a lock that others hold and wait for."""

VIEWS = [
    "SELECT * FROM pg_stat_activity", "SELECT * FROM pg_locks", "SELECT * FROM pg_stats", "SELECT * FROM pg_settings",
    "SELECT * FROM pg_prepared_statements", "SELECT * FROM pg_cursors", "SELECT pg_listening_channels()",
    "SELECT * FROM pg_stat_user_tables", "SELECT * FROM pg_description", "SELECT prosrc FROM pg_proc WHERE prosecdef",
]  # fmt: skip
"""Views in which a server shows every role something about the others."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_role_can_read_an_id_that_would_let_it_impersonate_another(
    connect: Connect, dsn: str, client: dblock.Client, owner: psycopg.Connection, kind: str
) -> None:
    with dblock.Client(dsn) as other:
        held = client.lock("held", ttl=20).acquire()
        waiting = threading.Thread(target=lambda: other.lock("held", ttl=20).acquire(timeout=60).release())
        waiting.start()
        try:
            eventually(lambda: client.lock("held").queue(), "the waiter")
            eventually(
                lambda: owner.execute("SELECT count(*) > 1 FROM lock_presence").fetchone() == (True,), "presences"
            )
            named = owner.execute(
                "SELECT attempt, presence FROM distributed_locks UNION ALL SELECT attempt, presence FROM lock_tickets"
                " UNION ALL SELECT client, NULL FROM lock_clients UNION ALL SELECT presence, NULL FROM lock_presence"
            ).fetchall()
            secrets = {one for row in named for one in row if isinstance(one, uuid.UUID)}
            assert len(secrets) >= 5, "two attempts, a client, two presences"
            session = connect(kind)
            session.execute("SET client_min_messages TO debug5")
            replies: list[object] = []
            session.add_notice_handler(lambda notice: replies.append(notice.message_primary))
            mine = f"'{uuid.uuid4()}'"
            for statement in FUNCTION_CALLS[kind]:
                asked = f"SELECT * FROM dblock.{statement.format(mine=mine)}"
                replies.append(session.execute(asked.encode()).fetchall())
            replies += [session.execute(statement.encode()).fetchall() for statement in VIEWS]
            text = repr(replies)
            for secret in secrets:
                assert str(secret) not in text
                assert secret.hex not in text
            assert len(text) > 1000
        finally:
            held.release()
            waiting.join()


@pytest.mark.parametrize("kind", ["lock", "none"])
def test_role_that_sees_an_advisory_key_can_neither_take_nor_end_it(
    connect: Connect, client: dblock.Client, owner: psycopg.Connection, kind: str
) -> None:
    """pg_locks shows advisory locks to every role. Only the session that holds one can unlock it."""
    lease = client.lock("held", ttl=20).acquire()
    (key,) = eventually(lambda: owner.execute("SELECT advisory_key FROM lock_presence").fetchone(), "a presence")
    session = connect(kind)
    assert session.execute("SELECT pg_advisory_unlock(%s::bigint)", [key]).fetchone() == (False,)
    assert session.execute("SELECT pg_try_advisory_lock_shared(%s::bigint)", [key]).fetchone() == (False,)
    with pytest.raises(InsufficientPrivilege):
        session.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
        )
    assert owner.execute("SELECT try_acquire('held', attempt => %s)", [uuid.uuid4()]).fetchone() is not None
    assert lease.remaining() > 0
    lease.renew()


@pytest.mark.second_stage
def test_force_release_privilege_allows_only_force_release(
    connect: Connect, client: dblock.Client, owner: psycopg.Connection
) -> None:
    lease = client.lock("held", ttl=20).acquire()
    session = connect("force-release")
    # It needs the exact grant, which only a role that may see can look up.
    for guess in (0, -1, lease.token + 1, None):
        assert session.execute("SELECT dblock.force_release('held', %s::bigint, now => true)", [guess]).fetchone() == (
            False,
        )
    assert lease.remaining() > 0
    assert session.execute("SELECT dblock.force_release('held', %s)", [lease.token]).fetchone() == (True,)
    # The role cannot hide its name.
    (actor,) = owner.execute("SELECT actor FROM list_history('held')").fetchone() or ("",)
    assert f" as {session.info.user}" in actor
    assert owner.execute("SELECT count(*) FROM lock_history").fetchone() == (1,)
    eventually(lease.lost.is_set, "the loss of the lease")
