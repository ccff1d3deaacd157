-- Records how a run ended, and returns what was recorded: `succeeded`, `failed`, `blocked`,
-- `killed` or `lost`. A run that reports success or failure without the lock is recorded as `lost`:
-- it may have failed because its sessions were ended. If a later holder has recorded the run as
-- killed, that record stays. NULL means that there is no such run.
--
-- `blocked` is a failure for the replicas that wait already. A replica that starts later runs the
-- version again, because what was in the way may be gone.
CREATE OR REPLACE FUNCTION end_migration(
    run bigint, token bigint, outcome text, error text DEFAULT NULL, revision text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
    recorded record;
BEGIN
    IF (outcome IN ('succeeded', 'failed', 'blocked', 'killed', 'lost')) IS NOT TRUE THEN
        RAISE EXCEPTION 'A run ends as succeeded, failed, blocked, killed or lost; got %.', quote_nullable(outcome)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT r.name INTO recorded FROM migration_runs AS r
    WHERE r.run = end_migration.run AND r.token = end_migration.token;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- First the row of the lock, then the run: the order of begin_migration().
    IF NOT assert_held(recorded.name, end_migration.token) AND outcome IN ('succeeded', 'failed', 'blocked') THEN
        outcome := 'lost';
    END IF;
    UPDATE migration_runs AS r
    SET outcome = end_migration.outcome, ended_at = clock_timestamp(), error = left(end_migration.error, 8192),
        revision = coalesce(left(end_migration.revision, 1024), r.revision)
    WHERE r.run = end_migration.run AND r.outcome IS NULL;
    RETURN (SELECT r.outcome FROM migration_runs AS r WHERE r.run = end_migration.run);
END
$$;
