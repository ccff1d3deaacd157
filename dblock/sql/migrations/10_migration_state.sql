-- Returns what the ledger knows about a migration, without a lock. A replica calls this
-- function first. If the version that it wants is done, the replica has nothing else to do.
--
-- `done`: a run to this version has succeeded. `newer` is the version of a run that succeeded after
-- it: the database is ahead of the caller. `failures` is how often this version has failed since
-- the last success or retry_migration(), and `error` is what the first of these runs reported.
-- `asked_at` is the database's time, for begin_migration().
CREATE OR REPLACE FUNCTION migration_state(
    name text,
    version text DEFAULT NULL,
    OUT done boolean,
    OUT newer text,
    OUT failures bigint,
    OUT error text,
    OUT asked_at timestamptz
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    succeeded CONSTANT bigint := max(r.run) FROM migration_runs AS r
        WHERE r.name = migration_state.name AND r.version = migration_state.version AND r.outcome = 'succeeded';
BEGIN
    asked_at := clock_timestamp();
    done := succeeded IS NOT NULL;
    IF done THEN
        newer := r.version FROM migration_runs AS r
            WHERE r.name = migration_state.name AND r.run > succeeded AND r.outcome = 'succeeded'
              AND r.version <> migration_state.version
            ORDER BY r.run DESC LIMIT 1;
    END IF;
    SELECT f.failures, f.error INTO failures, error
    FROM failed_runs(migration_state.name, migration_state.version, asked_at) AS f;
END
$$;
