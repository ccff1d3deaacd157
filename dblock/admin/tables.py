"""dblock's tables as SQLAlchemy metadata: to inspect them, to query them as their owner, to show them to Alembic.

The migrations create the tables. This module only describes them, and a test keeps the two equal. If your application
autogenerates migrations in the same database, exclude dblock's schema (see docs/guides/install.md).
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    Sequence,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from dblock._core.schema_version import DEFAULT_SCHEMA


def metadata(schema: str = DEFAULT_SCHEMA) -> MetaData:
    """Return a description of the tables at this version's revision."""
    tables = MetaData(schema=schema)
    Sequence("token_sequence", metadata=tables, data_type=BigInteger, cache=1, cycle=False, maxvalue=2**53 - 1)
    Sequence("token_server_start", metadata=tables, data_type=BigInteger, cache=1, cycle=False)
    Table(
        "distributed_locks",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("token", BigInteger, nullable=False),
        Column("expires_at", DateTime(timezone=True), nullable=False),
        Column("granted_at", DateTime(timezone=True)),
        Column("released_at", DateTime(timezone=True)),
        Column("forced_at", DateTime(timezone=True)),
        Column("ttl", Interval),
        Column("attempt", Uuid),
        Column("holder", Text),
        Column("meta", JSONB),
        Column("presence", Uuid),
        Column("waiting", Boolean, nullable=False, server_default=text("false")),
        Column("last_served_ticket", BigInteger, nullable=False, server_default=text("0")),
        Column("minted_server_start", DateTime(timezone=True)),
        Column("kind", Text(collation="C")),
        Column("head", Text(collation="C")),
        Column("permits", Integer),
        Column("permit", Integer),
        Index("distributed_locks_head_idx", "head", "kind", "permit", postgresql_where=text("head IS NOT NULL")),
        comment="One row per lock: its newest grant. Free once expires_at has passed. A release sets it to -infinity.",
    )
    Table(
        "lock_tickets",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("number", BigInteger, primary_key=True, autoincrement=False),
        Column("attempt", Uuid, nullable=False),
        Column("client", Uuid, nullable=False),
        Column("presence", Uuid),
        Column("holder", Text, nullable=False),
        Column("since", DateTime(timezone=True), nullable=False),
        Column("mode", Text),
        Column("ordered", Boolean, nullable=False, server_default=text("false")),
        UniqueConstraint("attempt", "name", name="lock_tickets_attempt_key"),
        Index("lock_tickets_client_idx", "client", "name"),
        Index("lock_tickets_writers_idx", "name", "number", postgresql_where=text("mode = 'write'")),
        comment="One row per waiter: its position in the queue for a lock.",
    )
    Table(
        "lock_queues",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("last_ticket", BigInteger, nullable=False),
        prefixes=["UNLOGGED"],
        comment="One row per lock that a client has waited for: the number of the last ticket. It guards the queue.",
    )
    Table(
        "lock_clients",
        tables,
        Column("client", Uuid, primary_key=True),
        Column("seen_until", DateTime(timezone=True), nullable=False),
        comment="One row per waiting client: until when it counts as alive.",
    )
    Table(
        "waiting_holds",
        tables,
        Column("attempt", Uuid, primary_key=True),
        Column("token", BigInteger, primary_key=True, autoincrement=False),
        Column("name", Text(collation="C"), nullable=False),
        Index("waiting_holds_token_idx", "token"),
        prefixes=["UNLOGGED"],
        comment="One row per token that a waiter holds while it waits for another lock. Filled by look_for_deadlock().",
    )
    Table(
        "lock_history",
        tables,
        Column("number", BigInteger, Identity(always=True), primary_key=True),
        Column("at", DateTime(timezone=True), nullable=False),
        Column("name", Text(collation="C"), nullable=False),
        Column("token", BigInteger),
        Column("event", Text, nullable=False),
        Column("holder", Text),
        Column("actor", Text),
        Column("reason", Text),
        Index("lock_history_name_idx", "name", "number"),
        comment="One row per event: a lease that expired, a holder that died, a forced release.",
    )
    Table(
        "migration_runs",
        tables,
        Column("run", BigInteger, Identity(always=True), primary_key=True),
        Column("name", Text(collation="C"), nullable=False),
        Column("token", BigInteger, nullable=False),
        Column("version", Text),
        Column("migrator", Text, nullable=False),
        Column("holder", Text, nullable=False),
        Column("session_role", Text(collation="C"), nullable=False),
        Column("database_identity", Text, nullable=False),
        Column("from_revision", Text),
        Column("revision", Text),
        Column("started_at", DateTime(timezone=True), nullable=False),
        Column("ended_at", DateTime(timezone=True)),
        Column(
            "outcome",
            Text,
            CheckConstraint(
                "outcome IN ('succeeded', 'failed', 'blocked', 'killed', 'lost')", name="migration_runs_outcome_check"
            ),
        ),
        Column("error", Text),
        Column("cleared_at", DateTime(timezone=True)),
        Column("cleared_by", Text),
        Column("clear_reason", Text),
        Index("migration_runs_name_idx", "name", "run"),
        comment="One row per run of a migrator: its version, and how it ended.",
    )
    Table(
        "ddl_guards",
        tables,
        Column("schema_name", Text(collation="C"), primary_key=True),
        Column("name", Text(collation="C"), primary_key=True),
        comment="The schemas in which DDL needs a migration that holds the lock, and the names of these migrations.",
    )
    Table(
        "terms",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("token", BigInteger, primary_key=True, autoincrement=False),
        Column("number", BigInteger, nullable=False),
        Column("holder", Text, nullable=False),
        Column("rank", ARRAY(BigInteger), nullable=False),
        Column("value", JSONB),
        Column("began_at", DateTime(timezone=True), nullable=False),
        Column("ended_at", DateTime(timezone=True)),
        Column(
            "how",
            Text,
            CheckConstraint(
                "how IN ('resigned', 'transferred', 'outranked', 'failed', 'released', 'expired', 'died', 'forced')",
                name="terms_how_check",
            ),
        ),
        Column("transfer_to", Text),
        UniqueConstraint("name", "number", name="terms_number_key"),
        comment="One row per term of an election: its leader, and how it ended.",
    )
    Table(
        "candidates",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("attempt", Uuid, primary_key=True),
        Column("holder", Text, nullable=False),
        Column("rank", ARRAY(BigInteger), nullable=False),
        Column("since", DateTime(timezone=True), nullable=False),
        comment="One row per candidate of an election: the rank of the attempt that waits.",
    )
    Table(
        "schedules",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column(
            "kind",
            Text,
            CheckConstraint("kind IN ('every', 'cron', 'delay')", name="schedules_kind_check"),
            nullable=False,
        ),
        Column("period", Interval),
        Column("expression", Text),
        Column("zone", Text),
        Column("catch_up", Text, nullable=False),
        Column("overlap", Text, nullable=False),
        Column("delivery", Text, nullable=False),
        Column("grace", Interval),
        Column("at_least", Interval),
        Column("since", DateTime(timezone=True), nullable=False),
        Column("decided_until", DateTime(timezone=True)),
        Column("upcoming", ARRAY(DateTime(timezone=True)), nullable=False, server_default=text("'{}'")),
        Column("planned_until", DateTime(timezone=True)),
        Column("last_claimed_at", DateTime(timezone=True)),
        Column("last_ended_at", DateTime(timezone=True)),
        Column("requested_at", DateTime(timezone=True)),
        Column("paused_at", DateTime(timezone=True)),
        Column("paused_by", Text),
        Column("pause_reason", Text),
        Column("changed_at", DateTime(timezone=True)),
        comment="One row per schedule: its definition, and up to where it is decided.",
    )
    Table(
        "slot_runs",
        tables,
        Column("run", BigInteger, Identity(always=True), primary_key=True),
        Column("name", Text(collation="C"), nullable=False),
        Column("slot", DateTime(timezone=True), nullable=False),
        Column("last_slot", DateTime(timezone=True), nullable=False),
        Column("slots", BigInteger, nullable=False),
        Column("number", Integer, nullable=False),
        Column("lock", Text(collation="C")),
        Column("token", BigInteger),
        Column("holder", Text),
        Column("attempt", Uuid),
        Column(
            "outcome",
            Text,
            CheckConstraint(
                "outcome IN ('succeeded', 'failed', 'died', 'queued', 'skipped', 'missed')",
                name="slot_runs_outcome_check",
            ),
        ),
        Column("claimed_at", DateTime(timezone=True), nullable=False),
        Column("ended_at", DateTime(timezone=True)),
        Column("exit_code", Integer),
        Column("error", Text),
        Index("slot_runs_name_idx", "name", "run"),
        Index("slot_runs_open_idx", "name", postgresql_where=text("outcome IS NULL OR outcome = 'queued'")),
        comment="One row per decided slot of a schedule: who ran it, and how it ended.",
    )
    Table(
        "schedule_events",
        tables,
        Column("number", BigInteger, Identity(always=True), primary_key=True),
        Column("at", DateTime(timezone=True), nullable=False),
        Column("name", Text(collation="C"), nullable=False),
        Column("event", Text, nullable=False),
        Column("actor", Text),
        Column("reason", Text),
        Index("schedule_events_name_idx", "name", "number"),
        comment="One row per change of a schedule: registered, changed, paused, resumed, run by an operator, deleted.",
    )
    Table(
        "barriers",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("parties", Integer, nullable=False),
        Column("generation", BigInteger, nullable=False, server_default=text("0")),
        Column("arrivals", BigInteger, nullable=False, server_default=text("0")),
        Column("used_at", DateTime(timezone=True), nullable=False),
        comment="One row per barrier: its parties, and how often it has tripped.",
    )
    Table(
        "barrier_passes",
        tables,
        Column("attempt", Uuid, primary_key=True),
        Column("name", Text(collation="C"), nullable=False),
        Column("generation", BigInteger, nullable=False),
        Column("number", Integer, nullable=False),
        Column("tripped_at", DateTime(timezone=True), nullable=False),
        Index("barrier_passes_name_idx", "name", "generation"),
        comment="One row per party of a trip: its number, for a party whose reply was lost.",
    )
    Table(
        "barrier_waiters",
        tables,
        Column("attempt", Uuid, primary_key=True),
        Column(
            "kind",
            Text,
            CheckConstraint("kind IN ('barrier', 'latch')", name="barrier_waiters_kind_check"),
            nullable=False,
        ),
        Column("name", Text(collation="C"), nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("client", Uuid, nullable=False),
        Column("presence", Uuid),
        Column("holder", Text, nullable=False),
        Column("since", DateTime(timezone=True), nullable=False),
        Column("over", Boolean, nullable=False, server_default="false"),
        Index("barrier_waiters_name_idx", "kind", "name", "number"),
        Index("barrier_waiters_client_idx", "client"),
        prefixes=["UNLOGGED"],
        comment="One row per waiter at a barrier or a latch.",
    )
    Table(
        "latches",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("count", Integer, nullable=False),
        Column("remaining", Integer, nullable=False),
        Column("used_at", DateTime(timezone=True), nullable=False),
        comment="One row per latch: its count, and what remains of it. Open at 0.",
    )
    Table(
        "latch_counts",
        tables,
        Column("name", Text(collation="C"), primary_key=True),
        Column("attempt", Uuid, primary_key=True),
        comment="One row per count of a latch that is not open, so that a retry counts once.",
    )
    Table(
        "lock_presence",
        tables,
        Column("presence", Uuid, primary_key=True),
        Column("advisory_key", BigInteger, nullable=False),
        Column("session", Integer, nullable=False),
        Column("incarnation", DateTime(timezone=True), nullable=False),
        Column("grace", Interval, nullable=False),
        Column("gone_since", DateTime(timezone=True)),
        prefixes=["UNLOGGED"],
        comment="One row per session that shows that its client is alive: the key of the advisory lock that it holds.",
    )
    Table(
        "token_clock",
        tables,
        Column("singleton", Boolean, CheckConstraint("singleton"), primary_key=True, server_default="true"),
        Column("installation", Uuid, nullable=False, server_default=text("gen_random_uuid()")),
        comment="The UUID of this installation."
        " Locked for a moment by the session that moves the tokens up to the clock.",
    )
    return tables
