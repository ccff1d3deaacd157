-- Lets a version that has failed run again, and returns how many failures it clears. Records the
-- actor and the reason with each failure.
CREATE OR REPLACE FUNCTION retry_migration(name text, actor text DEFAULT NULL, reason text DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
    cleared bigint;
BEGIN
    UPDATE migration_runs AS r
    SET cleared_at = clock_timestamp(),
        cleared_by = format('%s as %s', left(coalesce(actor, describe_session()), 400), session_user),
        clear_reason = left(reason, 2048)
    WHERE r.name = retry_migration.name AND r.outcome IN ('failed', 'blocked') AND r.cleared_at IS NULL;
    GET DIAGNOSTICS cleared = ROW_COUNT;
    RETURN cleared;
END
$$;
