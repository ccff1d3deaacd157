-- Frees the lock of a migration that was running when a dump of another database was taken. That
-- holder does not use this database. Returns whether there was such a grant.
CREATE OR REPLACE FUNCTION discard_restored_grant(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    held record;
BEGIN
    SELECT r.run, r.token INTO held
    FROM migration_runs AS r JOIN distributed_locks AS l ON l.name = r.name AND l.token = r.token
    WHERE r.name = discard_restored_grant.name AND r.outcome IS NULL AND l.expires_at > clock_timestamp()
      AND r.database_identity <> database_identity();
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    ready := commit_durably();
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = discard_restored_grant.name AND l.token = held.token AND l.expires_at > clock_timestamp()
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE migration_runs AS r SET outcome = 'killed', ended_at = clock_timestamp()
    WHERE r.run = held.run AND r.outcome IS NULL;
    PERFORM record_grant_end(discard_restored_grant.name, 'died', clock_timestamp());
    PERFORM free_lock(discard_restored_grant.name);
    RETURN true;
END
$$;
