-- Gives back whatever this attempt was granted, if it was granted anything; for a caller who left before the answer came.
-- Like a release that stands alone it commits asynchronously. False means that there was nothing to give back.
CREATE OR REPLACE FUNCTION abandon(name text, attempt uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ignored text;
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    UPDATE distributed_locks AS l
    SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
    WHERE l.name = abandon.name AND l.attempt = abandon.attempt AND l.expires_at > clock_timestamp();
    RETURN FOUND;
END
$$;
