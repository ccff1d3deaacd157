"""Create the tables of locks, tickets, clients, presences and history, and the sequence of tokens."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Tells 99_privileges.sql that no role has a privilege yet, whatever the default privileges say.
    op.execute("SET LOCAL dblock.first_install = 'on'")
    # CACHE 1, because a session that caches tokens would issue old ones later. NO CYCLE, because a fence would refuse
    # tokens that start over.
    # Below 2^53, so that every language with only floating-point numbers can carry a token.
    op.execute(f"CREATE SEQUENCE token_sequence AS bigint START 1 MAXVALUE {2**53 - 1} CACHE 1 NO CYCLE")
    # A sequence, because its value stays when the transaction that sets it is rolled back.
    op.execute("CREATE SEQUENCE token_server_start AS bigint CACHE 1 NO CYCLE")
    op.execute(
        """
        CREATE TABLE distributed_locks (
            -- Compared byte by byte. An upgrade of the operating system may change a collation
            -- under an index, and break its uniqueness.
            name text COLLATE "C" NOT NULL,
            token bigint NOT NULL,
            expires_at timestamptz NOT NULL,
            granted_at timestamptz,
            released_at timestamptz,
            -- When the holder was told to release. Its lease is not renewed any more.
            forced_at timestamptz,
            ttl interval,
            attempt uuid,
            holder text,
            meta jsonb,
            presence uuid,
            waiting boolean NOT NULL DEFAULT false,
            last_served_ticket bigint NOT NULL DEFAULT 0,
            -- The server start under which the newest token was minted.
            minted_server_start timestamptz,
            -- NULL for a plain lock. `read-write` and `semaphore` for the head of a shared lock,
            -- `reader`, `writer` and `permit` for a share of it. See shared_locks/01_kinds.sql.
            kind text COLLATE "C",
            -- The lock of which this row is a share.
            head text COLLATE "C",
            -- How many permits a semaphore has.
            permits integer,
            -- The number of a reader's or a permit's share.
            permit integer,
            -- No CHECK: it would be evaluated with every update of a row, a fifth of a release's time.
            CONSTRAINT distributed_locks_pkey PRIMARY KEY (name)
        ) WITH (
            -- Half of each page stays free and no column that changes is indexed, so every grant,
            -- renewal and release is a heap-only update whose old row the next update can prune.
            fillfactor = 50,
            autovacuum_vacuum_scale_factor = 0.0,
            autovacuum_vacuum_threshold = 2000,
            autovacuum_vacuum_cost_delay = 0,
            autovacuum_analyze_scale_factor = 0.0,
            autovacuum_analyze_threshold = 20000
        )
        """
    )
    op.execute(
        "COMMENT ON TABLE distributed_locks IS "
        "'One row per lock: its newest grant. Free once expires_at has passed. A release sets it to -infinity.'"
    )
    # The shares of a lock. The columns never change, so updates of a lock stay heap-only.
    op.execute(
        "CREATE INDEX distributed_locks_head_idx ON distributed_locks (head, kind, permit) WHERE head IS NOT NULL"
    )
    # Tickets are numbered per lock, in the order of arrival. No indexed column ever changes.
    op.execute(
        """
        CREATE TABLE lock_tickets (
            name text COLLATE "C" NOT NULL,
            number bigint NOT NULL,
            attempt uuid NOT NULL,
            client uuid NOT NULL,
            presence uuid,
            holder text NOT NULL,
            since timestamptz NOT NULL,
            -- What the waiter of a read-write lock waits for: `read` or `write`. Else NULL.
            mode text,
            ordered boolean NOT NULL DEFAULT false,
            CONSTRAINT lock_tickets_pkey PRIMARY KEY (name, number),
            CONSTRAINT lock_tickets_attempt_key UNIQUE (attempt, name)
        ) WITH (
            autovacuum_vacuum_scale_factor = 0.0,
            autovacuum_vacuum_threshold = 2000,
            autovacuum_vacuum_cost_delay = 0
        )
        """
    )
    op.execute("CREATE INDEX lock_tickets_client_idx ON lock_tickets (client, name)")
    # A reader looks for waiting writers only, however many readers wait.
    op.execute("CREATE INDEX lock_tickets_writers_idx ON lock_tickets (name, number) WHERE mode = 'write'")
    op.execute("COMMENT ON TABLE lock_tickets IS 'One row per waiter: its position in the queue for a lock.'")
    # A session that joins or prunes a queue locks its row. Unlogged, because the row only repeats what the tickets and
    # the lock say: after a crash, on a promoted standby or in a restored copy, the next waiter creates it again.
    op.execute(
        "CREATE UNLOGGED TABLE lock_queues"
        ' (name text COLLATE "C" NOT NULL, last_ticket bigint NOT NULL,'
        " CONSTRAINT lock_queues_pkey PRIMARY KEY (name))"
        " WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000,"
        " autovacuum_vacuum_cost_delay = 0)"
    )
    op.execute(
        "COMMENT ON TABLE lock_queues IS"
        " 'One row per lock that a client has waited for: the number of the last ticket. It guards the queue.'"
    )
    op.execute(
        "CREATE TABLE lock_clients (client uuid PRIMARY KEY, seen_until timestamptz NOT NULL)"
        " WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000)"
    )
    op.execute("COMMENT ON TABLE lock_clients IS 'One row per waiting client: until when it counts as alive.'")
    # Filled only for waiters that have waited for long, so that joining a queue costs nothing more. Unlogged, because
    # a waiter notes its tokens again: after a crash, on a promoted standby or in a restored copy.
    op.execute(
        "CREATE UNLOGGED TABLE waiting_holds"
        ' (attempt uuid NOT NULL, token bigint NOT NULL, name text COLLATE "C" NOT NULL,'
        " CONSTRAINT waiting_holds_pkey PRIMARY KEY (attempt, token))"
        " WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000)"
    )
    op.execute("CREATE INDEX waiting_holds_token_idx ON waiting_holds (token)")
    op.execute(
        "COMMENT ON TABLE waiting_holds IS 'One row per token that a waiter holds while it waits for another lock."
        " Filled by look_for_deadlock().'"
    )
    # The newest hundred events of each lock, see 04_history.sql.
    op.execute(
        """
        CREATE TABLE lock_history (
            number bigint GENERATED ALWAYS AS IDENTITY,
            at timestamptz NOT NULL,
            name text COLLATE "C" NOT NULL,
            token bigint,
            event text NOT NULL,
            holder text,
            actor text,
            reason text,
            CONSTRAINT lock_history_pkey PRIMARY KEY (number)
        )
        """
    )
    op.execute("CREATE INDEX lock_history_name_idx ON lock_history (name, number)")
    op.execute(
        "COMMENT ON TABLE lock_history IS"
        " 'One row per event: a lease that expired, a holder that died, a forced release.'"
    )
    # The runs of migrations, see migrations/01_migration_runs.sql.
    op.execute(
        """
        CREATE TABLE migration_runs (
            run bigint GENERATED ALWAYS AS IDENTITY,
            name text COLLATE "C" NOT NULL,
            token bigint NOT NULL,
            -- What the migrator was asked for, as the caller names it.
            version text,
            migrator text NOT NULL,
            holder text NOT NULL,
            -- The role and the database of the run. Sessions of other roles are not its sessions.
            session_role text COLLATE "C" NOT NULL,
            database_identity text NOT NULL,
            from_revision text,
            revision text,
            started_at timestamptz NOT NULL,
            ended_at timestamptz,
            -- NULL while the run has not reported its end.
            outcome text CONSTRAINT migration_runs_outcome_check
                CHECK (outcome IN ('succeeded', 'failed', 'blocked', 'killed', 'lost')),
            error text,
            cleared_at timestamptz,
            cleared_by text,
            clear_reason text,
            CONSTRAINT migration_runs_pkey PRIMARY KEY (run)
        )
        """
    )
    op.execute("CREATE INDEX migration_runs_name_idx ON migration_runs (name, run)")
    op.execute("COMMENT ON TABLE migration_runs IS 'One row per run of a migrator: its version, and how it ended.'")
    # The guard of DDL, see migrations/02_guard_ddl.sql.
    op.execute(
        """
        CREATE TABLE ddl_guards (
            schema_name text COLLATE "C" NOT NULL,
            name text COLLATE "C" NOT NULL,
            CONSTRAINT ddl_guards_pkey PRIMARY KEY (schema_name, name)
        )
        """
    )
    op.execute(
        "COMMENT ON TABLE ddl_guards IS"
        " 'The schemas in which DDL needs a migration that holds the lock, and the names of these migrations.'"
    )
    # The terms of elections, and the candidates that wait for one, see elections/01_terms.sql. Candidates are logged
    # as their tickets are: after a crash both are still there.
    op.execute(
        """
        CREATE TABLE terms (
            name text COLLATE "C" NOT NULL,
            token bigint NOT NULL,
            -- Counts the terms of this name from 1, so that a reader sees whether older ones were deleted.
            number bigint NOT NULL,
            holder text NOT NULL,
            rank bigint[] NOT NULL,
            value jsonb,
            began_at timestamptz NOT NULL,
            ended_at timestamptz,
            how text CONSTRAINT terms_how_check CHECK (
                how IN ('resigned', 'transferred', 'outranked', 'failed', 'released', 'expired', 'died', 'forced')
            ),
            -- The candidate that must lead next.
            transfer_to text,
            CONSTRAINT terms_pkey PRIMARY KEY (name, token),
            CONSTRAINT terms_number_key UNIQUE (name, number)
        )
        """
    )
    op.execute("COMMENT ON TABLE terms IS 'One row per term of an election: its leader, and how it ended.'")
    op.execute(
        'CREATE TABLE candidates (name text COLLATE "C" NOT NULL, attempt uuid NOT NULL, holder text NOT NULL,'
        " rank bigint[] NOT NULL, since timestamptz NOT NULL,"
        " CONSTRAINT candidates_pkey PRIMARY KEY (name, attempt))"
    )
    op.execute(
        "COMMENT ON TABLE candidates IS 'One row per candidate of an election: the rank of the attempt that waits.'"
    )
    # Schedules and the ledger of their slots, see schedules/01_schedules.sql.
    op.execute(
        """
        CREATE TABLE schedules (
            name text COLLATE "C" NOT NULL,
            kind text NOT NULL CONSTRAINT schedules_kind_check CHECK (kind IN ('every', 'cron', 'delay')),
            -- Of an interval or a delay.
            period interval,
            -- Of a cron expression.
            expression text,
            zone text,
            catch_up text NOT NULL,
            overlap text NOT NULL,
            delivery text NOT NULL,
            grace interval,
            at_least interval,
            -- Slots before `since` never count, nor do those up to `decided_until`.
            since timestamptz NOT NULL,
            decided_until timestamptz,
            -- The slots of a cron expression, complete up to `planned_until`.
            upcoming timestamptz[] NOT NULL DEFAULT '{}',
            planned_until timestamptz,
            last_claimed_at timestamptz,
            last_ended_at timestamptz,
            requested_at timestamptz,
            paused_at timestamptz,
            paused_by text,
            pause_reason text,
            changed_at timestamptz,
            CONSTRAINT schedules_pkey PRIMARY KEY (name)
        ) WITH (fillfactor = 50)
        """
    )
    op.execute("COMMENT ON TABLE schedules IS 'One row per schedule: its definition, and up to where it is decided.'")
    op.execute(
        """
        CREATE TABLE slot_runs (
            run bigint GENERATED ALWAYS AS IDENTITY,
            name text COLLATE "C" NOT NULL,
            slot timestamptz NOT NULL,
            -- For slots that were skipped or missed: the last one of the series, and how many there are.
            last_slot timestamptz NOT NULL,
            slots bigint NOT NULL,
            -- Which run of the slot it is. A slot runs again if its runner died.
            number integer NOT NULL,
            lock text COLLATE "C",
            token bigint,
            holder text,
            attempt uuid,
            -- NULL while the run has not reported its end.
            outcome text CONSTRAINT slot_runs_outcome_check
                CHECK (outcome IN ('succeeded', 'failed', 'died', 'queued', 'skipped', 'missed')),
            claimed_at timestamptz NOT NULL,
            ended_at timestamptz,
            exit_code integer,
            error text,
            CONSTRAINT slot_runs_pkey PRIMARY KEY (run)
        )
        """
    )
    op.execute("CREATE INDEX slot_runs_name_idx ON slot_runs (name, run)")
    op.execute("CREATE INDEX slot_runs_open_idx ON slot_runs (name) WHERE outcome IS NULL OR outcome = 'queued'")
    op.execute("COMMENT ON TABLE slot_runs IS 'One row per decided slot of a schedule: who ran it, and how it ended.'")
    op.execute(
        """
        CREATE TABLE schedule_events (
            number bigint GENERATED ALWAYS AS IDENTITY,
            at timestamptz NOT NULL,
            name text COLLATE "C" NOT NULL,
            event text NOT NULL,
            actor text,
            reason text,
            CONSTRAINT schedule_events_pkey PRIMARY KEY (number)
        )
        """
    )
    op.execute("CREATE INDEX schedule_events_name_idx ON schedule_events (name, number)")
    op.execute(
        "COMMENT ON TABLE schedule_events IS"
        " 'One row per change of a schedule: registered, changed, paused, resumed, run by an operator, deleted.'"
    )
    # Barriers and latches, see barriers/01_barriers.sql.
    op.execute(
        'CREATE TABLE barriers (name text COLLATE "C" NOT NULL, parties integer NOT NULL,'
        # How often the barrier has tripped, and how many parties have arrived.
        " generation bigint NOT NULL DEFAULT 0, arrivals bigint NOT NULL DEFAULT 0, used_at timestamptz NOT NULL,"
        " CONSTRAINT barriers_pkey PRIMARY KEY (name)) WITH (fillfactor = 50)"
    )
    op.execute("COMMENT ON TABLE barriers IS 'One row per barrier: its parties, and how often it has tripped.'")
    op.execute(
        'CREATE TABLE barrier_passes (attempt uuid NOT NULL, name text COLLATE "C" NOT NULL,'
        " generation bigint NOT NULL, number integer NOT NULL, tripped_at timestamptz NOT NULL,"
        " CONSTRAINT barrier_passes_pkey PRIMARY KEY (attempt))"
    )
    op.execute("CREATE INDEX barrier_passes_name_idx ON barrier_passes (name, generation)")
    op.execute(
        "COMMENT ON TABLE barrier_passes IS"
        " 'One row per party of a trip: its number, for a party whose reply was lost.'"
    )
    op.execute(
        'CREATE TABLE latches (name text COLLATE "C" NOT NULL, count integer NOT NULL, remaining integer NOT NULL,'
        " used_at timestamptz NOT NULL, CONSTRAINT latches_pkey PRIMARY KEY (name)) WITH (fillfactor = 50)"
    )
    op.execute("COMMENT ON TABLE latches IS 'One row per latch: its count, and what remains of it. Open at 0.'")
    op.execute(
        'CREATE TABLE latch_counts (name text COLLATE "C" NOT NULL, attempt uuid NOT NULL,'
        " CONSTRAINT latch_counts_pkey PRIMARY KEY (name, attempt))"
    )
    op.execute(
        "COMMENT ON TABLE latch_counts IS 'One row per count of a latch that is not open, so that a retry counts once.'"
    )
    # Unlogged, because a waiter means nothing after a crash or on a promoted standby: its client asks again.
    op.execute(
        "CREATE UNLOGGED TABLE barrier_waiters (attempt uuid NOT NULL,"
        " kind text NOT NULL CONSTRAINT barrier_waiters_kind_check CHECK (kind IN ('barrier', 'latch')),"
        ' name text COLLATE "C" NOT NULL, number bigint NOT NULL, client uuid NOT NULL, presence uuid,'
        " holder text NOT NULL, since timestamptz NOT NULL,"
        # Whether the barrier has tripped with this party.
        " over boolean NOT NULL DEFAULT false, CONSTRAINT barrier_waiters_pkey PRIMARY KEY (attempt))"
        " WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000)"
    )
    op.execute("CREATE INDEX barrier_waiters_name_idx ON barrier_waiters (kind, name, number)")
    op.execute("CREATE INDEX barrier_waiters_client_idx ON barrier_waiters (client)")
    op.execute("COMMENT ON TABLE barrier_waiters IS 'One row per waiter at a barrier or a latch.'")
    # Unlogged, because a presence means nothing after a crash, on a promoted standby or in a restored copy. There the
    # table is empty, so no client counts as dead.
    op.execute(
        "CREATE UNLOGGED TABLE lock_presence (presence uuid PRIMARY KEY, advisory_key bigint NOT NULL,"
        " session integer NOT NULL,"
        " incarnation timestamptz NOT NULL, grace interval NOT NULL, gone_since timestamptz)"
        " WITH (fillfactor = 50)"
    )
    op.execute(
        "COMMENT ON TABLE lock_presence IS"
        " 'One row per session that shows that its client is alive: the key of the advisory lock that it holds.'"
    )
    # Always one row: the UUID of this installation, which tells it from an installation in another database.
    op.execute(
        "CREATE TABLE token_clock"
        " (singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),"
        " installation uuid NOT NULL DEFAULT gen_random_uuid())"
    )
    op.execute("INSERT INTO token_clock DEFAULT VALUES")
    op.execute(
        "COMMENT ON TABLE token_clock IS"
        " 'The UUID of this installation. Locked for a moment by the session that moves the tokens up to the clock.'"
    )
    op.execute(
        "COMMENT ON SEQUENCE token_sequence IS "
        "'Fencing tokens, in the order of the grants. Never lower it, cache it or let it cycle.'"
    )
    op.execute(
        "COMMENT ON SEQUENCE token_server_start IS "
        "'The start of the server that minted the last token, in microseconds since 1970.'"
    )


def downgrade() -> None:
    # The event triggers of the guard depend on its function, and the owner of the schema may drop them only with it.
    op.execute("DROP FUNCTION IF EXISTS guard_ddl() CASCADE")
    # The schema holds only dblock's objects, so drop every function in it.
    op.execute(
        """
        DO $$
        DECLARE
            routine regprocedure;
        BEGIN
            FOR routine IN
                SELECT p.oid FROM pg_proc AS p
                WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
            LOOP
                EXECUTE format('DROP FUNCTION %s', routine);
            END LOOP;
        END
        $$
        """
    )
    op.execute("DROP TABLE distributed_locks")
    op.execute("DROP TABLE lock_tickets, lock_queues, lock_clients, lock_presence, lock_history, waiting_holds")
    op.execute("DROP TABLE migration_runs, ddl_guards")
    op.execute("DROP TABLE terms, candidates")
    op.execute("DROP TABLE schedules, slot_runs, schedule_events")
    op.execute("DROP TABLE barriers, barrier_passes, barrier_waiters, latches, latch_counts")
    op.execute("DROP TABLE token_clock")
    op.execute("DROP SEQUENCE token_sequence, token_server_start")
