-- Records that a holder of the lock begins a migration, or returns why the holder must not.
--
-- `decision` is `run` (with the number of the run, and the application_name that its sessions must
-- carry), `done` (another replica has succeeded), `failed` (this version has failed `attempts`
-- times already, with `error` from the first of them), or `lost` (the token does not hold the
-- lock). Without a version, a run that failed after `since` counts, which is the `asked_at` of the
-- caller's first migration_state(). With `repeat`, a version that has succeeded may run again: the
-- caller knows from elsewhere that there is something to do.
--
-- Runs of earlier tokens that have no end are recorded as `killed`: their holder did not report.
-- The ledger keeps the newest five hundred runs of each name, and the last success of every
-- version: without that row, a version that is done would run again.
CREATE OR REPLACE FUNCTION begin_migration(
    name text,
    token bigint,
    version text DEFAULT NULL,
    migrator text DEFAULT NULL,
    attempts integer DEFAULT 1,
    since timestamptz DEFAULT NULL,
    revision text DEFAULT NULL,
    repeat boolean DEFAULT false,
    OUT decision text,
    OUT run bigint,
    OUT mark text,
    OUT error text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
    failures bigint;
BEGIN
    IF octet_length(begin_migration.version) > 512 OR octet_length(migrator) > 512 OR octet_length(revision) > 4096 THEN
        RAISE EXCEPTION 'The version and the migrator of migration % take at most 512 bytes each, and a revision 4096.',
            quote_literal(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (attempts >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'Migration % takes a number of attempts from 1; got %.', quote_literal(name), attempts
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- No other client is granted the lock before this transaction ends.
    IF NOT assert_held(name, token) THEN
        decision := 'lost';
        RETURN;
    END IF;
    UPDATE migration_runs AS r
    SET outcome = 'killed', ended_at = clock_timestamp()
    WHERE r.name = begin_migration.name AND r.outcome IS NULL AND r.token < begin_migration.token;
    IF NOT begin_migration.repeat AND EXISTS (
        SELECT FROM migration_runs AS r
        WHERE r.name = begin_migration.name AND r.version = begin_migration.version AND r.outcome = 'succeeded'
    ) THEN
        decision := 'done';
        RETURN;
    END IF;
    SELECT f.failures, f.error INTO failures, error
    FROM failed_runs(begin_migration.name, begin_migration.version, begin_migration.since) AS f;
    IF failures >= attempts THEN
        decision := 'failed';
        RETURN;
    END IF;
    DELETE FROM migration_runs AS r
    WHERE r.name = begin_migration.name AND r.run < (
        SELECT o.run FROM migration_runs AS o
        WHERE o.name = begin_migration.name ORDER BY o.run DESC OFFSET 498 LIMIT 1
    ) AND (r.outcome <> 'succeeded' OR r.version IS NULL OR EXISTS (
        SELECT FROM migration_runs AS later
        WHERE later.name = r.name AND later.version = r.version AND later.run > r.run AND later.outcome = 'succeeded'
    ));
    decision := 'run';
    error := NULL;
    mark := migration_mark(name, token);
    INSERT INTO migration_runs (
        name, token, version, migrator, holder, session_role, database_identity, from_revision, revision, started_at
    )
    SELECT l.name, l.token, begin_migration.version, coalesce(migrator, 'unknown'), coalesce(l.holder, ''),
           session_user, database_identity(), begin_migration.revision, begin_migration.revision, clock_timestamp()
    FROM distributed_locks AS l WHERE l.name = begin_migration.name
    RETURNING migration_runs.run INTO run;
END
$$;
