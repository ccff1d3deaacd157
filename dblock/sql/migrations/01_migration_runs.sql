-- The ledger of migrations: one row in migration_runs for each run of a migrator.

-- Returns the application_name of the sessions that one run of a migration uses. Postgres keeps 63
-- bytes of printable ASCII, so a long or unusual name is abbreviated and told apart by its hash.
CREATE OR REPLACE FUNCTION migration_mark(name text, token bigint) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT format(
        'dblock-migrate:%s:%s',
        CASE
            WHEN migration_mark.name ~ '^[!-9;-~]{1,24}$' THEN migration_mark.name
            ELSE left(regexp_replace(migration_mark.name, '[^!-9;-~]', '_', 'g'), 12) || '~'
                || left(md5(migration_mark.name), 10)
        END,
        migration_mark.token
    )
$$;

-- Identifies this database among all others: a copy that was restored from a dump has another
-- identity. A server that hides its identifier still has the database's own number.
CREATE OR REPLACE FUNCTION database_identity() RETURNS text
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    number CONSTANT oid := d.oid FROM pg_database AS d WHERE d.datname = current_database();
BEGIN
    RETURN format('%s/%s', (SELECT s.system_identifier FROM pg_control_system() AS s), number);
EXCEPTION WHEN OTHERS THEN
    RETURN format('?/%s', number);
END
$$;

-- Counts the failed runs of a version that no later success of the migration has followed, and that
-- no operator has cleared. `error` is the text of the first of these runs. A run that was blocked,
-- or has no version, counts only if it ended after `since`.
CREATE OR REPLACE FUNCTION failed_runs(name text, version text, since timestamptz, OUT failures bigint, OUT error text)
LANGUAGE sql STABLE
AS $$
    SELECT count(*), (array_agg(r.error ORDER BY r.run))[1]
    FROM migration_runs AS r
    WHERE r.name = failed_runs.name AND r.outcome IN ('failed', 'blocked') AND r.cleared_at IS NULL
      AND r.version IS NOT DISTINCT FROM failed_runs.version
      AND (failed_runs.version IS NOT NULL AND r.outcome = 'failed' OR r.ended_at > failed_runs.since)
      AND NOT EXISTS (
          SELECT FROM migration_runs AS later
          WHERE later.name = r.name AND later.run > r.run AND later.outcome = 'succeeded'
      )
$$;
